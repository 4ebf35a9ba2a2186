"""Follows the streams of bridges into an index of one's own.

All messages of all workers arrive in the stream's one order. A batch counts once: what it does is
decided by worker, epoch and number alone, so repeats and late copies change nothing, and a number
that is too high is a gap. Another epoch ends everything that is known of the worker.

A worker is live while NATS is connected, its bridge is heard, says that it is live, and had no
batch by its last beat that has not been applied here; by the one before, if that is not too old.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, Self

from kvtrie._core import EventError, StaleHandleError
from kvtrie.cluster import snapshots
from kvtrie.cluster._feeds import Feed
from kvtrie.cluster.streams import (
    ANSWER,
    Connection,
    Record,
    ReplicationError,
    check_name,
    check_stream,
    describe,
    key_of,
)
from kvtrie.cluster.subscription import LARGEST_SNAPSHOT, check_arguments

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from obstore.store import ObjectStore

    from kvtrie._core import KvIndexer
    from kvtrie.cluster.subscription import SubscriptionState

_LOG: Final = logging.getLogger("kvtrie.cluster")
_TICK: Final = 0.1
# Seconds for a snapshot of a store, while which all other messages wait.
_STORE_PATIENCE: Final = 30.0
_LEAST_LEASE: Final = 0.5
# Milliseconds that an index takes.
_LONGEST: Final = (1 << 31) - 1
_RETRY: Final = 0.2
_TRIES: Final = 3


def _now() -> float:
    """Seconds, also those in which the machine slept, where the system counts them."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


def follow(
    index: KvIndexer,
    workers: Mapping[str, int],
    *,
    servers: str | list[str],
    stream: str = "kvtrie",
    store: ObjectStore | None = None,
    lease: float = 3.0,
    timeout: float = 5.0,
) -> Replica:
    """Feed an index from bridges, in a thread of its own, until `close`.

    It returns whether or not NATS answers. Workers are uncertain until all of their batches have
    arrived.

    Args:
        index: The index, with the key and block size of the bridges'.
        workers: The numbers of its workers by their names in the stream. Others are left out.
        servers: Where NATS is, for instance `"nats://10.0.0.1:4222"`.
        stream: The bridges' stream.
        store: Where the bridges put snapshots, or None.
        lease: Seconds without a word of a bridge after which its worker is uncertain; 0.5 or more.
        timeout: Seconds to wait for the stream, so that another key is an error at once. Later it
            is in `Replica.error`.

    Raises:
        ImportError: nats-py or, with a store, obstore is missing.
        TypeError: `index` is not a `KvIndexer`.
        ValueError: A name or a time is wrong, two names have one number, or a worker has a feed
            already.
        ReplicationError: The stream is there, and has another key, block size or version.
        StaleHandleError: There is no such worker.

    Example:
        >>> index = kvtrie.KvIndexer(16, b"a secret of yours")
        >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
        >>> workers = {"decode-0": index.add_worker("decode-0", space)}
        >>> nowhere = "nats://127.0.0.1:1"
        >>> with kvtrie.cluster.follow(index, workers, servers=nowhere, timeout=0) as replica:
        ...     replica.state("decode-0")
        'stale'
    """
    call = "follow"
    check_arguments(call, index, timeout=timeout)
    check_name(call, "stream", stream)
    for name in workers:
        check_name(call, "a worker's name", name)
    if len(set(workers.values())) < len(workers):
        msg = f"{call}: workers is {dict(workers)}; two names have one number"
        raise ValueError(msg)
    if not _LEAST_LEASE <= lease < 1e9:
        msg = f"{call}: lease is {lease}; it must be in [{_LEAST_LEASE}, 1e9)"
        raise ValueError(msg)
    if store is not None:
        snapshots.check_installed()
    return Replica(
        index, workers, servers=servers, stream=stream, store=store, lease=lease, timeout=timeout
    )


class _Followed:
    """What is known of one worker."""

    def __init__(self, name: str, worker: int) -> None:
        self.name = name
        self.worker = worker
        self.state: SubscriptionState = "stale"
        self.bridge = self.epoch = ""
        self.applied = -1
        self.is_gapped = False
        # The last two words of its bridge, and when they came.
        self.beat: Record | None = None
        self.before: Record | None = None
        self.before_at = self.heard_at = float("-inf")
        # When that word, and all that was read, said the same.
        self.agreed_at = float("-inf")

    def counts_from(self) -> float:
        """When the word came by which the worker is live."""
        beat = self.beat
        has_all = beat is not None and self.applied >= beat.number
        return self.heard_at if has_all else self.before_at

    def judge(self, since: float) -> SubscriptionState:
        """The state, if words that came before a moment do not count."""
        beat = self.beat
        if beat is None or self.heard_at < since:
            return "stale"
        if self.is_gapped:
            return "gapped"
        if (beat.bridge, beat.epoch) != (self.bridge, self.epoch):
            return "syncing"
        if beat.state != "live":
            return "stale" if beat.state == "stale" else "syncing"
        # What the bridge had by its last word may be on its way; what it had before is late.
        needed = beat.number
        before = self.before
        is_late = before is None or before[:5] != beat[:5] or self.before_at < since
        if self.state == "live" and before is not None and not is_late:
            needed = min(needed, before.number)
        return "live" if self.applied >= needed else "syncing"


class Replica:
    """The workers of bridges on their way into an index. `follow` makes it.

    Attributes:
        counts: `batches` applied, `repeats` that changed nothing, `gaps` met, `refused` messages
            and batches, `resyncs`: lives of engines that ended, `snapshots` applied,
            `snapshots_refused`, and `connections` to the stream.
        error: The last thing that went wrong, in words; empty if nothing has.
    """

    def __init__(
        self,
        index: KvIndexer,
        workers: Mapping[str, int],
        *,
        servers: str | list[str],
        stream: str,
        store: ObjectStore | None,
        lease: float,
        timeout: float,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.error = ""
        self._index = index
        self._stream = stream
        self._store = store
        self._lease = lease
        self._key = key_of(index.key_check)
        self._workers = {name: _Followed(name, worker) for name, worker in workers.items()}
        self._changed = threading.Condition()
        self._refusal: ReplicationError | None = None
        self._is_connected = False
        self._renew = asyncio.Event()
        # The last message of the stream that was read, and when the stream was made.
        self._position = 0
        self._made: object = None
        self._read_at = float("-inf")
        self._beats: Any = None
        self._listens = asyncio.Event()
        self._looked_at = _now()
        for worker in workers.values():
            # Before anything is cleared, so that an error changes nothing.
            index.worker_stats(worker)
        self._feed = Feed("follow", index, workers.values())
        self._opened = threading.Event()
        try:
            for followed in self._workers.values():
                index.set_uncertain(followed.worker, True)
                index.clear_worker(followed.worker)
            self._nats = Connection("kvtrie-replica", servers, self._connected, self._failed)
        except BaseException:
            self._feed.release()
            raise
        try:
            self._nats.spawn(self._run())
            self._opened.wait(timeout)
        except BaseException:
            self.close()
            raise
        refusal = self._refused()
        if refusal is not None:
            self.close()
            raise refusal

    @property
    def workers(self) -> dict[str, int]:
        """The numbers of its workers by their names in the stream."""
        return {name: followed.worker for name, followed in self._workers.items()}

    def state(self, worker: str) -> SubscriptionState:
        """What is known of a worker.

        `"syncing"`: not everything yet, here or at its bridge; `"live"`: everything, up to what its
        bridge had by its last word but one; `"gapped"`: batches are missing; `"stale"`: NATS or the
        bridge is silent, or the bridge has lost its engine. The worker's scores are uncertain in
        all states but `"live"`.

        Raises:
            KeyError: It is not followed.
        """
        return self._workers[worker].state

    def wait(self, worker: str, state: SubscriptionState, timeout: float | None = None) -> bool:
        """Wait for a worker's state.

        Args:
            worker: Its name.
            state: The state.
            timeout: Seconds, or None.

        Returns:
            Whether it is in that state.

        Raises:
            KeyError: It is not followed.
        """
        followed = self._workers[worker]
        with self._changed:
            return self._changed.wait_for(lambda: followed.state == state, timeout)

    def close(self) -> None:
        """End the thread. The workers stay as they are, and uncertain."""
        self._nats.close()
        self._is_connected = False
        for followed in self._workers.values():
            self._judge(followed)
        self._feed.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        states = {name: followed.state for name, followed in self._workers.items()}
        return f"<Replica of {self._stream!r}: {states}>"

    def _refused(self) -> ReplicationError | None:
        return self._refusal

    def _failed(self, why: str) -> None:
        # What the stream was refused for stays: nothing of it counts any more.
        if self._refusal is None:
            self.error = why

    def _connected(self, is_connected: bool) -> None:
        self._is_connected = is_connected
        for followed in self._workers.values():
            # Only what is said from here on counts.
            followed.beat = followed.before = None
            self._judge(followed)
        self._renew.set()

    def _judge(self, followed: _Followed) -> None:
        since = time.monotonic() - self._lease if self._is_connected else float("inf")
        state = followed.judge(since)
        if state == followed.state != "live":
            return
        # The index says it first: who waits for a state finds the index in it.
        try:
            if state == "live":
                # A lease ends in the index too: this thread may be late, or the process stopped.
                left = 1e3 * max(0.0, followed.counts_from() - since)
                self._index.set_certain_for(followed.worker, min(1 + int(left), _LONGEST))
            if state == followed.state:
                return
            self._index.set_uncertain(followed.worker, state != "live")
        except StaleHandleError as error:
            self.error = f"worker {followed.name!r} is gone: {error}"
            state = "stale"
        with self._changed:
            followed.state = state
            self._changed.notify_all()

    async def _watch(self) -> None:
        """Look whether bridges are silent, and listen to them."""
        while True:
            try:
                await self._listen()
                self._listens.set()
            except Exception as error:  # noqa: BLE001 - it is tried again
                _LOG.exception("stream %s: no beats", self._stream)
                self.error = f"NATS: {error!r}"
            self._looked_at = _now()
            for followed in self._workers.values():
                self._judge(followed)
            await asyncio.sleep(_TICK)

    async def _listen(self) -> None:
        """Subscribe to beats; again after a pause of this process, in which they became old."""
        if self._has_paused() or self._refusal is not None:
            for followed in self._workers.values():
                followed.beat = followed.before = None
                self._judge(followed)
            if self._beats is not None:
                beats, self._beats = self._beats, None
                await beats.unsubscribe()
        if self._beats is None and self._refusal is None and self._is_connected:
            beats = f"{self._stream}.beats.*"
            self._beats = await self._nats.client.subscribe(beats, cb=self._hear)

    def _has_paused(self) -> bool:
        return _now() - self._looked_at > self._lease / 2

    async def _run(self) -> None:
        """Read the stream, again and again from where it was left."""
        await self._renew.wait()
        self._nats.spawn(self._watch())
        await self._listens.wait()
        while True:
            try:
                await self._read()
            except ReplicationError as error:
                # Nothing that this stream says counts.
                self._refusal = error
                self.error = str(error)
                self._opened.set()
                return
            except Exception as error:  # noqa: BLE001 - nothing may end the reading of all workers
                _LOG.exception("stream %s: it is read again", self._stream)
                self.error = f"NATS: {error!r}"
                self._opened.set()
                await asyncio.sleep(_RETRY)

    async def _read(self) -> None:
        """Read the stream until the connection changes."""
        from nats.errors import Error  # noqa: PLC0415 - the extra is there
        from nats.js.api import ConsumerConfig, DeliverPolicy  # noqa: PLC0415 - likewise

        self._renew.clear()
        jetstream = self._nats.client.jetstream(timeout=ANSWER)
        info = await jetstream.stream_info(self._stream)
        who = f"follow: workers {', '.join(self._workers)}"
        check_stream(who, self._stream, info.config.description, describe(self._key))
        self._opened.set()
        if self._made not in {None, info.created} or info.state.last_seq < self._position:
            # It is another one, or has lost what was read of it.
            self._position = 0
            for followed in self._workers.values():
                self._forget(followed, "", "")
        self._made = info.created
        messages = await jetstream.subscribe(
            f"{self._stream}.events.*",
            stream=self._stream,
            ordered_consumer=True,
            config=ConsumerConfig(
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=self._position + 1,
            ),
        )
        self.counts["connections"] += 1
        self._read_at = time.monotonic()
        try:
            while not self._renew.is_set():
                try:
                    message = await messages.next_msg(timeout=_TICK)
                except TimeoutError:
                    continue
                await self._take(message)
                self._position = message.metadata.sequence.stream
                self._read_at = time.monotonic()
        finally:
            try:
                await messages.unsubscribe()
            except (Error, OSError, TimeoutError) as error:
                # It is gone with its connection. What ends this goes on.
                self.error = f"NATS: {error!r}"

    async def _hear(self, message: Any) -> None:  # noqa: ANN401 - a message of nats-py
        """Take a word of a bridge."""
        if self._has_paused():
            return
        followed = self._workers.get(message.subject.rpartition(".")[2])
        if followed is None:
            return
        try:
            record = Record.read(message.headers, followed.name, self._key)
        except ReplicationError as error:
            self._refuse(error)
            return
        now = time.monotonic()
        if (record.bridge, record.epoch) == (followed.bridge, followed.epoch) and (
            followed.applied >= record.number
        ):
            followed.agreed_at = now
        elif now - max(followed.agreed_at, self._read_at) > self._lease:
            # Nothing comes, and something should: the stream may be another one.
            self._read_at = now
            self._renew.set()
        if record.kind != "beat" or (followed.bridge and record.bridge != followed.bridge):
            return
        followed.before, followed.beat = followed.beat, record
        followed.before_at, followed.heard_at = followed.heard_at, now
        self._judge(followed)

    async def _take(self, message: Any) -> None:  # noqa: ANN401 - a message of nats-py
        """Apply a message of the stream."""
        followed = self._workers.get(message.subject.rpartition(".")[2])
        if followed is None:
            return
        try:
            record = Record.read(message.headers, followed.name, self._key)
        except ReplicationError as error:
            self._refuse(error)
            followed.is_gapped = True
            self._judge(followed)
            return
        if record.bridge != followed.bridge:
            followed.bridge = record.bridge
            # A word of the bridge before says nothing.
            if followed.beat is not None and followed.beat.bridge != record.bridge:
                followed.beat = followed.before = None
        try:
            if record.epoch != followed.epoch:
                self._forget(followed, record.bridge, record.epoch)
            if record.kind == "batch":
                self._apply(followed, record.number, message.data)
            elif record.kind == "snapshot":
                await self._restore(followed, record)
        except StaleHandleError as error:
            self.error = f"worker {followed.name!r} is gone: {error}"
        self._judge(followed)

    def _forget(self, followed: _Followed, bridge: str, epoch: str) -> None:
        if followed.epoch:
            self.counts["resyncs"] += 1
        followed.bridge, followed.epoch = bridge, epoch
        followed.applied = -1
        followed.is_gapped = False
        # The index is uncertain before it is cleared.
        self._judge(followed)
        try:
            self._index.clear_worker(followed.worker)
        except StaleHandleError as error:
            self.error = f"worker {followed.name!r} is gone: {error}"

    def _apply(self, followed: _Followed, number: int, payload: bytes) -> None:
        if number <= followed.applied:
            self.counts["repeats"] += 1
            return
        if number > followed.applied + 1:
            self.counts["gaps"] += 1
            lost = f"batches {followed.applied + 1} to {number - 1}"
            self.error = f"worker {followed.name!r}: {lost} are missing"
            followed.is_gapped = True
            self._judge(followed)
        followed.applied = number
        try:
            done = self._index.apply(followed.worker, payload)
        except EventError as error:
            self.counts["refused"] += 1
            self.error = f"worker {followed.name!r}, batch {number}: {error}"
            followed.is_gapped = True
            return
        self.counts["batches"] += 1
        if done["cleared"] and followed.is_gapped:
            # Nothing older counts, unless a slower tier has kept some of it.
            stats = self._index.worker_stats(followed.worker)
            followed.is_gapped = bool(stats["slower_tiers"])

    async def _restore(self, followed: _Followed, record: Record) -> None:
        """Put a snapshot in the place of all batches up to its last, if some are missing."""
        is_complete = not followed.is_gapped and followed.applied == record.number
        if is_complete or record.number < followed.applied:
            self.counts["repeats"] += 1
            return
        name = snapshots.name_of(followed.name, record.epoch, record.number)
        try:
            batch = await asyncio.wait_for(self._given(name, record.checksum), _STORE_PATIENCE)
            self._index.apply(followed.worker, batch)
        except (ReplicationError, EventError, TimeoutError) as error:
            self.counts["snapshots_refused"] += 1
            self.error = f"worker {followed.name!r}: snapshot {name}: {error!r}"
            # Batches up to it are not in the stream any more.
            followed.applied, followed.is_gapped = record.number, True
            return
        self.counts["snapshots"] += 1
        followed.applied, followed.is_gapped = record.number, False

    async def _given(self, name: str, checksum: str) -> bytes:
        store = self._store
        if store is None:
            msg = f"snapshot {name} cannot be read: follow has no store"
            raise ReplicationError(msg, reason="snapshot")
        for _ in range(_TRIES - 1):
            try:
                return await asyncio.to_thread(
                    snapshots.get, store, name, checksum, LARGEST_SNAPSHOT
                )
            except ReplicationError as error:
                self.error = str(error)
                await asyncio.sleep(_RETRY)
        return await asyncio.to_thread(snapshots.get, store, name, checksum, LARGEST_SNAPSHOT)

    def _refuse(self, error: ReplicationError) -> None:
        self.counts["refused"] += 1
        self.error = str(error)
