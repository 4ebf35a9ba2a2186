"""The lines of a file, plain, compressed with gzip or in an archive, and errors that name the line.

An archive is a tar file, plain or compressed with gzip. Its lines are those of the files in it
whose names end in ``.jsonl``, by name; all else in it is left out.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import tarfile
import zlib
from typing import TYPE_CHECKING, Any, Final

from kvtrie.replay.trace import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_GZIP: Final = b"\x1f\x8b"
_SUFFIX: Final = ".jsonl"
_CUT: Final = "the compressed data is cut off or damaged"
_DAMAGED: Final = (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError)


def read_json(text: str) -> Any:  # noqa: ANN401 - any JSON
    """What a line says.

    Raises:
        ValueError: It is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        msg = "the JSON is nested too deeply"
        raise ValueError(msg) from None


def finite(value: object) -> float | None:
    """A number of a line as a float; None for anything else, infinities and NaN among them."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


class TraceFile:
    """One file, or one archive of files.

    Args:
        path: Where it is.
        encode: Token ids of a text, for traces of text; None if there is no tokenizer.

    Attributes:
        path: Where it is.
        encode: As given.
        first_line: The number of the first line that is not blank; 1 before `first`.
    """

    def __init__(self, path: Path, encode: Callable[[str], Sequence[int]] | None = None) -> None:
        self.path = path
        self.encode = encode
        self.first_line = 1
        self._first_file = ""

    def error(self, line: int | None, reason: str, file: str = "") -> TraceError:
        """An error that names the file, or one in the archive, and the line."""
        return TraceError(file or self.path, line, reason)

    def first_error(self, reason: str) -> TraceError:
        """An error that names the line that `first` has returned."""
        return self.error(self.first_line, reason, self._first_file)

    @property
    def is_archive(self) -> bool:
        """Whether it is an archive."""
        try:
            with self._archive():
                return True
        except (OSError, *_DAMAGED):
            return False

    def _archive(self) -> tarfile.TarFile:
        with self.path.open("rb") as raw:
            is_compressed = raw.read(2) == _GZIP
        return tarfile.open(self.path, "r:gz" if is_compressed else "r:")

    def first(self) -> str:
        """The first line that is not blank.

        Raises:
            TraceError: The file cannot be read, or is empty.
        """
        for file, number, line in self.located():
            self._first_file, self.first_line = file, number
            return line
        if self.is_archive:
            raise self.error(
                None, f"the archive has no line in a file whose name ends in {_SUFFIX}"
            )
        raise self.error(None, "the file is empty")

    def lines(self) -> Iterator[tuple[int, str]]:
        """The lines that are not blank, with their numbers from 1.

        Raises:
            TraceError: The file cannot be read, is not text, or its compressed data ends early.
        """
        return ((number, line) for _, number, line in self.located())

    def located(self) -> Iterator[tuple[str, int, str]]:
        """As `lines`, with the file in front: ``""``, or the archive's path and the name in it.

        Raises:
            TraceError: As `lines`.
        """
        if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):
            raise self.error(None, "not a regular file: it is read more than once, as no pipe is")
        if self.is_archive:
            yield from self._unpacked()
            return
        try:
            with self.path.open("rb") as raw:
                is_compressed = raw.read(2) == _GZIP
                raw.seek(0)
                # Both end a line at a newline alone.
                binary = gzip.GzipFile(fileobj=raw) if is_compressed else raw
                yield from self._text(binary, "")
        except OSError as error:
            raise self.error(None, error.strerror or str(error)) from None

    def _unpacked(self) -> Iterator[tuple[str, int, str]]:
        try:
            with self._archive() as archive:
                names = [one for one in archive.getmembers() if one.isfile()]
                for member in sorted(names, key=lambda one: one.name):
                    base = member.name.rpartition("/")[2]
                    # A Mac adds files of attributes.
                    if not base.endswith(_SUFFIX) or base.startswith("._"):
                        continue
                    binary = archive.extractfile(member)
                    if binary is not None:
                        yield from self._text(binary, f"{self.path}/{member.name}")
        except _DAMAGED:
            raise self.error(None, _CUT) from None
        except OSError as error:
            raise self.error(None, error.strerror or str(error)) from None

    def _text(
        self,
        binary: Any,  # noqa: ANN401 - what TextIOWrapper takes has no public type
        file: str,
    ) -> Iterator[tuple[str, int, str]]:
        number = 0
        try:
            with io.TextIOWrapper(binary, encoding="utf-8", newline="\n") as text:
                for number, line in enumerate(text, 1):
                    if line.strip():
                        yield file, number, line.strip()
        except UnicodeDecodeError:
            why = "not text in UTF-8, so of no known format"
            raise self.error(number + 1, why, file) from None
        except _DAMAGED:
            raise self.error(number + 1, _CUT, file) from None
