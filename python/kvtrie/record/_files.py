"""A file that is renamed away when it is full, so that all together stay below a limit."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def numbered(path: Path, number: int) -> Path:
    """The name of a full file; the higher its number, the older it is."""
    return path if number == 0 else path.with_name(f"{path.name}.{number}")


class Files:
    """Appends lines to a file, which only its owner may read.

    A line is in it whole, or not at all: what the disk takes of a line that it then refuses is
    removed again. A file from before is renamed away with the first line, not when this is made.

    Args:
        path: The file.
        max_bytes: The most bytes of a file.
        most: The most files.
        header: Makes the first line of each.
    """

    def __init__(
        self, path: Path, *, max_bytes: int, most: int, header: Callable[[], bytes]
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._most = most
        self._header = header
        self._file: int | None = None
        self._size = 0

    def append(self, line: bytes) -> bool:
        """Write a line; False if it is longer than a file may be.

        Raises:
            OSError: The disk refuses it. The next call tries again.
        """
        if self._file is None or self._size + len(line) > self._max_bytes:
            header = self._header()
            if len(header) + len(line) > self._max_bytes:
                return False
            self._begin(header)
        self._write(line)
        return True

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def _begin(self, header: bytes) -> None:
        self.close()
        self._rename()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._file, self._size = os.open(self._path, flags, 0o600), 0
        self._write(header)

    def _rename(self) -> None:
        """Give each file the next number, and remove those that are too many."""
        if not self._path.exists() or self._path.stat().st_size == 0:
            return
        for number in count(self._most - 1):
            try:
                numbered(self._path, number).unlink()
            except FileNotFoundError:
                break
        for number in range(self._most - 2, -1, -1):
            with suppress(FileNotFoundError):
                numbered(self._path, number).replace(numbered(self._path, number + 1))

    def _write(self, data: bytes) -> None:
        file, written = self._file, 0
        if file is None:
            return
        try:
            while written < len(data):
                written += os.write(file, data[written:])
        except OSError:
            self._undo(file)
            raise
        self._size += written

    def _undo(self, file: int) -> None:
        try:
            os.ftruncate(file, self._size)
        except OSError:
            # Its last line stays cut, and the next line begins another file.
            self.close()
        if self._size == 0:
            # Not even its header is there: begin again.
            self.close()
