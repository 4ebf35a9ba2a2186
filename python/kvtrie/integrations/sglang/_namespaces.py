"""Which requests may share KV: one namespace for each pair of SGLang's ``extra_key`` and salt."""

from __future__ import annotations

from kvtrie._core import SHARED, Namespace


class Namespaces:
    """Maps pairs to namespaces; equal namespaces have equal pairs.

    SGLang appends the id of a LoRA adapter to ``extra_key``, and callers put tenants into either.
    So both are in the salt, which is never shown. A missing part and an empty one differ.
    """

    def __init__(self, model: str) -> None:
        self._shared = Namespace(model=model, salt=SHARED)

    def of(self, extra_key: str | None, cache_salt: str | None) -> Namespace:
        if extra_key is None and cache_salt is None:
            return self._shared
        return self._shared.replace(salt=_part(extra_key) + _part(cache_salt))


def _part(text: str | None) -> str:
    """A text that says its own length, so that what follows it cannot be taken for a part of it."""
    return "-" if text is None else f"{len(text)}:{text}"
