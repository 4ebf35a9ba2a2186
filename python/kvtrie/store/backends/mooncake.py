"""Values in Mooncake Store, which engine processes share over the network."""

from __future__ import annotations

import queue
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtrie.store.backends.protocol import Backend, StoredValue
from kvtrie.store.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

# Codes of Mooncake's client: no value, and values that do not have the range.
_NOT_FOUND: Final = -704
_OUT_OF_RANGE: Final = -600
_NO_ROOM: Final = -200
# Seconds for a master to take a connection, and for a client whose master is gone to end.
_PATIENCE: Final = 2.0


class MooncakeBackend(Backend):
    """A client of a Mooncake master. It needs `mooncake-transfer-engine`, CUDA or not.

    Mooncake evicts by itself when it is full, so the store's budget does not count here. It lists
    nothing, so a process deletes only what it has written itself when its lifetime ends.

    Args:
        master: Address and port of ``mooncake_master``.
        host: Address of this process, for other clients.
        segment_bytes: Memory that this process adds to the store; 0 for none.
        buffer_bytes: The largest value, and the most that one read returns, header included. It has
            to hold a run, which is ``shape.num_bytes(256)``. There are four buffers.
        protocol: ``"tcp"`` or ``"rdma"``.

    Raises:
        ImportError: Mooncake is missing, or one of the libraries that it is linked with.
        BackendError: The master does not answer.
    """

    def __init__(
        self,
        master: str = "127.0.0.1:50051",
        *,
        host: str = "127.0.0.1",
        segment_bytes: int = 1 << 30,
        buffer_bytes: int = 64 << 20,
        protocol: str = "tcp",
    ) -> None:
        try:
            from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - optional
        except ImportError as error:
            msg = (
                "MooncakeBackend needs mooncake-transfer-engine-non-cuda (or -engine) and the "
                f"libraries that docs/store.md names: {error}"
            )
            raise ImportError(msg, name="mooncake") from error
        # Mooncake asks a master that is not there for a minute and a half.
        at, _, port = master.rpartition(":")
        try:
            socket.create_connection((at, int(port)), timeout=_PATIENCE).close()
        except (OSError, ValueError) as error:
            msg = f"MooncakeBackend: the master at {master} does not answer: {error}"
            raise BackendError(msg, reason="unreachable") from error
        self._client: Any = MooncakeDistributedStore()
        code = self._client.setup(
            host, "P2PHANDSHAKE", segment_bytes, buffer_bytes, protocol, "", master
        )
        if code:
            msg = f"MooncakeBackend: the master at {master} does not answer (code {code})"
            raise BackendError(msg, reason="unreachable")
        self._buffer_bytes = buffer_bytes
        self._buffers: queue.LifoQueue[NDArray[np.uint8]] = queue.LifoQueue()
        for _ in range(4):
            buffer = np.zeros(buffer_bytes, np.uint8)
            code = self._client.register_buffer(buffer.ctypes.data, buffer.nbytes)
            if code:
                msg = f"MooncakeBackend: a buffer of {buffer_bytes} bytes is refused (code {code})"
                raise BackendError(msg, reason="unreachable")
            self._buffers.put(buffer)
        self._changed = threading.Condition()
        self._calls = 0
        self._is_closed = False

    @contextmanager
    def _open(self) -> Iterator[Any]:
        """The client, which ends the process if it is called after its end."""
        with self._changed:
            if self._is_closed:
                msg = "MooncakeBackend: it was closed"
                raise BackendError(msg, reason="unreachable")
            self._calls += 1
        try:
            yield self._client
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    @contextmanager
    def _buffer(self, num_bytes: int) -> Iterator[NDArray[np.uint8]]:
        if num_bytes > self._buffer_bytes:
            msg = f"MooncakeBackend: {num_bytes} bytes at once; the limit is {self._buffer_bytes}"
            raise BackendError(msg, reason="too_large")
        buffer = self._buffers.get()
        try:
            yield buffer
        finally:
            self._buffers.put(buffer)

    def put(self, name: str, value: bytearray) -> None:
        """Store a value. Mooncake replaces none, so an older one is removed first."""
        with self._buffer(len(value)) as buffer:
            buffer[: len(value)] = np.frombuffer(value, np.uint8)
            if self.exists([name])[0]:
                self.delete(name)
            with self._open() as client:
                (code,) = client.batch_put_from([name], [buffer.ctypes.data], [len(value)])
        if code:
            msg = f"MooncakeBackend: {name} cannot be stored (code {code})"
            raise BackendError(msg, reason="full" if code == _NO_ROOM else "unreachable")

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        """Read ranges of a value, in one call."""
        sizes = [end - start for start, end in ranges]
        offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        with self._buffer(sum(sizes)) as buffer, self._open() as client:
            starts = [start for start, _ in ranges]
            ((codes,),) = client.get_into_ranges(
                [buffer.ctypes.data], [[name]], [[offsets]], [[starts]], [[sizes]]
            )
            if list(codes) == sizes:
                whole = memoryview(buffer[: sum(sizes)].tobytes())
                spots = zip(offsets, sizes, strict=True)
                return [whole[offset : offset + size] for offset, size in spots]
        if _NOT_FOUND in codes:
            return None
        if _OUT_OF_RANGE in codes:
            return [memoryview(b"") for _ in ranges]
        msg = f"MooncakeBackend: {name} cannot be read (codes {list(codes)[:4]})"
        raise BackendError(msg, reason="unreachable")

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Whether there are values of these names, in one call."""
        if not names:
            return []
        with self._open() as client:
            codes = client.batch_is_exist(list(names))
        if any(code < 0 for code in codes):
            msg = f"MooncakeBackend: the master does not answer (code {min(codes)})"
            raise BackendError(msg, reason="unreachable")
        return [code == 1 for code in codes]

    def delete(self, name: str) -> None:
        """Delete a value, if there is one, whoever reads it now."""
        with self._open() as client:
            code = client.remove(name, True)
        if code not in (0, _NOT_FOUND):
            msg = f"MooncakeBackend: {name} cannot be deleted (code {code})"
            raise BackendError(msg, reason="unreachable")

    def values(self) -> list[StoredValue]:
        """Nothing: Mooncake bounds itself."""
        return []

    def close(self) -> None:
        """End the client, within seconds. It is left as it is if a call of it does not return."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            if not self._changed.wait_for(lambda: not self._calls, _PATIENCE):
                return
        ending = threading.Thread(target=self._client.close, daemon=True)
        ending.start()
        ending.join(_PATIENCE)
