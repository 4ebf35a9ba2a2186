"""An engine over labelled KV (`tests.truth`), which it can verify."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tests.truth.check import APPROXIMATE, EXACT, is_loaded_right, wrong_slots
from tests.truth.labels import LabelledPool, chain

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from random import Random

    from kvtrie.testing import strategies as kv

COMPUTE = 2


class WrongKVError(AssertionError):
    """A slot holds something else than was said."""


class Text(NamedTuple):
    """A sequence as its KV depends on it: its tokens, those of items included, and contexts."""

    tokens: list[Any]
    canon: list[int]
    root: int

    @classmethod
    def of(cls, seq: kvtrie.TokenSequence) -> Text:
        tokens: list[Any] = seq[0 : len(seq)].tolist()
        for item in seq.items:
            for position in range(item.start, item.end):
                tokens[position] = (tokens[position], item.digest, position - item.start)
        root = hash(seq.namespace)
        return cls(tokens, chain(tokens, root), root)


@dataclass
class Engine:
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
        self.kv = LabelledPool(self.num_blocks, self.block_size)
        self.requests: list[Request] = []
        self.known: list[tuple[kvtrie.TokenSequence, Text]] = []

    def take(self, ids: Any) -> None:
        self.pool.free(ids)

    def verify(self) -> None:
        """free + held + indexed + condemned = num_blocks, and no exact match is wrong."""
        self.index.check()
        stats = self.index.stats()
        held = sum(len(request.held) for request in self.requests)
        owned = stats.indexed + stats.condemned
        assert self.pool.num_free + held + owned == self.num_blocks
        for seq, text in self.known:
            match = self.index.lookup(seq, touch=False)
            none = [0] * match.num_tokens
            self.check(text, match.blocks, none, none, "an exact match answers")

    def check(
        self,
        text: Text,
        table: Any,
        classes: Sequence[int],
        hops: Sequence[int],
        what: str,
        start: int = 0,
    ) -> None:
        """Raise unless every slot of a table from `start` on holds what is said of it."""
        slots = self.kv.slots(table.tolist())
        wrong = wrong_slots(
            self.kv, slots, text.tokens, text.canon, classes, hops, root=text.root, start=start
        )
        if wrong:
            raise WrongKVError(f"{what}: {wrong} of {text.tokens} in {slots}")

    def know(self, seq: kvtrie.TokenSequence) -> None:
        copy = kvtrie.TokenSequence(seq[0 : len(seq)], seq.namespace, items=seq.items)
        self.known.append((copy, Text.of(copy)))

    def load(self, seq: kvtrie.TokenSequence, exact_until: int, hops: int) -> None:
        try:
            blocks = self.pool.allocate(len(seq) // self.block_size, evict_from=self.index)
        except kvtrie.OutOfBlocksError:
            return
        end, text = len(blocks) * self.block_size, Text.of(seq)
        slots = self.kv.slots(blocks.tolist())
        self.kv.clear(blocks.tolist())
        self.kv.compute(slots, text.tokens, text.canon, 0, end, root=text.root)
        for slot in slots[exact_until:]:
            self.kv.context[slot] = hash((self.kv.context[slot], "elsewhere"))
            self.kv.hops[slot] = hops
        source = kvtrie.Imported(exact_until=exact_until, hops=hops)
        done = self.index.insert(seq, blocks, num_computed=end, source=source)
        for ids in (done.duplicates, done.surplus, done.freed):
            self.take(ids)

    def drain(self) -> None:
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
        engine.kv.clear(self.fresh.tolist())
        yield "allocate"
        self.table = np.concatenate([self.plan.blocks, self.fresh])
        yield "table"
        assert self.plan.validate().all()
        self.check_sources()
        self.apply()
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
                self.compute(chunk, stop)
                yield "compute"
                self.n = stop
                yield "computed"
            self.n = gaps[i + 1][0] if i + 1 < len(gaps) else len(seq)
        assert self.n == len(seq)
        self.check_computed()
        self.done = index.insert(seq, self.table, num_computed=self.n, source=self.source())
        self.inserted(self.done)
        yield "insert"
        taken = len(self.done.blocks)
        self.settle(0)
        yield "settle"
        yield from self.decode(taken)

    def decode(self, taken: int) -> Generator[str]:
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
                engine.kv.clear(self.fresh.tolist())
                self.table = np.concatenate([self.table, self.fresh])
                yield "grow"
            self.compute(self.n, len(seq))
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

    def apply(self) -> None:
        """Copy; a source that was overwritten is copied as it is."""
        pool, canon, size = self.engine.kv, Text.of(self.seq).canon, self.engine.block_size
        for source, dest, count, delta, at in self.copies(0, len(self.seq)):
            for slot in (source, dest):
                if slot // size != (slot + count - 1) // size:
                    raise WrongKVError(f"{count} slots from {slot} on leave their block")
            pool.load(pool, source, dest, canon[at : at + count], delta)

    def copies(self, start: int, end: int) -> list[tuple[int, int, int, int, int]]:
        size = self.engine.block_size
        at = {int(block): place * size for place, block in enumerate(self.table)}
        moves = self.plan.moves(self.table, start, end).tolist()
        return [(*move, at[move[1] // size] + move[1] % size) for move in moves]

    def compute(self, start: int, end: int) -> None:
        """What a forward pass does: each token sees all before it, as the table holds it."""
        pool, text = self.engine.kv, Text.of(self.seq)
        slots = pool.slots(self.table.tolist())
        pool.compute(slots, text.tokens, text.canon, start, end, root=text.root)
        self.check_computed(end)

    def check_computed(self, end: int | None = None) -> None:
        """Every slot of the table up to a position was placed there for its token."""
        classes = [APPROXIMATE] * (self.n if end is None else end)
        hops = [len(self.seq)] * len(classes)
        self.engine.check(Text.of(self.seq), self.table, classes, hops, "attention")

    def check_segment(self, segment: Any, table: Any, what: str) -> None:
        """A segment's slots are as exact as it says, moved no more often, and allowed."""
        end, most = int(segment["end"]), int(segment["hops"])
        if segment["class"] == APPROXIMATE and most > self.policy.max_hops:
            raise WrongKVError(f"{what}: {segment} is used against the policy, by {most} hops")
        self.engine.check(
            Text.of(self.seq),
            table,
            [int(segment["class"])] * end,
            [most] * end,
            what,
            start=int(segment["start"]),
        )

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
            self.check_segment(segment, plan.blocks, "in place")
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
        text = Text.of(self.seq)
        read = set()
        for segment in plan.segments:
            start, end = int(segment["start"]), int(segment["end"])
            covered: list[int] = []
            for source, _, count, delta, at in self.copies(start, end):
                read.add(source // size)
                assert delta == segment["delta"]
                covered += range(at, at + count)
                canon = text.canon[at : at + count]
                copied = LabelledPool(1, size)
                copied.load(engine.kv, source, 0, canon, delta)
                if not is_loaded_right(
                    copied,
                    0,
                    text.tokens[at : at + count],
                    canon,
                    at,
                    exact=segment["class"] == EXACT,
                    hops=int(segment["hops"]),
                    root=text.root,
                ):
                    raise WrongKVError(f"{count} slots from {source} on are not {segment}")
            is_copied = start >= len(plan.blocks) * size and segment["class"] != COMPUTE
            assert covered == (list(range(start, end)) if is_copied else [])
        assert sorted(read) == plan.source_blocks.tolist()

    def check_reused(self) -> None:
        """After the copies, all reused tokens are in the table, as exact as planned."""
        for segment in self.plan.segments:
            if segment["class"] != COMPUTE:
                self.check_segment(segment, self.table, "reused")


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
        choice = self.rng.choice
        if self.rng.random() < 0.2:
            return kvtrie.EXACT_ONLY
        if self.rng.random() < 0.6:
            # Of one policy, because policies that differ share little approximate KV.
            return kvtrie.ReusePolicy(max_hops=5, scope="namespace")
        return kvtrie.ReusePolicy(
            max_hops=choice([0, 1, 1, 2, 5]),
            scope="namespace",
            max_approximate_share=choice([1.0, 1.0, 1.0, 0.5]),
            recompute_first=choice([0, 0, 1, 3]),
            recompute_last=choice([0, 0, 1, 3]),
            forbid_kinds=choice([(), (), ("reasoning",)]),
            partial_blocks=choice([True, True, True, False]),
        )

    def spans(self, length: int) -> list[tuple[int, int]]:
        edges = sorted(self.rng.randint(0, length) for _ in range(4))
        return [(edges[0], edges[1]), (edges[2], edges[3])]

    def step(self) -> None:
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
        try:
            for _ in range(steps):
                self.step()
            self.engine.drain()
        finally:
            for _, lines in self.running:
                lines.close()
            self.engine.abandon()
