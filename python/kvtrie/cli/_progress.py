"""Progress on stderr: a bar on a terminal, one line a turn elsewhere."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def progress(total: int, out: TextIO) -> Iterator[Callable[[str], None]]:
    """Show how far a long run is.

    Args:
        total: Steps to come.
        out: Where to show it.

    Yields:
        A function to call after each step, with what it was.
    """
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


@contextmanager
def ticks(out: TextIO, most: int = 20) -> Iterator[Callable[[int, int, str], None]]:
    """Show how far a run is whose length shows when it has begun.

    Args:
        out: Where to show it.
        most: Lines at most, where that is no terminal.

    Yields:
        A function to call after each step, with what is done, what there is, and a name.
    """
    with ExitStack() as stack:
        shown = 0
        step: Callable[[str], None] | None = None

        def tick(done: int, total: int, text: str) -> None:
            nonlocal shown, step
            steps = min(total, most)
            if step is None:
                step = stack.enter_context(progress(steps, out))
            while shown < done * steps // total:
                shown += 1
                step(text)

        yield tick
