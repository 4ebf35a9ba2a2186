"""Blocks removed anywhere, a million times, and every lookup compared with a dictionary.

    python -m tests.property.any_block_removal --removals 1000000

Histories that share prefixes are cached, removed by id, by span and by eviction of what was marked
dead, and inserted again. A lookup is right iff it returns the longest run of exact blocks from
position 0 in a dictionary from whole prefixes to (block, exact). The exit status is 1 when one is
wrong.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from dataclasses import dataclass
from random import Random
from typing import Any

import kvtrie

NAMESPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)


@dataclass
class History:
    seq: kvtrie.TokenSequence
    prefixes: list[int]


class Removals:
    def __init__(self, seed: int, hash_bits: int) -> None:
        rng = Random(seed)
        self.rng = rng
        self.size = rng.choice([1, 2, 4, 16])
        self.num_blocks = rng.choice([64, 128, 256])
        self.index = kvtrie.RadixIndex(
            self.num_blocks, self.size, seed=seed, hash_bits=hash_bits, moved_runs=seed % 2 == 0
        )
        self.numbers: dict[tuple[int, ...], int] = {}
        self.below: dict[int, set[int]] = collections.defaultdict(set)
        self.histories = self.pool(16)
        self.held = list(range(self.num_blocks))
        self.cached: dict[int, tuple[int, bool]] = {}
        self.where: dict[int, int] = {}
        self.counts: collections.Counter[str] = collections.Counter()

    def pool(self, count: int) -> list[History]:
        known: list[list[int]] = []
        for _ in range(count):
            ids: list[int] = []
            if known and self.rng.random() < 0.8:
                ids = self.rng.choice(known)
                ids = ids[: self.rng.randint(0, len(ids))]
            blocks = self.rng.randint(1, 16)
            known.append(ids + [self.rng.randrange(3) for _ in range(blocks * self.size)])
        return [self.history(ids) for ids in known]

    def history(self, ids: list[int]) -> History:
        prefixes: list[int] = []
        for end in range(self.size, len(ids) + 1, self.size):
            number = self.numbers.setdefault(tuple(ids[:end]), len(self.numbers))
            for above in prefixes:
                self.below[above].add(number)
            prefixes.append(number)
        return History(kvtrie.TokenSequence(ids, NAMESPACE), prefixes)

    def gone(self, ids: Any) -> None:
        """These blocks were removed."""
        for block in ids.tolist():
            del self.cached[self.where.pop(block)]
            self.held.append(block)

    def fill(self) -> None:
        history, size = self.rng.choice(self.histories), self.size
        count = len(history.prefixes)
        missing = count - len(self.held)
        if missing > 0:
            self.gone(self.index.evict(missing))
            self.gone(self.index.take_freed())
        offered = [self.held.pop() for _ in range(min(count, len(self.held)))]
        exact_until = len(offered) * size
        source: Any = kvtrie.COMPUTED
        if self.rng.random() < 0.15:
            exact_until = self.rng.randint(0, exact_until)
            source = kvtrie.Imported(exact_until=exact_until)
        done = self.index.insert(
            history.seq, offered, num_computed=len(offered) * size, source=source
        )
        self.held += done.duplicates.tolist() + done.surplus.tolist()
        all_exact, replaced = True, []
        for depth, (number, block) in enumerate(zip(history.prefixes, offered, strict=False)):
            exact = all_exact and (depth + 1) * size <= exact_until
            present = self.cached.get(number)
            if present is None or (exact and not present[1]):
                if present is not None:
                    del self.where[present[0]]
                    replaced.append(present[0])
                self.cached[number] = (block, exact)
                self.where[block] = number
            all_exact = all_exact and self.cached[number][1]
        self.held += replaced
        backing = [self.cached[number][0] for number in history.prefixes[: len(offered)]]
        self.right("insert", done.blocks.tolist(), backing)
        self.right("freed", done.freed.tolist(), replaced)

    def remove(self) -> History:
        """Remove something, and return a history that it may have been part of."""
        history, rng = self.rng.choice(self.histories), self.rng
        roll = rng.random()
        if roll < 0.6:
            chosen = rng.sample(sorted(self.where), min(len(self.where), rng.randint(1, 3)))
            self.counts["removals by id"] += 1
            freed = self.index.discard(chosen)
            self.right("discard", freed.tolist(), chosen)
            self.gone(freed)
        else:
            a, b = sorted(rng.randint(0, len(history.seq)) for _ in range(2))
            first, last = -(-a // self.size), b // self.size
            inside = [number for number in history.prefixes[first:last] if number in self.cached]
            path = set(history.prefixes)
            present = self.cached.keys()
            extended = [number for number in inside if self.below[number] & present - path]
            if roll < 0.85:
                force = rng.random() < 0.5
                self.counts["removals by span"] += 1
                kept = [] if force else extended
                removed = self.index.remove_spans(history.seq, [(a, b)], force=force)
                out = [self.cached[number][0] for number in inside if number not in kept]
                self.right("remove_spans", removed.freed.tolist(), out)
                self.right(
                    "kept", removed.kept.tolist(), [self.cached[number][0] for number in kept]
                )
                self.gone(removed.freed)
            else:
                self.counts["removals by mark and eviction"] += 1
                self.index.mark_dead(history.seq, [(a, b)])
                self.gone(self.index.evict(rng.randint(1, 4)))
        self.gone(self.index.take_freed())
        return history

    def right(self, what: str, answer: Any, expected: Any) -> None:
        self.counts["answers"] += 1
        if answer != expected:
            self.counts["wrong answers"] += 1
            self.counts[f"wrong: {what}"] += 1

    def look(self, history: History) -> None:
        expected = []
        for number in history.prefixes:
            block, exact = self.cached.get(number, (-1, False))
            if not exact:
                break
            expected.append(block)
        match = self.index.lookup(history.seq, touch=self.rng.random() < 0.5)
        self.counts["lookups"] += 1
        self.counts["lookups that end early"] += len(expected) < len(history.prefixes)
        self.counts["blocks found"] += len(expected)
        answer = (match.num_tokens, match.blocks.tolist())
        self.right("lookup", answer, (len(expected) * self.size, expected))

    def step(self) -> None:
        for _ in range(8 if len(self.where) < self.num_blocks // 2 else 0):
            self.fill()
        removed = self.remove()
        self.look(removed)
        self.look(self.rng.choice(self.histories))
        if self.rng.random() < 0.7:
            self.fill()


def run(removals: int, *, first: int = 0, each: int = 20_000) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    for number in range(-(-removals // each)):
        world = Removals(first + number, [64, 8, 4, 0][number % 4])
        for _ in range(min(each, removals)):
            world.step()
        world.index.check()
        counts += world.counts
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--removals", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first index")
    args = parser.parse_args()
    began = time.perf_counter()
    counts = run(args.removals, first=args.first)
    seconds = time.perf_counter() - began
    lines = [f"{counts['wrong answers']} wrong answers of {counts['answers']}, {seconds:.0f} s", ""]
    lines += [f"  {name:<32}{count:>12}" for name, count in sorted(counts.items())]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if counts["wrong answers"] else 0


if __name__ == "__main__":
    sys.exit(main())
