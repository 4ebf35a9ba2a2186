"""TurnTracker against a naive tracker, on random conversations that fork, edit and expire."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.router.naive import NaiveTracker, common, without

import kvtrie

SPACES = {name: kvtrie.Namespace(model="m", salt=name) for name in ("a", "b")}
IDS = st.lists(st.integers(1, 3), min_size=1, max_size=12).map(tuple[int, ...])
CONVERSATIONS = st.sampled_from([None, None, "x", "y", "z"])
# Mostly one namespace: what is kept in the other must not be seen, and little of it does.
NAMES = st.sampled_from("aaaab")
PARAMS = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_engine_id": "d",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 1,
}


class Tracked(RuleBasedStateMachine):
    @initialize(
        max_tokens=st.sampled_from([20, 60, 1000]),
        max_conversations=st.sampled_from([2, 4, 100]),
        ttl=st.sampled_from([12, 1000]),
    )
    def make(self, max_tokens: int, max_conversations: int, ttl: int) -> None:
        self.now = 0.0
        self.seen: list[tuple[int, ...]] = []
        self.naive = NaiveTracker(float(ttl), max_tokens, max_conversations)
        self.tracker = kvtrie.TurnTracker(
            ttl=ttl,
            max_tokens=max_tokens,
            max_conversations=max_conversations,
            block_size=2,
            clock=lambda: self.now,
        )

    def ids_from(self, data: st.DataObject) -> tuple[int, ...]:
        new, how = data.draw(IDS), data.draw(st.integers(0, 5))
        if not self.seen or how == 0:
            return new
        base = data.draw(st.sampled_from(self.seen))
        # An extension, or a branch.
        cut = len(base) if how > 3 else data.draw(st.integers(0, len(base)))
        return (base[:cut] + new)[:20]

    @rule(
        data=st.data(),
        what=st.sampled_from(["keep", "keep", "compare", "compare", "compare", "wait", "forget"]),
        space=NAMES,
    )
    def step(self, data: st.DataObject, what: str, space: str) -> None:
        """A random call; a single rule, as hypothesis leaves out rules at random."""
        if what == "wait":
            self.wait(data.draw(st.integers(1, 3)))
        elif what == "forget":
            self.forget(space, data.draw(st.sampled_from("xyz")))
        elif what == "keep":
            flags = data.draw(st.booleans()), data.draw(st.booleans())
            self.keep(data, space, data.draw(CONVERSATIONS), *flags)
        else:
            keep_last = data.draw(st.integers(0, 3))
            self.compare(data, space, data.draw(CONVERSATIONS), keep_last)

    def wait(self, seconds: int) -> None:
        self.now += seconds

    def keep(
        self,
        data: st.DataObject,
        space: str,
        conversation: str | None,
        has_params: bool,
        approximate: bool,
    ) -> None:
        ids = self.ids_from(data)
        num_computed = data.draw(st.integers(0, len(ids)))
        exact_until = data.draw(st.integers(0, len(ids))) if approximate else 1 << 60
        blocks = list(range(1, -(-len(ids) // 2) + 2))
        self.tracker.keep(
            kvtrie.TokenSequence(list(ids), SPACES[space]),
            num_computed=num_computed,
            conversation=conversation,
            source=kvtrie.Imported(exact_until) if approximate else kvtrie.COMPUTED,
            kv_transfer_params=(
                PARAMS | {"remote_num_tokens": num_computed, "remote_block_ids": [blocks]}
                if has_params
                else None
            ),
            payload=(ids, self.now),
        )
        self.naive.keep(
            space,
            ids,
            self.now,
            num_computed=num_computed,
            exact_until=exact_until,
            conversation=conversation,
            has_params=has_params,
        )
        self.seen.append(ids)

    def compare(
        self, data: st.DataObject, space: str, conversation: str | None, keep_last: int
    ) -> None:
        ids = self.ids_from(data)
        prompt = kvtrie.TokenSequence(list(ids), SPACES[space])
        self.naive.expire(self.now)
        known = {kept.key for kept in self.naive.kept}
        if conversation is not None and (space, conversation) not in known:
            with pytest.raises(kvtrie.StaleHandleError, match=repr(conversation)):
                self.tracker.compare(prompt, conversation=conversation)
            return
        answer = self.tracker.compare(prompt, conversation=conversation, keep_last=keep_last)
        kind, usable, shared, size, kept = self.naive.compare(
            space, ids, self.now, conversation, keep_last
        )
        assert (answer.kind, answer.num_tokens, answer.num_common, answer.num_kept) == (
            kind,
            usable,
            shared,
            size,
        )
        assert answer.num_exact == usable
        if kept is None:
            assert answer.kv_transfer_params is None
            return
        assert answer.payload == (kept.ids, kept.kept_at)
        assert answer.age == self.now - kept.kept_at
        if kept.has_params and conversation is None and isinstance(kept.key[1], str):
            assert answer.transfer_reason == f"they are those of conversation {kept.key[1]!r}"
            return
        covered = usable if kind == "exact_extension" else usable // 2 * 2
        if not kept.has_params or kept.taken or covered == 0:
            assert answer.kv_transfer_params is None
            assert answer.transfer_reason
            return
        kept.taken = True
        assert answer.num_transfer_tokens == covered
        assert answer.kv_transfer_params == PARAMS | {
            "remote_num_tokens": covered,
            "remote_block_ids": [list(range(1, -(-covered // 2) + 1))],
        }

    def forget(self, space: str, conversation: str) -> None:
        self.naive.expire(self.now)
        gone = [kept for kept in self.naive.kept if kept.key == (space, conversation)]
        if gone:
            self.tracker.forget(conversation, SPACES[space])
        else:
            with pytest.raises(kvtrie.StaleHandleError):
                self.tracker.forget(conversation, SPACES[space])
        self.naive._leave(gone)

    @invariant()
    def bounds_and_places(self) -> None:
        if not hasattr(self, "tracker"):
            return
        tracker = self.tracker
        assert tracker.num_tokens <= self.naive.max_tokens
        assert tracker.num_conversations <= self.naive.max_conversations
        turns = list(tracker._store.by_number.values())
        uses = np.zeros_like(tracker._store.uses)
        for turn in turns:
            uses[turn.places] += 1
            assert (tracker._store.position[turn.places] == np.arange(len(turn.places))).all()
        assert (uses == tracker._store.uses).all()
        held = int((uses > 0).sum())
        assert tracker._store.index.stats().indexed == held
        assert tracker._store.allocator.num_free == len(uses) - held
        for one, other in product(turns, turns):
            if one.key[0] == other.key[0]:
                same = common(tuple(one.places.tolist()), tuple(other.places.tolist()))
                assert same == common(tuple(one.seq), tuple(other.seq))
        tracker._store.index.check()


TestTracked = Tracked.TestCase


@given(
    parts=st.lists(
        st.tuples(
            st.lists(st.integers(1, 3), max_size=4).map(tuple),
            st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
        ),
        min_size=1,
        max_size=4,
    ),
    end=st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple),
    new=st.lists(st.integers(1, 3), max_size=4).map(tuple),
    removed=st.lists(st.booleans(), min_size=4, max_size=4),
    named=st.booleans(),
)
def test_alias_is_the_history_and_what_is_new(
    parts: list[tuple[tuple[int, ...], tuple[int, ...]]],
    end: tuple[int, ...],
    new: tuple[int, ...],
    removed: list[bool],
    named: bool,
) -> None:
    ids: tuple[int, ...] = ()
    spans = []
    for said, reasoning in parts:
        ids += said
        spans.append((len(ids), len(ids) + len(reasoning)))
        ids += reasoning
    ids += end
    gone = tuple(each for each, out in zip(spans, removed, strict=False) if out)
    prompt = without(ids, gone) + new
    tracker = kvtrie.TurnTracker()
    conversation = "c" if named else None
    tracker.keep(
        kvtrie.TokenSequence(list(ids), SPACES["a"]),
        num_computed=len(ids) - 1,
        conversation=conversation,
        spans=[kvtrie.Span(start, stop, "reasoning") for start, stop in spans],
    )
    answer = tracker.compare(
        kvtrie.TokenSequence(list(prompt), SPACES["a"]), conversation=conversation, alias=True
    )
    if answer.kind == "alias":
        assert answer.send is not None
        # Sound however it was matched: without some whole reasoning spans, and with new tokens.
        sent = tuple(answer.send.tolist())
        assert sent[: len(ids)] == ids
        merged = tracker._store.by_number[1].reasoning
        assert any(
            without(ids, tuple(each for each, out in zip(merged, choice, strict=True) if out))
            + sent[len(ids) :]
            == prompt
            for choice in product([False, True], repeat=len(merged))
            if any(choice)
        )
        assert answer.num_tokens == min(len(ids) - 1, len(sent) - 1)
    elif len(gone) == len(spans) and (named or spans[0][0] > 0) and len(ids) > 1:
        # A prompt without any reasoning is always found, unless it is an extension as it is.
        assert answer.kind == "exact_extension"
        assert prompt[: len(ids)] == ids


@given(
    seed=st.integers(0, 2**32),
    cuts=st.lists(st.integers(0, 200), min_size=2, max_size=6),
    num_computed=st.integers(0, 200),
    keep_last=st.integers(0, 3),
    named=st.booleans(),
)
def test_moved_runs_are_the_same_tokens(
    seed: int, cuts: list[int], num_computed: int, keep_last: int, named: bool
) -> None:
    rng = np.random.default_rng(seed)
    history = rng.integers(0, 50, 200)
    bounds = sorted(cuts)
    pieces = [history[a:b] for a, b in zip(bounds[::2], bounds[1::2], strict=False)]
    prompt = np.concatenate([*pieces[::-1], rng.integers(100, 150, 5), history[:20]])
    tracker = kvtrie.TurnTracker()
    tracker.keep(
        kvtrie.TokenSequence(rng.integers(0, 50, 100), SPACES["a"]),
        num_computed=100,
        conversation="o",
    )
    conversation = "c" if named else None
    tracker.keep(
        kvtrie.TokenSequence(history, SPACES["a"]),
        num_computed=num_computed,
        conversation=conversation,
    )
    answer = tracker.compare(
        kvtrie.TokenSequence(prompt, SPACES["a"]),
        conversation=conversation,
        policy=kvtrie.ReusePolicy(scope="namespace"),
        keep_last=keep_last,
    )
    if answer.kind != "moved_runs":
        assert answer.segments is None
        return
    assert answer.segments is not None
    end = 0
    for segment in answer.segments:
        assert segment["start"] == end
        end = int(segment["end"])
        if segment["class"] == 2:
            continue
        size = end - int(segment["start"])
        old = int(segment["old_start"])
        assert old + size <= num_computed
        assert segment["start"] - old == segment["delta"]
        assert (history[old : old + size] == prompt[segment["start"] : end]).all()
        assert end <= len(prompt) - keep_last
    assert end == len(prompt)
    assert answer.num_tokens == min(answer.num_common, num_computed, len(prompt) - keep_last)
