"""The loop of an engine, with an abort at every line: no block is lost, and exact KV is exact.

The KV is fake: a slot holds the token, its position and a digest of everything before it, made from
what lies in the slots of the table at the time. So KV of another prefix, an overwritten block or a
copy of the wrong slots shows as a wrong label, and everything computed on top of it is wrong too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtrie
from kvtrie.testing import strategies as kv

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

Label = tuple[Any, int, int]


class AbortError(Exception):
    """What a cancelled request is hit with."""


def labels_of(tokens: Sequence[Any]) -> list[Label]:
    """The right labels of a sequence."""
    context, labels = 0, []
    for position, token in enumerate(tokens):
        context = hash((context, token, position))
        labels.append((token, position, context))
    return labels


def tokens_of(seq: kvtrie.TokenSequence) -> list[Any]:
    """Tokens as KV depends on them: in an item, on what it stands for."""
    tokens: list[Any] = seq[0 : len(seq)].tolist()
    for item in seq.items:
        for position in range(item.start, item.end):
            tokens[position] = (tokens[position], item.digest, position - item.start)
    return tokens


@dataclass
class FakeKV:
    """Slots with labels."""

    block_size: int
    slots: dict[int, Label] = field(default_factory=dict)

    def slot(self, table: Any, position: int) -> int:
        return int(table[position // self.block_size]) * self.block_size + (
            position % self.block_size
        )

    def scrub(self, blocks: Any) -> None:
        """Fresh blocks hold nothing of use."""
        for block in blocks.tolist():
            for offset in range(self.block_size):
                self.slots.pop(block * self.block_size + offset, None)

    def apply(self, moves: Any) -> None:
        """Copy; a source that was overwritten is copied as it is."""
        for source, dest, count, delta in moves.tolist():
            assert delta == 0
            for i in range(count):
                self.slots[dest + i] = self.slots[source + i]

    def compute(self, tokens: Sequence[Any], start: int, end: int, table: Any) -> None:
        """What a forward pass does: each token sees all before it, as it lies in the table."""
        context = 0
        if start:
            context = self.slots[self.slot(table, start - 1)][2]
        for position in range(start, end):
            context = hash((context, tokens[position], position))
            self.slots[self.slot(table, position)] = (tokens[position], position, context)

    def read(self, table: Any, end: int) -> list[Label | None]:
        return [self.slots.get(self.slot(table, position)) for position in range(end)]


class Engine:
    """An index, an allocator and the KV, shared by requests."""

    def __init__(self, num_blocks: int, block_size: int, hash_bits: int = 64) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.index = kvtrie.RadixIndex(num_blocks, block_size, hash_bits=hash_bits)
        self.pool = kvtrie.BlockAllocator(num_blocks)
        self.kv = FakeKV(block_size)
        self.requests: list[Request] = []
        self.known: list[kvtrie.TokenSequence] = []

    def take(self, ids: Any) -> None:
        """What the index hands out is free."""
        self.pool.free(ids)

    def verify(self) -> None:
        """free + held + indexed + condemned = num_blocks, and no exact match is wrong."""
        self.index.check()
        stats = self.index.stats()
        held = sum(len(request.held) for request in self.requests)
        owned = stats.indexed + stats.condemned + stats.waiting
        assert self.pool.num_free + held + owned == self.num_blocks
        for seq in self.known:
            match = self.index.lookup(seq, touch=False)
            expected = labels_of(tokens_of(seq)[: match.num_tokens])
            assert self.kv.read(match.blocks, match.num_tokens) == expected

    def load(self, seq: kvtrie.TokenSequence, exact_until: int) -> None:
        """Bring KV from elsewhere: right up to `exact_until`, of another context behind it."""
        tokens, size = tokens_of(seq), self.block_size
        try:
            blocks = self.pool.allocate(len(tokens) // size, evict_from=self.index)
        except kvtrie.OutOfBlocksError:
            return
        self.kv.scrub(blocks)
        end = len(blocks) * size
        self.kv.compute(tokens, 0, end, blocks)
        for position in range(min(exact_until, end), end):
            self.kv.slots[self.kv.slot(blocks, position)] = (tokens[position], position, -1)
        source = kvtrie.Imported(exact_until=exact_until)
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


class Request:
    """One prompt through the loop; `lines()` pauses behind every line of it."""

    def __init__(self, engine: Engine, prompt: kv.Prompt, answer: Sequence[int]) -> None:
        self.engine = engine
        self.seq = prompt.sequence()
        self.answer = answer
        self.plan: Any = None
        self.fresh: Any = None
        self.table: Any = None
        self.n = 0
        self.done: Any = None
        self.held: set[int] = set()
        self.reused = 0
        engine.requests.append(self)
        engine.known.append(prompt.sequence())

    def got(self, ids: Any) -> None:
        ids = set(ids.tolist())
        assert not ids & self.held
        self.held |= ids

    def free(self, ids: Any) -> None:
        self.engine.pool.free(ids)
        self.held -= set(ids.tolist())

    def inserted(self, done: Any) -> None:
        """What was taken is the index's; what was replaced is ours to free."""
        self.held -= set(done.blocks.tolist())
        self.got(done.freed)

    def lines(self) -> Generator[str]:
        """The loop of API.md, line by line."""
        engine, seq = self.engine, self.seq
        index, pool, size = engine.index, engine.pool, engine.block_size
        yield "begin"
        self.plan = index.plan(seq)
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
        engine.kv.apply(self.plan.moves(self.table))
        yield "apply"
        self.plan.release_sources()
        yield "release_sources"
        self.reused = self.plan.num_exact
        right = labels_of(tokens_of(seq))
        assert engine.kv.read(self.table, self.reused) == right[: self.reused]
        for start, end in self.plan.gaps.tolist():
            for chunk in range(start, end, 3):
                stop = min(end, chunk + 3)
                engine.kv.compute(tokens_of(seq), chunk, stop, self.table)
                yield "compute"
                self.n = stop
                yield "computed"
        self.n = len(seq)
        assert engine.kv.read(self.table, self.n) == right
        self.done = index.insert(seq, self.table, num_computed=self.n, source=self.plan)
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
            engine.kv.compute(tokens_of(seq), self.n, len(seq), self.table)
            yield "decode"
            self.n = len(seq)
            yield "decoded"
            if self.n // size > taken:
                self.done = index.insert(
                    seq,
                    self.table[taken:],
                    num_computed=self.n,
                    start=taken * size,
                    source=self.plan,
                )
                self.inserted(self.done)
                yield "insert more"
                more = len(self.done.blocks)
                self.settle(taken)
                taken += more
                yield "settle more"

    def settle(self, first: int) -> None:
        """The line behind an insert: use what backs the sequence, free what does not."""
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
            # Between an insert and the line behind it: the ids it named are in the table still, so
            # that the insert below names its duplicates again; what it freed is named only once.
            self.free(self.done.freed)
        if self.table is None:
            if self.fresh is not None:
                self.free(self.fresh)
        else:
            done = index.insert(self.seq, self.table, num_computed=self.n, source=self.plan)
            self.inserted(done)
            for ids in (done.duplicates, done.surplus, done.freed):
                self.free(ids)
        assert not self.held
        self.plan.release()
        engine.take(index.take_freed())


def run_until(request: Request, line: int) -> str | None:
    """Run a request up to the pause of that number; the name of it, None where it ended before."""
    for number, name in enumerate(request.lines()):
        request.engine.verify()
        if number == line:
            return name
    return None


def prompt(*ids: int) -> kv.Prompt:
    return kv.Prompt(ids, kv.NAMESPACES[0])


HISTORY = (1, 2, 3, 4, 5, 6, 7, 8)
LINES = 60


@pytest.mark.parametrize("second", ["alone", "beside another"])
@pytest.mark.parametrize("num_blocks", [4, 6, 12])
def test_engine_loop_abort_at_every_line(num_blocks: int, second: str) -> None:
    seen = set()
    for line in range(LINES):
        engine = Engine(num_blocks, 3)
        first = Request(engine, prompt(*HISTORY), [9, 9, 9])
        assert run_until(first, LINES) is None
        first.finish()
        engine.verify()
        other = None
        if second == "beside another":
            other = Request(engine, prompt(*HISTORY[:5], 9), [1, 2])
            run_until(other, 12)
        request = Request(engine, prompt(*HISTORY[:7], 11, 12), [1, 2, 3, 4])
        name = run_until(request, line)
        seen.add(name)
        request.finish()
        engine.verify()
        if other is not None:
            other.finish()
        engine.drain()
        if name is None:
            break
    else:
        pytest.fail(f"the loop has more than {LINES} lines")
    assert {"plan", "allocate", "table", "apply", "compute", "computed"} <= seen or num_blocks == 4


def test_engine_loop_out_of_blocks_evicts_nothing() -> None:
    engine = Engine(3, 2)
    first = Request(engine, prompt(1, 2, 3, 4), [])
    run_until(first, LINES)
    second = Request(engine, prompt(5, 6, 7, 8), [])
    assert run_until(second, LINES) is None
    assert second.table is None
    assert engine.index.lookup(first.seq, touch=False).num_tokens == 4
    second.finish()
    first.finish()
    engine.drain()


def test_engine_loop_reuses_what_it_computed() -> None:
    engine = Engine(16, 4)
    turns = [prompt(*range(10)), prompt(*range(10), 1, 2, 3), prompt(*range(10), 1, 2, 9, 9)]
    reused = []
    for turn in turns:
        request = Request(engine, turn, [])
        run_until(request, LINES)
        request.finish()
        reused.append(request.reused)
    # Whole blocks are inserted: 8 tokens, then 12; the last prompt shares all of these 12.
    assert reused == [0, 8, 12]
    engine.drain()


@given(
    data=st.data(),
    num_blocks=st.integers(2, 24),
    block_size=st.integers(1, 5),
    family=kv.families(max_prompts=6, alphabet=2),
    hash_bits=st.sampled_from([0, 4, 64]),
)
def test_engine_loop_many_requests(  # noqa: PLR0912 - one branch an action
    data: st.DataObject, num_blocks: int, block_size: int, family: list[kv.Prompt], hash_bits: int
) -> None:
    engine = Engine(num_blocks, block_size, hash_bits)
    running: list[tuple[Request, Generator[str]]] = []
    actions = ["start", "go", "go", "go", "abort", "load", "discard", "drop", "finish all"]
    try:
        for _ in range(data.draw(st.integers(1, 30), label="steps")):
            action = data.draw(st.sampled_from(actions), label="action")
            if action == "start":
                chosen = data.draw(st.sampled_from(family), label="prompt")
                answer = data.draw(st.lists(kv.token_ids(2), max_size=6), label="answer")
                request = Request(engine, chosen, answer)
                running.append((request, request.lines()))
            elif action in {"go", "abort"} and running:
                at = data.draw(st.integers(0, len(running) - 1), label="which")
                request, lines = running[at]
                count = data.draw(st.integers(1, 12), label="lines") if action == "go" else 0
                ended = action == "abort"
                for _ in range(count):
                    ended = next(lines, None) is None
                    engine.verify()
                    if ended:
                        break
                if ended:
                    del running[at]
                    if action == "abort":
                        lines.close()
                    request.finish()
            elif action == "load":
                chosen = data.draw(st.sampled_from(family), label="prompt")
                engine.load(chosen.sequence(), data.draw(st.integers(0, 24), label="exact"))
            elif action == "discard":
                ids = st.lists(st.integers(0, num_blocks - 1), max_size=2)
                engine.take(engine.index.discard(data.draw(ids, label="ids")))
            elif action == "drop":
                namespace = data.draw(kv.namespaces(), label="namespace")
                engine.take(engine.index.drop(namespace))
            elif action == "finish all":
                for request, lines in running:
                    lines.close()
                    request.finish()
                    engine.verify()
                running.clear()
            engine.verify()
        engine.drain()
    finally:
        for request in engine.requests:
            if request.plan is not None and not request.plan.released:
                request.plan.release()
