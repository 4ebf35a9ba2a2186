"""Converts a stream of token ids to pieces of text that never split a character."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Text of ids that arrive one by one. The pieces joined are the text of all ids.

    Only the ids since the last finished piece, and those of that piece as context, are decoded
    again: the cost per token does not grow with the answer.

    Args:
        tokenizer: Decodes; if None, every piece is empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0
        self._shown = 0

    def push(self, token: int) -> str:
        """Add one id; returns the text that is now final, possibly empty."""
        self._ids.append(token)
        piece = self._pending()
        if piece.endswith(_INCOMPLETE):
            return ""
        self._advance()
        return piece

    def flush(self) -> str:
        """The rest, with incomplete characters."""
        piece = self._pending()
        self._advance()
        return piece

    def _pending(self) -> str:
        known = self._decode(self._ids[self._context : self._shown])
        return self._decode(self._ids[self._context :])[len(known) :]

    def _advance(self) -> None:
        self._context = self._shown
        self._shown = len(self._ids)

    def _decode(self, ids: list[int]) -> str:
        if self._tokenizer is None or not ids:
            return ""
        text = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text if isinstance(text, str) else "".join(text)
