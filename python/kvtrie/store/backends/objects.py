"""Values as objects of an object store: a local folder, S3 and what else obstore knows."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kvtrie._obstore import first_line
from kvtrie.store.backends.protocol import Backend, StoredValue
from kvtrie.store.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence

    from obstore.store import ObjectStore

# Objects that are looked up at the same time.
_AT_ONCE: Final = 256
# Bytes between two ranges that are read as one.
_GAP: Final = 1 << 20


class ObjectBackend(Backend):
    """An object store, or a folder of this machine. It needs `obstore`.

    Args:
        store: One of obstore's stores. An S3 store should have a timeout, as `from_url` gives it.
        prefix: The folder, or folders, of all objects within the store.

    Raises:
        ImportError: obstore is missing.

    Example:
        >>> from obstore.store import MemoryStore
        >>> backend = ObjectBackend(MemoryStore())
        >>> backend.put("a", bytearray(b"hello"))
        >>> [bytes(part) for part in backend.read("a", [(1, 3), (4, 9)])]
        [b'el', b'o']
    """

    def __init__(self, store: ObjectStore, *, prefix: str = "") -> None:
        self._obstore = _obstore()
        self._errors: tuple[type[Exception], ...] = (
            self._obstore.exceptions.BaseError,
            OSError,
            ValueError,
        )
        self._store = store
        # obstore lists whole folders, and its paths begin with no slash.
        folder = prefix.strip("/")
        self._prefix = f"{folder}/" if folder else ""
        # To read some bytes in vain takes less time than to ask a server once more.
        self._gap = 0 if isinstance(store, self._obstore.store.LocalStore) else _GAP

    @classmethod
    def from_url(cls, url: str, *, prefix: str = "", timeout: float = 5.0) -> ObjectBackend:
        """A backend by its URL.

        Args:
            url: ``file:///folder``, which is made if it is missing, ``s3://bucket``, or another one
                that obstore knows. Credentials come from the environment.
            prefix: As for the class.
            timeout: Seconds after which a request has failed. A folder has no timeout.

        Raises:
            ImportError: obstore is missing.
            BackendError: The URL names nothing that can be opened.
        """
        obstore = _obstore()
        if not urlsplit(url).scheme:
            msg = f"ObjectBackend: {url!r} has no scheme: write file://{Path(url).absolute()}"
            raise BackendError(msg, reason="unreachable")
        try:
            if url.startswith("file://"):
                folder = Path(url.removeprefix("file://"))
                return cls(obstore.store.LocalStore(folder, mkdir=True), prefix=prefix)
            limit = timedelta(seconds=timeout)
            store = obstore.store.from_url(
                url,
                client_options={
                    "timeout": limit,
                    "connect_timeout": limit,
                    "allow_http": _allows_http(url),
                },
                retry_config={"max_retries": 1, "retry_timeout": limit},
            )
        except (obstore.exceptions.BaseError, OSError, ValueError) as error:
            msg = f"ObjectBackend: {url!r} cannot be opened: {first_line(error)}"
            raise BackendError(msg, reason="unreachable") from error
        return cls(store, prefix=prefix)

    def put(self, name: str, value: bytearray) -> None:
        """Store an object."""
        try:
            self._obstore.put(self._store, self._prefix + name, bytes(value), use_multipart=False)
        except self._errors as error:
            raise self._failure(name, "stored", error) from error

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        """Read ranges of an object, in one call."""
        # obstore's own merging panics where an object ends before the second of two ranges.
        merged, within = _merged(ranges, self._gap)
        try:
            found = self._obstore.get_ranges(
                self._store,
                self._prefix + name,
                starts=[start for start, _ in merged],
                ends=[end for _, end in merged],
                coalesce=0,
            )
        except FileNotFoundError:
            return None
        except self._errors as error:
            if self._is_short(name, merged[-1][1], error):
                return [memoryview(b"") for _ in ranges]
            raise self._failure(name, "read", error) from error
        parts = [memoryview(part).cast("B") for part in found]
        starts = [merged[at][0] for at in within]
        return [
            parts[at][start - low : end - low]
            for at, low, (start, end) in zip(within, starts, ranges, strict=True)
        ]

    def _is_short(self, name: str, end: int, error: Exception) -> bool:
        """Whether an object ends before a position, which obstore has no class of errors for."""
        if "range" not in str(error).lower():
            # A server that does not answer is not asked twice.
            return False
        try:
            size: int = self._obstore.head(self._store, self._prefix + name)["size"]
        except self._errors:
            return False
        return size < end

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Whether there are objects of these names; asked for many at once."""

        async def one(name: str) -> bool:
            try:
                await self._obstore.head_async(self._store, self._prefix + name)
            except FileNotFoundError:
                return False
            return True

        async def every() -> list[bool]:
            found: list[bool] = []
            for start in range(0, len(names), _AT_ONCE):
                found += await asyncio.gather(*map(one, names[start : start + _AT_ONCE]))
            return found

        try:
            return _run(every())
        except self._errors as error:
            what = f"{len(names)} names"
            raise self._failure(what, "looked up", error) from error

    def delete(self, name: str) -> None:
        """Delete an object, if there is one."""
        try:
            self._obstore.delete(self._store, self._prefix + name)
        except FileNotFoundError:
            return
        except self._errors as error:
            raise self._failure(name, "deleted", error) from error

    def values(self) -> Iterator[StoredValue]:
        """The objects under the prefix; when they were written, by the clock of the store."""
        try:
            for some in self._obstore.list(self._store, self._prefix or None):
                for one in some:
                    name = one["path"].removeprefix(self._prefix)
                    yield StoredValue(name, one["size"], one["last_modified"].timestamp())
        except self._errors as error:
            what = "the objects"
            raise self._failure(what, "listed", error) from error

    def written(self, name: str) -> float | None:
        """When an object was written, by the clock of the store; None if there is none."""
        try:
            said = self._obstore.head(self._store, self._prefix + name)
        except FileNotFoundError:
            return None
        except self._errors as error:
            raise self._failure(name, "looked up", error) from error
        when: float = said["last_modified"].timestamp()
        return when

    def close(self) -> None:
        """Do nothing: obstore has no connection to end."""

    @staticmethod
    def _failure(name: str, what: str, error: Exception) -> BackendError:
        # obstore has no class for them: no space left on device, file too large, disk quota.
        is_full = any(f"os error {number}" in str(error) for number in (27, 28, 122))
        msg = f"ObjectBackend: {name} cannot be {what}: {first_line(error)}"
        return BackendError(msg, reason="full" if is_full else "unreachable")


def _allows_http(url: str) -> bool:
    """What the environment says: with options of the client, obstore no longer asks it."""
    given = os.environ.get("AWS_ALLOW_HTTP", "") if url.startswith(("s3://", "s3a://")) else ""
    return given.lower() in ("1", "on", "true", "y", "yes")


def _merged(ranges: Sequence[tuple[int, int]], gap: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Ranges with those at most `gap` apart as one, in order, and which of them has each range."""
    merged: list[tuple[int, int]] = []
    within = [0] * len(ranges)
    for at in sorted(range(len(ranges)), key=ranges.__getitem__):
        start, end = ranges[at]
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
        within[at] = len(merged) - 1
    return merged, within


def _run(lookups: Coroutine[Any, Any, list[bool]]) -> list[bool]:
    """Run lookups, in a thread of their own if an event loop runs in this one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(lookups)
    ended: Future[list[bool]] = Future()

    def run() -> None:
        try:
            ended.set_result(asyncio.run(lookups))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            ended.set_exception(error)

    threading.Thread(target=run, name="ObjectBackend", daemon=True).start()
    return ended.result()


def _obstore() -> Any:  # noqa: ANN401 - a module
    try:
        import obstore  # noqa: PLC0415 - the extra is asked for when it is needed
        import obstore.exceptions  # noqa: PLC0415 - likewise
        import obstore.store  # noqa: PLC0415 - likewise
    except ModuleNotFoundError as error:
        msg = "ObjectBackend needs obstore: pip install 'kvtrie[store]'"
        raise ImportError(msg, name="obstore") from error
    return obstore
