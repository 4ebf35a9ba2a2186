"""Process handling of every command: Ctrl-C and failed output end it with one sentence.

Ctrl-C ends the process at once, also inside an import, where an exception would be swallowed. Files
that must be complete are on disk before that, or are written under ``held``.

Standard library only: `guard` is called before any other import.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TextIO

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C: 128 and the number of the signal."""
BAD_OUTPUT: Final = 3
"""Exit code if results could not be written."""

_SHOW_CURSOR: Final = "\x1b[?25h\n"  # a bar on a terminal hides it

_ESCAPES: Final = "kvtrie"  # the name of how a stream writes what its encoding has not

_interrupt_note: Callable[[], str] | None = None
_holds = 0
_is_pending = False


def guard() -> None:
    """End the process with one sentence on Ctrl-C or unwritable output.

    What the encoding of a stream does not have is written as an escape.
    """
    # If SIGINT is ignored (nohup, background jobs), it stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    if sys.stdout is None:
        _end("standard output is closed", BAD_OUTPUT)
    codecs.register_error(_ESCAPES, _escaped)
    for stream in (sys.stdout, sys.stderr):
        # A stream whose file was exchanged after it was opened refuses this, and stays as it is.
        if reconfigure := getattr(stream, "reconfigure", None):
            with contextlib.suppress(OSError):
                reconfigure(errors=_ESCAPES)
    sys.stdout = cast("TextIO", _Checked(sys.stdout, "standard output"))
    if sys.stderr is None:
        # Rich would show progress and messages on stdout.
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for good
    sys.stderr = cast("TextIO", _Checked(sys.stderr, None))


@contextlib.contextmanager
def add_to_interrupt(say: Callable[[], str]) -> Iterator[None]:
    """Add what ``say`` returns to the sentence on Ctrl-C."""
    global _interrupt_note  # noqa: PLW0603 - a process has one handler
    _interrupt_note = say
    try:
        yield
    finally:
        _interrupt_note = None


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delay Ctrl-C until a file is complete."""
    global _holds  # noqa: PLW0603 - a process has one handler
    _holds += 1
    try:
        yield
    finally:
        _holds -= 1
        if _is_pending and not _holds:
            _quit()


def _interrupted(number: int, frame: object) -> None:
    del number, frame
    global _is_pending  # noqa: PLW0603 - a process has one handler
    _is_pending = True
    if not _holds:
        _quit()


def _quit() -> NoReturn:
    more = "" if _interrupt_note is None else f"; {_interrupt_note()}"
    _say(f"interrupted{more}")
    os._exit(INTERRUPTED)


def _end(text: str, code: int) -> NoReturn:
    _say(text)
    raise SystemExit(code)


def _say(text: str) -> None:
    """Write to stderr, unbuffered; errors are ignored."""
    shown = _SHOW_CURSOR if os.isatty(2) else ""
    with contextlib.suppress(OSError):
        os.write(2, f"{shown}kvtrie: {text}\n".encode(errors="backslashreplace"))


def _escaped(error: UnicodeError) -> tuple[str, int]:
    r"""Write characters that an encoding has not as ``\uXXXX``, which JSON can hold as well."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)), error.end


class _Checked:
    """A stream whose failure ends the process; click and rich would each handle it differently."""

    def __init__(self, stream: TextIO, name: str | None) -> None:
        self._stream = stream
        self._name = name

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - everything else is the stream's
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> NoReturn:
        # The interpreter flushes again at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        if self._name is None:
            raise SystemExit(BAD_OUTPUT)
        _end(f"cannot write to {self._name}: {error.strerror or error}", BAD_OUTPUT)
