"""Collects what was observed, and makes kinds of it.

A row is one conversation, as it is kept on disk: its edit, and for each measured reply what every
way to build the KV did. The kind of a reply under a policy is that of the policy's own plan.
"""

from __future__ import annotations

import base64
import math
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtrie.calibrate.kinds import KINDS
from kvtrie.gates import CONTROLS, Control, Figures, Kind, Measured, Terms
from kvtrie.gates.boxes import find

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from kvtrie.calibrate.policies import Policy
    from kvtrie.gates import Thresholds, Verdict

FLOOR: Final = "exact"
P99: Final = 0.99
_OFTEN: Final = 0.25  # of an edit's replies, so that they are of this kind on purpose
_DIGITS: Final = 9
_NAMES: Final = tuple(KINDS)
_BOXES: Final = tuple(KINDS.values())


@dataclass(frozen=True, slots=True)
class Observed:
    """What one way to build KV did to one reply.

    Attributes:
        kl: KL divergence from full recomputation at each token of the reply.
        agreeing: Tokens at which the likeliest token is the same.
        right: Whether the reply is right; None if it is not judged.
        usage: Prompt tokens that were exact, moved and computed.
        terms: Those of its plan.
    """

    kl: NDArray[np.float32]
    agreeing: int
    right: bool | None
    usage: tuple[int, int, int]
    terms: Terms | None = None

    def row(self) -> list[Any]:
        """As JSON."""
        raw = base64.b64encode(self.kl.astype("<f4").tobytes()).decode("ascii")
        found = None if self.terms is None else list(astuple(self.terms))
        return [raw, self.agreeing, self.right, list(self.usage), found]

    @classmethod
    def of(cls, row: Sequence[Any]) -> Observed:
        """What `row` made."""
        raw, agreeing, right, usage, found = row
        kl = np.frombuffer(base64.b64decode(raw), dtype="<f4")
        return cls(kl, agreeing, right, tuple(usage), None if found is None else Terms(*found))


@dataclass(slots=True)
class _Way:
    """Sums of one way to build KV, over the replies of one kind."""

    kl: list[float] = field(default_factory=list)
    top1: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    positions: list[NDArray[np.float32]] = field(default_factory=list)
    pairs: list[tuple[bool, bool]] = field(default_factory=list)
    usage: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, replies: Sequence[tuple[bool | None, Observed]]) -> None:
        """Add one conversation: its replies of the kind, each with full recomputation's."""
        kl = np.concatenate([one.kl for _, one in replies])
        self.positions.append(kl)
        self.kl.append(float(kl.mean(dtype=np.float64)))
        self.top1.append(sum(one.agreeing for _, one in replies) / len(kl))
        pairs = [(full, bool(one.right)) for full, one in replies if full is not None]
        if pairs:
            self.losses.append(sum(full - own for full, own in pairs) / len(pairs))
        self.pairs += pairs
        self.usage += [one.usage for _, one in replies]

    def figures(self, floor: _Way | None) -> Figures:
        kl = np.sort(np.concatenate(self.positions))
        count = {(a, b): self.pairs.count((a, b)) for a in (True, False) for b in (True, False)}
        exact, moved, computed = (sum(one[at] for one in self.usage) for at in range(3))
        return Figures(
            cases=len(self.kl),
            positions=len(kl),
            kl_mean=math.fsum(self.kl) / len(self.kl),
            # The smallest value that 99 % of the values do not exceed.
            kl_p99=float(kl[max(0, math.ceil(P99 * len(kl)) - 1)]),
            top1=math.fsum(self.top1) / len(self.top1),
            questions=len(self.pairs),
            right_full=count[True, True] + count[True, False],
            lost=count[True, False],
            gained=count[False, True],
            exact=exact,
            moved=moved,
            computed=computed,
            kl_excess=() if floor is None else _differences(self.kl, floor.kl),
            top1_drop=() if floor is None else _differences(floor.top1, self.top1),
            losses=() if floor is None else tuple(self.losses),
        )


def _differences(ones: list[float], others: list[float]) -> tuple[float, ...]:
    return tuple(round(a - b, _DIGITS) for a, b in zip(ones, others, strict=True))


@dataclass(slots=True)
class _Cell:
    """The replies of one kind under one policy."""

    terms: list[Terms] = field(default_factory=list)
    ways: dict[str, _Way] = field(default_factory=dict)

    def add(self, policy: str, steps: Sequence[Mapping[str, Any]]) -> None:
        for name in (policy, FLOOR, *CONTROLS):
            replies = [(step["full"], step["ways"][name]) for step in steps]
            self.ways.setdefault(name, _Way()).add(replies)
        self.terms += [step["ways"][policy].terms for step in steps]

    def kind(self, name: str, policy: str) -> Kind:
        floor = self.ways[FLOOR]
        return Kind(
            name,
            KINDS[name].narrowed(self.terms),
            self.ways[policy].figures(floor),
            floor.figures(None),
            tuple(Control(one, self.ways[one].figures(floor)) for one in CONTROLS),
        )


@dataclass(slots=True)
class Tally:
    """All that was observed so far."""

    policies: Sequence[Policy]
    cells: dict[tuple[str, str], _Cell] = field(default_factory=dict)
    conversations: dict[str, int] = field(default_factory=dict)
    outside: int = 0
    _moved: set[str] = field(default_factory=set)
    _fed: dict[str, dict[tuple[str, str], int]] = field(default_factory=dict)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add one conversation."""
        edit = row["edit"]
        self.conversations[edit] = self.conversations.get(edit, 0) + 1
        steps = [
            {
                "full": step["full"],
                "ways": {name: Observed.of(one) for name, one in step["ways"].items()},
            }
            for step in row["steps"]
        ]
        if steps:
            self._moved.add(edit)
        fed = self._fed.setdefault(edit, {})
        for policy in self.policies:
            found: dict[str, list[Any]] = {}
            for step in steps:
                terms = step["ways"][policy.name].terms
                if terms is None:
                    continue
                number = find(terms, _BOXES)
                if number is None:
                    self.outside += 1
                    continue
                found.setdefault(_NAMES[number], []).append(step)
            for name, its in found.items():
                self.cells.setdefault((policy.name, name), _Cell()).add(policy.name, its)
                fed[policy.name, name] = fed.get((policy.name, name), 0) + 1

    def measured(self) -> tuple[Measured, ...]:
        """Every policy with its kinds, in the order of ``KINDS``."""
        return tuple(
            Measured(
                policy.name,
                policy.reuse,
                tuple(
                    self.cells[policy.name, name].kind(name, policy.name)
                    for name in KINDS
                    if (policy.name, name) in self.cells
                ),
            )
            for policy in self.policies
        )

    def verdicts(self, thresholds: Thresholds) -> dict[tuple[str, str], Verdict]:
        """The verdict on each kind of each policy so far."""
        return {
            (one.name, kind.name): kind.verdict(thresholds)
            for one in self.measured()
            for kind in one.kinds
        }

    def has_moved(self, edit: str) -> bool:
        """Whether a measured prompt of the edit reused anything approximately."""
        return edit in self._moved

    def feeds(self, edit: str) -> list[tuple[str, str]]:
        """The policies and kinds that an edit is measured for."""
        least = _OFTEN * self.conversations.get(edit, 0)
        return [key for key, count in self._fed.get(edit, {}).items() if count >= least]
