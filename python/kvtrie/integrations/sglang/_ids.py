"""Token ids of SGLang for an index whose tokens have 32 bits.

SGLang writes pad values in the place of an image's or a sound's tokens: numbers of up to 63 bits
that are made of a digest of its content, four of them in turn. Two prompts with the same ids have
the same KV, and SGLang's own cache compares nothing else. Here the low half of such an id is the
token, and an `Item` has the rest, so that two tokens are equal only if all 64 bits are.

A prompt that is cut anywhere has the items of the whole one up to there, also within an image: the
first four ids of a pattern are items of one token each, and one item has all that repeat them. So
an image takes five items; ids without a pattern one each at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from kvtrie._core import Item, TokenSequence

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kvtrie._core import Namespace

_PERIOD: Final = 4
_BEYOND: Final = 1 << 32


def sequence_of(token_ids: Sequence[int], space: Namespace, *, limit: int) -> TokenSequence:
    """The first ids of a prompt, to look up.

    Args:
        token_ids: Ids of SGLang, pad values included; an ``array('q')`` is not copied.
        space: What separates the prompt from others.
        limit: How many of them.

    Raises:
        ValueError: An id is negative.
    """
    try:
        return TokenSequence(token_ids, space, limit=limit)
    except ValueError:
        ids = np.asarray(token_ids[:limit], np.int64)
        if int(ids.min()) < 0:
            raise
        return TokenSequence(ids.astype(np.uint32), space, items=list(_items(ids)))


def only_text(token_ids: Sequence[int]) -> NDArray[np.uint32] | None:
    """Ids as a store or a log keeps them; None if one is no text's, or there are none."""
    ids = np.array(token_ids, np.int64)
    if not len(ids) or ids.min() < 0 or ids.max() >= _BEYOND:
        return None
    return ids.astype(np.uint32)


def text_of(token_ids: Sequence[int]) -> NDArray[np.int64]:
    """Ids of a prompt, to read its sections: those of no text are the last of 32 bits."""
    return np.minimum(np.asarray(token_ids, np.int64), _BEYOND - 1)


def _items(ids: NDArray[np.int64]) -> Iterator[Item]:
    """The items of ids beyond 32 bits, in order."""
    is_wide = ids >= _BEYOND
    edges = np.flatnonzero(np.diff(is_wide, prepend=False, append=False))
    # Where an id is not the one four before it, a pattern that goes on so far ends.
    breaks = np.flatnonzero(ids[_PERIOD:] != ids[:-_PERIOD]) + _PERIOD
    for start, end in edges.reshape(-1, 2).tolist():
        at = start
        while at < end:
            first = int(np.searchsorted(breaks, at + _PERIOD))
            stop = min(end, int(breaks[first]) if first < len(breaks) else end)
            repeats = min(at + _PERIOD, stop)
            for one in range(at, repeats):
                yield Item(one, one + 1, ids[one].tobytes())
            if repeats < stop:
                yield Item(repeats, stop, ids[at:repeats].tobytes())
            at = stop
