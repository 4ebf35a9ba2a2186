"""Writes the pieces of one conversation from a seed."""

from collections.abc import Sequence

import numpy as np

from workloads.documents import VOCABULARY, Tokens, document
from workloads.history import Piece
from workloads.texts import TEXTS

# Apart from the seeds of documents, crowds, trees, chats and requests.
_WRITER_SEEDS = 1 << 56
_SHARED = 0x5EED
# Number of texts in the shared corpus; every conversation uses some.
_CORPUS = 40
# A shared beginning of tool results, as headers of commands are.
_HEADER = 24

_MARKERS = (
    "bos user assistant eos think end_think newline blank call end_call result end_result start "
    "channel analysis final message return end placeholder"
).split()
MARKERS = {name: VOCABULARY + number for number, name in enumerate(_MARKERS)}
"""Ids of the single tokens that templates put between texts; texts never contain them."""


class Writer:
    """Makes texts and markers; the same calls in the same order return the same ones.

    Args:
        seed: Names the workload's texts.
        number: Which conversation; no two have a text in common unless `shared`.
        text: How texts are drawn, a name in `workloads.texts.TEXTS`.
        shared: Whether conversations share the boilerplate that they share in practice: the first
            half of the system prompt, its second half after a line of the conversation's own, the
            beginning of each tool result, and the documents.

    Raises:
        ValueError: `text` is not a name in `TEXTS`.

    Example:
        >>> writer = Writer(seed=0, number=0)
        >>> [len(piece.tokens) for piece in writer.system(100)], len(writer.text(20, "user").tokens)
        ([100], 20)
    """

    def __init__(
        self, seed: int, number: int, *, text: str = "uniform", shared: bool = False
    ) -> None:
        if text not in TEXTS:
            message = f"Writer: text is {text!r}, not one of {', '.join(TEXTS)}"
            raise ValueError(message)
        self.number = number
        self._draw = TEXTS[text]
        self._shared = shared
        self._seed = seed
        self._written = 0

    def text(self, length: int, kind: str) -> Piece:
        return Piece(self._draw(self._next_seed(), length), kind)

    def mark(self, *names: str, kind: str = "") -> list[Piece]:
        """Markers of a template, each a piece of one token."""
        return [Piece(np.array([MARKERS[name]], dtype=np.uint32), kind) for name in names]

    def system(self, length: int) -> list[Piece]:
        own = min(20 + self.number % 23, length)
        if not self._shared or length < 2 * own:
            return [self.text(length, "system")]
        half = (length - own) // 2
        return [
            self._shared_text(0, half, "system"),
            self.text(own, "system"),
            self._shared_text(1, length - own - half, "system"),
        ]

    def result(self, length: int) -> list[Piece]:
        """A tool result."""
        if not self._shared or length < 2 * _HEADER:
            return [self.text(length, "tool_result")]
        return [
            self._shared_text(2, _HEADER, "tool_result"),
            self.text(length - _HEADER, "tool_result"),
        ]

    def documents(self, count: int, length: int) -> list[Piece]:
        """Documents; where conversations share, of a corpus of 40."""
        if not self._shared:
            return [self.text(length, "user") for _ in range(count)]
        order = np.argsort(document(self._next_seed(), max(_CORPUS, count)), kind="stable")
        return [self._shared_text(10 + int(which), length, "user") for which in order[:count]]

    def _shared_text(self, which: int, length: int, kind: str) -> Piece:
        return Piece(self._draw(_mixed(self._seed, _SHARED, which), length), kind)

    def _next_seed(self) -> int:
        self._written += 1
        return _mixed(self._seed, self.number + 1 + _SHARED, self._written)


def _mixed(*parts: int) -> int:
    seed = _WRITER_SEEDS
    for part in parts:
        # Two of the generator's outputs of 17 bits each, and the part itself, spread over 64 bits.
        low, high = (int(token) for token in document(seed + part, 2))
        seed = (seed * 0x2545_F491_4F6C_DD1D + (high << 40) + (low << 20) + part) % (1 << 64)
    return seed


def flat(*groups: Piece | Sequence[Piece]) -> list[Piece]:
    pieces: list[Piece] = []
    for group in groups:
        pieces.extend([group] if isinstance(group, Piece) else group)
    return pieces


def one_token(value: int) -> Tokens:
    return np.array([value], dtype=np.uint32)
