"""Shows a calibration while it runs: a table that is redrawn on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kvtrie.cli import _calibrated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtrie import gates
    from kvtrie.calibrate.measure import Progress

_SECONDS: Final = 30.0
"""Between two lines, where no table is redrawn."""
_ENOUGH: Final = 3
"""Conversations after which the time that is left can be told."""


class Measuring:
    """Stages, then the state after each conversation."""

    def __init__(self, out: TextIO, thresholds: gates.Thresholds) -> None:
        self._out = out
        self._thresholds = thresholds
        self._stack = ExitStack()
        self._live: Live | None = None
        self._shown = -_SECONDS
        self._is_estimated = False

    def stage(self, text: str) -> None:
        self._stack.close()
        console = Console(file=self._out)
        if console.is_terminal:
            self._stack.enter_context(console.status(text))
        else:
            self._line(text)

    def __call__(self, now: Progress) -> None:
        console = Console(file=self._out)
        if console.is_terminal:
            if self._live is None:
                self._stack.close()
                self._live = self._stack.enter_context(
                    Live(console=console, transient=True, auto_refresh=False)
                )
            table = _calibrated.table(now.tally.measured(), self._thresholds)
            self._live.update(Group(table, Text(line(now))), refresh=True)
            return
        is_first = now.edit is None and now.done
        tells_time = not self._is_estimated and now.least > 0 and now.done >= _ENOUGH
        if is_first or tells_time or time.monotonic() - self._shown >= _SECONDS:
            self._is_estimated |= tells_time
            self._shown = time.monotonic()
            self._line(line(now))

    def _line(self, text: str) -> None:
        self._out.write(f"{text}\n")
        self._out.flush()

    def close(self) -> None:
        self._stack.close()


def line(now: Progress) -> str:
    """The state in one line, with an estimate of the time that is left."""
    if now.edit is None:
        return f"resumed after {now.done} conversations" if now.done else "measuring"
    text = f"{now.done} conversations in {_minutes(now.seconds)} minutes ({now.edit})"
    if now.done < _ENOUGH:
        return text
    return f"{text}; {_minutes(now.least)} to {_minutes(now.most)} minutes are left"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}"


@contextmanager
def measuring(out: TextIO, thresholds: gates.Thresholds) -> Iterator[Measuring]:
    """Yield `Measuring`."""
    shown = Measuring(out, thresholds)
    try:
        yield shown
    finally:
        shown.close()
