"""An engine over fake KV that knows what its KV is worth, whatever the index says of it.

A slot holds the token, the position and the whole prefix that it was placed under, whether it was
computed from exact KV of that very prefix, and how often it was placed under another one. Copies
and computation keep that up to date by what lies in the table at the time. So KV of another prefix,
an overwritten block, a copy of the wrong slots, a wrong delta or a label that is too good shows.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from random import Random

    from kvtrie.testing import strategies as kv

EXACT, APPROXIMATE, COMPUTE = range(3)


class WrongKVError(AssertionError):
    """A slot holds something else than was said."""


def tokens_of(seq: kvtrie.TokenSequence) -> list[Any]:
    """Tokens as KV depends on them: in an item, on what it stands for."""
    tokens: list[Any] = seq[0 : len(seq)].tolist()
    for item in seq.items:
        for position in range(item.start, item.end):
            tokens[position] = (tokens[position], item.digest, position - item.start)
    return tokens


class KV(NamedTuple):
    """What one slot holds.

    Attributes:
        token: The token.
        position: Where it was placed: K is turned for this position.
        prefix: A digest of namespace and tokens up to and with it, under which it was placed.
        exact: Whether it was computed there, from exact KV alone.
        hops: How often it was placed under another prefix or position.
    """

    token: Any
    position: int
    prefix: int
    exact: bool
    hops: int

    def copied_to(self, wanted: KV) -> KV:
        """What it is once it is placed where `wanted` would be right."""
        same = self.prefix == wanted.prefix
        return wanted._replace(exact=self.exact and same, hops=self.hops + (not same))


def placed(seq: kvtrie.TokenSequence) -> list[KV]:
    """The right KV of a sequence, computed from scratch."""
    prefix, right = hash(seq.namespace), []
    for position, token in enumerate(tokens_of(seq)):
        prefix = hash((prefix, token, position))
        right.append(KV(token, position, prefix, exact=True, hops=0))
    return right


class FakeKV:
    """Slots, and what a forward pass and a copy make of them."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, KV] = {}

    def slot(self, table: Any, position: int) -> int:
        """The slot of a position."""
        size = self.block_size
        return int(table[position // size]) * size + position % size

    def scrub(self, blocks: Any) -> None:
        """Fresh blocks hold nothing of use."""
        for block in blocks.tolist():
            for offset in range(self.block_size):
                self.slots.pop(block * self.block_size + offset, None)

    def holds(self, slot: int, right: KV, what: str) -> KV:
        """What lies in a slot, which must be there for this token, position and prefix."""
        found = self.slots.get(slot)
        if found is None or found[:3] != right[:3]:
            raise WrongKVError(f"{what}: slot {slot} holds {found}, not {right}")
        return found

    def apply(self, moves: Any, seq: kvtrie.TokenSequence, table: Any) -> None:
        """Copy, each run turned by its delta; a source that was overwritten is copied as it is."""
        right, size = placed(seq), self.block_size
        at = {int(block): place for place, block in enumerate(table)}
        for source, dest, count, delta in moves.tolist():
            first = at[dest // size] * size + dest % size
            if dest // size != (dest + count - 1) // size:
                raise WrongKVError(f"a copy to {dest} leaves its block")
            if source // size != (source + count - 1) // size:
                raise WrongKVError(f"a copy from {source} leaves its block")
            for i in range(count):
                found, wanted = self.slots[source + i], right[first + i]
                if (found.token, found.position + delta) != (wanted.token, wanted.position):
                    raise WrongKVError(f"{found} is moved by {delta} to where {wanted} belongs")
                self.slots[dest + i] = found.copied_to(wanted)

    def compute(self, seq: kvtrie.TokenSequence, start: int, end: int, table: Any) -> None:
        """What a forward pass does: each token sees all before it, as it lies in the table."""
        right = placed(seq)
        exact = True
        for position in range(end):
            slot = self.slot(table, position)
            if position >= start:
                self.slots[slot] = right[position]._replace(exact=exact)
            found = self.holds(slot, right[position], "attention")
            exact = exact and found.exact

    def read(self, seq: kvtrie.TokenSequence, table: Any, start: int, end: int) -> list[KV]:
        """What lies in the table for a range of positions, of which each must be right."""
        right = placed(seq)
        return [
            self.holds(self.slot(table, position), right[position], f"position {position}")
            for position in range(start, end)
        ]


@dataclass
class Engine:
    """An index, an allocator and the KV, shared by requests."""

    num_blocks: int
    block_size: int
    hash_bits: int = 64
    moved_runs: bool = True
    counts: collections.Counter[str] = field(default_factory=collections.Counter)

    def __post_init__(self) -> None:
        self.index = kvtrie.RadixIndex(
            self.num_blocks,
            self.block_size,
            min_run=8,
            moved_runs=self.moved_runs,
            hash_bits=self.hash_bits,
        )
        self.pool = kvtrie.BlockAllocator(self.num_blocks)
        self.kv = FakeKV(self.block_size)
        self.requests: list[Request] = []
        self.known: list[tuple[kvtrie.TokenSequence, list[KV]]] = []

    def take(self, ids: Any) -> None:
        """Blocks that the index gives up are free."""
        self.pool.free(ids)

    def verify(self) -> None:
        """free + held + indexed + condemned = num_blocks, and no exact match is wrong."""
        self.index.check()
        stats = self.index.stats()
        held = sum(len(request.held) for request in self.requests)
        owned = stats.indexed + stats.condemned
        assert self.pool.num_free + held + owned == self.num_blocks
        for seq, right in self.known:
            match = self.index.lookup(seq, touch=False)
            for position in range(match.num_tokens):
                slot = self.kv.slot(match.blocks, position)
                if self.kv.slots.get(slot) != right[position]:
                    found = self.kv.slots.get(slot)
                    raise WrongKVError(f"an exact match answers {found}, not {right[position]}")

    def know(self, seq: kvtrie.TokenSequence) -> None:
        """Check lookups of this sequence from now on."""
        copy = kvtrie.TokenSequence(seq[0 : len(seq)], seq.namespace, items=seq.items)
        self.known.append((copy, placed(copy)))

    def load(self, seq: kvtrie.TokenSequence, exact_until: int, hops: int) -> None:
        """Bring KV from elsewhere: right up to `exact_until`, of another context after it."""
        try:
            blocks = self.pool.allocate(len(seq) // self.block_size, evict_from=self.index)
        except kvtrie.OutOfBlocksError:
            return
        self.kv.scrub(blocks)
        end = len(blocks) * self.block_size
        for position, kv in enumerate(placed(seq)[:end]):
            exact = position < exact_until
            self.kv.slots[self.kv.slot(blocks, position)] = kv._replace(
                exact=exact, hops=0 if exact else hops
            )
        source = kvtrie.Imported(exact_until=exact_until, hops=hops)
        done = self.index.insert(seq, blocks, num_computed=end, source=source)
        for ids in (done.duplicates, done.surplus, done.freed):
            self.take(ids)

    def drain(self) -> None:
        """Finish all requests and evict all: everything is free."""
        for request in list(self.requests):
            request.finish()
        self.verify()
        assert self.index.stats().live_plans == 0
        self.take(self.index.evict(self.num_blocks))
        assert self.pool.num_free == self.num_blocks

    def abandon(self) -> None:
        """Release all plans after a failure, so that none warns."""
        for request in self.requests:
            if request.plan is not None and not request.plan.released:
                request.plan.release()


class Request:
    """One prompt through the loop; `lines()` pauses after every line of it."""

    def __init__(
        self,
        engine: Engine,
        prompt: kv.Prompt,
        answer: Sequence[int],
        policy: kvtrie.ReusePolicy = kvtrie.EXACT_ONLY,
    ) -> None:
        self.engine = engine
        self.seq = prompt.sequence()
        self.answer = answer
        self.policy = policy
        self.plan: Any = None
        self.fresh: Any = None
        self.table: Any = None
        self.n = 0
        self.done: Any = None
        self.held: set[int] = set()
        self.reused = 0
        engine.requests.append(self)
        engine.know(self.seq)

    def source(self) -> Any:
        """The source of the KV in the table."""
        return self.plan

    def got(self, ids: Any) -> None:
        ids = set(ids.tolist())
        assert not ids & self.held
        self.held |= ids

    def free(self, ids: Any) -> None:
        self.engine.pool.free(ids)
        self.held -= set(ids.tolist())

    def inserted(self, done: Any) -> None:
        """The index owns the blocks that it took; the caller frees those that were replaced."""
        self.held -= set(done.blocks.tolist())
        self.got(done.freed)

    def lines(self) -> Generator[str]:
        """The loop of the docs, line by line."""
        engine, seq = self.engine, self.seq
        index, pool, size = engine.index, engine.pool, engine.block_size
        yield "begin"
        self.plan = index.plan(seq, self.policy)
        self.check_plan()
        yield "plan"
        self.n = len(self.plan.blocks) * size
        try:
            self.fresh = pool.allocate(self.plan.num_new_blocks, evict_from=index)
        except kvtrie.OutOfBlocksError:
            return
        self.got(self.fresh)
        engine.kv.scrub(self.fresh)
        yield "allocate"
        self.table = np.concatenate([self.plan.blocks, self.fresh])
        yield "table"
        assert self.plan.validate().all()
        self.check_sources()
        engine.kv.apply(self.plan.moves(self.table), seq, self.table)
        self.check_reused()
        gaps = self.plan.gaps.tolist()
        self.n = gaps[0][0] if gaps else len(seq)
        yield "apply"
        self.plan.release_sources()
        yield "release_sources"
        self.reused = self.plan.num_exact + self.plan.num_approximate
        for i, (start, end) in enumerate(gaps):
            for chunk in range(start, end, 3):
                stop = min(end, chunk + 3)
                engine.kv.compute(seq, chunk, stop, self.table)
                yield "compute"
                self.n = stop
                yield "computed"
            self.n = gaps[i + 1][0] if i + 1 < len(gaps) else len(seq)
        assert self.n == len(seq)
        engine.kv.read(seq, self.table, 0, self.n)
        self.done = index.insert(seq, self.table, num_computed=self.n, source=self.source())
        self.inserted(self.done)
        yield "insert"
        taken = len(self.done.blocks)
        self.settle(0)
        yield "settle"
        yield from self.decode(taken)

    def decode(self, taken: int) -> Generator[str]:
        """The decode loop, with so many blocks inserted."""
        engine, seq = self.engine, self.seq
        index, pool, size = engine.index, engine.pool, engine.block_size
        for token in self.answer:
            seq.extend([token])
            yield "extend"
            if self.n // size == len(self.table):
                try:
                    self.fresh = pool.allocate(1, evict_from=index)
                except kvtrie.OutOfBlocksError:
                    return
                self.got(self.fresh)
                engine.kv.scrub(self.fresh)
                self.table = np.concatenate([self.table, self.fresh])
                yield "grow"
            engine.kv.compute(seq, self.n, len(seq), self.table)
            yield "decode"
            self.n = len(seq)
            yield "decoded"
            if self.n // size > taken:
                self.done = index.insert(
                    seq,
                    self.table[taken:],
                    num_computed=self.n,
                    start=taken * size,
                    source=self.source(),
                )
                self.inserted(self.done)
                yield "insert more"
                more = len(self.done.blocks)
                self.settle(taken)
                taken += more
                yield "settle more"
        engine.know(seq)

    def settle(self, first: int) -> None:
        """The line after an insert: use the blocks that back the sequence, free the others."""
        done, self.done = self.done, None
        self.table[first : first + len(done.blocks)] = done.blocks
        self.free(done.duplicates)
        self.free(done.freed)

    def finish(self) -> None:
        """Finish, abort and preemption alike."""
        engine, index = self.engine, self.engine.index
        engine.requests.remove(self)
        if self.plan is None:
            return
        if self.done is not None:
            # Between an insert and the line after it, its duplicates are still in the table, so the
            # insert below returns them again; freed blocks are returned only once.
            self.free(self.done.freed)
        if self.table is None:
            if self.fresh is not None:
                self.free(self.fresh)
        else:
            done = index.insert(self.seq, self.table, num_computed=self.n, source=self.source())
            self.inserted(done)
            for ids in (done.duplicates, done.surplus, done.freed):
                self.free(ids)
        assert not self.held
        self.plan.release()
        engine.take(index.take_freed())

    # --- checks of the plan -----------------------------------------------------------------

    def label(self, kv: KV, segment: Any, what: str) -> None:
        """A slot as it will be is as exact as its segment says, and moved no more often."""
        if segment["class"] == EXACT and not kv.exact:
            raise WrongKVError(f"{what}: {kv} is said to be exact")
        most = int(segment["hops"])
        if kv.hops > most:
            raise WrongKVError(f"{what}: {kv} is said to have {most} hops")
        if segment["class"] == APPROXIMATE and most > self.policy.max_hops:
            raise WrongKVError(f"{what}: {kv} is used against the policy, by {most} hops")

    def check_plan(self) -> None:
        """Segments cover the prompt once; slots in place have what they say."""
        engine, plan, segments = self.engine, self.plan, self.plan.segments
        edges = [0, *segments["end"].tolist()]
        assert segments["start"].tolist() == edges[:-1]
        assert edges[-1] == len(self.seq)
        assert (segments["delta"] == segments["start"] - segments["old_start"]).all()
        counts = [(segments["class"] == label) for label in range(3)]
        lengths = segments["end"] - segments["start"]
        assert [int(lengths[where].sum()) for where in counts] == [
            plan.num_exact,
            plan.num_approximate,
            plan.num_compute,
        ]
        in_place = len(plan.blocks) * engine.block_size
        for segment in segments[segments["start"] < in_place]:
            for kv in engine.kv.read(self.seq, plan.blocks, segment["start"], segment["end"]):
                self.label(kv, segment, "in place")
        kinds = engine.index.kinds
        forbidden = sum(1 << kinds.index(kind) for kind in self.policy.forbid_kinds)
        assert not (segments["kinds"][segments["class"] == APPROXIMATE] & forbidden).any()
        copied = segments[(segments["start"] >= in_place) & (segments["class"] != COMPUTE)]
        engine.counts.update(
            {
                "plans": 1,
                "plans >= 3 segments": len(segments) >= 3,
                "plans, moved runs": APPROXIMATE in copied["class"],
                "plans, approximate in place": APPROXIMATE
                in segments["class"][segments["start"] < in_place],
                "plans, more than one hop": bool((segments["hops"] > 1).any()),
                "plans, exact after a gap": EXACT in copied["class"][copied["start"] > in_place],
            }
        )

    def check_sources(self) -> None:
        """Every copied slot has the token, the delta and the hops that the plan says."""
        engine, plan, size = self.engine, self.plan, self.engine.block_size
        right = placed(self.seq)
        at = {int(block): place for place, block in enumerate(self.table)}
        read = set()
        for segment in plan.segments:
            start, end = int(segment["start"]), int(segment["end"])
            covered = []
            for source, dest, count, delta in plan.moves(self.table, start, end).tolist():
                read.add(source // size)
                assert delta == segment["delta"]
                for i in range(count):
                    position = at[dest // size] * size + dest % size + i
                    covered.append(position)
                    kv, wanted = engine.kv.slots[source + i], right[position]
                    if (kv.token, kv.position + delta) != (wanted.token, position):
                        raise WrongKVError(f"{kv} is the source of {wanted}, moved by {delta}")
                    self.label(kv.copied_to(wanted), segment, "a source")
            copied = start >= len(plan.blocks) * size and segment["class"] != COMPUTE
            assert covered == (list(range(start, end)) if copied else [])
        assert sorted(read) == plan.source_blocks.tolist()

    def check_reused(self) -> None:
        """After the copies, all reused tokens are in the table, as exact as planned."""
        for segment in self.plan.segments:
            if segment["class"] != COMPUTE:
                start, end = segment["start"], segment["end"]
                for kv in self.engine.kv.read(self.seq, self.table, start, end):
                    self.label(kv, segment, "reused")


class Traffic:
    """Requests, loads and removals of an engine at random, everything verified at every line."""

    ACTIONS = (
        "start",
        "start",
        "go",
        "go",
        "go",
        "go",
        "go",
        "abort",
        "load",
        "tag",
        "discard",
        "mark_dead",
        "remove_spans",
        "finish all",
    )

    def __init__(
        self, rng: Random, engine: Engine, family: Sequence[kv.Prompt], request: Any = Request
    ) -> None:
        self.rng = rng
        self.engine = engine
        self.family = family
        self.request = request
        self.running: list[tuple[Request, Generator[str]]] = []

    def policy(self) -> kvtrie.ReusePolicy:
        """Mostly an approximate one."""
        choice = self.rng.choice
        if self.rng.random() < 0.2:
            return kvtrie.EXACT_ONLY
        return kvtrie.ReusePolicy(
            max_hops=choice([0, 1, 1, 2, 5]),
            max_approximate_share=choice([1.0, 1.0, 1.0, 0.5]),
            recompute_first=choice([0, 0, 1, 3]),
            recompute_last=choice([0, 0, 1, 3]),
            forbid_kinds=choice([(), (), ("reasoning",)]),
            partial_blocks=choice([True, True, True, False]),
        )

    def spans(self, length: int) -> list[tuple[int, int]]:
        """Two ascending ranges."""
        edges = sorted(self.rng.randint(0, length) for _ in range(4))
        return [(edges[0], edges[1]), (edges[2], edges[3])]

    def step(self) -> None:
        """One action."""
        action, engine, rng = self.rng.choice(self.ACTIONS), self.engine, self.rng
        engine.counts[action] += 1
        prompt = rng.choice(self.family)
        seq = rng.choice([prompt.sequence(), *(seq for seq, _ in engine.known)])
        if action == "start" and len(self.running) < 4:
            answer = [rng.randrange(2) for _ in range(rng.randint(0, 6))]
            request = self.request(engine, prompt, answer, self.policy())
            self.running.append((request, request.lines()))
        elif action in {"go", "abort"} and self.running:
            self.go(rng.randrange(len(self.running)), abort=action == "abort")
        elif action == "load":
            engine.load(seq, rng.randint(0, len(seq)), rng.randint(0, 2))
        elif action == "tag":
            engine.index.tag(seq, [kvtrie.Span(*self.spans(len(seq))[0], "reasoning")])
        elif action == "discard":
            ids = [rng.randrange(engine.num_blocks) for _ in range(rng.randint(0, 2))]
            engine.take(engine.index.discard(ids))
        elif action == "mark_dead":
            engine.index.mark_dead(seq, self.spans(len(seq)))
        elif action == "remove_spans":
            ranges, force = self.spans(len(seq)), rng.random() < 0.3
            engine.take(engine.index.remove_spans(seq, ranges, force=force).freed)
        elif action == "finish all" and rng.random() < 0.3:
            if rng.random() < 0.3:
                engine.take(engine.index.drop(seq.namespace))
            while self.running:
                self.go(0, abort=True)
        engine.verify()
        del engine.known[:-12]

    def go(self, which: int, *, abort: bool) -> None:
        """Run a request for some more lines, or end it."""
        request, lines = self.running[which]
        ended = abort
        for _ in range(0 if abort else self.rng.randint(1, 16)):
            ended = next(lines, None) is None
            self.engine.verify()
            if ended:
                break
        if ended:
            del self.running[which]
            lines.close()
            request.finish()
            self.engine.counts["aborts"] += abort

    def run(self, steps: int) -> None:
        """Some steps, then everything drained."""
        try:
            for _ in range(steps):
                self.step()
            self.engine.drain()
        finally:
            for _, lines in self.running:
                lines.close()
            self.engine.abandon()
