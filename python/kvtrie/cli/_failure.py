"""What a command says: one sentence and an exit code, and nothing that a terminal obeys."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NoReturn

import typer

BAD_INPUT = 2
_LONGEST = 400


def fail(reason: object, code: int = BAD_INPUT) -> NoReturn:
    """End the command with an exit code; only the first line of the reason is shown."""
    lines = str(reason).strip().splitlines() or [repr(reason)]
    typer.echo(f"kvtrie: {printable(lines[0][:_LONGEST])}", err=True)
    raise typer.Exit(code)


def printable(text: str) -> str:
    """A text with what a terminal could obey, such as control characters, as Python escapes it."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def need(what: str, *modules: str, extras: str = "cli") -> None:
    """End the command if a module of an extra is missing.

    Args:
        what: What needs the modules, for the message.
        modules: Names of modules; none is imported.
        extras: What to install.

    Raises:
        typer.Exit: A module is missing.
    """
    for name in modules:
        if find_spec(name) is None:
            fail(f"{what} needs {name}: pip install 'kvtrie[{extras}]'")
