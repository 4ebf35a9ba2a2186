"""What reading a log raises: the message begins with the file and the line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie._core import KvTrieError

if TYPE_CHECKING:
    from pathlib import Path


class LogError(KvTrieError, ValueError):
    """A log that cannot be read.

    Attributes:
        path: The file.
        line: The line in it, from 1.
        reason: What is wrong there.
    """

    def __init__(self, path: Path, line: int, why: str) -> None:
        super().__init__(f"{path}, line {line}: {why}")
        self.path = path
        self.line = line
        self.reason = why


class LogFormatError(LogError):
    """The file is not a log of this package."""


class LogVersionError(LogError):
    """The log is of a version of the format that is not known here."""


class LogLineError(LogError):
    """A line is not a record, and it is not the cut end of the file."""


def short(value: object) -> str:
    """A value in a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
