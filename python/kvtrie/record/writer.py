"""Writes a log in the background: nothing that happens here may delay or break an engine."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Final

from kvtrie.record._files import Files
from kvtrie.record.digests import Digester, new_key
from kvtrie.record.format import Dropped, Header, dropped_line, header_line, request_line

if TYPE_CHECKING:
    from kvtrie.record.format import Finished
    from kvtrie.record.options import RecordOptions

_LOG = logging.getLogger("kvtrie.record")

_MAX_WAITING: Final = 1024
# 64 megabytes of token ids.
_MAX_WAITING_TOKENS: Final = 1 << 24
_MAX_SECONDS: Final = 5.0
# Python's lock changes hands during a sleep; a thread that wants it else waits 5 ms.
_PAUSE: Final = 5e-5


@dataclass(frozen=True, slots=True)
class RecordCounts:
    """What became of the requests that a recorder was given.

    Attributes:
        written: Those in the log.
        dropped: Those that are not.
        bytes_written: Of the log's lines, without its headers.
    """

    written: int = 0
    dropped: Dropped = field(default_factory=Dropped)
    bytes_written: int = 0


class Recorder:
    """Writes finished requests to a log.

    `put` copies nothing and waits for nothing: at most 1,024 requests and 16 million tokens wait
    for a thread, which starts with the first one. What does not fit is dropped. An error of the
    disk is logged once, and the request dropped; the next one is tried again. After `close`, and in
    a process that was forked from this one, every request is dropped.

    Args:
        options: What to write, and where.
        block_size: Tokens per block.
        engine: The engine's name and version.
        model: The model's name.

    Raises:
        RecordOptionsError: The key file cannot be read.
        ValueError: The block size is less than 1.
    """

    def __init__(
        self, options: RecordOptions, *, block_size: int, engine: str = "", model: str = ""
    ) -> None:
        self._options = options
        self._digester = Digester(
            options.key() or new_key(),
            block_size=block_size,
            min_run=options.min_run,
            pause=_PAUSE,
        )
        self._block_size = block_size
        self._engine = engine
        self._model = model
        self._files = Files(
            Path(options.path),
            max_bytes=options.max_bytes,
            most=options.files,
            header=self._header,
        )
        self._process = os.getpid()
        self._queue: Queue[Finished | threading.Event | None] = Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._is_closed = False
        # The counts have two writers.
        self._lock = threading.Lock()
        self._counts = RecordCounts()
        self._num_waiting_tokens = 0
        self._noted = Dropped()
        self._has_warned = False

    @property
    def counts(self) -> RecordCounts:
        """What became of the requests so far; those that wait are not in it."""
        return self._counts

    def wants(self, request_id: str, session: str | None = None) -> bool:
        """Whether a request is in the sample.

        All requests of a session are, or none.
        """
        rate = self._options.rate
        return rate >= 1 or self._digester.share(request_id if session is None else session) < rate

    def put(self, one: Finished) -> bool:
        """Hand over a request, whose arrays must not change; False if it was dropped at once."""
        num_tokens = len(one.tokens)
        if os.getpid() != self._process:
            return False
        with self._lock:
            is_full = self._num_waiting_tokens + num_tokens > _MAX_WAITING_TOKENS
            if self._is_closed or is_full or not (self._has_started() and self._has_put(one)):
                self._count(dropped=Dropped(queue=1))
                return False
            self._num_waiting_tokens += num_tokens
        return True

    def flush(self, seconds: float = _MAX_SECONDS) -> bool:
        """Wait until everything that was handed over is written or dropped; False if it is not."""
        if self._thread is None:
            return True
        done, end = threading.Event(), time.monotonic() + seconds
        try:
            self._queue.put(done, timeout=seconds)
        except Full:
            return False
        return done.wait(max(0.0, end - time.monotonic()))

    def close(self, seconds: float = _MAX_SECONDS) -> None:
        """Write what waits, as far as the time allows, and take nothing more."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._is_closed = True
            thread, self._thread = self._thread, None
        if thread is None:
            return
        end = time.monotonic() + seconds
        try:
            self._queue.put(None, timeout=seconds)
        except Full:
            return
        thread.join(max(0.0, end - time.monotonic()))

    def _has_started(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kvtrie-record", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # The interpreter is about to exit, or the system has no more threads.
                return False
            self._thread = thread
        return True

    def _has_put(self, one: Finished) -> bool:
        try:
            self._queue.put_nowait(one)
        except Full:
            return False
        return True

    def _count(self, *, written: int = 0, dropped: Dropped | None = None, size: int = 0) -> None:
        """Count; the lock is held."""
        before = self._counts
        self._counts = RecordCounts(
            before.written + written,
            before.dropped if dropped is None else before.dropped + dropped,
            before.bytes_written + size,
        )

    # --- in the background -------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            one = self._queue.get()
            if one is None:
                break
            if isinstance(one, threading.Event):
                one.set()
                continue
            self._write(one)
        self._end()

    def _write(self, one: Finished) -> None:
        size, dropped = 0, None
        try:
            line = request_line(one, self._digester, self._options.content)
            self._note_dropped()
            if self._files.append(line):
                size = len(line)
            else:
                dropped = Dropped(size=1)
        except Exception as error:  # noqa: BLE001 - the engine goes on, and it is counted
            dropped = Dropped(disk=1)
            self._warn(error)
        with self._lock:
            self._num_waiting_tokens -= len(one.tokens)
            self._count(written=int(dropped is None), dropped=dropped, size=size)

    def _note_dropped(self) -> None:
        """Write how many were dropped since this was last written."""
        dropped = self._counts.dropped
        if dropped != self._noted and self._files.append(dropped_line(dropped - self._noted)):
            self._noted = dropped

    def _end(self) -> None:
        try:
            self._note_dropped()
            self._files.close()
        except OSError as error:
            self._warn(error)
        while True:
            try:
                left = self._queue.get_nowait()
            except Empty:
                return
            if isinstance(left, threading.Event):
                left.set()

    def _warn(self, error: Exception) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        _LOG.warning(
            "kvtrie: %s: requests are not recorded, and counted: %s", self._options.path, error
        )

    def _header(self) -> bytes:
        options = self._options
        return header_line(
            Header(
                content=options.content,
                block_size=self._block_size,
                min_run=options.min_run,
                window=self._digester.window,
                key=self._digester.key_id,
                rate=float(options.rate),
                engine=self._engine,
                model=self._model,
                began=round(time.time(), 3),
            )
        )
