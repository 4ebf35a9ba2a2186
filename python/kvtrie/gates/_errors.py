"""What the gate raises, and how values are shown in its messages."""

from __future__ import annotations

import math
from typing import NoReturn

from kvtrie._core import KvTrieError


class GateError(KvTrieError, ValueError):
    """A gate file that cannot be read, is not a gate file, or contradicts itself."""


class GateMismatchError(GateError):
    """A gate file of another model, template or element type, or of another version."""


def refuse(where: str, why: str) -> NoReturn:
    msg = f"{where}: not a gate file: {why}"
    raise GateError(msg)


def is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def short(value: object) -> str:
    # Python does not print integers of very many digits: show the type.
    try:
        text = repr(value)
    except ValueError:
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."
