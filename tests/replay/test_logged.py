"""Logs of the recorder: digests find what tokens find, but for the ends of moved runs."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvtrie import Span
from kvtrie.record import Finished, Recorder, RecordOptions
from kvtrie.replay import LogGaps, TraceError, read_trace, replay

if TYPE_CHECKING:
    from pathlib import Path

    from kvtrie.replay import TrafficReport

Turn = tuple[str, list[int], int]


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100_000) for _ in range(count)]


def traffic(seed: int, conversations: int = 6, turns: int = 5) -> list[Turn]:
    """Conversations whose reasoning is dropped after each turn: the reply after it moves."""
    rng = random.Random(seed)
    system = words(rng, 150)
    found: list[Turn] = []
    kept = {f"c{number}": list(system) for number in range(conversations)}
    for _ in range(turns):
        for name, history in kept.items():
            prompt = [*history, *words(rng, rng.randrange(20, 90))]
            reasoning, reply = words(rng, 70), words(rng, rng.randrange(40, 200))
            found.append((name, [*prompt, *reasoning, *reply], len(prompt)))
            kept[name] = [*prompt, *reply]
    return found


def record(path: Path, turns: list[Turn], **options: Any) -> None:
    given = {"path": str(path), **options}
    salts = given.pop("salts", {})
    spans = given.pop("spans", [()] * len(turns))
    names = given.pop("names", True)
    recorder = Recorder(RecordOptions(**given), block_size=16)
    for at, (name, tokens, num_prompt) in enumerate(turns):
        recorder.put(
            Finished(
                tokens=np.array(tokens, np.uint32),
                num_prompt=num_prompt,
                request_id=f"request-{at}",
                session=name if names else None,
                spans=spans[at],
                salt=salts.get(name),
                arrived=1000.0 + at,
                took=1.0,
                ended="stopped",
            )
        )
        assert recorder.flush()
    recorder.close()


def replayed(path: Path, turns: list[Turn], **options: Any) -> TrafficReport:
    record(path, turns, **options)
    trace = read_trace(path)
    assert (trace.format, trace.block_size) == ("kvtrie log", 16)
    assert trace.shows_tokens
    return replay(trace, [trace.num_ids + 200, 200])


@pytest.mark.parametrize("seed", range(5))
def test_digests_find_what_tokens_find(tmp_path: Path, seed: int) -> None:
    turns = traffic(seed)
    known = replayed(tmp_path / "tokens", turns, content="tokens")
    found = replayed(tmp_path / "digests", turns)
    assert found.unlimited == known.unlimited
    assert found.prompt_tokens == known.prompt_tokens
    assert found.distinct_tokens == known.distinct_tokens
    for ours, theirs in zip(found.rows, known.rows, strict=True):
        assert (ours.prefix, ours.optimum) == (theirs.prefix, theirs.optimum)
    mine, whole = found.rows[0].kvtrie, known.rows[0].kvtrie
    assert mine.approximate is not None
    assert whole.approximate is not None
    # At most one moved run for each turn of each conversation, of which a part is not seen.
    assert whole.approximate >= mine.approximate > 0
    runs = len(turns) * 5
    lost = whole.exact + whole.approximate - mine.exact - mine.approximate
    assert 0 <= lost <= runs * 32
    assert mine.approximate > whole.approximate / 2


@pytest.mark.parametrize("seed", range(5))
def test_equal_numbers_are_equal_tokens(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    # Blocks and runs repeat inside a prompt, and between prompts at all alignments.
    pieces = [words(rng, rng.randrange(10, 80)) for _ in range(6)]
    turns: list[Turn] = []
    for at in range(12):
        tokens = [token for piece in rng.choices(pieces, k=8) for token in piece]
        tokens += [7] * rng.randrange(0, 100)
        turns.append((f"c{at % 2}", tokens, len(tokens) - 5))
    record(tmp_path / "log", turns)
    trace = read_trace(tmp_path / "log")
    known: dict[int, int] = {}
    by_block: dict[tuple[int, ...], list[int]] = {}
    for (_, tokens, num_prompt), one in zip(turns, trace.requests, strict=True):
        assert one.tokens is not None
        prompt, cached = one.tokens()
        assert len(prompt) == num_prompt == one.num_tokens
        assert len(cached) == len(tokens) - 1
        assert prompt.tolist() == cached[:num_prompt].tolist()
        for number, token in zip(cached.tolist(), tokens, strict=False):
            assert known.setdefault(number, token) == token
        for at in range(len(cached) // 16):
            block = slice(16 * at, 16 * at + 16)
            numbers = cached[block].tolist()
            assert by_block.setdefault(tuple(tokens[block]), numbers) == numbers


@pytest.mark.parametrize("content", ["digests", "tokens"])
def test_tenants_share_nothing(tmp_path: Path, content: str) -> None:
    turns = [turn for turn in traffic(1) if turn[0] in ("c0", "c1")]
    same = replayed(tmp_path / "same", turns, content=content)
    apart = replayed(tmp_path / "apart", turns, content=content, salts={"c1": "another"})
    # The system prompt of 150 tokens, once more.
    assert same.unlimited.exact - apart.unlimited.exact == 144


def test_requests_are_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    turns = traffic(2, conversations=1)
    record(tmp_path / "log", turns)
    lines = (tmp_path / "log").read_bytes().splitlines(keepends=True)
    before = replay(read_trace(tmp_path / "log"), [500])
    (tmp_path / "log").write_bytes(b"".join([lines[0], *reversed(lines[1:])]))
    trace = read_trace(tmp_path / "log")
    assert [one.arrived for one in trace.requests] == [1000.0 + at for at in range(len(turns))]
    after = replay(trace, [500])
    assert before.rows == after.rows


def test_a_log_that_is_cut_or_wrong(tmp_path: Path) -> None:
    path = tmp_path / "log"
    turns = traffic(3, conversations=2)
    record(path, turns)
    data = path.read_bytes()
    path.write_bytes(data[:-9])
    assert len(read_trace(path).requests) == len(turns) - 1
    with pytest.raises(TraceError, match="line 1: the log has blocks of 16 tokens, not 64"):
        read_trace(path, 64)
    lines = data.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"{}\n", *lines[2:]]))
    with pytest.raises(TraceError, match=f"{path}, line 3: the line is not a record"):
        read_trace(path)
    path.write_bytes(data.replace(b'"kvtrie_log":1', b'"kvtrie_log":2', 1))
    with pytest.raises(TraceError, match=f"{path}, line 1: the log is of version 2"):
        read_trace(path)
    path.write_bytes(lines[0])
    with pytest.raises(TraceError, match="the log has no whole request"):
        read_trace(path)


# --- where a request is -----------------------------------------------------------------------


def test_an_error_names_the_line_in_the_file_and_not_the_order_of_arrival(tmp_path: Path) -> None:
    """The longest request is the last that arrives, and the first line of the older file."""
    path = tmp_path / "log"
    turns = traffic(2, conversations=1)
    record(path, turns)
    header, *lines = path.read_bytes().splitlines(keepends=True)
    (tmp_path / "log.1").write_bytes(b"".join([header, *reversed(lines[-2:])]))
    path.write_bytes(b"".join([header, *lines[:-2]]))
    trace = read_trace(path)
    found = [(one.file, one.line) for one in trace.requests]
    expected = [(str(path), line) for line in (2, 3, 4)]
    assert found == [*expected, (f"{path}.1", 3), (f"{path}.1", 2)]
    with pytest.raises(TraceError, match=rf"^{path}\.1, line 2: the request has "):
        replay(trace, [5])


# --- reasoning --------------------------------------------------------------------------------


def spans_of(turns: list[Turn]) -> list[tuple[Span, ...]]:
    """As `traffic` makes it: prompts end with the user's tokens, replies begin with reasoning."""
    return [
        (
            Span(num_prompt - 20, num_prompt, "user"),
            Span(num_prompt, num_prompt + 70, "reasoning"),
            Span(num_prompt + 70, len(tokens), "answer"),
        )
        for _, tokens, num_prompt in turns
    ]


def with_users(turns: list[Turn]) -> list[tuple[Span, ...]]:
    """The spans of earlier user messages as well, which show that a user has spoken again."""
    seen: dict[str, list[Span]] = {}
    found = []
    for (name, _, _), spans in zip(turns, spans_of(turns), strict=True):
        users = seen.setdefault(name, [])
        users.append(spans[0])
        found.append((*users, *spans[1:]))
    return found


@pytest.mark.parametrize("names", [True, False], ids=["sessions", "no sessions"])
@pytest.mark.parametrize("content", ["digests", "tokens"])
def test_reasoning_that_prompts_drop_is_evicted_first(
    tmp_path: Path, content: str, names: bool
) -> None:
    turns = traffic(1)
    options = {"content": content, "names": names, "spans": with_users(turns)}
    record(tmp_path / "log", turns, **options)
    trace = read_trace(tmp_path / "log")
    assert trace.marks_reasoning
    for (_, _, num_prompt), one in zip(turns, trace.requests, strict=True):
        assert one.dead == ((num_prompt, num_prompt + 70),)
    said = "reasoning is dropped when its turn is finished: 24 of 24 prompts that continue"
    assert trace.reasoning.startswith(said)
    # The system prompt and six conversations; their reasoning does not fit as well.
    (row,) = replay(trace, [150]).rows
    assert row.dead_first is not None
    assert row.dead_first.exact > row.prefix.exact


@pytest.mark.parametrize("content", ["digests", "tokens"])
def test_reasoning_that_stays_is_not_dead(tmp_path: Path, content: str) -> None:
    rng = random.Random(3)
    history = words(rng, 100)
    turns, spans, known = [], [], []
    for _ in range(4):
        at = len(history)
        known.append(Span(at, at + 30, "user"))
        prompt = [*history, *words(rng, 30)]
        known.append(Span(len(prompt), len(prompt) + 40, "reasoning"))
        history = [*prompt, *words(rng, 90)]
        turns.append(("c", history, len(prompt)))
        spans.append(tuple(known))
    record(tmp_path / "log", turns, content=content, spans=spans)
    trace = read_trace(tmp_path / "log")
    assert trace.marks_reasoning
    assert not any(one.dead for one in trace.requests)
    said = "reasoning stays in the history: 0 of 3 prompts that continue a finished turn are "
    assert trace.reasoning.startswith(said)
    (row,) = replay(trace, [60]).rows
    assert row.dead_first == row.prefix


def test_the_reasoning_of_a_tool_loop_dies_with_its_turn(tmp_path: Path) -> None:
    rng = random.Random(4)
    system, asked, reasoned, called, result, again, said, more = (words(rng, 40) for _ in range(8))
    first = [*system, *asked, *reasoned, *called]
    second = [*first, *result, *again, *said]
    third = [*system, *asked, *called, *result, *said, *more, *words(rng, 20)]
    user = Span(40, 80, "user")
    loop = (user, Span(80, 120, "reasoning"), Span(120, 160, "tool_call"))
    spans = [
        loop,
        (*loop, Span(160, 200, "tool_result"), Span(200, 240, "reasoning")),
        (user, Span(200, 240, "user")),
    ]
    turns = [("c", first, 80), ("c", second, 200), ("c", third, 240)]
    record(tmp_path / "log", turns, spans=spans)
    dead = [one.dead for one in read_trace(tmp_path / "log").requests]
    assert dead == [(), ((80, 120), (200, 240)), ()]


def test_what_becomes_of_reasoning_may_not_be_shown(tmp_path: Path) -> None:
    turns = traffic(1, turns=1)
    record(tmp_path / "log", turns, spans=spans_of(turns))
    trace = read_trace(tmp_path / "log")
    assert not trace.marks_reasoning
    said = "the log marks reasoning, but no prompt in it continues a finished turn that had some"
    assert trace.reasoning.startswith(said)


# --- what a log does not have -----------------------------------------------------------------


def test_logs_of_two_processes_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    turns = traffic(1, conversations=2)
    record(path, turns[:5])
    path.rename(tmp_path / "log.1")
    record(path, turns[5:])
    assert read_trace(path).gaps == LogGaps(recorders=2)
