"""A console for results that truncates nothing."""

from __future__ import annotations

import sys
from typing import Final

from rich.console import Console

_UNCUT: Final = 10_000


def console() -> Console:
    """A console as wide as the terminal; elsewhere, where rich cuts at 80 columns, unlimited."""
    width = None if sys.stdout.isatty() else _UNCUT
    return Console(highlight=False, width=width)
