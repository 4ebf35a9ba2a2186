"""How much each namespace has, and which has most."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvtrie._core import Namespace

# Outdated entries next to as many as there are namespaces.
_MOST_OUTDATED: Final = 64


class NamespaceCounts:
    """Counts of namespaces.

    A change takes O(log namespaces), and finding the largest as well, on average over all calls.
    """

    def __init__(self) -> None:
        self._counts: dict[Namespace, int] = {}
        # The largest first, the earliest of equals; an entry whose count has changed is outdated.
        self._heap: list[tuple[int, int, Namespace]] = []
        self._changes = 0

    def of(self, namespace: Namespace) -> int:
        """What a namespace has."""
        return self._counts.get(namespace, 0)

    def add(self, namespace: Namespace, change: int) -> None:
        """Change what it has."""
        count = self.of(namespace) + change
        self._counts[namespace] = count
        if not count:
            del self._counts[namespace]
            return
        self._changes += 1
        heapq.heappush(self._heap, (-count, self._changes, namespace))
        if len(self._heap) > 2 * len(self._counts) + _MOST_OUTDATED:
            self._heap = [(-count, at, one) for at, (one, count) in enumerate(self._counts.items())]
            heapq.heapify(self._heap)

    def largest(self, *, besides: Namespace) -> Namespace | None:
        """Which other namespace has most; None if there is no other."""
        aside: tuple[int, int, Namespace] | None = None
        found: Namespace | None = None
        while self._heap:
            count, _, namespace = self._heap[0]
            if self.of(namespace) == -count and namespace != besides:
                found = namespace
                break
            entry = heapq.heappop(self._heap)
            if self.of(namespace) == -count:
                aside = entry
        if aside is not None:
            heapq.heappush(self._heap, aside)
        return found
