"""How much of a prompt could be reused at most, computed without the index.

A plan copies disjoint pieces of a prompt: each is cached somewhere in one piece, and has at least
`min_run` tokens unless it is of the prompt's own prefix (rule P5). `Ceiling` finds the most tokens
that any choice of such pieces covers. After the longest cached prefix, which is always used, it is
a dynamic programme over positions: the most up to a token is that up to the token before, or that
up to the start of a piece which ends here, and its length. A piece of `2 * min_run` tokens or more
is several, so each token has at most `min_run` pieces.

All cached windows of `2 * min_run - 1` tokens are sorted, so those that begin alike are neighbours.
Windows of `min_run` are named first: those of two tokens are pairs of tokens, those of four are
pairs of these, and so on. Nothing is hashed, so nothing can collide. With runs of 16, a million
cached tokens take about two seconds of processor time, and a prompt of 20,000 a tenth of a second.

`matched` is larger: the tokens in any cached window of `min_run` tokens, with any overlap. Where
the ends of runs repeat, no choice of pieces covers all of them.

`scope` of a policy is the caller's: what moved runs may not come from belongs in `out_of_scope`.

Example:
    96 of 100 tokens are in whole blocks, so the last four are not cached.

    >>> import numpy as np
    >>> from workloads.ceiling import Ceiling
    >>> cached = np.arange(100, dtype=np.uint32)
    >>> ceiling = Ceiling([cached], block_size=16, min_run=16)
    >>> reach = ceiling.of(np.concatenate([cached[:40], cached[60:]]))
    >>> reach.prefix, reach.most
    (40, 76)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import ArrayLike

Mask = npt.NDArray[np.bool_]
_Names = npt.NDArray[np.int64]

# No window of these tokens is cached.
_UNKNOWN = -1
# The class of a segment that must be computed.
_COMPUTE = 2


@dataclass(frozen=True)
class Reach:
    """The tokens of one prompt that could be reused.

    `prefix` tokens from the front are cached under the same whole prefix; `matched` has one bool
    per token: whether it is in a run of at least `min_run` tokens that is cached anywhere. `most`
    is the number of tokens that one plan could reuse.
    """

    prefix: int
    matched: Mask
    most: int

    @property
    def mask(self) -> Mask:
        """The tokens that some plan could reuse, not all by the same."""
        mask = self.matched.copy()
        mask[: self.prefix] = True
        return mask

    @property
    def share(self) -> float:
        return self.most / max(1, len(self.matched))


class Ceiling:
    """All cached sequences, to compare prompts with; each namespace needs its own.

    Only whole blocks of the tokens that have KV (`num_computed`, by sequence) are cached. Of the
    sequences `out_of_scope`, all of whose tokens have KV, only the prompt's own prefix is reused.
    """

    def __init__(
        self,
        cached: Iterable[ArrayLike],
        *,
        block_size: int = 16,
        min_run: int = 16,
        num_computed: Sequence[int] | None = None,
        out_of_scope: Iterable[ArrayLike] = (),
    ) -> None:
        if block_size < 1:
            message = f"Ceiling: block_size is {block_size}, at least 1 is needed"
            raise ValueError(message)
        if min_run < 1:
            message = f"Ceiling: min_run is {min_run}, at least 1 is needed"
            raise ValueError(message)
        sequences = [_ids(ids, "Ceiling: a cached sequence") for ids in cached]
        lengths = [len(ids) for ids in sequences]
        if num_computed is not None:
            if len(num_computed) != len(sequences):
                message = (
                    f"Ceiling: num_computed has {len(num_computed)} lengths "
                    f"for {len(sequences)} sequences"
                )
                raise ValueError(message)
            if any(count < 0 for count in num_computed):
                message = f"Ceiling: num_computed has {min(num_computed)}, at least 0 is needed"
                raise ValueError(message)
            lengths = list(map(min, lengths, num_computed))
        self.min_run = min_run
        self.block_size = block_size
        self._sequences = [
            ids[: length - length % block_size]
            for ids, length in zip(sequences, lengths, strict=True)
        ]
        others = [_ids(ids, "Ceiling: a sequence out of scope") for ids in out_of_scope]
        self._others = [ids[: len(ids) - len(ids) % block_size] for ids in others]
        # Zeros end each sequence and the text: no window of a prompt contains one.
        parts = [part for ids in self._sequences for part in (ids + 1, [0])]
        self._text = np.concatenate([*parts, np.zeros(2 * min_run, dtype=np.int64)])
        self._levels, names = _levels(self._text, min_run)
        first = names[: len(self._text) - 2 * min_run + 1]
        second = names[min_run - 1 : min_run - 1 + len(first)]
        self._places = np.argsort(first << 32 | second)
        # The places of a window of `min_run` tokens, by its name.
        counts = np.bincount(first, minlength=len(self._levels[-1][1]))
        self._edges = np.concatenate([[0], np.cumsum(counts)])

    @property
    def num_tokens(self) -> int:
        """Tokens in whole blocks; shared tokens count once per sequence."""
        return sum(map(len, self._sequences))

    def of(self, prompt: ArrayLike, *, keep_last: int = 0, moved_end: int | None = None) -> Reach:
        """The tokens of a prompt that could be reused, moved ones only before `moved_end`."""
        if keep_last < 0:
            message = f"Ceiling.of: keep_last is {keep_last}, at least 0 is needed"
            raise ValueError(message)
        ids = _ids(prompt, "Ceiling.of: the prompt")
        sought = ids[: max(0, len(ids) - keep_last)]
        if moved_end is not None and not 0 <= moved_end <= len(ids):
            message = f"Ceiling.of: moved_end is {moved_end}, it must be in [0, {len(ids)}]"
            raise ValueError(message)
        lengths = self._lengths(sought[:moved_end])
        starts = np.flatnonzero(lengths)
        # Each window raises the depth where it starts and lowers it where it ends.
        depth = np.zeros(len(ids) + 1, dtype=np.int64)
        depth[starts] += 1
        depth[starts + self.min_run] -= 1
        matched = np.cumsum(depth[:-1]) > 0
        every = [*self._sequences, *self._others]
        prefix = max((_shared(ids, sought) for ids in every), default=0)
        return Reach(prefix, matched, self._most(prefix, lengths))

    def _lengths(self, ids: _Names) -> _Names:
        """The tokens that are cached in one piece from each token on.

        0 if they are fewer than `min_run`, and never as many as twice that.
        """
        sought = ids + 1
        names = sought
        for step, known in self._levels:
            names = _look_up(known, _paired(names, step))
        lengths = np.zeros(len(ids), dtype=np.int64)
        starts = np.flatnonzero(names != _UNKNOWN)
        first, end = self._edges[names[starts]], self._edges[names[starts] + 1]
        for length in range(self.min_run, 2 * self.min_run):
            lengths[starts] = length
            goes_on = starts + length < len(ids)
            starts, first, end = starts[goes_on], first[goes_on], end[goes_on]
            wanted = sought[starts + length]
            first = self._bisected(first, end, wanted, length)
            end = self._bisected(first, end, wanted + 1, length)
            found = first < end
            starts, first, end = starts[found], first[found], end[found]
        return lengths

    def _bisected(self, first: _Names, end: _Names, wanted: _Names, offset: int) -> _Names:
        """The first place of each range whose token at an offset is not below the wanted one."""
        first, end = first.copy(), end.copy()
        while (is_open := first < end).any():
            middle = np.where(is_open, (first + end) // 2, 0)
            is_below = is_open & (self._text[self._places[middle] + offset] < wanted)
            first = np.where(is_below, middle + 1, first)
            end = np.where(is_open & ~is_below, middle, end)
        return first

    def _most(self, prefix: int, lengths: _Names) -> int:
        least = self.min_run
        best = np.zeros(len(lengths) + 1 - min(prefix, len(lengths)), dtype=np.int64)
        pieces = np.arange(least, 2 * least)
        for at, length in enumerate(lengths[prefix:].tolist()):
            best[at + 1] = max(best[at], best[at + 1])
            if length:
                ends = best[at + least : at + length + 1]
                np.maximum(ends, best[at] + pieces[: len(ends)], out=ends)
        return prefix + int(best[-1])


def coverage(segments: npt.NDArray[np.void], reach: Reach) -> float:
    """What a plan reuses of the most that one could; 1 if that is nothing."""
    planned = reused(segments, len(reach.matched)) & reach.mask
    return int(np.count_nonzero(planned)) / reach.most if reach.most else 1.0


def reused(segments: npt.NDArray[np.void], num_tokens: int) -> Mask:
    """One bool per token of a prompt: whether a plan reuses it, in place or copied."""
    mask = np.zeros(num_tokens, dtype=np.bool_)
    for start, end, label in zip(
        segments["start"].tolist(),
        segments["end"].tolist(),
        segments["class"].tolist(),
        strict=True,
    ):
        mask[start:end] = label != _COMPUTE
    return mask


def _ids(values: ArrayLike, what: str) -> _Names:
    ids = np.asarray(values)
    if ids.ndim != 1:
        message = f"{what} has {ids.ndim} dimensions, 1 is needed"
        raise ValueError(message)
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        message = f"{what} has ids of type {ids.dtype}, integers are needed"
        raise ValueError(message)
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= 1 << 32):
        message = f"{what} has ids from {ids.min()} to {ids.max()}, 0 to 2**32 - 1 are allowed"
        raise ValueError(message)
    return ids.astype(np.int64)


def _levels(text: _Names, min_run: int) -> tuple[list[tuple[int, _Names]], _Names]:
    """Per level of names: the distance of the two windows that it joins, and all known pairs.

    The first level names single tokens. If `min_run` is not a power of two, the last level joins
    two windows that overlap. Also the names of the text's windows of `min_run` tokens, which are
    in the order of their tokens.
    """
    names = text
    levels: list[tuple[int, _Names]] = []
    step, length = 0, 1
    while True:
        known, names = np.unique(_paired(names, step), return_inverse=True)
        levels.append((step, known))
        if length == min_run:
            return levels, names
        step = min(length, min_run - length)
        length += step


def _paired(names: _Names, step: int) -> _Names:
    """One number for the two names that start at each position and `step` after it."""
    if step == 0:
        return names
    first, second = names[: max(0, len(names) - step)], names[step:]
    pairs = (first << 32) | second
    pairs[(first == _UNKNOWN) | (second == _UNKNOWN)] = _UNKNOWN
    return pairs


def _look_up(known: _Names, pairs: _Names) -> _Names:
    if not len(known):
        return np.full(len(pairs), _UNKNOWN, dtype=np.int64)
    places = np.minimum(np.searchsorted(known, pairs), len(known) - 1)
    return np.where(known[places] == pairs, places, _UNKNOWN)


def _shared(cached: _Names, prompt: _Names) -> int:
    length = min(len(cached), len(prompt))
    differ = np.flatnonzero(cached[:length] != prompt[:length])
    return int(differ[0]) if differ.size else length
