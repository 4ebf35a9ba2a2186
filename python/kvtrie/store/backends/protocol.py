"""What a store needs of a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


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

    def sizes(self) -> Iterable[tuple[str, int]]:
        """The values that are there with their bytes; nothing, if the backend bounds itself.

        Raises:
            BackendError: ``"unreachable"``.
        """

    def close(self) -> None:
        """End the connection. May be repeated."""
