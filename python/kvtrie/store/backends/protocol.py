"""What a store needs of a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class StoredValue(NamedTuple):
    """A value that a backend has.

    Attributes:
        name: Its name.
        num_bytes: Its size.
        written: When it was written last, in seconds since 1970; None if the backend does not know.
    """

    name: str
    num_bytes: int
    written: float | None


class Backend(Protocol):
    """Bytes under names. Every method may be called from several threads at once.

    A method that cannot do what it is asked for raises `BackendError`, and nothing else. It may
    take long, or never return: who must not wait calls it in another thread (`SpanLoader`,
    `SpanWriter`).
    """

    def put(self, name: str, value: bytearray) -> None:
        """Keep a value, in place of an older one if there is one.

        Raises:
            BackendError: ``"full"``, ``"too_large"`` or ``"unreachable"``. The older value may be
                gone.
        """

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        """Read ranges of a value's bytes.

        Returns:
            Their bytes, fewer than asked for where the value ends; None if there is no value.

        Raises:
            BackendError: ``"unreachable"``.
        """

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Whether there are values of these names.

        Raises:
            BackendError: ``"unreachable"``.
        """

    def delete(self, name: str) -> None:
        """Delete a value, if there is one.

        Raises:
            BackendError: ``"unreachable"``.
        """

    def values(self) -> Iterable[StoredValue]:
        """The values that are there; nothing, if the backend bounds itself.

        One of an unknown time counts as written when the store is opened, so its lifetime begins
        again with each start.

        Raises:
            BackendError: ``"unreachable"``.
        """

    def written(self, name: str) -> float | None:
        """When a value was written last, as `values` says it; None if that is not known.

        A backend that other processes write to says it, so that what they have written again is
        not deleted for its old age.

        Raises:
            BackendError: ``"unreachable"``.
        """
        del name
        return None

    def close(self) -> None:
        """End the connection. May be repeated."""
