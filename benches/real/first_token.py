"""Time to the first token after an edit, with kvtrie's generator: planning and choosing included.

A conversation is cached, its edited prompt asked for one token. On a CPU times are processor time
of one thread, so that a busy machine does not change them much; on a GPU, the time until it has
nothing left to do.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import figures
import torch

from kvtrie import EXACT_ONLY, ReusePolicy, TokenSequence
from kvtrie.engines._products import is_slow
from kvtrie.engines.transformers import Generator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from real.cases import Tokens

BLOCK: Final = 16
SESSION: Final = "own"
WARM: Final = 256
REPEATS: Final = 3
VERSION: Final = "1"
"""Raised when what is timed changes."""

NOTHING: Final = "nothing cached"
"""Of `rows`: a prompt of which nothing is cached, as in a new conversation."""

POLICIES: Final = {
    "exact": EXACT_ONLY,
    "rotated": ReusePolicy(),
    **{
        f"{name}{per_cent}": ReusePolicy(recompute_share=per_cent / 100, repair=name)
        for per_cent in (20, 32)
        for name in ("fronts", "ngrams", "probe")
    },
}
"""What is compared with exact prefix reuse; ``fronts20`` computes 20 % of what is moved."""


class Clock:
    """A generator in which the conversation of a case is cached.

    Args:
        generator: With room for `room` tokens, ``gate="unchecked"`` and records.
        case: Of one context.
    """

    def __init__(self, generator: Generator, case: Tokens) -> None:
        self._generator = generator
        self._case = case
        # The check of sparse passes is made once, and is no part of a first token.
        some = list(case.contexts[0][:WARM])
        for ids, policy in ((some, EXACT_ONLY), (some[BLOCK:], POLICIES["probe20"])):
            self._first(ids, policy, salt="warm", moved_end=len(ids) - 1)
        self._first(case.contexts[0], EXACT_ONLY)

    def row(self, policy: ReusePolicy, salt: str | None = None) -> dict[str, Any]:
        """The time of one first token, and what was computed for it; nothing is of another salt."""
        ids = self._case.prompt
        before = self._generator.repair_counts.without_records
        began = self._now()
        usage = self._first(ids, policy, salt=salt, moved_end=self._case.moved_end).usage
        seconds = self._now() - began
        self._forget(ids, salt)
        return {
            "tokens": len(ids),
            "exact": usage.exact,
            "moved": usage.moved,
            "computed": usage.computed,
            "seconds": round(seconds, 4),
            "fell_back": self._generator.repair_counts.without_records - before,
        }

    def _first(self, ids: Sequence[int], policy: ReusePolicy, **options: Any) -> Any:  # noqa: ANN401 - a plan and its KV
        return self._generator.generate(
            list(ids), max_new_tokens=1, policy=policy, session=SESSION, **options
        )

    def _now(self) -> float:
        """Seconds; on a GPU once it has done what it was told."""
        if self._generator.pool.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize(self._generator.pool.device)
        return time.perf_counter()

    def _forget(self, ids: Sequence[int], salt: str | None) -> None:
        """Remove the prompt's own blocks, so that the next one finds what this one found."""
        context = self._case.contexts[0]
        shared = next(at for at, (a, b) in enumerate(zip(ids, context, strict=False)) if a != b)
        shared = shared if salt is None else 0
        generator = self._generator
        seq = TokenSequence(list(ids), generator.namespace(salt))
        removed = generator.index.remove_spans(seq, [(shared // BLOCK * BLOCK, len(ids))])
        generator.allocator.free(removed.freed)


def processor() -> str:
    """The processor, and what it has for products: times of others do not stand next to its own."""
    can = torch.backends.cpu.get_cpu_capability()
    if not is_slow(torch.empty(0, dtype=torch.bfloat16)):
        can += " with bfloat16"
    return f"{figures.machine()['cpu']}, {can}"


def room(case: Tokens) -> int:
    """Tokens that a clock needs in its generator."""
    return len(case.contexts[0]) + 2 * len(case.prompt) + 4 * WARM


def rows(
    folder: Path, dtype: str, case: Tokens, wanted: Sequence[str], device: str = "cpu"
) -> Iterator[dict[str, Any]]:
    """A row for each of the named policies or `NOTHING`, which may repeat.

    On a GPU each is run once before, as the first passes of a shape take longer.
    """
    generator = Generator.from_pretrained(
        folder,
        num_blocks=-(-room(case) // BLOCK),
        block_size=BLOCK,
        dtype=dtype,
        device=device,
        gate="unchecked",
        records="model",
    )
    clock = Clock(generator, case)
    ways: dict[str, tuple[ReusePolicy, str | None]] = {
        name: (POLICIES.get(name, EXACT_ONLY), None) for name in wanted
    }
    if NOTHING in ways:
        ways[NOTHING] = (EXACT_ONLY, "nothing is cached here")
    if device != "cpu":
        for way in ways.values():
            clock.row(*way)
    for name in wanted:
        yield clock.row(*ways[name])
