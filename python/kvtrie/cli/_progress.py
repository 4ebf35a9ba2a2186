"""Progress on stderr: a bar on a terminal, one line per turn elsewhere."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def progress(total: int, out: TextIO) -> Iterator[Callable[[str], None]]:
    """Yield a function to call after each step, with the step's name."""
    console = Console(file=out)
    if console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("starting", total=total)
            yield lambda text: bar.update(task, advance=1, description=text)
        return
    done = 0

    def line(text: str) -> None:
        nonlocal done
        done += 1
        out.write(f"{done}/{total} {text}\n")
        out.flush()

    yield line


class Ticks:
    """Progress of a run whose length is known only after its start."""

    def __init__(self, out: TextIO, most: int) -> None:
        self._out = out
        self._most = most
        self._stack = ExitStack()
        self._shown = 0
        self._step: Callable[[str], None] | None = None

    def stage(self, text: str) -> None:
        self._stack.close()
        console = Console(file=self._out)
        if console.is_terminal:
            self._stack.enter_context(console.status(text))
        else:
            self._out.write(f"{text}\n")
            self._out.flush()

    def __call__(self, done: int, total: int, text: str) -> None:
        steps = min(total, self._most)
        if self._step is None:
            self._stack.close()
            self._step = self._stack.enter_context(progress(steps, self._out))
        while self._shown < done * steps // total:
            self._shown += 1
            self._step(text)

    def close(self) -> None:
        self._stack.close()


@contextmanager
def ticks(out: TextIO, most: int = 20) -> Iterator[Ticks]:
    """Yield `Ticks`; where ``out`` is not a terminal, it writes at most ``most`` lines of steps."""
    shown = Ticks(out, most)
    try:
        yield shown
    finally:
        shown.close()
