"""Random calls on a ledger, possible and impossible ones, against a list of slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.ledger.naive import NaiveRequest, RefusedError

import kvtrie
from kvtrie import BlockInUseError

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 4
NAMES = st.sampled_from(["a", ("b", 1)])
IDS = st.lists(st.sampled_from([0, 1, 2, 2**32 - 1, -1]), max_size=5)
COUNTS = st.integers(0, 12)
SPACE = kvtrie.Namespace(model="m", salt="machine")


def positions(ranges: np.ndarray) -> list[int]:
    return [at for start, end in ranges.tolist() for at in range(start, end)]


class Ledgers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = kvtrie.SequenceLedger(SIZE)
        self.live: dict[object, NaiveRequest] = {}
        self.index = kvtrie.RadixIndex(4096, SIZE)
        self.next_block = 0

    def fresh(self, count: int) -> list[int]:
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    def dump(self) -> list[object]:
        ledger = self.ledger
        return [
            (
                ledger.sequence(name)[:].tolist(),
                ledger.new_range(name),
                ledger.lookahead(name),
                ledger.missing(name).tolist(),
                ledger.blocks(name).tolist(),
                ledger.labels(name).tolist(),
                ledger.spans(name),
            )
            for name in self.live
        ] + [self.index.digest()]

    def both(self, ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[Any, Any]:
        before = self.dump()
        try:
            expected = theirs()
        except RefusedError:
            try:
                ours()
            except (ValueError, BlockInUseError):
                assert self.dump() == before
                return None, None
            raise AssertionError("the ledger accepted an impossible call") from None
        return ours(), expected

    @initialize()
    def start(self) -> None:
        self.begin("a", 9, [], 3)

    @precondition(lambda self: len(self.live) < 2)
    @rule(
        name=NAMES,
        num_tokens=st.integers(0, 20),
        cuts=st.lists(st.integers(0, 22), max_size=6, unique=True),
        num_blocks=st.integers(0, 8),
    )
    def begin(self, name: object, num_tokens: int, cuts: list[int], num_blocks: int) -> None:
        seq = kvtrie.TokenSequence(np.arange(num_tokens) % 3, SPACE)
        cuts = sorted(cuts)
        missing = list(zip(cuts[::2], cuts[1::2], strict=False))
        naive = NaiveRequest(SIZE, (np.arange(num_tokens) % 3).tolist(), self.fresh(num_blocks))
        gaps = {at for start, end in missing for at in range(start, end)}
        there = [at for at in range(num_tokens) if at not in gaps] if missing else []
        fits = name not in self.live
        fits &= all(end <= num_tokens for _, end in missing)
        fits &= all(at < len(naive.slots) for at in there)
        try:
            self.ledger.begin(name, seq, naive.table, missing=missing or None)
        except ValueError:
            assert not fits
            seq.extend([1])
            return
        assert fits
        for at in there:
            naive.slots[at].present = True
        for slot in naive.slots[: naive.issued]:
            slot.present, slot.issued, slot.claimed = False, True, True
        self.live[name] = naive

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=COUNTS, drafts=st.integers(0, 3))
    def schedule(self, data: st.DataObject, tokens: int, drafts: int) -> None:
        name = data.draw(st.sampled_from(list(self.live)))
        self.both(
            lambda: self.ledger.schedule(name, tokens, num_drafts=drafts),
            lambda: self.live[name].schedule(tokens, drafts),
        )

    @precondition(lambda self: self.live)
    @rule(data=st.data(), ids=IDS)
    def append(self, data: st.DataObject, ids: list[int]) -> None:
        name = data.draw(st.sampled_from(list(self.live)))
        self.both(lambda: self.ledger.append(name, ids), lambda: self.live[name].append(ids))

    def claim(self, data: st.DataObject, name: object) -> int:
        naive = self.live[name]
        low, high = max(0, naive.verified - 1), naive.issued + 1
        return data.draw(st.integers(low, high) | st.just(naive.issued))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.live)))
        to = self.claim(data, name)
        self.both(lambda: self.ledger.confirm(name, to), lambda: self.live[name].confirm(to))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), twice=st.booleans())
    def step(self, data: st.DataObject, twice: bool) -> None:
        names = list(self.live)
        if twice and data.draw(st.integers(0, 5)) == 0:
            names.append(names[0])
        items = [
            (
                data.draw(IDS),
                self.claim(data, name),
                data.draw(COUNTS),
                data.draw(st.integers(0, 2)),
            )
            for name in names
        ]
        ids = [token for item in items for token in item[0]]
        offsets = np.cumsum([0, *(len(item[0]) for item in items)])

        def theirs() -> None:
            if len(set(names)) < len(names):
                raise RefusedError
            done = {}
            for name, item in zip(names, items, strict=True):
                done[name] = naive = NaiveRequest(SIZE, [], [])
                naive.__dict__.update(self.live[name].__dict__)
                naive.tokens = list(naive.tokens)
                naive.step(*item)
            self.live.update(done)

        def ours() -> None:
            self.ledger.step(
                names,
                np.array([item[2] for item in items]),
                np.array([item[1] for item in items]),
                np.array(ids, dtype=np.int64),
                offsets,
                num_drafts=np.array([item[3] for item in items]),
            )

        self.both(ours, theirs)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(0, 10), again=st.booleans())
    def add_blocks(self, data: st.DataObject, count: int, again: bool) -> None:
        name = data.draw(st.sampled_from(list(self.live)))
        blocks = self.fresh(count)
        if again:
            blocks += self.live[name].table[:1] or blocks[:1]
        self.both(
            lambda: self.ledger.add_blocks(name, blocks), lambda: self.live[name].add_blocks(blocks)
        )

    @precondition(lambda self: self.live)
    @rule(data=st.data(), drop=st.booleans())
    def rollback(self, data: st.DataObject, drop: bool) -> None:
        name = data.draw(st.sampled_from(list(self.live)))
        to = data.draw(st.integers(0, self.live[name].issued + 1))
        ours, theirs = self.both(
            lambda: self.ledger.rollback(name, to, drop_blocks=drop),
            lambda: self.live[name].rollback(to, drop_blocks=drop),
        )
        if theirs is not None:
            assert (positions(ours.ranges), ours.blocks.tolist()) == theirs

    @precondition(lambda self: self.live)
    @rule(data=st.data(), last=st.booleans())
    def commit(self, data: st.DataObject, last: bool) -> None:
        name = data.draw(st.sampled_from(list(self.live)))
        naive, seq = self.live[name], self.ledger.sequence(name)
        whole = naive.verified // SIZE
        offered = naive.table[naive.committed // SIZE : whole]
        done = (self.ledger.finish if last else self.ledger.commit)(name, self.index)
        # As many blocks as expected, ours where no other block was first.
        assert len(done.blocks) == len(offered)
        assert set(offered) == {*done.blocks.tolist(), *done.duplicates.tolist()} & set(offered)
        assert self.index.lookup(seq, touch=False).num_tokens >= whole * SIZE
        naive.table[naive.committed // SIZE : whole] = done.blocks.tolist()
        naive.committed = whole * SIZE
        if last:
            assert done.surplus.tolist() == naive.table[whole:]
            del self.live[name]
            seq.extend([7])
        else:
            assert not len(done.surplus)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.live)))
        naive = self.live.pop(name)
        assert self.ledger.forget(name).tolist() == naive.table[naive.committed // SIZE :]

    @invariant()
    def answers_are_those_of_the_slots(self) -> None:
        ledger = self.ledger
        assert len(ledger) == len(self.live)
        for name, naive in self.live.items():
            verified = naive.verified
            assert name in ledger
            assert ledger.sequence(name)[:].tolist() == naive.tokens
            assert ledger.final_range(name) == (0, verified)
            assert ledger.new_range(name) == (naive.committed, verified)
            assert ledger.lookahead(name) == (verified, naive.issued)
            assert positions(ledger.missing(name)) == naive.missing
            assert ledger.blocks(name).tolist() == naive.table
            assert (
                ledger.blocks_for(name, 0, verified).tolist() == naive.table[: -(-verified // SIZE)]
            )


TestLedgers = Ledgers.TestCase
