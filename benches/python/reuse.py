"""What one plan reuses of every workload: `python benches/python/reuse.py`.

An index holds 200 conversations of one workload, 1,000,000 tokens together. The next prompts of 40
are planned, and compared with the most that any choice of pieces could reuse, which
`workloads.ceiling` finds without the index. Conversations have
their own texts, or share boilerplate, plain or repetitive as written text is. Newcomers send their
first prompt, so boilerplate is all that they could reuse.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import figures
from forest import BLOCK_SIZE, QUICK, sequence
from workloads.ceiling import Ceiling, reused
from workloads.populations import population
from workloads.registry import WORKLOADS

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from workloads.documents import Tokens
    from workloads.history import Conversation
    from workloads.registry import Workload

CONVERSATIONS = 20 if QUICK else 200
CACHED = 60_000 if QUICK else 1_000_000
EVERY = 5
NEWCOMERS = CONVERSATIONS // 10
POLICY = kvtrie.ReusePolicy(scope="namespace")
OWN = kvtrie.ReusePolicy()  # the default: moved runs of the own conversation


@dataclass(frozen=True)
class Variant:
    name: str
    text: str = "uniform"
    shared: bool = False
    newcomers: bool = False


VARIANTS = (
    Variant("own texts"),
    Variant("shared boilerplate", shared=True),
    Variant("shared boilerplate, repetitive texts", text="worded", shared=True),
    Variant("shared boilerplate, newcomers", shared=True, newcomers=True),
)


COMPLETE = 0.98


@dataclass
class Tally:
    """What plans reused of some prompts, in tokens.

    `exact` are in the whole blocks of the exact prefix; `possible` is the most that plans could
    reuse, and `found` what they do in the whole namespace; `own` and `no_id` are what they reuse
    under the default scope, with the conversation's id and without any. `lowest` is the lowest
    share of one prompt; `incomplete` counts prompts of which less than `COMPLETE` of that is reused
    though no place was dropped: pieces are taken from left to right (rule P5), and another choice
    may cover more.
    """

    prompts: int = 0
    tokens: int = 0
    exact: int = 0
    possible: int = 0
    found: int = 0
    own: int = 0
    no_id: int = 0
    dropped: int = 0
    pieces: int = 0
    lowest: float = 1.0
    incomplete: list[int] = field(default_factory=list)

    def add(self, index: kvtrie.RadixIndex, ceiling: Ceiling, prompt: Tokens, session: str) -> None:
        """Plan one more prompt, of this conversation."""
        reach = ceiling.of(prompt, keep_last=1)
        with index.plan(sequence(prompt), POLICY) as plan:
            segments = plan.segments
            dropped = plan.candidates_dropped
            blocks = plan.blocks.size
        mask = reused(segments, len(prompt))
        nowhere = np.flatnonzero(mask & ~reach.mask)
        if nowhere.size:
            message = f"reuse: a plan reuses {nowhere[:8]}, cached nowhere"
            raise RuntimeError(message)
        share = int(np.count_nonzero(mask)) / max(1, reach.most)
        if share > 1:
            message = f"reuse: a plan reuses more than the most that could be, {reach.most} tokens"
            raise RuntimeError(message)
        if share < COMPLETE and not dropped:
            self.incomplete.append(self.prompts)
        self.prompts += 1
        self.tokens += len(prompt)
        self.exact += blocks * BLOCK_SIZE
        self.possible += reach.most
        self.found += int(np.count_nonzero(mask))
        self.own += reused_under_default(index, prompt, session)
        self.no_id += reused_under_default(index, prompt, None)
        self.dropped += dropped
        self.pieces += int(np.count_nonzero(segments["class"] == 1))
        self.lowest = min(self.lowest, share)

    def merge(self, other: Tally) -> None:
        """Count the prompts of another tally too."""
        self.prompts += other.prompts
        self.tokens += other.tokens
        self.exact += other.exact
        self.possible += other.possible
        self.found += other.found
        self.own += other.own
        self.no_id += other.no_id
        self.dropped += other.dropped
        self.pieces += other.pieces
        self.incomplete += other.incomplete
        self.lowest = min(self.lowest, other.lowest)

    def row(self, work: str) -> figures.Row:
        """The row of a table."""
        return {
            "work": work,
            "unit": "share",
            "kvtrie": round(self.found / max(1, self.possible), 6),
            "lowest": round(self.lowest, 6),
            "exact_of_prompt": round(self.exact / self.tokens, 4),
            "possible_of_prompt": round(self.possible / self.tokens, 4),
            "found_of_prompt": round(self.found / self.tokens, 4),
            "own_of_prompt": round(self.own / self.tokens, 4),
            "no_id_of_prompt": round(self.no_id / self.tokens, 4),
            "prompts": self.prompts,
            "tokens_a_prompt": round(self.tokens / self.prompts),
            "moved_pieces_a_prompt": round(self.pieces / self.prompts, 1),
            "candidates_dropped": self.dropped,
            # Without a dropped candidate everything must be found.
            "incomplete_without_drops": len(self.incomplete),
        }


def reused_under_default(index: kvtrie.RadixIndex, prompt: Tokens, session: str | None) -> int:
    """Tokens that a plan of the default policy reuses."""
    with index.plan(sequence(prompt), OWN, session=session) as plan:
        return int(np.count_nonzero(reused(plan.segments, len(prompt))))


def filled(conversations: Iterable[Conversation]) -> tuple[kvtrie.RadixIndex, Ceiling]:
    every = list(conversations)
    num_blocks = sum(len(each.cached) // BLOCK_SIZE for each in every)
    index = kvtrie.RadixIndex(num_blocks, BLOCK_SIZE, seed=0)
    pool = kvtrie.BlockAllocator(num_blocks)
    for number, each in enumerate(every):
        done = index.insert(
            sequence(each.cached),
            pool.allocate(len(each.cached) // BLOCK_SIZE),
            num_computed=each.num_computed,
            source=kvtrie.COMPUTED,
            session=str(number),
        )
        pool.free(done.duplicates)
        pool.free(done.surplus)
    computed = [each.num_computed for each in every]
    cached = [each.cached for each in every]
    return index, Ceiling(cached, block_size=BLOCK_SIZE, num_computed=computed)


def tallied(workload: Workload, variant: Variant) -> Tally:
    # Newcomers are built with all others, and not cached.
    newcomers = NEWCOMERS if variant.newcomers else 0
    made = population(
        workload,
        conversations=CONVERSATIONS + newcomers,
        cached_tokens=CACHED * (CONVERSATIONS + newcomers) // CONVERSATIONS,
        text=variant.text,
        shared=variant.shared,
    ).conversations
    index, ceiling = filled(made[:CONVERSATIONS])
    tally = Tally()
    asking = range(CONVERSATIONS, len(made)) if newcomers else range(0, len(made), EVERY)
    for number in asking:
        each = made[number]
        tally.add(index, ceiling, each.cached if newcomers else each.prompt, str(number))
    return tally


def measured(names: Iterable[str]) -> Iterator[figures.Row]:
    """The rows of all variants, each workload by itself and then all of them."""
    every = list(names)
    totals = []
    for variant in VARIANTS:
        tallies = []
        for name in every:
            workload = WORKLOADS[name]
            tallies.append(tallied(workload, variant))
            row = tallies[-1].row(f"{name} {workload.name}, {variant.name}")
            yield row | {"workload": name, "name": workload.name, "variant": variant.name}
        total = Tally()
        for tally in tallies:
            total.merge(tally)
        totals.append(total)
        row = total.row(f"all workloads, {variant.name}")
        yield row | {"variant": variant.name}
    incomplete = sum(len(total.incomplete) for total in totals)
    yield {
        "work": "all workloads",
        "unit": "prompts",
        "kvtrie": sum(total.prompts for total in totals),
        "incomplete_without_drops": incomplete,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What one plan reuses of every workload.")
    parser.add_argument("--dry-run", action="store_true", help="print the figures only")
    parser.add_argument("--workloads", nargs="+", help="ids of some, which records nothing")
    options = parser.parse_args(arguments)
    rows = []
    for row in measured(options.workloads or WORKLOADS):
        rows.append(row)
        if row["unit"] != "share":
            print(
                f"{row['work']}: {row['incomplete_without_drops']} of {row['kvtrie']:,} prompts "
                f"with less than {COMPLETE:.0%} of what could be reused though nothing was dropped"
            )
            continue
        print(
            f"{row['work']:<84}{row['kvtrie']:>8.2%} of what could be reused"
            f" (lowest {row['lowest']:.2%}), candidates_dropped {row['candidates_dropped']:,}"
        )
    if not (options.dry_run or options.workloads):
        names = ("kvtrie", "numpy")
        figures.record("coverage", rows, {name: version(name) for name in names})


if __name__ == "__main__":
    main()
