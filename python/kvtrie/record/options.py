"""What a recorder may be told: where, how much, how often, and whether token ids are written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, NoReturn

from kvtrie._core import KvTrieError
from kvtrie._nearest import hint
from kvtrie.record._errors import short
from kvtrie.record.digests import MIN_RUNS, read_key
from kvtrie.record.format import CONTENTS

_LEAST_BYTES: Final = 1 << 16
_MOST_FILES: Final = 1000


class RecordOptionsError(KvTrieError, ValueError):
    """An option that is unknown or invalid; the message says what to write instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """Options of a `Recorder`.

    Attributes:
        path: The file that is written. Full ones are renamed to ``path.1``, ``path.2``, ...; one
            process writes a path.
        content: ``"digests"``, or ``"tokens"`` for a log that has the token ids themselves.
        rate: The share of what is recorded, from 0 to 1: of sessions, where requests name
            theirs, else of requests.
        max_bytes: The most bytes of a file.
        files: The most files, with the one that is written.
        key_file: A file with 16 to 64 secret bytes; without one, each recorder makes a key that is
            written nowhere.
        min_run: The shortest run of tokens that is always found.

    Raises:
        RecordOptionsError: A value is invalid.
    """

    path: str
    content: str = "digests"
    rate: float = 1.0
    max_bytes: int = 1 << 26
    files: int = 4
    key_file: str | None = None
    min_run: int = 32

    @classmethod
    def read(cls, given: object) -> RecordOptions:
        """Options from a path, or from a mapping of their names.

        Raises:
            RecordOptionsError: A key is unknown, or a value is invalid.
        """
        if isinstance(given, str):
            given = {"path": given}
        if not isinstance(given, Mapping):
            msg = f'must be a path, or a mapping such as {{"path": "kvtrie.log"}}, not {given!r}'
            raise RecordOptionsError(msg)
        known = [one.name for one in fields(cls)]
        for key in given:
            if key not in known:
                msg = f"unknown key {key!r}{hint(key, known)} (known: {', '.join(known)})"
                raise RecordOptionsError(msg)
        if "path" not in given:
            _refuse("path", None, "the path of a file")
        return cls(**given)

    def __post_init__(self) -> None:
        # A user's JSON may contain anything.
        given: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        for name in ("path", "key_file"):
            value = given[name]
            if (name == "path" or value is not None) and not _is_path(value):
                _refuse(name, value, "the path of a file")
        if given["content"] not in CONTENTS:
            _refuse("content", given["content"], " or ".join(f'"{one}"' for one in CONTENTS))
        rate = given["rate"]
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
            _refuse("rate", rate, "a number from 0 to 1")
        for name, least, most in (
            ("max_bytes", _LEAST_BYTES, None),
            ("files", 1, _MOST_FILES),
            ("min_run", *MIN_RUNS),
        ):
            value = given[name]
            is_int = isinstance(value, int) and not isinstance(value, bool)
            if not is_int or value < least or (most is not None and value > most):
                to = "" if most is None else f" to {most}"
                _refuse(name, value, f"an integer from {least}{to}")

    def check_files(self) -> None:
        """Check that the log can be written and the key be read, and change nothing.

        Raises:
            RecordOptionsError: One of them cannot.
        """
        path = Path(self.path)
        why = None
        if path.is_dir():
            why = "it is a directory"
        elif not path.parent.is_dir():
            why = f"there is no directory {path.parent}"
        elif not os.access(path.parent, os.W_OK):
            why = f"the directory {path.parent} is read-only"
        if why is not None:
            msg = f"path: {self.path}: {why}"
            raise RecordOptionsError(msg)
        self.key()

    def key(self) -> bytes | None:
        """The key of `key_file`; None if there is no such file.

        Raises:
            RecordOptionsError: It cannot be read, or is no key.
        """
        if self.key_file is None:
            return None
        try:
            return read_key(Path(self.key_file))
        except OSError as error:
            msg = f"key_file: {self.key_file}: {error.strerror or error}"
            raise RecordOptionsError(msg) from error
        except ValueError as error:
            msg = f"key_file: {error}"
            raise RecordOptionsError(msg) from error


def _is_path(value: object) -> bool:
    return isinstance(value, str) and bool(value) and "\0" not in value


def _refuse(name: str, value: object, wanted: str) -> NoReturn:
    msg = f"{name} must be {wanted}, not {short(value)}"
    raise RecordOptionsError(msg)
