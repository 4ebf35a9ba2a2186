"""Reads a log: its files from the oldest on, up to the last whole record of each."""

from __future__ import annotations

import json
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtrie.record._errors import LogError, LogFormatError, LogLineError, LogVersionError, short
from kvtrie.record._files import numbered
from kvtrie.record.format import (
    MARK,
    Dropped,
    FieldError,
    Header,
    Recorded,
    VersionError,
    read_dropped,
    read_header,
    read_request,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

_BEGINS: Final = f'{{"{MARK}":'.encode()
# A header names an engine and a model; longer first lines are not read at all.
_MAX_HEADER: Final = 1 << 16


def files_of(path: str | Path) -> list[Path]:
    """The files of a log, the oldest first: those that a recorder has renamed, and ``path``."""
    path = Path(path)
    older = takewhile(Path.exists, (numbered(path, number) for number in count(1)))
    return [*reversed(list(older)), path]


class Log:
    """A log in one or more files.

    Iterating reads the requests, in the order in which they ended. One line is in memory at a time.

    Args:
        path: The file that a recorder was given, or one that it has renamed, which is then read
            alone.

    Attributes:
        files: Its files, the oldest first.
        headers: Their headers, without those that are cut.
        num_cut: Cut last lines that the last iteration met.
        dropped: Requests that the recorder did not write, as far as the last iteration has read.

    Raises:
        LogFormatError: A file is not a log.
        LogVersionError: A file is of another version.
        LogLineError: A header is broken.
        LogError: Files differ in their content, the block size or the shortest run.
        OSError: A file cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.files = files_of(path)
        self.num_cut = 0
        self.dropped = Dropped()
        found = [(one, _header_of(one)) for one in self.files]
        self.headers: list[Header] = [header for _, header in found if header is not None]
        for file, header in found:
            first = self.headers[0] if self.headers else header
            for name in ("content", "block_size", "min_run", "window"):
                if header is None or getattr(header, name) == getattr(first, name):
                    continue
                why = f"{name} is {getattr(header, name)!r}, and of the log's first file "
                why += f"{getattr(first, name)!r}: read each file alone"
                raise LogError(file, 1, why)

    @property
    def header(self) -> Header | None:
        """The oldest header; None if the log is cut in its first line."""
        return self.headers[0] if self.headers else None

    def __iter__(self) -> Iterator[Recorded]:
        """Read the requests.

        Raises:
            LogLineError: A line is not a record.
            OSError: A file cannot be read.
        """
        return (one for _, _, one in self.located())

    def located(self) -> Iterator[tuple[Path, int, Recorded]]:
        """Read the requests, each with its file and the number of its line there, from 1.

        Raises:
            LogLineError: A line is not a record.
            OSError: A file cannot be read.
        """
        self.num_cut, self.dropped = 0, Dropped()
        for path in self.files:
            yield from self._requests(path)

    def _requests(self, path: Path) -> Iterator[tuple[Path, int, Recorded]]:
        with path.open("rb") as file:
            header = _read_header(path, file)
            if header is None:
                self.num_cut += 1
                return
            for number, line in enumerate(file, start=2):
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    # Only the end of a file can have no line feed.
                    if not line.endswith(b"\n"):
                        self.num_cut += 1
                        return
                    why = f"the line is not JSON ({_reason(error)})"
                    raise LogLineError(path, number, why) from None
                if not isinstance(row, dict) or ("request" in row) == ("dropped" in row):
                    why = f"the line is not a record: {short(line.decode(errors='replace'))}"
                    raise LogLineError(path, number, why)
                try:
                    if "dropped" in row:
                        self.dropped += read_dropped(row)
                        continue
                    one = read_request(row, header)
                except FieldError as error:
                    raise LogLineError(path, number, str(error)) from None
                yield path, number, one


def _header_of(path: Path) -> Header | None:
    with path.open("rb") as file:
        return _read_header(path, file)


def _read_header(path: Path, file: BinaryIO) -> Header | None:
    """The header of a file; None if the file is cut inside it."""
    line = file.readline(_MAX_HEADER)
    if not (line.startswith(_BEGINS) or _BEGINS.startswith(line)):
        why = "it is not a log of kvtrie, which begins with " + _BEGINS.decode()
        raise LogFormatError(path, 1, why)
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        if not line.endswith(b"\n") and len(line) < _MAX_HEADER:
            return None
        raise LogLineError(path, 1, f"the header is not JSON ({_reason(error)})") from None
    try:
        return read_header(row)
    except VersionError as error:
        raise LogVersionError(path, 1, str(error)) from None
    except FieldError as error:
        raise LogLineError(path, 1, str(error)) from None


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
