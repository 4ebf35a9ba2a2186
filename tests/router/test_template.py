"""A chat template that deletes reasoning, from messages to what the tracker returns."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="templates are rendered by transformers")

from tests.tags.templates import QWEN3, tokenizer_of

import kvtrie
from kvtrie import tags

NS = kvtrie.Namespace(model="qwen3", salt=kvtrie.SHARED)
SAID = "look it up with the tool and answer, " * 6
USER = {"role": "user", "content": f"the user asks a question: {SAID}"}
REASONING = f"the assistant thinks: {SAID}"
ANSWER = f"the assistant answers: {SAID}"


@pytest.mark.parametrize("conversation", ["c", None])
def test_stripped_reasoning_of_a_qwen3_chat(conversation: str | None) -> None:
    tokenizer = tokenizer_of("qwen3", QWEN3)
    tagger = tags.Tagger.from_tokenizer(tokenizer)

    def prompt_of(messages: list[dict[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))

    first = prompt_of([USER])
    generated = tokenizer.encode(
        f"<think>\n{REASONING}\n</think>\n\n{ANSWER}<|im_end|>", add_special_tokens=False
    )
    history = first + generated
    stream = tagger.stream()
    stream.feed(history)
    stream.finish()
    # The tracker gets the spans that the template deletes.
    spans = [
        kvtrie.Span(*section.dropped, "reasoning")
        for section in stream.sections
        if section.kind == "reasoning"
    ]
    tracker = kvtrie.TurnTracker()
    tracker.keep(
        kvtrie.TokenSequence(history, NS),
        num_computed=len(history) - 1,
        conversation=conversation,
        spans=spans,
    )
    chat = [
        USER,
        {"role": "assistant", "content": ANSWER, "reasoning_content": REASONING},
        {"role": "user", "content": "and then?"},
    ]
    ids = prompt_of(chat)
    prompt = kvtrie.TokenSequence(ids, NS)
    (start, end) = stream.sections[1].dropped

    plain = tracker.compare(prompt, conversation=conversation)
    assert (plain.kind, plain.num_tokens) == ("common_prefix", len(first))
    assert len(first) == start

    aliased = tracker.compare(prompt, conversation=conversation, alias=True)
    assert aliased.kind == "alias"
    assert aliased.send is not None
    assert aliased.num_tokens == len(history) - 1
    assert aliased.send.tolist() == history + ids[len(history) - (end - start) :]

    moved = tracker.compare(
        prompt, conversation=conversation, policy=kvtrie.ReusePolicy(scope="namespace")
    )
    assert moved.kind == "moved_runs"
    assert moved.segments is not None
    runs = moved.segments[moved.segments["class"] == 1]
    assert (runs[0]["start"], runs[0]["delta"]) == (start, start - end)
    assert runs[0]["end"] == len(history) - 1 - (end - start)

    # A template that keeps reasoning, or a tool loop: the same history, and more after it.
    longer = kvtrie.TokenSequence([*history, 5, 6, 7], NS)
    assert tracker.compare(longer, conversation=conversation).kind == "exact_extension"
