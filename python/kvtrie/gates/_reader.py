"""Removes and checks fields of a JSON object, and refuses the remaining ones."""

from __future__ import annotations

from typing import Any, Final, NoReturn

from kvtrie.gates._errors import refuse, short

MAX_TEXT: Final = 512


class Reader:
    """Removes and checks fields of a JSON object; refuses the remaining ones."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            refuse(where, f"an object is expected, not {type(value).__name__}")
        self._left: dict[str, Any] = dict(value)
        self._where = where

    def refuse(self, why: str) -> NoReturn:
        refuse(self._where, why)

    def take(self, name: str) -> Any:  # noqa: ANN401 - checked by the caller
        if name not in self._left:
            self.refuse(f"{name!r} is missing")
        return self._left.pop(name)

    def text(self, name: str, most: int = MAX_TEXT) -> str:
        value = self.take(name)
        if not isinstance(value, str) or len(value) > most:
            self.refuse(f"{name!r} must be text of at most {most} characters")
        return value

    def optional_text(self, name: str) -> str | None:
        if self._left.get(name) is None:
            self._left.pop(name, None)
            return None
        return self.text(name)

    def optional(self, name: str) -> object:
        return self._left.pop(name, None)

    def items(self, name: str, most: int, least: int = 1) -> list[Any]:
        value = self.take(name)
        if not isinstance(value, list) or not least <= len(value) <= most:
            self.refuse(f"{name!r} must be a list of {least} to {most} entries")
        return value

    def close(self) -> None:
        if self._left:
            self.refuse(f"unknown field {short(next(iter(self._left)))}")
