"""TurnTracker, call by call."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.together import together

import kvtrie
from kvtrie.router.answer import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
OTHER = kvtrie.Namespace(model="m", salt="tenant")
MOVING = kvtrie.ReusePolicy(scope="namespace")


def seq(*ids: int | Sequence[int], space: kvtrie.Namespace = NS) -> kvtrie.TokenSequence:
    flat = [token for part in ids for token in ([part] if isinstance(part, int) else part)]
    return kvtrie.TokenSequence(flat, space)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nothing_kept_starts_over() -> None:
    answer = kvtrie.TurnTracker().compare(seq(1, 2))
    assert (answer.kind, answer.num_tokens, answer.num_kept) == ("start_over", 0, 0)
    assert answer.transfer_reason == "nothing is kept"


@pytest.mark.parametrize("conversation", ["c", None])
def test_next_turn_is_an_exact_extension(conversation: str | None) -> None:
    tracker = kvtrie.TurnTracker()
    tracker.keep(seq(range(20)), num_computed=19, conversation=conversation, payload="worker-3")
    answer = tracker.compare(seq(range(25)), conversation=conversation)
    assert (answer.kind, answer.num_common, answer.num_tokens) == ("exact_extension", 20, 19)
    assert (answer.payload, answer.conversation) == ("worker-3", conversation)
    tracker.keep(seq(range(30)), num_computed=29, conversation=conversation)
    assert (len(tracker), tracker.num_conversations, tracker.num_tokens) == (1, 1, 30)


def test_regenerated_prompt_takes_all_but_its_last_token() -> None:
    tracker = kvtrie.TurnTracker()
    tracker.keep(seq(range(20)), num_computed=19)
    answer = tracker.compare(seq(range(12)))
    assert (answer.kind, answer.num_common, answer.num_tokens) == ("common_prefix", 12, 11)
    assert tracker.compare(seq(range(12)), keep_last=0).num_tokens == 12
    assert tracker.compare(seq(range(12)), keep_last=20).kind == "start_over"


def test_two_answers_to_one_prompt_are_both_kept() -> None:
    tracker = kvtrie.TurnTracker()
    tracker.keep(seq(range(10), range(20, 25)), num_computed=14, conversation="c", payload=1)
    tracker.keep(seq(range(10), range(30, 35)), num_computed=14, conversation="c", payload=2)
    for last, payload in ((20, 1), (30, 2)):
        answer = tracker.compare(seq(range(10), range(last, last + 7)), conversation="c")
        assert (answer.kind, answer.payload) == ("exact_extension", payload)
    # Both common prefixes are equally long: the newer history wins.
    assert tracker.compare(seq(range(10), 40), conversation="c").payload == 2


def test_fork_goes_on_from_either_branch_when_the_other_is_forgotten() -> None:
    tracker = kvtrie.TurnTracker()
    tracker.keep(seq(range(10), 20), num_computed=11, conversation="left")
    tracker.keep(seq(range(10), 30), num_computed=11, conversation="right")
    tracker.forget("right", NS)
    answer = tracker.compare(seq(range(10), 30, 31))
    assert (answer.kind, answer.num_tokens, answer.conversation) == ("common_prefix", 10, "left")
    assert tracker.compare(seq(range(10), 20, 21)).kind == "exact_extension"


def test_edited_history_shares_up_to_the_edit() -> None:
    tracker = kvtrie.TurnTracker()
    tracker.keep(seq(range(40)), num_computed=39)
    edited = seq(range(7), 99, range(8, 45))
    assert tracker.compare(edited).num_tokens == 7
    moved = tracker.compare(edited, policy=MOVING)
    assert (moved.kind, moved.num_tokens) == ("moved_runs", 7)
    fields = ["start", "end", "delta", "class"]
    assert moved.segments is not None
    assert moved.segments[fields].tolist() == [
        (0, 7, 0, 0),
        (7, 8, 0, 2),
        (8, 39, 0, 1),
        (39, 45, 0, 2),
    ]


def test_moved_runs_need_the_policy_and_find_the_history_without_an_id() -> None:
    tracker = kvtrie.TurnTracker()
    tracker.keep(seq(range(1000, 1100)), num_computed=100, payload="other")
    tracker.keep(seq(1, range(100, 160)), num_computed=61, payload="this")
    prompt = seq(7, range(120, 150), 8)
    assert tracker.compare(prompt).kind == "start_over"
    answer = tracker.compare(prompt, policy=MOVING)
    assert (answer.kind, answer.payload, answer.num_tokens) == ("moved_runs", "this", 0)
    assert answer.segments is not None
    assert answer.segments[["start", "end", "old_start", "delta"]].tolist()[1] == (1, 31, 21, -20)
    limited = kvtrie.ReusePolicy(scope="namespace", max_approximate_share=0.5)
    assert tracker.compare(prompt, policy=limited).kind == "start_over"


def test_forbidden_kinds_are_not_moved() -> None:
    tracker = kvtrie.TurnTracker()
    tracker.keep(seq(range(50)), num_computed=50, spans=[kvtrie.Span(10, 50, "tool_result")])
    policy = kvtrie.ReusePolicy(scope="namespace", forbid_kinds=["tool_result"])
    assert tracker.compare(seq(99, range(10, 50)), policy=policy).kind == "start_over"
    assert tracker.compare(seq(99, range(10, 50)), policy=MOVING).kind == "moved_runs"


def test_alias_is_sent_only_when_allowed() -> None:
    tracker = kvtrie.TurnTracker()
    history = seq(range(10), range(50, 60), range(10, 20))
    tracker.keep(history, num_computed=29, spans=[kvtrie.Span(10, 20, "reasoning")])
    prompt = seq(range(20), 90, 91)
    assert tracker.compare(prompt).kind == "common_prefix"
    answer = tracker.compare(prompt, alias=True)
    assert (answer.kind, answer.num_tokens, answer.num_common) == ("alias", 29, 10)
    assert answer.send is not None
    assert answer.send.tolist() == [*history, 90, 91]
    assert answer.send.dtype == np.uint32
    # Half a reasoning span left out is not an alias, and neither is an edited answer.
    assert tracker.compare(seq(range(10), 50, range(10, 20)), alias=True).kind == "common_prefix"
    assert tracker.compare(seq(range(15), 90), alias=True).kind == "common_prefix"


def test_alias_in_a_tool_loop_keeps_the_reasoning_of_the_turn() -> None:
    """An alias that was sent has old reasoning; the client's prompt has only the new one."""
    tracker = kvtrie.TurnTracker()
    old, new = range(100, 110), range(200, 210)
    sent = seq(range(5), old, range(5, 9), new, range(9, 14))
    spans = [kvtrie.Span(5, 15, "reasoning"), kvtrie.Span(19, 29, "reasoning")]
    tracker.keep(sent, num_computed=len(sent) - 1, spans=spans)
    answer = tracker.compare(seq(range(9), new, range(9, 14), 70), alias=True)
    assert answer.kind == "alias"
    assert answer.send is not None
    assert answer.send.tolist() == [*sent, 70]


def test_images_are_compared_and_never_aliased() -> None:
    def with_image(digest: bytes, *more: int) -> kvtrie.TokenSequence:
        return kvtrie.TokenSequence([1, 9, 9, 2, 5, 6, *more], NS, [kvtrie.Item(1, 3, digest)])

    tracker = kvtrie.TurnTracker()
    reasoning = [kvtrie.Span(4, 5, "reasoning")]
    tracker.keep(with_image(b"cat"), num_computed=6, spans=reasoning)
    assert tracker.compare(with_image(b"cat", 7)).num_tokens == 6
    assert tracker.compare(with_image(b"dog", 7)).num_tokens == 1
    stripped = kvtrie.TokenSequence([1, 9, 9, 2, 6], NS, [kvtrie.Item(1, 3, b"cat")])
    assert tracker.compare(stripped, alias=True).kind == "common_prefix"


def test_namespaces_are_walls() -> None:
    tracker = kvtrie.TurnTracker()
    tracker.keep(seq(range(30)), num_computed=30, conversation="c")
    for options in ({}, {"policy": MOVING}, {"alias": True}):
        answer = tracker.compare(seq(range(31), space=OTHER), **options)
        assert (answer.kind, answer.num_common) == ("start_over", 0)
    with pytest.raises(kvtrie.StaleHandleError, match="'c' is unknown in this namespace"):
        tracker.compare(seq(range(31), space=OTHER), conversation="c")
    tracker.keep(seq(range(5), space=OTHER), num_computed=5, conversation="c")
    assert tracker.compare(seq(range(31)), conversation="c").num_tokens == 30
    tracker.forget("c", OTHER)
    assert len(tracker) == 1


def test_expired_conversation_is_named_with_its_age_and_the_ttl() -> None:
    clock = Clock()
    tracker = kvtrie.TurnTracker(ttl=30, clock=clock)
    tracker.keep(seq(range(10)), num_computed=10, conversation="c")
    clock.now += 29.5
    assert tracker.compare(seq(range(11)), conversation="c").age == 29.5
    clock.now += 0.5
    with pytest.raises(kvtrie.StaleHandleError, match=r"'c' has expired.*30\.000 s ago.*ttl is 30"):
        tracker.compare(seq(range(11)), conversation="c")
    assert tracker.compare(seq(range(11))).kind == "start_over"
    assert (len(tracker), tracker.num_tokens, tracker._store.index.stats().indexed) == (0, 0, 0)
    tracker.keep(seq(range(10)), num_computed=10, conversation="c")
    assert tracker.compare(seq(range(11)), conversation="c").kind == "exact_extension"


def test_clock_that_goes_back_makes_nothing_younger() -> None:
    clock = Clock()
    tracker = kvtrie.TurnTracker(ttl=10, clock=clock)
    tracker.keep(seq(1, 2), num_computed=2, conversation="c")
    clock.now -= 50
    assert tracker.compare(seq(1, 2, 3), conversation="c").age == 0.0
    clock.now += 60
    with pytest.raises(kvtrie.StaleHandleError):
        tracker.compare(seq(1, 2, 3), conversation="c")


def test_endless_ttl_never_expires() -> None:
    clock = Clock()
    tracker = kvtrie.TurnTracker(ttl=math.inf, clock=clock)
    tracker.keep(seq(1, 2), num_computed=2)
    clock.now += 1e12
    assert tracker.compare(seq(1, 2, 3)).kind == "exact_extension"


def test_least_recently_used_conversations_make_room() -> None:
    tracker = kvtrie.TurnTracker(max_tokens=30)
    for number in range(3):
        ids = range(100 * number, 100 * number + 10)
        tracker.keep(seq(ids), num_computed=10, conversation=str(number))
    tracker.compare(seq(range(11)), conversation="0")
    tracker.compare(seq(range(100, 111)), conversation="1", take=False)  # does not count as a use
    tracker.keep(seq(range(500, 510)), num_computed=10, conversation="new")
    with pytest.raises(kvtrie.StaleHandleError, match="made room"):
        tracker.compare(seq(range(100, 111)), conversation="1")
    assert [tracker.compare(seq(range(start, start + 11))).kind for start in (0, 200, 500)] == [
        "exact_extension"
    ] * 3
    tracker.keep(seq(range(700, 730)), num_computed=30)
    assert (len(tracker), tracker.num_tokens) == (1, 30)


def test_growing_conversation_stays_within_its_bound() -> None:
    tracker = kvtrie.TurnTracker(max_tokens=1000, max_conversations=3)
    for end in range(100, 1001, 100):
        tracker.keep(seq(range(end)), num_computed=end - 1, conversation="c")
        assert len(tracker) == 1
    for number in range(5):
        tracker.keep(seq(number + 5000), num_computed=1)
    assert tracker.num_conversations == 3


def test_replacing_spends_no_handle_that_is_still_good() -> None:
    tracker = kvtrie.TurnTracker()
    manifest = object()
    tracker.keep(seq(range(5)), num_computed=5, manifest=manifest)
    tracker.keep(seq(range(8)), num_computed=8)
    assert len(tracker) == 2
    assert tracker.compare(seq(range(5), 99)).manifest is manifest
    tracker.keep(seq(range(9)), num_computed=9, manifest=manifest)
    assert len(tracker) == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ttl": 0}, ValueError, "ttl is 0"),
        ({"ttl": math.nan}, ValueError, "ttl is nan"),
        ({"ttl": "1"}, TypeError, "ttl"),
        ({"max_tokens": 0}, ValueError, "max_tokens is 0"),
        ({"max_tokens": 2**31}, ValueError, "max_tokens"),
        ({"max_conversations": 1.0}, TypeError, "max_conversations"),
        ({"block_size": 0}, ValueError, "block_size is 0"),
        ({"block_size": []}, ValueError, "block_size is empty"),
        ({"block_size": [16, True]}, TypeError, "block_size is True"),
        ({"block_size": "16"}, TypeError, "block_size"),
        ({"receiver_block_size": 0}, ValueError, "receiver_block_size is 0"),
        ({"min_transfer": 0}, ValueError, "min_transfer is 0"),
        ({"min_run": 7}, ValueError, "min_run is 7"),
        ({"clock": 3}, TypeError, "clock is 3"),
    ],
)
def test_tracker_refuses(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kvtrie.TurnTracker(**options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seq": [1]}, TypeError, "seq is"),
        ({"seq": seq()}, ValueError, "no token"),
        ({"seq": seq(range(21))}, ValueError, "21 tokens, and max_tokens is 20"),
        ({"num_computed": 4}, ValueError, "num_computed is 4, and the history has 3"),
        ({"num_computed": -1}, ValueError, "num_computed is -1"),
        ({"num_computed": True}, TypeError, "num_computed"),
        ({"conversation": 5}, TypeError, "conversation is 5"),
        ({"source": None}, TypeError, "source is None"),
        ({"spans": [(0, 1)]}, TypeError, "spans"),
        ({"spans": [kvtrie.Span(0, 4, "user")]}, ValueError, "after the 3 tokens"),
    ],
)
def test_keep_refuses_and_keeps_nothing(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    tracker = kvtrie.TurnTracker(max_tokens=20)
    tracker.keep(seq(range(20)), num_computed=20)
    arguments: dict[str, Any] = {"seq": seq(1, 2, 3), "num_computed": 2}
    with pytest.raises(error, match=message):
        tracker.keep(**(arguments | options))
    assert (len(tracker), tracker.num_tokens) == (1, 20)
    assert tracker.compare(seq(range(21))).kind == "exact_extension"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompt": [1]}, TypeError, "prompt is"),
        ({"conversation": b"c"}, TypeError, "conversation"),
        ({"conversation": "gone"}, kvtrie.StaleHandleError, "'gone' is unknown"),
        ({"policy": None}, TypeError, "policy is None"),
        ({"policy": kvtrie.ReusePolicy(min_run=9)}, ValueError, "min_run is 9.*16 tokens"),
        ({"alias": 1}, TypeError, "alias is 1"),
        ({"take": None}, TypeError, "take is None"),
        ({"keep_last": -1}, ValueError, "keep_last is -1"),
        ({"keep_last": 1.0}, TypeError, "keep_last is 1.0"),
    ],
)
def test_compare_refuses(options: dict[str, Any], error: type[Exception], message: str) -> None:
    tracker = kvtrie.TurnTracker()
    with pytest.raises(error, match=message):
        tracker.compare(**({"prompt": seq(1, 2)} | options))


def test_forget_refuses_what_is_not_known() -> None:
    tracker = kvtrie.TurnTracker()
    for arguments, error in (
        (("c", NS), kvtrie.StaleHandleError),
        ((1, NS), TypeError),
        (("c", "m"), TypeError),
    ):
        with pytest.raises(error, match="forget"):
            tracker.forget(*arguments)


@pytest.mark.parametrize("answer", [math.nan, math.inf, None, "1"])
def test_clock_that_returns_no_time_is_refused(answer: object) -> None:
    tracker = kvtrie.TurnTracker(clock=lambda: answer)  # type: ignore[arg-type, return-value]
    with pytest.raises((TypeError, ValueError), match="the value of clock is"):
        tracker.keep(seq(1), num_computed=1)
    assert len(tracker) == 0


def test_callers_sequence_and_prompt_stay_the_callers() -> None:
    tracker = kvtrie.TurnTracker()
    history = seq(1, 2, 3)
    tracker.keep(history, num_computed=3)
    history.truncate(1)
    history.extend([7, 8])
    assert tracker.compare(seq(1, 2, 3, 4)).kind == "exact_extension"


def test_empty_prompt_starts_over() -> None:
    tracker = kvtrie.TurnTracker()
    tracker.keep(seq(1, 2), num_computed=2, conversation="c")
    for conversation in ("c", None):
        answer = tracker.compare(seq(), conversation=conversation, policy=MOVING)
        assert answer.kind == "start_over"


def test_import_needs_numpy_alone() -> None:
    code = "import sys, kvtrie.router; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_threads_keep_and_compare_without_a_torn_answer() -> None:
    tracker = kvtrie.TurnTracker(max_tokens=4000, max_conversations=40, block_size=4)
    counter = itertools.count()

    def work(number: int) -> None:
        rng = Random(number)
        for _ in range(200):
            family, size = rng.randrange(6), rng.randrange(1, 120)
            ids = [*range(family * 1000, family * 1000 + size), next(counter) + 100_000]
            conversation = rng.choice([None, f"{number}-{rng.randrange(3)}"])
            if rng.random() < 0.5:
                tracker.keep(seq(ids), num_computed=size, conversation=conversation)
                continue
            try:
                answer = tracker.compare(
                    seq(ids),
                    conversation=conversation,
                    policy=rng.choice([MOVING, kvtrie.EXACT_ONLY]),
                )
            except kvtrie.StaleHandleError:
                continue
            assert answer.kind in KINDS
            assert answer.num_exact <= answer.num_tokens <= size

    together(work)
    tracker._store.index.check()
    assert tracker.num_tokens <= 4000
    assert tracker.num_conversations <= 40
    assert tracker._store.index.stats().indexed == int((tracker._store.uses > 0).sum())


@pytest.mark.parametrize("conversation", ["c", None])
def test_what_is_gone_is_no_alias_and_moves_nothing(conversation: str | None) -> None:
    clock = Clock()
    tracker = kvtrie.TurnTracker(ttl=10, clock=clock)
    reasoning = [kvtrie.Span(10, 20, "reasoning")]
    history = seq(range(10), range(50, 60), range(10, 40))
    tracker.keep(history, num_computed=49, conversation=conversation, spans=reasoning)
    clock.now += 5
    tracker.keep(seq(range(10), 77), num_computed=11, conversation="other")
    clock.now += 5
    for options in ({"alias": True}, {"policy": MOVING}):
        answer = tracker.compare(seq(range(41)), **options)
        assert (answer.kind, answer.conversation) == ("common_prefix", "other")


def test_replaced_history_takes_no_room_from_others() -> None:
    tracker = kvtrie.TurnTracker(max_conversations=2, max_tokens=30)
    tracker.keep(seq(range(50, 60)), num_computed=10, conversation="a")
    for end in (8, 12, 20):
        tracker.keep(seq(range(end)), num_computed=end)
        assert (len(tracker), tracker.num_conversations) == (2, 2)
    assert tracker.compare(seq(range(50, 61)), conversation="a").kind == "exact_extension"


def test_conversation_kept_again_after_it_expired_is_forgotten_like_any_other() -> None:
    clock = Clock()
    tracker = kvtrie.TurnTracker(ttl=10, clock=clock)
    for _ in range(2):
        tracker.keep(seq(1, 2), num_computed=2, conversation="c")
        clock.now += 9
    tracker.forget("c", NS)
    with pytest.raises(kvtrie.StaleHandleError, match="unknown in this namespace"):
        tracker.compare(seq(1, 2), conversation="c")
    clock.now += 20
    tracker.keep(seq(1, 2), num_computed=2, conversation="c")
    clock.now += 10
    with pytest.raises(kvtrie.StaleHandleError, match="has expired"):
        tracker.compare(seq(1, 2), conversation="c")
    tracker.keep(seq(1, 2), num_computed=2, conversation="c")
    tracker.forget("c", NS)
    with pytest.raises(kvtrie.StaleHandleError, match="unknown in this namespace"):
        tracker.compare(seq(1, 2), conversation="c")


@pytest.mark.parametrize(
    ("limits", "num_tokens"),
    [
        ({}, 29),
        ({"max_hops": 1}, 10),
        ({"max_hops": 2, "forbid_kinds": ["tool_result"]}, 10),
        ({"max_hops": 2, "max_approximate_share": 0.5}, 10),
        ({"max_hops": 2, "max_approximate_share": 0.7}, 29),
    ],
)
def test_approximate_history_is_used_in_place_as_the_policy_allows(
    limits: dict[str, Any], num_tokens: int
) -> None:
    tracker = kvtrie.TurnTracker()
    source = kvtrie.Imported(exact_until=10, hops=2)
    tracker.keep(seq(range(30)), num_computed=29, source=source)
    policy = kvtrie.ReusePolicy(max_hops=2, scope="namespace").replace(**limits)
    answer = tracker.compare(seq(range(30)), policy=policy)
    assert (answer.kind, answer.num_exact) == ("exact_extension", 10)
    assert answer.num_tokens == num_tokens
    assert tracker.compare(seq(range(30))).num_tokens == 10


def test_prompt_with_an_image_is_no_alias_of_a_history_without() -> None:
    tracker = kvtrie.TurnTracker()
    tracker.keep(
        seq(1, 9, 9, 5, 6), num_computed=5, conversation="c", spans=[kvtrie.Span(3, 4, "reasoning")]
    )
    prompt = kvtrie.TokenSequence([1, 9, 9, 6], NS, [kvtrie.Item(1, 3, b"cat")])
    answer = tracker.compare(prompt, conversation="c", alias=True)
    assert (answer.kind, answer.num_tokens) == ("common_prefix", 1)


def test_history_whose_parameters_were_handed_out_is_replaced() -> None:
    tracker = kvtrie.TurnTracker(block_size=2)
    given = {
        "do_remote_decode": True,
        "remote_num_tokens": 4,
        "remote_block_ids": [[1, 2]],
        "remote_engine_id": "d",
        "remote_request_id": "r",
        "remote_host": "h",
        "remote_port": 1,
    }
    tracker.keep(seq(range(5)), num_computed=4, conversation="c", kv_transfer_params=given)
    tracker.keep(seq(range(6)), num_computed=5, conversation="c")
    assert len(tracker) == 2
    taken = tracker.compare(seq(range(5), 9), conversation="c")
    assert (taken.num_kept, taken.num_transfer_tokens) == (5, 4)
    tracker.keep(seq(range(8)), num_computed=7, conversation="c")
    assert len(tracker) == 1
