"""What two engines exchange about a transfer, and the result of a rule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.pd.engine import Computed, Engine


class PeerError(Exception):
    """A peer's own check failed: its request ends with this message."""


@dataclass(frozen=True)
class Want:
    engine: Engine
    ids: Sequence[int]
    blocks: Sequence[int]
    cached: int

    @property
    def uncached_blocks(self) -> Sequence[int]:
        return self.blocks[self.cached // self.engine.block_size :]


class Piece(NamedTuple):
    source_slot: int
    slot: int
    position: int
    num_tokens: int
    delta: int = 0
    exact: bool = True
    hops: int = 0


@dataclass(frozen=True)
class Answer:
    pieces: list[Piece]
    claimed: list[tuple[int, int]] = field(default_factory=list)
    exact_until: int | None = None


class Rule(Protocol):
    """Decides which of the sender's blocks go to which of the receiver's.

    A `PeerError` ends the request; after a `kvtrie.TransferRefused` everything is computed.
    """

    def __call__(self, offer: Computed, want: Want, /) -> Answer:
        """Decide.

        Raises:
            PeerError: The rule fails, which ends the request.
            kvtrie.TransferRefused: The rule refuses, with a reason; everything is then computed.
        """
