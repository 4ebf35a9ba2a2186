"""One kept history, and histories by place."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from kvtrie._core import Namespace

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvtrie._core import ComputedSource, Imported, Span, TokenSequence

Key: TypeAlias = tuple[Namespace, str | int]
"""Namespace, and the conversation's id; for a history without an id, its number."""

_MAX_SESSION: Final = 256


def session_of(conversation: str | None) -> str | None:
    """The session of a conversation in the index. Ids beyond its limit are digested."""
    if not conversation or len(raw := conversation.encode()) <= _MAX_SESSION:
        return conversation or None
    return hashlib.blake2b(raw).hexdigest()


@dataclass(slots=True, eq=False)
class History:
    """One kept history. `places` has one place per token; equal prefixes have equal places."""

    key: Key
    number: int
    kept_at: float
    seq: TokenSequence
    places: npt.NDArray[np.int32]
    num_computed: int
    source: ComputedSource | Imported
    spans: tuple[Span, ...]
    reasoning: tuple[tuple[int, int], ...]
    params: dict[str, Any] | None
    payload: object
    manifest: object
    params_taken: bool = False

    @property
    def conversation(self) -> str | None:
        """The caller's id, or None."""
        return self.key[1] if isinstance(self.key[1], str) else None

    @property
    def last(self) -> int:
        """The place of its last token."""
        return int(self.places[-1])

    @property
    def before_reasoning(self) -> int | None:
        """The place before its first reasoning token, on every path into its reasoning; or None."""
        start = next((start for start, _ in self.reasoning if start), None)
        return None if start is None else int(self.places[start - 1])


class HistoriesByPlace:
    """Histories by place."""

    def __init__(self, num_places: int) -> None:
        # Oldest first.
        self._histories: dict[int, dict[int, History]] = {}
        self._any = np.zeros(num_places, np.bool_)

    def add(self, place: int | None, history: History) -> None:
        """Register a history; None registers nothing."""
        if place is not None:
            self._histories.setdefault(place, {})[history.number] = history
            self._any[place] = True

    def remove(self, place: int | None, history: History) -> None:
        """Undo `add`."""
        if place is not None:
            histories = self._histories[place]
            del histories[history.number]
            if not histories:
                del self._histories[place]
                self._any[place] = False

    def newest(self, place: int) -> History | None:
        """The newest one at a place."""
        histories = self._histories.get(place)
        return None if histories is None else next(reversed(histories.values()))

    def on(self, path: npt.NDArray[np.int32], most: int | None = None) -> list[History]:
        """Histories at any of these places, oldest first; the newest `most` of them.

        A path has few such places: histories that end at different depths have many tokens.
        """
        found: list[History] = []
        for place in path[self._any[path]].tolist():
            found.extend(itertools.islice(reversed(self._histories[place].values()), most))
        found.sort(key=lambda history: history.number)
        return found if most is None else found[-most:]
