"""Long work does not hold a tracker's lock: others use the tracker meanwhile."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtrie
from kvtrie.router import comparison

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
SECONDS = 20.0
MOVED = kvtrie.ReusePolicy(scope="namespace")


def seq(ids: Any) -> kvtrie.TokenSequence:
    return kvtrie.TokenSequence(ids, NS)


class Lock:
    """A tracker's lock that counts what is done while it is held."""

    def __init__(self, lock: AbstractContextManager[None], done: Callable[[], int]) -> None:
        self.lock, self.done = lock, done
        self.before = self.most = 0

    def __enter__(self) -> None:
        self.lock.__enter__()
        self.before = self.done()

    def __exit__(self, *_: object) -> None:
        self.most = max(self.most, self.done() - self.before)
        self.lock.__exit__(None, None, None)


def others_come_in(tracker: kvtrie.TurnTracker, monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Let each call of a function of the router wait for another thread's calls on the tracker."""
    work = getattr(comparison, name)
    waited: list[bool] = []

    def asked(*arguments: Any, **keywords: Any) -> Any:
        thread = threading.Thread(target=lambda: len(tracker), daemon=True)
        thread.start()
        thread.join(SECONDS if all(waited) else 0)
        waited.append(not thread.is_alive())
        return work(*arguments, **keywords)

    monkeypatch.setattr(comparison, name, asked)
    return waited


def test_histories_without_reasoning_are_compared_without_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracker = kvtrie.TurnTracker()
    tracker.keep(seq([1, 2, 70, 3]), num_computed=4, spans=[kvtrie.Span(2, 3, "reasoning")])
    waited = others_come_in(tracker, monkeypatch, "without_reasoning")
    assert tracker.compare(seq([1, 2, 3, 4]), alias=True).kind == "alias"
    assert waited == [True]


def test_histories_of_a_conversation_are_compared_without_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracker = kvtrie.TurnTracker()
    for last in range(3):
        tracker.keep(seq([1, 2, last]), num_computed=3, conversation="c")
    waited = others_come_in(tracker, monkeypatch, "common")
    assert tracker.compare(seq([1, 2, 1, 4]), conversation="c").num_common == 3
    assert waited
    assert all(waited)


@pytest.mark.parametrize("conversation", [None, "c"])
def test_moved_runs_are_planned_without_the_lock(
    conversation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = kvtrie.TurnTracker()
    ids = np.arange(100)
    tracker.keep(seq(ids), num_computed=100, conversation=conversation)
    waited = others_come_in(tracker, monkeypatch, "planned")
    answer = tracker.compare(seq([7, *ids[20:], 8]), conversation=conversation, policy=MOVED)
    assert answer.kind == "moved_runs"
    assert waited == [True]


def test_a_history_through_a_forgotten_place_is_sought_without_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracker = kvtrie.TurnTracker()
    tracker.keep(seq([1, 2, 3]), num_computed=3)
    # The last history with the place is forgotten, and the rest is sought among all.
    tracker.keep(seq([1, 2, 4]), num_computed=3, conversation="c")
    tracker.forget("c", NS)
    taken: list[str] = []
    lock = Lock(tracker._lock, lambda: len(taken))
    search = tracker._searched

    def searched(*arguments: Any) -> Any:
        taken.append("search")
        return search(*arguments)

    monkeypatch.setattr(tracker, "_searched", searched)
    monkeypatch.setattr(tracker, "_lock", lock)
    assert tracker.compare(seq([1, 2, 5])).num_common == 2
    assert taken == ["search"]
    assert lock.most == 0
    # The found history is known from here on.
    assert tracker.compare(seq([1, 2, 5])).num_common == 2
    assert taken == ["search"]


@pytest.mark.parametrize("call", ["compare", "keep", "forget"])
def test_histories_that_go_together_go_a_few_at_a_time(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    tracker = kvtrie.TurnTracker(ttl=10.0, clock=lambda: clock[0])
    for last in range(1_000):
        tracker.keep(seq([1, 2, 3 + last]), num_computed=3, conversation="c")
    lock = Lock(tracker._lock, lambda: 1_000 - len(tracker._store.by_number))
    monkeypatch.setattr(tracker, "_lock", lock)
    if call == "forget":
        tracker.forget("c", NS)
        assert len(tracker) == 0
    else:
        clock[0] = 10.0
        if call == "compare":
            assert tracker.compare(seq([1, 2, 3])).kind == "start_over"
        else:
            tracker.keep(seq([1, 2]), num_computed=2)
        assert len(tracker) == int(call == "keep")
    assert 0 < lock.most <= 64


def test_keep_compares_no_tokens_of_other_answers_to_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[int] = []
    common = comparison.common

    def counted(*arguments: Any) -> int:
        compared.append(1)
        return common(*arguments)

    monkeypatch.setattr(comparison, "common", counted)
    tracker = kvtrie.TurnTracker()
    for last in range(50):
        tracker.keep(seq([1, 2, 3 + last]), num_computed=3, conversation="c")
    tracker.keep(seq([1, 2, 3, 4]), num_computed=4, conversation="c")
    assert len(tracker) == 50
    assert compared == []


def test_a_history_is_noted_once_however_many_reasoning_spans_it_has() -> None:
    tracker = kvtrie.TurnTracker()
    spans = [kvtrie.Span(at, at + 1, "reasoning") for at in range(1, 1_000, 2)]
    tracker.keep(seq(np.arange(1_000)), num_computed=1_000, spans=spans)
    assert len(tracker._store.before_reasoning._histories) == 1
    # The first reasoning stays in the prompt, a later one does not.
    kept = [at for at in range(1_000) if at % 2 == 0 or at == 1]
    answer = tracker.compare(seq([*kept, 5]), alias=True)
    assert answer.kind == "alias"
    assert answer.num_kept == 1_000


def test_a_history_forgotten_while_it_is_compared_is_returned_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result is that of the moment at which the prompt was looked up."""
    tracker = kvtrie.TurnTracker()
    tracker.keep(seq([1, 2, 3]), num_computed=3, conversation="c", payload="held")
    common = comparison.common

    def forgets(*arguments: Any) -> int:
        if len(tracker):
            tracker.forget("c", NS)
        return common(*arguments)

    monkeypatch.setattr(comparison, "common", forgets)
    answer = tracker.compare(seq([1, 2, 3, 4]), conversation="c")
    assert (answer.kind, answer.payload) == ("exact_extension", "held")
    with pytest.raises(kvtrie.StaleHandleError, match="unknown"):
        tracker.compare(seq([1, 2, 3, 4]), conversation="c")
