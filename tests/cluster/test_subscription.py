"""Events over real sockets on 127.0.0.1: loss, order, restarts. `live` scores are right."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Protocol, Self

import pytest
from tests.cluster.publisher import CLEARED, SIZE, Publisher, packed, removed, stored

import kvtrie
from kvtrie.cluster import Subscription, follow, subscribe

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = b"the key of tests"
NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
PROMPT = kvtrie.TokenSequence(range(40), NS)
SECONDS = 20.0


class Publishes(Protocol):
    """Where an engine publishes, in this process or in another."""

    @property
    def endpoint(self) -> str: ...
    @property
    def replay(self) -> str: ...


class Fed:
    """An index with one worker that a publisher feeds."""

    def __init__(self, publisher: Publishes, *, replay: bool = True, **options: Any) -> None:
        self.index = kvtrie.KvIndexer(SIZE, KEY)
        self.worker = self.index.add_worker("w", NS)
        asked = publisher.replay if replay else None
        self.subscription = subscribe(
            self.index, self.worker, publisher.endpoint, asked, **{"check_every": 0.2, **options}
        )

    def scores(self) -> tuple[int, bool]:
        scores = self.index.find_matches(PROMPT)
        return int(scores.exact[0]), bool(scores.uncertain[0])

    def becomes(self, exact: int, *, uncertain: bool = False) -> None:
        until(lambda: self.scores() == (exact, uncertain), lambda: (self.scores(), self))

    def __repr__(self) -> str:
        return f"{self.subscription!r} {self.subscription.counts} {self.subscription.error}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.subscription.close()


def until(holds: Callable[[], bool], said: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, said()
        time.sleep(0.005)


def sends_until(send: Callable[[], None], fed: Fed, state: str) -> None:
    """Without a replay, what is sent before the subscription takes effect is lost."""

    def arrived() -> bool:
        if fed.subscription.state != state:
            send()
            time.sleep(0.02)
        return fed.subscription.state == state

    until(arrived, fed.__repr__)


def block(number: int) -> dict[str, Any]:
    """The block of this number of the prompt."""
    parent = number - 1 if number else None
    return stored([number], parent, [SIZE * number + at for at in range(SIZE)])


def test_batches_arrive_and_the_worker_is_live() -> None:
    with Publisher() as publisher, Fed(publisher) as fed:
        assert fed.scores() == (0, True)
        fed.becomes(0)
        for number in range(5):
            publisher.send(block(number))
        fed.becomes(10)
        publisher.send(removed(2))
        fed.becomes(4)
        publisher.send(CLEARED)
        fed.becomes(0)
        assert fed.subscription.state == "live"
        assert fed.subscription.counts["batches"] == 7
        assert fed.subscription.counts["gaps"] == fed.subscription.counts["resyncs"] == 0


def test_late_subscriber_is_live_if_the_replay_has_everything() -> None:
    with Publisher() as publisher:
        for number in range(5):
            publisher.send(block(number))
        with Fed(publisher) as fed:
            fed.becomes(10)
        with Fed(publisher, replay=False) as blind:
            sends_until(lambda: publisher.send(block(5)), blind, "gapped")
            assert blind.scores()[1]
            assert blind.subscription.counts["missed"] >= 5


@pytest.mark.parametrize("has_topic", [True, False], ids=["with topic", "older frames"])
def test_lost_batches_come_from_the_replay(has_topic: bool) -> None:
    with Publisher() as publisher, Fed(publisher) as fed:
        publisher.has_topic = has_topic
        fed.becomes(0)
        for number in range(9):
            publisher.send(block(number), lost=number in {1, 2, 6})
        fed.becomes(18)
        # The last batch leaves no gap: the replay is asked when it is quiet.
        publisher.send(block(9), lost=True)
        fed.becomes(20)
        assert fed.subscription.state == "live"
        assert fed.subscription.counts["missed"] == 0


def test_replay_in_another_order_and_with_repeats() -> None:
    with Publisher() as publisher, Fed(publisher) as fed:
        publisher.mangle = lambda frames: [*reversed(frames), *frames[:1]]
        fed.becomes(0)
        for number in range(9):
            publisher.send(block(number), lost=2 <= number < 8)
        fed.becomes(18)
        assert fed.subscription.counts["batches"] == 9


def test_gap_that_no_replay_fills_stays_uncertain_until_all_is_cleared() -> None:
    with Publisher() as publisher, Fed(publisher) as fed:
        fed.becomes(0)
        publisher.send(block(0))
        fed.becomes(2)
        # More batches are lost than the buffer has.
        for number in range(1, 80):
            publisher.send(block(number % 20), lost=True)
        publisher.send(block(3))
        assert fed.subscription.wait("gapped", SECONDS), fed
        assert fed.subscription.counts["missed"] == 30
        assert fed.scores()[1]
        publisher.send(CLEARED)
        publisher.send(block(0))
        fed.becomes(2)
        assert fed.subscription.state == "live"


def test_batch_that_cannot_be_read_leaves_a_gap() -> None:
    with Publisher() as publisher, Fed(publisher) as fed:
        fed.becomes(0)
        publisher.send(block(0))
        publisher.send_raw(b"\xc1")
        assert fed.subscription.wait("gapped", SECONDS)
        assert "KvIndexer.apply: byte" in fed.subscription.error
        publisher.send(block(1))
        fed.becomes(4, uncertain=True)
        assert fed.index.worker_stats(fed.worker)["refused_batches"] == 1


def test_number_that_goes_back_begins_anew() -> None:
    with Publisher() as publisher, Fed(publisher) as fed:
        fed.becomes(0)
        for number in range(5):
            publisher.send(block(number))
        fed.becomes(10)
        # A restart that a broker hides: the connection stays.
        with publisher.lock:
            publisher.buffer.clear()
            publisher.number = 0
        publisher.send(block(0))
        fed.becomes(2)
        assert fed.subscription.counts["resyncs"] == 1


@pytest.mark.parametrize("first", [0, 9], ids=["lower number", "higher number"])
def test_restarted_engine_is_never_its_old_self(first: int) -> None:
    publisher = Publisher()
    with Fed(publisher) as fed:
        fed.becomes(0)
        for number in range(5):
            publisher.send(block(number))
        fed.becomes(10)
        publisher.close()
        # The dead worker holds nothing.
        fed.becomes(0, uncertain=True)
        assert fed.subscription.wait("stale", 0)
        with Publisher(endpoint=publisher.endpoint, replay=publisher.replay) as again:
            # The new life has published, before the connection is made, blocks of another prompt.
            for number in range(first):
                again.send(stored([100 + number], None, [1_000 + number, 1]))
            again.send(block(0))
            fed.becomes(2)
            assert fed.subscription.wait("live", 0)
            again.send(block(1))
            fed.becomes(4)
            fed.index.check()


def test_replay_alone_makes_no_worker_live_whose_connection_was_lost_meanwhile() -> None:
    with Publisher() as publisher, Fed(publisher, check_every=0.05) as fed:
        fed.becomes(0)
        publisher.send(block(0))
        fed.becomes(2)

        def cut(frames: list[list[bytes]]) -> list[list[bytes]]:
            publisher.mangle = list
            with publisher.lock:
                publisher.pub.close(0)
            time.sleep(0.3)  # so that the subscriber's monitor has heard of it
            return frames

        publisher.mangle = cut
        publisher.send(block(1), lost=True)
        publisher.send(block(2))
        until(lambda: fed.subscription.counts["resyncs"] == 1, fed.__repr__)
        asked = len(publisher.asked)
        # There is no connection to the events, however often the replay would answer.
        time.sleep(0.5)
        assert fed.subscription.state == "stale"
        assert (len(publisher.asked), fed.scores()) == (asked, (0, True))


def test_subscriber_that_sleeps_says_so() -> None:
    with Publisher() as publisher, Fed(publisher, replay=False) as fed:
        sends_until(lambda: publisher.send(block(0), number=0), fed, "live")
        publisher.send(block(1), number=20_000)
        assert fed.subscription.wait("gapped", SECONDS)
        assert fed.subscription.counts["missed"] >= 19_000
        assert fed.scores()[1]


def test_topic_that_begins_alike_is_another_stream() -> None:
    """Of an engine with the same broker: its blocks were the worker's, and certain."""
    with Publisher() as publisher, Fed(publisher, replay=False, topic="decode-1") as fed:
        publisher.topic = b"decode-1"
        sends_until(lambda: publisher.send(block(0), number=0), fed, "live")
        publisher.topic = b"decode-10"
        publisher.send(block(1), number=1)
        publisher.topic = b"decode-1"
        publisher.send(stored([50], None, [8, 8]), number=1)
        until(lambda: fed.index.worker_stats(fed.worker)["entries"] == 2, fed.__repr__)
        assert fed.scores() == (2, False)
        publisher.send(block(2), number=2)
        publisher.send(block(1), number=3)
        fed.becomes(6)


def test_approximate_blocks_have_a_stream_of_their_own() -> None:
    with Publisher() as publisher, Publisher() as theirs, Fed(publisher) as fed:
        fed.becomes(0)
        publisher.send(block(0))
        fed.becomes(2)
        moved = {
            **stored([50, 51], 0, [4, 5, 6, 7]),
            "type": "ApproximateBlockStored",
            "classes": ["moved", "after_moved"],
            "hops": [1, 1],
            "position": 2,
        }
        for number in range(3):
            theirs.send(moved, number=number, lost=True)
        theirs.send(moved)
        policy = kvtrie.ReusePolicy()
        with subscribe(
            fed.index, fed.worker, theirs.endpoint, theirs.replay, approximate=True
        ) as second:
            until(
                lambda: int(fed.index.find_matches(PROMPT, policy).possible[0]) == 4, fed.__repr__
            )
            assert second.state == "live"
            assert fed.scores() == (2, False)
        assert fed.index.find_matches(PROMPT).moved.tolist() == [0]
        # Its end does not make the worker uncertain.
        assert fed.scores() == (2, False)


def test_removed_worker_ends_its_subscription() -> None:
    with Publisher() as publisher, Fed(publisher) as fed:
        fed.becomes(0)
        fed.index.remove_worker(fed.worker)
        publisher.send(block(0))
        assert fed.subscription.wait("stale", SECONDS)
        assert "gone" in fed.subscription.error
        assert fed.index.workers == ()


def test_wrong_arguments_name_the_value() -> None:
    index = kvtrie.KvIndexer(SIZE, KEY)
    worker = index.add_worker("w", NS)
    api: Any = subscribe
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "index is 3, not a KvIndexer", lambda: api(3, 0, "tcp://127.0.0.1:1")),
        (ValueError, "endpoint is 'nowhere'", lambda: api(index, worker, "nowhere")),
        (ValueError, "replay is 'x'", lambda: api(index, worker, "tcp://127.0.0.1:1", "x")),
        (
            ValueError,
            "check_every is -1",
            lambda: api(index, worker, "tcp://127.0.0.1:1", check_every=-1),
        ),
        (
            kvtrie.StaleHandleError,
            "no worker 7",
            lambda: api(index, 7, "tcp://127.0.0.1:1"),
        ),
    ]
    for kind, message, call in cases:
        with pytest.raises(kind, match=message):
            call()


def test_close_is_final_and_may_be_repeated() -> None:
    with Publisher() as publisher, Fed(publisher) as fed:
        fed.becomes(0)
        fed.subscription.close()
        fed.subscription.close()
        assert isinstance(fed.subscription, Subscription)
        assert fed.subscription.state == "stale"
        assert fed.scores()[1]


def test_known_gap_is_uncertain_while_the_replay_is_awaited() -> None:
    goes_on = threading.Event()

    def waits(frames: list[list[bytes]]) -> list[list[bytes]]:
        goes_on.wait(SECONDS)
        return frames

    with Publisher() as publisher, Fed(publisher, check_every=0, replay_timeout=SECONDS) as fed:
        assert fed.subscription.wait("live", SECONDS)
        publisher.send(block(0))
        fed.becomes(2)
        publisher.mangle = waits
        publisher.send(removed(0), lost=True)
        publisher.send(block(1))
        try:
            fed.becomes(2, uncertain=True)
            assert fed.subscription.state == "syncing"
        finally:
            goes_on.set()
        fed.becomes(0)


@pytest.mark.parametrize("number", [1 << 63, (1 << 64) - 1], ids=["2**63", "-1"])
def test_number_that_no_batch_has_ends_nothing(number: int) -> None:
    with Publisher() as publisher, Fed(publisher) as fed:
        fed.becomes(0)
        publisher.send(block(0))
        fed.becomes(2)
        publisher.send(block(1), number=number)
        assert fed.subscription.wait("gapped", SECONDS), fed
        assert fed.subscription.counts["refused"] == 1
        assert str(number) in fed.subscription.error
        assert fed.subscription.counts["missed"] == 0
        # It goes on with those that follow, and asks for what may be missing.
        publisher.send(removed(0))
        publisher.send(block(1))
        until(lambda: fed.subscription.counts["batches"] == 3, fed.__repr__)
        assert fed.scores() == (0, True)
        publisher.send(CLEARED)
        publisher.send(block(0))
        fed.becomes(2)


def test_scores_are_uncertain_while_batches_wait_for_a_replay() -> None:
    goes_on = threading.Event()

    def waits(frames: list[list[bytes]]) -> list[list[bytes]]:
        asked.set()
        goes_on.wait(SECONDS)
        return frames

    asked = threading.Event()
    with Publisher() as publisher, Fed(publisher, replay_timeout=SECONDS) as fed:
        publisher.send(block(0))
        fed.becomes(2)
        publisher.mangle = waits
        # A quiet engine is asked for more, and answers late.
        assert asked.wait(SECONDS)
        try:
            assert fed.scores() == (2, False)
            publisher.send(removed(0))
            fed.becomes(2, uncertain=True)
            assert fed.subscription.state == "syncing"
        finally:
            goes_on.set()
        fed.becomes(0)


def test_what_cannot_begin_gives_its_feed_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker could have no other feed for the rest of the process."""

    def fails(*_: object) -> None:
        message = "can't start new thread"
        raise RuntimeError(message)

    index = kvtrie.KvIndexer(SIZE, KEY)
    worker = index.add_worker("w", NS)
    with Publisher() as publisher:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fails)
            with pytest.raises(RuntimeError, match="new thread"):
                subscribe(index, worker, publisher.endpoint)
        with monkeypatch.context() as patch:
            # As a key that interrupts the caller.
            patch.setattr(threading.Event, "wait", lambda *_: fails())
            with pytest.raises(RuntimeError, match="new thread"):
                follow(index, {"a": worker}, servers="nats://127.0.0.1:1", timeout=5)
        subscribe(index, worker, publisher.endpoint).close()


def test_worker_has_one_feed() -> None:
    """Each said that it was certain, whatever the other one lacked."""
    with Publisher() as publisher, Fed(publisher) as fed:
        other = fed.index.add_worker("other", NS)
        publisher.send(block(0))
        fed.becomes(2)
        nowhere: Any = {"servers": "nats://127.0.0.1:1", "timeout": 0}
        with pytest.raises(ValueError, match=f"subscribe: worker {fed.worker} has a feed already"):
            subscribe(fed.index, fed.worker, publisher.endpoint)
        with pytest.raises(ValueError, match=f"follow: worker {fed.worker} has a feed already"):
            follow(fed.index, {"a": other, "b": fed.worker}, **nowhere)
        assert fed.scores() == (2, False)
        # Approximate blocks, another worker, and another index have feeds of their own.
        more: Any = {"topic": "kvtrie", "approximate": True}
        with (
            subscribe(fed.index, fed.worker, publisher.endpoint, **more),
            Fed(publisher) as third,
        ):
            third.becomes(2)
        with (
            follow(fed.index, {"a": other}, **nowhere),
            pytest.raises(ValueError, match=f"worker {other} has a feed"),
        ):
            subscribe(fed.index, other, publisher.endpoint)
        subscribe(fed.index, other, publisher.endpoint).close()
        # What cannot begin has taken nothing, and what has ended gives it back.
        with pytest.raises(ValueError, match="endpoint"):
            subscribe(fed.index, other, "nowhere")
        fed.index.remove_worker(other)
        fed.subscription.close()
        subscribe(fed.index, fed.worker, publisher.endpoint, publisher.replay).close()


@pytest.mark.parametrize("asks", ["replay", "snapshot"])
def test_flood_while_an_answer_is_awaited_is_dropped_and_certain_of_nothing(
    monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    monkeypatch.setattr("kvtrie.cluster.subscription._MOST_WAITING_BYTES", 5_000)
    goes_on, asked = threading.Event(), threading.Event()

    def waits(frames: list[Any]) -> list[Any]:
        asked.set()
        goes_on.wait(SECONDS)
        return frames

    with Publisher() as publisher, Fed(publisher, snapshot=publisher.snapshot) as fed:
        publisher.send(block(0))
        fed.becomes(2)
        if asks == "replay":
            publisher.mangle = waits
        else:
            # No replay has it.
            publisher.buffer.clear()
            publisher.spoil = waits
        publisher.send(block(1), lost=True)
        publisher.buffer.clear()
        publisher.send(block(2))
        assert asked.wait(SECONDS)
        try:
            payload = packed(removed(1), block(2))
            for number in range(3, 3 + 10_000 // len(payload)):
                # Its lock is held while a snapshot is given.
                publisher.pub.send_multipart([b"", number.to_bytes(8, "big"), payload])
            until(lambda: fed.subscription.counts["dropped"] > 0, fed.__repr__)
            assert fed.scores()[1]
            until(lambda: fed.subscription.counts["resyncs"] > 0, fed.__repr__)
        finally:
            goes_on.set()
        assert fed.subscription.counts["dropped"] <= 10_000 // len(payload)
        publisher.mangle = publisher.spoil = list
        publisher.send(CLEARED)
        publisher.send(block(0))
        fed.becomes(2)


@pytest.mark.parametrize("limit", ["_MOST_REPLAYED", "_MOST_REPLAYED_BYTES"])
def test_replay_that_does_not_end_is_not_kept(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(f"kvtrie.cluster.subscription.{limit}", 1_000)

    def floods(frames: list[list[bytes]]) -> list[list[bytes]]:
        client = frames[0][0]
        return [[client, b"", b"", number.to_bytes(8, "big"), packed()] for number in range(3_000)]

    with Publisher() as publisher, Fed(publisher, check_every=0) as fed:
        assert fed.subscription.wait("live", SECONDS)
        publisher.send(block(0))
        fed.becomes(2)
        publisher.mangle = floods
        publisher.send(block(1), lost=True)
        publisher.send(block(2))
        assert fed.subscription.wait("gapped", SECONDS), fed
        assert fed.subscription.counts["replayed"] == 0
        assert fed.subscription.counts["refused"] == 1
        publisher.mangle = list
        publisher.send(CLEARED)
        publisher.send(block(0))
        fed.becomes(2)
