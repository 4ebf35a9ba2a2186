"""Which histories make room: those of the namespace that has most."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtrie
from kvtrie.router.namespace_counts import NamespaceCounts

SPACES = [kvtrie.Namespace(model="m", salt=f"tenant {number}") for number in range(6)]
CHANGES = st.lists(st.tuples(st.sampled_from(SPACES), st.integers(-4, 9)), max_size=200)


def keep(tracker: kvtrie.TurnTracker, space: kvtrie.Namespace, ids: range, name: str) -> None:
    tracker.keep(kvtrie.TokenSequence(ids, space), num_computed=len(ids), conversation=name)


def left(tracker: kvtrie.TurnTracker, space: kvtrie.Namespace) -> int:
    return len(tracker._store.spaces.get(space, ()))


def test_one_tenant_does_not_take_the_room_of_others() -> None:
    """The least recently used of all left: 42 long replies of one made all others' leave."""
    tracker = kvtrie.TurnTracker(max_tokens=1000)
    for number, space in enumerate(SPACES[1:]):
        keep(tracker, space, range(60), f"chat {number}")
    for number in range(50):
        keep(tracker, SPACES[0], range(number * 1000, number * 1000 + 300), f"chat {number}")
    assert [left(tracker, space) for space in SPACES] == [2, 1, 1, 1, 1, 1]
    # A namespace that has most gives way to another, its least recently used first.
    keep(tracker, SPACES[1], range(100, 250), "new")
    assert [left(tracker, space) for space in SPACES[:2]] == [1, 2]
    assert [each[1] for each in tracker._store._order[SPACES[0]]] == ["chat 49"]


def test_one_tenant_does_not_take_all_conversations() -> None:
    tracker = kvtrie.TurnTracker(max_conversations=20)
    for number in range(5):
        keep(tracker, SPACES[1], range(number * 1000, number * 1000 + 300), f"chat {number}")
    for number in range(500):
        keep(tracker, SPACES[0], range(number * 10, number * 10 + 2), f"chat {number}")
    assert [left(tracker, space) for space in SPACES[:2]] == [15, 5]


def test_a_history_as_long_as_the_bound_makes_all_others_leave() -> None:
    tracker = kvtrie.TurnTracker(max_tokens=1000)
    for number, space in enumerate(SPACES):
        keep(tracker, space, range(150), f"chat {number}")
    keep(tracker, SPACES[2], range(1000), "all")
    assert (len(tracker), tracker.num_tokens) == (1, 1000)
    # It is continued, and replaced by what continues it.
    keep(tracker, SPACES[2], range(1000), "all")
    assert (len(tracker), tracker.num_tokens) == (1, 1000)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 30)), max_size=60))
def test_room_is_made_within_the_bounds(turns: list[tuple[int, int, int]]) -> None:
    tracker = kvtrie.TurnTracker(max_tokens=60, max_conversations=5)
    for tenant, name, size in turns:
        keep(tracker, SPACES[tenant], range(name, name + size), str(name))
        store = tracker._store
        assert tracker.num_tokens <= 60
        assert len(store.conversations) <= 5
        for space in SPACES:
            mine = store.spaces.get(space, {}).values()
            assert store._tokens.of(space) == sum(len(one.places) for one in mine)
            keys = [key for key in store.conversations if key[0] == space]
            assert store._num_conversations.of(space) == len(keys)
            assert set(store._order.get(space, ())) == set(keys)
        assert store.conversations[SPACES[tenant], str(name)]


@given(CHANGES)
def test_the_largest_other_share(changes: list[tuple[kvtrie.Namespace, int]]) -> None:
    held, counts = NamespaceCounts(), dict.fromkeys(SPACES, 0)
    for space, wanted in changes:
        change = max(wanted, -counts[space])
        counts[space] += change
        held.add(space, change)
        assert held.of(space) == counts[space]
        others = [count for one, count in counts.items() if one != space and count]
        found = held.largest(besides=space)
        assert (found is None) == (not others)
        if found is not None:
            assert found != space
            assert counts[found] == max(others)


@pytest.mark.parametrize("tenants", [1, 10, 1000])
def test_a_share_is_found_without_looking_at_each_namespace(
    tenants: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, of = 0, NamespaceCounts.of

    def counted(self: NamespaceCounts, namespace: kvtrie.Namespace) -> int:
        nonlocal looked
        looked += 1
        return of(self, namespace)

    monkeypatch.setattr(NamespaceCounts, "of", counted)
    held, source = NamespaceCounts(), random.Random(0)
    spaces = [kvtrie.Namespace(model="m", salt=f"t{number}") for number in range(tenants)]
    for _ in range(5000):
        held.add(source.choice(spaces), source.randrange(1, 9))
        held.largest(besides=source.choice(spaces))
        assert len(held._heap) <= 2 * tenants + 64
    assert looked <= 8 * 5000
