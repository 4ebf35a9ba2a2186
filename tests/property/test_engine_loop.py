"""The loop of an engine, with an abort at every line: no block is lost, and exact KV is exact."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.property.fake_engine import Engine, Request, Traffic, WrongKVError

import kvtrie
from kvtrie import EXACT_ONLY, ReusePolicy
from kvtrie.testing import strategies as kv

ANY = ReusePolicy(scope="namespace")
HISTORY = (1, 2, 3, 4, 5, 6, 7, 8)
LONG = tuple(range(10, 40))
LINES = 120


def prompt(*ids: int) -> kv.Prompt:
    return kv.Prompt(ids, kv.NAMESPACES[0])


def run_until(request: Request, line: int) -> str | None:
    for number, name in enumerate(request.lines()):
        request.engine.verify()
        if number == line:
            return name
    return None


def run_whole(engine: Engine, prompt: kv.Prompt, answer: list[int], policy: Any) -> Request:
    request = Request(engine, prompt, answer, policy)
    assert run_until(request, LINES) is None
    request.finish()
    engine.verify()
    return request


@pytest.mark.parametrize("policy", [EXACT_ONLY, ANY], ids=["exact", "approximate"])
@pytest.mark.parametrize("second", ["alone", "next to another"])
@pytest.mark.parametrize("num_blocks", [4, 6, 12])
def test_engine_loop_abort_at_every_line(
    num_blocks: int, second: str, policy: kvtrie.ReusePolicy
) -> None:
    seen = set()
    for line in range(LINES):
        engine = Engine(num_blocks, 3)
        run_whole(engine, prompt(*HISTORY), [9, 9, 9], policy)
        other = None
        if second == "next to another":
            other = Request(engine, prompt(*HISTORY[:5], 9), [1, 2], policy)
            run_until(other, 12)
        request = Request(engine, prompt(*HISTORY[:7], 11, 12), [1, 2, 3, 4], policy)
        name = run_until(request, line)
        seen.add(name)
        request.finish()
        engine.verify()
        if other is not None:
            other.finish()
        engine.drain()
        if name is None:
            break
    else:
        pytest.fail(f"the loop has more than {LINES} lines")
    assert {"plan", "allocate", "table", "apply", "compute", "computed"} <= seen or num_blocks == 4


@pytest.mark.parametrize("recompute", [0, 2])
@pytest.mark.parametrize("next_one", ["again", "moved again", "exact"])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_engine_loop_moved_runs_abort_at_every_line(
    block_size: int, next_one: str, recompute: int
) -> None:
    """Reasoning is deleted and a document moved; then another request uses what was left."""
    policy = ReusePolicy(scope="namespace", max_hops=2, recompute_first=recompute)
    # Two pieces, moved by -4 and by +10, with gaps before, between and after them.
    edited = prompt(*LONG[:5], 1, *LONG[9:21], 2, 3, *LONG[:10], 4)
    for line in range(LINES):
        engine = Engine(96, block_size)
        run_whole(engine, prompt(*LONG), [], EXACT_ONLY)
        request = Request(engine, edited, [7] * 5, policy)
        name = run_until(request, line)
        if name not in {"begin", "plan"} and request.table is not None:
            classes = request.plan.segments["class"].tolist()
            assert classes.count(1) == 2
        request.finish()
        engine.verify()
        following = {
            "again": (edited, policy),
            "moved again": (prompt(3, *edited.ids), policy),
            "exact": (edited, EXACT_ONLY),
        }[next_one]
        run_whole(engine, following[0], [8] * 4, following[1])
        engine.drain()
        if name is None:
            return
    pytest.fail(f"the loop has more than {LINES} lines")


def test_engine_loop_out_of_blocks_evicts_nothing() -> None:
    engine = Engine(3, 2)
    first = Request(engine, prompt(1, 2, 3, 4), [])
    run_until(first, LINES)
    second = Request(engine, prompt(5, 6, 7, 8), [])
    assert run_until(second, LINES) is None
    assert second.table is None
    assert engine.index.lookup(first.seq, touch=False).num_tokens == 4
    second.finish()
    first.finish()
    engine.drain()


def test_engine_loop_reuses_what_it_computed() -> None:
    engine = Engine(16, 4)
    turns = [prompt(*range(10)), prompt(*range(10), 1, 2, 3), prompt(*range(10), 1, 2, 9, 9)]
    # Whole blocks are inserted: 8 tokens, then 12; the last prompt shares all of these 12.
    assert [run_whole(engine, turn, [], EXACT_ONLY).reused for turn in turns] == [0, 8, 12]
    engine.drain()


def test_engine_loop_reuses_what_moved() -> None:
    engine = Engine(32, 4)
    run_whole(engine, prompt(*LONG), [], EXACT_ONLY)
    # 28 of its tokens are cached; of these, all but 5 to 8 are asked for.
    request = run_whole(engine, prompt(*LONG[:5], *LONG[9:], 1), [], ANY)
    assert request.reused == 5 + 19
    engine.drain()


class SaysComputed(Request):
    """An engine that claims to have computed everything from scratch."""

    def source(self) -> Any:
        return kvtrie.COMPUTED


@pytest.mark.parametrize("request_class", [Request, SaysComputed])
def test_engine_loop_notices_poisoned_kv(request_class: type[Request]) -> None:
    engine = Engine(64, 4)
    run_whole(engine, prompt(*LONG), [], EXACT_ONLY)
    request = request_class(engine, prompt(1, *LONG, 2, 3), [], ANY)
    try:
        if request_class is Request:
            run_until(request, LINES)
        else:
            with pytest.raises(WrongKVError, match="exact match answers"):
                run_until(request, LINES)
    finally:
        request.finish()


def traffic(seed: int) -> Engine:
    rng = Random(seed)
    family = [prompt(*(rng.randrange(4) for _ in range(40)))]
    for _ in range(8):
        ids = list(rng.choice(family).ids)
        at, end = sorted(rng.randint(0, len(ids)) for _ in range(2))
        part = ids[at : min(end, at + 12)]
        del ids[at : at + len(part)]
        if rng.random() < 0.5:
            to = rng.randint(0, len(ids))
            ids[to:to] = part
        ids += [rng.randrange(4) for _ in range(rng.randint(0, 4))]
        family.append(prompt(*ids[:48]))
    engine = Engine(rng.choice([24, 40, 64]), rng.choice([1, 2, 3, 4, 5]))
    Traffic(rng, engine, family).run(60)
    return engine


def test_engine_loop_traffic_with_moved_runs() -> None:
    met: Counter[str] = Counter()
    for seed in range(80):
        try:
            met += traffic(seed).counts
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
    assert met["plans"] > 300
    for what in ("moved runs", "approximate in place", "more than one hop", "exact after a gap"):
        assert met[f"plans, {what}"] > 3, (what, met)


@given(
    rng=st.randoms(use_true_random=False),
    num_blocks=st.integers(2, 64),
    block_size=st.integers(1, 5),
    family=kv.families(max_prompts=6, max_tokens=40, alphabet=2),
    hash_bits=st.sampled_from([0, 4, 64]),
    moved_runs=st.booleans(),
    steps=st.integers(1, 30),
)
def test_engine_loop_many_requests(
    rng: Random,
    num_blocks: int,
    block_size: int,
    family: list[kv.Prompt],
    hash_bits: int,
    moved_runs: bool,
    steps: int,
) -> None:
    engine = Engine(num_blocks, block_size, hash_bits, moved_runs)
    Traffic(rng, engine, family).run(steps)
