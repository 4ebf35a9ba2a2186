"""The contexts of moved runs: how much of what a run was computed after comes before it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvtrie import ReusePolicy
    from kvtrie.testing.model._draft import Draft
    from kvtrie.testing.model._sequences import Tokens
    from kvtrie.testing.model._store import Entry

MAX_CUTS = 65535
MOST_SEGMENTS = 512
"""The most copied segments before a moved run whose context is worked out."""


class ModelMovedRun(NamedTuple):
    """`kvtrie.MovedRun`, with the same fields."""

    start: int
    end: int
    old_start: int
    cuts: int = MAX_CUTS
    lost_context: float = 1.0
    new_context: float = 1.0
    same_conversation: bool = False

    @property
    def delta(self) -> int:
        return self.start - self.old_start

    @property
    def distance(self) -> int:
        return abs(self.delta)

    def is_within(self, policy: ReusePolicy) -> bool:
        return (
            (policy.max_cuts is None or self.cuts <= policy.max_cuts)
            and self.lost_context <= policy.max_lost_context
            and self.new_context <= policy.max_new_context
        )


def context(
    before: Draft, start: int, piece: Draft, path: Tokens, paths: dict[int, Tokens]
) -> ModelMovedRun | None:
    """The run that a moved piece at `start` is, after the tokens `before` it.

    None if all of its tokens are computed. `path` is that of the piece's last entry; `paths` has
    the path of each entry by its `id`.
    """
    left = [at for at, origin in enumerate(piece) if origin is not None]
    first = piece[left[0]] if left else None
    if first is None:
        return None
    start, end = start + left[0], start + left[-1] + 1
    old_start = first.source.position
    likes = itertools.groupby(before, lambda origin: origin and (origin.piece, *origin[2:]))
    if sum(like is not None and like[0] > 0 for like, _ in likes) > MOST_SEGMENTS:
        return ModelMovedRun(start, end, old_start)

    def is_before(entry: Entry) -> bool:
        known = paths[id(entry)]
        return path[: len(known)] == known

    kept = [
        (at, origin.source.position)
        for at, origin in enumerate(before)
        if origin is not None
        and origin.source.position < old_start
        and is_before(origin.source.entry)
    ]
    steps = itertools.pairwise([*kept, (start, old_start)])
    cuts = sum(after != (at + 1, old + 1) for (at, old), after in steps)
    lost = max(0.0, 1.0 - len(kept) / old_start) if old_start else 0.0
    new = max(0.0, 1.0 - len(kept) / start) if start else 0.0
    return ModelMovedRun(start, end, old_start, cuts, lost, new)
