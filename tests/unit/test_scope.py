"""Sessions, scope and `moved_end` at the boundary to Python (P18)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import kvtrie
from kvtrie.testing.model import ModelIndex

if TYPE_CHECKING:
    from collections.abc import Callable

SPACE = kvtrie.Namespace(model="m", salt="tenant")
POLICY = kvtrie.ReusePolicy()
INDEXES = pytest.mark.parametrize("make", [kvtrie.RadixIndex, ModelIndex])


def seq(*parts: Any) -> kvtrie.TokenSequence:
    return kvtrie.TokenSequence([token for part in parts for token in part], SPACE)


def cached(make: Any, session: str | None) -> Any:
    index = make(64, 4, min_run=8)
    index.insert(
        seq(range(40)), range(10), num_computed=40, source=kvtrie.COMPUTED, session=session
    )
    return index


EDITED = ([99, 98], range(40), [97])


@INDEXES
def test_moved_runs_come_from_the_session_that_is_named(make: Any) -> None:
    index = cached(make, "chat-7")
    for session, count in [("chat-7", 40), ("chat-8", 0), (None, 0)]:
        with index.plan(seq(*EDITED), POLICY, session=session) as plan:
            assert plan.num_approximate == count
    wide = POLICY.replace(scope="namespace")
    with index.plan(seq(*EDITED), wide) as plan:
        assert plan.num_approximate == 40
    assert index.stats().plans_without_scope == 1


@INDEXES
def test_a_moved_run_says_whether_it_is_of_the_same_conversation(make: Any) -> None:
    index = cached(make, "chat-7")
    wide = POLICY.replace(scope="namespace")
    whole = seq(range(40))
    for session, own in [("chat-7", True), ("chat-8", False), (None, False)]:
        with index.plan(seq(*EDITED), wide, session=session) as plan:
            assert [run.same_conversation for run in plan.moved_runs] == [own]
        with index.plan(seq(*EDITED), POLICY, session=session, path=whole) as plan:
            assert [run.same_conversation for run in plan.moved_runs] == [own]
    with index.plan(seq(*EDITED), POLICY, session="chat-7") as plan:
        assert [run.same_conversation for run in plan.moved_runs] == [True]
    prompt = seq(range(8), [99], range(8, 40), [98])
    for shared, own in [(1, True), (2, True), (3, False)]:
        with index.plan(prompt, wide.replace(shared_prefix=shared)) as plan:
            assert [run.same_conversation for run in plan.moved_runs] == [own]


@INDEXES
def test_no_scope_reaches_another_salt(make: Any) -> None:
    index = cached(make, "chat-7")
    other = kvtrie.Namespace(model="m", salt="other")
    prompt = kvtrie.TokenSequence([99, 98, *range(40), 97], other)
    for policy in (POLICY, POLICY.replace(scope="namespace")):
        with index.plan(prompt, policy, session="chat-7") as plan:
            assert plan.num_compute == 43


@INDEXES
def test_a_shared_prefix_makes_one_conversation(make: Any) -> None:
    index = cached(make, None)
    prompt = seq(range(8), [99], range(8, 40), [98])
    for shared, count in [(1, 32), (2, 32), (3, 0)]:
        with index.plan(prompt, POLICY.replace(shared_prefix=shared)) as plan:
            assert (plan.num_exact, plan.num_approximate) == (8, count)


@INDEXES
def test_moved_runs_stop_at_moved_end_and_the_plan_says_so(make: Any) -> None:
    index = cached(make, "chat-7")
    with index.plan(seq(*EDITED), POLICY, session="chat-7", moved_end=20) as plan:
        assert (plan.moved_end, plan.num_approximate) == (20, 18)
    with index.plan(seq(*EDITED), POLICY, session="chat-7") as plan:
        assert plan.moved_end is None
    assert plan.moved_end is None


@INDEXES
@pytest.mark.parametrize("session", ["", "s" * 257, "\u00e4" * 129])
def test_a_session_has_1_to_256_bytes(make: Any, session: str) -> None:
    index = cached(make, "chat-7")
    digest = index.digest()
    calls: list[Callable[[], Any]] = [
        lambda: index.plan(seq(*EDITED), session=session),
        lambda: index.insert(
            seq(range(8)), [20, 21], num_computed=8, source=kvtrie.COMPUTED, session=session
        ),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"session has {len(session.encode())} bytes"):
            call()
    assert index.digest() == digest


def test_malformed_arguments_name_value_and_limit() -> None:
    index = cached(kvtrie.RadixIndex, None)
    ledger = kvtrie.SequenceLedger(block_size=4)
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: index.plan(seq(*EDITED), moved_end=44), ValueError, r"moved_end is 44.*\[0, 43\]"),
        (lambda: index.explain(seq(*EDITED), moved_end=44), ValueError, r"44.*\[0, 43\]"),
        (lambda: index.plan(seq(*EDITED), moved_end=-1), ValueError, "moved_end is -1"),
        (lambda: index.plan(seq(*EDITED), session=7), TypeError, "session"),
        (lambda: index.explain(seq(*EDITED), session=""), ValueError, "session has 0 bytes"),
        (lambda: ledger.begin("a", seq(), [], session=""), ValueError, "session has 0 bytes"),
        (
            lambda: kvtrie.ReusePolicy(scope="tenant"),  # type: ignore[arg-type]
            ValueError,
            'scope is "tenant"',
        ),
        (lambda: kvtrie.ReusePolicy(shared_prefix=0), ValueError, "shared_prefix is 0"),
    ]
    for call, error, what in wrong:
        with pytest.raises(error, match=what):
            call()


def test_explain_says_what_is_out_of_scope() -> None:
    index = cached(kvtrie.RadixIndex, "chat-7")
    why = index.explain(seq(*EDITED))
    assert why.would_save.out_of_scope == 40
    assert "out of scope" in str(why)
    own = index.explain(seq(*EDITED), session="chat-7", moved_end=20).would_save
    assert (own.approximate, own.out_of_scope) == (18, 0)


def test_a_snapshot_keeps_sessions() -> None:
    index = cached(kvtrie.RadixIndex, "chat-7")
    again = kvtrie.RadixIndex.restore(index.snapshot(), pool_id=index.pool_id)
    assert again.digest() == index.digest() != cached(kvtrie.RadixIndex, None).digest()
    with again.plan(seq(*EDITED), POLICY, session="chat-7") as plan:
        assert plan.num_approximate == 40
    assert b"chat-7" not in index.snapshot()
