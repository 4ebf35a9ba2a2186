"""Logs of the recorder: digests find what tokens find, but for the ends of moved runs."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvtrie.record import Finished, Recorder, RecordOptions
from kvtrie.replay import TraceError, read_trace, replay

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
    recorder = Recorder(RecordOptions(**given), block_size=16)
    for at, (name, tokens, num_prompt) in enumerate(turns):
        recorder.put(
            Finished(
                tokens=np.array(tokens, np.uint32),
                num_prompt=num_prompt,
                request_id=f"request-{at}",
                session=name,
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
    after = replay(read_trace(tmp_path / "log"), [500])
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
