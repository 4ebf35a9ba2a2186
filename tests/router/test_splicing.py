"""Prompts with the ids that a model sampled: same text, longer prefix, nothing else changed."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="texts are encoded by tokenizers of transformers")

from tests.tags.templates import CHATML, tokenizer_of
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import kvtrie
from kvtrie.calibrate import texts
from kvtrie.router import PromptSplicer, SplicedPrompt

if TYPE_CHECKING:
    import numpy.typing as npt

SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
FAMILIES = ("bytes", "pieces", "spaced", "always")


def _sentences() -> list[str]:
    source = random.Random(0)
    return [place.note for place in texts.places(source, 48)] + [texts.musing(source, 9)]


def _backend(family: str) -> Tokenizer:
    """As Gemma's (`pieces`), as Llama 2's (`spaced`), as T5's (`always`)."""
    if family == "pieces":
        backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?<=.)▁"), "merged_with_next")
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        trainer: Any = trainers.BpeTrainer(
            vocab_size=900, special_tokens=["<unk>", *(f"<0x{one:02X}>" for one in range(256))]
        )
    else:
        scheme = "first" if family == "spaced" else "always"
        backend = Tokenizer(models.Unigram())
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
        trainer = trainers.UnigramTrainer(
            vocab_size=700, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        )
    backend.train_from_iterator(_sentences(), trainer)
    # Bytes are ordinary tokens.
    backend = Tokenizer.from_str(json.dumps(json.loads(backend.to_str()) | {"added_tokens": []}))
    backend.add_special_tokens(SPECIAL)
    return backend


@cache
def family(name: str) -> tuple[Any, PromptSplicer]:
    if name == "bytes":
        tokenizer: Any = tokenizer_of("qwen3", CHATML)
    else:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=_backend(name))
    return tokenizer, PromptSplicer(tokenizer)


def respelled(splicer: PromptSplicer, text: str, source: random.Random) -> npt.NDArray[np.uint32]:
    """Ids of a text that an encoder would not choose, where there are some."""
    for _ in range(8):
        cuts = sorted(source.randrange(len(text) + 1) for _ in range(4))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        ids = np.concatenate([splicer.encode(part) for part in parts if part])
        if splicer.decode(ids) == splicer.decode(splicer.encode(text)):
            return ids
    return splicer.encode(text)


def prompt_of(messages: list[tuple[str, str]]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)


def common(one: npt.NDArray[np.uint32], other: npt.NDArray[np.uint32]) -> int:
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size


WORDS = st.text("abcé ▁\n<>1", max_size=12) | st.sampled_from(_sentences())


@given(
    name=st.sampled_from(FAMILIES),
    turns=st.lists(st.tuples(WORDS, WORDS, WORDS), min_size=1, max_size=4),
    drops=st.booleans(),
    edited=st.booleans(),
    seed=st.integers(0, 1 << 32),
)
def test_a_spliced_prompt_has_the_text_of_the_plain_one(
    name: str, turns: list[tuple[str, str, str]], drops: bool, edited: bool, seed: int
) -> None:
    _, splicer = family(name)
    source = random.Random(seed)
    messages: list[tuple[str, str]] = []
    history = np.empty(0, np.uint32)
    for question, musing, answer in turns:
        messages.append(("user", question))
        opened = prompt_of(messages) + "<|im_start|>assistant\n"
        found = splicer.splice(opened, [history])
        plain = splicer.encode(opened)
        assert splicer.decode(found.ids) == splicer.decode(plain)
        assert found.num_kept + found.num_encoded == len(found.ids)
        if found.outcome != "spliced":
            assert np.array_equal(found.ids, plain)
        if not drops and not edited and found.outcome == "spliced":
            assert common(found.ids, history) >= common(plain, history)
        reply = f"<think>{musing}</think>{answer}"
        sampled = respelled(splicer, f"{reply}<|im_end|>", source)
        history = np.concatenate([found.ids, sampled])
        messages.append(("assistant", answer if drops else reply))
        if edited:
            at = source.randrange(len(messages))
            messages[at] = (messages[at][0], messages[at][1][:3])


@pytest.mark.parametrize("name", ["bytes", "pieces"])
def test_the_whole_history_is_kept_though_the_model_spelled_otherwise(name: str) -> None:
    _, splicer = family(name)
    first = prompt_of([("user", "what is it")]) + "<|im_start|>assistant\n"
    letters = [splicer.encode(letter) for letter in "the harbour"]
    history = np.concatenate([splicer.encode(first), *letters, splicer.encode("<|im_end|>")])
    rest = "\n" + prompt_of([("user", "and where")])
    text = f"{first}the harbour<|im_end|>{rest}"
    found = splicer.splice(text, [history])
    assert found.outcome == "spliced"
    assert np.array_equal(found.ids, [*history, *splicer.encode(rest)])
    assert splicer.decode(found.ids) == text
    assert common(splicer.encode(text), history) < len(history)


@pytest.mark.parametrize("name", ["bytes", "pieces"])
def test_what_is_left_of_a_piece_keeps_its_ids(name: str) -> None:
    # This template writes reasoning without marks of its own.
    _, splicer = family(name)
    musing, answer = _sentences()[0], "seven rooms"
    letters = np.concatenate([splicer.encode(letter) for letter in answer])
    first = splicer.encode("<|im_start|>assistant\n")
    history = np.concatenate([first, splicer.encode(f"Because {musing}\n\n"), letters])
    text = f"<|im_start|>assistant\n{answer}<|im_end|>"
    found = splicer.splice(text, [history])
    assert found.outcome == "spliced"
    assert np.array_equal(found.ids, [*first, *letters, *splicer.encode("<|im_end|>")])


def test_a_reply_that_was_cut_off_is_continued() -> None:
    _, splicer = family("bytes")
    letters = [splicer.encode(letter) for letter in "the harb"]
    history = np.concatenate([splicer.encode("<|im_start|>assistant\n"), *letters])
    found = splicer.splice("<|im_start|>assistant\nthe harbour", [history])
    assert np.array_equal(found.ids, [*history, *splicer.encode("our")])


def test_of_several_histories_the_one_that_keeps_most_is_used() -> None:
    _, splicer = family("bytes")
    letters = np.concatenate([splicer.encode(letter) for letter in "the harbour"])
    histories = [splicer.encode("where"), letters, splicer.encode("the harbour")]
    assert np.array_equal(splicer.splice("the harbour", histories).ids, letters)
    assert splicer.splice("where", histories).ids.tolist() == histories[0].tolist()


@pytest.mark.parametrize("pieces", [1, 300])
def test_cuts_cost_no_more_than_so_many_decodings_of_the_history(pieces: int) -> None:
    # Each piece is the beginning and the end of the history's, and ends inside of its tokens.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(
            models.BPE({"a": 0, "aa": 1, "aaaa": 2}, [("a", "a"), ("aa", "aa")])
        )
    )
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    splicer = PromptSplicer(tokenizer)
    before, decoded = splicer.decode, 0

    def counted(ids: npt.NDArray[np.uint32]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return before(ids)

    splicer.decode = counted  # type: ignore[method-assign] # counts
    history = splicer.encode("a" * 4_000)
    text = ("a" * 7 + "<end>") * pieces
    found = splicer.splice(text, [history])
    assert before(found.ids) == text
    # The history itself and the result are decoded as well.
    assert decoded <= (64 + 1) * len(history) + 2 * len(splicer.encode(text))


def test_a_short_prompt_is_spliced_from_the_beginning_of_a_long_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be another client's. One of 180,000 tokens took 5 s for each prompt that began so."""
    _, splicer = family("bytes")
    begin, end = "<|im_start|>user\na<|im_end|><|im_start|>assistant\n", "<|im_end|>"
    tracker = kvtrie.TurnTracker()
    opening, reply = splicer.encode(begin), splicer.encode("well, ")
    long = np.concatenate([opening, np.tile(reply, 100_000 // len(reply)), splicer.encode(end)])
    tracker.keep(kvtrie.TokenSequence(long, SPACE), num_computed=len(long) - 1)
    decoded = [0]
    decode = splicer.decode

    def counts(ids: npt.NDArray[np.uint32]) -> str:
        decoded[0] += len(ids)
        return decode(ids)

    monkeypatch.setattr(splicer, "decode", counts)
    for said in ("well, ", "well, well, ", "no"):
        decoded[0] = 0
        found = tracker.splice(f"{begin}{said}{end}", splicer, SPACE)
        assert found.outcome == "spliced"
        assert decoded[0] < 65 * (16_384 + 4 * len(found.ids)) + 2 * len(found.ids)
        assert found.num_kept < 100
    # That of the prompt's own conversation is kept to its end.
    found = tracker.splice(decode(long), splicer, SPACE)
    assert np.array_equal(found.ids, long)
    assert found.num_kept == len(long) - 4


def test_of_special_tokens_at_one_place_the_longest_is_one() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_backend("pieces"))
    tokenizer.add_tokens(["<|im_start|>user"], special_tokens=True)
    splicer = PromptSplicer(tokenizer)
    letters = np.concatenate([splicer.encode(letter) for letter in "the harbour"])
    text = "<|im_start|>user<|im_start|>the harbour<|im"
    borders = splicer.encode("<|im_start|>user<|im_start|>")
    assert len(borders) == 2
    found = splicer.splice(text, [np.concatenate([borders, letters])])
    assert np.array_equal(found.ids, [*borders, *letters, *splicer.encode("<|im")])


def test_thousands_of_special_tokens_are_probed_in_part() -> None:
    backend = _backend("pieces")
    backend.add_special_tokens([f"<unused{number}>" for number in range(3_000)])
    encoded = 0

    class Counted:
        added_tokens_decoder = PreTrainedTokenizerFast(
            tokenizer_object=backend
        ).added_tokens_decoder
        decode = None

        def encode(self, text: str, **_options: object) -> list[int]:
            nonlocal encoded
            encoded += 1
            return list(backend.encode(text, add_special_tokens=False).ids)

    PromptSplicer(Counted())
    assert 0 < encoded <= 64 * 6 * 4


def kept_by(tracker: kvtrie.TurnTracker, ids: npt.NDArray[np.uint32], name: str | None) -> None:
    tracker.keep(kvtrie.TokenSequence(ids, SPACE), num_computed=len(ids) - 1, conversation=name)


@pytest.mark.parametrize("conversation", ["chat", None])
def test_a_tracker_splices_from_its_histories(conversation: str | None) -> None:
    _, splicer = family("bytes")
    tracker = kvtrie.TurnTracker()
    first = prompt_of([("user", "what is it")]) + "<|im_start|>assistant\n"
    letters = np.concatenate([splicer.encode(letter) for letter in "the harbour<|im_end|>"[:11]])
    history = np.concatenate([splicer.encode(first), letters, splicer.encode("<|im_end|>")])
    kept_by(tracker, splicer.encode("another history"), "other")
    kept_by(tracker, history, conversation)
    text = f"{first}the harbour<|im_end|>\n" + prompt_of([("user", "and where")])
    found = tracker.splice(text, splicer, SPACE, conversation=conversation)
    assert common(found.ids, history) == len(history)
    prompt = kvtrie.TokenSequence(found.ids, SPACE)
    assert tracker.compare(prompt, conversation=conversation).kind == "exact_extension"
    plain = kvtrie.TokenSequence(splicer.encode(text), SPACE)
    assert tracker.compare(plain, conversation=conversation).kind == "common_prefix"
    stats = tracker.stats()
    assert (stats.splices, stats.spliced_tokens) == ({"spliced": 1}, found.num_kept)


def test_outcomes_are_counted_and_a_missing_conversation_is_no_error() -> None:
    _, splicer = family("bytes")
    seconds = [0.0]
    tracker = kvtrie.TurnTracker(ttl=10, clock=lambda: seconds[0])
    kept_by(tracker, splicer.encode("the harbour"), "chat")
    other = kvtrie.Namespace(model="m", salt="tenant")

    def outcome(text: str, name: str | None, space: kvtrie.Namespace = SPACE) -> SplicedPrompt:
        found = tracker.splice(text, splicer, space, conversation=name)
        assert splicer.decode(found.ids) == text
        return found

    assert outcome("the harbour", "chat").outcome == "spliced"
    assert outcome("the harbour", "chat", other).outcome == "unknown"
    assert outcome("the harbour", None, other).outcome == "plain"
    assert outcome("where", "chat").outcome == "plain"
    assert outcome("the harbour", "none").outcome == "unknown"
    seconds[0] = 20.0
    late = outcome("the harbour", "chat")
    assert (late.outcome, late.num_kept) == ("expired", 0)
    stats = tracker.stats()
    assert stats.splices == {"spliced": 1, "plain": 2, "unknown": 2, "expired": 1}
    assert stats.unknown == {"unknown": 2, "expired": 1}


def test_ids_that_decode_to_another_text_are_refused() -> None:
    tokenizer, splicer = family("bytes")

    class Odd:
        """Decodes a whole prompt otherwise than its pieces."""

        added_tokens_decoder = tokenizer.added_tokens_decoder
        encode = staticmethod(tokenizer.encode)

        @staticmethod
        def decode(ids: list[int], **options: object) -> str:
            found = str(tokenizer.decode(ids, **options))
            return found if len(ids) < 12 else str(len(ids))

    letters = np.concatenate([splicer.encode(letter) for letter in "the harb"])
    text = "the harb<|im_end|>\nand where is it then"
    found = PromptSplicer(Odd()).splice(text, [letters])
    assert (found.outcome, found.num_kept) == ("refused", 0)
    assert np.array_equal(found.ids, splicer.encode(text))


def test_bad_arguments_are_named() -> None:
    tracker = kvtrie.TurnTracker()
    _, splicer = family("bytes")
    with pytest.raises(TypeError, match="the tokenizer, a str, has no 'decode'"):
        PromptSplicer("gpt2")
    with pytest.raises(TypeError, match="rendered is 3, not a str"):
        tracker.splice(3, splicer, SPACE)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not a PromptSplicer"):
        tracker.splice("a", 3, SPACE)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not a Namespace"):
        tracker.splice("a", splicer, "m")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="conversation is 3, not a str"):
        tracker.splice("a", splicer, SPACE, conversation=3)  # type: ignore[arg-type]
    assert not tracker.stats().splices
