"""Threads that work off a bounded queue, and that nobody has to wait for, and shares of it."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable


class Shares:
    """A number of places that owners share: each takes no more than it leaves free.

    So one owner gets half of them, and a second one half of the rest. Who has none gets the last
    one. It is not safe for threads.

    Args:
        total: All places.
    """

    def __init__(self, total: int) -> None:
        self._free = total
        self._of: dict[Hashable, int] = {}

    def take(self, owner: Hashable, count: int = 1) -> bool:
        """Take places; false, and none taken, where they are too many for one owner."""
        before, left = self._of.get(owner, 0), self._free - count
        is_last = not before and count == 1 and not left
        if before + count > left and not is_last:
            return False
        self._free = left
        self._of[owner] = before + count
        return True

    def take_back(self, owner: Hashable) -> None:
        """Take one place, be it one too many."""
        self._free -= 1
        self._of[owner] = self._of.get(owner, 0) + 1

    def give(self, owner: Hashable, count: int = 1) -> None:
        """Give places back."""
        self._free += count
        self._of[owner] -= count
        if not self._of[owner]:
            del self._of[owner]


class Crew:
    """Daemon threads: one that a backend never lets go ends with the process.

    Args:
        name: Of the threads.
        threads: How many.
        max_waiting: Work that may wait. More is refused.
        failed: Called with what a piece of work raises.
        is_shared: Whether owners share the queue as `Shares` has it.
        chore: Done now and then, by one thread at a time, whether work waits or not; not after the
            crew was closed. It returns whether there is more of it: then it goes on after the next
            piece of work, or at once if none waits.
        chore_every: Seconds from the end of a chore to the next.

    Raises:
        ValueError: A number is below 1.
    """

    def __init__(
        self,
        name: str,
        *,
        threads: int,
        max_waiting: int,
        failed: Callable[[Exception], None],
        is_shared: bool = False,
        chore: Callable[[], bool] | None = None,
        chore_every: float = 60.0,
    ) -> None:
        for what, value in (("threads", threads), ("max_waiting", max_waiting)):
            if value < 1:
                msg = f"{name}: {what} is {value}; it must be at least 1"
                raise ValueError(msg)
        self._max_waiting = max_waiting
        self._failed = failed
        self._changed = threading.Condition()
        # By owner, the next one first.
        self._waiting: OrderedDict[Hashable, deque[Callable[[], None]]] = OrderedDict()
        self._places = Shares(max_waiting) if is_shared else None
        self._num_waiting = 0
        self._unfinished = 0
        self._is_closed = False
        self._chore, self._chore_every = chore, chore_every
        self._chore_due = math.inf if chore is None else time.monotonic() + chore_every
        # Between two pieces of a chore, work goes first.
        self._after_chore = False
        for number in range(threads):
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True).start()

    def offer(self, work: Callable[[], None], owner: Hashable = None) -> bool:
        """Have something done, if there is room in the queue; it never waits.

        Owners take turns, so nobody waits for all that another one has offered.
        """
        with self._changed:
            if self._is_closed or self._num_waiting >= self._max_waiting:
                return False
            if self._places is not None and not self._places.take(owner):
                return False
            self._waiting.setdefault(owner, deque()).append(work)
            self._num_waiting += 1
            self._unfinished += 1
            self._changed.notify_all()
        return True

    def put_back(self, rest: Callable[[], None], owner: Hashable = None) -> bool:
        """Have the rest of a piece of work done after what others wait for; false if nobody does.

        It goes before what else its owner waits for, and is never refused for want of room.
        """
        with self._changed:
            if all(one == owner for one in self._waiting):
                return False
            if self._places is not None:
                self._places.take_back(owner)
            self._waiting.setdefault(owner, deque()).appendleft(rest)
            self._waiting.move_to_end(owner)
            self._num_waiting += 1
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

    def _is_chore_due(self) -> bool:
        is_turn = not (self._after_chore and self._waiting)
        return not self._is_closed and is_turn and time.monotonic() >= self._chore_due

    def _next(self) -> Callable[[], None]:
        if self._is_chore_due():
            self._chore_due, self._after_chore = math.inf, True
            self._unfinished += 1
            return self._do_chore
        self._after_chore = False
        owner, works = self._waiting.popitem(last=False)
        work = works.popleft()
        self._num_waiting -= 1
        if self._places is not None:
            self._places.give(owner)
        if works:
            self._waiting[owner] = works
        return work

    def _do_chore(self) -> None:
        has_more = False
        try:
            has_more = self._chore is not None and self._chore()
        finally:
            with self._changed:
                self._chore_due = time.monotonic() + (0.0 if has_more else self._chore_every)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._is_closed or self._is_chore_due()):
                    left = self._chore_due - time.monotonic()
                    self._changed.wait(None if left == math.inf else max(0.0, left))
                if self._is_closed and not self._waiting:
                    return
                work = self._next()
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
