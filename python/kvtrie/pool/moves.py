"""Checks copy lists against a pool, and lists their tokens. Needs numpy alone.

All checks are on pieces: sorting a few thousand costs less than listing their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOVE_FIELDS: Final = ("source_slot", "dest_slot", "num_tokens", "delta")
DELTA_LIMIT: Final = 2**31

_CALL: Final = "KVPool.apply"


@dataclass(frozen=True, slots=True)
class Pieces:
    """The columns of a checked copy list, int64."""

    source: NDArray[np.int64]
    dest: NDArray[np.int64]
    count: NDArray[np.int64]
    delta: NDArray[np.int64]

    def expand(self, num_slots: int) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        """List every token.

        Returns:
            ``[3, tokens]``, int32 for up to 2**31 slots, else int64: source slot, destination slot,
            and the token's row in the second array (-1: not rotated); and the distinct deltas,
            without 0.
        """
        deltas, row = np.unique(self.delta, return_inverse=True)
        zero = int(np.searchsorted(deltas, 0))
        if zero < len(deltas) and deltas[zero] == 0:
            deltas = np.delete(deltas, zero)
            row = np.where(row == zero, -1, row - (row > zero))
        kind: type[np.integer[Any]] = np.int32 if num_slots < 2**31 else np.int64
        firsts = np.cumsum(self.count) - self.count
        columns = np.stack([self.source - firsts, self.dest - firsts, row]).astype(kind)
        tokens = np.repeat(columns, self.count, axis=1)
        tokens[:2] += np.arange(tokens.shape[1], dtype=kind)
        return tokens, deltas


def check_moves(moves: object, num_slots: int) -> Pieces:
    """Check a copy list against a pool; raises what ``KVPool.apply`` raises."""
    pieces = Pieces(*_columns(moves))
    source, dest, count, delta = pieces.source, pieces.dest, pieces.count, pieces.delta
    if len(count) == 0:
        return pieces
    if int(count.min()) < 1:
        msg = f"{_CALL}: a move has num_tokens {count[count < 1][0]}, not at least 1"
        raise ValueError(msg)
    if int(delta.min()) <= -DELTA_LIMIT or int(delta.max()) >= DELTA_LIMIT:
        far = delta[(delta <= -DELTA_LIMIT) | (delta >= DELTA_LIMIT)][0]
        msg = f"{_CALL}: a move has delta {far}, not between -{DELTA_LIMIT} and {DELTA_LIMIT}"
        raise ValueError(msg)
    for name, first in (("source_slot", source), ("dest_slot", dest)):
        # The count comes first: a sum could pass 2**63.
        if int(first.min()) < 0 or bool((count > num_slots - first).any()):
            bad = np.flatnonzero((first < 0) | (count > num_slots - first))[0]
            start, end = int(first[bad]), int(first[bad]) + int(count[bad])
            msg = f"{_CALL}: {name} [{start}, {end}) is outside the pool of {num_slots} slots"
            raise ValueError(msg)
    _check_disjoint(source, dest, count)
    return pieces


def _columns(moves: object) -> tuple[NDArray[np.int64], ...]:
    names = getattr(getattr(moves, "dtype", None), "names", None)
    if (
        not isinstance(moves, np.ndarray)
        or names is None
        or any(name not in names for name in MOVE_FIELDS)
    ):
        msg = f"{_CALL}: moves must be a structured array with {', '.join(MOVE_FIELDS)}"
        raise TypeError(msg)
    if moves.ndim != 1:
        msg = f"{_CALL}: moves must have one dimension, not shape {moves.shape}"
        raise TypeError(msg)
    for name in MOVE_FIELDS:
        kind = moves.dtype[name]
        if kind.kind not in "iu":
            msg = f"{_CALL}: {name} of moves must be an integer, not {kind}"
            raise TypeError(msg)
        # From 2**63 on, values would become negative: such slots are refused later, deltas here.
        if kind.kind == "u" and bool((moves[name] > np.iinfo(np.int64).max).any()):
            msg = f"{_CALL}: {name} {moves[name].max()} of a move is out of range"
            raise ValueError(msg)
    return tuple(np.ascontiguousarray(moves[name], dtype=np.int64) for name in MOVE_FIELDS)


def _check_disjoint(
    source: NDArray[np.int64], dest: NDArray[np.int64], count: NDArray[np.int64]
) -> None:
    order = np.argsort(dest, kind="stable")
    starts = dest[order]
    ends = starts + count[order]
    again = starts[1:] < ends[:-1]
    if bool(again.any()):
        slot = int(starts[1:][again][0])
        msg = f"{_CALL}: dest_slot {slot} is written twice"
        raise ValueError(msg)
    # Destinations are disjoint by now.
    nearest = np.minimum(np.searchsorted(ends, source, side="right"), len(ends) - 1)
    first_shared = np.maximum(starts[nearest], source)
    shared = first_shared < np.minimum(ends[nearest], source + count)
    if bool(shared.any()):
        slot = int(first_shared[shared].min())
        msg = (
            f"{_CALL}: slot {slot} is both source and destination; the order of copies is undefined"
        )
        raise ValueError(msg)
