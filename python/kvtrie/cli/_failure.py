"""How a command gives up on bad input: one sentence on stderr, exit code 2."""

from __future__ import annotations

from typing import NoReturn

import typer

BAD_INPUT = 2
_LONGEST = 400


def fail(reason: object) -> NoReturn:
    """End the command.

    Args:
        reason: An error or text; its first line is shown.

    Raises:
        typer.Exit: Always.
    """
    lines = str(reason).strip().splitlines() or [repr(reason)]
    typer.echo(f"kvtrie: {lines[0][:_LONGEST]}", err=True)
    raise typer.Exit(BAD_INPUT)
