"""Every misuse is refused by name, and the index is what it was: digest, counts and clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import kvtrie
from kvtrie import COMPUTED, EXACT_ONLY, Imported, Item, ReusePolicy, Span
from kvtrie.testing.model import ModelIndex

NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
OTHER = kvtrie.Namespace(model="m", salt="tenant")
COUNTS = (
    "indexed",
    "condemned",
    "waiting",
    "pinned",
    "evictable",
    "approximate",
    "holes",
    "nodes",
    "namespaces",
    "live_plans",
    "clock",
    "unknown_discards",
)


@dataclass
class World:
    """An index with blocks of all states.

    Blocks 0, 1, 2 back `seq`, 3 another; 4 is condemned under `plan`; 5 waits; 6 to 9 are held.
    """

    index: Any
    seq: Any
    other: Any
    plan: Any
    released: Any
    foreign: Any

    def insert(self, blocks: Any = (0, 1, 2), **changes: Any) -> Any:
        seq = changes.pop("seq", self.seq)
        args: dict[str, Any] = {"num_computed": 6, "source": COMPUTED, **changes}
        return self.index.insert(seq, blocks, **args)


@pytest.fixture(params=[kvtrie.RadixIndex, ModelIndex], ids=["index", "model"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    index, another = request.param(10, 2), request.param(10, 2)
    seq = kvtrie.TokenSequence([1, 2, 3, 4, 5, 6], NS)
    other = kvtrie.TokenSequence([1, 2, 7, 7], NS)
    index.insert(seq, [0, 1, 2], num_computed=6, source=COMPUTED)
    index.insert(other, [0, 3], num_computed=4, source=Imported(exact_until=2))
    away = kvtrie.TokenSequence([8, 8, 9, 9], NS)
    index.insert(away, [4, 5], num_computed=4, source=COMPUTED)
    short = index.plan(kvtrie.TokenSequence([8, 8, 9, 9, 1], NS))
    plan = index.plan(
        kvtrie.TokenSequence([8, 8, 1], NS),
        kvtrie.ReusePolicy(approximate=False, partial_blocks=False),
    )
    index.discard([4, 5])
    short.release()
    released = index.plan(seq)
    released.release()
    foreign = another.plan(seq)
    found = World(index, seq, other, plan, released, foreign)
    stats = index.stats()
    assert (stats.indexed, stats.condemned, stats.waiting) == (4, 2, 1)
    yield found
    plan.release()
    foreign.release()


def state(index: Any) -> tuple[int, ...]:
    stats = index.stats()
    return (index.digest(), index.num_evictable, *(getattr(stats, name, 0) for name in COUNTS))


Call = Callable[[World], object]
IN_USE, STALE = kvtrie.BlockInUseError, kvtrie.StaleHandleError

MISUSES: dict[str, tuple[type[Exception], Call]] = {
    # blocks of an insert
    "insert foreign block": (IN_USE, lambda w: w.insert([0, 3, 6])),
    "insert block of another namespace": (
        IN_USE,
        lambda w: w.insert([0], seq=kvtrie.TokenSequence([1, 2], OTHER), num_computed=2),
    ),
    "insert block at a wrong position": (IN_USE, lambda w: w.insert([1, 6, 7])),
    "insert block of a longer path": (
        IN_USE,
        lambda w: w.insert([0, 1], seq=kvtrie.TokenSequence([1, 2], NS), num_computed=2),
    ),
    "insert surplus block in use": (IN_USE, lambda w: w.insert([0, 1, 2, 3])),
    "insert repeated block": (IN_USE, lambda w: w.insert([0, 6, 6])),
    "insert repeated surplus block": (IN_USE, lambda w: w.insert([0, 1, 2, 6, 6])),
    "insert repeated own block": (IN_USE, lambda w: w.insert([0, 1, 2, 0])),
    "insert too few blocks": (ValueError, lambda w: w.insert([0, 1])),
    "insert no blocks": (ValueError, lambda w: w.insert([])),
    "insert block -1": (ValueError, lambda w: w.insert([0, -1, 2])),
    "insert block num_blocks": (ValueError, lambda w: w.insert([0, 10, 2])),
    "insert block 2**32": (ValueError, lambda w: w.insert([0, 2**32, 2])),
    "insert block 2**32 in an array": (ValueError, lambda w: w.insert(np.array([0, 2**32, 2]))),
    "insert block 2**64": (ValueError, lambda w: w.insert([0, 2**64, 2])),
    "insert block -1 in an array": (ValueError, lambda w: w.insert(np.array([0, -1, 2]))),
    "insert float blocks": (TypeError, lambda w: w.insert([0.0, 1.0, 2.0])),
    "insert float array": (TypeError, lambda w: w.insert(np.array([0.0, 1.0, 2.0]))),
    "insert empty float array": (TypeError, lambda w: w.insert(np.array([]), num_computed=0)),
    "insert NaN blocks": (TypeError, lambda w: w.insert([0, float("nan"), 2])),
    "insert bool blocks": (TypeError, lambda w: w.insert([False, True, 2])),
    "insert bool array": (TypeError, lambda w: w.insert(np.array([False, True, True]))),
    "insert 2-D blocks": (ValueError, lambda w: w.insert(np.array([[0, 1, 2]]))),
    "insert None blocks": (TypeError, lambda w: w.insert(None)),
    "insert string blocks": (TypeError, lambda w: w.insert("012")),
    "insert object array": (TypeError, lambda w: w.insert(np.array([0, 1, None]))),
    "insert generator": (TypeError, lambda w: w.insert(i for i in range(3))),
    "insert set": (TypeError, lambda w: w.insert({0, 1, 2})),
    # its other arguments
    "insert num_computed -1": (ValueError, lambda w: w.insert(num_computed=-1)),
    "insert num_computed beyond": (ValueError, lambda w: w.insert(num_computed=7)),
    "insert num_computed 2**64": (ValueError, lambda w: w.insert(num_computed=2**64)),
    "insert num_computed NaN": (TypeError, lambda w: w.insert(num_computed=float("nan"))),
    "insert num_computed float": (TypeError, lambda w: w.insert(num_computed=6.0)),
    "insert num_computed bool": (TypeError, lambda w: w.insert(num_computed=True)),
    "insert num_computed None": (TypeError, lambda w: w.insert(num_computed=None)),
    "insert start -2": (ValueError, lambda w: w.insert(start=-2)),
    "insert start 1": (ValueError, lambda w: w.insert(start=1)),
    "insert start beyond": (ValueError, lambda w: w.insert(start=8)),
    "insert start float": (TypeError, lambda w: w.insert(start=2.0)),
    "insert start bool": (TypeError, lambda w: w.insert(start=False)),
    "insert without source": (
        TypeError,
        lambda w: w.index.insert(w.seq, [0, 1, 2], num_computed=6),
    ),
    "insert source None": (TypeError, lambda w: w.insert(source=None)),
    "insert source string": (TypeError, lambda w: w.insert(source="computed")),
    "insert source class": (TypeError, lambda w: w.insert(source=Imported)),
    "insert released plan": (STALE, lambda w: w.insert(source=w.released)),
    "insert plan of another index": (ValueError, lambda w: w.insert(source=w.foreign)),
    "insert plan of other tokens": (ValueError, lambda w: w.insert(source=w.plan)),
    "insert list for a sequence": (TypeError, lambda w: w.insert(seq=[1, 2, 3, 4, 5, 6])),
    "insert span beyond": (ValueError, lambda w: w.insert(spans=[Span(0, 7, "user")])),
    "insert tuple for a span": (TypeError, lambda w: w.insert(spans=[(0, 2, "user")])),
    "insert too many kinds": (
        ValueError,
        lambda w: w.insert(spans=[Span(0, 1, f"kind {i}") for i in range(58)]),
    ),
    # lookup
    "lookup keep_last -1": (ValueError, lambda w: w.index.lookup(w.seq, keep_last=-1)),
    "lookup keep_last float": (TypeError, lambda w: w.index.lookup(w.seq, keep_last=1.0)),
    "lookup keep_last bool": (TypeError, lambda w: w.index.lookup(w.seq, keep_last=True)),
    "lookup start 1": (ValueError, lambda w: w.index.lookup(w.seq, start=1)),
    "lookup start -2": (ValueError, lambda w: w.index.lookup(w.seq, start=-2)),
    "lookup start beyond": (ValueError, lambda w: w.index.lookup(w.seq, start=8)),
    "lookup touch int": (TypeError, lambda w: w.index.lookup(w.seq, touch=1)),
    "lookup None": (TypeError, lambda w: w.index.lookup(None)),
    "lookup list": (TypeError, lambda w: w.index.lookup([1, 2])),
    # plan
    "plan shorter runs": (ValueError, lambda w: w.index.plan(w.seq, ReusePolicy(min_run=8))),
    "plan policy string": (TypeError, lambda w: w.index.plan(w.seq, "exact")),
    "plan keep_last -1": (ValueError, lambda w: w.index.plan(w.seq, keep_last=-1)),
    "plan keep_last float": (TypeError, lambda w: w.index.plan(w.seq, keep_last=0.5)),
    "plan pin int": (TypeError, lambda w: w.index.plan(w.seq, pin=1)),
    "plan list": (TypeError, lambda w: w.index.plan([1, 2])),
    # plans
    "release twice": (STALE, lambda w: w.released.release()),
    "release_sources after release": (STALE, lambda w: w.released.release_sources()),
    "moves table too short": (ValueError, lambda w: w.plan.moves([])),
    "moves table -1": (ValueError, lambda w: w.plan.moves([-1, 1])),
    "moves table float": (TypeError, lambda w: w.plan.moves([0.0, 1.0])),
    "moves start -1": (ValueError, lambda w: w.plan.moves([6, 7], -1)),
    # leaving
    "evict -1": (ValueError, lambda w: w.index.evict(-1)),
    "evict float": (TypeError, lambda w: w.index.evict(1.0)),
    "evict NaN": (TypeError, lambda w: w.index.evict(float("nan"))),
    "evict bool": (TypeError, lambda w: w.index.evict(True)),
    "evict None": (TypeError, lambda w: w.index.evict(None)),
    "discard -1": (ValueError, lambda w: w.index.discard([0, -1])),
    "discard num_blocks": (ValueError, lambda w: w.index.discard([0, 10])),
    "discard 2**32": (ValueError, lambda w: w.index.discard([0, 2**32])),
    "discard float": (TypeError, lambda w: w.index.discard([0.0])),
    "discard bool": (TypeError, lambda w: w.index.discard([True])),
    "discard int": (TypeError, lambda w: w.index.discard(0)),
    "discard generator": (TypeError, lambda w: w.index.discard(i for i in [0])),
    "drop string": (TypeError, lambda w: w.index.drop("m")),
    "drop None": (TypeError, lambda w: w.index.drop(None)),
    # tags
    "tag span beyond": (ValueError, lambda w: w.index.tag(w.seq, [Span(0, 7, "user")])),
    "tag second span beyond": (
        ValueError,
        lambda w: w.index.tag(w.seq, [Span(0, 2, "new"), Span(0, 7, "user")]),
    ),
    "tag tuple": (TypeError, lambda w: w.index.tag(w.seq, [(0, 2, "user")])),
    "tag too many kinds": (
        ValueError,
        lambda w: w.index.tag(w.seq, [Span(0, 1, f"kind {i}") for i in range(58)]),
    ),
    "tag list": (TypeError, lambda w: w.index.tag([1, 2], [])),
    "tags list": (TypeError, lambda w: w.index.tags([1, 2])),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_and_changes_nothing(world: World, name: str) -> None:
    expected, call = MISUSES[name]
    before = state(world.index)
    kinds = world.index.kinds
    with pytest.raises(expected) as caught:
        call(world)
    assert str(caught.value)
    assert state(world.index) == before
    assert world.index.kinds == kinds
    world.index.check()
    assert [span.kind for span in world.index.tags(world.seq)] == []


def test_errors_form_one_tree() -> None:
    root = kvtrie.KvTrieError
    assert issubclass(root, Exception)
    for error in (
        kvtrie.BlockInUseError,
        kvtrie.OutOfBlocksError,
        kvtrie.StaleHandleError,
        kvtrie.LayoutError,
        kvtrie.UnsupportedRopeError,
    ):
        assert issubclass(error, root)
        assert not issubclass(error, TypeError | ValueError)


WRONG: dict[Callable[..., object], list[tuple[type[Exception], dict[str, Any]]]] = {
    kvtrie.RadixIndex: [
        (ValueError, {"num_blocks": 0}),
        (ValueError, {"num_blocks": -1}),
        (ValueError, {"num_blocks": 2**31 + 1}),
        (ValueError, {"num_blocks": 2**64}),
        (TypeError, {"num_blocks": 8.0}),
        (TypeError, {"num_blocks": True}),
        (TypeError, {"num_blocks": None}),
        (ValueError, {"num_blocks": 8, "block_size": 0}),
        (ValueError, {"num_blocks": 8, "block_size": 4097}),
        (ValueError, {"num_blocks": 8, "block_size": -16}),
        (TypeError, {"num_blocks": 8, "block_size": 16.0}),
        (TypeError, {"num_blocks": 8, "block_size": True}),
        (ValueError, {"num_blocks": 8, "min_run": 7}),
        (TypeError, {"num_blocks": 8, "min_run": 8.5}),
        (ValueError, {"num_blocks": 8, "max_candidates": -1}),
        (TypeError, {"num_blocks": 8, "moved_runs": 1}),
        (ValueError, {"num_blocks": 8, "seed": -1}),
        (ValueError, {"num_blocks": 8, "seed": 2**64}),
        (ValueError, {"num_blocks": 8, "pool_id": b""}),
        (ValueError, {"num_blocks": 8, "pool_id": bytes(65)}),
        (TypeError, {"num_blocks": 8, "pool_id": "pool"}),
        (ValueError, {"num_blocks": 8, "hash_bits": -1}),
        (ValueError, {"num_blocks": 8, "hash_bits": 65}),
        (TypeError, {"num_blocks": 8, "hash_bits": False}),
    ],
    kvtrie.Namespace: [
        (TypeError, {"model": "m"}),
        (TypeError, {"salt": "s"}),
        (ValueError, {"model": "m", "salt": ""}),
        (ValueError, {"model": "", "salt": "s"}),
        (TypeError, {"model": "m", "salt": None}),
        (TypeError, {"model": "m", "salt": 7}),
        (TypeError, {"model": 7, "salt": "s"}),
        (TypeError, {"model": "m", "salt": "s", "adapter": 7}),
    ],
    Imported: [
        (ValueError, {"exact_until": -1}),
        (ValueError, {"exact_until": 0, "hops": -1}),
        (ValueError, {"exact_until": 0, "hops": 32768}),
        (TypeError, {"exact_until": 1.0}),
        (TypeError, {"exact_until": True}),
        (TypeError, {"exact_until": 0, "hops": 1.0}),
        (TypeError, {}),
    ],
    ReusePolicy: [
        (ValueError, {"min_run": 7}),
        (ValueError, {"max_hops": -1}),
        (ValueError, {"max_approximate_share": 1.5}),
        (ValueError, {"max_approximate_share": -0.1}),
        (ValueError, {"max_approximate_share": float("nan")}),
        (ValueError, {"recompute_first": -1}),
        (ValueError, {"recompute_last": -1}),
        (TypeError, {"approximate": 1}),
        (TypeError, {"partial_blocks": None}),
        (TypeError, {"min_run": 8.0}),
        (TypeError, {"forbid_kinds": "user"}),
    ],
}


@pytest.mark.parametrize(
    ("make", "expected", "args"),
    [(make, *case) for make, cases in WRONG.items() for case in cases],
    ids=str,
)
def test_wrong_argument_is_refused(
    make: Callable[..., object], expected: type[Exception], args: dict[str, Any]
) -> None:
    with pytest.raises(expected):
        make(**args)


def test_index_extreme_sizes_are_fine() -> None:
    index = kvtrie.RadixIndex(2**31, 4096)
    seq = kvtrie.TokenSequence([7] * 4096, NS)
    done = index.insert(seq, [2**31 - 1], num_computed=4096, source=COMPUTED)
    assert done.blocks.tolist() == [2**31 - 1]
    assert index.lookup(seq).blocks.tolist() == [2**31 - 1]
    assert index.evict(1).tolist() == [2**31 - 1]
    assert kvtrie.RadixIndex(1, 1).num_blocks == 1


def test_empty_sequences_are_valid() -> None:
    index = kvtrie.RadixIndex(4, 2)
    seq = kvtrie.TokenSequence([], NS)
    assert index.lookup(seq).num_tokens == 0
    with index.plan(seq) as plan:
        assert plan.num_new_blocks == 0
        assert len(plan.segments) == 0
        assert plan.moves([]).tolist() == []
        done = index.insert(seq, [3], num_computed=0, source=plan)
        assert done.surplus.tolist() == [3]
    assert index.tags(seq) == []
    index.tag(seq, [Span(0, 0, "user")])


def test_namespace_is_a_value() -> None:
    args: dict[str, Any] = {
        "model": "m",
        "kv_dtype": "bfloat16",
        "rope": "yarn:4",
        "adapter": "a",
        "salt": "s",
    }
    one, two = kvtrie.Namespace(**args), kvtrie.Namespace(**args)
    assert one == two
    assert hash(one) == hash(two)
    assert repr(one) == repr(two)
    for name, value in args.items():
        assert getattr(one, name) == value
        other = kvtrie.Namespace(**{**args, name: "x"})
        assert other != one
        with pytest.raises(AttributeError):
            setattr(one, name, value)
    shared = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    assert shared.salt is kvtrie.SHARED
    assert shared != kvtrie.Namespace(model="m", salt="SHARED")
    assert one != "m"


@pytest.mark.parametrize(
    ("expected", "args"),
    [
        (ValueError, (2, 1, "user")),
        (ValueError, (-1, 1, "user")),
        (ValueError, (0, 1, "")),
        (TypeError, (0, 1, None)),
        (TypeError, (0, 1.0, "user")),
        (TypeError, (False, 1, "user")),
    ],
    ids=str,
)
def test_span_wrong_argument_is_refused(expected: type[Exception], args: tuple[Any, ...]) -> None:
    index = kvtrie.RadixIndex(4, 2)
    seq = kvtrie.TokenSequence([1, 2, 3, 4], NS)
    with pytest.raises(expected):
        index.tag(seq, [Span(*args)])


def test_span_is_a_value() -> None:
    assert Span(0, 2, "user") == Span(0, 2, "user")
    assert hash(Span(0, 2, "user")) == hash(Span(0, 2, "user"))
    assert Span(0, 2, "user") != Span(0, 2, "answer")
    assert Span(0, 0, "user") != Span(1, 1, "user")


def test_policy_is_a_value() -> None:
    assert ReusePolicy(approximate=False) == EXACT_ONLY
    assert hash(ReusePolicy(approximate=False)) == hash(EXACT_ONLY)
    assert ReusePolicy() != EXACT_ONLY
    assert ReusePolicy().approximate


@pytest.mark.parametrize(
    "items",
    [
        (Item(0, 2, b"a"), Item(1, 3, b"b")),
        (Item(2, 3, b"a"), Item(0, 1, b"b")),
        (Item(3, 5, b"a"),),
    ],
    ids=["overlap", "descending", "beyond the ids"],
)
def test_sequence_wrong_items_are_refused(items: tuple[Item, ...]) -> None:
    with pytest.raises(ValueError, match=r"."):
        kvtrie.TokenSequence([1, 2, 3, 4], NS, items=items)
    seq = kvtrie.TokenSequence([], NS)
    with pytest.raises(ValueError, match=r"."):
        seq.extend([1, 2, 3, 4], items=items)
    assert len(seq) == 0
    assert len(seq.items) == 0


@pytest.mark.parametrize(
    ("expected", "args"),
    [
        (ValueError, (1, 1, b"a")),
        (ValueError, (2, 1, b"a")),
        (ValueError, (-1, 1, b"a")),
        (ValueError, (0, 1, b"")),
        (ValueError, (0, 1, b"x" * 65)),
        (TypeError, (0, 1, "a")),
        (TypeError, (0, True, b"a")),
        (TypeError, (0.0, 1, b"a")),
    ],
    ids=str,
)
def test_item_wrong_argument_is_refused(expected: type[Exception], args: tuple[Any, ...]) -> None:
    with pytest.raises(expected):
        kvtrie.TokenSequence([1, 2, 3, 4], NS, items=(Item(*args),))


def test_sequence_extend_and_truncate() -> None:
    seq = kvtrie.TokenSequence([1, 2, 3], NS, items=(Item(1, 3, b"a"),))
    seq.extend([4, 5], items=(Item(3, 5, b"b"),))
    assert seq[:].tolist() == [1, 2, 3, 4, 5]
    assert seq[:].dtype == np.uint32
    assert (seq[0], seq[4], seq[-1]) == (1, 5, 5)
    assert seq[1:3].tolist() == [2, 3]
    assert seq.namespace == NS
    seq.truncate(4)
    assert [(i.start, i.end, i.digest) for i in seq.items] == [(1, 3, b"a"), (3, 4, b"b")]
    seq.truncate(3)
    assert [(i.start, i.end, i.digest) for i in seq.items] == [(1, 3, b"a")]
    seq.truncate(3)
    assert len(seq) == 3
    misuses: list[tuple[Any, type[Exception]]] = [
        (4, ValueError),
        (-1, ValueError),
        (1.0, TypeError),
        (True, TypeError),
    ]
    for wrong, expected in misuses:
        with pytest.raises(expected):
            seq.truncate(wrong)
    with pytest.raises(IndexError):
        seq[3]
    copy = seq[:]
    copy[0] = 9
    assert seq[0] == 1
    seq.truncate(0)
    assert len(seq) == 0


def test_sequence_failed_extend_changes_nothing() -> None:
    seq = kvtrie.TokenSequence([1, 2], NS)
    refused: list[Any] = [[3, -1], [3, 2**32], [3, True], [3, 4.0], [3, None]]
    for ids in refused:
        with pytest.raises((TypeError, ValueError)):
            seq.extend(ids)
        assert seq[:].tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"."):
        seq.extend([3, 4], items=(Item(1, 3, b"a"),))
    assert seq[:].tolist() == [1, 2]


def test_results_are_arrays_of_the_documented_types() -> None:
    index = kvtrie.RadixIndex(8, 2)
    seq = kvtrie.TokenSequence([1, 2, 3, 4, 5], NS)
    done = index.insert(seq, [0, 1, 2], num_computed=5, source=COMPUTED)
    for ids in (done.blocks, done.duplicates, done.surplus, done.freed, index.take_freed()):
        assert ids.dtype == np.int32
        assert ids.ndim == 1
    assert type(done.num_exact) is int
    match = index.lookup(seq)
    assert match.blocks.dtype == np.int32
    assert type(match.num_tokens) is int
    with index.plan(kvtrie.TokenSequence([1, 2, 3, 9], NS)) as plan:
        assert plan.blocks.dtype == np.int32
        assert plan.source_blocks.dtype == np.int32
        assert plan.gaps.dtype == np.int64
        assert plan.validate().dtype == np.bool_
        segment = plan.segments.dtype
        names = "start end old_start delta class hops kinds position_delta"
        assert segment.names == tuple(names.split())
        formats = [segment[name].str for name in segment.names]
        assert formats == ["<i8", "<i8", "<i8", "<i8", "|u1", "<u2", "<u8", "<i8"]
        moves = plan.moves([0, 7]).dtype
        assert moves.names == ("source_slot", "dest_slot", "num_tokens", "delta")
        assert [moves[name].str for name in moves.names] == ["<i8"] * 4
    for call in (index.evict(0), index.discard([]), index.drop(OTHER), index.reset()):
        assert call.dtype == np.int32
    assert type(index.digest()) is int
    index.check()
