"""The lines of a file, plain or compressed with gzip, and errors that name the line."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import TYPE_CHECKING, Final

from kvtrie.replay.trace import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_GZIP: Final = b"\x1f\x8b"


class TraceFile:
    """One file.

    Attributes:
        path: Where it is.
        first_line: The number of the first line that is not blank; 1 before `first`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.first_line = 1

    def error(self, line: int | None, reason: str) -> TraceError:
        """An error that names the file and the line."""
        return TraceError(self.path, line, reason)

    def first(self) -> str:
        """The first line that is not blank.

        Raises:
            TraceError: The file cannot be read, or is empty.
        """
        for number, line in self.lines():
            self.first_line = number
            return line
        raise self.error(None, "the file is empty")

    def lines(self) -> Iterator[tuple[int, str]]:
        """The lines that are not blank, with their numbers from 1.

        Raises:
            TraceError: The file cannot be read, is not text, or its compressed data ends early.
        """
        number = 0
        try:
            with self.path.open("rb") as raw:
                is_compressed = raw.read(2) == _GZIP
                raw.seek(0)
                # Both end a line at a newline alone.
                binary = gzip.GzipFile(fileobj=raw) if is_compressed else raw
                with io.TextIOWrapper(binary, encoding="utf-8", newline="\n") as text:
                    for number, line in enumerate(text, 1):
                        if line.strip():
                            yield number, line.strip()
        except UnicodeDecodeError:
            raise self.error(number + 1, "not text in UTF-8, so of no known format") from None
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise self.error(number + 1, "the compressed data is cut off or damaged") from None
        except OSError as error:
            raise self.error(None, error.strerror or str(error)) from None
