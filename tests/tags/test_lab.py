"""Rendered conversations: every token's kind, and what the next prompt leaves out."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from tests.tags.lab import (
    GLM,
    GPT_OSS,
    KIMI,
    LABS,
    QWEN3,
    QWEN3_STUB,
    QWQ,
    R1,
    V31,
    V32,
    Lab,
    Said,
    Vocabulary,
)

from kvtrie import tags

if TYPE_CHECKING:
    from collections.abc import Iterable

SYSTEM = Said("system", "be brief and kind")


def asked(number: int) -> Said:
    return Said("user", f"question number {number}\n\nplease?")


def answered(number: int, lab: Lab) -> Said:
    reasoning = "" if lab is QWEN3_STUB else f"let me see: {number}\n\nis odd."
    return Said("assistant", f"it is {number}.\n\nreally", reasoning)


def called(number: int, lab: Lab) -> Said:
    reasoning = "" if lab is QWEN3_STUB else f"I look {number} up."
    content = f"looking {number} up" if number % 2 else ""
    return Said(
        "assistant", content, reasoning, ("lookup",) if lab is GPT_OSS else ("lookup", "two")
    )


def result(number: int) -> Said:
    return Said("tool", f"found {number}\nand more")


class Recorder:
    def __init__(self) -> None:
        self.tagged: list[Any] = []
        self.dead: list[tuple[int, int]] = []
        self.removed: list[tuple[int, int]] = []

    def tag(self, _seq: object, spans: Iterable[Any]) -> None:
        self.tagged += spans

    def mark_dead(self, _seq: object, ranges: Iterable[tuple[int, int]]) -> int:
        self.dead += ranges
        return len(self.dead)

    def remove_spans(
        self, _seq: object, ranges: Iterable[tuple[int, int]], force: bool = False
    ) -> Any:
        del force
        self.removed += ranges
        return tags.ClosedTurn()

    @property
    def is_untouched(self) -> bool:
        return not (self.tagged or self.dead or self.removed)


def kinds_of(spans: Iterable[Any], length: int) -> list[str | None]:
    """The kind of each token; no two spans of the lab overlap."""
    found: dict[int, list[str]] = defaultdict(list)
    for span in spans:
        for at in range(span.start, span.end):
            found[at].append(span.kind)
    assert all(len(kinds) == 1 for kinds in found.values())
    return [found[at][0] if at in found else None for at in range(length)]


def without(ids: list[int], ranges: Iterable[tuple[int, int]]) -> list[int]:
    gone = {at for start, end in ranges for at in range(start, end)}
    return [token for at, token in enumerate(ids) if at not in gone]


class Conversation:
    """A client and an engine: what is cached after each answer, what the next prompt is."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.vocabulary = Vocabulary()
        self.tagger = tags.Tagger.from_preset(lab.preset, self.vocabulary)
        self.history: list[Said] = []
        self.cached: list[int] = []

    def prompt(self) -> list[int]:
        pieces = self.lab.render(self.history) + self.lab.asks(self.history)
        return self.vocabulary.pieces(pieces)[0]

    def say(self, *messages: Said) -> tags.Stream:
        *outside, answer = messages
        self.history += outside
        pieces = self.lab.render(self.history) + self.lab.asks(self.history) + self.lab.says(answer)
        self.cached, kinds = self.vocabulary.pieces(pieces)
        stream = self.tagger.stream()
        stream.feed(self.cached)
        stream.finish()
        assert kinds_of(stream.spans, len(self.cached)) == kinds
        self.history.append(answer)
        return stream

    def expect_dropped(self, ranges: Iterable[tuple[int, int]]) -> None:
        """The next prompt is the cached tokens without the ranges, and more after them."""
        left = without(self.cached, ranges)
        if self.lab is GPT_OSS:
            assert left.pop() == self.vocabulary.id("<|return|>")
        prompt = self.prompt()
        assert self.vocabulary.decode(prompt[: len(left)]) == self.vocabulary.decode(left)
        assert len(prompt) > len(left)


def close(stream: tags.Stream, ids: list[int], **policy: Any) -> Recorder:
    index = Recorder()
    tags.TurnPolicy(**policy).close_turn(index, ids, stream)
    return index


@pytest.mark.parametrize("lab", LABS, ids=str)
def test_chat_turn_w01_to_w08(lab: Lab) -> None:
    talk = Conversation(lab)
    stream = talk.say(SYSTEM, asked(1), answered(1, lab))
    assert [turn.state for turn in stream.turns] == ["answered"]
    dead = close(stream, talk.cached).dead
    assert len(dead) == 1
    talk.history.append(asked(2))
    talk.expect_dropped(dead)


@pytest.mark.parametrize("lab", [lab for lab in LABS if lab.in_loop], ids=str)
def test_agent_run_w10_and_w11(lab: Lab) -> None:
    talk = Conversation(lab)
    stream = talk.say(SYSTEM, asked(0), called(0, lab))
    for number in range(1, 5):
        # Inside the loop nothing is touched, and the next prompt only appends.
        assert not stream.turns[-1].is_finished
        assert close(stream, talk.cached, reasoning="drop", tool_result="drop").is_untouched
        before = talk.cached
        stream = talk.say(result(number), called(number, lab))
        assert talk.cached[: len(before)] == before
    stream = talk.say(result(9), answered(9, lab))
    index = close(stream, talk.cached)
    assert len(index.dead) == 6
    talk.history.append(asked(10))
    talk.expect_dropped(index.dead)
    assert close(stream, talk.cached, reasoning="drop").removed == index.dead


@pytest.mark.parametrize("lab", LABS, ids=str)
def test_agent_run_is_closed_whatever_the_loop_keeps(lab: Lab) -> None:
    talk = Conversation(lab)
    talk.say(SYSTEM, asked(0), called(0, lab))
    stream = talk.say(result(1), answered(1, lab))
    index = close(stream, talk.cached, tool_result="evict_first")
    results = [span for span in stream.spans if span.kind == "tool_result"]
    assert len(results) == 1
    found = results[0]
    assert any(start <= found.start and found.end <= end for start, end in index.dead)
    assert {span.kind for span in index.tagged} >= {"system", "user", "tool_call", "answer"}


@pytest.mark.parametrize("lab", LABS, ids=str)
def test_second_turn_leaves_the_first_alone(lab: Lab) -> None:
    talk = Conversation(lab)
    talk.say(SYSTEM, asked(1), answered(1, lab))
    stream = talk.say(asked(2), answered(2, lab))
    assert [turn.state for turn in stream.turns] == ["closed", "answered"]
    second = stream.turns[1]
    dead = close(stream, talk.cached).dead
    assert dead
    assert all(second.start <= start and end <= second.end for start, end in dead)
    talk.history.append(asked(3))
    talk.expect_dropped(dead)


@pytest.mark.parametrize("lab", [lab for lab in LABS if lab.in_loop], ids=str)
def test_interrupted_loop(lab: Lab) -> None:
    """A user message before the answer ends the turn, except where only an answer ends it."""
    talk = Conversation(lab)
    talk.say(SYSTEM, asked(1), called(1, lab))
    talk.history += [result(1), asked(2)]
    stream = talk.tagger.stream()
    prompt = talk.prompt()
    after = Said("assistant", "fine", "thinking again")
    if lab in (KIMI, GPT_OSS):
        assert prompt[: len(talk.cached)] == talk.cached
        stream.feed(prompt)
        stream.finish()
        assert [turn.state for turn in stream.turns] == ["open"]
        assert close(stream, prompt).is_untouched
        stream = talk.say(after)
        assert len(close(stream, talk.cached).dead) == 2
        talk.history.append(asked(3))
        talk.expect_dropped(close(stream, talk.cached).dead)
    else:
        stream.feed(talk.cached)
        user = talk.vocabulary.pieces(lab.render([asked(2)]))[0]
        stream.feed(user)
        stream.finish()
        assert stream.turns[0].state == "closed"
        whole = talk.cached + user
        assert len(close(stream, whole).dead) == 1


def test_preserved_thinking_w09() -> None:
    talk = Conversation(QWEN3)
    stream = talk.say(SYSTEM, asked(1), answered(1, QWEN3))
    index = close(stream, talk.cached, thinking="preserved")
    assert not index.dead
    assert not index.removed
    assert index.tagged


@pytest.mark.parametrize("lab", LABS, ids=str)
@pytest.mark.parametrize("cut", range(1, 12))
def test_cut_off_generation(lab: Lab, cut: int) -> None:
    """An answer that is cut off ends a turn; whatever a call leaves open does not."""
    talk = Conversation(lab)
    talk.say(SYSTEM, asked(1), answered(1, lab))
    stream = talk.tagger.stream()
    ids = talk.cached[:-cut]
    stream.feed(ids)
    stream.finish()
    dead = close(stream, ids).dead
    assert all(0 <= start < end <= len(ids) for start, end in dead)
    talk = Conversation(lab)
    talk.say(SYSTEM, asked(1), called(2, lab))
    opened = max(span.start for span in talk.tagger.spans(talk.cached) if span.kind == "tool_call")
    for length in range(opened + 20, len(talk.cached)):
        stream = talk.tagger.stream()
        stream.feed(talk.cached[:length])
        stream.finish()
        assert not stream.turns[-1].is_finished


def test_lone_closing_delimiter() -> None:
    """Fed without the prompt that opened it, reasoning is found too."""
    for lab in (R1, V31, V32, QWQ, GLM):
        vocabulary = Vocabulary()
        tagger = tags.Tagger.from_preset(lab.preset, vocabulary)
        stream = tagger.stream(start=1000, role="assistant")
        ids = vocabulary.encode("some reasoning</think>an answer")
        stream.feed(ids[:2])
        assert stream.open is not None
        assert stream.open.kind == "answer"
        stream.feed(ids[2:])
        stream.finish()
        assert [(span.start, span.end, span.kind) for span in stream.spans] == [
            (1000, 1003, "reasoning"),
            (1003, 1005, "answer"),
        ]


def test_glm_samples_the_next_role() -> None:
    """GLM stops by generating the delimiter of the next role."""
    talk = Conversation(GLM)
    for said, stop, state in (
        (answered(1, GLM), "<|user|>", "closed"),
        (called(1, GLM), "<|observation|>", "open"),
    ):
        talk.history = []
        talk.say(asked(1), said)
        stream = talk.tagger.stream()
        stream.feed([*talk.cached, talk.vocabulary.id(stop)])
        before = stream.turns[0].state
        stream.finish()
        assert [before, stream.turns[0].state] == [
            "answered" if state == "closed" else "open",
            state,
        ]
        assert bool(close(stream, [*talk.cached, 0]).dead) == (state == "closed")


@pytest.mark.parametrize("lab", LABS, ids=str)
def test_whole_blocks_inside_what_is_dropped(lab: Lab) -> None:
    """Ranges are exact to the token: the next prompt has the tokens on either side."""
    talk = Conversation(lab)
    stream = talk.say(SYSTEM, asked(1), answered(1, lab))
    (start, end), *_ = close(stream, talk.cached).dead
    talk.history.append(asked(2))
    prompt = talk.prompt()
    shared = next(at for at, (a, b) in enumerate(zip(talk.cached, prompt, strict=False)) if a != b)
    # Tokens that both share at the seam may count for either side of it.
    assert shared - 3 <= start <= shared
    assert talk.cached[end : end + 2] == prompt[start : start + 2]
