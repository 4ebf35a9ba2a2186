"""Formats, taggers and streams, one rule at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.tags.lab import Vocabulary

import kvtrie
from kvtrie import tags
from kvtrie.tags.automaton import Automaton
from kvtrie.tags.formats import Format, MessageStart, Pair
from kvtrie.tags.ids import MAX_TOKEN

USER, ASSISTANT, TOOL, END, THINK, UNTHINK, CALL, UNCALL, NEWLINE = range(1, 10)


def tagger(**more: Any) -> tags.Tagger:
    given: dict[str, Any] = {
        "user": USER,
        "assistant": ASSISTANT,
        "tool": TOOL,
        "end": END,
        "reasoning": (THINK, UNTHINK),
        "tool_call": (CALL, UNCALL),
        "newlines": [NEWLINE],
    }
    return tags.Tagger.from_ids(**(given | more))


@pytest.fixture
def stream() -> tags.Stream:
    return tagger().stream()


def found(sections: Any) -> str:
    return ", ".join(f"{it.span.start}-{it.span.end} {it.kind}" for it in sections)


def test_open_span_follows_the_tokens(stream: tags.Stream) -> None:
    seen = []
    for token in [USER, 50, END, ASSISTANT, THINK, 51, CALL, 52, UNCALL, UNTHINK, 53, END]:
        stream.feed([token])
        seen.append(None if stream.open is None else (stream.open.start, stream.open.kind))
    assert seen == [
        (0, "user"),
        (0, "user"),
        None,
        None,
        (4, "reasoning"),
        (4, "reasoning"),
        (6, "tool_call"),
        (6, "tool_call"),
        (4, "reasoning"),
        None,
        (10, "answer"),
        None,
    ]


def test_call_inside_reasoning_is_nested() -> None:
    sections = tagger().sections([ASSISTANT, THINK, 50, CALL, 51, UNCALL, UNTHINK, 52, END])
    assert found(sections) == "3-6 tool_call, 1-7 reasoning, 7-8 answer"
    assert [section.nested for section in sections] == [True, False, False]


def test_unclosed_call_inside_reasoning_ends_with_it(stream: tags.Stream) -> None:
    """`</think>` ends the reasoning, and with it an unclosed call: the answer counts."""
    stream.feed([USER, 40, END, ASSISTANT, THINK, CALL, 50, UNTHINK, 51, END])
    assert found(stream.sections[1:]) == "5-7 tool_call, 4-8 reasoning, 8-9 answer"
    assert [section.complete for section in stream.sections] == [True, False, True, True]
    assert stream.turns[-1].state == "answered"


def test_call_ends_reasoning_where_the_format_says_so() -> None:
    kimi = Vocabulary()
    text = "<|im_assistant|>assistant<|im_middle|><think>a<|tool_calls_section_begin|>b"
    text += "<|tool_calls_section_end|><|im_end|>"
    sections = tags.Tagger.from_preset("kimi-k2", kimi).sections(kimi.encode(text))
    assert found(sections) == "3-5 reasoning, 5-8 tool_call"
    assert [section.nested for section in sections] == [False, False]


def test_delimiters_inside_a_call_are_text() -> None:
    sections = tagger().sections([ASSISTANT, CALL, THINK, UNTHINK, CALL, UNCALL, END])
    assert found(sections) == "1-6 tool_call"


def test_first_closing_delimiter_ends_reasoning_unless_it_nests() -> None:
    ids = [ASSISTANT, THINK, 50, THINK, 51, UNTHINK, 52, UNTHINK, 53, END]
    assert found(tagger().sections(ids)) == "1-6 reasoning, 6-9 answer"
    assert found(tagger(nests=True).sections(ids)) == "1-8 reasoning, 8-9 answer"


def test_missing_end_ends_with_the_message() -> None:
    sections = tagger().sections([ASSISTANT, THINK, 50, END, USER, 40, END])
    assert found(sections) == "1-3 reasoning, 4-7 user"
    assert not sections[0].complete


def test_lone_closing_delimiter_counts_once() -> None:
    sections = tagger().sections([ASSISTANT, NEWLINE, 50, UNTHINK, NEWLINE, 51, UNTHINK, 52, END])
    assert found(sections) == "2-5 reasoning, 5-8 answer"


def test_lone_closing_delimiter_reaches_back_to_the_call_before_it() -> None:
    sections = tagger().sections([ASSISTANT, 50, CALL, 51, UNCALL, 52, UNTHINK, 53, END])
    assert found(sections) == "1-2 answer, 2-5 tool_call, 5-7 reasoning, 7-8 answer"


@pytest.mark.parametrize(
    ("drops", "dropped"), [("whole", (1, 6)), ("to_close", (1, 3)), ("body", (2, 3))]
)
def test_what_is_dropped_with_reasoning(drops: Any, dropped: tuple[int, int]) -> None:
    ids = [ASSISTANT, THINK, 50, UNTHINK, NEWLINE, NEWLINE, 51, NEWLINE, END]
    reasoning, answer = tagger(drops=drops).sections(ids)
    assert reasoning.dropped == dropped
    assert reasoning.span.end == (6 if drops == "whole" else 4)
    assert (answer.span.start, answer.span.end) == (6, 8)


def test_reasoning_settles_with_the_first_token_that_is_not_a_newline(stream: tags.Stream) -> None:
    assert stream.feed([ASSISTANT, THINK, 50, UNTHINK]) == []
    assert found(stream.sections) == "1-4 reasoning"
    assert stream.feed([NEWLINE]) == []
    assert [(it.start, it.end) for it in stream.feed([51])] == [(1, 5)]


def test_sections_count_in_the_assistants_messages_alone() -> None:
    sections = tagger().sections([USER, THINK, 40, UNTHINK, CALL, UNCALL, END])
    assert found(sections) == "0-7 user"


def test_unknown_role_is_tagged_with_nothing() -> None:
    vocabulary = Vocabulary()
    qwen = tags.Tagger.from_preset("qwen3", vocabulary)
    ids = vocabulary.encode("<|im_start|>critic\nbad<|im_end|>\n<|im_start|>user\nhi<|im_end|>")
    assert [span.kind for span in qwen.spans(ids)] == ["user"]


def test_message_without_text_is_tagged_with_nothing() -> None:
    assert tagger().spans([USER, END, ASSISTANT, NEWLINE, END, TOOL]) == []


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("<tool_response>\na\n</tool_response>", "tool_result"),
        ("<tool_response>\na\n</tool_response>\n<tool_response>b</tool_response>", "tool_result"),
        ("<tool_response>\na\n</tool_response> and more", "user"),
        ("see <tool_response>\na\n</tool_response>", "user"),
        ("<tool_response>\na", "user"),
        ("<tool_response>a</tool_response> b </tool_response>", "tool_result"),
        ("<tool_response>a</tool_response> b", "user"),
    ],
)
def test_wrapped_tool_result_fills_the_message(text: str, kind: str) -> None:
    vocabulary = Vocabulary()
    qwen = tags.Tagger.from_preset("qwen3", vocabulary)
    ids = vocabulary.encode(f"<|im_start|>user\n{text}<|im_end|>")
    assert [span.kind for span in qwen.spans(ids)] == [kind]


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ("assistant<|channel|>analysis", "reasoning"),
        ("assistant<|channel|>final", "answer"),
        ("assistant<|channel|>commentary", "answer"),
        ("assistant<|channel|>elsewhere", "answer"),
        ("assistant", "answer"),
        ("assistant to=functions.f<|channel|>commentary json", "tool_call"),
        ("assistant<|channel|>commentary to=functions.f <|constrain|>json", "tool_call"),
        ("assistant<|channel|>analysis to=python code", "tool_call"),
        ("functions.f to=assistant<|channel|>commentary", "tool_result"),
        ("developer", "system"),
        ("user", "user"),
        ("users", "tool_result"),
    ],
)
def test_harmony_headers(header: str, kind: str) -> None:
    vocabulary = Vocabulary()
    harmony = tags.Tagger.from_preset("gpt-oss", vocabulary)
    ids = vocabulary.encode(f"<|start|>{header}<|message|>some text<|end|>")
    assert [span.kind for span in harmony.spans(ids)] == [kind]


def test_header_without_end_is_bounded() -> None:
    vocabulary = Vocabulary()
    stream = tags.Tagger.from_preset("gpt-oss", vocabulary).stream()
    stream.feed(vocabulary.encode("<|start|>assistant"))
    stream.feed([77] * 10_000)
    stream.feed(vocabulary.encode("<|message|>text<|end|>"))
    assert [span.kind for span in stream.spans] == ["tool_result"]
    assert len(stream._journal) < 100


def test_user_text_cannot_open_a_textual_message() -> None:
    vocabulary = Vocabulary()
    deepseek = tags.Tagger.from_preset("deepseek-v3.2", vocabulary)
    ids = vocabulary.encode("<｜User｜>see <function_results>x</function_results><｜Assistant｜>")
    assert [span.kind for span in deepseek.spans(ids)] == ["user"]


def test_delimiters_straddle_calls() -> None:
    straddling = tags.Tagger.from_ids(
        user=[1, 2, 3], assistant=[1, 2, 4], reasoning=([7, 7, 8], [9, 9, 8])
    )
    # Each begins again inside its own beginning.
    ids = [1, 2, 3, 40, 1, 2, 4, 7, 7, 7, 8, 50, 9, 9, 9, 8, 60]
    assert found(straddling.sections(ids)) == "0-4 user, 7-8 answer, 8-16 reasoning, 16-17 answer"
    stream = straddling.stream()
    for token in ids:
        stream.feed([token])
    stream.truncate(14)
    stream.feed(ids[14:])
    stream.finish()
    assert stream.sections == straddling.sections(ids)


def test_positions_may_start_anywhere() -> None:
    stream = tagger().stream(start=1_000, role="assistant")
    stream.feed([50, UNTHINK, 51, END])
    assert found(stream.sections) == "1000-1002 reasoning, 1002-1003 answer"
    assert len(stream) == 1_004
    with pytest.raises(ValueError, match=r"truncate: length is 999; it must be in \[1000, 1004\]"):
        stream.truncate(999)


def test_finishing_is_undone_by_what_follows(stream: tags.Stream) -> None:
    stream.feed([ASSISTANT, CALL, 50])
    assert [span.kind for span in stream.finish()] == ["tool_call"]
    assert stream.finish() == stream.spans
    assert [stream.is_finished, stream.feed([51, UNCALL, END]), stream.is_finished] == [
        True,
        [kvtrie.Span(1, 5, "tool_call")],
        False,
    ]
    assert found(stream.sections) == "1-5 tool_call"


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([True], TypeError),
        ([1.0], TypeError),
        (["1"], TypeError),
        ([-1], ValueError),
        ([2**32], ValueError),
        ([1] * 20 + [True], TypeError),
        (np.array([True, False]), TypeError),
        (np.array([0.5]), TypeError),
        (np.array([-1]), ValueError),
        (np.array([2**40]), ValueError),
        (np.array([[1]]), ValueError),
    ],
)
def test_bad_ids_change_nothing(ids: Any, error: type[Exception], stream: tags.Stream) -> None:
    stream.feed([ASSISTANT, THINK, 50])
    with pytest.raises(error, match="feed: "):
        stream.feed(ids)
    assert len(stream) == 3
    assert stream.open is not None


@pytest.mark.parametrize("ids", [[], (), np.array([], dtype=np.uint32), np.array([])])
def test_nothing_may_be_fed(ids: Any, stream: tags.Stream) -> None:
    assert stream.feed(ids) == []
    assert stream.turns == ()
    assert stream.finish() == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"start": -1}, ValueError, "start is -1"),
        ({"start": 1.5}, TypeError, "start is 1.5"),
        ({"role": "critic"}, ValueError, "'critic', not one of system, user"),
    ],
)
def test_bad_streams(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tagger().stream(**arguments)


@pytest.mark.parametrize("length", [-1, 4, True, 1.0])
def test_bad_truncation_changes_nothing(length: Any, stream: tags.Stream) -> None:
    stream.feed([ASSISTANT, 50, END])
    with pytest.raises((TypeError, ValueError), match="truncate: length is"):
        stream.truncate(length)
    assert len(stream.spans) == 1


def test_confirmed_tokens_stay() -> None:
    ids = [USER, 40, END, ASSISTANT, THINK, 50, UNTHINK, 51, END] * 20
    stream = tagger().stream()
    stream.feed(ids)
    before = len(stream._journal)
    stream.confirm(np.int64(170))
    assert len(stream._journal) < before / 10
    stream.truncate(173)
    stream.feed(ids[173:])
    assert stream.sections == tagger().sections(ids)
    for length in (169, 181):
        message = rf"confirm: length is {length}; it must be in \[170, 180\]"
        with pytest.raises(ValueError, match=message):
            stream.confirm(length)


def test_a_message_has_begun_with_its_header() -> None:
    stream = tagger().stream()
    found = [stream.is_in_message]
    for token in (40, ASSISTANT, 50, END, USER):
        stream.feed([token])
        found.append(stream.is_in_message)
    assert found == [False, False, True, True, False, True]
    stream.finish()
    assert not stream.is_in_message


def test_final_tokens_are_as_confirmed() -> None:
    """The connectors read prompts so: no record is made only to be freed."""
    ids = [USER, 40, END, ASSISTANT, THINK, 50, UNTHINK, 51, END] * 20
    stream, other = tagger().stream(), tagger().stream()
    stream.feed(ids[:30])
    assert stream._journal
    stream.feed(ids[30:], final=True)
    other.feed(ids)
    assert stream.sections == other.sections
    assert not stream._journal
    with pytest.raises(ValueError, match=r"truncate: length is 179; it must be in \[180, 180\]"):
        stream.truncate(179)


def states(stream: tags.Stream) -> list[tuple[int, int, str]]:
    return [(turn.start, turn.end, turn.state) for turn in stream.turns]


def test_turns_close_when_a_user_speaks(stream: tags.Stream) -> None:
    stream.feed([USER, 40, END, ASSISTANT, CALL, UNCALL, END])
    assert states(stream) == [(0, 7, "open")]
    stream.feed([TOOL, 45, END, ASSISTANT, 50, END])
    assert states(stream) == [(0, 13, "answered")]
    stream.feed([USER])
    assert states(stream) == [(0, 14, "answered")]
    stream.feed([41, END])
    assert states(stream) == [(0, 13, "closed"), (13, 16, "open")]


def test_tool_result_after_an_answer_continues_the_loop(stream: tags.Stream) -> None:
    stream.feed([USER, 40, END, ASSISTANT, 50, END, TOOL, 45, END])
    assert states(stream) == [(0, 9, "open")]


def test_two_user_messages_are_one_turn(stream: tags.Stream) -> None:
    stream.feed([USER, 40, END, USER, 41, END, ASSISTANT, 50, END])
    assert states(stream) == [(0, 9, "answered")]


def test_final_boundary_waits_for_the_answer() -> None:
    stream = tagger(boundary="final").stream()
    stream.feed([USER, 40, END, ASSISTANT, CALL, UNCALL, END, USER, 41, END])
    assert states(stream) == [(0, 10, "open")]
    stream.feed([ASSISTANT, 50, END])
    assert states(stream) == [(0, 13, "answered")]
    stream.feed([USER])
    assert states(stream) == [(0, 13, "closed"), (13, 14, "open")]


def test_presets_are_named_and_sourced() -> None:
    for name, form in tags.PRESETS.items():
        assert form.name == name
        assert form.sources
        assert tags.preset(name) is form
    with pytest.raises(ValueError, match="preset: 'llama' is not a preset; the presets are qwen3"):
        tags.preset("llama")
    with pytest.raises(TypeError):
        tags.PRESETS["mine"] = form  # type: ignore[index] # it must refuse


def test_preset_from_a_mapping() -> None:
    form = tags.preset("minimax-m2")
    texts = sorted({text for text, _ in form.delimiters()} | {name for _, name in form.names()})
    ids = {text: number for number, text in enumerate(texts, 10)}
    mapped = tags.Tagger(form, ids | {"\n": 5})
    row = [ids["]~b]"], ids["ai"], 5, ids["<think>"], 90, ids["</think>"], 5, 91, ids["[e~["]]
    assert found(mapped.sections(row)) == "3-7 reasoning, 7-8 answer"
    del ids["[e~["], ids["user"]
    with pytest.raises(ValueError, match=r"no ids are given for '\[e~\[', 'user'"):
        tags.Tagger(form, ids)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"assistant": None}, ValueError, "no argument says where the assistant speaks"),
        ({"user": []}, ValueError, "'user' is empty"),
        ({"user": "u"}, TypeError, "'user' is 'u'"),
        ({"user": [1, True]}, TypeError, "neither a token id nor a sequence"),
        ({"user": -1}, ValueError, "token id -1"),
        ({"user": ASSISTANT}, ValueError, r"'user' is \[2\], which contains 'assistant'"),
        ({"user": [1, ASSISTANT]}, ValueError, "would never be found"),
        ({"reasoning": THINK}, ValueError, "reasoning is 5, not a pair"),
        ({"reasoning": (THINK,)}, ValueError, "not a pair"),
        ({"boundary": "soon"}, ValueError, "boundary is 'soon', not one of"),
        ({"drops": "some"}, ValueError, "drops one of"),
        ({"newlines": ["x"]}, TypeError, "newlines"),
    ],
)
def test_bad_delimiters(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tagger(**arguments)


def test_bad_taggers() -> None:
    with pytest.raises(TypeError, match="not a Format"):
        tags.Tagger("qwen3", {})  # type: ignore[arg-type] # it must refuse
    with pytest.raises(TypeError, match="int is neither a tokenizer"):
        tags.Tagger(tags.preset("qwen3"), 7)  # type: ignore[arg-type] # likewise


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (
            lambda: Format(
                name="f", ends=("x",), pairs=(Pair(kind="reasoning", open="x", close="y"),)
            ),
            "'x' is both the end of a message and the start of a reasoning",
        ),
        (
            lambda: Format(
                name="f", starts=(MessageStart(delimiter="x"), MessageStart(delimiter="x"))
            ),
            "is both",
        ),
        (lambda: Format(name="f", ends=("",)), "is empty"),
        (lambda: replace(tags.preset("glm"), boundary="x"), "boundary is 'x'"),  # type: ignore[arg-type]
    ],
)
def test_bad_formats(form: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        form()


def test_spelling_that_contains_another_of_the_same_delimiter_is_dropped() -> None:
    automaton = Automaton({"a": [(1, 2), (1, 2, 3)], "b": [(4,)]})
    assert sorted(automaton.outputs.values()) == ["a", "b"]


@pytest.mark.parametrize("first", [[5], [0, 7, 40], [3, 1 << 21], [MAX_TOKEN]], ids=str)
def test_candidates_are_the_tokens_with_which_a_delimiter_begins(first: list[int]) -> None:
    automaton = Automaton({"a": [(one, 9) for one in first]})
    near = {max(0, min(one + by, MAX_TOKEN)) for one in first for by in (-1, 0, 1)}
    tokens = [*sorted(near), 41, 1 << 20, MAX_TOKEN] * 3
    expected = [at for at, token in enumerate(tokens) if token in first]
    assert automaton.candidates(tokens) == expected
    assert automaton.candidates(np.array(tokens, np.int64)) == expected


def test_tagger_is_shared_between_streams() -> None:
    shared = tagger()
    left, right = shared.stream(), shared.stream()
    left.feed([ASSISTANT, THINK])
    right.feed([USER, 40])
    assert (left.open and left.open.kind, right.open and right.open.kind) == ("reasoning", "user")
    assert repr(shared) == "Tagger('from_ids')"
    assert repr(left) == "Stream('from_ids', length=2, sections=0)"


def test_moved_end_is_where_the_last_message_of_a_user_or_a_tool_begins() -> None:
    stream = tagger().stream()
    ends = [stream.moved_end]
    for ids in ([ASSISTANT, 40, END], [USER, 41, 42]):
        stream.feed(ids)
        ends.append(stream.moved_end)
    # The last message is still open.
    assert ends == [None, None, 3]
    stream.feed([END, ASSISTANT, CALL, 43, UNCALL, END, TOOL, 44, END])
    assert stream.moved_end == 12
    stream.feed([TOOL, 45, END, ASSISTANT, THINK])
    assert stream.moved_end == 15
    stream.truncate(10)
    assert stream.moved_end == 3
