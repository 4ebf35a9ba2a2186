"""How much of a prompt could be reused at most, computed without the index.

`Ceiling` names every cached window of `min_run` tokens, and returns which tokens of a prompt are in
one of them. A run of at least `min_run` tokens is a union of such windows, so these tokens are the
union of all matches, at any position and with any overlap. Names are given by sorting: windows of
two tokens are pairs of tokens, windows of four are pairs of those, and so on. Nothing is hashed, so
nothing can collide. Naming a million cached tokens takes about a second, a prompt takes
milliseconds.

No plan reuses more. One may reuse less where matches of several sources overlap: what is left of
one after another is computed if it is shorter than `min_run`.

Example:
    96 of 100 tokens are in whole blocks, so the last four are not cached.

    >>> import numpy as np
    >>> from workloads.ceiling import Ceiling
    >>> cached = np.arange(100, dtype=np.uint32)
    >>> ceiling = Ceiling([cached], block_size=16, min_run=16)
    >>> reach = ceiling.of(np.concatenate([cached[:40], cached[60:]]))
    >>> reach.prefix, reach.total
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
    per token: whether it is in a run of at least `min_run` tokens that is cached anywhere.
    """

    prefix: int
    matched: Mask

    @property
    def mask(self) -> Mask:
        mask = self.matched.copy()
        mask[: self.prefix] = True
        return mask

    @property
    def total(self) -> int:
        return int(np.count_nonzero(self.mask))

    @property
    def share(self) -> float:
        return self.total / max(1, len(self.matched))


class Ceiling:
    """All cached sequences, to compare prompts with; each namespace needs its own.

    Only whole blocks of the tokens that have KV (`num_computed`, by sequence) are cached.
    """

    def __init__(
        self,
        cached: Iterable[ArrayLike],
        *,
        block_size: int = 16,
        min_run: int = 16,
        num_computed: Sequence[int] | None = None,
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
        self._levels = _levels(self._sequences, min_run)

    @property
    def num_tokens(self) -> int:
        """Tokens in whole blocks; shared tokens count once per sequence."""
        return sum(map(len, self._sequences))

    def of(self, prompt: ArrayLike, *, keep_last: int = 0) -> Reach:
        """The tokens of a prompt that could be reused."""
        if keep_last < 0:
            message = f"Ceiling.of: keep_last is {keep_last}, at least 0 is needed"
            raise ValueError(message)
        ids = _ids(prompt, "Ceiling.of: the prompt")
        sought = ids[: max(0, len(ids) - keep_last)]
        starts = np.flatnonzero(self._find(sought) != _UNKNOWN)
        # Each window raises the depth where it starts and lowers it where it ends.
        depth = np.zeros(len(ids) + 1, dtype=np.int64)
        depth[starts] += 1
        depth[starts + self.min_run] -= 1
        matched = np.cumsum(depth[:-1]) > 0
        prefix = max((_shared(ids, sought) for ids in self._sequences), default=0)
        return Reach(prefix, matched)

    def _find(self, ids: _Names) -> _Names:
        """The name of the window that starts at each token that has one."""
        names = ids
        for step, known in self._levels:
            names = _look_up(known, _paired(names, step))
        return names


def coverage(segments: npt.NDArray[np.void], reach: Reach) -> float:
    planned = reused(segments, len(reach.matched))
    possible = reach.mask
    count = int(np.count_nonzero(possible))
    return int(np.count_nonzero(planned & possible)) / count if count else 1.0


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


def _levels(sequences: list[_Names], min_run: int) -> list[tuple[int, _Names]]:
    """Per level of names: the distance of the two windows that it joins, and all known pairs.

    The first level names single tokens. If `min_run` is not a power of two, the last level joins
    two windows that overlap.
    """
    # A separator after each sequence: no searched window contains one.
    text = np.concatenate([part for ids in sequences for part in (ids, [_UNKNOWN])] or [[_UNKNOWN]])
    names: _Names = text.astype(np.int64)
    levels: list[tuple[int, _Names]] = []
    step, length = 0, 1
    while True:
        known, names = np.unique(_paired(names, step), return_inverse=True)
        # Unknown pairs sort first, and stay unknown.
        if len(known) and known[0] == _UNKNOWN:
            known, names = known[1:], names - 1
        levels.append((step, known))
        if length == min_run:
            return levels
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
