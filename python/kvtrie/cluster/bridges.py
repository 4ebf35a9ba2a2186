"""Passes one engine's events on to replicas, by way of NATS JetStream.

A bridge is a subscription: it feeds an index of its own. What it has applied it publishes, in that
order, and waits until JetStream has stored it. What it could not read or has not received it does
not publish, so that replicas meet the same gap.

Each message is fenced: JetStream stores it only if the one before it on its subject is the bridge's
own. So the messages of one bridge follow each other, and a bridge that was replaced without knowing
ends at its next message.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING, Final

from kvtrie._core import EventError, StaleHandleError
from kvtrie.cluster import snapshots
from kvtrie.cluster.streams import (
    ANSWER,
    EXPECTED,
    HEADER,
    MESSAGE_ID,
    PATIENCE,
    ROLLUP,
    Connection,
    Record,
    ReplicationError,
    check_name,
    check_stream,
    describe,
    key_of,
)
from kvtrie.cluster.subscription import Ended, Subscription, SubscriptionState, check_arguments

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from kvtrie._core import KvIndexer
    from kvtrie.cluster.streams import Kind

_LOG: Final = logging.getLogger("kvtrie.cluster")
_RETRY: Final = 0.1
# Seconds after which what arrives should have been published, and how often that is looked at.
_SLOW: Final = 0.5
_TICK: Final = 0.1
_WRONG_SEQUENCE: Final = 10071
# Bytes of a message's headers, which NATS counts too.
_HEADERS: Final = 2_048
# Seconds until a snapshot that could not be stored is asked for again: doubled up to the most.
_LEAST_PAUSE: Final = 10.0
_MOST_PAUSE: Final = 300.0
# Of a stream, in bytes: NATS takes messages of so many by default.
_LEAST_STREAM: Final = 1 << 20
# A replica may still read the one before the newest.
_KEPT: Final = 2


def bridge(
    index: KvIndexer,
    worker: int,
    name: str,
    endpoint: str,
    replay: str | None = None,
    *,
    servers: str | list[str],
    stream: str = "kvtrie",
    epoch: str | None = None,
    max_bytes: int = 1 << 30,
    snapshot: str | None = None,
    store: ObjectStore | None = None,
    snapshot_every: float = 600.0,
    beat_every: float = 0.5,
    topic: str = "",
    replay_timeout: float = 5.0,
    snapshot_timeout: float = 10.0,
    check_every: float = 1.0,
) -> Bridge:
    """Feed an index from one engine, as `subscribe` does, and pass its events on to replicas.

    Run one for each worker, next to the engine or in one of the routers. `follow` is the other end.

    Args:
        index: The index that is fed. Replicas must have its key and block size.
        worker: The worker's number in it.
        name: The worker's name in the stream.
        endpoint: As `subscribe` takes it, like `replay`, `topic` and the times.
        replay: The engine's replay endpoint, or None.
        servers: Where NATS is, for instance `"nats://10.0.0.1:4222"`.
        stream: The stream, which is made if there is none. All workers of a fleet share one.
        epoch: What names this life of the engine, if the caller knows it: the same for each bridge
            of one life, and for no other life. A bridge that starts again then continues where the
            one before it ended; without it, replicas start again from nothing.
        max_bytes: Bytes of the stream, if it is made; the oldest messages of any worker go first.
        snapshot: Where kvtrie's connector gives snapshots, as `subscribe` takes it.
        store: Where snapshots are put for replicas, or None. Needs `snapshot`. Give it limits of
            time: `close` waits for it.
        snapshot_every: Seconds from one of them to the next; 0: only where batches are lost.
        beat_every: Seconds after which replicas hear from this bridge.
        topic: The topic of the engine's messages.
        replay_timeout: Seconds to wait for the next message of a replay.
        snapshot_timeout: Seconds to wait for a snapshot.
        check_every: Seconds without a message after which the replay socket is asked for more.

    Raises:
        ImportError: pyzmq, nats-py or, with a store, obstore is missing.
        TypeError: `index` is not a `KvIndexer`, or `max_bytes` no int.
        ValueError: A name, an address, a time or `max_bytes` (at least 1 MiB) is wrong, there is
            a store and no `snapshot`, or the worker has a feed already.
        ReplicationError: With the reason `"key"`, the stream has another key or block size;
            `"version"`, it is of another version of kvtrie; `"malformed"`, it is not kvtrie's;
            `"unreachable"`, NATS or its JetStream does not answer; `"fenced"`, another bridge of
            the worker publishes so fast that this one found no moment to begin in.
        StaleHandleError: There is no such worker.
    """
    call = "bridge"
    check_arguments(
        call,
        index,
        replay_timeout=replay_timeout,
        snapshot_timeout=snapshot_timeout,
        check_every=check_every,
    )
    check_name(call, "name", name)
    check_name(call, "stream", stream)
    if epoch is not None:
        check_name(call, "epoch", epoch)
    if store is not None and snapshot is None:
        msg = f"{call}: store is {store!r} and snapshot None; a store needs snapshot"
        raise ValueError(msg)
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int):
        msg = f"{call}: max_bytes must be an int, not {max_bytes!r}"
        raise TypeError(msg)
    if not _LEAST_STREAM <= max_bytes < 1 << 63:
        msg = f"{call}: max_bytes is {max_bytes}; it must be in [{_LEAST_STREAM}, 2**63)"
        raise ValueError(msg)
    if not 0 < beat_every < 1e9 or not 0 <= snapshot_every < 1e9:
        msg = (
            f"{call}: beat_every is {beat_every} and snapshot_every {snapshot_every}; "
            "they must be in (0, 1e9) and [0, 1e9)"
        )
        raise ValueError(msg)
    if store is not None:
        snapshots.check_installed()
    return Bridge(
        index,
        worker,
        name,
        endpoint,
        replay,
        snapshot,
        servers=servers,
        stream=stream,
        epoch=epoch,
        max_bytes=max_bytes,
        store=store,
        snapshot_every=snapshot_every,
        beat_every=beat_every,
        topic=topic,
        replay_timeout=replay_timeout,
        snapshot_timeout=snapshot_timeout,
        check_every=check_every,
    )


class Bridge(Subscription):
    """One engine's events on their way into a stream. `bridge` makes it.

    It has what a `Subscription` has. `counts` also has `published` messages, `repeats` that
    JetStream had already, `retries`, `too_large` batches that NATS does not take, which replicas
    meet as gaps, `snapshots_stored`, `snapshots_not_stored` and `snapshots_not_deleted`: older
    ones of its own that stay in the store.

    Attributes:
        name: The worker's name in the stream.
        epoch: The life of the engine that is published.
    """

    _call = "bridge"

    def __init__(
        self,
        index: KvIndexer,
        worker: int,
        name: str,
        endpoint: str,
        replay: str | None,
        snapshot: str | None,
        *,
        servers: str | list[str],
        stream: str,
        epoch: str | None,
        max_bytes: int,
        store: ObjectStore | None,
        snapshot_every: float,
        beat_every: float,
        topic: str,
        replay_timeout: float,
        snapshot_timeout: float,
        check_every: float,
    ) -> None:
        self.name = name
        self.epoch = ""
        self._key = key_of(index.key_check)
        self._token = secrets.token_hex(8)
        self._stream = stream
        self._subject = f"{stream}.events.{name}"
        self._store = store
        self._snapshot_every = snapshot_every
        self._stored: list[str] = []
        self._stores_at = time.monotonic() + (snapshot_every or float("inf"))
        self._stores_after = _LEAST_PAUSE
        # A snapshot whose last batches have not been published yet.
        self._kept: tuple[int, list[bytes]] | None = None
        # The subject's last message in the stream.
        self._last = 0
        # When no batch waited in the socket, and whether the index knows that this is long ago.
        self._emptied_at = time.monotonic()
        self._was_behind = False
        self._judging = threading.Lock()
        self._gives_up = time.monotonic() + PATIENCE
        self._nats = Connection(f"kvtrie-bridge-{name}", servers, lambda _: None, self._failed)
        try:
            self._given_epoch = epoch
            self._open(max_bytes)
            super().__init__(
                index,
                worker,
                endpoint,
                replay,
                snapshot,
                topic=topic,
                approximate=False,
                replay_timeout=replay_timeout,
                snapshot_timeout=snapshot_timeout,
                check_every=check_every,
            )
            self._gives_up = float("inf")
            self._nats.spawn(self._beat_often(beat_every))
            self._nats.spawn(self._watch())
        except Ended as error:
            self._nats.close()
            msg = f"bridge: {error}"
            raise ReplicationError(msg, reason="fenced") from error
        except BaseException:
            self._nats.close()
            raise

    def _failed(self, why: str) -> None:
        if not self._has_ended:
            self.error = why

    def close(self) -> None:
        """End the thread and the connection to NATS. Replicas are uncertain from then on."""
        super().close()
        self._nats.close()

    @property
    def state(self) -> SubscriptionState:
        """What is known of the engine, as of a `Subscription`.

        Also `"syncing"` while batches wait for longer than 0.5 s: for NATS, a store, a replay or a
        snapshot. What they change is not in the index yet, and the worker is uncertain.
        """
        return "syncing" if self._state == "live" and self._is_behind else self._state

    def __repr__(self) -> str:
        return f"<Bridge of {self.name!r}: {self.state}, epoch {self.epoch}, {self._last}>"

    def _open(self, max_bytes: int) -> None:
        """Make the stream if there is none."""
        from nats.errors import Error  # noqa: PLC0415 - the extra is there

        if not self._nats.wait(PATIENCE):
            msg = f"bridge: no NATS after {PATIENCE} s: {self._nats.error}"
            raise ReplicationError(msg, reason="unreachable")
        try:
            self._nats.call(self._ensure(max_bytes), PATIENCE)
        except (Error, TimeoutError) as error:
            msg = f"bridge: JetStream does not make stream {self._stream!r}: {error!r}"
            raise ReplicationError(msg, reason="unreachable") from error

    async def _ensure(self, max_bytes: int) -> None:
        from nats.js.api import StorageType, StreamConfig  # noqa: PLC0415 - the extra is there
        from nats.js.errors import NotFoundError  # noqa: PLC0415 - likewise

        jetstream = self._nats.client.jetstream()
        about = describe(self._key)
        try:
            info = await jetstream.stream_info(self._stream)
        except NotFoundError:
            info = await jetstream.add_stream(
                StreamConfig(
                    name=self._stream,
                    description=about,
                    subjects=[f"{self._stream}.events.*"],
                    storage=StorageType.FILE,
                    max_bytes=max_bytes,
                    allow_rollup_hdrs=True,
                )
            )
        who, config = f"bridge: worker {self.name!r}", info.config
        check_stream(who, self._stream, config.description, about)
        if f"{self._stream}.events.*" not in (config.subjects or []):
            msg = f"{who}: stream {self._stream!r} has the subjects {config.subjects}"
            raise ReplicationError(msg, reason="malformed")
        if not config.allow_rollup_hdrs:
            msg = f"{who}: stream {self._stream!r} does not allow rollups"
            raise ReplicationError(msg, reason="malformed")

    async def _last_record(self) -> tuple[int, Record | None] | None:
        from nats.js.errors import NotFoundError  # noqa: PLC0415 - the extra is there

        try:
            last = await self._nats.client.jetstream().get_last_msg(self._stream, self._subject)
        except NotFoundError:
            return None
        try:
            return last.seq, Record.read(last.headers, self.name, self._key)
        except ReplicationError:
            return last.seq, None

    def _begun(self) -> None:
        self._kept = None
        if self.epoch:
            # What was lost may be alive still, but is not known to be.
            self.epoch = secrets.token_hex(8)
            self._publish(self._record("begin", -1))
        else:
            self._take_over()
        self._beat_now()

    def _take_over(self) -> None:
        """Begin after the last message of whoever has published for this worker."""
        from nats.errors import Error  # noqa: PLC0415 - the extra is there

        self._gives_up = time.monotonic() + PATIENCE
        while True:
            try:
                last = self._nats.call(self._last_record(), PATIENCE)
            except (Error, OSError, TimeoutError) as error:
                msg = f"bridge: stream {self._stream!r} cannot be read: {error!r}"
                raise ReplicationError(msg, reason="unreachable") from error
            self._last, before = last or (0, None)
            given, self.epoch = self._given_epoch, secrets.token_hex(8)
            if given is not None:
                continues = before is not None and before.epoch.rpartition(".")[0] == given
                self.epoch = before.epoch if before and continues else f"{given}.{self.epoch}"
            try:
                self._publish(self._record("begin", -1))
            except Ended:
                # The other one has published meanwhile.
                if time.monotonic() < self._gives_up:
                    continue
                raise
            return

    def _took(self, number: int, payload: bytes) -> None:
        self._publish(self._record("batch", number), payload)
        self._use_kept()

    def _keep(self) -> None:
        """Ask for a snapshot, which replicas get once they have all of its batches."""
        self._stores_at = time.monotonic() + (self._snapshot_every or float("inf"))
        self.counts["snapshots_asked"] += 1
        frames = self._given()
        if self._lost_connection() or not self._takes_effect:
            return
        if frames is None:
            self.error = f"no snapshot from {self._snapshot}"
            return
        try:
            self._kept = self._read(frames)[0].number, frames
        except ValueError as error:
            self._refuse(error)
            return
        self._use_kept()

    def _use_kept(self) -> None:
        if self._kept is None or self._applied < self._kept[0]:
            return
        (number, frames), self._kept = self._kept, None
        if number == self._applied:
            try:
                self._put(frames)
            except (ValueError, EventError) as error:
                self._refuse(error)

    def _replaced(self, number: int, batch: bytes) -> None:
        self._kept = None
        self._stores_at = time.monotonic() + (self._snapshot_every or float("inf"))
        if self._store is None:
            return
        name = snapshots.name_of(self.name, self.epoch, number)
        try:
            checksum = snapshots.put(self._store, name, batch)
            self._publish(self._record("snapshot", number, checksum=checksum), rollup=True)
            self.counts["snapshots_stored"] += 1
            self._stores_after = _LEAST_PAUSE
            if name not in self._stored:
                self._stored.append(name)
        except ReplicationError as error:
            self.counts["snapshots_not_stored"] += 1
            self.error = str(error)
            self._stores_at = time.monotonic() + self._stores_after
            self._stores_after = min(2 * self._stores_after, _MOST_PAUSE)
        while len(self._stored) > _KEPT:
            try:
                snapshots.delete(self._store, self._stored.pop(0))
            except ReplicationError as error:
                # It stays, as those of bridges that ended do.
                self.counts["snapshots_not_deleted"] += 1
                self.error = str(error)

    def _step(self) -> None:
        super()._step()
        if not self._hold():
            self._emptied_at = time.monotonic()
        if self._store is not None and time.monotonic() >= self._stores_at and self._takes_effect:
            self._keep()

    @property
    def _is_behind(self) -> bool:
        return time.monotonic() - self._emptied_at > _SLOW

    def _become(self, state: SubscriptionState) -> None:
        with self._judging:
            self._was_behind = self._is_behind
            self._index.set_uncertain(self.worker, state != "live" or self._was_behind)
            self._announce(state)

    def _announce(self, state: SubscriptionState) -> None:
        super()._announce(state)
        self._beat_now()

    async def _watch(self) -> None:
        """Look whether batches wait. The thread that should take them may wait itself."""
        while True:
            await asyncio.sleep(_TICK)
            with self._judging:
                if self._was_behind != self._is_behind:
                    self._was_behind = not self._was_behind
                    try:
                        uncertain = self._was_behind or self._state != "live"
                        self._index.set_uncertain(self.worker, uncertain)
                    except StaleHandleError:
                        # The other thread meets it too, and ends.
                        return
                    self._announce(self._state)

    def _record(self, kind: Kind, number: int, **more: str) -> Record:
        return Record(kind, self._key, self.name, self._token, self.epoch, number, **more)

    def _publish(self, record: Record, payload: bytes = b"", *, rollup: bool = False) -> None:
        """Return when JetStream has stored a message, however long that takes.

        Raises:
            Ended: Another bridge publishes for this worker, or `close` was called.
            ReplicationError: NATS has not stored the bridge's first message in time.
        """
        from nats.errors import Error, MaxPayloadError  # noqa: PLC0415 - the extra is there

        while not self._stop.is_set():
            try:
                self._nats.call(self._send(record, payload, rollup=rollup), PATIENCE)
            except MaxPayloadError:
                limit = self._nats.client.max_payload
                self.counts["too_large"] += 1
                self.error = (
                    f"batch {record.number} has {len(payload)} bytes; "
                    f"the max_payload of NATS is {limit}"
                )
                # Replicas lack it.
                self._stores_at = max(time.monotonic(), self._restores_at)
            except (Error, OSError, TimeoutError) as error:
                self.counts["retries"] += 1
                self.error = f"NATS has not stored {record.message_id}: {error!r}"
                if time.monotonic() >= self._gives_up:
                    msg = f"bridge: {self.error}"
                    raise ReplicationError(msg, reason="unreachable") from error
                self._hold()
                self._stop.wait(_RETRY)
                continue
            return
        msg = f"closed before NATS has stored {record.message_id}"
        raise Ended(msg)

    async def _send(self, record: Record, payload: bytes, *, rollup: bool) -> None:
        from nats.errors import MaxPayloadError  # noqa: PLC0415 - the extra is there
        from nats.js.errors import APIError  # noqa: PLC0415 - likewise

        client = self._nats.client
        if not client.is_connected:
            msg = "there is no connection"
            raise ConnectionError(msg)
        if len(payload) + _HEADERS > client.max_payload:
            raise MaxPayloadError
        headers = {HEADER: record.write(), MESSAGE_ID: record.message_id}
        if rollup:
            headers[ROLLUP] = "sub"
        while True:
            headers[EXPECTED] = str(self._last)
            try:
                stored = await client.jetstream(timeout=ANSWER).publish(
                    self._subject, payload, headers=headers, stream=self._stream
                )
            except APIError as error:
                if error.err_code != _WRONG_SEQUENCE:
                    raise
                if await self._is_stored(record):
                    return
                continue
            break
        self._last = max(self._last, stored.seq)
        self.counts["repeats" if stored.duplicate else "published"] += 1

    async def _is_stored(self, record: Record) -> bool:
        """Whether a message that was refused is there already; if not, it may be sent again.

        Raises:
            Ended: The last message is of another bridge.
            ConnectionError: It is refused for what may pass.
        """
        before = self._last
        last = await self._last_record()
        if last is None:
            # They were dropped for their age.
            self._last = 0
        elif last[1] is not None and last[1].bridge == self._token:
            self._last = last[0]
            if last[1] == record:
                self.counts["published"] += 1
                return True
        else:
            other = last[1].bridge if last[1] is not None else "not of kvtrie"
            msg = f"another bridge publishes for worker {self.name!r} ({other})"
            raise Ended(msg)
        if self._last == before:
            msg = f"message {before} of worker {self.name!r} is the last one, and is refused"
            raise ConnectionError(msg)
        return False

    async def _beat_often(self, every: float) -> None:
        while True:
            await self._beat()
            await asyncio.sleep(every)

    def _beat_now(self) -> None:
        self._nats.spawn(self._beat())

    async def _beat(self) -> None:
        client = self._nats.client
        if not client.is_connected or not self.epoch:
            return
        try:
            headers = {HEADER: self._word().write()}
            await client.publish(f"{self._stream}.beats.{self.name}", b"", headers=headers)
        except Exception as error:  # noqa: BLE001 - the next one may be heard
            _LOG.exception("worker %s: no beat", self.name)
            self._failed(f"NATS: {error!r}")

    def _word(self) -> Record:
        """What is known at this moment."""
        return self._record("beat", max(self._applied, self._arrived), state=self.state)
