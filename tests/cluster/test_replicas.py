"""Bridges and replicas over a real nats-server: kills, restarts, repeats, other keys.

A certain score is right at every moment, and replicas end with equal digests.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import obstore
import obstore.store
import pytest
from nats.errors import ConnectionClosedError
from nats.js.client import JetStreamContext
from tests.cluster.nats_server import PROGRAM, SECONDS, NatsServer, free_port, needs_nats
from tests.cluster.publisher import CLEARED, SIZE, Publisher, packed, removed, stored
from tests.cluster.test_subscription import KEY, NS, PROMPT, block
from tests.s3_server import S3Bucket

import kvtrie
from kvtrie.cluster import (
    Bridge,
    Replica,
    ReplicationError,
    bridge,
    bridges,
    follow,
    snapshots,
    streams,
    subscription,
)
from kvtrie.cluster import replicas as followed_module

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription, "_LEAST_PAUSE", 0.05)
    monkeypatch.setattr(subscription, "_MOST_PAUSE", 0.4)
    # On a busy machine nothing is late, and NATS is not asked twice.
    monkeypatch.setattr(subscription, "_HEARTBEAT", 30_000)
    monkeypatch.setattr(bridges, "PATIENCE", SECONDS)
    monkeypatch.setattr(bridges, "ANSWER", 30.0)


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    if PROGRAM is None:
        pytest.skip("nats-server is not installed")
    with NatsServer(tmp_path) as server:
        yield server


def until(holds: Callable[[], bool], said: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, said()
        time.sleep(0.01)


class Bridged:
    """An index that a publisher feeds, and its bridge."""

    def __init__(self, publisher: Publisher, nats: NatsServer, **options: Any) -> None:
        self.index = kvtrie.KvIndexer(SIZE, KEY)
        self.worker = self.index.add_worker("w", NS)
        replay = options.pop("replay", publisher.replay)
        options = {"servers": nats.url, "check_every": 0.2, "beat_every": 0.1, **options}
        self.bridge: Bridge = bridge(
            self.index, self.worker, "w", publisher.endpoint, replay, **options
        )

    @property
    def digest(self) -> int:
        return self.index.digest(self.worker)

    def is_uncertain(self) -> bool:
        return bool(self.index.find_matches(PROMPT).uncertain[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bridge.close()


class Followed:
    """An index that follows the bridges."""

    def __init__(self, nats: NatsServer, **options: Any) -> None:
        self.index = kvtrie.KvIndexer(SIZE, options.pop("key", KEY))
        self.worker = self.index.add_worker("w", NS)
        options = {"timeout": SECONDS, **options}
        self.replica: Replica = follow(self.index, {"w": self.worker}, servers=nats.url, **options)

    @property
    def digest(self) -> int:
        return self.index.digest(self.worker)

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.replica.counts)

    def scores(self) -> tuple[int, bool]:
        scores = self.index.find_matches(PROMPT)
        return int(scores.exact[0]), bool(scores.uncertain[0])

    def becomes(self, exact: int, *, uncertain: bool = False) -> None:
        until(lambda: self.scores() == (exact, uncertain), lambda: (self.scores(), self))

    def __repr__(self) -> str:
        return f"{self.replica!r} {self.replica.counts} {self.replica.error}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.replica.close()


def is_right(replicas: list[Followed], exact: int) -> Callable[[], bool]:
    """Whether all replicas are certain. None of them may be so with another score."""

    def holds() -> bool:
        found = [followed.scores() for followed in replicas]
        assert {score for score, uncertain in found if not uncertain} <= {exact}, found
        return not any(uncertain for _, uncertain in found)

    return holds


def is_right_after(replicas: list[Followed], exact: int) -> Callable[[], bool]:
    """Whether all replicas are certain of a score. An earlier one may have been right before."""
    return lambda: all(one.scores() == (exact, False) for one in replicas)


def has_all(replicas: list[Followed], publisher: Publisher) -> Callable[[], bool]:
    """Whether all batches have arrived."""
    last = publisher.number - 1
    return lambda: all(one.replica._workers["w"].applied == last for one in replicas)


def test_three_replicas_have_the_digest_of_the_bridge(nats: NatsServer) -> None:
    with (
        Publisher() as publisher,
        Bridged(publisher, nats) as bridged,
        Followed(nats) as first,
        Followed(nats) as second,
    ):
        for number in range(5):
            publisher.send(block(number))
        first.becomes(10)
        # One that comes later reads the stream from its start.
        with Followed(nats) as third:
            publisher.send(removed(3))
            publisher.send(stored([90, 91], 70, [1, 2, 3, 4]))
            publisher.send({**block(7), "medium": "CPU"})
            replicas = [first, second, third]
            until(has_all(replicas, publisher), lambda: replicas)
            until(is_right(replicas, 6), lambda: replicas)
            assert {one.digest for one in replicas} == {bridged.digest}
            publisher.send(CLEARED)
            until(is_right_after(replicas, 0), lambda: replicas)
            assert {one.digest for one in replicas} == {bridged.digest}
            for one in replicas:
                one.index.check()
                assert one.counts["batches"] == 9
                assert "gaps" not in one.counts
        assert third.scores()[1]


def test_killed_nats_server_leaves_no_wrong_answer(nats: NatsServer) -> None:
    with (
        Publisher() as publisher,
        Bridged(publisher, nats) as bridged,
        Followed(nats) as first,
        Followed(nats) as second,
        Followed(nats) as third,
    ):
        replicas = [first, second, third]
        for number in range(20):
            publisher.send(block(number))
        until(is_right_after(replicas, 40), lambda: replicas)
        for left in (19, 15, 11):
            nats.kill()
            for one in replicas:
                one.becomes(2 * left + 2, uncertain=True)
                assert one.replica.wait("w", "stale", SECONDS)
            # The engine goes on, and its bridge waits.
            for number in range(left, left - 4, -1):
                publisher.send(removed(number))
            publisher.send(block(left))
            # With the first of these batches alone neither it nor its own index is certain.
            until(bridged.is_uncertain, lambda: bridged.bridge)
            assert bridged.bridge.state == bridged.bridge._word().state == "syncing"
            nats.start()
            until(is_right(replicas, 2 * left - 6), lambda: (replicas, bridged.bridge))
            until(has_all(replicas, publisher), lambda: replicas)
            assert {one.digest for one in replicas} == {bridged.digest}
        assert bridged.bridge.wait("live", SECONDS)
        until(lambda: not bridged.is_uncertain(), lambda: bridged.bridge)
        for one in replicas:
            assert "gaps" not in one.counts
            assert one.counts["batches"] == publisher.number


def test_bridge_that_is_slower_than_its_engine_is_not_live(
    nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Publisher() as publisher,
        Bridged(publisher, nats) as bridged,
        Followed(nats) as followed,
    ):
        publisher.send(block(0))
        followed.becomes(2)
        slow, took = threading.Event(), Bridge._took

        def takes_long(self: Bridge, number: int, payload: bytes) -> None:
            slow.wait(0.005)
            took(self, number, payload)

        monkeypatch.setattr(Bridge, "_took", takes_long)
        for _ in range(600):
            publisher.send(block(1))
        # Each batch is quick, and most wait.
        followed.becomes(4, uncertain=True)
        until(bridged.is_uncertain, lambda: bridged.bridge)
        assert bridged.bridge._word().state == "syncing"
        slow.set()
        publisher.send(block(2))
        followed.becomes(6)
        until(lambda: not bridged.is_uncertain(), lambda: bridged.bridge)


def test_bridge_that_waits_for_a_store_is_not_live(
    nats: NatsServer, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, goes_on, put = threading.Event(), threading.Event(), snapshots.put

    def takes_long(*given: Any) -> str:
        waits.set()
        goes_on.wait(SECONDS)
        return put(*given)

    with (
        Publisher() as publisher,
        Bridged(
            publisher, nats, snapshot=publisher.snapshot, store=store, snapshot_every=1e6
        ) as bridged,
        Followed(nats) as followed,
    ):
        publisher.send(block(0))
        followed.becomes(2)
        monkeypatch.setattr(snapshots, "put", takes_long)
        bridged.bridge._stores_at = 0.0
        assert waits.wait(SECONDS)
        try:
            publisher.send(removed(0))
            followed.becomes(2, uncertain=True)
            until(bridged.is_uncertain, lambda: bridged.bridge)
            assert bridged.bridge.state == "syncing"
        finally:
            goes_on.set()
        followed.becomes(0)
        until(lambda: not bridged.is_uncertain(), lambda: bridged.bridge)


REPLICA = """
import sys, time
import kvtrie
from kvtrie.cluster import follow
from tests.cluster.test_subscription import KEY, NS, SIZE
index = kvtrie.KvIndexer(SIZE, KEY)
worker = index.add_worker("w", NS)
replica = follow(index, {"w": worker}, servers=sys.argv[1])
while True:
    said = replica.state("w")
    print(said, index.digest(worker), flush=True)
    time.sleep(0.02)
"""


def test_killed_replica_harms_nobody_and_comes_back(nats: NatsServer) -> None:
    command = [sys.executable, "-c", REPLICA, nats.url]

    def reach(process: subprocess.Popen[str], digest: int) -> None:
        out = process.stdout
        assert out is not None
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        assert f"live {digest}\n" in iter(out.readline, "")
        timer.cancel()

    with (
        Publisher() as publisher,
        Bridged(publisher, nats) as bridged,
        Followed(nats) as other,
    ):
        for number in range(9):
            publisher.send(block(number))
        other.becomes(18)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                reach(process, bridged.digest)
            finally:
                process.kill()
        publisher.send(removed(4))
        other.becomes(8)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                reach(process, bridged.digest)
            finally:
                process.kill()
        assert other.digest == bridged.digest


def test_restarted_bridge_of_the_same_epoch_continues(nats: NatsServer) -> None:
    with Publisher() as publisher, Followed(nats) as followed:
        with Bridged(publisher, nats, epoch="pod-1") as before:
            for number in range(5):
                publisher.send(block(number))
            followed.becomes(10)
        followed.becomes(10, uncertain=True)
        # What is published meanwhile comes from the engine's replay.
        publisher.send(block(5))
        with Bridged(publisher, nats, epoch="pod-1") as after:
            followed.becomes(12)
            assert after.bridge.epoch == before.bridge.epoch
            assert after.bridge.counts["repeats"] == 5
            assert followed.counts["batches"] == 6
            assert "resyncs" not in followed.counts
            assert followed.digest == after.digest


@pytest.mark.parametrize("epochs", [("pod-1", "pod-2"), (None, None)], ids=["named", "unnamed"])
def test_restarted_bridge_of_another_epoch_begins_again(
    nats: NatsServer, epochs: tuple[str | None, str | None]
) -> None:
    with Publisher() as publisher, Followed(nats) as followed:
        with Bridged(publisher, nats, epoch=epochs[0]):
            for number in range(5):
                publisher.send(block(number))
            followed.becomes(10)
        with Bridged(publisher, nats, epoch=epochs[1]) as after:
            until(lambda: followed.counts.get("resyncs") == 1, followed.__repr__)
            followed.becomes(10)
            assert followed.counts["batches"] == 10
            assert followed.digest == after.digest


def test_restarted_engine_is_never_its_old_self(nats: NatsServer) -> None:
    publisher = Publisher()
    with Bridged(publisher, nats, epoch="pod-1") as bridged, Followed(nats) as followed:
        for number in range(5):
            publisher.send(block(number))
        followed.becomes(10)
        first = bridged.bridge.epoch
        publisher.close()
        followed.becomes(0, uncertain=True)
        assert followed.replica.wait("w", "stale", SECONDS)
        with Publisher(endpoint=publisher.endpoint, replay=publisher.replay) as again:
            again.send(stored([100], None, [7, 7]))
            again.send(block(0))
            followed.becomes(2)
            assert bridged.bridge.epoch != first
            assert followed.digest == bridged.digest


def test_replaced_bridge_ends_at_its_next_message(nats: NatsServer) -> None:
    with (
        Publisher() as publisher,
        Publisher() as other,
        Bridged(publisher, nats) as before,
        Followed(nats) as followed,
    ):
        publisher.send(block(0))
        followed.becomes(2)
        with Bridged(other, nats) as after:
            followed.becomes(0)
            # What the first one says does not count, and it learns that.
            publisher.send(block(1))
            assert before.bridge.wait("stale", SECONDS)
            assert "another bridge publishes for worker 'w'" in before.bridge.error
            other.send(block(0))
            other.send(block(1))
            other.send(block(2))
            followed.becomes(6)
            assert followed.digest == after.digest
            # Why it has ended stays, whatever its connection meets after that.
            connection = before.bridge._nats
            connection.soon(lambda: connection._fail("NATS: it is gone"))
            until(lambda: connection.error == "NATS: it is gone", lambda: connection.error)
            assert "another bridge publishes for worker 'w'" in before.bridge.error


def test_silent_bridge_makes_its_worker_uncertain(nats: NatsServer) -> None:
    with (
        Publisher() as publisher,
        Bridged(publisher, nats) as bridged,
        Followed(nats, lease=0.5) as followed,
    ):
        publisher.send(block(0))
        followed.becomes(2)
        # As if its machine were gone: no last word.
        tasks = bridged.bridge._nats._tasks
        bridged.bridge._nats.soon(lambda: [task.cancel() for task in list(tasks)])
        followed.becomes(2, uncertain=True)
        assert followed.replica.wait("w", "stale", SECONDS)


class Raw:
    """Writes messages into the stream as no bridge does."""

    def __init__(self, nats: NatsServer, key: int | None = None) -> None:
        self.key = streams.key_of(kvtrie.KvIndexer(SIZE, KEY).key_check if key is None else key)
        self.connection = streams.Connection("raw", nats.url, lambda _: None, lambda _: None)
        assert self.connection.wait(SECONDS)
        self.epoch = "an epoch"

    def send(self, kind: Any, number: int, payload: bytes = b"", **changes: Any) -> None:
        record = streams.Record(kind, self.key, "w", "raw", self.epoch, number)
        self.write(record._replace(**changes).write(), payload)

    def write(self, header: str, payload: bytes = b"") -> None:
        jetstream = self.connection.client.jetstream()
        headers = {streams.HEADER: header}
        self.connection.call(
            jetstream.publish("kvtrie.events.w", payload, headers=headers), SECONDS
        )

    def beat(self, followed: Followed, number: int, state: str = "live") -> None:
        # Before, it would be the word of nobody.
        until(lambda: followed.replica._workers["w"].bridge == "raw", followed.__repr__)
        record = streams.Record("beat", self.key, "w", "raw", self.epoch, number, state=state)
        headers = {streams.HEADER: record.write()}
        client = self.connection.client
        self.connection.call(client.publish("kvtrie.beats.w", b"", headers=headers), SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


@pytest.fixture
def raw(nats: NatsServer) -> Iterator[Raw]:
    """A stream without a bridge."""
    with Publisher() as publisher, Bridged(publisher, nats):
        pass
    with Raw(nats) as writer:
        yield writer


def test_repeats_change_nothing(nats: NatsServer, raw: Raw) -> None:
    with Followed(nats, lease=SECONDS) as followed:
        raw.send("begin", -1)
        payloads = [packed(block(0), block(1)), packed(removed(1)), packed(block(1))]
        for number, payload in enumerate(payloads):
            raw.send("batch", number, payload)
        # All of them again, some twice: applied, they would leave more copies.
        for number in (0, 1, 2, 2, 0, 1):
            raw.send("batch", number, payloads[number])
        raw.send("begin", -1)
        raw.beat(followed, 2)
        followed.becomes(4)
        until(lambda: followed.counts.get("repeats") == 6, followed.__repr__)
        assert followed.counts["batches"] == 3
        once = kvtrie.KvIndexer(SIZE, KEY)
        worker = once.add_worker("w", NS)
        for payload in payloads:
            once.apply(worker, payload)
        assert followed.digest == once.digest(worker)


def test_reordered_batches_are_a_gap_until_all_is_cleared(nats: NatsServer, raw: Raw) -> None:
    with Followed(nats, lease=SECONDS) as followed:
        for number in (0, 2, 1, 3):
            raw.send("batch", number, packed(block(number)))
        raw.beat(followed, 3)
        followed.becomes(2, uncertain=True)
        until(lambda: followed.replica._workers["w"].applied == 3, followed.__repr__)
        assert followed.replica.wait("w", "gapped", SECONDS)
        assert "batches 1 to 1 are missing" in followed.replica.error
        raw.send("batch", 4, packed(CLEARED, block(0)))
        followed.becomes(2)
        raw.send("batch", 5, b"\xc1")
        followed.becomes(2, uncertain=True)
        assert "batch 5: KvIndexer.apply: byte" in followed.replica.error


def test_replica_is_live_only_with_what_its_bridge_had(nats: NatsServer, raw: Raw) -> None:
    with Followed(nats, lease=SECONDS) as followed:
        raw.send("batch", 0, packed(block(0)))
        followed.becomes(2, uncertain=True)
        assert followed.replica.state("w") == "stale"
        raw.beat(followed, 1)
        assert followed.replica.wait("w", "syncing", SECONDS)
        raw.send("batch", 1, packed(block(1)))
        followed.becomes(4)
        # A batch may be on its way when the bridge speaks; by its next word it is late.
        raw.beat(followed, 2)
        raw.beat(followed, 2)
        followed.becomes(4, uncertain=True)
        raw.send("batch", 2, packed(block(2)))
        followed.becomes(6)
        # Of another epoch than the last message.
        raw.epoch = "a later epoch"
        raw.beat(followed, 2)
        followed.becomes(6, uncertain=True)
        raw.send("begin", -1)
        followed.becomes(0, uncertain=True)
        for state in ("gapped", "syncing", "stale"):
            raw.beat(followed, -1)
            followed.becomes(0)
            raw.beat(followed, -1, state)
            followed.becomes(0, uncertain=True)


def test_another_key_is_refused_by_name(nats: NatsServer, raw: Raw) -> None:
    with pytest.raises(ReplicationError, match=r"follow: workers w: .* of another key") as refused:
        Followed(nats, key=b"another key of tests")
    assert refused.value.reason == "key"
    with Publisher() as publisher:
        index = kvtrie.KvIndexer(SIZE, b"another key of tests")
        worker = index.add_worker("x", NS)
        with pytest.raises(ReplicationError, match=r"bridge: worker 'x': .* of another key"):
            bridge(index, worker, "x", publisher.endpoint, servers=nats.url)
    # One that does not look at the stream's own key.
    with Followed(nats, lease=SECONDS) as followed, Raw(nats, key=7) as other:
        raw.send("batch", 0, packed(block(0)))
        raw.beat(followed, 0)
        followed.becomes(2)
        other.send("batch", 1, packed(block(1)))
        followed.becomes(2, uncertain=True)
        assert followed.replica.error == (
            "a message of worker 'w' was published under another key or block size"
        )


def header(**changes: Any) -> str:
    key = streams.key_of(kvtrie.KvIndexer(SIZE, KEY).key_check)
    record = streams.Record("batch", key, "w", "raw", "an epoch", 1)
    return json.dumps(json.loads(record.write()) | changes)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "header of 0 characters"),
        ("x" * 1_025, "header of 1025 characters; the limit is 1024"),
        ("[" * 1_024, "not JSON"),
        ("[]", "has version None, not 1"),
        (header(version=2), "has version 2, not 1"),
        (header(number=True), "has the header"),
        (header(number=-2), "has the header"),
        (header(number=1 << 63), "has the header"),
        (header(number=1.0), "has the header"),
        (header(kind="more"), "has the header"),
        (header(kind=["batch"]), "has the header"),
        (header(worker="v"), "has the header"),
        (header(epoch=""), "has the header"),
        (header(epoch=5), "has the header"),
        (header(kind="beat", state="well"), "has the header"),
    ],
)
def test_bad_header_names_the_worker(text: str, why: str) -> None:
    key = streams.key_of(kvtrie.KvIndexer(SIZE, KEY).key_check)
    with pytest.raises(ReplicationError, match=f"a message of worker 'w' .*({why})"):
        streams.Record.read({streams.HEADER: text}, "w", key)
    good = streams.Record.read({streams.HEADER: header()}, "w", key)
    assert good.message_id == "w:an epoch:1"


@pytest.fixture(params=["memory", "s3"])
def store(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "memory":
        yield obstore.store.MemoryStore()
    else:
        with S3Bucket() as bucket:
            yield obstore.store.S3Store(bucket.name)


def names(store: Any) -> list[str]:
    return sorted(meta["path"] for part in obstore.list(store) for meta in part)


def test_gap_of_the_bridge_is_restored_from_the_store(nats: NatsServer, store: Any) -> None:
    with (
        Publisher() as publisher,
        Bridged(publisher, nats, replay=None, snapshot=publisher.snapshot, store=store) as bridged,
        Followed(nats, store=store) as followed,
        Followed(nats) as without,
    ):
        until(lambda: bridged.bridge.state == "live", lambda: bridged.bridge)
        publisher.send(block(0))
        followed.becomes(2)
        publisher.send(block(1), lost=True)
        publisher.send(block(2))
        followed.becomes(6)
        assert followed.counts["snapshots"] >= 1
        assert followed.digest == bridged.digest
        until(lambda: without.replica.state("w") == "gapped", without.__repr__)
        until(lambda: "follow has no store" in without.replica.error, without.__repr__)
        # One that comes later needs nothing else.
        with Followed(nats, store=store) as late:
            late.becomes(6)
            assert late.digest == bridged.digest
            assert late.counts.get("batches", 0) <= 1
        assert all(name.startswith(f"w/{bridged.bridge.epoch}/") for name in names(store))


def test_snapshots_shorten_the_stream(nats: NatsServer, store: Any) -> None:
    with (
        Publisher() as publisher,
        Bridged(
            publisher, nats, snapshot=publisher.snapshot, store=store, snapshot_every=0.05
        ) as bridged,
        Followed(nats, store=store) as followed,
    ):
        for number in range(20):
            publisher.send(block(number))
        before = bridged.bridge.counts["snapshots_stored"]
        until(
            lambda: bridged.bridge.counts["snapshots_stored"] >= before + 3,
            lambda: bridged.bridge,
        )
        with Followed(nats, store=store) as late:
            late.becomes(40)
            assert late.counts["snapshots"] >= 1
            assert late.counts.get("batches", 0) == 0
            assert late.digest == followed.digest == bridged.digest
        # Who was there all the time needs none.
        assert "snapshots" not in followed.counts
        assert followed.counts["batches"] == 20
        assert len(names(store)) <= 2


def test_snapshot_that_cannot_be_deleted_is_stored_all_the_same(
    nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []

    def reaches(bridge: Bridge, number: int) -> bool:
        return bridge._applied == number

    def has_stored(counts: Counter[str], number: int) -> bool:
        return counts["snapshots_stored"] == number

    def refuse(_: object, name: str) -> None:
        refused.append(name)
        msg = f"snapshot {name} cannot be deleted: Forbidden"
        raise ReplicationError(msg, reason="snapshot")

    monkeypatch.setattr(snapshots, "delete", refuse)
    # An hour, if all is well; at once after one that was not stored.
    monkeypatch.setattr(bridges, "_LEAST_PAUSE", 0.0)
    store = obstore.store.MemoryStore()
    with (
        Publisher() as publisher,
        Bridged(
            publisher, nats, snapshot=publisher.snapshot, store=store, snapshot_every=3_600
        ) as bridged,
    ):
        counts = bridged.bridge.counts
        until(lambda: bridged.bridge.state == "live", lambda: bridged.bridge)
        for number in range(5):
            publisher.send(block(number))
            until(partial(reaches, bridged.bridge, number), lambda: bridged.bridge)
            bridged.bridge._stores_at = 0.0
            until(partial(has_stored, counts, number + 1), lambda: counts)
        # It is asked for no other one.
        publisher.send(block(5))
        until(lambda: bridged.bridge._applied == 5, lambda: bridged.bridge)
        assert counts["snapshots_stored"] == 5
        assert counts["snapshots_not_stored"] == 0
        assert counts["snapshots_not_deleted"] == 3
        assert "Forbidden" in bridged.bridge.error
        # Each is tried once, and is not remembered for ever.
        assert len(refused) == len(set(refused)) == 3
        assert len(names(store)) == 5


@pytest.mark.parametrize("harm", ["gone", "other bytes", "unreadable"])
def test_stored_snapshot_that_is_not_what_it_must_be(
    nats: NatsServer, raw: Raw, store: Any, harm: str
) -> None:
    batch = packed(CLEARED, block(0)) if harm != "unreadable" else b"\xc1"
    name = snapshots.name_of("w", raw.epoch, 4)
    checksum = snapshots.put(store, name, batch)
    # A name is taken once.
    assert snapshots.put(store, name, b"another") == checksum
    if harm == "gone":
        obstore.delete(store, name)
    elif harm == "other bytes":
        obstore.put(store, name, b"another")
    with Followed(nats, store=store, lease=SECONDS) as followed:
        raw.send("snapshot", 4, checksum=checksum)
        raw.beat(followed, 4)
        assert followed.replica.wait("w", "gapped", SECONDS), followed
        assert followed.scores() == (0, True)
        assert followed.counts["snapshots_refused"] == 1
        why = {"gone": "cannot be read", "other bytes": "has the checksum", "unreadable": "byte"}
        assert why[harm] in followed.replica.error
        assert "worker 'w'" in followed.replica.error
        # Later ones are taken.
        name = snapshots.name_of("w", raw.epoch, 5)
        good = snapshots.put(store, name, packed(CLEARED, block(0)))
        raw.send("snapshot", 5, checksum=good)
        raw.beat(followed, 5)
        followed.becomes(2)


@needs_nats
@pytest.mark.parametrize("size", [3_900, 8_000])
def test_batch_that_nats_does_not_take_is_a_gap(tmp_path: Path, size: int) -> None:
    with (
        NatsServer(tmp_path, max_payload=4_096) as nats,
        Publisher() as publisher,
        Bridged(publisher, nats) as bridged,
        Followed(nats) as followed,
    ):
        publisher.send(block(0))
        followed.becomes(2)
        # NATS counts the headers too: just under its limit is over it.
        publisher.send(*[block(1)] * (size // len(packed(block(1)))))
        publisher.send(block(2))
        until(has_all([followed], publisher), followed.__repr__)
        assert followed.replica.wait("w", "gapped", SECONDS)
        assert "max_payload of NATS is 4096" in bridged.bridge.error
        assert bridged.bridge.state == "live"


def test_bridge_whose_messages_were_dropped_goes_on(nats: NatsServer) -> None:
    with (
        Publisher() as publisher,
        Bridged(publisher, nats) as bridged,
        Followed(nats) as followed,
    ):
        publisher.send(block(0))
        followed.becomes(2)
        with Raw(nats) as raw:
            jetstream = raw.connection.client.jetstream()
            raw.connection.call(jetstream.purge_stream("kvtrie"), SECONDS)
        publisher.send(block(1))
        followed.becomes(4)
        assert "gaps" not in followed.counts
        # A new one has only what is left, and says so.
        with Followed(nats) as late:
            assert late.replica.wait("w", "gapped", SECONDS), late
        assert bridged.bridge.state == "live"


def test_message_whose_answer_was_lost_is_stored_once(
    nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = JetStreamContext.publish
    lost: list[object] = []

    async def loses(self: Any, subject: str, *args: Any, **options: Any) -> Any:
        stored = await publish(self, subject, *args, **options)
        if len(lost) < 2:
            lost.append(stored)
            raise TimeoutError
        return stored

    with (
        Publisher() as publisher,
        Bridged(publisher, nats) as bridged,
        Followed(nats) as followed,
    ):
        publisher.send(block(0))
        followed.becomes(2)
        monkeypatch.setattr(JetStreamContext, "publish", loses)
        publisher.send(block(1))
        publisher.send(block(2))
        followed.becomes(6)
        assert len(lost) == 2
        assert bridged.bridge.counts["repeats"] == 1
        assert "repeats" not in followed.counts
        assert followed.digest == bridged.digest


def test_stream_that_was_made_again_is_read_from_its_start(nats: NatsServer) -> None:
    with (
        Publisher() as publisher,
        Bridged(publisher, nats) as bridged,
        Followed(nats, lease=0.5) as followed,
    ):
        for number in range(5):
            publisher.send(block(number))
        followed.becomes(10)
        bridged.bridge.close()
        with Raw(nats) as raw:
            jetstream = raw.connection.client.jetstream()
            raw.connection.call(jetstream.delete_stream("kvtrie"), SECONDS)
        with Bridged(publisher, nats) as after:
            until(lambda: followed.counts.get("resyncs", 0) >= 1, followed.__repr__)
            followed.becomes(10)
            until(lambda: followed.digest == after.digest, followed.__repr__)


def test_replica_without_nats_is_uncertain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridges, "PATIENCE", 0.05)
    nowhere = f"nats://127.0.0.1:{free_port()}"
    index = kvtrie.KvIndexer(SIZE, KEY)
    worker = index.add_worker("w", NS)
    with follow(index, {"w": worker}, servers=nowhere, timeout=0.05) as replica:
        assert replica.state("w") == "stale"
        until(lambda: "ConnectionRefusedError" in replica.error, lambda: replica.error)
        assert index.find_matches(PROMPT).uncertain.tolist() == [True]
    with pytest.raises(ReplicationError, match=r"bridge: no NATS after") as refused:
        bridge(index, worker, "w", "tcp://127.0.0.1:1", servers=nowhere)
    assert refused.value.reason == "unreachable"


def test_close_ends_although_nats_has_lost_the_subscription(
    nats: NatsServer, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert raw.key
    followed = Followed(nats)
    until(lambda: followed.counts.get("connections", 0) >= 1, followed.__repr__)

    async def lost(_: object) -> None:
        raise ConnectionClosedError

    monkeypatch.setattr(JetStreamContext.PushSubscription, "unsubscribe", lost)
    closing = threading.Thread(target=followed.replica.close, daemon=True)
    closing.start()
    closing.join(SECONDS)
    assert not closing.is_alive()


def test_wrong_arguments_name_the_value() -> None:
    index = kvtrie.KvIndexer(SIZE, KEY)
    worker = index.add_worker("w", NS)
    index.apply(worker, packed(block(0)))
    at, api, end = "tcp://127.0.0.1:1", bridge, follow
    for message, name, given in (
        ("name is 'a.b'", "a.b", {}),
        ("stream is '>'", "w", {"stream": ">"}),
        ("epoch is ''", "w", {"epoch": ""}),
        ("beat_every is 0", "w", {"beat_every": 0}),
        ("max_bytes is 1048575", "w", {"max_bytes": (1 << 20) - 1}),
        ("a store needs snapshot", "w", {"store": 5}),
        ("replay_timeout is -1", "w", {"replay_timeout": -1}),
        ("snapshot_timeout is -5", "w", {"snapshot_timeout": -5}),
        ("check_every is nan", "w", {"check_every": float("nan")}),
    ):
        arguments: Any = {"servers": "nats://127.0.0.1:1", **given}
        with pytest.raises(ValueError, match=message):
            api(index, worker, name, at, **arguments)
    for kind, message, workers, more in (
        (ValueError, "a worker's name is 'a b'", {"a b": worker}, {}),
        (ValueError, "lease is 0.4", {"w": worker}, {"lease": 0.4}),
        (ValueError, "timeout is -1", {"w": worker}, {"timeout": -1}),
        (ValueError, "two names have one number", {"w": worker, "x": worker}, {}),
        (kvtrie.StaleHandleError, "no worker 9", {"w": worker, "x": 9}, {}),
    ):
        options: Any = {"servers": "nats://127.0.0.1:1", **more}
        with pytest.raises(kind, match=message):
            end(index, workers, **options)
    # None of these has cleared the worker that is there.
    assert index.find_matches(PROMPT).exact.tolist() == [2]
    wrong: Any = 3
    with pytest.raises(TypeError, match="follow: index is 3, not a KvIndexer"):
        end(wrong, {}, servers="nats://127.0.0.1:1")
    with pytest.raises(TypeError, match="bridge: index is 3, not a KvIndexer"):
        api(wrong, worker, "w", at, servers="nats://127.0.0.1:1")
    wrong = 2.5
    with pytest.raises(TypeError, match=r"max_bytes must be an int, not 2\.5"):
        api(index, worker, "w", at, servers="nats://127.0.0.1:1", max_bytes=wrong)


def test_message_with_a_deep_header_harms_its_worker_alone(nats: NatsServer, raw: Raw) -> None:
    fed, index = kvtrie.KvIndexer(SIZE, KEY), kvtrie.KvIndexer(SIZE, KEY)
    workers = {name: index.add_worker(name, NS) for name in ("w", "other")}
    other = fed.add_worker("other", NS)
    with (
        Publisher() as publisher,
        bridge(fed, other, "other", publisher.endpoint, publisher.replay, servers=nats.url),
        follow(index, workers, servers=nats.url, timeout=SECONDS) as replica,
    ):
        raw.write("[" * 1_024)
        until(lambda: replica.counts["refused"] == 1, replica.__repr__)
        publisher.send(block(0))
        until(lambda: index.digest(workers["other"]) == fed.digest(other) != 0, replica.__repr__)
        assert replica.wait("other", "live", SECONDS)
        assert replica.counts["connections"] == 1


def test_error_that_nobody_expects_does_not_end_the_reading(
    nats: NatsServer, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, failed = Replica._take, threading.Event()

    async def fails_once(self: Replica, message: Any) -> None:
        if not failed.is_set():
            failed.set()
            msg = "what nobody expects"
            raise RuntimeError(msg)
        await take(self, message)

    monkeypatch.setattr(Replica, "_take", fails_once)
    with Followed(nats, lease=SECONDS) as followed:
        raw.send("batch", 0, packed(block(0)))
        raw.beat(followed, 0)
        followed.becomes(2)
        assert "what nobody expects" in followed.replica.error


def test_beat_that_fails_is_not_the_last(nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    word, failed = Bridge._word, threading.Event()

    def fails_once(self: Bridge) -> streams.Record:
        if not failed.is_set():
            failed.set()
            msg = "what nobody expects"
            raise RuntimeError(msg)
        return word(self)

    with Publisher() as publisher, Bridged(publisher, nats) as bridged:
        publisher.send(block(0))
        monkeypatch.setattr(Bridge, "_word", fails_once)
        assert failed.wait(SECONDS)
        with Followed(nats) as followed:
            followed.becomes(2)
        assert "what nobody expects" in bridged.bridge.error


def test_task_that_fails_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        msg = "what nobody expects"
        raise RuntimeError(msg)

    connection = streams.Connection(
        "a name", f"nats://127.0.0.1:{free_port()}", lambda _: None, lambda _: None
    )
    connection.spawn(fails())
    until(lambda: "a name has ended" in caplog.text, lambda: caplog.text)
    assert "what nobody expects" in caplog.text
    connection.close()


def test_snapshot_that_is_ahead_waits_for_its_batches(
    nats: NatsServer, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridges, "_LEAST_PAUSE", 0.05)
    put, failed = snapshots.put, threading.Event()

    def fails_once(*given: Any) -> str:
        if not failed.is_set():
            failed.set()
            msg = "the store is away"
            raise ReplicationError(msg, reason="snapshot")
        return put(*given)

    with (
        Publisher() as publisher,
        Bridged(
            publisher, nats, snapshot=publisher.snapshot, store=store, snapshot_every=1e6
        ) as bridged,
        Followed(nats, store=store) as followed,
        Followed(nats) as without,
    ):
        publisher.send(block(0))
        followed.becomes(2)
        without.becomes(2)
        before = bridged.bridge.counts["snapshots_stored"]
        had = [one.counts.get("snapshots", 0) for one in (followed, without)]
        publisher.spoil = lambda _: [
            publisher.header(number=1),
            packed(CLEARED, block(0), block(1)),
        ]
        monkeypatch.setattr(snapshots, "put", fails_once)
        bridged.bridge._stores_after = 0.05
        bridged.bridge._stores_at = 0.0
        until(lambda: bridged.bridge._kept is not None, lambda: bridged.bridge)
        assert bridged.bridge.counts["snapshots_stored"] == before
        publisher.send(block(1))
        # After the store was away once.
        until(
            lambda: bridged.bridge.counts["snapshots_stored"] == before + 1, lambda: bridged.bridge
        )
        assert failed.is_set()
        for one, count in zip((followed, without), had, strict=True):
            one.becomes(4)
            # Each had all of it.
            until(lambda one=one: one.counts.get("repeats", 0) >= 1, one.__repr__)  # type: ignore[misc]
            assert one.counts.get("snapshots", 0) == count
            assert "gaps" not in one.counts
            assert one.replica.wait("w", "live", SECONDS)


def test_bridge_takes_over_from_one_that_publishes_meanwhile(
    nats: NatsServer, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    last_record, left = Bridge._last_record, [3, 2, 1]

    async def is_late(self: Bridge) -> Any:
        last = await last_record(self)
        if left:
            record = streams.Record("batch", raw.key, "w", "raw", "pod-1.other", left.pop())
            headers = {streams.HEADER: record.write()}
            jetstream = self._nats.client.jetstream()
            await jetstream.publish("kvtrie.events.w", b"", headers=headers)
        return last

    monkeypatch.setattr(Bridge, "_last_record", is_late)
    with Publisher() as publisher, Bridged(publisher, nats, epoch="pod-1") as bridged:
        assert not left
        # As the last one has it.
        assert bridged.bridge.epoch == "pod-1.other"


def test_wrong_endpoint_leaves_the_running_bridge_alone(nats: NatsServer) -> None:
    with Publisher() as publisher, Bridged(publisher, nats), Followed(nats) as followed:
        publisher.send(block(0))
        followed.becomes(2)
        index = kvtrie.KvIndexer(SIZE, KEY)
        worker = index.add_worker("w", NS)
        with pytest.raises(ValueError, match="endpoint is 'nowhere'"):
            bridge(index, worker, "w", "nowhere", servers=nats.url)
        publisher.send(block(1))
        followed.becomes(4)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"subjects": ["kvtrie.events.x"]}, "has the subjects"),
        ({"allow_rollup_hdrs": False}, "does not allow rollups"),
    ],
)
def test_stream_that_a_bridge_cannot_use_is_refused(
    nats: NatsServer, changes: dict[str, Any], why: str
) -> None:
    key = streams.key_of(kvtrie.KvIndexer(SIZE, KEY).key_check)
    options: dict[str, Any] = {"subjects": ["kvtrie.events.*"], "allow_rollup_hdrs": True}
    with Raw(nats) as raw, Publisher() as publisher:
        jetstream = raw.connection.client.jetstream()
        made = jetstream.add_stream(
            name="kvtrie", description=streams.describe(key), **{**options, **changes}
        )
        raw.connection.call(made, SECONDS)
        with pytest.raises(ReplicationError, match=f"bridge: worker 'w': .*{why}") as refused:
            Bridged(publisher, nats)
        assert refused.value.reason == "malformed"


def test_words_from_before_a_pause_do_not_count(
    nats: NatsServer, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Followed(nats, lease=SECONDS) as followed:
        raw.send("batch", 0, packed(block(0)))
        raw.beat(followed, 0)
        followed.becomes(2)
        before = followed.replica._beats
        now = followed_module._now
        monkeypatch.setattr(followed_module, "_now", lambda: now() + SECONDS)
        followed.becomes(2, uncertain=True)
        until(lambda: followed.replica._beats not in {None, before}, followed.__repr__)
        raw.beat(followed, 0)
        followed.becomes(2)


def test_lease_ends_though_the_reading_thread_is_late(nats: NatsServer, raw: Raw) -> None:
    """Scores stayed certain for as long as that thread did not look."""
    late = threading.Event()
    with Followed(nats, lease=1.0) as followed:
        raw.send("batch", 0, packed(block(0)))
        raw.beat(followed, 0)
        followed.becomes(2)
        followed.replica._nats.soon(late.wait)
        try:
            followed.becomes(2, uncertain=True)
            assert followed.replica.state("w") == "live"
        finally:
            late.set()


def test_worker_whose_subscription_has_ended_is_certain_again(nats: NatsServer, raw: Raw) -> None:
    """What its subscription said last of the time made it uncertain for good."""
    with Followed(nats) as followed:
        followed.index.set_certain_for(followed.worker, 1)
        raw.send("batch", 0, packed(block(0)))
        raw.beat(followed, 0)
        followed.becomes(2)


def test_word_before_the_last_counts_for_a_lease() -> None:
    followed = followed_module._Followed("w", 0)
    followed.bridge, followed.epoch, followed.applied, followed.state = "b", "e", 2, "live"
    followed.before, followed.beat = (
        streams.Record("beat", "k", "w", "b", "e", number, state="live") for number in (2, 3)
    )
    followed.before_at, followed.heard_at = 10.0, 12.5
    assert followed.judge(9.5) == "live"
    # What the last one said has not come for that long.
    assert followed.judge(10.5) == "syncing"
    followed.applied = 3
    assert followed.judge(10.5) == "live"
    assert followed.judge(13.0) == "stale"


def test_store_that_does_not_answer_keeps_no_worker_waiting(
    nats: NatsServer, raw: Raw, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = threading.Event()

    def waits(*_: object) -> bytes:
        ends.wait(SECONDS)
        msg = "it was away"
        raise ReplicationError(msg, reason="snapshot")

    monkeypatch.setattr(followed_module, "_STORE_PATIENCE", 0.05)
    monkeypatch.setattr(snapshots, "get", waits)
    try:
        with Followed(nats, store=store, lease=SECONDS) as followed:
            raw.send("snapshot", 4, checksum="any")
            raw.send("batch", 5, packed(block(0)))
            until(lambda: followed.replica._workers["w"].applied == 5, followed.__repr__)
            assert followed.counts["snapshots_refused"] == 1
            assert "TimeoutError" in followed.replica.error
    finally:
        ends.set()
