"""Texts of token ids: drawn evenly, or repetitive as written text is."""

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from workloads.documents import VOCABULARY, Tokens, document

Text = Callable[[int, int], Tokens]
_Counts = npt.NDArray[np.int64]

_PHRASES = 4_096
_LONGEST_PHRASE = 24
_PHRASE_SHARE = 0.25
_PHRASE_SEED = 0x7E87_5EED
# Odd, so that it permutes the ids: frequent words have distant ids.
_SCATTER = np.uint64(0x9E37_79B1)


def uniform(seed: int, length: int) -> Tokens:
    """Ids drawn evenly, so that a run of 16 tokens is in one text only."""
    return document(seed, length)


def worded(seed: int, length: int) -> Tokens:
    """Ids with the repetitions of written text.

    Words are drawn by Zipf's law. A quarter of the draws are phrases of 2 to 24 tokens from a book
    that all texts share, drawn by the same law. A shorter text of a seed is the beginning of a
    longer one:

        >>> worded(7, 100).tolist() == worded(7, 200)[:100].tolist()
        True
    """
    if length == 0:
        return np.empty(0, dtype=np.uint32)
    book, starts, lengths = _phrases()
    drawn = document(seed, length) / VOCABULARY
    choice = document(seed ^ _PHRASE_SEED, length) / VOCABULARY
    is_phrase = choice < _PHRASE_SHARE
    phrase = np.minimum(_PHRASES**drawn, _PHRASES).astype(np.int64) - 1
    each = np.where(is_phrase, lengths[phrase], 1)
    # There are enough draws for a text of single words; only those that fill the length are used.
    used = int(np.searchsorted(np.cumsum(each), length)) + 1
    is_phrase, phrase, each, drawn = is_phrase[:used], phrase[:used], each[:used], drawn[:used]
    begins = np.cumsum(each) - each
    within = np.arange(int(each.sum())) - np.repeat(begins, each)
    places = np.repeat(np.where(is_phrase, starts[phrase], 0), each) + within
    words = np.repeat(_words(drawn), each)
    return np.where(np.repeat(is_phrase, each), book[places % len(book)], words)[:length]


def _words(drawn: npt.NDArray[np.float64]) -> Tokens:
    rank = np.minimum(float(VOCABULARY) ** drawn, VOCABULARY).astype(np.uint64) - np.uint64(1)
    return (rank * _SCATTER % np.uint64(VOCABULARY)).astype(np.uint32)


@cache
def _phrases() -> tuple[Tokens, _Counts, _Counts]:
    drawn = document(_PHRASE_SEED + 1, _PHRASES) / VOCABULARY
    # Short ones are frequent: because of the square a third have more than 12 tokens.
    lengths = 2 + (drawn**2 * (_LONGEST_PHRASE - 1)).astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    book = _words(document(_PHRASE_SEED + 2, int(lengths.sum())) / VOCABULARY)
    return book, starts, lengths


TEXTS: dict[str, Text] = {"uniform": uniform, "worded": worded}
