"""How llama.cpp's server reuses chunks of its one cached sequence: removes and shifts in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.pd.exchange import Answer, Piece, Want

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.pd.engine import Computed


@dataclass(frozen=True)
class ShiftReuse:
    """Removes what the new prompt lacks, and shifts what follows: right for the first hole only.

    Where cached tokens and prompt agree for `min_match` tokens, the cells between are removed and
    the following ones shifted, to the end of the cache (`shift_all`). The next removal named cells
    by their index among the cached tokens, which are other cells by then: it drops KV that counts
    as present. https://github.com/ggml-org/llama.cpp/pull/12161
    """

    min_match: int = 1
    shift_all: bool = True

    def __call__(self, offer: Computed, want: Want, /) -> Answer:
        old, new = offer.ids[: offer.num_computed], want.ids
        cells: list[int | None] = list(range(len(old)))
        present = _common(old, new)
        # After the common prefix only claimed chunks are used.
        head_old = head_new = present
        while head_old < len(old) and head_new < len(new):
            match = _common(old[head_old:], new[head_new:])
            if match < self.min_match:
                head_old += 1
                continue
            shift = head_new - head_old
            last = len(old) if self.shift_all else head_old + match
            for index, position in enumerate(cells):
                if position is not None and head_new <= position < head_old:
                    cells[index] = None
                elif position is not None and head_old <= position < last:
                    cells[index] = position + shift
            present += match
            head_old += match
            head_new += match
        slots = offer.engine.pool.slots(offer.blocks)
        targets = want.engine.pool.slots(want.blocks)
        prefix = _common(old, new)
        pieces = [
            Piece(slots[index], targets[position], position, 1, position - index, index < prefix, 1)
            for index, position in enumerate(cells)
            if position is not None and position < present
        ]
        return Answer(pieces, [(0, present)], exact_until=prefix)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


shift_reuse = ShiftReuse()
"""The rule of `ShiftReuse` as reported."""
