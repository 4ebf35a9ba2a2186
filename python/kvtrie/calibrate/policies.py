"""The compared policies: ways to build the KV of a prompt, by name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from kvtrie import gates
from kvtrie._core import EXACT_ONLY, ReusePolicy

Mode = Literal["full", "drop", "unrotated", "plan"]

DEFAULT: Final = ("rotated", "rotated+fronts20")
"""The policies that are measured by default. Exact reuse and the controls always are."""

LEAST_RUN: Final = 8
"""No index finds shorter runs."""

KNOWN: Final = (
    "full, exact, drop, unrotated, "
    "rotated[+firstN][+lastN][+runN]"
    "[+frontsP|+ngramsP|+probeP|+questionP|+adaptiveP][+namespace]"
)

_COUNT: Final = r"([1-9]\d{0,8})"
_ROTATED: Final = re.compile(
    rf"rotated(?:\+first{_COUNT})?(?:\+last{_COUNT})?(?:\+run{_COUNT})?"
    r"(?:\+(fronts|ngrams|probe|question|adaptive)([1-9]\d?|100))?(\+namespace)?"
)


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to build the KV of a prompt.

    Attributes:
        name: The name in reports.
        mode: ``"full"`` computes everything. ``"drop"`` computes the prompt without the tokens
            that ``rotated`` reuses approximately. ``"plan"`` carries out a plan, ``"unrotated"``
            without rotating K.
        reuse: What the plans may reuse.
    """

    name: str
    mode: Mode
    reuse: ReusePolicy

    @property
    def can_be_cleared(self) -> bool:
        """Whether a request can ask for it."""
        return self.mode == "plan" and self.reuse.approximate

    @property
    def rotates(self) -> bool:
        """Whether K is rotated where it moves."""
        return self.mode != "unrotated"

    @property
    def is_control(self) -> bool:
        """Whether it shows that the data can detect bad KV. A gate needs one."""
        return self.name in gates.CONTROLS


def policy(name: str, min_run: int = 16) -> Policy:
    """The policy with this name.

    Args:
        name: See ``KNOWN``. ``rotated+first4+run8`` recomputes the first four tokens of every moved
            run and moves runs of eight tokens and more. ``rotated+fronts20`` recomputes 20 per cent
            of the moved tokens, at the fronts of runs; ``+namespace`` also moves runs of other
            conversations.
        min_run: Shortest moved run in tokens, unless the name sets it.

    Raises:
        ValueError: There is no such policy, or the run is below ``LEAST_RUN``.
    """
    found = _ROTATED.fullmatch(name)
    first, last, run = (int(text or 0) for text in found.groups()[:3]) if found else (0, 0, 0)
    if (run or min_run) < LEAST_RUN:
        msg = f"policy {name!r}: moved runs have at least {LEAST_RUN} tokens, not {run or min_run}"
        raise ValueError(msg)
    repair, share, others = found.groups()[3:] if found else (None, None, None)
    moved = ReusePolicy(
        min_run=run or min_run,
        recompute_first=first,
        recompute_last=last,
        repair=repair or "fronts",
        recompute_share=int(share or 0) / 100,
        scope="namespace" if others else "conversation",
    )
    simple = {
        "full": Policy(name, "full", EXACT_ONLY),
        "exact": Policy(name, "plan", EXACT_ONLY),
        "drop": Policy(name, "drop", EXACT_ONLY),
        "unrotated": Policy(name, "unrotated", moved),
    }
    if found is not None:
        return Policy(name, "plan", moved)
    if name not in simple:
        msg = f"unknown policy {name!r} (known: {KNOWN})"
        raise ValueError(msg)
    return simple[name]
