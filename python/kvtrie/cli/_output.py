"""A console for results that truncates nothing."""

from __future__ import annotations

import sys
from typing import Final

from rich.console import Console

_UNCUT: Final = 10_000


def console() -> Console:
    """A console on stdout, as wide as a terminal, or unlimited if it is not one.

    Without a terminal rich takes 80 columns, and cuts tables there.
    """
    width = None if sys.stdout.isatty() else _UNCUT
    return Console(highlight=False, width=width)
