"""TextStream: pieces never split a character, and joined they are the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtrie.engines._text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain words, and  two spaces \n\n lines",
        "naïve café, «quotes» and ½",
        "日本語のテキスト",
        "👩‍👩‍👧 and 🏳️‍🌈 in one line",
        "\N{REPLACEMENT CHARACTER} stands in the text",
        " leading and trailing ",
    ],
)
def test_pieces_joined_are_the_text(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokenizer(text)["input_ids"]]
    assert "".join(pieces) + stream.flush() == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_piece_waits_for_the_last_byte(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("a€b")["input_ids"]
    assert len(ids) == 5
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in ids] == ["a", "", "", "€", "b"]


def test_flush_shows_what_stays_incomplete(tokenizer: PreTrainedTokenizerBase) -> None:
    stream = TextStream(tokenizer)
    for token in tokenizer("a€")["input_ids"][:-1]:
        stream.push(token)
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"
    assert stream.flush() == ""


def test_special_tokens_have_no_text(tokenizer: PreTrainedTokenizerBase) -> None:
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in (2, *tokenizer("x")["input_ids"], 2)] == ["", "x", ""]


def test_without_tokenizer_every_piece_is_empty() -> None:
    stream = TextStream(None)
    assert stream.push(5) == ""
    assert stream.flush() == ""
