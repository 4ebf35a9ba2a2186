"""A call that fails inside has changed nothing, or its handles become unusable.

The error is typed, and the interpreter survives. These tests run on an extension that is built with
failpoints: `make test-failpoints`.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest

import kvtrie
from kvtrie import COMPUTED, _core

if TYPE_CHECKING:
    from collections.abc import Callable

if not hasattr(_core, "_arm_failpoint"):
    pytest.skip(
        "the extension is built without failpoints: make test-failpoints", allow_module_level=True
    )

# A plan of an unusable index cannot be released.
pytestmark = pytest.mark.filterwarnings("ignore:a ReusePlan was collected:ResourceWarning")

arm: Callable[[int, bool], None] = vars(_core)["_arm_failpoint"]
disarm: Callable[[], tuple[str, bool] | None] = vars(_core)["_disarm_failpoint"]

NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
SIZE = 2


class World:
    """An index with a plan, and a ledger with a request that has something to commit."""

    def __init__(self) -> None:
        self.index = kvtrie.RadixIndex(32, SIZE)
        self.pool = kvtrie.BlockAllocator(32)
        self.pool.allocate(12)
        self.seq = kvtrie.TokenSequence([1, 2, 3, 4, 5, 6], NS)
        self.index.insert(self.seq, [0, 1, 2], num_computed=6, source=COMPUTED)
        self.branch = kvtrie.TokenSequence([1, 2, 9, 9], NS)
        self.plan = self.index.plan(self.seq, keep_last=0)
        self.ledger = kvtrie.SequenceLedger(SIZE)
        self.own = kvtrie.TokenSequence([7, 7, 7, 7], NS)
        self.ledger.begin("r", self.own, [5, 6, 7])
        self.ledger.schedule("r", 4)
        self.ledger.confirm("r", 4)

    def state(self) -> tuple[object, ...]:
        return (
            self.index.digest(),
            [len(seq) for seq in (self.seq, self.branch, self.own)],
            self.ledger.final_range("r") if "r" in self.ledger else None,
            self.ledger.new_range("r") if "r" in self.ledger else None,
            self.pool.num_free,
        )

    def release_and_evict(self) -> object:
        self.plan.release()
        return self.index.evict(2)

    def num_unusable(self) -> int:
        probes: list[tuple[str, Callable[[], object]]] = [
            ("the index", self.index.digest),
            ("the ledger", self.ledger.__len__),
            ("the allocator", lambda: self.pool.num_free),
            ("the sequence", self.seq.__len__),
            ("the sequence", self.branch.__len__),
            ("the sequence", self.own.__len__),
        ]
        refused = []
        for what, probe in probes:
            try:
                probe()
            except kvtrie.KvTrieError as error:
                refused.append((what, str(error)))
        why = "is unusable: an earlier call on it ended in an internal error"
        assert refused == [(what, f"{what} {why}") for what, _ in refused]
        return len(refused)


CALLS: dict[str, Callable[[World], Any]] = {
    "insert": lambda w: w.index.insert(w.branch, [0, 3], num_computed=4, source=COMPUTED),
    "lookup": lambda w: w.index.lookup(w.branch),
    "plan": lambda w: w.index.plan(w.branch),
    "release": lambda w: w.plan.release(),
    "release_sources": lambda w: w.plan.release_sources(),
    "evict": World.release_and_evict,
    "discard": lambda w: w.index.discard([2]),
    "mark_dead": lambda w: w.index.mark_dead(w.seq, [(2, 6)]),
    "remove_spans": lambda w: w.index.remove_spans(w.seq, [(2, 6)], force=True),
    "tag": lambda w: w.index.tag(w.seq, [kvtrie.Span(0, 4, "mine")]),
    "drop": lambda w: w.index.drop(NS),
    "reset": lambda w: w.index.reset(),
    "allocate": lambda w: w.pool.allocate(1),
    "free": lambda w: w.pool.free([11]),
    "append": lambda w: w.ledger.append("r", [8]),
    "step": lambda w: w.ledger.step(["r"], [1], [4], [8], [0, 1]),
    "rollback": lambda w: w.ledger.rollback("r", 2),
    "commit": lambda w: w.ledger.commit("r", w.index),
    "finish": lambda w: w.ledger.finish("r", w.index),
    "forget": lambda w: w.ledger.forget("r"),
}
# Those whose first point is between two changes, or that return no error.
WITHOUT_ERRORS = {"drop", "reset", "evict"}


@pytest.mark.parametrize("name", CALLS.keys() - WITHOUT_ERRORS)
def test_a_call_that_fails_changes_nothing(name: str) -> None:
    world = World()
    before = world.state()
    arm(1, False)
    with pytest.raises(kvtrie.KvTrieError, match="a failpoint"):
        CALLS[name](world)
    assert disarm() is not None
    assert world.state() == before
    CALLS[name](world)
    world.index.check()


@pytest.mark.parametrize("name", CALLS)
def test_a_panic_in_a_call_makes_its_handles_unusable_and_no_others(name: str) -> None:
    places: list[str] = []
    for nth in range(1, 100):
        world = World()
        arm(nth, True)
        error: kvtrie.KvTrieError | None = None
        try:
            # A plan that is dropped is released, which is another call.
            result = CALLS[name](world)
        except kvtrie.KvTrieError as caught:
            error = caught
        fired = disarm()
        if fired is None:
            assert error is None
            del result
            break
        places.append(fired[0])
        assert error is not None
        said = f"internal error: {fired[0]}: a failpoint; what the call was working on is unusable"
        assert str(error) in {said, f"{said} (request 'r')"}
        # Each handle that was locked reports that from then on, by its own name.
        assert world.num_unusable() >= 1, fired
        # Freeing a handle cannot fail.
        del world, error
        gc.collect()
        other = World()
        CALLS[name](other)
        other.index.check()
    else:
        pytest.fail(f"{name} has more points than there can be: {places}")
    assert places, "no point was met"
