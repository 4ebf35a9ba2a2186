"""The copies that a run's copy takes along in the other groups of KV blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from kvtrie.integrations.vllm._ranges import Range


class CarriedCopy(NamedTuple):
    """Tokens that are copied from one block of a group into one block."""

    position: int
    source_slot: int
    num_tokens: int
    delta: int


@dataclass(frozen=True, slots=True)
class Carried:
    """The copies of other groups, of each group ascending, and the blocks that they read."""

    pieces: Mapping[int, Sequence[CarriedCopy]]
    blocks: frozenset[int]

    def moves(
        self,
        tables: Sequence[Sequence[int]],
        block_size: int,
        null: int,
        given: Range,
        dtype: np.dtype[np.void],
    ) -> list[tuple[int, NDArray[np.void]]]:
        """The copies for a range of tokens, by group, in the form of `kvtrie.ReusePlan.moves`.

        Raises:
            RuntimeError: A request has a block there that they do not fill.
        """
        start, end = given
        found = []
        for group, pieces in self.pieces.items():
            table = tables[group]
            rows = []
            for piece in pieces:
                low = max(piece.position, start)
                count = min(piece.position + piece.num_tokens, end) - low
                # Before its window a request has no block.
                block = null if count <= 0 else table[low // block_size]
                if block != null:
                    source = piece.source_slot + low - piece.position
                    rows.append((source, block * block_size + low % block_size, count, piece.delta))
            blocks = range(start // block_size, -(-end // block_size))
            needed = sum(
                min(end, (at + 1) * block_size) - max(start, at * block_size)
                for at in blocks
                if table[at] != null
            )
            if sum(row[2] for row in rows) != needed:
                msg = f"vLLM expects {needed} tokens of [{start}, {end}) in group {group} of blocks"
                raise RuntimeError(msg)
            found.append((group, np.array(rows, dtype)))
        return found


NOTHING = Carried({}, frozenset())
