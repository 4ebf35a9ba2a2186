"""Which requests may share KV: one namespace for each pair of SGLang's ``extra_key`` and salt."""

from __future__ import annotations

import hashlib
from typing import Final

from kvtrie._core import SHARED, Namespace

_MAX_MADE: Final = 1024
"""Namespaces that are kept: requests name them, so there may be any number."""
_MAX_PART: Final = 256
"""Characters of a part that are kept; of a longer one, which may have megabytes, its digest is."""


class Namespaces:
    """Maps pairs to namespaces; equal namespaces have equal pairs.

    SGLang appends the id of a LoRA adapter to ``extra_key``, and callers put tenants into either.
    So both are in the salt, which is never shown. A missing part and an empty one differ. Of a long
    one the salt has the SHA-256, so that neither the index nor this keeps texts of any size.
    """

    def __init__(self, model: str) -> None:
        self.shared = Namespace(model=model, salt=SHARED)
        """That of requests without either."""
        self._made: dict[tuple[str | None, str | None], Namespace] = {}

    def of(self, extra_key: str | None, cache_salt: str | None) -> Namespace:
        if extra_key is None and cache_salt is None:
            return self.shared
        pair = extra_key, cache_salt
        found = self._made.get(pair)
        if found is None:
            salt = _part(extra_key) + _part(cache_salt)
            found = self.shared.replace(salt=salt)
            if max(len(extra_key or ""), len(cache_salt or "")) > _MAX_PART:
                return found
            if len(self._made) >= _MAX_MADE:
                self._made.clear()
            self._made[pair] = found
        return found


def _part(text: str | None) -> str:
    """A text that says its own length, so that what follows it cannot be taken for a part of it."""
    if text is None:
        return "-"
    if len(text) > _MAX_PART:  # no number begins with this sign
        return f"#{hashlib.sha256(text.encode()).hexdigest()}"
    return f"{len(text)}:{text}"
