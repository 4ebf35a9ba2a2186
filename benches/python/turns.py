"""What is left of a turn under each turn policy: `python benches/python/turns.py`.

A turn is cached, and a policy of `kvtrie.tags` closes it; then another request may need as many
blocks as the turn's reasoning fills. The next prompt is planned exactly and approximately. Tokens
are counted; nothing is timed, so the figures are the same on every machine.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import figures
import report
from forest import BLOCK_SIZE, sequence
from workloads.registry import WORKLOADS
from workloads.writer import MARKERS

import kvtrie
from kvtrie import tags

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from workloads.history import Conversation

NAMES = ("W01", "W03", "W10", "W11")
APPROXIMATE = kvtrie.ReusePolicy(scope="namespace")
PROMPT_ALONE = "the prompt alone stays"

POLICIES: dict[str, tags.TurnPolicy | None] = {
    "keep": tags.TurnPolicy(reasoning="keep"),
    "evict_first": tags.TurnPolicy(reasoning="evict_first"),
    "drop": tags.TurnPolicy(reasoning="drop"),
    "keep, preserved": tags.TurnPolicy(thinking="preserved"),
    PROMPT_ALONE: None,
}
"""By name; None removes everything that the last request generated."""


@dataclass(frozen=True)
class Left:
    """What is left of a turn, in tokens.

    `needed` is for another request; `kept` is in the index before the next prompt comes;
    `evicted_dead` are those of `evicted` that the policy had marked. An exact plan of the prompt
    reuses `exact`; an approximate one `approximate_exact` exactly, and `approximate_moved`
    otherwise.
    """

    workload: str
    policy: str
    needed: int
    cached: int
    kept: int
    freed: int
    dead: int
    evicted: int
    evicted_dead: int
    prompt: int
    exact: int
    approximate_exact: int
    approximate_moved: int

    @property
    def reused(self) -> int:
        return self.approximate_exact + self.approximate_moved

    @property
    def exact_compute(self) -> int:
        return self.prompt - self.exact

    @property
    def approximate_compute(self) -> int:
        return self.prompt - self.reused

    def row(self) -> figures.Row:
        """The row of a table; `kvtrie` is what the approximate plan reuses."""
        when = "someone needs blocks" if self.needed else "no one needs blocks"
        return {
            "work": f"{self.workload} {WORKLOADS[self.workload].name}, {self.policy}, {when}",
            "unit": "tokens",
            "kvtrie": self.reused,
            "name": WORKLOADS[self.workload].name,
            **vars(self),
            "exact_compute": self.exact_compute,
            "approximate_compute": self.approximate_compute,
        }


def tagger() -> tags.Tagger:
    """Finds spans by the markers around the texts of workloads."""
    return tags.Tagger.from_ids(
        system=MARKERS["bos"],
        user=MARKERS["user"],
        assistant=MARKERS["assistant"],
        tool=MARKERS["result"],
        end=MARKERS["eos"],
        reasoning=(MARKERS["think"], MARKERS["end_think"]),
        tool_call=(MARKERS["call"], MARKERS["end_call"]),
        newlines=(MARKERS["newline"], MARKERS["blank"]),
    )


@dataclass(frozen=True)
class Finished:
    """A turn that is over, before anything is done about it."""

    name: str
    case: Conversation
    stream: tags.Stream
    asked: int
    needed: int

    @classmethod
    def of(cls, name: str, scale: float = 1.0) -> Finished:
        """The turn of a workload."""
        case = WORKLOADS[name].build(seed=1, scale=scale)
        stream = tagger().stream()
        for token in case.cached:
            stream.feed([int(token)])
        stream.finish()
        # The last request's prompt ends where the assistant's turn begins.
        asked = int(np.flatnonzero(case.cached == MARKERS["assistant"])[-1]) + 1
        reasoning = (each.dropped for each in stream.sections if each.kind == "reasoning")
        needed = sum(_whole_blocks(start, min(end, case.num_computed)) for start, end in reasoning)
        return cls(name, case, stream, asked, needed)

    def left(self, policy: str, *, pressed: bool) -> Left:
        seq = sequence(self.case.cached)
        num_blocks = self.case.num_computed // BLOCK_SIZE
        index = kvtrie.RadixIndex(num_blocks, BLOCK_SIZE, seed=0)
        pool = kvtrie.BlockAllocator(num_blocks)
        index.insert(
            seq,
            pool.allocate(num_blocks),
            num_computed=self.case.num_computed,
            source=kvtrie.COMPUTED,
        )
        chosen = POLICIES[policy]
        if chosen is None:
            freed = index.remove_spans(seq, [(self.asked, len(seq))]).freed
        else:
            freed = chosen.close_turn(index, seq, self.stream).freed
        pool.free(freed)
        closed = index.stats()
        if pressed:
            pool.allocate(self.needed, evict_from=index)
        rest = index.stats()
        exact, _ = self._reused(index, kvtrie.EXACT_ONLY)
        approximate = self._reused(index, APPROXIMATE)
        return Left(
            workload=self.name,
            policy=policy,
            needed=self.needed * BLOCK_SIZE if pressed else 0,
            cached=num_blocks * BLOCK_SIZE,
            kept=rest.indexed * BLOCK_SIZE,
            freed=len(freed) * BLOCK_SIZE,
            dead=closed.dead * BLOCK_SIZE,
            evicted=(closed.indexed - rest.indexed) * BLOCK_SIZE,
            evicted_dead=(closed.dead - rest.dead) * BLOCK_SIZE,
            prompt=len(self.case.prompt),
            exact=exact,
            approximate_exact=approximate[0],
            approximate_moved=approximate[1],
        )

    def _reused(self, index: kvtrie.RadixIndex, policy: kvtrie.ReusePolicy) -> tuple[int, int]:
        with index.plan(sequence(self.case.prompt), policy) as plan:
            return plan.num_exact, plan.num_approximate


def _whole_blocks(start: int, end: int) -> int:
    return max(0, end // BLOCK_SIZE - -(-start // BLOCK_SIZE))


def measured(names: Iterable[str] = NAMES, scale: float = 1.0) -> Iterator[Left]:
    for name in names:
        turn = Finished.of(name, scale)
        for policy in POLICIES:
            for pressed in (False, True):
                yield turn.left(policy, pressed=pressed)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What is left of a turn under each policy.")
    parser.add_argument("--dry-run", action="store_true", help="print the tables only")
    options = parser.parse_args(arguments)
    rows = [left.row() for left in measured()]
    print(report.turns(rows))
    if not options.dry_run:
        names = ("kvtrie", "numpy")
        figures.record("turns", rows, {name: version(name) for name in names})


if __name__ == "__main__":
    main()
