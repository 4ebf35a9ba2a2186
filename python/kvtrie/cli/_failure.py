"""Ends a command with one sentence on stderr and an exit code."""

from __future__ import annotations

from typing import NoReturn

import typer

BAD_INPUT = 2
_LONGEST = 400


def fail(reason: object, code: int = BAD_INPUT) -> NoReturn:
    """End the command with an exit code; only the first line of the reason is shown."""
    lines = str(reason).strip().splitlines() or [repr(reason)]
    typer.echo(f"kvtrie: {lines[0][:_LONGEST]}", err=True)
    raise typer.Exit(code)
