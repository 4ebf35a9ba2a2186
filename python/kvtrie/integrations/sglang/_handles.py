"""What SGLang holds of a match: a sequence, how much of it matched, its blocks and its locks.

SGLang keeps a handle with the request, where it has a node of a radix tree with its own cache. It
reads nothing of it, and gives it back to the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from kvtrie._core import InsertResult, Match, Pin, ReusePlan, TokenSequence
    from kvtrie.integrations.sglang._moving import Ask, Built

NO_BLOCKS: Final[NDArray[np.int32]] = np.zeros(0, np.int32)


class Handle:
    """The end of a match: SGLang keeps it with the request, and locks it.

    Its sequence and blocks are read off the index's answers when somebody asks for them, as most
    never do. Few handles have what is below other than its default.
    """

    ask: Ask | None = None
    """How to plan what continues the match; None if nothing does."""
    own: torch.Tensor | None = None
    """Slots of the request after those of the blocks: copies that continue the match."""
    built: Built | None = None
    """What these are; None if they are exact."""
    stored = 0
    """Tokens after the match that have arrived from the store."""
    locks: tuple[Pin | ReusePlan | NDArray[np.int32], ...] = ()
    """What pins it, for each lock; for one that failed, the blocks that it should have held."""
    kept: tuple[tuple[torch.Tensor, int], ...] = ()
    """Slots that its request reads in place of cached ones, and goes on owning, with the position
    of the first; they are freed with its last lock."""
    new: InsertResult | None = None
    """What was inserted after what was found."""
    _seq: TokenSequence | None = None
    _blocks: NDArray[np.int32] | None = None

    def __init__(self, found: Match | None, epoch: int) -> None:
        self.found = found
        """What the index found of its tokens; None if other blocks were set, and for the root."""
        self.epoch = epoch
        """How often blocks had left the index when they were found."""

    @classmethod
    def of(cls, seq: TokenSequence, blocks: NDArray[np.int32], epoch: int) -> Handle:
        """A handle of these blocks."""
        handle = cls(None, epoch)
        handle._seq, handle._blocks = seq, blocks
        return handle

    @property
    def seq(self) -> TokenSequence | None:
        """Its tokens; None for the root, which has none and is not locked."""
        if self._seq is None and self.found is not None:
            self._seq = self.found.sequence
            self._seq.truncate(self.found.num_tokens)
        return self._seq

    @seq.setter
    def seq(self, seq: TokenSequence) -> None:
        self._seq = seq

    @property
    def blocks(self) -> NDArray[np.int32]:
        """Of its tokens, as they were when it was found or locked."""
        if self._blocks is None:
            found = NO_BLOCKS if self.found is None else self.found.blocks
            new = self.new
            self._blocks = found if new is None else np.concatenate([found, new.blocks])
        return self._blocks

    def forget_blocks(self) -> None:
        """Its blocks are another prompt's by now: it has none."""
        self.found, self.new, self._blocks = None, None, NO_BLOCKS

    @property
    def lock_failed(self) -> bool:
        """Whether what locks it is not in the index, which then may evict what is locked."""
        return bool(self.locks) and isinstance(self.locks[-1], np.ndarray)

    def add(self, new: InsertResult, seq: TokenSequence) -> None:
        """What was inserted after the match belongs to it."""
        self.new, self._seq = new, seq

    def now(self, found: Match, epoch: int) -> None:
        """Its blocks are those of another lookup."""
        self.found, self.epoch = found, epoch
        self._blocks = self.new = None
