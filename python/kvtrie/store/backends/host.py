"""Values in this process's memory."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from kvtrie.store.backends.protocol import Backend, StoredValue
from kvtrie.store.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class HostBackend(Backend):
    """A bounded number of bytes in the memory of this process.

    Args:
        max_bytes: Bytes of all values together.
        clock: Seconds since 1970.

    Raises:
        ValueError: ``max_bytes`` is below 1.

    Example:
        >>> backend = HostBackend(max_bytes=100)
        >>> backend.put("a", bytearray(b"hello"))
        >>> [bytes(part) for part in backend.read("a", [(1, 3), (4, 9)])]
        [b'el', b'o']
    """

    def __init__(self, max_bytes: int, *, clock: Callable[[], float] = time.time) -> None:
        if max_bytes < 1:
            msg = f"HostBackend: max_bytes is {max_bytes}; it must be at least 1"
            raise ValueError(msg)
        self._max_bytes = max_bytes
        self._clock = clock
        self._values: dict[str, bytearray] = {}
        self._written: dict[str, float] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all values together."""
        return self._bytes

    def put(self, name: str, value: bytearray) -> None:
        """Keep a value; it is not copied."""
        with self._lock:
            total = self._bytes + len(value) - len(self._values.get(name, b""))
            if total > self._max_bytes:
                msg = f"HostBackend: {total} bytes would be kept; the limit is {self._max_bytes}"
                raise BackendError(msg, reason="full")
            self._values[name] = value
            self._written[name] = self._clock()
            self._bytes = total

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        """Read ranges, as views."""
        value = self._values.get(name)
        if value is None:
            return None
        whole = memoryview(value).toreadonly()
        return [whole[start:end] for start, end in ranges]

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Whether there are values of these names."""
        return [name in self._values for name in names]

    def delete(self, name: str) -> None:
        """Delete a value, if there is one."""
        with self._lock:
            self._bytes -= len(self._values.pop(name, b""))
            self._written.pop(name, None)

    def values(self) -> list[StoredValue]:
        """The values that are there."""
        with self._lock:
            return [
                StoredValue(name, len(value), self._written[name])
                for name, value in self._values.items()
            ]

    def close(self) -> None:
        """Do nothing: the values stay."""
