"""Which requests may share KV: one namespace for each pair of SGLang's ``extra_key`` and salt."""

from __future__ import annotations

from typing import Final

from kvtrie._core import SHARED, Namespace

_MAX_MADE: Final = 1024
"""Namespaces that are kept: requests name them, so there may be any number."""


class Namespaces:
    """Maps pairs to namespaces; equal namespaces have equal pairs.

    SGLang appends the id of a LoRA adapter to ``extra_key``, and callers put tenants into either.
    So both are in the salt, which is never shown. A missing part and an empty one differ.
    """

    def __init__(self, model: str) -> None:
        self._shared = Namespace(model=model, salt=SHARED)
        self._made: dict[tuple[str | None, str | None], Namespace] = {}

    def of(self, extra_key: str | None, cache_salt: str | None) -> Namespace:
        if extra_key is None and cache_salt is None:
            return self._shared
        pair = extra_key, cache_salt
        found = self._made.get(pair)
        if found is None:
            if len(self._made) >= _MAX_MADE:
                self._made.clear()
            salt = _part(extra_key) + _part(cache_salt)
            found = self._made[pair] = self._shared.replace(salt=salt)
        return found


def _part(text: str | None) -> str:
    """A text that says its own length, so that what follows it cannot be taken for a part of it."""
    return "-" if text is None else f"{len(text)}:{text}"
