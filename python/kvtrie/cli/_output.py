"""A console for results that truncates nothing."""

from __future__ import annotations

import sys
from typing import Final

from rich.console import Console

_UNCUT: Final = 10_000


def console() -> Console:
    """As wide as a terminal, or unlimited: elsewhere rich would cut tables at 80 columns."""
    width = None if sys.stdout.isatty() else _UNCUT
    return Console(highlight=False, width=width)
