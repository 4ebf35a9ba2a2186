"""The real scheduler and model runner give the same replies with kvtrie's cache as with SGLang's.

SGLang's strict check of its pool is on in all of them: it ends the engine after a step that loses a
slot, or has one twice.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tests.sglang.engine import Job, Outcome, run
from tests.sglang.processes import process
from tests.vllm import models

# Of ten conversations each.
TURNS = int(os.environ.get("KVTRIE_SGLANG_TURNS", "8"))


REAL = Path("target/models/smollm2-135m-instruct")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = models.llama(tmp_path_factory.mktemp("models") / "llama")
    return str(folder)


@cache
def undisturbed(model: str, turns: int = TURNS) -> Outcome:
    """SGLang's cache with room for all: a reply does not depend on what is cached, or when."""
    return run(Job(model, backend=None, num_slots=40_000, turns=turns))


def balanced(found: Outcome) -> None:
    """Every slot is free, or cached and held by nobody."""
    assert found.protected == 0
    assert found.free + found.evictable == found.size


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_replies_and_hits_are_those_of_the_cache_of_sglang(model: str, page_size: int) -> None:
    job = Job(model, page_size=page_size, num_slots=1600, turns=TURNS, retract=True)
    mine = run(job)
    theirs = run(replace(job, backend="paged"))
    assert (mine.cache, theirs.cache) == ("KvtrieCache", "Paged")
    assert mine.tokens == theirs.tokens == undisturbed(model).tokens
    assert mine.cached == theirs.cached
    assert mine.evicted == theirs.evicted
    balanced(mine)
    assert not mine.counts
    # The pool was short, and each of these was met.
    assert sum(mine.cached) > 20 * page_size
    assert min(mine.evicted, mine.chunked, mine.retracted, mine.aborted) > 2


def test_events_are_those_of_the_cache_of_sglang(model: str) -> None:
    # Nobody listens.
    events = {"kv_events_config": '{"publisher": "zmq", "endpoint": "inproc://events"}'}
    job = Job(model, page_size=16, num_slots=1600, turns=TURNS, retract=True, overrides=events)
    mine = run(job)
    assert not mine.counts
    assert {name for name, _ in mine.events} >= {"BlockStored", "BlockRemoved"}
    assert mine.events == run(replace(job, backend="paged")).events


def test_room_for_all(model: str) -> None:
    """Next to the cache that SGLang takes by itself, which is another one than `RadixCache`."""
    job = Job(model, num_slots=40_000, turns=TURNS)
    mine = run(job)
    theirs = undisturbed(model)
    assert (mine.cache, theirs.cache) == ("KvtrieCache", "UnifiedRadixCache")
    assert (mine.tokens, mine.cached) == (theirs.tokens, theirs.cached)
    assert sum(mine.cached) > 1000
    balanced(mine)


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_orders_by_what_is_cached(model: str, policy: str) -> None:
    found = run(Job(model, page_size=16, num_slots=1600, turns=TURNS, policy=policy))
    assert found.tokens == undisturbed(model).tokens
    assert sum(found.cached) > 300
    assert not found.counts
    balanced(found)


@pytest.mark.parametrize(
    ("name", "counted"),
    [
        ("plan", "checkpoint"),
        ("match", "match_prefix"),
        ("pin", "inc_lock_ref"),
        ("insert", "checkpoint"),
        ("take_freed", "dec_lock_ref"),
    ],
)
def test_calls_of_the_index_that_fail(model: str, name: str, counted: str) -> None:
    """The server lives, the replies are right, and no slot is lost."""
    metrics = {"enable_metrics": True}
    found = run(
        Job(model, page_size=4, num_slots=1600, turns=TURNS, fail={name: 7}, overrides=metrics)
    )
    assert found.raised[name] > 5
    assert found.counts[counted] > 2
    assert found.metrics == found.counts
    assert found.tokens == undisturbed(model).tokens
    balanced(found)


@pytest.mark.skipif(not REAL.is_dir(), reason="SmolLM2-135M-Instruct is not there: `make models`")
def test_a_real_model() -> None:
    tokenizer = {"skip_tokenizer_init": False}
    job = Job(
        str(REAL.resolve()), page_size=16, num_slots=4096, talks=3, turns=3, overrides=tokenizer
    )
    mine = run(job)
    theirs = run(replace(job, backend=None))
    assert (mine.cache, theirs.cache) == ("KvtrieCache", "UnifiedRadixCache")
    assert (mine.tokens, mine.cached) == (theirs.tokens, theirs.cached)
    assert sum(mine.cached) > 100
    balanced(mine)


def test_a_server_that_asks_for_what_is_refused_says_so(model: str) -> None:
    why = "--radix-cache-backend kvtrie: radix_eviction_policy='lfu' is not supported"
    with pytest.raises(RuntimeError, match=why):
        run(Job(model, overrides={"radix_eviction_policy": "lfu"}))


def test_the_whole_of_sglang(model: str) -> None:
    """Its three processes, which prepare a step while the one before runs."""
    mine, theirs = (process("tests.sglang.whole", model, one) for one in ("kvtrie", ""))
    assert mine["rounds"] == theirs["rounds"]
    assert mine["overlap"]
    assert mine["cached"] >= theirs["cached"] > 1000
