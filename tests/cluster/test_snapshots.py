"""Snapshots over real sockets: what no replay has, whose events they are, and bad answers."""

from __future__ import annotations

import re
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import pytest
from tests.cluster.publisher import CLEARED, SIZE, Publisher, packed, removed, stored
from tests.cluster.test_subscription import PROMPT, SECONDS, Fed, block, sends_until, until

import kvtrie
from kvtrie.cluster import subscribe, subscription

if TYPE_CHECKING:
    from collections.abc import Callable

BAD = stored([900], None, [7, 7])


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription, "_LEAST_PAUSE", 0.05)
    monkeypatch.setattr(subscription, "_MOST_PAUSE", 0.4)


class Sourced(Fed):
    """An index that a publisher feeds, and gives snapshots to."""

    def __init__(self, publisher: Publisher, *, replay: bool = False, **options: Any) -> None:
        options = {"snapshot": publisher.snapshot, "snapshot_timeout": 0.5, **options}
        super().__init__(publisher, replay=replay, **options)

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.subscription.counts)

    def __enter__(self) -> Self:
        return self


def lose(publisher: Publisher, numbers: range) -> None:
    for number in numbers:
        publisher.send(block(number), lost=True)


@pytest.mark.parametrize("replay", [False, True], ids=["no replay", "a short replay"])
def test_late_subscriber_is_live(replay: bool) -> None:
    with Publisher() as publisher:
        # More than the replay buffer has.
        lose(publisher, range(20))
        publisher.send(removed(3), lost=True)
        for _ in range(60):
            publisher.send(block(5), lost=True)
        publisher.send(block(3), lost=True)
        with Sourced(publisher, replay=replay) as fed:
            fed.becomes(40)
            assert fed.subscription.state == "live"
            assert fed.counts["snapshots"] == 1
            publisher.send(removed(7))
            fed.becomes(14)
            fed.index.check()
        with Fed(publisher, replay=replay) as without:
            sends_until(lambda: publisher.send(block(7)), without, "gapped")


def test_subscriber_of_an_idle_engine_is_live_without_a_batch() -> None:
    with Publisher() as publisher, Sourced(publisher) as fed:
        fed.becomes(0)
        assert fed.subscription.state == "live"
        publisher.send(block(0))
        fed.becomes(2)
        assert fed.counts["snapshots"] == 1


def test_gap_that_no_replay_fills_is_restored() -> None:
    with Publisher() as publisher, Sourced(publisher, replay=True) as fed:
        fed.becomes(0)
        publisher.send(block(0))
        fed.becomes(2)
        assert "snapshots_asked" not in fed.counts
        lose(publisher, range(1, 19))
        for _ in range(60):
            publisher.send(block(4), lost=True)
        publisher.send(block(19))
        fed.becomes(40)
        assert fed.subscription.state == "live"
        assert fed.counts["missed"] > 0
        assert fed.counts["snapshots"] == 1
        # There are 61 copies of the fourth block.
        for exact in [40] * 60 + [8]:
            publisher.send(removed(4))
            until(lambda: fed.subscription._applied == publisher.number - 1, fed.__repr__)
            fed.becomes(exact)


def test_batch_that_cannot_be_read_is_made_good() -> None:
    with Publisher() as publisher, Sourced(publisher) as fed:
        fed.becomes(0)
        publisher.send(block(0))
        publisher.send_raw(b"\xc1")
        publisher.send(block(1))
        until(lambda: fed.subscription.counts["snapshots"] == 2, fed.__repr__)
        fed.becomes(4)
        assert fed.subscription.state == "live"


def test_batches_that_arrive_during_the_transfer_are_applied_once() -> None:
    with Publisher() as publisher, Sourced(publisher, snapshot_timeout=5.0) as fed:
        fed.becomes(0)

        def meanwhile(_: list[bytes]) -> list[bytes]:
            # The subscriber waits. The first of these batches is in the snapshot, too: applied
            # twice, it would leave a copy of block 2 after its removal.
            number = publisher.number
            late = [packed(block(2)), packed(block(3)), packed(removed(2))]
            for at, payload in enumerate(late):
                publisher.pub.send_multipart([b"", (number + at).to_bytes(8, "big"), payload])
            publisher.number += 3
            publisher.spoil = list
            batch = packed(CLEARED, *publisher.history, block(2))
            return [publisher.header(number=number), batch]

        publisher.spoil = meanwhile
        publisher.send(block(0))
        publisher.send(block(9), lost=True)
        publisher.send(block(1))
        until(lambda: fed.subscription._applied == 5, fed.__repr__)
        fed.becomes(4)
        assert fed.subscription.state == "live"
        assert fed.counts["snapshots"] == 2
        assert fed.index.worker_stats(fed.worker)["unknown_removals"] == 0
        publisher.send(block(2))
        fed.becomes(8)


def test_batch_that_is_lost_after_a_snapshot_asks_for_another() -> None:
    with Publisher() as publisher, Sourced(publisher) as fed:
        fed.becomes(0)
        for number in range(0, 20, 2):
            publisher.send(block(number), lost=True)
            publisher.send(block(number + 1))
            fed.becomes(2 * (number + 2))
        # The last one leaves no gap: the engine says that there is one.
        publisher.send(removed(4), lost=True)
        fed.becomes(8)
        assert fed.subscription.state == "live"
        assert fed.counts["gaps"] == 11


def test_requests_become_rare() -> None:
    with Publisher() as publisher, Sourced(publisher, snapshot_timeout=0.0) as fed:
        publisher.spoil = lambda _: []
        publisher.send(block(0), number=7)
        until(lambda: fed.subscription.counts["snapshots_asked"] >= 5, fed.__repr__)
        assert fed.subscription._pause == 0.4
        assert "no snapshot from tcp" in fed.subscription.error
    # A new life of the engine is asked at once again; its thread has ended.
    fed.subscription._forget()
    assert fed.subscription._pause == 0.05


def test_batches_that_wait_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst takes longer than a batch may be under way."""
    take = subscription.Subscription._take

    def slow(self: subscription.Subscription, frames: list[bytes]) -> None:
        time.sleep(0.002)
        take(self, frames)

    with Publisher() as publisher, Sourced(publisher) as fed:
        publisher.send(block(0))
        fed.becomes(2)
        monkeypatch.setattr(subscription.Subscription, "_take", slow)
        before = fed.counts
        for _ in range(1_600):
            publisher.send(block(1), removed(1))
        publisher.send(block(1))
        until(lambda: fed.scores() == (4, False), fed.__repr__)
        for name in ("gaps", "snapshots_asked"):
            assert fed.counts.get(name, 0) == before.get(name, 0)


def test_snapshots_hold_the_index_for_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    put, begun = subscription.Subscription._put, list[float]()

    def slow(self: subscription.Subscription, frames: list[bytes]) -> None:
        begun.append(time.monotonic())
        time.sleep(0.1)
        put(self, frames)

    monkeypatch.setattr(subscription.Subscription, "_put", slow)
    with Publisher() as publisher, Sourced(publisher) as fed:
        for number in range(4):
            publisher.send(block(number), lost=True)
            fed.becomes(2 * (number + 1))
    assert len(begun) > 1
    assert all(after - before > 1.0 for before, after in pairwise(begun))


@pytest.mark.parametrize("quiet", [True, False], ids=["quiet", "busy"])
def test_incarnation_that_changes_ends_everything(quiet: bool) -> None:
    """As through a broker that keeps the connection, with numbers that do not go back."""
    with Publisher() as publisher, Sourced(publisher) as fed:
        fed.becomes(0)
        for number in range(5):
            publisher.send(block(number))
        fed.becomes(10)
        until(lambda: fed.subscription._incarnation == "a life", fed.__repr__)
        with publisher.lock:
            publisher.incarnation = "another life"
            publisher.history = [block(0)]
        if not quiet:
            publisher.send(block(1))
        fed.becomes(2 if quiet else 4)
        assert fed.subscription.state == "live"
        assert fed.counts["resyncs"] == 1
        assert fed.counts["snapshots"] == 2
        publisher.send(block(2))
        fed.becomes(2 if quiet else 6)


def test_snapshot_of_another_incarnation_ends_everything_first() -> None:
    with Publisher() as publisher, Sourced(publisher, check_every=0.0) as fed:
        fed.becomes(0)
        publisher.send(block(0))
        fed.becomes(2)
        with publisher.lock:
            publisher.incarnation = "another life"
            publisher.history.clear()
            publisher.number = 0
            # Refused, but not what it says of the engine.
            publisher.spoil = lambda answer: [answer[0], packed(CLEARED)[:-1]]
        publisher.send(block(1), number=5)
        fed.becomes(0, uncertain=True)
        assert fed.counts["resyncs"] == 1
        with publisher.lock:
            publisher.spoil = list
        fed.becomes(0)
        assert fed.subscription.state == "live"


def test_restarted_engine_is_restored() -> None:
    publisher = Publisher()
    with Sourced(publisher) as fed:
        fed.becomes(0)
        publisher.send(block(0))
        fed.becomes(2)
        publisher.close()
        fed.becomes(0, uncertain=True)
        assert fed.subscription.wait("stale", 0)
        with Publisher(
            endpoint=publisher.endpoint, replay=publisher.replay, snapshot=publisher.snapshot
        ) as again:
            again.incarnation = "another life"
            lose(again, range(3))
            fed.becomes(6)
            assert fed.subscription.state == "live"


def changed(name: str, value: object) -> Callable[[Publisher, list[bytes]], list[bytes]]:
    return lambda publisher, answer: [publisher.header(**{name: value}), *answer[1:]]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (changed("number", 1), "it ends with batch 1, and batch 3 has arrived"),
        (changed("number", True), "its number is True"),
        (changed("number", -2), "its number is -2"),
        (changed("number", 1 << 70), "its number is 11805"),
        (changed("version", 2), "its version is 2, not 1"),
        (changed("incarnation", 5), "its incarnation is 5"),
        (changed("more", "x" * 300), "its header has 3.. bytes; the limit is 256"),
        (lambda _, answer: [b"[" * 250, answer[1]], "cannot be used"),
        (lambda _, answer: [b"\xff", answer[1]], "cannot be used"),
        (lambda _, answer: [b"[]", answer[1]], "its version is None"),
        (lambda _, answer: answer[:1], "it has 2 frames, not .empty, header, batch."),
        (lambda _, answer: [*answer, b""], "it has 4 frames"),
        (lambda _, answer: [answer[0], b""], "does not begin with AllBlocksCleared"),
        (
            lambda _, answer: [answer[0], packed(BAD)],
            "does not begin with AllBlocksCleared",
        ),
        (lambda _, answer: [answer[0], answer[1][:-1]], "KvIndexer.apply: byte"),
        (lambda _, answer: [answer[0], answer[1] + b"\0"], "1 bytes too many"),
        (
            lambda _, answer: [answer[0], packed(CLEARED, BAD, {**BAD, "block_size": 16})],
            "blocks of 16 tokens",
        ),
        (lambda _, answer: [answer[0], packed(CLEARED, BAD, rank=1)], "data-parallel rank 1"),
        (
            lambda _, answer: [answer[0], packed(CLEARED, *[BAD] * 60)],
            "the batch has .* bytes; the limit is 4000",
        ),
    ],
)
def test_answer_that_cannot_be_used_changes_nothing(
    spoil: Callable[[Publisher, list[bytes]], list[bytes]], why: str
) -> None:
    with Publisher() as publisher, Small(publisher) as fed:
        fed.becomes(0)
        publisher.send(block(0))
        publisher.send(block(1))
        fed.becomes(4)
        with publisher.lock:
            publisher.spoil = lambda answer: spoil(publisher, answer)
        publisher.send(block(7), lost=True)
        publisher.send(block(2))
        until(lambda: fed.subscription.counts["snapshots_refused"] >= 2, fed.__repr__)
        assert fed.subscription.state == "gapped"
        assert fed.scores() == (6, True)
        assert fed.index.find_matches(kvtrie.TokenSequence([7, 7], PROMPT.namespace)).exact[0] == 0
        refused = fed.subscription.error
        assert "an answer of tcp" in refused
        assert re.search(why, refused), refused
        # Batches go on, and a good answer is taken.
        publisher.send(block(3))
        fed.becomes(8, uncertain=True)
        with publisher.lock:
            publisher.spoil = list
        fed.becomes(8)
        fed.index.check()


class Small(Sourced):
    """Its index reads batches of 4,000 bytes at most."""

    def __init__(self, publisher: Publisher) -> None:
        self.index = kvtrie.KvIndexer(SIZE, b"the key of tests", max_batch_bytes=4_000)
        self.worker = self.index.add_worker("w", PROMPT.namespace)
        self.subscription = subscribe(
            self.index,
            self.worker,
            publisher.endpoint,
            snapshot=publisher.snapshot,
            snapshot_timeout=0.5,
            check_every=0.2,
        )


def test_no_answer_leaves_the_worker_gapped_and_following() -> None:
    with Publisher() as publisher, Sourced(publisher, snapshot_timeout=0.2) as fed:
        fed.becomes(0)
        with publisher.lock:
            publisher.spoil = lambda _: []
        publisher.send(block(0))
        publisher.send(block(7), lost=True)
        publisher.send(block(1))
        until(lambda: fed.subscription.counts["snapshots_asked"] >= 3, fed.__repr__)
        assert fed.subscription.state == "gapped"
        publisher.send(block(2))
        fed.becomes(6, uncertain=True)
        # The engine's own event ends the gap as before.
        publisher.send(CLEARED)
        publisher.send(block(0))
        fed.becomes(2)


def test_a_gap_is_counted_once_however_often_the_engine_names_it() -> None:
    def answered() -> None:
        """The next answer has been heard, and the one after it."""
        heard = publisher.num_states + 3
        until(lambda: publisher.num_states >= heard, fed.__repr__)

    with Publisher() as publisher, Sourced(publisher, check_every=0.05) as fed:
        fed.becomes(0)
        publisher.spoil = lambda _: [b"[]", b""]
        publisher.send(block(0))
        fed.becomes(2)
        publisher.send(block(7), lost=True)
        until(lambda: fed.counts.get("gaps", 0) == 1, fed.__repr__)
        answered()
        assert (fed.subscription.state, fed.counts["gaps"]) == ("gapped", 1)
        # The batch after it shows the same gap.
        publisher.send(block(1))
        fed.becomes(4, uncertain=True)
        answered()
        assert (fed.counts["gaps"], fed.counts["missed"]) == (1, 1)
        # Another is lost, and one more while it is missing.
        publisher.send(block(7), lost=True)
        until(lambda: fed.counts["gaps"] == 2, fed.__repr__)
        publisher.send(block(7), lost=True)
        publisher.send(block(2))
        fed.becomes(6, uncertain=True)
        answered()
        assert (fed.counts["gaps"], fed.counts["missed"]) == (3, 3)


def test_snapshot_that_is_older_than_replayed_batches_is_refused() -> None:
    with Publisher() as publisher:
        for number in range(60):
            publisher.send(block(number), lost=True)
        # Twice, so that the replay buffer begins after the first blocks.
        for _ in range(30):
            publisher.send(removed(5), lost=True)
        old = [packed(CLEARED, *[block(number) for number in range(60)])]
        publisher.spoil = lambda _: [publisher.header(number=3), *old]
        with Sourced(publisher, replay=True) as fed:
            until(lambda: fed.counts.get("snapshots_refused", 0) > 0, fed.__repr__)
            assert "it ends with batch 3, and batch 89 has arrived" in fed.subscription.error
            assert fed.subscription.state == "gapped"
            assert fed.counts.get("snapshots", 0) == 0
            with publisher.lock:
                publisher.spoil = list
            fed.becomes(10)


def test_source_that_does_not_answer_is_counted() -> None:
    """Without it neither a lost last batch nor a restart that a broker hides is seen."""
    with (
        Publisher() as publisher,
        Sourced(publisher, snapshot="tcp://127.0.0.1:1", check_every=0.05) as fed,
    ):
        until(lambda: fed.counts.get("unanswered", 0) > 2, fed.__repr__)
        assert fed.subscription.error == "tcp://127.0.0.1:1 does not answer"
    with Publisher() as publisher, Sourced(publisher, check_every=5.0) as fed:
        fed.becomes(0)
        assert "unanswered" not in fed.counts


def test_source_that_is_nowhere_does_not_hold_up_events_without_a_gap() -> None:
    with (
        Publisher() as publisher,
        Sourced(publisher, replay=True, snapshot="tcp://127.0.0.1:1", snapshot_timeout=0.1) as fed,
    ):
        for number in range(20):
            publisher.send(block(number))
        fed.becomes(40)
        assert fed.subscription.state == "live"


def test_closing_does_not_wait_for_an_answer() -> None:
    with Publisher() as publisher, Sourced(publisher, snapshot_timeout=1e6) as fed:
        publisher.spoil = lambda _: []
        until(lambda: publisher.num_snapshots > 0, fed.__repr__)
        fed.subscription.close()
        assert fed.subscription.state == "stale"


def test_lost_connection_ends_the_wait() -> None:
    publisher = Publisher()
    with Sourced(publisher, snapshot_timeout=1e6) as fed:
        publisher.spoil = lambda _: []
        until(lambda: publisher.num_snapshots > 0, fed.__repr__)
        publisher.close()
        assert fed.subscription.wait("stale", SECONDS), fed


def test_wrong_arguments_name_the_value() -> None:
    index = kvtrie.KvIndexer(SIZE, b"the key of tests")
    worker = index.add_worker("w", PROMPT.namespace)
    at, api = "tcp://127.0.0.1:1", subscribe
    for message, given in (
        ("snapshot is 'x'", {"snapshot": "x"}),
        ("snapshot_timeout is -1", {"snapshot": at, "snapshot_timeout": -1}),
        ("must be None with approximate=True", {"snapshot": at, "approximate": True}),
    ):
        with pytest.raises(ValueError, match=message):
            api(index, worker, at, **given)
