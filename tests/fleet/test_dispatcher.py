"""Which worker is chosen: by what is cached, by what was sent, and never for old truth."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cluster.publisher import packed, stored

import kvtrie
from kvtrie.fleet import Dispatcher, NoWorkerError

NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)


def made(**options: float) -> tuple[kvtrie.KvIndexer, Dispatcher]:
    index = kvtrie.KvIndexer(2, b"the key of tests")
    for name in ("a", "b"):
        index.add_worker(name, NS)
    return index, Dispatcher(index, policy=kvtrie.ReusePolicy(), **options)  # type: ignore[arg-type]


def prompt(*ids: int) -> kvtrie.TokenSequence:
    return kvtrie.TokenSequence(ids, NS)


def test_what_is_cached_is_preferred_and_what_is_in_the_queue_counts_against_it() -> None:
    index, dispatcher = made()
    index.apply(1, packed(stored(range(5), None, range(10))))
    first = dispatcher.choose(prompt(*range(12)))
    assert (first.worker, first.exact, first.uncertain) == ("b", 10, False)
    assert dispatcher.outstanding("b") == (2, 1)
    # Thirty tokens in its queue are more than the ten that it would save.
    busy = dispatcher.choose(prompt(*range(100, 130)), ["b"])
    assert dispatcher.choose(prompt(*range(10), 99)).worker == "a"
    busy.computed()
    assert dispatcher.outstanding("b") == (2, 2)
    busy.end()
    busy.end()
    assert dispatcher.outstanding("b") == (2, 1)
    with first:
        pass
    assert dispatcher.outstanding("b") == (0, 0)


def test_a_second_request_of_a_conversation_follows_the_first_before_any_event() -> None:
    _, dispatcher = made()
    first = dispatcher.choose(prompt(*range(50)))
    second = dispatcher.choose(prompt(*range(50), 7, 8))
    assert (first.worker, second.worker, second.exact) == ("a", "a", 50)
    # Another namespace shares nothing.
    other = kvtrie.TokenSequence(range(52), NS.replace(salt="t"))
    assert dispatcher.choose(other).worker == "b"
    first.computed()
    second.end()
    assert dispatcher.choose(prompt(*range(50)), ["a"]).exact == 0


def test_the_last_token_is_computed_and_whole_blocks_count() -> None:
    _, dispatcher = made()
    dispatcher.choose(prompt(*range(8)))
    assert dispatcher.choose(prompt(*range(8)), ["a"]).exact == 6
    assert dispatcher.choose(prompt(0, 1, 2, 9, 9, 9), ["a"]).exact == 2


def test_an_uncertain_worker_is_not_preferred_for_what_it_held() -> None:
    index, dispatcher = made()
    index.apply(1, packed(stored(range(5), None, range(10))))
    index.set_uncertain(1, True)
    one = dispatcher.choose(prompt(*range(12)), ["b"])
    assert (one.worker, one.exact, one.moved, one.uncertain) == ("b", 0, 0, True)
    assert one.possible == 0
    one.end()
    assert dispatcher.choose(prompt(*range(12))).worker == "a"


def test_moved_tokens_decide_a_tie_and_count_only_where_it_is_said() -> None:
    index, dispatcher = made()
    index.apply(1, packed(stored(range(10), None, range(100, 120))))
    edited = prompt(7, *range(104, 120), 5)
    found = dispatcher.choose(edited)
    assert (found.worker, found.exact, found.moved, found.possible) == ("b", 0, 0, 16)
    # Promised is nothing: all of it is in the queue, so the next goes elsewhere.
    assert dispatcher.outstanding("b") == (18, 1)
    _, trusting = made(moved_weight=1.0)
    assert trusting.choose(edited).possible == 0
    index, trusting = made(moved_weight=1.0)
    index.apply(1, packed(stored(range(10), None, range(100, 120))))
    trusting.choose(edited, ["b"]).end()
    index.set_policy(1, kvtrie.ReusePolicy(scope="namespace", min_run=8))
    found = trusting.choose(edited)
    assert (found.worker, found.exact, found.moved, found.possible) == ("b", 0, 9, 16)
    # The last seven of a run are not promised.
    assert trusting.outstanding("b") == (9, 1)


def test_moved_tokens_are_promised_to_their_conversation() -> None:
    index, dispatcher = made()
    for at, session in enumerate(("first", "second")):
        index.set_policy(at, kvtrie.ReusePolicy(min_run=8))
        hashes = range(10 * at, 10 * at + 10)
        event = stored(hashes, None, range(100, 120)) | {"session_id": session}
        index.apply(at, packed(event))
    edited = prompt(7, *range(104, 120), 5)
    for session, worker in (("second", "b"), ("first", "a"), ("second", "b")):
        with dispatcher.choose(edited, session=session) as found:
            assert (found.worker, found.moved, found.possible) == (worker, 9, 16)
    with dispatcher.choose(edited, session="second", moved_end=14) as found:
        assert (found.worker, found.moved, found.possible) == ("b", 6, 16)
    with dispatcher.choose(edited, session="third") as found:
        assert (found.moved, found.possible) == (0, 16)
    with pytest.raises(ValueError, match="moved_end is 19"):
        dispatcher.choose(edited, moved_end=19)


def test_a_promise_counts_once_where_more_is_cached_already() -> None:
    index, dispatcher = made(moved_weight=1.0)
    index.set_policy(1, kvtrie.ReusePolicy(scope="namespace", min_run=8))
    index.apply(1, packed(stored(range(10), None, range(100, 120))))
    edited = prompt(7, *range(104, 120), 5)
    first = dispatcher.choose(edited, ["b"])
    # All but the last block will be exact when the first has been computed.
    second = dispatcher.choose(edited, ["b"])
    assert (first.moved, second.exact, second.moved) == (9, 16, 0)


def test_ties_go_around() -> None:
    _, dispatcher = made()
    found = []
    for at in range(4):
        with dispatcher.choose(prompt(*range(100 * at, 100 * at + 4))) as sent:
            found.append(sent.worker)
    assert found == ["a", "b", "a", "b"]


def test_prompts_beyond_the_limit_count_as_load_alone() -> None:
    _, dispatcher = made(max_tracked_tokens=10)
    long = dispatcher.choose(prompt(*range(20)), ["a"])
    assert dispatcher.outstanding("a") == (20, 1)
    assert dispatcher.choose(prompt(*range(20)), ["a"]).exact == 0
    long.end()
    assert dispatcher.outstanding("a") == (20, 1)


def test_a_prompt_in_flight_is_shared_up_to_its_first_item() -> None:
    def pictured(picture: bytes) -> kvtrie.TokenSequence:
        found = kvtrie.TokenSequence([], NS)
        found.extend(list(range(20)), items=[kvtrie.Item(5, 12, picture)])
        return found

    _, dispatcher = made()
    dispatcher.choose(pictured(b"a picture of 16 bytes"), ["a"])
    assert dispatcher.outstanding("a") == (20, 1)
    for other in (b"another one of 16 bytes", b"a picture of 16 bytes"):
        assert dispatcher.choose(pictured(other), ["a"]).exact == 4
    # The same ids with no picture at all.
    assert dispatcher.choose(prompt(*range(20)), ["a"]).exact == 4


@pytest.mark.parametrize("common", [0, 1, 2, 63, 64, 65, 191, 192, 193, 998, 999, 1000])
def test_a_common_beginning_of_any_length_is_found(common: int) -> None:
    _, dispatcher = made()
    dispatcher.choose(prompt(*range(1000)), ["a"])
    other = prompt(*range(common), *range(5000, 5000 + 1000 - common))
    assert dispatcher.choose(other, ["a"]).exact == min(common, 999) // 2 * 2


def test_workers_that_are_gone_are_not_kept() -> None:
    index = kvtrie.KvIndexer(2, b"the key of tests")
    dispatcher = Dispatcher(index)
    for at in range(20):
        number = index.add_worker(f"replica-{at}", NS)
        late = dispatcher.choose(prompt(*range(10)))
        index.remove_worker(number)
        if at != 7:
            late.end()
        else:
            seven = late
    # What has not ended still counts.
    assert dispatcher.outstanding("replica-7") == (10, 1)
    assert set(dispatcher._workers) == {"replica-7", "replica-19"}
    assert not set(dispatcher._tracked) - {"replica-7"}
    seven.end()
    late.computed()
    assert dispatcher.outstanding("replica-7") == (0, 0)


def test_bad_arguments_and_no_worker_are_named() -> None:
    index, dispatcher = made()
    with pytest.raises(NoWorkerError, match="one of 1 was asked for; the index has 2"):
        dispatcher.choose(prompt(1), ["c"])
    with pytest.raises(TypeError, match="not a KvIndexer"):
        Dispatcher(None)  # type: ignore[arg-type]
    outside: list[dict[str, Any]] = [
        {"load_weight": -1},
        {"moved_weight": 2},
        {"max_tracked_tokens": -1},
    ]
    for options in outside:
        with pytest.raises(ValueError, match="it must be in"):
            Dispatcher(index, **options)
    wrong: list[dict[str, Any]] = [
        {"load_weight": "1"},
        {"moved_weight": True},
        {"max_tracked_tokens": 1.5},
        {"policy": "exact"},
    ]
    for options in wrong:
        with pytest.raises(TypeError, match=f"Dispatcher: {next(iter(options))} "):
            Dispatcher(index, **options)
