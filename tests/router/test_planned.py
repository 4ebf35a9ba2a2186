"""One history is planned in the tracker's index, as in an index that holds it alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtrie
from kvtrie.router import comparison
from kvtrie.router.arguments import CompareArguments

if TYPE_CHECKING:
    from kvtrie.router.history import History

NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
MOVED = kvtrie.ReusePolicy(scope="namespace")
KINDS = ("reasoning", "answer", "mine", "yours")


def seq(ids: Any) -> kvtrie.TokenSequence:
    return kvtrie.TokenSequence(ids, NS)


def planned(
    tracker: kvtrie.TurnTracker, history: History, prompt: Any, *, is_kept: bool = True, **more: Any
) -> tuple[list[Any], int]:
    policy = kvtrie.ReusePolicy(**more)
    asked = CompareArguments(seq(prompt), None, policy, alias=False, keep_last=1, take=False)
    segments, reused = comparison.planned(
        history, asked, tracker._store.index, is_kept=lambda: is_kept
    )
    return segments.tolist(), reused


texts = st.lists(st.integers(0, 2), max_size=40)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[list[int], int, list[kvtrie.Span]]]:
    parts = draw(st.lists(texts.filter(bool), min_size=1, max_size=3))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        ids = [
            token for part in draw(st.lists(st.sampled_from(parts), max_size=3)) for token in part
        ]
        ids += draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
        spans = []
        for _ in range(draw(st.integers(0, 4))):
            start, end = sorted(draw(st.tuples(*[st.integers(0, len(ids))] * 2)))
            spans.append(kvtrie.Span(start, end, draw(st.sampled_from(KINDS))))
        found.append((ids, draw(st.integers(0, len(ids))), spans))
    return found


@given(kept=histories(), data=st.data())
def test_a_history_is_planned_as_if_it_were_alone(
    kept: list[tuple[list[int], int, list[kvtrie.Span]]], data: st.DataObject
) -> None:
    tracker = kvtrie.TurnTracker(max_tokens=1_024, min_run=8)
    for number, (ids, num_computed, spans) in enumerate(kept):
        tracker.keep(seq(ids), num_computed=num_computed, spans=spans, conversation=str(number))
    prompt = [token for ids, _, _ in kept for token in data.draw(st.sampled_from([ids, ids[3:]]))]
    for history in tracker._store.by_number.values():
        shared = planned(tracker, history, prompt)
        assert shared == planned(tracker, history, prompt, is_kept=False)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    built: list[int] = []
    index_class = kvtrie.RadixIndex

    def counted(num_blocks: int, *arguments: Any, **keywords: Any) -> kvtrie.RadixIndex:
        built.append(num_blocks)
        return index_class(num_blocks, *arguments, **keywords)

    monkeypatch.setattr(comparison, "RadixIndex", counted)
    return built


def test_eight_histories_are_planned_without_an_index_of_their_own(alone: list[int]) -> None:
    tracker = kvtrie.TurnTracker()
    ids = np.arange(100)
    reasoning = [kvtrie.Span(30, 40, "reasoning")]
    for head in range(8):
        tracker.keep(seq([1_000 + head, *ids]), num_computed=100, spans=reasoning, conversation="c")
    answer = tracker.compare(seq([7, *ids[20:], 8]), conversation="c", policy=MOVED)
    assert (answer.kind, alone) == ("moved_runs", [])
    assert answer.segments is not None
    kinds = tracker._store.index.kinds
    assert answer.segments["kinds"].tolist() == [0, 1 << kinds.index("reasoning"), 0]


def test_what_the_trackers_index_does_not_know_is_planned_alone(alone: list[int]) -> None:
    ids = np.arange(100)
    prompt = [7, *ids[20:], 8]
    reasoning = [kvtrie.Span(30, 40, "reasoning")]
    tracker = kvtrie.TurnTracker()
    imported = kvtrie.Imported(exact_until=50, hops=1)
    tracker.keep(seq(ids), num_computed=100, source=imported)
    tracker.keep(seq([5, *ids]), num_computed=101, spans=reasoning)
    tracker.keep(seq([6, *ids]), num_computed=101)
    approximate, tagged, plain = tracker._store.by_number.values()
    assert planned(tracker, approximate, prompt)[1] == 30
    assert planned(tracker, approximate, prompt, max_hops=2)[1] == 80
    assert planned(tracker, tagged, prompt, forbid_kinds=("reasoning",))[1] == 61
    assert alone == [100, 100, 101]
    # A kind that it does not have changes nothing.
    assert planned(tracker, tagged, prompt, forbid_kinds=("answer",))[1] == 80
    assert planned(tracker, plain, prompt)[1] == 80
    assert alone == [100, 100, 101]
    # It left while it was planned.
    assert planned(tracker, plain, prompt, is_kept=False)[1] == 80
    assert alone == [100, 100, 101, 101]


def test_a_history_among_too_many_copies_is_planned_alone(alone: list[int]) -> None:
    tracker = kvtrie.TurnTracker()
    ids = np.arange(64)
    for head in range(1_100):
        tracker.keep(seq([1_000 + head, *ids]), num_computed=65)
    oldest, *_, newest = tracker._store.by_number.values()
    assert planned(tracker, newest, [7, *ids, 8])[1] == 64
    assert planned(tracker, oldest, [7, *ids, 8])[1] == 64
    assert alone == [65, 65]
