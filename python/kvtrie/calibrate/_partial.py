"""The results of a run on disk, written while it runs, so that it can be resumed.

Each line is a checksum and a JSON document: first the identity of the run, then one row per
conversation, in order. The file is valid after each row, however the process ends; an
incomplete last line is dropped. It takes about 11 bytes per position and policy.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NoReturn, Self

from kvtrie.calibrate._steps import CalibrationError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike
    from types import TracebackType

FORMAT: Final = "kvtrie-partial"
VERSION: Final = 2

Row = dict[str, Any]


class PartialError(CalibrationError):
    """A partial file that this run cannot continue, and why."""


class PartialWriteError(CalibrationError):
    """A partial file that can no longer be written."""


class Partial:
    """The partial file of one run, created if missing, and locked until it is closed."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._file: BinaryIO = self.path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            self._refuse("another run is writing it; name another --out")
        if not self.path.exists() or not os.path.samestat(
            self.path.stat(), os.fstat(self._file.fileno())
        ):
            self._file.close()
            self._refuse("another run has just ended and removed it; start again")

    def begin(self, run: Mapping[str, Any]) -> list[Row]:
        """Start or resume a run; returns the rows in the file, in order.

        An error names the first value of ``run``, its identity, that differs.
        """
        wanted = json.loads(json.dumps({"format": FORMAT, "version": VERSION, "run": dict(run)}))
        found = self._read()
        if not found:
            self._append(wanted)
            return []
        head, *rows = found
        if head.get("format") != FORMAT or head.get("version") != VERSION:
            self._refuse(
                "it is not a partial file of this version; remove it, or name another --out"
            )
        theirs = head["run"]
        for name, value in wanted["run"].items():
            if theirs.get(name) != value:
                self._refuse(
                    f"it is of another run: {name} is {_short(theirs.get(name))} there and "
                    f"{_short(value)} here; finish that run, remove the file, or name another --out"
                )
        return rows

    def num_rows(self) -> int:
        return max(0, self.path.read_bytes().count(b"\n") - 1)

    def add(self, row: Row) -> None:
        """Append a row, or raise `PartialWriteError`; earlier rows are intact."""
        self._append(row)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; without a line in it, remove it."""
        if self._file.closed:
            return
        if os.fstat(self._file.fileno()).st_size == 0:
            self.remove()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> list[Row]:
        self._file.seek(0)
        raw = self._file.read()
        end = raw.rfind(b"\n") + 1
        if end < len(raw):
            self._file.truncate(end)
        found = []
        for number, line in enumerate(raw[:end].splitlines(), start=1):
            sum_, _, text = line.partition(b" ")
            if sum_ != b"%08x" % zlib.crc32(text):
                self._refuse(f"line {number} is damaged; remove it, or name another --out")
            found.append(json.loads(text))
        return found

    def _append(self, document: Mapping[str, Any]) -> None:
        text = json.dumps(document, separators=(",", ":")).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            msg = f"{self.path}: {error.strerror or error}"
            raise PartialWriteError(msg) from error

    def _refuse(self, why: str) -> NoReturn:
        msg = f"{self.path}: {why}"
        raise PartialError(msg)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
