"""Handles: what a released plan returns, weak references, and exceptions of arguments."""

from __future__ import annotations

import functools
import gc
import random
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtrie
from kvtrie import COMPUTED, StaleHandleError
from kvtrie.testing.model import ModelIndex

if TYPE_CHECKING:
    from collections.abc import Callable

NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
INDEXES = pytest.mark.parametrize("make", [kvtrie.RadixIndex, ModelIndex], ids=["index", "model"])
APPROXIMATE = kvtrie.ReusePolicy(scope="namespace")


def cached(make: Any, **options: Any) -> Any:
    index = make(64, 4, min_run=8, **options)
    seq = kvtrie.TokenSequence([*range(100, 132)], NS)
    index.insert(seq, [*range(20, 28)], num_computed=32, source=COMPUTED)
    return index


@pytest.fixture
def index() -> Any:
    return cached(kvtrie.RadixIndex)


def edited() -> kvtrie.TokenSequence:
    """The first two blocks, half of the third, new tokens, and a run that has moved."""
    return kvtrie.TokenSequence([*range(100, 110), 1, 2, 3, *range(115, 130), 4], NS)


@INDEXES
def test_moves_takes_no_table_by_which_others_would_be_overwritten(make: Any) -> None:
    index = cached(make)
    with index.plan(edited(), APPROXIMATE) as plan:
        assert plan.blocks.tolist() == [20, 21]
        right = [20, 21, 40, 41, 42, 43, 44, 45]
        assert len(plan.moves(right)) > 0
        for place in range(2):
            front = right.copy()
            front[place] = 50
            for bounds in ((), (0, 0), (16,), (29, 29)):
                with pytest.raises(ValueError, match="table"):
                    plan.moves(front, *bounds)
        for place in range(2, 8):
            for again in range(place):
                twice = right.copy()
                twice[place] = right[again]
                for bounds in ((), (0, 8)):
                    with pytest.raises(ValueError, match="twice"):
                        plan.moves(twice, *bounds)
            source = right.copy()
            source[place] = int(plan.source_blocks[-1])
            with pytest.raises(ValueError, match="table"):
                plan.moves(source)
            # Before the range, it is not written.
            assert len(plan.moves(source, 0, place * 4)) >= 0


@INDEXES
def test_moves_takes_no_wrong_table_of_a_plan_that_copies_nothing(make: Any) -> None:
    index = cached(make)
    with index.plan(kvtrie.TokenSequence([*range(100, 108), 1, 2], NS)) as plan:
        assert plan.moves([20, 21, 40]).tolist() == []
        for wrong in ([21, 20, 40], [40, 21, 20], [20, 21, 21], [20, 21, 40, 40]):
            with pytest.raises(ValueError, match="table"):
                plan.moves(wrong)


def test_moves_checks_a_large_table_in_one_sort() -> None:
    """A table of 200,000 blocks: a check that compares all pairs would take too long."""
    index = kvtrie.RadixIndex(2**20, 1)
    with index.plan(kvtrie.TokenSequence([*range(200_000)], NS)) as plan:
        table = np.random.default_rng(0).permutation(2**20)[:200_000].astype(np.int32)
        assert plan.moves(table).tolist() == []
        table[-1] = table[0]
        with pytest.raises(ValueError, match=f"table has block {table[0]} twice"):
            plan.moves(table)


NAMES_BLOCKS: dict[str, Callable[[Any], object]] = {
    "blocks": lambda plan: plan.blocks,
    "source_blocks": lambda plan: plan.source_blocks,
    "moves": lambda plan: plan.moves([20, 21, 40, 41, 42, 43, 44, 45]),
    "release": lambda plan: plan.release(),
    "release_sources": lambda plan: plan.release_sources(),
    "recompute": lambda plan: plan.recompute([]),
    "__enter__": lambda plan: plan.__enter__(),
}
OF_GROUPS: dict[str, Callable[[Any], object]] = {
    "group": lambda plan: plan.group("swa"),
    "state": lambda plan: plan.state("gdn"),
    "rebuild": lambda plan: plan.rebuild("swa"),
    "advance": lambda plan: plan.advance(4),
}
STAYS: dict[str, Callable[[Any], object]] = {
    "num_new_blocks": lambda plan: plan.num_new_blocks,
    "num_exact": lambda plan: plan.num_exact,
    "num_approximate": lambda plan: plan.num_approximate,
    "num_compute": lambda plan: plan.num_compute,
    "candidates_dropped": lambda plan: plan.candidates_dropped,
    "moved_end": lambda plan: plan.moved_end,
    "gaps": lambda plan: plan.gaps.tolist(),
    "segments": lambda plan: plan.segments.tolist(),
    "items": lambda plan: plan.items,
    "moved_runs": lambda plan: plan.moved_runs,
    "validate": lambda plan: plan.validate().tolist(),
    "pinned": lambda plan: plan.pinned,
    "__exit__": lambda plan: plan.__exit__(None, None, None),
}


@INDEXES
@pytest.mark.parametrize("pin", [True, False])
def test_a_released_plan_names_no_block_and_says_all_else(make: Any, pin: bool) -> None:
    index = cached(make)
    plan = index.plan(edited(), APPROXIMATE, pin=pin)
    before = {name: ask(plan) for name, ask in STAYS.items() if name != "__exit__"}
    for name in ("blocks", "source_blocks", "moves"):
        NAMES_BLOCKS[name](plan)
    plan.release()
    for name, ask in NAMES_BLOCKS.items():
        with pytest.raises(StaleHandleError, match="released"):
            ask(plan)
        assert plan.released, name
    assert {name: ask(plan) for name, ask in STAYS.items() if name != "__exit__"} == before
    assert STAYS["__exit__"](plan) is None
    with pytest.raises(StaleHandleError):
        index.insert(edited(), [20, 21], num_computed=8, source=plan)


def test_every_attribute_of_a_plan_is_under_the_rule() -> None:
    named = {name for name in vars(kvtrie.ReusePlan) if not name.startswith("_")}
    assert named == {*NAMES_BLOCKS, *STAYS, *OF_GROUPS, "released"} - {"__enter__", "__exit__"}


@pytest.mark.parametrize("name", OF_GROUPS)
def test_a_released_plan_names_nothing_of_groups(name: str) -> None:
    groups = [
        kvtrie.Group.window("swa", window=4, num_blocks=4, block_size=4),
        kvtrie.Group.state("gdn", num_slots=4),
    ]
    plan = kvtrie.RadixIndex(4, 4, groups=groups).plan(edited())
    OF_GROUPS[name](plan)
    plan.release()
    with pytest.raises(StaleHandleError, match="released"):
        OF_GROUPS[name](plan)


def test_the_repr_of_a_released_plan_names_no_block(index: Any) -> None:
    plan = index.plan(edited())
    assert "blocks=[20, 21]" in repr(plan)
    plan.release()
    assert "20" not in repr(plan)
    assert "released=True" in repr(plan)


@INDEXES
def test_validate_after_release_sources_reports_blocks_removed_since(make: Any) -> None:
    index = cached(make)
    plan = index.plan(edited(), APPROXIMATE)
    classes = [(int(row["class"]), int(row["start"])) for row in plan.segments]
    plan.release_sources()
    assert plan.validate().all()
    # Block 24 is copied from, block 20 is in place; the former is no longer pinned.
    assert 24 in plan.source_blocks
    assert index.discard([24]).tolist() == [24]
    assert index.discard([20]).tolist() == []
    gone = [start for (_, start), there in zip(classes, plan.validate(), strict=True) if not there]
    assert gone == [start for label, start in classes if label == 1]
    plan.release()
    gone = [start for (_, start), there in zip(classes, plan.validate(), strict=True) if not there]
    assert gone == [0, *(start for label, start in classes if label == 1)]


@INDEXES
def test_free_held_indexed_and_condemned_are_all_blocks(make: Any) -> None:
    """Read off the fields, after every call of a run that condemns, releases and takes."""
    num_blocks, rng = 16, random.Random(0)
    index, pool = make(num_blocks, 2), kvtrie.BlockAllocator(num_blocks)
    plans: list[Any] = []
    waited = 0
    for turn in range(400):
        held = np.empty(0, np.int32)
        kind = rng.randrange(5)
        if kind == 0 and pool.num_free >= 3:
            seq = kvtrie.TokenSequence([rng.randrange(2) for _ in range(6)], NS)
            held = pool.allocate(3)
            done = index.insert(seq, held, num_computed=6, source=COMPUTED)
            pool.free(done.duplicates)
            held = np.concatenate([done.surplus, done.freed])
        elif kind == 1:
            prompt = [rng.randrange(2) for _ in range(6)]
            plans.append(index.plan(kvtrie.TokenSequence(prompt, NS)))
        elif kind == 2 and plans:
            plans.pop(rng.randrange(len(plans))).release()
        elif kind == 3:
            held = index.discard([rng.randrange(num_blocks) for _ in range(4)])
        elif turn % 7 == 0:
            held = index.take_freed()
        stats = index.stats()
        waited += stats.waiting > 0
        assert pool.num_free + len(held) + stats.indexed + stats.condemned == num_blocks
        assert stats.waiting <= stats.condemned
        pool.free(held)
    assert waited > 10
    for plan in plans:
        plan.release()


def test_handles_can_be_weakly_referenced() -> None:
    index = cached(kvtrie.RadixIndex)
    plan = index.plan(edited())
    plan.release()
    pin = index.pin(index.lookup(edited()))
    pin.release()
    ended: list[str] = []

    def note(name: str, _: object) -> None:
        ended.append(name)

    handles = [index, plan, pin, edited(), kvtrie.BlockAllocator(4), kvtrie.SequenceLedger()]
    handles.append(kvtrie.SlotTable(4, 1))
    watches = [
        weakref.ref(handle, functools.partial(note, type(handle).__name__)) for handle in handles
    ]
    assert [watch() for watch in watches] == handles
    table = weakref.WeakKeyDictionary(dict.fromkeys(handles, 1))
    del index, plan, pin
    handles.clear()
    gc.collect()
    assert [watch() for watch in watches] == [None] * 7
    names = "BlockAllocator Pin RadixIndex ReusePlan SequenceLedger SlotTable TokenSequence"
    assert sorted(ended) == names.split()
    assert not table


class Number:
    """An integer whose `__index__` fails, from its `first` call on."""

    def __init__(self, error: BaseException, value: int = 1, first: int = 1) -> None:
        self.error, self.value, self.first = error, value, first

    def __index__(self) -> int:
        self.first -= 1
        if self.first <= 0:
            raise self.error
        return self.value


class Broken:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __iter__(self) -> Any:
        raise self.error


def moves(index: Any, end: Any) -> None:
    with index.plan(edited()) as plan:
        plan.moves([20], 0, end)


READERS: dict[str, Callable[[Any, Any], object]] = {
    "an argument": lambda index, number: index.lookup(edited(), keep_last=number),
    "an optional argument": moves,
    "an item of a list": lambda index, number: index.discard([0, number]),
    "an item of a tuple": lambda _, number: kvtrie.TokenSequence((0, number), NS),
    "a range": lambda index, number: index.mark_dead(edited(), [(0, number)]),
    "a key": lambda _, number: edited()[number],
    "a constructor": lambda _, number: kvtrie.SequenceLedger(number),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
def test_what_is_not_about_the_argument_stays_what_it_is(
    reader: str, error: type[BaseException], index: Any
) -> None:
    before = index.digest()
    raised = error("stop")
    with pytest.raises(error) as caught:
        READERS[reader](index, Number(raised))
    assert caught.value is raised
    assert index.digest() == before or reader == "an optional argument"


def test_an_interrupt_in_a_second_look_stays_one() -> None:
    """A value beyond 64 bits is asked for its value again."""
    raised = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        cached(kvtrie.RadixIndex).evict(Number(raised, 2**70, first=2))


@pytest.mark.parametrize("reader", ["an argument", "an item of a list", "a range"])
def test_other_exceptions_are_the_cause_of_a_typed_one(reader: str) -> None:
    for error, wanted in ((RuntimeError, TypeError), (ValueError, ValueError)):
        raised = error("broken")
        with pytest.raises(wanted, match=r"RadixIndex\.\w+: \w+.*: broken") as caught:
            READERS[reader](cached(kvtrie.RadixIndex), Number(raised))
        assert caught.value.__cause__ is raised


def test_an_interrupt_while_an_argument_is_iterated_stays_one(index: Any) -> None:
    for call in (
        lambda it: index.tag(edited(), it),
        lambda it: kvtrie.TokenSequence([1], NS, it),
        lambda it: kvtrie.ReusePolicy(forbid_kinds=it),
    ):
        with pytest.raises(KeyboardInterrupt):
            call(Broken(KeyboardInterrupt()))


def plan(index: kvtrie.RadixIndex, *kinds: str, approximate: bool = True) -> None:
    policy = kvtrie.ReusePolicy(approximate=approximate, forbid_kinds=kinds)
    with index.plan(edited(), policy):
        pass


def test_a_kind_that_no_tag_has_is_warned_of_once_with_the_nearest_name(index: Any) -> None:
    said = r"RadixIndex\.plan: .*'raesoning'.* forbids nothing; the nearest kind is 'reasoning'"
    with pytest.warns(UserWarning, match=said) as caught:
        plan(index, "raesoning")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(index, "raesoning")
    # Once per index: another one has not warned yet.
    another = cached(kvtrie.RadixIndex)
    with pytest.warns(UserWarning, match="raesoning"):
        plan(another, "raesoning")
    with pytest.warns(UserWarning, match=r"RadixIndex\.explain: .*'raesoning'"):
        cached(kvtrie.RadixIndex).explain(edited(), kvtrie.ReusePolicy(forbid_kinds=["raesoning"]))
    with pytest.warns(UserWarning, match=r"'\U0001f642\\x00'.* forbids nothing$"):
        plan(index, "\U0001f642\0")


def test_a_kind_that_is_known_or_tagged_later_is_silent(index: Any) -> None:
    policy = kvtrie.ReusePolicy(forbid_kinds=("mine", "reasoning"))
    index.tag(kvtrie.TokenSequence([*range(100, 132)], NS), [kvtrie.Span(0, 4, "mine")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in kvtrie.RadixIndex(1).kinds:
            plan(index, kind)
        index.plan(edited(), policy).release()
        # Nothing is forbidden where all is exact.
        plan(index, "raesoning", approximate=False)


def test_a_plan_whose_warning_is_an_error_was_not_made(index: Any) -> None:
    before = index.digest()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="raesoning"):
            plan(index, "raesoning")
    assert index.stats().live_plans == 0
    assert index.digest() == before
