"""Ledgers of models with groups (rule L10): random requests against tables and the naive model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtrie
from kvtrie import BlockInUseError, Group, RadixIndex, SequenceLedger, StaleHandleError
from kvtrie.testing import strategies as kv
from kvtrie.testing.model import ModelIndex

SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
NUM_BLOCKS = 64
SWA = Group.window("swa", window=5, num_blocks=16, block_size=2)
GDN = Group.state("gdn", num_slots=8)


@dataclass
class Naive:
    """A request as its tables by position; the bool says whether an id is the request's own."""

    seq: kvtrie.TokenSequence
    plan: Any
    table: list[int]
    committed: int
    computed: int
    groups: dict[str, dict[int, tuple[int, bool]]]


@dataclass
class World:
    """One ledger and index, and the naive ones, which get the same calls and pools."""

    rng: random.Random
    groups: list[Group]
    size: int
    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))
    live: dict[int, Naive] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ledger = SequenceLedger(self.size, groups=self.groups)
        self.index = RadixIndex(NUM_BLOCKS, self.size, groups=self.groups, moved_runs=False)
        self.model = ModelIndex(NUM_BLOCKS, self.size, groups=self.groups, moved_runs=False)
        self.pools = {group.name: list(range(group.num_blocks)) for group in self.groups}

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def begin(self, name: int) -> None:
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 6 * self.size))]
        seq, twin = (kvtrie.TokenSequence(tokens, SPACE) for _ in range(2))
        plan, model = self.index.plan(seq, keep_last=1), self.model.plan(twin, keep_last=1)
        assert plan.blocks.tolist() == model.blocks.tolist()
        needed = -(-len(tokens) // self.size) + 1 - len(plan.blocks)
        if needed > len(self.free):
            plan.release()
            model.release()
            return
        table = plan.blocks.tolist() + [self.free.pop() for _ in range(needed)]
        held: dict[str, dict[int, tuple[int, bool]]] = {}
        for group in self.groups:
            if group.kind == "state":
                slot = model.state(group.name)
                held[group.name] = {} if slot is None else {model.num_exact: (slot, False)}
                continue
            start, ids = model.group(group.name)
            blocks = enumerate(ids.tolist())
            held[group.name] = {start + at * self.size: (id_, False) for at, id_ in blocks}
        self.ledger.begin(name, seq, table, source=plan)
        end = len(plan.blocks) * self.size
        self.live[name] = Naive(twin, model, table, end, model.num_exact, held)
        self.count("began in place" if end else "began")

    def compute(self, name: int) -> None:
        own = self.live[name]
        to = self.rng.randint(own.computed, len(own.seq))
        self.ledger.schedule(name, to - own.computed)
        self.ledger.confirm(name, to)
        own.computed = to

    def append(self, name: int) -> None:
        own = self.live[name]
        if len(own.seq) < len(own.table) * self.size:
            token = [self.rng.randrange(2)]
            self.ledger.append(name, token)
            own.seq.extend(token)

    def hold(self, name: int) -> None:
        if not self.groups:
            return
        own, group = self.live[name], self.rng.choice(self.groups)
        pool, held = self.pools[group.name], own.groups[group.name]
        is_state = group.kind == "state"
        ends = range(self.size, own.computed + 1, self.size)
        places = ends if is_state else range(0, len(own.table) * self.size, self.size)
        wanted = [at for at in places if at not in held and self.rng.random() < 0.7]
        ids = [(at, pool.pop()) for at in wanted[: len(pool)]]
        self.ledger.hold(name, group.name, ids)
        held.update({at: (id_, True) for at, id_ in ids})
        self.count("held states" if is_state else "held blocks")

    def take(self, own: Naive, group: Group, gone: list[int]) -> list[int]:
        """Take positions out of a table; the request's own ids go back to the pool."""
        entries = [own.groups[group.name].pop(at) for at in gone]
        back = [id_ for id_, is_own in entries if is_own]
        self.pools[group.name] += back
        return back

    def advance(self, name: int) -> None:
        own, expected = self.live[name], {}
        for group in self.groups:
            window, held = group.num_window_tokens, own.groups[group.name]
            if window is None:
                gone = [at for at in held if at < own.computed and not held[at][1]]
            else:
                gone = [at for at in held if at + self.size <= own.computed - window + 1]
            expected[group.name] = self.take(own, group, sorted(gone))
        own.plan.advance(own.computed)
        left = self.ledger.advance(name, self.index)
        assert {key: ids.tolist() for key, ids in left.items()} == expected
        self.count("advanced")

    def can_continue(self, own: Naive, to: int) -> bool:
        for group in self.groups:
            window, held = group.num_window_tokens, own.groups[group.name]
            if window is None:
                if to and to not in held:
                    return False
            else:
                # Token by token: each of the window is in a block that the request has.
                read = range(max(0, to - window + 1), to)
                if any(at // self.size * self.size not in held for at in read):
                    return False
        return True

    def rollback(self, name: int) -> None:
        own = self.live[name]
        to, drops = self.rng.randint(0, own.computed), self.rng.random() < 0.5
        fits = own.committed <= to and (to == own.computed or self.can_continue(own, to))
        if not fits:
            before = self.dump(name)
            with pytest.raises(ValueError, match="to is"):
                self.ledger.rollback(name, to, drop_blocks=drops)
            assert self.dump(name) == before
            self.count("rollbacks refused")
            return
        back = self.ledger.rollback(name, to, drop_blocks=drops)
        own.computed = to
        keep = -(-to // self.size) if drops else len(own.table)
        cut, own.table = own.table[keep:], own.table[:keep]
        assert back.blocks.tolist() == cut
        expected = {}
        for group in self.groups:
            held = own.groups[group.name]
            if group.kind == "state":
                gone = [at for at in held if at > to]
            else:
                gone = [at for at in held if at >= to] if drops else []
            expected[group.name] = self.take(own, group, sorted(gone))
        assert {key: ids.tolist() for key, ids in back.groups.items()} == expected
        self.count("rolled back")
        # The table has room for the tokens again.
        wanted = -(-len(own.seq) // self.size) + 1 - len(own.table)
        more = cut[: max(0, wanted)]
        self.ledger.add_blocks(name, more)
        own.table += more
        self.free += cut[len(more) :]

    def commit(self, name: int) -> None:
        own = self.live[name]
        end = own.computed - own.computed % self.size
        done = self.ledger.commit(name, self.index)
        if end == own.committed:
            return
        first = own.committed // self.size
        twin = self.model.insert(
            own.seq,
            own.table[first : end // self.size],
            num_computed=end,
            start=own.committed,
            source=own.plan,
        )
        assert done.blocks.tolist() == twin.blocks.tolist()
        assert done.duplicates.tolist() == twin.duplicates.tolist()
        own.table[first : first + len(done.blocks)] = done.blocks.tolist()
        own.committed += len(done.blocks) * self.size
        self.free += [*done.duplicates.tolist(), *done.freed.tolist()]

    def finish(self, name: int) -> None:
        own = self.live.pop(name)
        offers: dict[str, list[tuple[int, int]]] = {}
        rest: dict[str, list[int]] = {}
        for group in self.groups:
            tokens = 0 if group.kind == "state" else self.size
            held = sorted(own.groups[group.name].items())
            mine = [(at, id_) for at, (id_, is_own) in held if is_own]
            offers[group.name] = [item for item in mine if item[0] + tokens <= own.computed]
            rest[group.name] = [id_ for at, id_ in mine if at + tokens > own.computed]
        twin = self.model.insert(
            own.seq,
            own.table[own.committed // self.size :],
            num_computed=own.computed,
            start=own.committed,
            source=own.plan,
            groups=offers,
        )
        own.plan.release()
        done = self.ledger.finish(name, self.index)
        for name_of in ("blocks", "duplicates", "surplus", "freed"):
            assert getattr(done, name_of).tolist() == getattr(twin, name_of).tolist()
        assert list(done.groups) == [group.name for group in self.groups]
        for name_of, ids in done.groups.items():
            same = twin.groups[name_of]
            assert list(ids.blocks) == list(same.blocks)
            assert ids.duplicates.tolist() == same.duplicates.tolist()
            assert ids.surplus.tolist() == [*same.surplus.tolist(), *rest[name_of]]
            self.pools[name_of] += [*ids.duplicates.tolist(), *ids.surplus.tolist()]
            self.count("taken by groups" if any(ids.blocks) else "finished")
        self.free += [*done.duplicates.tolist(), *done.surplus.tolist(), *done.freed.tolist()]

    def forget(self, name: int) -> None:
        own = self.live.pop(name)
        blocks, ids = self.ledger.forget_groups(name)
        assert blocks.tolist() == own.table[own.committed // self.size :]
        self.free += blocks.tolist()
        for group in self.groups:
            held = own.groups[group.name]
            assert ids[group.name].tolist() == self.take(own, group, sorted(held))
        own.plan.release()

    def evict(self) -> None:
        count = self.rng.randint(1, 4)
        for group in [None, *(group.name for group in self.groups)]:
            ids = self.index.evict(count, group=group).tolist()
            assert ids == self.model.evict(count, group=group).tolist()
            (self.free if group is None else self.pools[group]).extend(ids)
        self.free += self.index.take_freed().tolist()
        self.model.take_freed()
        for own in self.groups:
            ids = self.index.take_freed(group=own.name).tolist()
            assert ids == self.model.take_freed(group=own.name).tolist()
            self.pools[own.name] += ids

    def dump(self, name: int) -> object:
        tables = [self.ledger.held(name, group.name).tolist() for group in self.groups]
        positions = (self.ledger.final_range(name), self.ledger.lookahead(name))
        return tables, self.ledger.blocks(name).tolist(), positions, self.index.digest()

    def check(self) -> None:
        self.index.check()
        assert self.index.stats().indexed == self.model.stats().indexed
        for group in self.groups:
            counts, twin = (index.group_stats(group.name) for index in (self.index, self.model))
            for what in ("indexed", "pinned", "evictable", "condemned", "waiting"):
                assert getattr(counts, what) == getattr(twin, what)
            tables = [one.groups[group.name] for one in self.live.values()]
            own = sum(mine for table in tables for _, mine in table.values())
            inside = counts.indexed + counts.condemned + counts.waiting
            assert len(self.pools[group.name]) + own + inside == group.num_blocks
        for name, one in self.live.items():
            assert self.ledger.final_range(name) == (0, one.computed)
            assert self.ledger.blocks(name).tolist() == one.table
            for group in self.groups:
                held = sorted((at, id_) for at, (id_, _) in one.groups[group.name].items())
                assert self.ledger.held(name, group.name).tolist() == [list(item) for item in held]


ON_REQUEST = ("compute", "compute", "append", "hold", "hold", "advance", "rollback", "commit")


def play(world: World, steps: int) -> None:
    try:
        walk(world, steps)
        for name in list(world.live):
            world.finish(name)
        world.check()
    finally:
        for name, own in world.live.items():
            world.ledger.forget_groups(name)
            own.plan.release()


def walk(world: World, steps: int) -> None:
    for _ in range(steps):
        name = world.rng.randrange(3)
        if name not in world.live:
            world.begin(name)
        else:
            call = world.rng.choice((*ON_REQUEST, "finish", "forget", "evict"))
            if call == "evict":
                world.evict()
            else:
                getattr(world, call)(name)
        world.check()


@given(data=st.data(), rng=st.randoms(use_true_random=False), size=st.integers(1, 5))
@settings(deadline=None)
def test_ledger_with_groups_agrees_with_tables_and_model(
    data: st.DataObject, rng: random.Random, size: int
) -> None:
    groups = data.draw(st.just([]) | kv.groups(size))
    play(World(rng, groups, size), 40)


def test_random_requests_reach_every_call() -> None:
    counts: dict[str, int] = {}
    for seed in range(60):
        rng = random.Random(seed)
        window = rng.randint(2, 10)
        groups = [
            Group.window("swa", window=window, num_blocks=16, block_size=2),
            Group.state("gdn", num_slots=8),
            Group.window("far", window=3, num_blocks=16, block_size=2),
        ][: seed % 4]
        world = World(rng, groups, 2)
        play(world, 60)
        for what, count in world.counts.items():
            counts[what] = counts.get(what, 0) + count
    for what in (
        "began in place",
        "held states",
        "held blocks",
        "advanced",
        "rolled back",
        "rollbacks refused",
        "taken by groups",
    ):
        assert counts[what] > 10, what


def begun(*, num_computed: int = 8, **more: Any) -> tuple[SequenceLedger, RadixIndex]:
    index = RadixIndex(num_blocks=16, block_size=2, groups=[SWA, GDN])
    ledger = SequenceLedger(2, groups=[SWA, GDN])
    seq = kvtrie.TokenSequence(range(9), SPACE)
    ledger.begin("a", seq, [10, 11, 12, 13, 14], num_computed=num_computed, **more)
    return ledger, index


@pytest.mark.parametrize(
    ("group", "ids", "error", "message"),
    [
        ("mla", [(0, 1)], ValueError, "there is no group 'mla'; the index has 'swa', 'gdn'"),
        ("swa", [(1, 1)], ValueError, 'group "swa" is given an id at position 1'),
        ("swa", [(10, 1)], ValueError, "inside the table of group 0, which ends at 10"),
        ("swa", [(2, 1), (2, 3)], ValueError, "position 2 after 2; positions must ascend"),
        ("swa", [(0, 16)], ValueError, r"id 16; it must be in \[0, 16\), its pool"),
        ("swa", [(4, 1)], ValueError, 'has an id of group "swa" at position 4'),
        ("swa", [(0, 7)], BlockInUseError, 'id 7 of group "swa" comes twice'),
        ("swa", [(0, 1), (2, 1)], BlockInUseError, 'id 1 of group "swa" comes twice'),
        ("gdn", [(0, 1)], ValueError, 'group "gdn" is given an id at position 0'),
        ("gdn", [(10, 1)], ValueError, "final and computed tokens, which end before at 9"),
    ],
)
def test_wrong_ids_are_refused_and_change_nothing(
    group: str, ids: list[tuple[int, int]], error: type[Exception], message: str
) -> None:
    ledger, _ = begun()
    ledger.hold("a", "swa", [(4, 7)])
    with pytest.raises(error, match=message):
        ledger.hold("a", group, ids)
    assert ledger.held("a", "swa").tolist() == [[4, 7]]
    assert ledger.held("a", "gdn").tolist() == []


def test_rollback_needs_a_state_there_and_the_window_before_it() -> None:
    ledger, index = begun()
    ledger.hold("a", "swa", [(2, 1), (4, 2), (6, 3)])
    ledger.hold("a", "gdn", [(4, 5), (6, 6), (8, 7)])
    with pytest.raises(ValueError, match='no state of group "gdn" there'):
        ledger.rollback("a", to=7)
    with pytest.raises(ValueError, match=r'no block of group "swa" at position 0.*window of 5'):
        ledger.rollback("a", to=4)
    assert ledger.final_range("a") == (0, 8)
    back = ledger.rollback("a", to=6, drop_blocks=True)
    assert {name: ids.tolist() for name, ids in back.groups.items()} == {"swa": [3], "gdn": [7]}
    assert ledger.held("a", "gdn").tolist() == [[4, 5], [6, 6]]
    # From the start, nothing is needed.
    assert ledger.rollback("a", to=0).groups["gdn"].tolist() == [5, 6]
    ledger.forget_groups("a")
    assert index.stats().indexed == 0


def test_committed_blocks_are_pinned_where_a_group_cannot_continue() -> None:
    ledger, index = begun()
    ledger.commit("a", index)
    # No group has anything, so a prompt continues at 0, and yet the request reads its blocks.
    with index.plan(kvtrie.TokenSequence(range(9), SPACE)) as plan:
        assert plan.num_exact == 0
    assert index.evict(16).tolist() == []
    ledger.hold("a", "swa", [(4, 1), (6, 2)])
    ledger.hold("a", "gdn", [(8, 3)])
    done = ledger.finish("a", index)
    assert list(done.groups["swa"].blocks) == [1, 2]
    with index.plan(kvtrie.TokenSequence(range(9), SPACE)) as plan:
        assert (plan.num_exact, plan.state("gdn")) == (8, 3)


def test_a_window_stays_with_its_request_until_it_ends() -> None:
    ledger, index = begun()
    ledger.hold("a", "swa", [(0, 4), (2, 5), (4, 6), (6, 7)])
    ledger.commit("a", index)
    assert index.group_stats("swa").indexed == 0
    assert {name: ids.tolist() for name, ids in ledger.advance("a", index).items()} == {
        "swa": [4, 5],
        "gdn": [],
    }
    done = ledger.finish("a", index)
    assert list(done.groups["swa"].blocks) == [6, 7]


def test_a_request_may_follow_moved_runs_next_to_windows() -> None:
    swa = Group.window("swa", window=5, num_blocks=16, block_size=4)
    index = RadixIndex(num_blocks=32, block_size=4, groups=[swa], min_run=8)
    seq = kvtrie.TokenSequence(range(32), SPACE)
    offers = {"swa": [(4 * block, block) for block in range(8)]}
    index.insert(seq, range(8), num_computed=32, source=kvtrie.COMPUTED, groups=offers)
    prompt = kvtrie.TokenSequence([*range(4), *range(12, 32), 99], SPACE)
    plan = index.plan(prompt, kvtrie.ReusePolicy(scope="namespace"))
    ledger = SequenceLedger(4, groups=[swa])
    table = [*plan.blocks.tolist(), *range(20, 27)][:7]
    ledger.begin("a", prompt, table, source=plan)
    missing = ledger.missing("a").tolist()
    assert plan.num_approximate
    assert missing
    start, ids = plan.group("swa")
    assert ledger.held("a", "swa").tolist() == [[start, id_] for id_ in ids.tolist()]
    ledger.hold("a", "swa", [(16, 10), (20, 11), (24, 12)])
    ledger.schedule("a", sum(end - first for first, end in missing))
    ledger.confirm("a", len(prompt))
    done = ledger.finish("a", index)
    # What comes after moved runs is approximate, and no group takes it.
    assert list(done.groups["swa"].blocks) == [None, None]
    assert done.groups["swa"].surplus.tolist() == [10, 11, 12]


def test_other_groups_are_refused_by_name() -> None:
    ledger, _ = begun()
    other = RadixIndex(num_blocks=16, block_size=2, groups=[SWA])
    before = other.digest()
    for call in (ledger.commit, ledger.finish, ledger.advance):
        with pytest.raises(ValueError, match='no group where the ledger has group "gdn"'):
            call("a", other)
    assert other.digest() == before
    with (
        other.plan(kvtrie.TokenSequence(range(9), SPACE)) as plan,
        pytest.raises(ValueError, match="1 groups besides group 0, the ledger has 2"),
    ):
        ledger.begin("b", kvtrie.TokenSequence(range(9), SPACE), range(5), source=plan)
    with pytest.raises(ValueError, match="group 'swa' besides group 0; forget_groups returns"):
        ledger.forget("a")
    with pytest.raises(ValueError, match='two groups of the name "swa"'):
        SequenceLedger(2, groups=[SWA, SWA])


def test_a_released_plan_ends_with_all_ids_given_back() -> None:
    index = RadixIndex(num_blocks=16, block_size=2, groups=[SWA, GDN])
    ledger = SequenceLedger(2, groups=[SWA, GDN])
    seq = kvtrie.TokenSequence(range(9), SPACE)
    plan = index.plan(seq)
    ledger.begin("a", seq, range(5), source=plan)
    ledger.hold("a", "swa", [(0, 4)])
    plan.release()
    with pytest.raises(StaleHandleError):
        ledger.advance("a", index)
    done = ledger.finish("a", index)
    assert done.groups["swa"].surplus.tolist() == [4]


def test_a_finish_keeps_windows_and_states_of_stops_longest() -> None:
    """Without stops, what is before them leaves first: no prompt was said to continue there."""
    for stops in ([], [4]):
        index = RadixIndex(num_blocks=16, block_size=2, groups=[SWA])
        ledger = SequenceLedger(2, groups=[SWA])
        seq = kvtrie.TokenSequence(range(12), SPACE)
        ledger.begin("a", seq, [10, 11, 12, 13, 14, 15], num_computed=12)
        ledger.hold("a", "swa", [(at, at // 2) for at in range(0, 12, 2)])
        ledger.finish("a", index, stops=stops)
        # The window before 12 is in blocks 4 and 5, the one before 4 in blocks 0 and 1.
        first = index.evict(4, group="swa").tolist()
        assert first == ([3, 2, 5, 4] if stops else [3, 2, 1, 0])


def test_wrong_stops_of_a_finish_leave_the_request() -> None:
    ledger, index = begun()
    with pytest.raises(ValueError, match="stops has 3; it must be a multiple of the block size 2"):
        ledger.finish("a", index, stops=[3])
    assert "a" in ledger
    ledger.finish("a", index, stops=[2, 4])


@given(rng=st.randoms(use_true_random=False))
def test_ids_held_in_any_order_are_as_held_at_once(rng: random.Random) -> None:
    ledger, _ = begun()
    pairs = list(zip(range(0, 10, 2), rng.sample(range(16), 5), strict=True))
    left = rng.sample(pairs, 5)
    while left:
        count = rng.randint(1, len(left))
        part, left = sorted(left[:count]), left[count:]
        ledger.hold("a", "swa", part)
        for at, _ in left:
            with pytest.raises(BlockInUseError, match=f"id {part[0][1]} of group"):
                ledger.hold("a", "swa", [(at, part[0][1])])
    assert ledger.held("a", "swa").tolist() == [list(pair) for pair in pairs]
