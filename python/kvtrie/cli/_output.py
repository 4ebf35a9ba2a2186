"""Where results go: a console that cuts nothing off."""

from __future__ import annotations

import sys
from typing import Final

from rich.console import Console

_UNCUT: Final = 10_000


def console() -> Console:
    """A console on stdout: as wide as a terminal, and without end where there is none.

    rich takes 80 columns for what is no terminal, and cuts tables there.
    """
    width = None if sys.stdout.isatty() else _UNCUT
    return Console(highlight=False, width=width)
