"""Exact mode: nothing approximate is made or run; what is needed again stays longer."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.vllm_scheduler.core import Answer
from tests.vllm_scheduler.worker import BLOCK, VOCAB, Worker, continuation
from vllm import SamplingParams
from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaAttentionBackendEnum,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.request import Request, RequestStatus

from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations.vllm import _gate, _lineage, _retention, _settings
from kvtrie.integrations.vllm._version import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm_scheduler.core import Core

USER, ASSISTANT, SYSTEM, TOOL, THINK, STOP, CALL, DONE, END = range(3, 12)
FORMAT = {
    "system": SYSTEM,
    "user": USER,
    "assistant": ASSISTANT,
    "tool": TOOL,
    "reasoning": [THINK, STOP],
    "tool_call": [CALL, DONE],
    "end": END,
}
EXACT: dict[str, Any] = {"mode": "exact", "chat_format": FORMAT}

SMALL: dict[str, Any] = {
    "max_num_batched_tokens": 128,
    "max_num_seqs": 2,
    "max_model_len": 800,
}


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(16, VOCAB), k=count)


def message(role: int, count: int, seed: int) -> list[int]:
    return [role, *words(count, seed), END]


HEAD = message(SYSTEM, 62, 0)
QUESTION = message(USER, 40, 1)
REASONING = [THINK, *words(158, 2), STOP]
ANSWER = [*words(94, 3), END]
TOOL_CALL = [CALL, *words(10, 4), DONE, END]
CLOSED = [*HEAD, *QUESTION, ASSISTANT, *REASONING, *ANSWER]
LOOPING = [*HEAD, *QUESTION, ASSISTANT, *REASONING, *TOOL_CALL]


def end(
    core: Core, tokens: list[int], params: dict[str, Any] | None = None, **more: Any
) -> list[int]:
    """Serve a request whose last token is generated; returns its blocks."""
    *prompt, last = tokens
    core._number += 1
    extra = {"kv_transfer_params": params or {}}
    sampling = SamplingParams(max_tokens=4, stop_token_ids=[last], extra_args=extra)
    hasher = core.core.request_block_hasher
    name = f"request-{core._number}"
    request = Request(name, prompt, sampling, None, block_hasher=hasher, **more)
    worker: Any = core.worker
    say = worker._forward

    def ends(row: Any, count: int, drafted: Any) -> list[int]:
        said: list[int] = say(row, count, drafted)
        if said and row.num_prompt == len(prompt):
            row.tokens[-1] = last
            return [last]
        return said

    worker._forward = ends
    tables: list[int] = []
    finish = core.connector.planner.finish

    def watching(one: Any, given: Any) -> None:
        if one is request:
            tables.extend(given[core.connector.planner._first])
        finish(one, given)

    core.connector.planner.finish = watching
    core.answers[name] = Answer()
    core.core.add_request(request)
    core.drain()
    worker._forward = say
    core.connector.planner.finish = finish
    assert request.status == RequestStatus.FINISHED_STOPPED
    core.connector.planner.half.dead.settle()
    return tables


def order(core: Core) -> list[int]:
    return [block.block_id for block in core.pool.free_block_queue.get_all_free_blocks()]


def group_of_others(core: Core) -> int:
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    return next(at for at, one in enumerate(groups) if "layers.0" in one.layer_names)


def places_of_others(core: Core, hashes: list[Any]) -> dict[int, int]:
    """The place of each cached block of the group of the other layers, by its number."""
    group = group_of_others(core)
    found = ((at, core.pool.get_cached_block(one, [group]) or ()) for at, one in enumerate(hashes))
    return {block.block_id: place for place, blocks in found for block in blocks}


def hashes_of(core: Core, tokens: list[int]) -> list[Any]:
    hasher = core.core.request_block_hasher
    request = Request("hashes", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)
    return list(resolve_block_hashes(request.block_hashes, core.pool.hash_block_size, BLOCK))


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def exact(core: Callable[..., Core], request: pytest.FixtureRequest) -> Core:
    return core(connector=EXACT, in_flight=request.param)


def test_no_part_of_moving_is_made_or_run(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a part of moving runs in exact mode")

    for owner, name in (
        (_gate, "read"),
        (_lineage, "start"),
        (_lineage, "join"),
    ):
        monkeypatch.setattr(owner, name, never)
    monkeypatch.setattr("kvtrie.integrations.vllm.connector.Planner", never)
    vllm = core(connector=EXACT)
    end(vllm, CLOSED)
    following = [*HEAD, *QUESTION, ASSISTANT, *ANSWER, *message(USER, 40, 9), ASSISTANT]
    # The exact part of the block in which reasoning began is copied, no more.
    same = len(HEAD) + len(QUESTION) + 1
    assert vllm.ask(following) == continuation(following, 8)
    assert vllm.counts["tokens_exact"] == same % BLOCK
    assert vllm.counts["tokens_moved"] == vllm.counts["errors"] == 0
    assert vllm.worker.num_moved == 0
    vllm.check_idle()


def test_what_follows_dead_reasoning_is_evicted_with_it(exact: Core) -> None:
    table = end(exact, CLOSED)
    first = -(-(len(HEAD) + len(QUESTION) + 1) // BLOCK)
    dead = table[first : (len(CLOSED) - 1) // BLOCK]
    assert len(dead) > 10
    assert sorted(order(exact)[: len(dead)]) == sorted(dead)
    assert exact.counts["blocks_dead"] == len(dead)


def test_live_reasoning_is_never_evicted_first(exact: Core) -> None:
    table = end(exact, LOOPING)
    assert exact.counts["blocks_dead"] == 0
    written = table[: (len(LOOPING) - 1) // BLOCK]
    free = order(exact)
    assert min(free.index(one) for one in written) >= len(free) - len(written) - 1


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_quantised_kv_is_ordered_and_not_copied(core: Callable[..., Core], dtype: str) -> None:
    vllm = core(connector=EXACT, blocks=128, kv_cache_dtype=dtype, **SMALL)
    table = end(vllm, CLOSED)
    first = -(-(len(HEAD) + len(QUESTION) + 1) // BLOCK)
    dead = table[first : (len(CLOSED) - 1) // BLOCK]
    assert sorted(order(vllm)[: len(dead)]) == sorted(dead)
    assert vllm.counts["blocks_dead"] == len(dead)
    following = [*HEAD, *QUESTION, ASSISTANT, *ANSWER, *message(USER, 40, 9), ASSISTANT]
    # What the connector of floats copies of vLLM's last block is computed.
    whole = (len(HEAD) + len(QUESTION) + 1) // BLOCK * BLOCK
    assert vllm.computed_for(following) == len(following) - whole
    end(vllm, LOOPING)
    fill(vllm, 400, 1)
    later = [*LOOPING, *message(TOOL, 40, 8), ASSISTANT]
    assert len(later) - vllm.computed_for(later) >= len(LOOPING) - BLOCK
    assert vllm.worker.num_copied == vllm.worker.num_moved == 0
    assert vllm.counts["errors"] == 0
    vllm.check_idle()


def fill(core: Core, num_blocks: int, seed: int) -> None:
    """Other requests take this many blocks."""
    for at in range(num_blocks // 8):
        core.ask(words(8 * BLOCK - 1, 1000 * seed + at), max_tokens=1)


@pytest.mark.parametrize("mode", ["exact", "vLLM"])
def test_a_tool_loop_outlives_other_requests(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    vllm = core(connector=EXACT, blocks=128, **SMALL)
    if mode == "vLLM":
        monkeypatch.setattr(vllm.connector.planner._retention, "look", lambda: None)
    end(vllm, LOOPING)
    fill(vllm, 400, 1)
    following = [*LOOPING, *message(TOOL, 40, 8), ASSISTANT]
    found = len(following) - vllm.computed_for(following)
    assert found >= len(LOOPING) - BLOCK if mode == "exact" else found == 0
    vllm.check_idle()


def test_a_tool_loop_that_never_goes_on_leaves(core: Callable[..., Core]) -> None:
    vllm = core(connector=EXACT, blocks=64, **SMALL)
    table = end(vllm, LOOPING)
    passes = vllm.connector.planner._retention._passes
    before = int(passes[table].sum())
    fill(vllm, 64 * 4, 1)
    assert int(passes[table].sum()) < before
    passes[table] = 1
    fill(vllm, 64 * 4, 2)
    assert vllm.computed_for(LOOPING) == len(LOOPING)


def hit_head(vllm: Core) -> list[int]:
    """The blocks of `HEAD`, with which two conversations have begun."""
    end(vllm, CLOSED)
    return end(vllm, [*HEAD, *message(USER, 40, 9), ASSISTANT, *ANSWER])[: len(HEAD) // BLOCK]


@pytest.mark.parametrize("mode", ["vLLM", "exact"])
def test_a_system_prompt_that_others_hit_outlives_other_requests(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    vllm = core(connector=EXACT, blocks=128, **SMALL)
    if mode == "vLLM":
        monkeypatch.setattr(vllm.connector.planner._retention, "look", lambda: None)
    hit_head(vllm)
    fill(vllm, 400, 1)
    following = [*HEAD, *message(USER, 40, 8), ASSISTANT]
    found = len(following) - vllm.computed_for(following)
    assert found == (len(HEAD) if mode == "exact" else 0)
    vllm.check_idle()


def test_a_system_prompt_outlives_a_tool_loop_that_stopped(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_retention, "PASSES", 2)
    monkeypatch.setattr(_retention, "HEADS", 6)
    vllm = core(connector=EXACT, blocks=128, **SMALL)
    head = hit_head(vllm)
    loop = end(vllm, LOOPING)
    passes = vllm.connector.planner._retention._passes
    assert set(passes[head]) == {6}
    assert set(passes[loop[len(head) : -1]]) == {2}
    fill(vllm, 128 * 4, 1)
    following = [*LOOPING, *message(TOOL, 40, 8), ASSISTANT]
    assert vllm.computed_for(following) == len(following) - len(HEAD)


def test_the_last_request_leaves_the_system_prompt_that_others_hit(exact: Core) -> None:
    head = hit_head(exact)
    tokens = [*HEAD, *message(USER, 40, 10), ASSISTANT, *words(60, 12), END]
    table = end(exact, tokens, {"last": True})
    assert table[: len(head)] == head
    left = table[len(head) : (len(tokens) - 1) // BLOCK]
    assert set(order(exact)[: len(left)]) == set(left)
    assert set(exact.connector.planner._retention._passes[head]) == {_retention.HEADS}


def test_there_is_always_room_for_what_has_no_passes(core: Callable[..., Core]) -> None:
    vllm = core(connector=EXACT, blocks=100, **SMALL | {"max_model_len": 1500})
    retention = vllm.connector.planner._retention
    for seed in range(12):
        tokens = [*HEAD, *message(USER, 200, seed), ASSISTANT, *REASONING, *TOOL_CALL]
        end(vllm, tokens)
        assert (retention._passes > 0).sum() <= _retention.KEPT * 100
    # A request that needs nearly all of the pool is served.
    long = words(90 * BLOCK, 77)
    assert vllm.ask(long) == continuation(long, 8)
    vllm.check_idle()


def test_a_conversation_that_leaves_its_path_gives_its_room_back(core: Callable[..., Core]) -> None:
    vllm = core(connector=EXACT)
    passes = vllm.connector.planner._retention._passes
    old = end(vllm, LOOPING, session_id="one")
    assert passes[old[:-1]].all()
    helper = [*message(SYSTEM, 62, 5), *QUESTION, ASSISTANT, *REASONING, *TOOL_CALL]
    end(vllm, helper, session_id="one")
    assert passes[old[:-1]].all(), "a helper with another prompt takes nothing"
    old = end(vllm, LOOPING, session_id="two")
    new = end(vllm, [*HEAD, *QUESTION, ASSISTANT, *ANSWER], session_id="two")
    common = [one for one in old if one in new]
    assert not passes[[one for one in old if one not in common]].any()


@pytest.mark.parametrize("is_last", [False, True], ids=["turn", "last"])
def test_a_turn_that_ends_leaves_a_loop_with_the_same_beginning_whole(
    core: Callable[..., Core], is_last: bool
) -> None:
    """Of the loop what both began with was evicted, so that nothing of the rest was found."""
    vllm = core(connector=EXACT, blocks=160, **SMALL)
    passes = vllm.connector.planner._retention._passes
    both = [*HEAD, *QUESTION, *message(TOOL, 60, 30)]
    loop = [*both, ASSISTANT, *REASONING, *TOOL_CALL]
    table = end(vllm, loop, session_id="one")[: (len(loop) - 1) // BLOCK]
    given = passes[table].tolist()
    assert all(given)
    end(vllm, [*both, ASSISTANT, *words(60, 31), END], {"last": is_last}, session_id="two")
    assert (passes[table] >= given).all()
    fill(vllm, 300, 1)
    following = [*loop, *message(TOOL, 40, 8), ASSISTANT]
    assert len(following) - vllm.computed_for(following) >= len(loop) - BLOCK
    # When its turn ends as well, or it leaves this path, nothing needs the beginning any more.
    following = [*loop, *message(TOOL, 40, 8)] if is_last else both
    end(vllm, [*following, ASSISTANT, *ANSWER], session_id="one")
    assert not passes[table[len(HEAD) // BLOCK :]].any()
    vllm.check_idle()


@pytest.mark.parametrize("how", ["parameter", "hint"])
def test_the_last_request_of_a_conversation_leaves_first(exact: Core, how: str) -> None:
    hint = KvHintAction(action_id="1", action_type="kvtrie.last", action_version="1", payload={})
    hints = KvHintsEnvelope(protocol_version="1", message_id="1", actions=[hint])
    tokens = [*HEAD, *QUESTION, ASSISTANT, *ANSWER]
    if how == "parameter":
        table = end(exact, tokens, {"last": True})
    else:
        table = end(exact, tokens, kv_hints=hints)
    written = table[: (len(tokens) - 1) // BLOCK]
    assert set(order(exact)[: len(written)]) == set(written)


def test_bad_hints_are_counted_and_served_alone(exact: Core) -> None:
    hint = KvHintAction(action_id="1", action_type="kvtrie.lst", action_version="1", payload={})
    hints = KvHintsEnvelope(protocol_version="1", message_id="1", actions=[hint])
    end(exact, CLOSED, kv_hints=hints)
    assert exact.counts["requests_refused"] == 1
    assert exact.counts["errors"] == 0


@pytest.mark.parametrize("name", ["sessions", "lst", "kvtri", "kvtrie_mode"])
def test_misspelt_parameters_are_counted_and_served_alone(
    exact: Core, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """They were ignored: a request for exact reuse was served with approximate KV."""
    logged: list[str] = []
    log = logging.getLogger("vllm.kvtrie")
    monkeypatch.setattr(log, "warning", lambda text, *given: logged.append(text % given))
    end(exact, CLOSED, {name: True, "remote_block_ids": [[1]], "do_remote_decode": False})
    assert exact.counts["requests_refused"] == 1
    assert exact.counts["errors"] == 0
    (line,) = logged
    assert f"kv_transfer_params: unknown key {name!r}" in line
    assert "did you mean" in line
    end(exact, CLOSED, {"session": "chat-7", "remote_block_ids": [[1]], "transfer_id": "a"})
    assert exact.counts["requests_refused"] == 1


@pytest.mark.parametrize("session", ["x" * 257, "\ud800"], ids=["long", "surrogate"])
def test_a_bad_session_id_of_vllm_is_refused_as_ours(exact: Core, session: str) -> None:
    """It failed in the index, with an error and a traceback for every such request."""
    end(exact, CLOSED, session_id=session)
    assert exact.counts["errors"] == 0
    assert exact.counts["requests_refused"] == 1


SIZES: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32}


def states(kind: MambaAttentionBackendEnum) -> MambaSpec:
    """Layers whose state is as large as a block of full attention."""
    shape = (2 * BLOCK * SIZES["num_kv_heads"] * SIZES["head_size"],)
    return MambaSpec(BLOCK, (shape,), (torch.float32,), mamba_type=kind, mamba_cache_mode="align")


@pytest.mark.parametrize(
    "other",
    [
        SlidingWindowSpec(**SIZES, dtype=torch.float32, sliding_window=48),
        states(MambaAttentionBackendEnum.MAMBA2),
        states(MambaAttentionBackendEnum.GDN_ATTN),
        states(MambaAttentionBackendEnum.LINEAR),
    ],
    ids=["sliding window", "state space", "gated delta net", "linear attention"],
)
def test_a_model_whose_other_layers_have_no_full_attention_too(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch, other: KVCacheSpec
) -> None:
    specs = {"layers.0": other, "layers.1": FullAttentionSpec(**SIZES, dtype=torch.float32)}
    monkeypatch.setattr(Worker, "get_kv_cache_specs", lambda _: [specs])
    # The shadow follows one group of blocks.
    vllm = core(connector=EXACT, blocks=307, shadow=False)
    planner = vllm.connector.planner
    assert planner._others
    assert not planner.copies
    end(vllm, CLOSED)
    # The whole blocks after the first dropped token: of full attention, and what else is cached.
    first = -(-(len(HEAD) + len(QUESTION) + 1) // BLOCK)
    places = places_of_others(vllm, hashes_of(vllm, CLOSED))
    others = sum(place >= first for place in places.values())
    has_window = isinstance(other, SlidingWindowSpec)
    # Of this prompt vLLM has cached no state at the end of a block.
    assert others > 0 if has_window else others == 0
    assert vllm.counts["blocks_dead"] == (len(CLOSED) - 1) // BLOCK - first + others
    end(vllm, LOOPING)
    # Of the others, what vLLM needs to continue at the end.
    kept = (planner._retention._passes > 0).sum() - (len(LOOPING) - 1) // BLOCK
    assert kept <= planner._others.num_per_hit
    assert kept > 0 or not has_window
    following = [*LOOPING, *message(TOOL, 40, 8), ASSISTANT]
    vllm.ask(following, max_tokens=1)
    # vLLM's own hits are what they are without the connector.
    alone = core(blocks=307, shadow=False)
    for prompt in (CLOSED[:-1], LOOPING[:-1], following):
        alone.ask(prompt, max_tokens=1)
    assert vllm.worker.num_computed == alone.worker.num_computed
    assert vllm.counts["tokens_exact"] == vllm.counts["errors"] == 0
    assert vllm.pool.get_num_free_blocks() == vllm.pool.num_gpu_blocks - 1
    with pytest.raises(UnsupportedError, match='set "mode": "exact"'):
        core(connector={"gate": "unchecked"}, blocks=308)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mode": "exakt"}, "did you mean 'exact'"),
        ({"mode": 1}, 'mode must be "exact" or "approximate"'),
        ({"mode": "approximate"}, 'needs "gate"'),
        ({"mode": "exact", "gate": "unchecked"}, 'remove "gate"'),
        ({"mode": "exact", "policy": {"min_run": 8}}, 'remove "policy"'),
        ({"mode": "exact", "default": "approximate"}, 'remove "default"'),
        ({"mode": "exact", "events": {"endpoint": "tcp://*:1"}}, 'remove "events"'),
        ({"mod": "exact"}, "did you mean 'mode'"),
    ],
)
def test_contradictions_are_refused_in_one_sentence(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        _settings.Settings.read(given)


def test_the_scheduler_class_is_refused(core: Callable[..., Core]) -> None:
    with pytest.raises(UnsupportedError, match="omit --scheduler-cls"):
        core(connector=EXACT, gaps=True)
