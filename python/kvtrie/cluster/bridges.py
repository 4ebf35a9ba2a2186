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
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

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
from kvtrie.cluster.subscription import Ended, Subscription, SubscriptionState

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from kvtrie._core import KvIndexer

_RETRY: Final = 0.1
# Seconds in which what waits in the socket should have been published.
_SLOW: Final = 0.25
_WRONG_SEQUENCE: Final = 10071
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
    check_every: float = 5.0,
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
        store: Where snapshots are put for replicas, or None. Needs `snapshot`.
        snapshot_every: Seconds from one of them to the next; 0: only where batches are lost.
        beat_every: Seconds after which replicas hear from this bridge.
        topic: The topic of the engine's messages.
        replay_timeout: Seconds to wait for the next message of a replay.
        snapshot_timeout: Seconds to wait for a snapshot.
        check_every: Seconds without a message after which the replay socket is asked for more.

    Raises:
        ImportError: pyzmq, nats-py or, with a store, obstore is missing.
        ValueError: A name, an address or a time is wrong, or there is a store and no `snapshot`.
        ReplicationError: With the reason `"key"`, the stream has another key or block size;
            `"unreachable"`, NATS or its JetStream does not answer.
        StaleHandleError: There is no such worker.
    """
    call = "bridge"
    check_name(call, "name", name)
    check_name(call, "stream", stream)
    if epoch is not None:
        check_name(call, "epoch", epoch)
    if store is not None and snapshot is None:
        msg = f"{call}: store is {store!r}; it must be None without snapshot"
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
    meet as gaps, `snapshots_stored` and `snapshots_not_stored`.

    Attributes:
        name: The worker's name in the stream.
        epoch: The life of the engine that is published.
    """

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
        # The subject's last message in the stream.
        self._last = 0
        # Whether batches may wait in the socket since NATS did not answer, or not soon enough.
        self._is_behind = False
        self._gives_up = time.monotonic() + PATIENCE
        self._nats = Connection(f"kvtrie-bridge-{name}", servers, lambda _: None)
        try:
            self._next_epoch = self._open(epoch, max_bytes)
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
        except Ended as error:
            self._nats.close()
            msg = f"bridge: {error}"
            raise ReplicationError(msg, reason="fenced") from error
        except BaseException:
            self._nats.close()
            raise

    def close(self) -> None:
        """End the thread and the connection to NATS. Replicas are uncertain from then on."""
        super().close()
        self._nats.close()

    def __repr__(self) -> str:
        return f"<Bridge of {self.name!r}: {self._state}, epoch {self.epoch}, {self._last}>"

    def _open(self, given: str | None, max_bytes: int) -> str:
        """Make the stream if there is none, and return the epoch to begin with."""
        from nats.errors import Error  # noqa: PLC0415 - the extra is there

        if not self._nats.wait(PATIENCE):
            msg = f"bridge: no NATS after {PATIENCE} s: {self._nats.error}"
            raise ReplicationError(msg, reason="unreachable")
        try:
            last = self._nats.call(self._ensure(max_bytes), PATIENCE)
        except (Error, TimeoutError) as error:
            msg = f"bridge: JetStream does not make stream {self._stream!r}: {error!r}"
            raise ReplicationError(msg, reason="unreachable") from error
        before = last[1] if last is not None else None
        self._last = last[0] if last is not None else 0
        if given is None:
            return secrets.token_hex(8)
        if before is not None and before.epoch.rpartition(".")[0] == given:
            return before.epoch
        return f"{given}.{secrets.token_hex(8)}"

    async def _ensure(self, max_bytes: int) -> tuple[int, Record | None] | None:
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
        check_stream(f"bridge: worker {self.name!r}", self._stream, info.config.description, about)
        return await self._last_record()

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
        self.epoch, self._next_epoch = self._next_epoch, ""
        # What was lost may be alive still, but is not known to be.
        self.epoch = self.epoch or secrets.token_hex(8)
        self._publish(self._record("begin", -1))
        self._beat_now()

    def _took(self, number: int, payload: bytes) -> None:
        self._publish(self._record("batch", number), payload)

    def _replaced(self, number: int, batch: bytes) -> None:
        self._stores_at = time.monotonic() + (self._snapshot_every or float("inf"))
        if self._store is None:
            return
        name = snapshots.name_of(self.name, self.epoch, number)
        try:
            checksum = snapshots.put(self._store, name, batch)
            self._publish(self._record("snapshot", number, checksum=checksum), rollup=True)
            self.counts["snapshots_stored"] += 1
            if name not in self._stored:
                self._stored.append(name)
            while len(self._stored) > _KEPT:
                snapshots.delete(self._store, self._stored.pop(0))
        except ReplicationError as error:
            self.counts["snapshots_not_stored"] += 1
            self.error = str(error)

    def _step(self) -> None:
        began = time.monotonic()
        super()._step()
        was_behind = self._is_behind
        if not self._socket.poll(0):
            self._is_behind = False
        elif time.monotonic() - began > _SLOW:
            self._is_behind = True
        if self._is_behind != was_behind:
            self._beat_now()
        if self._store is not None and time.monotonic() >= self._stores_at and self._takes_effect:
            self._stores_at = time.monotonic() + (self._snapshot_every or float("inf"))
            self._restore()

    def _announce(self, state: SubscriptionState) -> None:
        super()._announce(state)
        self._beat_now()

    def _record(self, kind: Any, number: int, **more: str) -> Record:  # noqa: ANN401 - a Kind
        return Record(kind, self._key, self.name, self._token, self.epoch, number, **more)

    def _publish(self, record: Record, payload: bytes = b"", *, rollup: bool = False) -> None:
        """Return when JetStream has stored a message, however long that takes.

        Raises:
            Ended: Another bridge publishes for this worker, or `close` was called.
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
                self._is_behind = True
                self.error = f"NATS has not stored {record.message_id}: {error!r}"
                if time.monotonic() >= self._gives_up:
                    msg = f"bridge: {self.error}"
                    raise ReplicationError(msg, reason="unreachable") from error
                self._stop.wait(_RETRY)
                continue
            return
        msg = f"closed before NATS has stored {record.message_id}"
        raise Ended(msg)

    async def _send(self, record: Record, payload: bytes, *, rollup: bool) -> None:
        from nats.js.errors import APIError  # noqa: PLC0415 - the extra is there

        client = self._nats.client
        if not client.is_connected:
            msg = "there is no connection"
            raise ConnectionError(msg)
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
            raise Ended(msg)
        return False

    async def _beat_often(self, every: float) -> None:
        while True:
            await self._beat()
            await asyncio.sleep(every)

    def _beat_now(self) -> None:
        self._nats.spawn(self._beat())

    async def _beat(self) -> None:
        client = self._nats.client
        if client.is_connected and self.epoch:
            await client.publish(
                f"{self._stream}.beats.{self.name}", b"", headers={HEADER: self._word().write()}
            )

    def _word(self) -> Record:
        """What is known at this moment."""
        state = "syncing" if self._is_behind and self._state == "live" else self._state
        return self._record("beat", max(self._applied, self._arrived), state=state)
