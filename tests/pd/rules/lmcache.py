"""How LMCache follows a request: its own list of ids next to the engine's counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.pd.exchange import Answer, PeerError, Piece, Want

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.pd.engine import Computed


@dataclass
class Tracker:
    """The ids that LMCache assumes in a request's slots: slices of the engine's list.

    Each scheduler step it appends `ids[base : base + scheduled]`. The base was the engine's count
    of computed tokens. With asynchronous scheduling the counter is a step ahead of the ids, so all
    slices of decode steps are empty: https://github.com/LMCache/LMCache/pull/2821

    `clamped` takes the smaller of the counter and the list's own length. After a preemption or a
    failed load the counter is below the list: ids are appended again, each at the slot of another
    position. https://github.com/LMCache/LMCache/pull/2929. LMCache 0.5.6 clamps, and also rebuilds
    or cuts the list.
    """

    ids: list[int] = field(default_factory=list)
    clamped: bool = False

    def update(self, num_computed: int, num_scheduled: int, engine_ids: Sequence[int]) -> int:
        base = min(num_computed, len(self.ids)) if self.clamped else num_computed
        new = engine_ids[base : base + num_scheduled]
        self.ids.extend(new)
        return len(new)

    def wrong(self, computed: Computed) -> int:
        pool = computed.engine.pool
        slots = pool.slots(computed.blocks)
        return sum(
            index >= len(slots) or pool.token[slots[index]] != token
            for index, token in enumerate(self.ids)
        )


def check_resumed(num_computed: int, num_stored: int, num_cached: int) -> None:
    """Compare a resumed request's lengths of three owners, as the adapter did.

    On a full hit the scheduler leaves the last token to compute, so its counter is one below
    what is stored, and the comparison fails. https://github.com/LMCache/LMCache/pull/2929
    """
    expected = max(num_stored, num_cached)
    if num_computed != expected:
        message = f"AssertionError: num_computed_tokens is {num_computed}, expected {expected}"
        raise PeerError(message)


@dataclass(frozen=True)
class CountedHit:
    """A receiver that uses the length of the prompt as the length of the hit.

    The scheduler's count and the worker's differ by the last token: 894 and 895. If the sender had
    computed only the smaller number, the last slot is read although it was never written.
    https://github.com/vllm-project/vllm/issues/52617
    """

    lengths: list[tuple[int, int]] = field(default_factory=list)

    def __call__(self, offer: Computed, want: Want, /) -> Answer:
        end = len(want.ids)
        self.lengths.append((end - 1, end))
        slots = offer.engine.pool.slots(offer.blocks)
        targets = want.engine.pool.slots(want.blocks)
        pieces = [
            Piece(slots[position], targets[position], position, 1)
            for position in range(want.cached, end)
        ]
        return Answer(pieces, [(want.cached, end)])
