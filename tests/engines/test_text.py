"""TextStream: pieces never split a character, and joined they are the text."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, cast

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvtrie.calibrate import shipped
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


def test_spaces_after_special_tokens_stay() -> None:
    tokenizer = AutoTokenizer.from_pretrained(shipped.model_path("gqa"))
    rng = Random(0)
    for _ in range(300):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 40))]
        stream = TextStream(tokenizer)
        pieces = [stream.push(token) for token in ids] + [stream.flush()]
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def test_bytes_that_are_no_text_end_nothing() -> None:
    """A decoder that falls back to bytes changes what it returned for invalid bytes."""
    names = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a"]
    model = models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=[])
    plain = Tokenizer(model)
    plain.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>")
    stream, rng = TextStream(tokenizer), Random(0)
    for _ in range(2_000):
        stream.push(rng.randrange(1, len(names)))
    # Valid text follows.
    stream.push(names.index("a"))
    assert stream.push(names.index("a")) == "a"


def test_another_kind_of_tokenizer_shows_all_at_the_end() -> None:
    class Words:
        def decode(self, ids: list[int], **_: object) -> str:
            return " ".join(map(str, ids))

    stream = TextStream(cast("PreTrainedTokenizerBase", Words()))
    assert [stream.push(5), stream.push(6)] == ["", ""]
    assert stream.flush() == "5 6"
    assert stream.flush() == ""


def test_without_tokenizer_every_piece_is_empty() -> None:
    stream = TextStream(None)
    assert stream.push(5) == ""
    assert stream.flush() == ""
