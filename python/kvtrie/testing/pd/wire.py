"""What travels between two engines: a manifest's bytes, and a lease on the blocks that it names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from kvtrie.testing.pd.serving import ServingEngine


class LeaseError(Exception):
    """The sender does not hold these blocks for the reader any more."""


@dataclass(frozen=True)
class Envelope:
    """One message.

    Attributes:
        sender: Who holds the blocks.
        lease: The number under which it holds them.
        raw: The manifest's bytes, as they arrive.
    """

    sender: ServingEngine
    lease: int
    raw: bytes


@dataclass
class Leases:
    """Which requests a sender keeps for its readers.

    A manifest says what blocks hold, not for how long: that they are not handed out again while
    somebody may read them is the sender's business. A reader names its lease, and gets blocks of
    that lease alone.
    """

    blocks: dict[int, set[int]] = field(default_factory=dict)
    requests: dict[int, Hashable] = field(default_factory=dict)
    next_number: int = 0

    def grant(self, request: Hashable, blocks: Sequence[int]) -> int:
        """Hold a request's blocks for readers, and name the lease."""
        number = self.next_number
        self.next_number += 1
        self.blocks[number] = set(blocks)
        self.requests[number] = request
        return number

    def require(self, number: int, blocks: Sequence[int]) -> None:
        """Look whether blocks may be read.

        Raises:
            LeaseError: The lease has ended, or covers other blocks.
        """
        held = self.blocks.get(number)
        if held is None:
            message = f"lease {number} has ended"
            raise LeaseError(message)
        other = [block for block in blocks if block not in held]
        if other:
            message = f"lease {number} does not cover block {other[0]}"
            raise LeaseError(message)

    def end(self, number: int) -> Hashable | None:
        """End a lease, and name the request if that was its last one."""
        self.blocks.pop(number, None)
        request = self.requests.pop(number, None)
        return None if request in self.requests.values() else request
