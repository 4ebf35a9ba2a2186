"""Threads that work off a bounded queue, and that nobody has to wait for."""

from __future__ import annotations

import queue
import threading
import time
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
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue(max_waiting)
        self._failed = failed
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def offer(self, work: Callable[[], None]) -> bool:
        """Have something done, if there is room in the queue; it never waits."""
        if self._is_closed:
            return False
        try:
            self._work.put_nowait(work)
        except queue.Full:
            return False
        return True

    def wait(self, timeout: float) -> bool:
        """Wait until all work is done, at most so many seconds; whether it is."""
        end = time.monotonic() + timeout
        with self._work.all_tasks_done:
            while self._work.unfinished_tasks:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._work.all_tasks_done.wait(left)
        return True

    def close(self, timeout: float) -> bool:
        """Take no more work, wait for what is left, and end the threads; whether all was done."""
        self._is_closed = True
        done = self.wait(timeout)
        if done:
            for _ in self._threads:
                self._work.put(None)
        return done

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - a thread lives on, and it is reported
                self._failed(error)
            finally:
                self._work.task_done()
