"""Leases: what a sender holds for its readers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


class LeaseError(Exception):
    """The sender no longer holds these blocks for the reader."""


@dataclass
class Leases:
    """The requests that a sender holds for its readers.

    A manifest says what blocks hold, not for how long: the sender must not hand them out while a
    reader may read them. A reader names its lease, and gets only blocks of that lease.
    """

    blocks: dict[int, set[int]] = field(default_factory=dict)
    requests: dict[int, Hashable] = field(default_factory=dict)
    next_number: int = 0

    def grant(self, request: Hashable, blocks: Sequence[int]) -> int:
        number = self.next_number
        self.next_number += 1
        self.blocks[number] = set(blocks)
        self.requests[number] = request
        return number

    def require(self, number: int, blocks: Sequence[int]) -> None:
        held = self.blocks.get(number)
        if held is None:
            message = f"lease {number} has ended"
            raise LeaseError(message)
        other = [block for block in blocks if block not in held]
        if other:
            message = f"lease {number} does not cover block {other[0]}"
            raise LeaseError(message)

    def end(self, number: int) -> Hashable | None:
        self.blocks.pop(number, None)
        request = self.requests.pop(number, None)
        return None if request in self.requests.values() else request
