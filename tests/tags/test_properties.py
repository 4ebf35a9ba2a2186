"""Any tokens in any portions with any roll-backs: the spans are those of the whole sequence."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tags.lab import Vocabulary
from tests.tags.naive import Naive, spans_of

from kvtrie import tags
from kvtrie.tags import spellings

if TYPE_CHECKING:
    from kvtrie.tags.formats import Format

NESTING = replace(
    tags.preset("qwen3"),
    name="nesting",
    pairs=tuple(replace(pair, nests=True) for pair in tags.preset("qwen3").pairs),
    initial="assistant",
    boundary="never",
)
FORMATS = [*tags.PRESETS.values(), NESTING]


class Setting:
    """A format compiled for the lab's vocabulary, and the tokens that matter to it."""

    def __init__(self, form: Format) -> None:
        self.vocabulary = Vocabulary()
        self.tagger = tags.Tagger(form, self.vocabulary)
        found = spellings.from_tokenizer(form, self.vocabulary, "test")
        self.naive = Naive(form, found)
        encode = self.vocabulary.encode
        texts = [text for text, _ in form.delimiters()]
        texts += [start + name for start, name in form.names()]
        texts += ["\n", "\n\n", "word", "two words", " to=", "functions", "<", ">", "｜DSML｜"]
        for start in form.starts:
            texts += [start.delimiter + (start.header_end or "")]
            end = start.header_end or "\n"
            texts += [start.delimiter + name + end for name, _ in start.names]
        if form.wrapped is not None:
            texts += [f"<|im_start|>user\n{form.wrapped[0]}", f"{form.wrapped[1]}<|im_end|>"]
        if form.channels is not None:
            head = "<|start|>assistant<|channel|>"
            texts += [f"{head}{name}<|message|>" for name, _ in form.channels.kinds]
            texts += [f"{head}commentary to=functions.f<|message|>"]
            texts += ["<|start|>functions.f to=assistant<|channel|>commentary<|message|>"]
        self.words = st.sampled_from([encode(text) for text in texts])

    @property
    def ids(self) -> st.SearchStrategy[list[int]]:
        """Delimiters, pieces of them, whole headers, newlines, words, and any other ids."""
        garbage = st.integers(0, 2**32 - 1).map(lambda token: [token])
        pieces = st.one_of(self.words, self.words, self.words, garbage)
        return st.lists(pieces, max_size=40).map(
            lambda found: [t for piece in found for t in piece]
        )


SETTINGS = [pytest.param(Setting(form), id=form.name) for form in FORMATS]


@pytest.mark.parametrize("setting", SETTINGS)
@given(data=st.data())
def test_spans_are_those_of_the_naive_reading(setting: Setting, data: st.DataObject) -> None:
    ids = data.draw(setting.ids)
    stream = setting.tagger.stream()
    found = stream.feed(ids)
    found += stream.finish()
    spans, turns = setting.naive.read(ids)
    assert spans_of(stream) == spans
    assert [(it.start, it.end, it.state, len(it.sections)) for it in stream.turns] == turns
    assert found == stream.spans


@pytest.mark.parametrize("setting", SETTINGS)
@given(data=st.data())
def test_portions_do_not_matter(setting: Setting, data: st.DataObject) -> None:
    ids = data.draw(setting.ids)
    whole = setting.tagger.stream()
    found = whole.feed(np.array(ids, dtype=np.uint32))
    stream = setting.tagger.stream()
    again = []
    at = 0
    while at < len(ids):
        size = data.draw(st.sampled_from([1, 1, 2, 3, 7, 30]))
        portion = ids[at : at + size]
        again += stream.feed(
            data.draw(st.sampled_from([portion, tuple(portion), np.array(portion)]))
        )
        at += size
        if data.draw(st.booleans()):
            stream.finish()
    assert again == found
    assert stream.finish() == whole.finish()
    assert stream.sections == whole.sections
    assert stream.turns == whole.turns
    assert stream.num_steps <= len(ids)


@pytest.mark.parametrize("setting", SETTINGS)
@given(data=st.data())
def test_roll_back_forgets(setting: Setting, data: st.DataObject) -> None:
    """Drafts are fed and removed; the rest is as if they had never been fed."""
    stream = setting.tagger.stream()
    kept: list[int] = []
    for _ in range(data.draw(st.integers(1, 6))):
        portion = data.draw(setting.ids)
        stream.feed(portion)
        kept += portion
        if data.draw(st.booleans()):
            stream.finish()
        length = data.draw(st.integers(0, len(kept)))
        stream.truncate(length)
        del kept[length:]
        fresh = setting.tagger.stream()
        fresh.feed(kept)
        assert len(stream) == len(fresh) == length
        assert stream.sections == fresh.sections
        assert stream.open == fresh.open
        assert stream.turns == fresh.turns
        assert stream._state == fresh._state
    assert stream.finish() == fresh.finish()
    assert stream.turns == fresh.turns


@pytest.mark.parametrize("setting", SETTINGS)
@given(data=st.data())
def test_spans_fit_together(setting: Setting, data: st.DataObject) -> None:
    """Ends ascend, nothing is empty or reversed, only nested sections are inside others."""
    ids = data.draw(setting.ids)
    sections = setting.tagger.sections(ids)
    ends = [section.span.end for section in sections]
    assert ends == sorted(ends)
    outer = sorted((s.span.start, s.span.end) for s in sections if not s.nested)
    assert all(start < end <= len(ids) for start, end in outer)
    assert all(left[1] <= right[0] for left, right in pairwise(outer))
    for section in sections:
        start, end = section.dropped
        assert section.span.start <= start <= end <= section.span.end
        assert section.span.start <= section.body[0] <= section.body[1] <= section.span.end


@settings(max_examples=20)
@given(st.data())
def test_text_is_skipped(data: st.DataObject) -> None:
    """Work grows with the delimiters, not with the tokens between them."""
    setting = SETTINGS[0].values[0]
    assert isinstance(setting, Setting)
    encode = setting.vocabulary.encode
    words = data.draw(st.lists(st.sampled_from([5_000, 6_000, 7_000]), max_size=2_000))
    ids = encode("<|im_start|>assistant\n<think>\n") + words + encode("</think>\n\n") + words
    for portions in ([ids], [[token] for token in ids]):
        stream = setting.tagger.stream()
        for portion in portions:
            stream.feed(portion)
        assert stream.num_steps <= 12
        assert len(stream._journal) <= stream.num_steps
