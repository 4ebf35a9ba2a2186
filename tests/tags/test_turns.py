"""Turn policies: what they refuse and choose, and what an index does with it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from tests.tags.lab import QWEN3, Said, Vocabulary
from tests.tags.test_lab import Recorder

import kvtrie
from kvtrie import tags
from kvtrie.testing.model import ModelIndex

BLOCK = 4
USER, ASSISTANT, TOOL, END, THINK, UNTHINK, CALL, UNCALL = range(1, 9)
TAGGER = tags.Tagger.from_ids(
    user=USER,
    assistant=ASSISTANT,
    tool=TOOL,
    end=END,
    reasoning=(THINK, UNTHINK),
    tool_call=(CALL, UNCALL),
)
# A question, a call with reasoning, its result, an answer with reasoning.
RUN = [USER, 40, END, ASSISTANT, THINK, 50, UNTHINK, CALL, 51, UNCALL, END, TOOL, 60, END]
RUN += [ASSISTANT, THINK, 52, UNTHINK, 53, END]
REASONING = [(4, 7), (15, 18)]


def stream_of(ids: list[int]) -> tags.Stream:
    stream = TAGGER.stream()
    stream.feed(ids)
    stream.finish()
    return stream


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reasoning": "burn"}, "reasoning is 'burn', not one of"),
        ({"answer": None}, "answer is None"),
        ({"thinking": "often"}, "thinking is 'often', not one of"),
        (
            {"thinking": "preserved", "reasoning": "drop"},
            "reasoning='drop' contradicts thinking='preserved'",
        ),
        (
            {"thinking": "preserved", "reasoning": "evict_first"},
            "reasoning='evict_first' contradicts thinking='preserved'",
        ),
    ],
)
def test_bad_policies(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tags.TurnPolicy(**arguments)


def test_policy_is_a_value() -> None:
    policy = tags.TurnPolicy(reasoning="drop")
    assert policy == tags.TurnPolicy(reasoning="drop")
    assert len({policy, tags.TurnPolicy(reasoning="drop")}) == 1
    with pytest.raises(FrozenInstanceError):
        policy.reasoning = "keep"  # type: ignore[misc]


def test_override_for_one_request() -> None:
    policy = tags.TurnPolicy(reasoning="drop")
    assert policy.override(answer="evict_first") == tags.TurnPolicy(
        reasoning="drop", answer="evict_first"
    )
    assert policy.override(thinking="preserved").reasoning == "keep"
    with pytest.raises(ValueError, match="contradicts thinking='preserved'"):
        policy.override(thinking="preserved", reasoning="drop")
    with pytest.raises(TypeError, match="override: ideas: not among thinking, reasoning"):
        policy.override(ideas="drop")


def test_every_kind_may_go() -> None:
    index = Recorder()
    policy = tags.TurnPolicy(
        reasoning="drop", answer="evict_first", tool_call="drop", tool_result="evict_first"
    )
    done = policy.close_turn(index, RUN, stream_of(RUN))
    assert done.drop == ((4, 10), (15, 18))
    assert done.evict_first == ((11, 14), (18, 19))
    assert (index.removed, index.dead) == (list(done.drop), list(done.evict_first))
    assert index.tagged == list(done.spans) == stream_of(RUN).spans
    assert [turn.state for turn in done.turns] == ["answered"]


@pytest.mark.parametrize("length", range(8, 18))
def test_loop_under_way_is_left_alone(length: int) -> None:
    """Tokens may stop anywhere from the call to the end of the last reasoning."""
    index = Recorder()
    done = tags.TurnPolicy(reasoning="drop").close_turn(index, RUN, stream_of(RUN[:length]))
    assert index.is_untouched
    assert done.turns == ()


def test_answer_that_was_cut_off() -> None:
    stream = stream_of(RUN[:-1])
    assert [turn.state for turn in stream.turns] == ["answered"]
    stream.finish(complete=False)
    assert [turn.state for turn in stream.turns] == ["open"]
    index = Recorder()
    tags.TurnPolicy(reasoning="drop").close_turn(index, RUN, stream)
    assert index.is_untouched


def test_overrides_name_spans() -> None:
    stream = stream_of(RUN)
    first, second = (span for span in stream.spans if span.kind == "reasoning")
    index = Recorder()
    done = tags.TurnPolicy().close_turn(
        index, RUN, stream, overrides={first: "keep", second: "drop"}
    )
    assert (done.evict_first, done.drop) == ((), ((15, 18),))
    kept = tags.TurnPolicy(thinking="preserved")
    with pytest.raises(ValueError, match="'drop' contradicts thinking='preserved'"):
        kept.close_turn(index, RUN, stream, overrides={first: "drop"})
    unknown = kvtrie.Span(0, 1, "reasoning")
    with pytest.raises(ValueError, match=r"Span\(0, 1, 'reasoning'\), which the stream has not"):
        kept.close_turn(index, RUN, stream, overrides={unknown: "keep"})
    with pytest.raises(ValueError, match="is 'burn', not one of"):
        kept.close_turn(index, RUN, stream, overrides={first: "burn"})  # type: ignore[dict-item]


def test_sequence_shorter_than_the_stream() -> None:
    index = Recorder()
    with pytest.raises(ValueError, match="the sequence has 19 tokens, the stream has read 20"):
        tags.TurnPolicy().close_turn(index, RUN[:-1], stream_of(RUN))
    assert index.is_untouched


def test_all_turns_or_the_last() -> None:
    ids = RUN + RUN
    index = Recorder()
    done = tags.TurnPolicy().close_turn(index, ids, stream_of(ids))
    assert done.evict_first == tuple((start + 20, end + 20) for start, end in REASONING)
    done = tags.TurnPolicy().close_turn(index, ids, stream_of(ids), all_turns=True)
    assert len(done.turns) == 2
    assert len(done.evict_first) == 4
    # A loop after it is another turn, and is left alone.
    ids = RUN + RUN[:14]
    done = tags.TurnPolicy().close_turn(index, ids, stream_of(ids))
    assert done.evict_first == tuple(REASONING)


def test_template_that_never_drops() -> None:
    never = tags.Tagger.from_ids(
        assistant=ASSISTANT, reasoning=(THINK, UNTHINK), boundary="never", initial="assistant"
    )
    stream = never.stream()
    stream.feed([THINK, 50, UNTHINK, 51])
    stream.finish()
    done = tags.TurnPolicy(reasoning="drop").close_turn(Recorder(), [0] * 4, stream)
    assert (done.evict_first, done.drop) == ((), ())


def test_nested_call_is_dropped_with_its_reasoning() -> None:
    ids = [USER, 40, END, ASSISTANT, THINK, CALL, 50, UNCALL, UNTHINK, END, USER, 41, END]
    policy = tags.TurnPolicy(reasoning="drop", tool_call="evict_first")
    done = policy.close_turn(Recorder(), ids, stream_of(ids))
    assert (done.evict_first, done.drop) == ((), ((4, 9),))


SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)


@pytest.fixture(params=[kvtrie.RadixIndex, ModelIndex], ids=lambda kind: kind.__name__)
def index(request: pytest.FixtureRequest) -> Any:
    return request.param(num_blocks=256, block_size=BLOCK)


def conversation() -> tuple[list[int], list[int], tags.Stream]:
    vocabulary = Vocabulary()
    tagger = tags.Tagger.from_preset("qwen3", vocabulary)
    talk = [Said("system", "be brief " * 10), Said("user", "why is that so? " * 3)]
    answer = Said("assistant", "because it is " * 6, "let me think about that " * 8)
    pieces = QWEN3.render(talk) + QWEN3.asks(talk) + QWEN3.says(answer)
    cached, _ = vocabulary.pieces(pieces)
    talk += [answer, Said("user", "and this?")]
    prompt, _ = vocabulary.pieces(QWEN3.render(talk) + QWEN3.asks(talk))
    stream = tagger.stream()
    stream.feed(cached)
    stream.finish()
    return cached, prompt, stream


def inserted(index: Any, ids: list[int]) -> Any:
    seq = kvtrie.TokenSequence(ids, SPACE)
    blocks = np.arange(-(-len(ids) // BLOCK), dtype=np.int32)
    index.insert(seq, blocks, num_computed=len(ids), source=kvtrie.COMPUTED)
    return seq


def blocks_inside(ranges: tuple[tuple[int, int], ...], length: int) -> list[int]:
    return [
        block
        for block in range(length // BLOCK)
        if any(start <= block * BLOCK and (block + 1) * BLOCK <= end for start, end in ranges)
    ]


def test_dead_thinking_is_evicted_first(index: Any) -> None:
    """Prompt and answer stay cached without the reasoning between them (vLLM 39321)."""
    cached, prompt, stream = conversation()
    seq = inserted(index, cached)
    done = tags.TurnPolicy().close_turn(index, seq, stream)
    dead = blocks_inside(done.evict_first, len(cached))
    assert done.num_marked == len(dead) > 5
    assert sorted(index.evict(len(dead)).tolist()) == dead
    shared = next(at for at, (a, b) in enumerate(zip(cached, prompt, strict=False)) if a != b)
    found = index.lookup(kvtrie.TokenSequence(prompt, SPACE), touch=False)
    assert found.num_tokens == shared // BLOCK * BLOCK
    left = {span.kind for span in index.tags(seq)}
    assert left >= {"system", "user", "answer"}


def test_dropped_thinking_is_free_at_once(index: Any) -> None:
    cached, _, stream = conversation()
    seq = inserted(index, cached)
    done = tags.TurnPolicy(reasoning="drop").close_turn(index, seq, stream)
    assert done.freed.tolist() == blocks_inside(done.drop, len(cached))
    assert done.kept.tolist() == done.condemned.tolist() == []
    assert index.stats().indexed == len(cached) // BLOCK - len(done.freed)


def test_thinking_that_others_extend_is_kept(index: Any) -> None:
    cached, _, stream = conversation()
    seq = inserted(index, cached)
    other = kvtrie.TokenSequence([*cached[:-BLOCK], *range(9_000, 9_020)], SPACE)
    blocks = np.arange(100, 100 + -(-len(other) // BLOCK), dtype=np.int32)
    index.insert(other, blocks, num_computed=len(other), source=kvtrie.COMPUTED)
    policy = tags.TurnPolicy(reasoning="drop")
    done = policy.close_turn(index, seq, stream)
    assert done.freed.tolist() == []
    assert done.kept.tolist() == blocks_inside(done.drop, len(cached))
    forced = policy.close_turn(index, seq, stream, force=True)
    assert forced.freed.tolist() == done.kept.tolist()
