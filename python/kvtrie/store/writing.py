"""Writing off the caller's path: a thread, and a bounded queue that drops what has no room."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Final

from kvtrie.store.threads import Crew

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtrie._core import ReusePolicy
    from kvtrie.store.contexts import PrefixMarks
    from kvtrie.store.runs import SpanRun
    from kvtrie.store.shape import SpanRows
    from kvtrie.store.store import SpanStore

_LOG: Final = logging.getLogger("kvtrie.store")
SWEEP_SECONDS: Final = 60.0
"""Between two visits of a writer to the runs that have outlived their time."""
# Runs that are deleted before what waits to be written has its turn.
_SWEPT_AT_ONCE: Final = 64


def sweep_some(store: SpanStore) -> bool:
    """Delete some of the runs that have outlived their time; whether there may be more.

    What the backend raises against its contract is counted as ``sweep_failed``, and logged.
    """
    try:
        return store.sweep(_SWEPT_AT_ONCE) == _SWEPT_AT_ONCE
    except Exception:  # noqa: BLE001 - a thread lives on, and it is reported
        store.count("sweep_failed")
        _LOG.exception("old runs were not deleted")
        return False


class SpanWriter:
    """Stores runs in a thread of its own, and deletes there those that have outlived their time.

    Args:
        store: Where.
        max_waiting: Runs that may wait.
        max_bytes: Bytes of the runs that wait, or are being written.

    Raises:
        ValueError: A limit is below 1.
    """

    def __init__(
        self, store: SpanStore, *, max_waiting: int = 256, max_bytes: int = 256 << 20
    ) -> None:
        if max_bytes < 1:
            msg = f"SpanWriter: max_bytes is {max_bytes}; it must be at least 1"
            raise ValueError(msg)
        self._store = store
        self._max_bytes = max_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._crew = Crew(
            "SpanWriter",
            threads=1,
            max_waiting=max_waiting,
            failed=self._failed,
            chore=lambda: sweep_some(store),
            chore_every=SWEEP_SECONDS,
        )

    def offer(
        self,
        run: SpanRun,
        read: Callable[[], SpanRows],
        done: Callable[[], None] | None = None,
        *,
        exact_until: int | None = None,
        hops: int | None = None,
        policy: ReusePolicy | None = None,
        session: str | None = None,
        marks: PrefixMarks | None = None,
    ) -> bool:
        """Have a run stored; it never waits.

        Args:
            run: Which run.
            read: Called in the thread; returns its rows. The blocks that it reads stay pinned until
                ``done``.
            done: Called in the thread once the rows are not needed, whatever became of them. It is
                not called if the run is dropped.
            exact_until: As for `SpanStore.put`.
            hops: As for `SpanStore.put`.
            policy: As for `SpanStore.put`.
            session: As for `SpanStore.put`.
            marks: As for `SpanStore.put`.

        Returns:
            Whether it will be tried. What is dropped is counted as ``dropped``.
        """
        labels = {
            "exact_until": exact_until,
            "hops": hops,
            "policy": policy,
            "session": session,
            "marks": marks,
        }
        size = self._store.shape.num_bytes(run.num_tokens)
        with self._lock:
            has_room = self._bytes + size <= self._max_bytes
            self._bytes += size if has_room else 0
        if has_room and self._crew.offer(lambda: self._write(run, read, done, size, labels)):
            return True
        if has_room:
            self._leave(size)
        self._store.count("dropped")
        return False

    def wait(self, timeout: float) -> bool:
        """Wait until nothing waits, at most so many seconds; whether that is so."""
        return self._crew.wait(timeout)

    def close(self, timeout: float = 5.0) -> bool:
        """Take no more runs, and wait for those that were taken; whether all were tried."""
        return self._crew.close(timeout)

    def _write(
        self,
        run: SpanRun,
        read: Callable[[], SpanRows],
        done: Callable[[], None] | None,
        size: int,
        labels: dict[str, Any],
    ) -> None:
        try:
            try:
                rows = read()
            finally:
                if done is not None:
                    done()
            self._store.put(run, rows, **labels)
        finally:
            self._leave(size)

    def _leave(self, size: int) -> None:
        with self._lock:
            self._bytes -= size

    def _failed(self, error: Exception) -> None:
        self._store.count("put_failed")
        _LOG.error("a run was not stored", exc_info=error)
