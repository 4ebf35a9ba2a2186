"""What two engines tell each other about a transfer, and what a rule makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.testing.pd.engine import Computed, Engine


class PeerError(Exception):
    """A peer's own check failed: its request ends with this message."""


@dataclass(frozen=True)
class Want:
    """What the receiver needs.

    Attributes:
        engine: The receiver.
        ids: Its prompt.
        blocks: Its table from position 0.
        cached: How many tokens from the front it has already, in the first blocks of the table.
    """

    engine: Engine
    ids: Sequence[int]
    blocks: Sequence[int]
    cached: int

    @property
    def uncached_blocks(self) -> Sequence[int]:
        """The blocks behind those that are wholly cached."""
        return self.blocks[self.cached // self.engine.block_size :]


class Piece(NamedTuple):
    """Consecutive tokens to load.

    Attributes:
        source_slot: Where the first lies in the sender's pool.
        slot: Where it goes in the receiver's pool.
        position: Where that is in the receiver's sequence.
        num_tokens: How many.
        delta: How far K is moved.
        exact: Whether they are called exact.
        hops: How many hops they are said to have.
    """

    source_slot: int
    slot: int
    position: int
    num_tokens: int
    delta: int = 0
    exact: bool = True
    hops: int = 0


@dataclass(frozen=True)
class Answer:
    """What a rule decides.

    Attributes:
        pieces: What to copy.
        claimed: Ranges of positions that need no computation, as it believes.
        exact_until: Where KV stops being called exact; None if it is all called so.
    """

    pieces: list[Piece]
    claimed: list[tuple[int, int]] = field(default_factory=list)
    exact_until: int | None = None


class Rule(Protocol):
    """Decides which of the sender's blocks become which of the receiver's."""

    def __call__(self, offer: Computed, want: Want, /) -> Answer:
        """Decide.

        Raises:
            PeerError: The rule gives up, which ends the request.
            kvtrie.TransferRefused: The rule gives up, and says why; all is computed then.
        """
