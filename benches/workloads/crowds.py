"""Crowds: documents that fill a cache of a given size."""

from collections.abc import Iterator

from workloads.documents import Tokens, document

# Far above the seeds of single documents.
_CROWD_SEEDS = 1 << 32


class Crowd:
    """Documents of one length, together of about `cached_tokens` tokens.

    They are made when asked for: ten million tokens need no second copy next to the index.

    Example:
        >>> crowd = Crowd(10_000, 512)
        >>> len(crowd), len(crowd[0])
        (19, 512)
    """

    def __init__(self, cached_tokens: int, length: int, seed: int = 0) -> None:
        self.length = length
        self._count = max(1, cached_tokens // length)
        self._base = _CROWD_SEEDS * (1 + seed)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Tokens:
        if not 0 <= number < self._count:
            raise IndexError(number)
        return document(self._base + number, self.length)

    def __iter__(self) -> Iterator[Tokens]:
        return map(self.__getitem__, range(self._count))

    def stranger(self, number: int) -> Tokens:
        """A document of the same length that is not in the crowd."""
        return document(self._base + self._count + number, self.length)

    @property
    def num_tokens(self) -> int:
        return self._count * self.length
