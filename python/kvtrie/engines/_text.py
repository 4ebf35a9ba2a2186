"""Converts a stream of token ids to pieces of text that never split a character."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextStream:
    """Text of ids that arrive one by one. The pieces joined are the text of all ids.

    Without a tokenizer every piece is empty. One that is not of the library `tokenizers` decodes
    all ids at the end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._num_shown = 0

    def push(self, token: int) -> str:
        """Add one id; returns the text that is now final, possibly empty."""
        self._ids.append(token)
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            return ""
        backend = self._tokenizer.backend_tokenizer
        try:
            piece = self._stream.step(backend, token)
        except Exception:  # noqa: BLE001 - the library raises no class of its own
            # Bytes before this token are no text, and their replacement characters changed.
            self._stream = DecodeStream(skip_special_tokens=True)
            piece = self._stream.step(backend, token)
        self._num_shown += len(piece or "")
        return piece or ""

    def flush(self) -> str:
        """The rest, with incomplete characters."""
        if self._tokenizer is None:
            return ""
        text = self._tokenizer.decode(
            self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        piece = str(text)[self._num_shown :]
        self._num_shown += len(piece)
        return piece
