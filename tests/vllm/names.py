"""Names of rows."""

from __future__ import annotations


def parent_of(name: str) -> str:
    """The request whose piece a row computes."""
    return name.rpartition("#")[0]
