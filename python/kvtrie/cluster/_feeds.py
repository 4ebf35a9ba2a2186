"""Which workers of an index have a feed, so that none has two.

Two feeds would each say whether the worker is certain, clear it, and count copies twice. So a score
could be wrong and certain.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtrie._core import KvIndexer

_LOCK: Final = threading.Lock()
# By index, each worker's number, and whether it is fed with approximate blocks.
_FED: Final[WeakKeyDictionary[KvIndexer, set[tuple[int, bool]]]] = WeakKeyDictionary()


class Feed:
    """The right to feed some workers of an index, until it is released."""

    def __init__(
        self, call: str, index: KvIndexer, workers: Iterable[int], *, approximate: bool = False
    ) -> None:
        """Take the right.

        Args:
            call: Who takes it, for the error.
            index: The index.
            workers: The numbers of its workers.
            approximate: Whether it is for approximate blocks, which have a feed of their own.

        Raises:
            ValueError: One of them has a feed already; nothing is taken.
        """
        self._fed = {(worker, approximate) for worker in workers}
        with _LOCK:
            self._all = _FED.setdefault(index, set())
            taken = sorted(worker for worker, _ in self._fed & self._all)
            if taken:
                msg = f"{call}: worker {taken[0]} has a feed already, which must be closed first"
                raise ValueError(msg)
            self._all |= self._fed

    def release(self) -> None:
        """Give it back. May be repeated."""
        with _LOCK:
            self._all -= self._fed
            self._fed = set()
