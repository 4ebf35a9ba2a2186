"""Checks of token ids and positions that callers give."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

MAX_TOKEN: Final = 2**32 - 1

# Up to this many tokens a loop is cheaper than an array.
_FEW: Final = 16


def as_tokens(
    ids: Sequence[int] | npt.NDArray[np.integer], call: str
) -> list[int] | npt.NDArray[np.int64]:
    """Checked token ids: a list if there are few, else an array."""
    if isinstance(ids, (list, tuple)):
        for token in ids:
            if isinstance(token, (bool, np.bool_)) or not isinstance(token, (int, np.integer)):
                msg = f"{call}: a token id is {token!r}, not an integer"
                raise TypeError(msg)
            if not 0 <= token <= MAX_TOKEN:
                msg = f"{call}: token id {token} is not in [0, {MAX_TOKEN}]"
                raise ValueError(msg)
        if len(ids) <= _FEW:
            return [int(token) for token in ids]
    array = np.asarray(ids)
    if array.ndim != 1:
        msg = f"{call}: ids have {array.ndim} dimensions, not 1"
        raise ValueError(msg)
    if array.size == 0:
        return []
    if array.dtype.kind not in "iu":
        msg = f"{call}: ids are {array.dtype}, not integers"
        raise TypeError(msg)
    # Ids of a `TokenSequence` need no check.
    for bound in () if array.dtype == np.uint32 else (array.min(), array.max()):
        if not 0 <= int(bound) <= MAX_TOKEN:
            msg = f"{call}: token id {bound} is not in [0, {MAX_TOKEN}]"
            raise ValueError(msg)
    if array.size <= _FEW:
        few: list[int] = array.tolist()
        return few
    return array.astype(np.int64)


def as_position(value: object, what: str) -> int:
    """A checked position."""
    if not isinstance(value, (bool, np.bool_)):
        try:
            return operator.index(value)  # type: ignore[arg-type] # raises TypeError itself
        except TypeError:
            pass
    msg = f"{what} is {value!r}, not an int"
    raise TypeError(msg)
