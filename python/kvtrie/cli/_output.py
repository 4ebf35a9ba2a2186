"""Where results go: a console that truncates nothing, and files that are written whole."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path
from typing import Final

from rich.console import Console

from kvtrie.cli import _process
from kvtrie.cli._failure import fail

_UNCUT: Final = 10_000
_LEAST: Final = 80


def console() -> Console:
    """A console as wide as the terminal, but at least 80 columns, which it breaks itself.

    Elsewhere, where rich cuts at 80 columns, it is unlimited.
    """
    found = Console(highlight=False, width=None if sys.stdout.isatty() else _UNCUT)
    return found if found.width >= _LEAST else Console(highlight=False, width=_LEAST)


def check(*paths: Path | None) -> None:
    """End the command before its work if a file is to be written where none can be."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            reason = errno.EISDIR
        elif not path.parent.is_dir():
            reason = errno.ENOENT
        else:
            continue
        fail(f"cannot write {path}: {os.strerror(reason)}", _process.BAD_OUTPUT)


def write_whole(path: Path, text: str) -> None:
    """Write a file, or end the command and leave what is there as it is.

    A device or a pipe is written to and stays what it is, and so does a link.
    """
    # Names of files may have bytes that are no text.
    data = text.encode(errors="backslashreplace")
    partial = None
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        whole = Path(os.path.realpath(path))
        partial = whole.with_name(f".{whole.name}.partial")
        with _process.held():
            partial.write_bytes(data)
            partial.replace(whole)
    except OSError as error:
        if partial is not None:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        fail(f"cannot write {path}: {error.strerror or error}", _process.BAD_OUTPUT)
