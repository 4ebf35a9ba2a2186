"""Puts sampled ids back into a prompt that was rendered and encoded from text.

A chat API gets text. Encoding it again gives other ids than the model sampled wherever the model
did not spell as the encoder does, and the cached prefix ends at the first of them. `PromptSplicer`
cuts text and histories at the tokenizer's special tokens, which no encoding crosses, and takes the
ids of each piece of text from a history that has it. A piece that differs from the history's by one
deletion, as reasoning that the template has dropped, or that goes on after it, is taken in part.

It promises that the ids decode to the same text as the plain prompt's. A piece that no history has
gets the ids that it has in the plain prompt; what goes on after a history's piece is encoded alone.
Without special tokens in the text all is one piece.

It costs a decoding of each history and of the result, and an encoding of what is new. Pieces that
are taken in part cost at most `_MOST_DECODED` decodings of their history besides, however text and
history are made. Where a tokenizer encodes pieces otherwise than the text (some of SentencePiece),
the whole text is encoded.
"""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

SpliceOutcome = Literal["spliced", "plain", "refused", "expired", "unknown"]

OUTCOMES: Final[tuple[SpliceOutcome, ...]] = get_args(SpliceOutcome)

# Places where one deletion may be cut: the text around it often allows several.
_MOST_CUTS: Final = 16
# Tokens that looking for the place of a cut may decode, for each token of the history.
_MOST_DECODED: Final = 64
# A tokenizer may have thousands of special tokens; so many of them are probed.
_MOST_PROBED: Final = 64
_PROBES: Final = ("a b", " a", "\na", "a ", "é\n\n", "1")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplicedPrompt:
    """A prompt's ids, with those of histories where the text is the same.

    Attributes:
        ids: The prompt (uint32).
        outcome: `"spliced"`: some are of a history. Else all are the encoder's: `"plain"`, no
            history has any of the text; `"refused"`, the spliced ids would have decoded to another
            text, or the tokenizer finds other special tokens in it; `"expired"` or `"unknown"`, the
            conversation was not there.
        num_kept: How many ids are of a history.
        num_encoded: The rest.
    """

    ids: npt.NDArray[np.uint32]
    outcome: SpliceOutcome
    num_kept: int

    @property
    def num_encoded(self) -> int:
        """How many ids are the encoder's."""
        return len(self.ids) - self.num_kept


class PromptSplicer:
    """Splices for one tokenizer. All calls may come from any thread if the tokenizer allows it.

    Args:
        tokenizer: With ``encode``, ``decode`` and ``added_tokens_decoder``, as the transformers
            library has them.

    Raises:
        TypeError: The tokenizer lacks one of these.
    """

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - transformers has no types for them
        for name in ("encode", "decode", "added_tokens_decoder"):
            if not hasattr(tokenizer, name):
                msg = f"PromptSplicer: the tokenizer, a {type(tokenizer).__name__}, has no {name!r}"
                raise TypeError(msg)
        self._tokenizer = tokenizer
        # Tokens that take spaces next to them, or end at words, are no borders.
        self._borders: dict[str, int] = {
            str(token.content): int(one)
            for one, token in tokenizer.added_tokens_decoder.items()
            if token.content
            and not (token.lstrip or token.rstrip or token.single_word)
            and (token.special or not token.normalized)
        }
        self._border_ids = np.array(sorted(self._borders.values()), dtype=np.int64)
        # A pattern of all of them would try thousands at each place.
        first = {border[0] for border in self._borders}
        self._first = re.compile(f"[{re.escape(''.join(sorted(first)))}]" if first else "(?!)")
        self._lengths = sorted({len(border) for border in self._borders}, reverse=True)
        self._is_separable = self._encodes_pieces_alone()

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        """The plain prompt: the ids of a text, without any that the tokenizer adds."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return np.asarray(ids, dtype=np.uint32)

    def splice(self, text: str, histories: Iterable[npt.NDArray[np.uint32]]) -> SplicedPrompt:
        """The ids of a prompt.

        Args:
            text: The rendered prompt.
            histories: Ids of prompts with their answers, as the engine used them. Of several, the
                one that keeps most ids is used, on a tie the first.
        """
        best: tuple[int, list[npt.NDArray[np.uint32]]] | None = None
        pieces = self._split(text)
        encoded = plain = None
        if not self._is_separable:
            encoded = self.encode(text)
            plain = self._split_ids(encoded)
            if len(plain) != len(pieces):
                return SplicedPrompt(ids=encoded, outcome="refused", num_kept=0)
        for history in histories:
            found = self._with(pieces, _Cut(self, self._split_ids(history)), plain)
            if found[0] and (best is None or found[0] > best[0]):
                best = found
        if best is None:
            ids = self.encode(text) if encoded is None else encoded
            return SplicedPrompt(ids=ids, outcome="plain", num_kept=0)
        num_kept, parts = best
        ids = np.concatenate(parts)
        if self.decode(ids) != text:
            encoded = self.encode(text) if encoded is None else encoded
            # Some tokenizers do not decode to the text that they encode.
            if self.decode(ids) != self.decode(encoded):
                return SplicedPrompt(ids=encoded, outcome="refused", num_kept=0)
        return SplicedPrompt(ids=ids, outcome="spliced", num_kept=num_kept)

    def decode(self, ids: npt.NDArray[np.uint32]) -> str:
        """The text of ids, all of it."""
        return str(
            self._tokenizer.decode(
                ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _with(
        self,
        pieces: Sequence[str],
        cut: _Cut,
        plain: Sequence[npt.NDArray[np.uint32]] | None,
    ) -> tuple[int, list[npt.NDArray[np.uint32]]]:
        """How many ids are of a history, and the ids of all pieces."""
        parts: list[npt.NDArray[np.uint32]] = []
        num_kept = 0
        for at, piece in enumerate(pieces):
            if at % 2:
                parts.append(np.array([self._borders[piece]], dtype=np.uint32))
                continue
            if not piece:
                continue
            known = cut.take(piece)
            if known is None:
                parts.append(self.encode(piece) if plain is None else plain[at])
                continue
            ids, rest = known
            num_kept += len(ids)
            parts.append(ids)
            if rest:
                parts.append(self.encode(rest))
        return num_kept, parts

    def _split(self, text: str) -> list[str]:
        """What is between borders, and each border; of several at a place the longest."""
        found: list[str] = []
        start = 0
        for match in self._first.finditer(text):
            at = match.start()
            if at < start:
                continue
            for length in self._lengths:
                border = text[at : at + length]
                if border in self._borders:
                    found += [text[start:at], border]
                    start = at + length
                    break
        return [*found, text[start:]]

    def _split_ids(self, ids: npt.NDArray[np.uint32]) -> list[npt.NDArray[np.uint32]]:
        """As `_split`, of ids."""
        found: list[npt.NDArray[np.uint32]] = []
        start = 0
        for at in np.flatnonzero(np.isin(ids, self._border_ids)).tolist():
            found += [ids[start:at], ids[at : at + 1]]
            start = at + 1
        return [*found, ids[start:]]

    def _encodes_pieces_alone(self) -> bool:
        for border in list(self._borders)[:: -(-len(self._borders) // _MOST_PROBED) or 1]:
            for before, after in zip(_PROBES, reversed(_PROBES), strict=True):
                parts = [self.encode(before), self.encode(border), self.encode(after)]
                if not np.array_equal(self.encode(before + border + after), np.concatenate(parts)):
                    return False
        return True


class _Cut:
    """A history in pieces, of which each is found by its text, in order."""

    def __init__(self, splicer: PromptSplicer, pieces: Sequence[npt.NDArray[np.uint32]]) -> None:
        self._splicer = splicer
        self._pieces = pieces[::2]
        self._texts = [splicer.decode(piece) for piece in self._pieces]
        self._places: dict[str, list[int]] = {}
        for at, text in enumerate(self._texts):
            if text:
                self._places.setdefault(text, []).append(at)
        self._next = 0
        self._left = _MOST_DECODED * sum(map(len, self._pieces))

    def take(self, text: str) -> tuple[npt.NDArray[np.uint32], str] | None:
        """Ids of the history for the beginning of a text, and what is left of it; None if none."""
        places = self._places.get(text, [])
        later = bisect.bisect_left(places, self._next)
        if later < len(places):
            self._next = places[later] + 1
            return self._pieces[places[later]], ""
        while self._next < len(self._texts) and not self._texts[self._next]:
            self._next += 1
        if self._next == len(self._texts):
            return None
        found = self._in_part(self._pieces[self._next], self._texts[self._next], text)
        if found is not None:
            self._next += 1
        return found

    def _in_part(
        self, ids: npt.NDArray[np.uint32], known: str, text: str
    ) -> tuple[npt.NDArray[np.uint32], str] | None:
        """As `take`, of a piece that was shortened by one deletion, or that goes on."""
        if text.startswith(known):
            return ids, text[len(known) :]
        if len(text) > len(known) or self._left < 0:
            return None
        before = _common(known, text)
        after = _common(known[len(known) - len(text) :][::-1], text[::-1])
        if before + after < len(text):
            return None
        first = len(text) - after
        for cut in range(first, min(before + 1, first + _MOST_CUTS)):
            start = self._border(ids, cut, known)
            end = self._border(ids, len(known) - len(text) + cut, known)
            if start is not None and end is not None:
                return np.concatenate([ids[:start], ids[end:]]), ""
        return None

    def _border(self, ids: npt.NDArray[np.uint32], length: int, text: str) -> int | None:
        """The number of ids that decode to so much of their text, or None."""
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            found = self._begin(ids, middle)
            if found is None:
                return None
            if len(found) < length:
                low = middle + 1
            else:
                high = middle
        return low if self._begin(ids, low) == text[:length] else None

    def _begin(self, ids: npt.NDArray[np.uint32], count: int) -> str | None:
        """The text of the first ids; None if looking for cuts has decoded enough."""
        self._left -= count
        return None if self._left < 0 else self._splicer.decode(ids[:count])


def _common(one: str, other: str) -> int:
    """The length of the common beginning."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))
