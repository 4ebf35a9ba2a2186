"""What bridges and replicas say to each other over NATS, and the connection that carries it.

A worker has two subjects. ``STREAM.events.WORKER`` is kept by JetStream, in one order for all
readers; ``STREAM.beats.WORKER`` is not kept, and says that its bridge is alive. A message has one
header in JSON (`Record`), and a batch as its payload, byte for byte as the engine published it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

from kvtrie._core import KvTrieError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping

Kind = Literal["begin", "batch", "snapshot", "beat"]
"""``begin``: a bridge has taken over; ``batch``: one of the engine; ``snapshot``: where one is
stored, and of which batches; ``beat``: what the bridge knows at this moment."""

VERSION: Final = 1
HEADER: Final = "Kvtrie"
MESSAGE_ID: Final = "Nats-Msg-Id"
EXPECTED: Final = "Nats-Expected-Last-Subject-Sequence"
ROLLUP: Final = "Nats-Rollup"
# Seconds until NATS is asked again, which changes nothing if it has heard; and until it must have
# answered at the start.
ANSWER: Final = 1.0
PATIENCE: Final = 5.0
_LONGEST: Final = 1_024
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_STATES: Final = ("syncing", "live", "gapped", "stale")
_KINDS: Final = ("begin", "batch", "snapshot", "beat")

_LOG: Final = logging.getLogger("kvtrie.cluster")

_T = TypeVar("_T")


class ReplicationError(KvTrieError):
    """A worker's events cannot be replicated.

    Attributes:
        reason: ``"key"``: another key or block size; ``"version"``: another version of kvtrie;
            ``"malformed"``: not a message of a bridge; ``"fenced"``: another bridge publishes for
            the worker; ``"unreachable"``: NATS does not answer; ``"snapshot"``: a stored snapshot
            is missing, or is not what its message says.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def check_name(call: str, what: str, name: str) -> str:
    """Return a name that may be part of a subject.

    Raises:
        ValueError: It may not.
    """
    if not _NAME.fullmatch(name):
        msg = f"{call}: {what} is {name!r}; it must have 1 to 64 letters, digits, _ and -"
        raise ValueError(msg)
    return name


def key_of(check: int) -> str:
    """Return an index's `key_check` as messages have it."""
    return f"{check:016x}"


def describe(key: str) -> str:
    """Return the description of a stream, which says what its messages are."""
    return f"kvtrie {VERSION} {key}"


def check_stream(who: str, stream: str, about: str | None, expected: str) -> None:
    """Check a stream's description.

    Raises:
        ReplicationError: It has another key, block size or version.
    """
    if about == expected:
        return
    words, wanted = (about or "").split(), expected.split()
    if len(words) != 3 or words[0] != wanted[0]:
        msg = f"{who}: stream {stream!r} is not kvtrie's: {about!r}"
        raise ReplicationError(msg, reason="malformed")
    if words[1] != wanted[1]:
        msg = f"{who}: stream {stream!r} has version {words[1]}, not {wanted[1]}"
        raise ReplicationError(msg, reason="version")
    msg = f"{who}: stream {stream!r} is of another key or block size than the index"
    raise ReplicationError(msg, reason="key")


class Record(NamedTuple):
    """The header of a message.

    Attributes:
        kind: What it is.
        key: `key_of` the bridge's index.
        worker: The worker's name.
        bridge: The process that wrote it. No two have the same.
        epoch: A life of the engine, as far as its bridges know it. No two have the same.
        number: The engine's number of the batch, or of the last one that counts; -1 for none.
        state: Of a beat: the bridge's own.
        checksum: Of a snapshot.
    """

    kind: Kind
    key: str
    worker: str
    bridge: str
    epoch: str
    number: int
    state: str = ""
    checksum: str = ""

    @property
    def message_id(self) -> str:
        """What JetStream knows repeats by."""
        if self.kind == "batch":
            return f"{self.worker}:{self.epoch}:{self.number}"
        return f"{self.worker}:{self.epoch}:{self.kind}:{self.number}:{self.bridge}"

    def write(self) -> str:
        """Return the header."""
        return json.dumps({"version": VERSION, **self._asdict()})

    @classmethod
    def read(cls, headers: Mapping[str, str] | None, worker: str, key: str) -> Record:
        """Read a header.

        Args:
            headers: Those of the message.
            worker: The worker of the message's subject.
            key: What the key must be.

        Raises:
            ReplicationError: It is of another version or key, or something else.
        """
        text = (headers or {}).get(HEADER, "")
        where = f"a message of worker {worker!r}"

        def refuse(why: str, reason: str) -> ReplicationError:
            return ReplicationError(f"{where} {why}", reason=reason)

        if not text or len(text) > _LONGEST:
            why = f"has a header of {len(text)} characters; the limit is {_LONGEST}"
            raise refuse(why, "malformed")
        try:
            said: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            why = f"has a header that is not JSON: {error}"
            raise refuse(why, "malformed") from error
        known = said if isinstance(said, dict) else {}
        if known.get("version") != VERSION:
            why = f"has version {known.get('version')!r}, not {VERSION}"
            raise refuse(why, "version")
        if known.get("key") != key:
            why = "was published under another key or block size"
            raise refuse(why, "key")
        record = cls(*(known.get(field, "") for field in cls._fields))
        number: Any = record.number
        texts = record[:5] + record[6:]
        if (
            not all(isinstance(text, str) for text in texts)
            or record.kind not in _KINDS
            or record.worker != worker
            or not record.epoch
            or isinstance(number, bool)
            or not isinstance(number, int)
            or not -1 <= number < 1 << 63
            or (record.kind == "beat" and record.state not in _STATES)
        ):
            why = f"has the header {text[:200]}"
            raise refuse(why, "malformed")
        return record


class Connection:
    """A connection to NATS, in a thread of its own. It comes back by itself.

    Attributes:
        client: The client of nats-py; None until it has connected once.
        error: The last thing that went wrong, in words.
    """

    def __init__(
        self,
        name: str,
        servers: str | list[str],
        changed: Callable[[bool], None],
        failed: Callable[[str], None],
    ) -> None:
        """Start to connect.

        Args:
            name: What NATS calls this client.
            servers: Where NATS is.
            changed: Called in the thread, with whether there is a connection, when that changes.
            failed: Called in the thread with what goes wrong, in words.

        Raises:
            ImportError: nats-py is missing.
        """
        try:
            import nats  # noqa: PLC0415 - the extra is asked for when it is needed
        except ModuleNotFoundError as error:
            msg = "replicas need nats-py: pip install 'kvtrie[replicas]'"
            raise ImportError(msg, name="nats") from error
        self.client: Any = None
        self.error = ""
        self._nats = nats
        self._name = name
        self._servers = servers
        self._changed = changed
        self._failed = failed
        self._loop = asyncio.new_event_loop()
        self._first = threading.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._ending = False
        self._thread.start()
        self.spawn(self._connect())

    def wait(self, timeout: float) -> bool:
        """Wait for the first connection; false if there is none by then."""
        return self._first.wait(timeout)

    def call(self, work: Coroutine[Any, Any, _T], timeout: float) -> _T:
        """Run a coroutine in the thread, and return what it returns.

        Raises:
            TimeoutError: It takes longer, in seconds; it is cancelled.
        """

        async def limited() -> _T:
            return await asyncio.wait_for(work, timeout)

        return asyncio.run_coroutine_threadsafe(limited(), self._loop).result()

    def soon(self, work: Callable[[], object]) -> None:
        """Have a function called in the thread."""
        self._loop.call_soon_threadsafe(work)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Have a coroutine run in the thread until it ends, or until `close`."""

        def start() -> None:
            task = self._loop.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._ended)

        self._loop.call_soon_threadsafe(start)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(f"{self._name}: {error!r}")
            _LOG.error("%s has ended", self._name, exc_info=error)

    def _fail(self, why: str) -> None:
        self.error = why
        self._failed(why)

    def close(self) -> None:
        """End everything that runs, and the thread. May be repeated."""
        if self._ending:
            return
        self._ending = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        await self._cancel(self._tasks)
        if self.client is not None:
            try:
                await asyncio.wait_for(self.client.close(), PATIENCE)
            except (TimeoutError, self._nats.errors.Error, OSError) as error:
                self._fail(f"NATS: {error!r}")
        # Those of nats-py.
        await self._cancel(asyncio.all_tasks() - {asyncio.current_task()})

    @staticmethod
    async def _cancel(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
        """End tasks. A task may miss one request in Python 3.11, so it gets some."""
        left = {task for task in tasks if task is not None}
        for _ in range(10):
            if not left:
                return
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=PATIENCE / 10)

    async def _connect(self) -> None:
        async def up() -> None:
            self._changed(True)

        async def down() -> None:
            self._changed(False)

        async def wrong(error: Exception) -> None:
            self._fail(f"NATS: {error!r}")

        while True:
            try:
                self.client = await self._nats.connect(
                    self._servers,
                    name=self._name,
                    reconnected_cb=up,
                    disconnected_cb=down,
                    closed_cb=down,
                    error_cb=wrong,
                    connect_timeout=2,
                    reconnect_time_wait=0.2,
                    max_reconnect_attempts=-1,
                    ping_interval=2,
                    max_outstanding_pings=2,
                )
                break
            except (self._nats.errors.Error, OSError, TimeoutError) as error:
                self._fail(f"NATS: {error!r}")
                await asyncio.sleep(0.2)
        self._changed(True)
        self._first.set()
