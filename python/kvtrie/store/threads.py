"""Threads that work off a bounded queue, and that nobody has to wait for."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Crew:
    """Daemon threads: one that a backend never lets go ends with the process.

    Args:
        name: Of the threads.
        threads: How many.
        max_waiting: Work that may wait. More is refused.
        failed: Called with what a piece of work raises.

    Raises:
        ValueError: A number is below 1.
    """

    def __init__(
        self, name: str, *, threads: int, max_waiting: int, failed: Callable[[Exception], None]
    ) -> None:
        for what, value in (("threads", threads), ("max_waiting", max_waiting)):
            if value < 1:
                msg = f"{name}: {what} is {value}; it must be at least 1"
                raise ValueError(msg)
        self._max_waiting = max_waiting
        self._failed = failed
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._unfinished = 0
        self._is_closed = False
        for number in range(threads):
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True).start()

    def offer(self, work: Callable[[], None]) -> bool:
        """Have something done, if there is room in the queue; it never waits."""
        with self._changed:
            if self._is_closed or len(self._waiting) >= self._max_waiting:
                return False
            self._waiting.append(work)
            self._unfinished += 1
            self._changed.notify_all()
        return True

    def wait(self, timeout: float) -> bool:
        """Wait until all work is done, at most so many seconds; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unfinished, timeout)

    def close(self, timeout: float) -> bool:
        """Take no more work, and wait for what is left; whether all was done. May be repeated.

        The threads end when nothing is left, be it later.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        return self.wait(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                work = self._waiting.popleft()
            try:
                work()
            except Exception as error:  # noqa: BLE001 - a thread lives on, and it is reported
                self._failed(error)
            finally:
                # What it holds, such as the rows of a run, is not kept until the next one.
                del work
                with self._changed:
                    self._unfinished -= 1
                    self._changed.notify_all()
