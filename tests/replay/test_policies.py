"""Every policy of a replay finds what a plain simulation finds, block by block."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.replay.traffic import Path_, bailian, mooncake, prefixes, simulated, write

import kvtrie
from kvtrie.replay import (
    OVERLAYS,
    Trace,
    TraceError,
    TraceRequest,
    chain_keys,
    default_sizes,
    from_keys,
    indexed,
    prefix,
    read_trace,
    replay,
)
from kvtrie.testing.model import ModelAllocator, ModelIndex, ModelSequence

if TYPE_CHECKING:
    from pathlib import Path

SPACE = kvtrie.Namespace(model="replay", salt=kvtrie.SHARED)
SIZES = (30, 40, 60, 100, 250)
NONE = np.empty(0, np.uint32)


@pytest.mark.parametrize("policy", ["lru", "optimum"])
@pytest.mark.parametrize("size", SIZES)
def test_1000_requests_are_found_as_block_by_block(policy: str, size: int, tmp_path: Path) -> None:
    rows = mooncake(seed=size)
    assert len(rows) >= 950
    trace = read_trace(write(tmp_path / "t.jsonl.gz", rows))
    (row,) = replay(trace, [size]).rows
    expected = simulated(rows, 64, size, policy)
    if policy == "lru":
        # On a trace without tokens, kvtrie's index finds the same, by itself.
        assert (row.prefix.exact, row.kvtrie.exact) == (expected, expected)
        assert row.kvtrie.approximate is None
        assert row.dead_first is None
    else:
        assert row.optimum.exact == expected
    prompts = sum(one["input_length"] for one in rows)
    assert row.prefix.computed == prompts - row.prefix.exact
    assert row.prefix.hit_rate == pytest.approx(row.prefix.exact / prompts)


def test_ids_of_content_become_chains(tmp_path: Path) -> None:
    rows = bailian(seed=1)
    trace = read_trace(write(tmp_path / "t.jsonl", rows))
    assert (trace.format, trace.block_size) == ("Qwen-Bailian", 16)
    for size in (20, 60):
        (row,) = replay(trace, [size]).rows
        assert row.prefix.exact == simulated(rows, 16, size, "lru")
        assert row.optimum.exact == simulated(rows, 16, size, "optimum")


def test_a_pool_for_all_is_without_limits(tmp_path: Path) -> None:
    rows = mooncake(seed=3, num=300)
    trace = read_trace(write(tmp_path / "t.jsonl", rows))
    report = replay(trace)
    sizes = default_sizes(trace)
    assert [row.num_blocks for row in report.rows] == list(sizes)
    assert len(sizes) == 10
    assert (sizes[0], sizes[-1]) == (len(trace.longest.cached), trace.num_ids)
    last = report.rows[-1]
    assert last.prefix == last.optimum == report.unlimited
    assert report.unlimited.exact == simulated(rows, 64, 10**9, "lru")
    exact = [row.prefix.exact for row in report.rows]
    best = [row.optimum.exact for row in report.rows]
    assert exact == sorted(exact)
    assert all(one <= other for one, other in zip(exact, best, strict=True))


# --- dead reasoning first ---------------------------------------------------------------------


def with_replies(seed: int, num: int = 1000) -> Trace:
    """Chats whose replies begin with blocks of reasoning, which most next prompts do not have."""
    rng = random.Random(seed)
    fresh = iter(range(1, 10**9))
    chats: list[list[int]] = [[]]
    requests, prompts, cached = [], [], []
    for number in range(num):
        if rng.random() < 0.2:
            chats.append([])
        chat = rng.choice(chats[-5:])
        chat += [next(fresh) for _ in range(rng.randrange(1, 3))]
        reply = [next(fresh) for _ in range(rng.randrange(2, 5))]
        prompt, whole = list(chat), [*chat, *reply]
        first = len(prompt) * 4
        # From the middle of a block to the middle of another.
        dead = ((first + rng.randrange(2), first + 9),)
        if rng.random() < 0.2:
            chat += reply
        if len(chat) > 12:
            chats.append([])
            chats.remove(chat)
        requests.append(TraceRequest(number + 1, first + 1, NONE, NONE, dead))
        # A sum of names stands for all ids before it: they are drawn once each.
        prompts.append(np.cumsum(np.array(prompt, dtype=np.uint64)))
        cached.append(np.cumsum(np.array(whole, dtype=np.uint64)))
    empty = Trace("t", "test", 4, (), 0, marks_reasoning=True)
    return from_keys(empty, requests, prompts, cached)


def dead_first(trace: Trace, num_blocks: int) -> int:
    """Tokens found, block by block; a block is evicted only if nothing below it is cached."""
    used: dict[Path_, int] = {}
    marks: dict[Path_, int] = {}
    tokens = 0
    for now, one in enumerate(trace.requests):
        path = prefixes(tuple(one.cached.tolist()))
        found = next((n for n, block in enumerate(path) if block not in used), len(path))
        tokens += min(found, one.findable(4)) * 4
        for block in path[:found]:
            used[block] = now
            marks.pop(block, None)
        for _ in range(len(path) - found - (num_blocks - len(used))):
            if marks:
                gone = min(marks, key=lambda block: (marks[block], -len(block)))
                del marks[gone]
            else:
                ends = [
                    a for a in used if not any(len(b) > len(a) and b[: len(a)] == a for b in used)
                ]
                gone = min(ends, key=lambda block: (used[block], -len(block)))
            del used[gone]
        for block in path:
            used[block] = now
            marks.pop(block, None)
        for start, end in one.dead:
            for depth, block in enumerate(path):
                below = [b for b in used if len(b) > len(block) and b[: len(block)] == block]
                if start <= depth * 4 and depth * 4 + 4 <= end and all(b in path for b in below):
                    marks[block] = now
    return tokens


@pytest.mark.parametrize("size", [18, 30, 60])
def test_dead_reasoning_first_is_found_as_block_by_block(size: int) -> None:
    trace = with_replies(seed=size)
    (row,) = replay(trace, [size]).rows
    assert row.dead_first is not None
    assert row.dead_first.exact == dead_first(trace, size)
    assert row.dead_first.exact != row.prefix.exact
    assert prefix.lru(trace, prefix.runs(trace), size) == row.prefix.exact


# --- moved runs -------------------------------------------------------------------------------


def with_tokens(seed: int, num: int = 1000) -> Trace:
    """Chats that append, or send their history back without some tokens in the middle."""
    rng = random.Random(seed)
    chats: list[list[int]] = []
    requests, prompts, cached = [], [], []
    for number in range(num):
        if not chats or rng.random() < 0.2:
            chats.append([])
        at = rng.randrange(max(0, len(chats) - 4), len(chats))
        chat = chats[at]
        if len(chat) > 30 and rng.random() < 0.6:
            begin = rng.randrange(4, len(chat) - 20)
            chat = chat[:begin] + chat[begin + rng.randrange(1, 9) :]
        chat = (chat + [rng.randrange(50) for _ in range(rng.randrange(1, 20))])[:96]
        prompt = np.array(chat, dtype=np.uint32)
        whole = np.append(prompt, np.array([rng.randrange(50) for _ in range(9)], np.uint32))
        chats[at] = whole.tolist()
        session = f"{at}" if seed % 2 else None
        tokens = lambda both=(prompt, whole): both  # noqa: E731 - bound at once
        requests.append(TraceRequest(number + 1, len(prompt), NONE, NONE, (), tokens, session))
        prompts.append(chain_keys(prompt, 8))
        cached.append(chain_keys(whole, 8))
    return from_keys(Trace("t", "test", 8, (), 0), requests, prompts, cached)


def planned_by_the_model(trace: Trace, num_blocks: int) -> tuple[int, int]:
    index, pool = ModelIndex(num_blocks, 8, min_run=8, seed=0), ModelAllocator(num_blocks)
    exact = approximate = without = 0
    for one in trace.requests:
        assert one.tokens is not None
        prompt, whole = one.tokens()
        scope = "conversation" if one.session else "namespace"
        policy = kvtrie.ReusePolicy(scope=scope)  # type: ignore[arg-type] # one of both
        plan = index.plan(ModelSequence(prompt, SPACE), policy, session=one.session)
        need = len(one.cached) - len(plan.blocks)
        try:
            fresh = pool.allocate(need, evict_from=index)
        except kvtrie.OutOfBlocksError:
            without += 1
            plan.release()
            policy = kvtrie.ReusePolicy(approximate=False, partial_blocks=False)
            plan = index.plan(ModelSequence(prompt, SPACE), policy, session=one.session)
            fresh = pool.allocate(len(one.cached) - len(plan.blocks), evict_from=index)
        done = index.insert(
            ModelSequence(whole, SPACE),
            fresh,
            num_computed=len(one.cached) * 8,
            start=len(plan.blocks) * 8,
            source=plan,
            session=one.session,
        )
        exact += plan.num_exact
        approximate += plan.num_approximate
        plan.release()
        for ids in (done.duplicates, done.surplus, done.freed, index.take_freed()):
            pool.free(ids)
    # None of these pools always has room for the sources and their copies.
    assert without > 0
    return exact, approximate


@pytest.mark.parametrize(("seed", "size"), [(0, 14), (1, 14), (1, 40)])
def test_kvtrie_finds_what_the_naive_model_finds(seed: int, size: int) -> None:
    trace = with_tokens(seed)
    found = indexed.planned(trace, size, min_run=8)
    assert found == planned_by_the_model(trace, size)
    assert found[1] > 0


def test_chain_keys_are_equal_iff_prefixes_are() -> None:
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, 3, size=24, dtype=np.uint32) for _ in range(400)]
    names: dict[int, tuple[int, ...]] = {}
    for text in texts:
        keys = chain_keys(text, 4).tolist()
        assert len(keys) == 6
        for number, key in enumerate(keys):
            prefix_ = tuple(text[: 4 * number + 4].tolist())
            assert names.setdefault(key, prefix_) == prefix_
    assert len(set(names.values())) == len(names)
    # Neither an order nor a shift is lost in the sum.
    one, other = (
        chain_keys(np.array(ids, np.uint32), 4)[0] for ids in ([1, 2, 0, 0], [2, 1, 0, 0])
    )
    assert one != other
    assert len(chain_keys(np.arange(3, dtype=np.uint32), 4)) == 0


# --- bad calls --------------------------------------------------------------------------------


def test_a_pool_smaller_than_a_request_names_its_line(tmp_path: Path) -> None:
    rows = mooncake(seed=3, num=50)
    trace = read_trace(write(tmp_path / "t.jsonl", rows))
    longest = trace.longest
    with pytest.raises(TraceError, match=rf"t\.jsonl, line {longest.line}: the request has "):
        replay(trace, [len(longest.cached) - 1])


def test_no_request_is_an_error() -> None:
    with pytest.raises(TraceError, match="t: there is no request"):
        replay(Trace("t", "test", 4, (), 0))


def test_prompts_without_a_full_block_find_nothing(tmp_path: Path) -> None:
    rows = [{"input_length": 9, "hash_ids": [n]} for n in range(3)]
    report = replay(read_trace(write(tmp_path / "t.jsonl", rows), 64))
    assert report.unlimited.hit_rate == 0
    assert {row.prefix.computed for row in report.rows} == {27}
    with pytest.raises(TraceError, match="no prompt has a full block"):
        OVERLAYS["W01"].over(read_trace(tmp_path / "t.jsonl", 64))


def test_planning_without_tokens_is_an_error(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", mooncake(seed=3, num=9)))
    with pytest.raises(TraceError, match=r"t\.jsonl, line 1: there are no tokens"):
        indexed.planned(trace, 40, min_run=16)
