"""Feeds an index from the events that one engine publishes over ZMQ.

An engine numbers its batches from 0 and has no id of its life. So a number that goes back, and a
lost connection, end everything that is known of it; a number that is too high is a gap, which the
engine's replay socket may fill. What it cannot fill, a snapshot of kvtrie inside the engine
replaces: one batch that clears the worker and stores what it holds, with the number of the last
batch that counts. It also has an id of the engine's life.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from kvtrie._core import EventError, KvIndexer, StaleHandleError
from kvtrie.cluster._feeds import Feed
from kvtrie.cluster._headers import LONGEST_HEADER, SnapshotHeader

if TYPE_CHECKING:
    from types import TracebackType

SubscriptionState = Literal["syncing", "live", "gapped", "stale"]
"""How much a `Subscription` knows of its engine."""

_END: Final = (-1).to_bytes(8, "big", signed=True)
# A message waits no longer than this for a call of `close`, in milliseconds.
_TICK: Final = 50
# Batches that are applied before the connection is looked at again, and taken from it at a time.
_MOST_AT_ONCE: Final = 256
_MOST_HELD: Final = 4_096
# A subscription takes effect after the connection is made. What is published before is replayed.
_SETTLE: Final = 0.1
# Messages in ZMQ's own queue, and as many that were taken from it. Beyond, they wait at the engine,
# which loses what it has no room for; the gap shows it.
_HIGH_WATER: Final = 50_000
# Bytes of those that were taken, but for a single message. Beyond, all are dropped.
_MOST_WAITING_BYTES: Final = 1 << 28
_HEARTBEAT: Final = 2_000
# Milliseconds for which scores are certain after nothing was found to wait. So they do not stay so
# in a process that was stopped, or in a thread that is late.
_CERTAIN_FOR: Final = 2_000
# Seconds between two looks after which the process may have been stopped, and then until what has
# waited for it outside has arrived.
_STOPPED: Final = 1.0
_ARRIVES: Final = 0.5
# Numbers are signed there, and negative ones have meanings of their own.
_NUMBERS: Final = 1 << 63
# The largest `max_batch_bytes` that an index can have.
LARGEST_SNAPSHOT: Final = 1 << 30
# Messages of one replay, and their bytes. An engine keeps 10,000 batches by default.
_MOST_REPLAYED: Final = 1 << 20
_MOST_REPLAYED_BYTES: Final = 1 << 30
# The first event, with what MessagePack has before it.
_CLEARS: Final = b"\x81\xa4type\xb0AllBlocksCleared"
_BEFORE_EVENTS: Final = 16
# Seconds from a snapshot to the next request: the least, and how many times what it took to apply.
_LEAST_PAUSE: Final = 0.5
_REST: Final = 9.0
# After a request without a snapshot the pause is doubled up to this.
_MOST_PAUSE: Final = 60.0
# Seconds after which a batch that the engine has published has arrived, if none waits, or is lost.
_UNDER_WAY: Final = 0.2


def subscribe(
    index: KvIndexer,
    worker: int,
    endpoint: str,
    replay: str | None = None,
    *,
    snapshot: str | None = None,
    topic: str = "",
    approximate: bool = False,
    replay_timeout: float = 5.0,
    snapshot_timeout: float = 10.0,
    check_every: float = 1.0,
) -> Subscription:
    """Feed an index from one engine, in a thread of its own, until `close`.

    The worker is uncertain until all batches from number 0 on have arrived, or a snapshot and all
    batches after it. Without `snapshot`, subscribe before the engine starts, or while its replay
    buffer still has all of them; without `replay` too, every gap stays.

    Args:
        index: The index.
        worker: The worker's number, from `add_worker`.
        endpoint: Where the engine publishes, for instance `"tcp://10.0.0.1:5557"`. Each
            data-parallel rank has its own.
        replay: The engine's replay endpoint, or None.
        snapshot: Where kvtrie inside this engine gives snapshots, or None. They are asked
            for what no replay has, and every `check_every` seconds whether the engine is the same.
        topic: The topic of the messages; `"kvtrie"` for kvtrie's own. Those of longer topics that
            begin with it do not count. `""` takes those of all topics.
        approximate: Whether these are kvtrie's events of approximate blocks. They count as moved
            runs, and their state does not make the worker uncertain.
        replay_timeout: Seconds to wait for the next message of a replay.
        snapshot_timeout: Seconds to wait for a snapshot.
        check_every: Seconds without a message after which the replay socket is asked for more: a
            lost last batch leaves no gap. 0 never asks.

    Raises:
        ImportError: pyzmq is missing.
        TypeError: `index` is not a `KvIndexer`.
        ValueError: An endpoint is not one of ZMQ, a time is negative, a snapshot is asked for
            approximate blocks, of which there is none, or the worker has a feed already.
        StaleHandleError: There is no such worker.

    Example:
        >>> index = kvtrie.KvIndexer(16, b"a secret of yours")
        >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
        >>> worker = index.add_worker("decode-0", space)
        >>> with kvtrie.cluster.subscribe(index, worker, "tcp://127.0.0.1:1") as subscription:
        ...     subscription.state
        'syncing'
    """
    call = "subscribe"
    check_arguments(
        call,
        index,
        replay_timeout=replay_timeout,
        snapshot_timeout=snapshot_timeout,
        check_every=check_every,
    )
    if approximate and snapshot is not None:
        msg = f"{call}: snapshot is {snapshot!r}; it must be None with approximate=True"
        raise ValueError(msg)
    return Subscription(
        index,
        worker,
        endpoint,
        replay,
        snapshot,
        topic=topic,
        approximate=approximate,
        replay_timeout=replay_timeout,
        snapshot_timeout=snapshot_timeout,
        check_every=check_every,
    )


def check_arguments(call: str, index: object, **times: float) -> None:
    """Check an index, and times in seconds.

    Raises:
        TypeError: It is not a `KvIndexer`.
        ValueError: A time is negative or too long.
    """
    if not issubclass(type(index), KvIndexer):
        msg = f"{call}: index is {index!r}, not a KvIndexer"
        raise TypeError(msg)
    for name, seconds in times.items():
        if not 0 <= seconds < 1e9:
            msg = f"{call}: {name} is {seconds}; it must be in [0, 1e9)"
            raise ValueError(msg)


class Ended(Exception):  # noqa: N818 - it is no error of the subscription
    """Ends a subscription, for a reason that its `error` gets."""


class Subscription:
    """One engine's events on their way into an index. `subscribe` makes it.

    Attributes:
        worker: The worker's number.
        counts: `batches` applied, `refused` that could not be read, and replays that were too
            long, `gaps` met, each once, and again when more is missing, `replays` asked for,
            `replayed` batches, `missed` batches that no replay had, `resyncs`,
            `dropped` messages, because too many bytes waited,
            `snapshots_asked` for, `snapshots` applied, `snapshots_refused`: answers that could not
            be used, and `unanswered`: times that the source did not say whose it is.
        error: The last thing that went wrong, in words; empty if nothing has.
    """

    # The function that makes it.
    _call = "subscribe"
    # For a reason that stays in `error`.
    _has_ended = False
    # The bytes of what waits, and whether these were too many.
    _waiting_bytes = 0
    _is_flooded = False

    def __init__(
        self,
        index: KvIndexer,
        worker: int,
        endpoint: str,
        replay: str | None,
        snapshot: str | None,
        *,
        topic: str,
        approximate: bool,
        replay_timeout: float,
        snapshot_timeout: float,
        check_every: float,
    ) -> None:
        try:
            import zmq  # noqa: PLC0415 - the extra is asked for when it is needed
            import zmq.utils.monitor  # noqa: PLC0415 - likewise
        except ModuleNotFoundError as error:
            msg = "kvtrie.cluster.subscribe needs pyzmq: pip install 'kvtrie[cluster]'"
            raise ImportError(msg, name="zmq") from error
        self.worker = worker
        self.counts: Counter[str] = Counter()
        self.error = ""
        self._zmq = zmq
        self._index = index
        self._endpoint = endpoint
        self._replay, self._snapshot = replay, snapshot
        self._topic = topic.encode()
        self._approximate = approximate
        self._replay_timeout, self._snapshot_timeout = replay_timeout, snapshot_timeout
        self._check_every = check_every
        self._state: SubscriptionState = "syncing"
        self._changed = threading.Condition()
        self._stop = threading.Event()
        # The last batch that was applied, also by a snapshot; that arrived by itself; and that
        # arrived or was replayed.
        self._applied = self._arrived = self._own = -1
        self._is_gapped = False
        # The last batch of the gaps that were counted.
        self._gapped_until = -1
        # What has arrived and is not applied yet.
        self._waiting: deque[list[bytes]] = deque()
        # Whether what the engine publishes now arrives.
        self._takes_effect = False
        self._due = float("inf")
        # When nothing was found to wait, and from when on that says that nothing waits anywhere.
        self._looked_at = self._trusts_at = time.monotonic()
        # The engine's life, and its last batch when it was asked before.
        self._incarnation: str | None = None
        self._had = -1
        self._asks_at = self._heard_by = float("inf")
        # When a snapshot may be asked for, and the pause after a request that brings none.
        self._restores_at = 0.0
        self._pause = _LEAST_PAUSE
        self._feed = Feed(self._call, index, [worker], approximate=approximate)
        self._context: Any = zmq.Context()
        self._socket: Any = None
        self._monitor: Any = None
        # Asks for the engine's life; the answers come in their own time.
        self._asker: Any = None
        try:
            if replay is not None:
                self._dealer("replay", replay).close(0)
            if snapshot is not None:
                # What cannot be sent at once is not sent.
                self._asker = self._dealer(
                    "snapshot", snapshot, IMMEDIATE=1, SNDHWM=1, MAXMSGSIZE=LONGEST_HEADER
                )
            self._connect()
            self._forget()
            self._thread = threading.Thread(
                target=self._run, name=f"kvtrie-events-{worker}", daemon=True
            )
            self._thread.start()
        except BaseException:
            self._context.destroy(linger=0)
            self._feed.release()
            raise

    @property
    def state(self) -> SubscriptionState:
        """What is known of the engine.

        `"syncing"`: not everything yet; `"live"`: all of its batches, or a snapshot and all after
        it; `"gapped"`: batches are missing, and no snapshot has come; `"stale"`: the connection is
        lost, and nothing counts. The worker's scores are uncertain in all states but `"live"`, and
        in that one if the subscription has not kept up with the engine for 2 seconds.
        """
        return self._state

    def wait(self, state: SubscriptionState, timeout: float | None = None) -> bool:
        """Wait for a state.

        Args:
            state: The state.
            timeout: Seconds, or None.

        Returns:
            Whether it is in that state.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self.state == state, timeout)

    def close(self) -> None:
        """End the thread. The worker stays as it is, and uncertain."""
        self._stop.set()
        self._thread.join()

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
        return f"<Subscription to {self._endpoint}: {self._state}, {self._applied + 1} batches>"

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._step()
        except StaleHandleError as error:
            self._end(f"the worker is gone: {error}")
        except self._zmq.ZMQError as error:
            self._end(f"ZMQ: {error}")
        except Ended as error:
            self._end(str(error))
        finally:
            self._context.destroy(linger=0)
            try:
                self._become("stale")
            except StaleHandleError:
                self._announce("stale")
            finally:
                self._feed.release()

    def _end(self, why: str) -> None:
        self._has_ended = True
        self.error = why

    def _step(self) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        if self._asker is not None:
            poller.register(self._asker, zmq.POLLIN)
        wait = max(0.0, min(_TICK, 1e3 * (self._due - time.monotonic())))
        ready = dict(poller.poll(0 if self._waiting else wait))
        self._hold()
        if (self._monitor in ready or self._is_flooded) and self._lost_connection():
            return
        is_quiet = True
        for _ in range(_MOST_AT_ONCE):
            if not self._waiting and not self._hold():
                if not self._is_flooded:
                    self._keeps_up()
                break
            frames = self._waiting.popleft()
            self._waiting_bytes -= sum(map(len, frames))
            # ZMQ compares the beginning of a topic alone.
            if self._topic and frames[0] != self._topic:
                continue
            is_quiet = False
            self._take(frames)
        if not is_quiet:
            # Not if the connection was lost meanwhile: a replay says nothing of the next one.
            if self._takes_effect:
                self._due = time.monotonic() + (self._check_every or float("inf"))
        elif not self._waiting and time.monotonic() >= self._due:
            self._due = time.monotonic() + (self._check_every or float("inf"))
            self._takes_effect = True
            self._fill(None)
        if self._asker is not None:
            self._compare_life(has_answer=self._asker in ready)
            if self._lacks_batches and time.monotonic() >= self._restores_at:
                self._restore()

    def _hold(self) -> bool:
        """Take messages from ZMQ, which bounds them by number alone; whether any wait."""
        for _ in range(_MOST_HELD):
            if len(self._waiting) >= _HIGH_WATER or self._is_flooded:
                break
            try:
                frames = self._socket.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                break
            self._waiting.append(frames)
            self._waiting_bytes += sum(map(len, frames))
            if self._waiting_bytes > _MOST_WAITING_BYTES and len(self._waiting) > 1:
                self._drop()
        return bool(self._waiting)

    def _drop(self) -> None:
        """Drop all that waits. Nobody knows what it said, so the connection begins again."""
        self.counts["dropped"] += len(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        self._is_flooded = True
        self._lacks()

    @property
    def _lacks_batches(self) -> bool:
        """Whether batches are missing that no replay has."""
        return self._is_gapped or (self._takes_effect and self._state == "syncing")

    def _connect(self) -> None:
        zmq = self._zmq
        if self._socket is not None:
            # What waits in the old socket is of a life that may be over.
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)
        self._waiting.clear()
        self._waiting_bytes = 0
        self._is_flooded = False
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set(zmq.RCVHWM, _HIGH_WATER)
        self._socket.set(zmq.MAXMSGSIZE, LARGEST_SNAPSHOT)
        self._socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 1_000)
        self._socket.set(zmq.SUBSCRIBE, self._topic)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        try:
            self._socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            msg = f"subscribe: endpoint is {self._endpoint!r}: {error}"
            raise ValueError(msg) from error

    def _dealer(self, name: str, endpoint: str, **options: int) -> Any:  # noqa: ANN401 - a socket of zmq
        zmq = self._zmq
        dealer = self._context.socket(zmq.DEALER)
        for option, value in options.items():
            dealer.set(getattr(zmq, option), value)
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            dealer.close(0)
            msg = f"subscribe: {name} is {endpoint!r}: {error}"
            raise ValueError(msg) from error
        return dealer

    def _lost_connection(self) -> bool:
        """Read what the monitor says; after a disconnect, or a flood, start again."""
        lost = self._is_flooded
        while self._monitor.poll(0):
            event = self._zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
            if event == self._zmq.EVENT_DISCONNECTED:
                lost = True
            elif not lost:
                self._due = time.monotonic() + _SETTLE
                if self._state == "stale":
                    self._become("syncing")
        if lost:
            self.counts["resyncs"] += 1
            self.error = "the connection was lost"
            if self._is_flooded:
                self.error = f"messages of more than {_MOST_WAITING_BYTES} bytes waited"
            self._forget()
            self._become("stale")
            self._connect()
        return lost

    def _forget(self) -> None:
        self._applied = self._arrived = self._own = self._gapped_until = -1
        self._is_gapped = self._takes_effect = False
        self._due = float("inf")
        self._incarnation, self._had = None, -1
        self._asks_at = time.monotonic() if self._check_every else float("inf")
        # An answer comes at once, or after the next question.
        self._heard_by = self._asks_at + 2 * self._check_every
        self._restores_at, self._pause = 0.0, _LEAST_PAUSE
        self._become("syncing")
        self._index.clear_worker(self.worker, approximate=self._approximate)
        self._begun()

    def _become(self, state: SubscriptionState) -> None:
        # The index says it first: who waits for a state finds the index in it.
        if not self._approximate:
            self._index.set_certain_for(self.worker, _CERTAIN_FOR)
            self._index.set_uncertain(self.worker, state != "live")
        self._announce(state)

    def _keeps_up(self) -> None:
        """Nothing waits here: scores are of this moment, unless the process was stopped."""
        now = time.monotonic()
        if now - self._looked_at > _STOPPED:
            self._trusts_at = now + _ARRIVES
        self._looked_at = now
        if now >= self._trusts_at and not self._approximate:
            self._index.set_certain_for(self.worker, _CERTAIN_FOR)

    def _announce(self, state: SubscriptionState) -> None:
        with self._changed:
            self._state = state
            self._changed.notify_all()

    def _take(self, frames: list[bytes]) -> None:
        """Apply what the engine has published."""
        if len(frames) != 3 or len(frames[1]) != 8:
            self._skip(f"a message of {len(frames)} frames is not [topic, number, batch]")
            return
        number = int.from_bytes(frames[1], "big")
        if number >= _NUMBERS:
            self._skip(f"a batch has the number {number}; it must be in [0, {_NUMBERS})")
            return
        if number <= self._arrived:
            self.counts["resyncs"] += 1
            self.error = f"batch {number} came after batch {self._arrived}"
            self._forget()
        self._takes_effect = True
        self._arrived = number
        self._own = max(self._own, number)
        if number > self._applied + 1:
            self._count_gap(number - 1)
            self._lacks()
            if not self._fill(number):
                return
        if number > self._applied:
            self._apply(number, frames[2])
        self._settle()

    def _skip(self, why: str) -> None:
        """Leave out a message that cannot be read, and may have been any."""
        self.counts["refused"] += 1
        self.error = why
        self._is_gapped = True
        self._settle()

    # A bridge passes on what these say.

    def _begun(self) -> None:
        """Nothing that was known counts any more."""

    def _took(self, number: int, payload: bytes) -> None:
        """A batch was applied."""

    def _replaced(self, number: int, batch: bytes) -> None:
        """A snapshot has taken the place of all batches up to a number."""

    def _settle(self) -> None:
        state: SubscriptionState = "gapped" if self._is_gapped else "live"
        if self._is_flooded:
            state = "syncing"
        if state != self._state:
            self._become(state)

    def _apply(self, number: int, payload: bytes) -> None:
        if number > self._applied + 1:
            self.counts["missed"] += number - self._applied - 1
            self.error = f"batches {self._applied + 1} to {number - 1} are missing"
            self._is_gapped = True
            self._settle()
        self._applied = number
        self._own = max(self._own, number)
        try:
            done = self._index.apply(self.worker, payload, approximate=self._approximate)
        except EventError as error:
            self.counts["refused"] += 1
            self.error = f"batch {number}: {error}"
            self._is_gapped = True
            return
        self.counts["batches"] += 1
        self._took(number, payload)
        if done["cleared"] and self._is_gapped:
            # Nothing older counts, unless a slower tier has kept some of it.
            stats = self._index.worker_stats(self.worker)
            self._is_gapped = bool(stats["slower_tiers"])

    def _fill(self, until: int | None) -> bool:
        """Ask for the batches after the last one; false if the connection was lost meanwhile.

        Args:
            until: The batch that has arrived, or None if none has.
        """
        if self._replay is None:
            return True
        first = self._applied + 1
        replayed = self._replayed(first)
        # A new life of the engine returns batches of its own.
        if self._lost_connection():
            return False
        if replayed is None:
            return True
        for number, payload in sorted(replayed.items()):
            if number > self._applied:
                self._apply(number, payload)
                self.counts["replayed"] += 1
        if until is None:
            self._settle()
        return True

    def _replayed(self, first: int) -> dict[int, bytes] | None:
        """The batches that the engine still has from `first` on; None if it does not answer.

        What is published meanwhile waits, and may change what is known: it is not certain then.
        """
        if self._replay is None:
            return None
        self.counts["replays"] += 1
        # What has no room there the engine drops, so there is room for all that is taken.
        dealer = self._dealer(
            "replay", self._replay, RCVHWM=_MOST_REPLAYED, MAXMSGSIZE=LARGEST_SNAPSHOT
        )
        try:
            dealer.send_multipart([b"", first.to_bytes(8, "big")])
            found: dict[int, bytes] = {}
            num_messages = num_bytes = 0
            patience = time.monotonic() + self._replay_timeout
            while time.monotonic() < patience and not self._stop.is_set():
                is_late = self._hold()
                if self._is_flooded:
                    return None
                if is_late:
                    self._lacks()
                else:
                    self._keeps_up()
                if not dealer.poll(_TICK):
                    continue
                patience = time.monotonic() + self._replay_timeout
                frames = dealer.recv_multipart()
                num_messages += 1
                num_bytes += sum(map(len, frames))
                if num_messages > _MOST_REPLAYED or num_bytes > _MOST_REPLAYED_BYTES:
                    self.counts["refused"] += 1
                    self.error = (
                        f"the replay of batch {first} from {self._replay} has {num_messages} "
                        f"messages and {num_bytes} bytes, and goes on; the limits are "
                        f"{_MOST_REPLAYED} and {_MOST_REPLAYED_BYTES}"
                    )
                    return None
                # Older engines send no topic.
                if len(frames) not in {3, 4} or len(frames[-2]) != 8:
                    continue
                if frames[-2] == _END:
                    return found
                number = int.from_bytes(frames[-2], "big")
                if number < _NUMBERS:
                    found.setdefault(number, frames[-1])
            self.error = f"no replay of batch {first} from {self._replay}"
            return None
        finally:
            dealer.close(0)

    def _compare_life(self, *, has_answer: bool) -> None:
        """Ask now and then whose events these are, and how many there are."""
        if has_answer:
            frames = self._asker.recv_multipart()
            try:
                self._hear(SnapshotHeader.read(frames))
            except ValueError as error:
                self._refuse(error)
            self._heard_by = time.monotonic() + 2 * self._check_every
        now = time.monotonic()
        if now >= self._heard_by:
            self.counts["unanswered"] += 1
            self.error = f"{self._snapshot} does not answer"
            self._heard_by = now + self._check_every
        if now >= self._asks_at:
            try:
                self._asker.send_multipart([b"", b"state"], self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            self._asks_at = now + self._check_every

    def _hear(self, header: SnapshotHeader) -> None:
        if not self._is_same(header):
            # The connection is the same: what is published now arrives.
            self._takes_effect = True
            self._due = time.monotonic()
        elif self._takes_effect and self._applied < self._had and not self._waiting:
            # They have had time to arrive.
            self._lacks()
            self._fill(None)
            self._note_loss()
        if self._takes_effect:
            self._incarnation, self._had = header
            if self._applied < self._had and not self._is_gapped:
                self._asks_at = min(self._asks_at, time.monotonic() + _UNDER_WAY)

    def _lacks(self) -> None:
        """A batch is known to be missing or to wait, and a replay may take its time."""
        if self._state == "live":
            self._become("syncing")

    def _note_loss(self) -> None:
        if self._applied < self._had:
            self._count_gap(self._had)
            self.error = f"batches {self._applied + 1} to {self._had} have not arrived"
            self._is_gapped = True
            self._settle()

    def _count_gap(self, last: int) -> None:
        """Count the gap that ends with a batch, unless all of it was counted."""
        if last > self._gapped_until:
            self._gapped_until = last
            self.counts["gaps"] += 1

    def _is_same(self, header: SnapshotHeader) -> bool:
        """Whether the engine is the same; if not, nothing that is known counts."""
        if self._incarnation in {None, header.incarnation}:
            return True
        self.counts["resyncs"] += 1
        self.error = f"incarnation {header.incarnation} came after {self._incarnation}"
        self._forget()
        return False

    def _restore(self) -> None:
        """Ask for a snapshot, and put it in the place of all that is known.

        Batches that are published meanwhile wait in the socket's queue.
        """
        self.counts["snapshots_asked"] += 1
        frames = self._given()
        # Of a new connection nothing is known yet, not even whether it takes effect.
        if self._lost_connection() or not self._takes_effect:
            return
        begun = time.monotonic()
        if self._is_put(frames):
            self._pause = _LEAST_PAUSE
            wait = max(_LEAST_PAUSE, _REST * (time.monotonic() - begun))
        else:
            wait, self._pause = self._pause, min(2 * self._pause, _MOST_PAUSE)
        self._restores_at = time.monotonic() + wait

    def _is_put(self, frames: list[bytes] | None) -> bool:
        """Put an answer in the place of all that is known, if it can be used."""
        if frames is None:
            self.error = f"no snapshot from {self._snapshot}"
            return False
        try:
            self._put(frames)
        except (ValueError, EventError) as error:
            self._refuse(error)
            return False
        return True

    def _given(self) -> list[bytes] | None:
        """The answer to a request for a snapshot; None if it does not come."""
        dealer = self._dealer("snapshot", str(self._snapshot), MAXMSGSIZE=LARGEST_SNAPSHOT)
        try:
            dealer.send_multipart([b"", b"snapshot"])
            end = time.monotonic() + self._snapshot_timeout
            while time.monotonic() < end and not self._stop.is_set():
                if dealer.poll(_TICK):
                    frames: list[bytes] = dealer.recv_multipart()
                    return frames
                self._hold()
                if self._lost_connection():
                    break
            return None
        finally:
            dealer.close(0)

    def _read(self, frames: list[bytes]) -> tuple[SnapshotHeader, bytes]:
        """Read a snapshot. One of another life of the engine ends all that is known of this one.

        Raises:
            ValueError: It cannot be used.
        """
        header, batch = SnapshotHeader.read(frames, "batch"), frames[2]
        if not self._is_same(header):
            self._takes_effect = True
        if header.number < self._own:
            msg = f"it ends with batch {header.number}, and batch {self._own} has arrived"
            raise ValueError(msg)
        if not 0 <= batch.find(_CLEARS, 0, _BEFORE_EVENTS + len(_CLEARS)):
            msg = "its batch does not begin with AllBlocksCleared"
            raise ValueError(msg)
        return header, batch

    def _put(self, frames: list[bytes]) -> None:
        header, batch = self._read(frames)
        self._index.apply(self.worker, batch)
        self.counts["snapshots"] += 1
        self._incarnation, self._applied = header
        self._replaced(header.number, batch)
        self._is_gapped = False
        self._due = time.monotonic() + (self._check_every or float("inf"))
        self._settle()

    def _refuse(self, error: Exception) -> None:
        self.counts["snapshots_refused"] += 1
        self.error = f"an answer of {self._snapshot} cannot be used: {error}"
