"""Which known name a misspelt one is nearest to, for messages."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_COMPARED: Final = 64
"""Characters of the longest name that is compared: comparing takes the product of two lengths."""


def nearest(name: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is most like ``name``, or None if none is near.

    Args:
        name: What was written, of any type; only texts of up to ``MAX_COMPARED`` characters are
            compared.
        known: The names that exist.
        cutoff: The least likeness, 0 to 1.
    """
    if not isinstance(name, str) or len(name) > MAX_COMPARED:
        return None
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def hint(name: object, known: Iterable[str]) -> str:
    """What a message about an unknown name ends with: the nearest known one, if one is near."""
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else ""
