"""The connector's store in a real engine: what the pool has lost comes from the store."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.cleared import BAD
from tests.cleared import gate as gate_of
from tests.cleared import kind as kind_of
from tests.store.kit import MooncakeMaster, needs_mooncake
from tests.vllm import chat, models
from tests.vllm.prompts import joined, words
from tests.vllm.reference import Reference
from tests.vllm.test_startup import refused
from vllm.engine.arg_utils import EngineArgs

import kvtrie
from kvtrie import gates
from kvtrie.integrations import _turns
from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations._filled_plan import FilledPlan, fillable
from kvtrie.integrations._store_settings import StoreSettings
from kvtrie.integrations._turns import StorePrompt, TurnToWrite
from kvtrie.integrations.vllm import _gate, _store_worker, _support
from kvtrie.integrations.vllm._metadata import (
    FoundSpans,
    Load,
    Seek,
    StepMetadata,
    StoreReport,
    StoreStep,
)
from kvtrie.integrations.vllm._vllm import KVConnectorBase_V1
from kvtrie.integrations.vllm.connector import check_early
from kvtrie.store import (
    BackendError,
    HostBackend,
    MooncakeBackend,
    PlacedSpan,
    TakenSpans,
    rows_of,
)
from kvtrie.store.keys import VERSION, is_run_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.vllm.engine import Answer, Engine
    from tests.vllm.kept import Kept

    from kvtrie.integrations.vllm._store_worker import StoreWorker

    Plain = Callable[[Sequence[int]], list[int]]

USER, ASSISTANT, SYSTEM, THINK, STOP, END = range(3, 9)
FORMAT = {
    "system": SYSTEM,
    "user": USER,
    "assistant": ASSISTANT,
    "reasoning": [THINK, STOP],
    "end": END,
}
STORE: dict[str, Any] = {"backend": "host", "max_bytes": 64 << 20, "min_tokens": 8, "wait": 30.0}
EXACT: dict[str, Any] = {"mode": "exact", "chat_format": FORMAT, "store": STORE}
MOVES: dict[str, Any] = {
    "gate": "unchecked",
    "policy": {"scope": "namespace"},
    "chat_format": FORMAT,
    "store": STORE,
}
OPTIONS: dict[str, Any] = {"shadow": False}
# Rounding of float32 that is summed in another order.
ROUNDING = 3e-4


def text(count: int, seed: int) -> list[int]:
    """Words that are no delimiter."""
    return [one + 20 for one in words(count, seed) if one < 480]


SYSTEM_PROMPT = [SYSTEM, *text(100, 1), END]
QUESTION = [USER, *text(120, 2), END, ASSISTANT]
REASONING = [THINK, *text(150, 3), STOP]
ANSWER = [*text(130, 4), END]
NEXT = [USER, *text(30, 5), END, ASSISTANT]
TURN = joined(SYSTEM_PROMPT, QUESTION, REASONING, ANSWER, NEXT)
EDITED = joined(SYSTEM_PROMPT, QUESTION, ANSWER, NEXT)


def store_of(engine: Engine) -> StoreWorker:
    found = engine.worker._store
    assert found is not None
    return found


def settle(engine: Engine) -> None:
    """The step after the last request, which a server makes by itself, and what it writes."""
    engine.core.step_fn()
    assert store_of(engine).wait(60)


def tell(engine: Engine, prompt: Sequence[int], **options: Any) -> list[int]:
    said = engine.ask(prompt, **options).tokens
    settle(engine)
    return said


def forget_all(engine: Engine) -> None:
    """The pool loses everything; the store does not."""
    engine.drain()
    assert engine.llm.reset_prefix_cache()


@pytest.fixture(autouse=True)
def _nothing_is_left(engines: Kept) -> Iterator[None]:
    yield
    # What a test has stored, another one would find.
    engines.close()


def test_what_the_pool_has_lost_is_loaded_exactly(engine: Callable[..., Engine]) -> None:
    e = engine(connector=EXACT, **OPTIONS)
    first = tell(e, TURN)
    forget_all(e)
    computed = e.num_computed
    answer = e.ask(TURN)
    assert answer.tokens == first
    # Reasoning is not stored.
    kept = len(SYSTEM_PROMPT) + len(QUESTION)
    assert e.num_computed - computed == len(TURN) - kept + len(first) - 1
    assert answer.num_cached == kept
    assert e.counts["store_tokens_exact"] == e.counts["tokens_exact"] == kept
    assert e.counts["store_tokens_moved"] == e.counts["errors"] == 0
    assert e.counts["store_found"] == 1
    counts = store_of(e).store.counts()
    assert counts["stored"] > 0
    assert not counts.get("corrupt")


def test_the_pool_is_overwritten_and_nothing_is_computed_twice(
    engine: Callable[..., Engine],
) -> None:
    e = engine(connector=MOVES, gaps=True, blocks=60, max_model_len=1024, **OPTIONS)
    tell(e, TURN)
    for seed in range(4):
        tell(e, text(800, 50 + seed), max_tokens=1)
    e.counts.clear()
    computed = e.computed_for(TURN)
    assert computed <= len(REASONING) + len(NEXT) + 2
    assert e.counts["store_tokens_exact"] >= len(SYSTEM_PROMPT) + len(QUESTION)
    assert e.counts["errors"] == 0


def served_twice(
    engines: Kept, llama: Path, settings: dict[str, Any]
) -> list[tuple[Answer, list[torch.Tensor], dict[str, int]]]:
    """The edited prompt after its turn, from the pool, then from the store of another engine."""
    served = []
    for loses in (False, True):
        engines.close()
        e = engines.get(llama, connector=settings, gaps=True, **OPTIONS)
        tell(e, TURN)
        if loses:
            forget_all(e)
        e.counts.clear()
        name = e.add(EDITED, max_tokens=6, logprobs=20)
        while not e.answers[name].tokens:
            e.step()
        ids = e.scheduler.kv_cache_manager.get_block_ids(e.request(name).request_id)[0]
        kv = [one.clone() for one in e.kv_pool.gather(np.array(ids), 0, len(EDITED))]
        e.drain()
        served.append((e.answers[name], kv, dict(e.counts)))
        assert e.counts["errors"] == 0
    return served


@pytest.mark.parametrize("policy", [{}, {"recompute_share": 0.2}, {"recompute_first": 8}], ids=str)
def test_moved_runs_are_those_of_the_pool_and_labelled(
    engines: Kept, llama: Path, policy: dict[str, Any]
) -> None:
    """The same plan from the pool and from the store: KV, probabilities and answers are equal."""
    settings = {**MOVES, "policy": {**MOVES["policy"], **policy}}
    (pool, pool_kv, of_pool), (store, store_kv, of_store) = served_twice(engines, llama, settings)
    moved = of_store["store_tokens_moved"]
    assert moved == of_store["tokens_moved"] == of_pool["tokens_moved"]
    assert len(ANSWER) // 2 < moved <= len(ANSWER)
    assert of_store["store_tokens_exact"] == len(SYSTEM_PROMPT) + len(QUESTION)
    assert pool.tokens == store.tokens
    for ours, theirs in zip(store_kv, pool_kv, strict=True):
        assert torch.allclose(ours, theirs, atol=ROUNDING)
    for mine, others in zip(store.logprobs, pool.logprobs, strict=True):
        assert mine.keys() == others.keys()
        assert all(abs(mine[one] - others[one]) < ROUNDING for one in mine)
    exact = Reference(llama).kv(EDITED)[0]
    assert not torch.allclose(store_kv[0].reshape(exact.shape), exact, atol=ROUNDING)


@pytest.mark.parametrize("clears", [True, False])
def test_under_a_gate_the_store_supplies_what_the_pool_would(
    engines: Kept, llama: Path, monkeypatch: pytest.MonkeyPatch, *, clears: bool
) -> None:
    policy = kvtrie.ReusePolicy(min_run=16, scope="namespace")
    one_cut = gates.Box(cuts=gates.Range(most=1), new_context=gates.Range(most=0.0))
    many_cuts = gates.Box(cuts=gates.Range(above=1))
    kinds = [kind_of(box=one_cut), kind_of("many cuts", many_cuts)]
    if not clears:
        kinds[0] = kind_of(box=one_cut, own=BAD)
    decision = gate_of(*kinds, policy=policy).policy(policy, model="m@1")
    monkeypatch.setattr(_gate, "decision_of", lambda *_: decision)
    (pool, _, of_pool), (store, _, of_store) = served_twice(engines, llama, MOVES)
    names = ("tokens_moved", "store_tokens_moved")
    moved, from_store = (of_store.get(name, 0) for name in names)
    assert moved == from_store == of_pool.get("tokens_moved", 0)
    assert (moved > 0) == clears
    assert all((one.get("plans_not_cleared", 0) > 0) != clears for one in (of_pool, of_store))
    assert of_store["store_tokens_exact"] == len(SYSTEM_PROMPT) + len(QUESTION)
    assert pool.tokens == store.tokens


def test_exact_mode_takes_no_moved_run(engine: Callable[..., Engine]) -> None:
    e = engine(connector=EXACT, **OPTIONS)
    alone = tell(e, EDITED, mode="exact", salt="other")
    tell(e, TURN)
    forget_all(e)
    e.counts.clear()
    assert e.ask(EDITED).tokens == alone
    assert e.counts["store_tokens_exact"] == len(SYSTEM_PROMPT) + len(QUESTION)
    assert e.counts["store_tokens_moved"] == e.counts["tokens_moved"] == 0


def test_a_request_that_asks_for_exact_reuse_gets_no_moved_run(
    engine: Callable[..., Engine],
) -> None:
    e = engine(connector=MOVES, gaps=True, **OPTIONS)
    tell(e, TURN)
    forget_all(e)
    e.counts.clear()
    tell(e, EDITED, mode="exact")
    assert e.counts["store_tokens_exact"] == len(SYSTEM_PROMPT) + len(QUESTION)
    assert e.counts["store_tokens_moved"] == 0
    assert store_of(e).store.counts()["not_exact"] > 0


@pytest.mark.parametrize("session", [None, "chat-7", "chat-8"])
def test_moved_runs_are_of_the_conversation(
    engine: Callable[..., Engine], session: str | None
) -> None:
    e = engine(connector={**MOVES, "policy": {}}, gaps=True, **OPTIONS)

    def says(one: str | None) -> dict[str, Any]:
        return {} if one is None else {"extra_args": {"kv_transfer_params": {"session": one}}}

    tell(e, TURN, **says("chat-7"))
    forget_all(e)
    e.counts.clear()
    tell(e, EDITED, **says(session))
    assert e.counts["store_tokens_exact"] == len(SYSTEM_PROMPT) + len(QUESTION)
    assert (e.counts["store_tokens_moved"] > 0) == (session == "chat-7")


def test_tenants_share_nothing(engine: Callable[..., Engine]) -> None:
    e = engine(connector=EXACT, **OPTIONS)
    tell(e, TURN, salt="one")
    forget_all(e)
    e.counts.clear()
    for salt in ("other", None):
        tell(e, TURN, salt=salt)
    assert e.counts["store_tokens_exact"] == 0
    # In memory of this process, whose tenants are known, nothing is looked up for them.
    assert e.counts["store_requests"] == 0
    assert e.counts["store/absent"] > 0
    forget_all(e)
    tell(e, TURN, salt="one")
    assert e.counts["store_tokens_exact"] > 0


def test_shadow_mode_loads_exact_runs_alone(engine: Callable[..., Engine]) -> None:
    e = engine(connector={**MOVES, "shadow": True}, gaps=True, **OPTIONS)
    tell(e, TURN)
    forget_all(e)
    e.counts.clear()
    tell(e, EDITED)
    assert e.counts["store_tokens_exact"] == len(SYSTEM_PROMPT) + len(QUESTION)
    assert e.counts["store_tokens_moved"] == e.counts["tokens_moved"] == 0


def test_what_follows_moved_kv_is_stored_as_approximate(engine: Callable[..., Engine]) -> None:
    e = engine(connector=MOVES, gaps=True, **OPTIONS)
    tell(e, TURN)
    forget_all(e)
    # Moved KV is used, and what is computed after it is stored.
    tell(e, EDITED + text(200, 9), stop_token_ids=list(range(512)), ignore_eos=False)
    forget_all(e)
    e.counts.clear()
    alone = e.ask(EDITED + text(200, 9), mode="exact")
    assert e.counts["store_tokens_moved"] == 0
    assert alone.num_cached == len(SYSTEM_PROMPT) + len(QUESTION)
    assert e.counts["errors"] == 0


# --- what goes wrong ------------------------------------------------------------------------


FULL = os.strerror(errno.ENOSPC)


class Faulty(HostBackend):
    """A store that fails as a test says."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.flips = self.swaps = self.is_dead = False
        # What is raised in place of storing a run.
        self.refuses: Exception | None = None
        self.goes = threading.Event()
        self.goes.set()
        self.asked = threading.Event()

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._wait()
        return super().exists(names)

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        self._wait()
        if self.swaps:
            # The bytes of another run, whose length is the same where there is one.
            sizes = {one.name: one.num_bytes for one in self.values() if is_run_name(one.name)}
            asked = name
            name = min(
                sizes.keys() - {asked}, key=lambda one: (sizes[one] != sizes.get(asked), one)
            )
        found = super().read(name, ranges)
        if not self.flips or found is None or len(found) < 2:
            return found
        wrong = bytearray(found[-1])
        wrong[len(wrong) // 2] ^= 1
        return [*found[:-1], memoryview(bytes(wrong))]

    def put(self, name: str, value: bytearray) -> None:
        self._wait()
        if self.refuses is not None:
            raise self.refuses
        super().put(name, value)

    def _wait(self) -> None:
        self.asked.set()
        assert self.goes.wait(60)
        if self.is_dead:
            msg = "the store is gone"
            raise BackendError(msg, reason="unreachable")


@pytest.fixture(scope="module")
def plain(engines: Kept, llama: Path) -> Plain:
    """Returns the answer of vLLM without a connector to a prompt; each is computed once."""
    found: dict[tuple[int, ...], list[int]] = {}

    def answer(prompt: Sequence[int]) -> list[int]:
        if tuple(prompt) not in found:
            found[tuple(prompt)] = engines.get(llama, **OPTIONS).ask(prompt).tokens
        return found[tuple(prompt)]

    return answer


def at_rest(engine: Engine) -> None:
    """No request, load or turn is left, no block is lost, and no error was counted."""
    engine.drain()
    engine.check_idle()
    worker = store_of(engine)
    assert not worker._loads
    assert not worker._taken
    assert worker._turns.is_idle
    assert len(engine.connector.planner.half.stored) == 0
    assert engine.counts["errors"] == engine.counts["copies_failed"] == 0


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Faulty:
    backend = Faulty(64 << 20)
    monkeypatch.setattr(StoreSettings, "open_backend", lambda _: backend)
    return backend


@pytest.mark.parametrize("settings", [EXACT, MOVES], ids=["exact", "moves"])
def test_a_corrupt_run_is_computed(
    engine: Callable[..., Engine], faulty: Faulty, settings: dict[str, Any]
) -> None:
    e = engine(connector=settings, gaps="gate" in settings, **OPTIONS)
    first = tell(e, TURN)
    forget_all(e)
    faulty.flips = True
    e.counts.clear()
    assert e.computed_for(TURN) == len(TURN)
    assert store_of(e).store.counts()["corrupt"] > 0
    assert e.counts["store_tokens_exact"] == e.counts["errors"] == 0
    faulty.flips = False
    assert e.ask(TURN).tokens == first


@pytest.mark.parametrize("settings", [EXACT, MOVES], ids=["exact", "moves"])
def test_a_store_that_returns_another_run_is_not_believed(
    engine: Callable[..., Engine], faulty: Faulty, plain: Plain, settings: dict[str, Any]
) -> None:
    """Its bytes are those of a run of the same store, tenant, key and length."""
    expected = plain(EDITED)
    settings = {**settings, "store": {**STORE, "run_tokens": 16}}
    e = engine(connector=settings, gaps="gate" in settings, **OPTIONS)
    tell(e, TURN)
    forget_all(e)
    faulty.swaps = True
    e.counts.clear()
    computed = e.num_computed
    assert tell(e, EDITED) == expected
    assert e.num_computed - computed == len(EDITED) + len(expected) - 1
    counts = store_of(e).store.counts()
    assert counts["forged"] > 0
    assert e.counts["store/forged"] == counts["forged"]
    assert not counts.keys() & {"read", "corrupt", "load_failed", "put_failed"}
    assert e.counts["store_tokens_exact"] == e.counts["store_tokens_moved"] == 0
    at_rest(e)
    # The store was not harmed.
    faulty.swaps = False
    forget_all(e)
    assert tell(e, EDITED, mode="exact") == expected
    assert e.counts["store_tokens_exact"] > 0
    at_rest(e)


@pytest.mark.parametrize(
    ("error", "counted"),
    [
        # What `ObjectBackend` makes of it, and a backend that lets it through.
        (BackendError(FULL, reason="full"), "put_full"),
        (OSError(errno.ENOSPC, FULL), "put_failed"),
    ],
    ids=["named", "raw"],
)
@pytest.mark.parametrize("settings", [EXACT, MOVES], ids=["exact", "moves"])
def test_on_a_full_disk_nothing_is_stored_and_the_engine_goes_on(
    engine: Callable[..., Engine],
    faulty: Faulty,
    plain: Plain,
    settings: dict[str, Any],
    error: Exception,
    counted: str,
) -> None:
    turn, edited = plain(TURN), plain(EDITED)
    e = engine(connector=settings, gaps="gate" in settings, **OPTIONS)
    faulty.refuses = error
    assert tell(e, TURN) == turn
    forget_all(e)
    assert tell(e, EDITED) == edited
    counts = store_of(e).store.counts()
    assert counts[counted] > 0
    assert "stored" not in counts
    assert not [one for one in faulty.values() if is_run_name(one.name)]
    assert e.counts["store_tokens_exact"] == e.counts["store_tokens_moved"] == 0
    at_rest(e)
    # There is room again.
    faulty.refuses = None
    forget_all(e)
    tell(e, TURN)
    forget_all(e)
    assert tell(e, TURN) == turn
    assert e.counts["store_tokens_exact"] >= len(SYSTEM_PROMPT) + len(QUESTION)
    assert store_of(e).store.counts()[counted] == e.counts[f"store/{counted}"] == counts[counted]
    at_rest(e)


def test_a_slow_store_is_not_waited_for(engine: Callable[..., Engine], faulty: Faulty) -> None:
    settings = {**EXACT, "store": {**STORE, "wait": 0.05}}
    e = engine(connector=settings, **OPTIONS)
    first = tell(e, TURN)
    forget_all(e)
    e.counts.clear()
    faulty.goes.clear()
    computed = e.num_computed
    assert e.ask(TURN).tokens == first
    assert e.num_computed - computed == len(TURN) + len(first) - 1
    assert e.counts["store_late"] == 1
    assert e.counts["store_tokens_exact"] == e.counts["errors"] == 0
    faulty.goes.set()
    settle(e)
    e.step()
    assert not store_of(e)._loads


def test_the_engine_goes_on_while_a_request_waits(
    engine: Callable[..., Engine], faulty: Faulty
) -> None:
    e = engine(connector=EXACT, **OPTIONS)
    first = tell(e, TURN)
    forget_all(e)
    e.counts.clear()
    running = e.add(text(40, 70)[:6], max_tokens=60)
    e.step()
    faulty.goes.clear()
    waiting = e.add(TURN)
    for _ in range(30):
        e.step()
    assert len(e.answers[running].tokens) > 20
    assert not e.answers[waiting].tokens
    faulty.goes.set()
    e.drain()
    assert e.answers[waiting].tokens == first
    assert e.counts["store_tokens_exact"] == len(SYSTEM_PROMPT) + len(QUESTION)


def test_a_request_that_waits_is_aborted(engine: Callable[..., Engine], faulty: Faulty) -> None:
    e = engine(connector=EXACT, **OPTIONS)
    tell(e, TURN)
    forget_all(e)
    faulty.asked.clear()
    faulty.goes.clear()
    name = e.add(TURN)
    while not faulty.asked.is_set():
        e.step()
    e.abort([name])
    faulty.goes.set()
    e.drain()
    settle(e)
    assert not store_of(e)._loads
    assert not store_of(e)._taken
    assert len(e.connector.planner.half.stored) == 0
    assert e.counts["errors"] == 0


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_store_that_dies_costs_recomputation(
    engine: Callable[..., Engine], faulty: Faulty, when: str
) -> None:
    e = engine(connector=EXACT, **OPTIONS)
    first = tell(e, TURN)
    forget_all(e)
    e.counts.clear()
    if when == "before":
        faulty.is_dead = True
        assert e.ask(TURN).tokens == first
    else:
        faulty.asked.clear()
        faulty.goes.clear()
        name = e.add(TURN)
        while not faulty.asked.is_set():
            e.step()
        faulty.is_dead = True
        faulty.goes.set()
        e.drain()
        assert e.answers[name].tokens == first
    # What it cannot store is counted too, and nobody waits for it.
    tell(e, text(300, 99))
    counts = store_of(e).store.counts()
    assert counts.get("exists_unreachable", 0) + counts.get("read_unreachable", 0) > 0
    assert counts["put_unreachable"] > 0
    assert e.counts["store_tokens_exact"] == e.counts["errors"] == 0


def test_rows_that_are_lost_are_computed(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's half was promised rows that the worker's half does not have any more."""
    e = engine(connector=EXACT, **OPTIONS)
    first = tell(e, TURN)
    forget_all(e)
    e.counts.clear()
    worker = store_of(e)
    report = worker.report

    def losing() -> Any:
        found = report()
        worker._taken = dict.fromkeys(worker._taken, TakenSpans(()))
        return found

    monkeypatch.setattr(worker, "report", losing)
    assert e.ask(TURN).tokens == first
    assert e.counts["copies_failed"] > 0
    assert e.counts["errors"] == 0


def test_on_a_slow_link_it_is_computed_and_the_counts_say_why(
    engine: Callable[..., Engine],
) -> None:
    e = engine(connector={**EXACT, "store": {**STORE, "prefill_tokens_per_s": 1e12}}, **OPTIONS)
    first = tell(e, TURN)
    forget_all(e)
    # How long a load takes is not known yet.
    assert e.ask(TURN).tokens == first
    loaded = e.counts["store_tokens_exact"]
    assert loaded > 0
    forget_all(e)
    assert e.ask(TURN).tokens == first
    assert e.counts["store_tokens_exact"] == loaded
    counts = store_of(e).store.counts()
    assert (counts["chose_load_unknown"], counts["chose_recompute_slower"]) == (1, 1)
    assert e.counts["store/chose_recompute_slower"] == 1


def test_an_engine_that_writes_nothing(engine: Callable[..., Engine]) -> None:
    e = engine(connector={**EXACT, "store": {**STORE, "turns": 0}}, **OPTIONS)
    tell(e, TURN)
    assert "stored" not in store_of(e).store.counts()


# --- writing --------------------------------------------------------------------------------


def test_blocks_that_are_overwritten_before_they_are_read_are_given_up(
    engine: Callable[..., Engine], faulty: Faulty
) -> None:
    """Nothing of the next prompt's KV is stored as the last one's."""
    settings = {**EXACT, "store": {**STORE, "wait": 0.01}}
    e = engine(connector=settings, blocks=20, max_model_len=600, **OPTIONS)
    faulty.goes.clear()
    first = e.ask(TURN).tokens
    # The thread that writes stops at its first run, and the pool is overwritten meanwhile.
    faulty.asked.clear()
    e.core.step_fn()
    assert faulty.asked.wait(60)
    e.ask(text(560, 30), max_tokens=1)
    faulty.goes.set()
    settle(e)
    assert store_of(e).store.counts()["overwritten"] > 0
    forget_all(e)
    e.counts.clear()
    assert e.ask(TURN).tokens == first
    assert e.counts["errors"] == 0


@pytest.mark.parametrize("count", [90, 62, 60, 7])
def test_a_block_that_is_not_full_is_read_before_the_next_request_writes_to_it(
    engine: Callable[..., Engine], count: int
) -> None:
    """vLLM hands it out first, so the end of each turn was lost under load."""
    e = engine(connector=EXACT, **OPTIONS)
    turn = [USER, *text(count, 70), END, ASSISTANT]
    name = e.add(turn, max_tokens=3)
    e.drain()
    first = e.answers[name].tokens
    # No step comes between.
    other = e.ask(text(200, 71)).tokens
    settle(e)
    counts = store_of(e).store.counts()
    assert counts["stored"] > 0
    assert "overwritten" not in counts
    forget_all(e)
    e.counts.clear()
    assert e.ask(turn, max_tokens=3).tokens == first
    assert e.counts["store_tokens_exact"] == len(turn) - 1
    assert e.ask(text(200, 71)).tokens == other
    assert e.counts["errors"] == 0


def test_a_step_waits_for_the_copy_of_its_own_blocks_alone(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    e = engine(connector=EXACT, **OPTIONS)
    goes, reads = threading.Event(), threading.Event()

    def slowly(*given: Any) -> Any:
        reads.set()
        assert goes.wait(60)
        return rows_of(*given)

    monkeypatch.setattr(_turns, "rows_of", slowly)
    name = e.add(TURN, max_tokens=2)
    while not e.answers[name].tokens:
        e.step()
    table = e.scheduler.kv_cache_manager.get_block_ids(e.request(name).request_id)[0]
    e.drain()
    e.core.step_fn()
    assert reads.wait(60)
    turns = store_of(e)._turns
    # Blocks of the run that is being copied, and blocks of another one.
    turns.overwritten(table[-1:])
    step = threading.Thread(target=turns.overwritten, args=(table[:1],))
    step.start()
    step.join(0.05)
    assert step.is_alive()
    goes.set()
    step.join(60)
    assert not step.is_alive()
    settle(e)
    assert store_of(e).store.counts()["overwritten"] > 0
    assert store_of(e).store.counts()["stored"] > 0


def test_a_turn_that_was_not_read_before_the_engine_sleeps_is_not_stored(
    engine: Callable[..., Engine],
) -> None:
    """Sleep mode unmaps KV and maps other memory: what a turn left in its blocks is gone."""
    e = engine(connector=EXACT, **OPTIONS)
    # In the caller's process no step follows the last request, so its turn is not sent yet.
    first = e.ask(TURN).tokens
    assert e.llm.reset_prefix_cache(reset_connector=True)
    e.worker.unregister_kv_caches()
    for one in e.worker._kv_caches.values():
        one.fill_(1)
    e.worker.restore_kv_caches()
    settle(e)
    assert e.ask(TURN).tokens == first
    assert e.counts["store_tokens_exact"] == e.counts["errors"] == 0


def test_a_reset_of_the_connector_makes_what_was_stored_unreachable(
    engine: Callable[..., Engine],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights may be reloaded in place under the same name."""
    e = engine(connector=EXACT, **OPTIONS)
    first = tell(e, TURN)
    forget_all(e)
    e.counts.clear()
    # vLLM's lines do not reach the root logger.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level("WARNING", logger="vllm.kvtrie"):
        assert e.llm.reset_prefix_cache(reset_connector=True)
    assert "finds nothing that was stored before" in caplog.text
    # Others may write to a store, so it is asked also where this process knows of no run.
    e.connector.planner.half.stored._known_runs = None
    assert tell(e, TURN) == first
    assert e.counts["store_requests"] == 1
    assert e.counts["store_tokens_exact"] == e.counts["errors"] == 0
    # What is stored from now on is found.
    forget_all(e)
    assert tell(e, TURN) == first
    assert e.counts["store_tokens_exact"] == len(SYSTEM_PROMPT) + len(QUESTION)


def test_host_memory_is_not_asked_for_what_a_reset_has_made_unreachable(
    engine: Callable[..., Engine],
) -> None:
    e = engine(connector=EXACT, **OPTIONS)
    first = tell(e, TURN)
    forget_all(e)
    assert e.llm.reset_prefix_cache(reset_connector=True)
    e.counts.clear()
    assert tell(e, TURN) == first
    assert e.counts["store_requests"] == 0
    assert e.counts["store/absent"] > 0
    # What is stored from now on is found.
    forget_all(e)
    assert tell(e, TURN) == first
    assert e.counts["store_requests"] == 1


def test_a_request_from_before_a_reset_is_not_stored(engine: Callable[..., Engine]) -> None:
    e = engine(connector=EXACT, **OPTIONS)
    name = e.add(TURN, max_tokens=6)
    while not e.answers[name].tokens:
        e.step()
    e.llm.reset_prefix_cache(reset_connector=True)
    e.drain()
    settle(e)
    assert "stored" not in store_of(e).store.counts()
    tell(e, TURN)
    assert store_of(e).store.counts()["stored"] > 0


def test_a_copy_that_fails_while_its_request_is_aborted_is_not_stored(
    engine: Callable[..., Engine], faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes aborts before it looks at a step's output, which says what has failed."""
    settings = {**EXACT, "store": {**STORE, "run_tokens": 25}}
    e = engine(connector=settings, **OPTIONS)
    prompt = text(300, 7)[:126]
    faulty.is_dead = True
    first = tell(e, prompt)
    faulty.is_dead = False
    copies = e.worker._copies
    assert copies is not None
    name = e.add(prompt)

    def fails(*_: Any, **__: Any) -> None:
        request = e.request(name)
        e.core.aborts_queue.put([request.request_id])
        msg = "a copy fails"
        raise RuntimeError(msg)

    with monkeypatch.context() as patched:
        patched.setattr(copies.pool, "apply", fails)
        while not e.counts["copies_failed"]:
            e.step()
    e.abort([name])
    settle(e)
    forget_all(e)
    assert e.ask(prompt).tokens == first
    assert e.counts["errors"] == 0


def test_turns_that_find_no_room_in_the_queue_are_dropped_and_counted(
    engine: Callable[..., Engine], faulty: Faulty
) -> None:
    e = engine(connector={**EXACT, "store": {**STORE, "turns": 1, "wait": 0.01}}, **OPTIONS)
    faulty.goes.clear()
    for seed in range(4):
        e.ask([USER, *text(80, 40 + seed), END, ASSISTANT])
    e.core.step_fn()
    assert store_of(e).store.counts()["dropped"] >= 2
    faulty.goes.set()
    settle(e)
    assert e.counts["errors"] == 0


def test_reasoning_is_not_stored(engine: Callable[..., Engine]) -> None:
    e = engine(connector=EXACT, **OPTIONS)
    tell(e, TURN)
    stored = store_of(e).store.counts()["stored"]
    # The same without reasoning: another answer's end, and nothing else, is new.
    tell(e, EDITED)
    assert store_of(e).store.counts()["stored"] <= stored + 1


def test_a_turn_is_stored_with_its_answer(engine: Callable[..., Engine]) -> None:
    """The last token that is sampled has no KV; the runs of the next prompt do not need it."""
    e = engine(connector=EXACT, **OPTIONS)
    prompt = [*SYSTEM_PROMPT, *QUESTION]
    said = tell(e, prompt, max_tokens=40)
    # The model was cut off; a model that ends its message says this.
    named = [*prompt, *said[:-1]]
    tell(e, [*named, END], max_tokens=1)
    forget_all(e)
    e.counts.clear()
    e.ask([*named, END, *NEXT])
    assert e.counts["store_tokens_exact"] >= len(named)


# --- the start ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("store", "why"),
    [
        ({"backend": "disk"}, "backend must be"),
        ({"backnd": "host"}, "did you mean 'backend'"),
        ({}, "backend must be"),
        ("host", "store must be a mapping"),
        ({"backend": "/kv"}, "key_file must be"),
        ({"backend": "/kv", "key_file": "/nowhere"}, "No such file"),
        ({"backend": "s3://name:secret@bucket"}, "backend must have no password"),
        ({"backend": "host", "max_bytes": 0}, "max_bytes must be an integer from 1"),
        ({"backend": "host", "threads": True}, "threads must be"),
        ({"backend": "host", "wait": 0}, "wait must be a number above 0"),
        ({"backend": "host", "lifetime": 0.5}, "lifetime must be at least 1"),
        ({"backend": "host", "min_tokens": -1}, "min_tokens must be an integer from 0"),
        ({"backend": "host", "encrypt": 1}, "encrypt must be true or false"),
    ],
    ids=str,
)
def test_a_setting_that_is_wrong_is_refused_by_its_name(store: Any, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        check_early({"store": store})


def test_a_key_of_few_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(SettingsError, match="has 5 bytes"):
        check_early({"store": {"backend": str(tmp_path), "key_file": str(tmp_path / "key")}})


def folder(tmp_path: Path) -> dict[str, Any]:
    pytest.importorskip("obstore")
    (tmp_path / "key").write_bytes(b"a key of the store, 32 bytes long")
    return {**STORE, "backend": str(tmp_path / "kv"), "key_file": str(tmp_path / "key")}


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("key", "was made with another key"),
        ("weights", "has namespace"),
        ("geometry", "has namespace"),
    ],
)
def test_a_store_of_another_one_is_refused(
    engines: Kept, llama: Path, tmp_path: Path, what: str, why: str
) -> None:
    given = folder(tmp_path)
    if what == "geometry":
        given = {**given, "model": "a name"}
    engines.get(llama, connector={**EXACT, "store": given}, **OPTIONS)
    if what == "key":
        (tmp_path / "key").write_bytes(b"another key of a store, 32 bytes")
    elif what == "weights":
        # The same architecture with other weights.
        llama = models.llama(tmp_path / "llama", seed=1)
    else:
        llama = chat.model(tmp_path / "llama")
    said = refused(engines, llama, connector={**EXACT, "store": given}, **OPTIONS)
    assert f"SpanStore: the store {why}" in said


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("version", VERSION + 1, f"has version {VERSION + 1}, not {VERSION}"),
        ("geometry", None, "has geometry ["),
    ],
)
def test_a_store_of_the_same_model_is_refused_by_what_it_says_of_itself(
    engines: Kept, llama: Path, tmp_path: Path, field: str, value: Any, why: str
) -> None:
    """KV of the same name may be of other shapes, such as under another tensor parallelism."""
    given = folder(tmp_path)
    e = engines.get(llama, connector={**EXACT, "store": given}, **OPTIONS)
    tell(e, TURN)
    engines.close()
    (described,) = (tmp_path / "kv").rglob("kvtrie/store")
    written = described.read_bytes()
    said = json.loads(written)
    if field == "geometry":
        layers, heads, *rest = said[field]
        value = [layers, 2 * heads, *rest]
    described.write_bytes(json.dumps({**said, field: value}).encode().ljust(len(written)))
    files = {path: path.read_bytes() for path in (tmp_path / "kv").rglob("*") if path.is_file()}
    message = refused(engines, llama, connector={**EXACT, "store": given}, **OPTIONS)
    assert f"store: SpanStore: the store {why}" in message
    # Nothing of it was changed.
    now = {path: path.read_bytes() for path in (tmp_path / "kv").rglob("*") if path.is_file()}
    assert now == files
    described.write_bytes(written)
    e = engines.get(llama, connector={**EXACT, "store": given}, **OPTIONS)
    tell(e, TURN)
    assert e.counts["store_tokens_exact"] > 0


@pytest.mark.parametrize(("device", "is_pinned"), [("cpu", False), ("cuda", True)])
def test_rows_for_a_pool_on_cuda_arrive_in_pinned_memory(
    engine: Callable[..., Engine], device: str, *, is_pinned: bool
) -> None:
    e = engine(connector=EXACT, **OPTIONS)
    pool: Any = SimpleNamespace(device=torch.device(device), layout=e.kv_pool.layout)
    half = e.worker
    worker = _store_worker.make(half._settings, half._vllm_config, pool, half._counts)
    assert worker._loader._pinned is is_pinned
    worker.close()


@pytest.mark.parametrize("is_told", [False, True])
def test_a_store_needs_a_vllm_that_says_when_it_unmaps_kv(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, *, is_told: bool
) -> None:
    """Before 0.33 it does not, and a thread would read from blocks that are not there."""
    e = engine(connector=EXACT, **OPTIONS)
    monkeypatch.setattr(e.worker._vllm_config.model_config, "enable_sleep_mode", True)

    def checked() -> None:
        config = e.worker._vllm_config, e.worker._kv_cache_config
        _support.check_store(*config, is_among_others=False)

    if is_told:
        monkeypatch.setattr(
            KVConnectorBase_V1, "unregister_kv_caches", lambda _: None, raising=False
        )
        checked()
    else:
        monkeypatch.delattr(KVConnectorBase_V1, "unregister_kv_caches", raising=False)
        with pytest.raises(_support.UnsupportedError, match="turn sleep mode off"):
            checked()


def test_a_name_of_a_model_does_not_hide_what_else_its_kv_depends_on(
    engines: Kept, llama: Path, faulty: Faulty, tmp_path: Path
) -> None:
    assert faulty.goes.is_set()
    (tmp_path / "key").write_bytes(b"a key of the store, 32 bytes long")
    named = {**STORE, "model": "a name", "key_file": str(tmp_path / "key")}
    engines.get(llama, connector={**EXACT, "store": named}, **OPTIONS)
    given = {"rope_theta": 5000.0, "rope_type": "default"}
    overrides: dict[str, Any] = {"rope_parameters": given}
    options = {**OPTIONS, "hf_overrides": overrides}
    said = refused(engines, llama, connector={**EXACT, "store": named}, **options)
    assert "SpanStore: the store has namespace" in said
    # What a function overrides is known to whoever gives the name.
    options = {**OPTIONS, "hf_overrides": lambda config: config}
    said = refused(engines, llama, connector={**EXACT, "store": STORE}, **options)
    assert "hf_overrides is a function; give it a name" in said


def test_the_identity_of_a_model_has_the_config_that_is_used(llama: Path, tmp_path: Path) -> None:
    """Under LongRoPE also the longest context, which chooses the factors of all positions."""
    long, other = tmp_path / "long", tmp_path / "other"
    config = json.loads((llama / "config.json").read_text())
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 1024}
    for folder, changed in (
        (long, {**rope, **factors, "factor": 4.0}),
        (other, {"rope_type": "default", "rope_theta": 5000.0}),
    ):
        folder.mkdir()
        said = json.dumps(config | {"rope_parameters": changed})
        (folder / "config.json").write_text(said)
    given: Any = SimpleNamespace(model="a name", backend="host")
    served: Any = SimpleNamespace(quantization=None)

    def identity(model: Path, max_model_len: int, **options: Any) -> str:
        arguments = EngineArgs(
            str(model),
            max_model_len=max_model_len,
            skip_tokenizer_init=True,
            dtype="float32",
            **options,
        )
        return _store_worker._identity(given, served, arguments.create_engine_config())

    assert identity(llama, 1000) == identity(llama, 4000)
    assert identity(llama, 1000) != identity(llama, 1000, hf_config_path=str(other))
    assert identity(long, 1000) == identity(long, 1000)
    assert identity(long, 1000) != identity(long, 4000)


# --- other processes ------------------------------------------------------------------------

CHILD = """
import json, os, signal, sys
from pathlib import Path
from tests.vllm.engine import Engine
from tests.vllm import test_store as t

def say(said):
    print("SAID", json.dumps([said, dict(e.counts)]), flush=True)

model, store, does = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
e = Engine(model, connector={**t.MOVES, "store": store}, gaps=True, shadow=False)
if does == "ask":
    say(e.ask(t.EDITED).tokens)
else:
    say(t.tell(e, t.TURN))
if does in ("stay", "die"):
    sys.stdin.readline()
    if does == "die":
        t.stop_at_second_read(lambda: (say("reading"), sys.stdin.readline()))
    t.forget_all(e)
    e.counts.clear()
    say([e.ask(t.TURN, mode="exact", salt="nobody").tokens, e.ask(t.TURN).tokens])
# As kill -9 does: nothing is closed.
os.kill(os.getpid(), signal.SIGKILL)
"""


def stop_at_second_read(wait: Callable[[], object]) -> None:
    """Have what reads from Mooncake a second time wait before it does."""
    read, times = MooncakeBackend.read, itertools.count(1)

    def waiting(
        self: MooncakeBackend, name: str, ranges: Sequence[tuple[int, int]]
    ) -> list[memoryview] | None:
        if next(times) == 2:
            wait()
        return read(self, name, ranges)

    # For the rest of this process, which runs nothing else.
    MooncakeBackend.read = waiting  # type: ignore[method-assign]


@contextmanager
def process(model: Path, store: dict[str, Any], does: str) -> Iterator[subprocess.Popen[str]]:
    """An engine in a process of its own, which is killed."""
    command = [sys.executable, "-c", CHILD, str(model), json.dumps(store), does]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as child:
        try:
            yield child
        finally:
            child.kill()


def said_by(child: subprocess.Popen[str]) -> tuple[Any, Any]:
    """What it says next, and its counts."""
    assert child.stdout is not None
    line = next(line for line in child.stdout if line.startswith("SAID "))
    said, counts = json.loads(line.removeprefix("SAID "))
    return said, counts


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
def test_an_engine_finds_what_a_process_has_stored_that_was_killed(
    engines: Kept, llama: Path, tmp_path: Path, *, encrypt: bool
) -> None:
    given = {**folder(tmp_path), "encrypt": encrypt}
    with process(llama, given, "write") as child:
        first, _ = said_by(child)
        assert child.wait(60) == -signal.SIGKILL
    (described,) = (tmp_path / "kv").rglob("kvtrie/store")
    said = json.loads(described.read_bytes())
    assert said["encryption"] == ("aes-256-gcm" if encrypt else "none")
    engines.close()
    e = engines.get(llama, connector={**MOVES, "store": given}, gaps=True, **OPTIONS)
    e.counts.clear()
    assert e.ask(TURN).tokens == first
    # What follows the reasoning, which is computed again, is exact too.
    assert e.counts["store_tokens_exact"] == len(TURN) - len(REASONING) - 1
    settle(e)
    at_rest(e)
    # No reader without the setting takes ciphertext for KV, nor KV for ciphertext.
    other = {**given, "encrypt": not encrypt}
    said = refused(engines, llama, connector={**MOVES, "store": other}, gaps=True, **OPTIONS)
    assert "SpanStore: the store has encryption" in said


@needs_mooncake
def test_another_process_finds_what_one_has_stored_in_mooncake(
    engines: Kept, llama: Path, tmp_path: Path
) -> None:
    engines.close()
    e = engines.get(llama, connector=MOVES, gaps=True, **OPTIONS)
    tell(e, TURN)
    from_pool = e.ask(EDITED).tokens
    engines.close()
    (tmp_path / "key").write_bytes(b"a key of the store, 32 bytes long")
    with MooncakeMaster() as master:
        at = {"backend": f"mooncake://{master.address}", "key_file": str(tmp_path / "key")}
        given = {**STORE, **at}
        with process(llama, given, "stay") as writer:
            said_by(writer)
            with process(llama, given, "ask") as reader:
                tokens, counts = said_by(reader)
            assert tokens == from_pool
            assert counts["store_tokens_exact"] == len(SYSTEM_PROMPT) + len(QUESTION)
            assert counts["store_tokens_moved"] >= len(ANSWER) - 1
            # The master dies while an engine runs.
            master.kill()
            assert writer.stdin is not None
            writer.stdin.write("\n")
            writer.stdin.flush()
            (alone, again), counts = said_by(writer)
            assert again == alone
            assert "errors" not in counts
            assert "store_tokens_exact" not in counts


@needs_mooncake
def test_a_master_that_is_killed_while_an_engine_loads_costs_recomputation(
    llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "key").write_bytes(b"a key of the store, 32 bytes long")
    with MooncakeMaster() as master:
        at = {"backend": f"mooncake://{master.address}", "key_file": str(tmp_path / "key")}
        with process(llama, {**STORE, **at}, "die") as child:
            said_by(child)
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
            said, _ = said_by(child)
            assert said == "reading"
            master.kill()
            child.stdin.write("\n")
            child.stdin.flush()
            (alone, again), counts = said_by(child)
        assert again == alone
        assert "errors" not in counts
        assert counts["store_tokens_exact"] < len(TURN) - len(REASONING) - 1


def test_the_halves_send_each_other_what_pickle_takes() -> None:
    """They may be in different processes."""
    tokens = np.arange(5, dtype=np.uint32)
    prompt = StorePrompt(tokens, "salt", (2,), ((0, 2, "user"),), "chat-7")
    policy = kvtrie.ReusePolicy(approximate=True, scope="namespace")
    step = StoreStep(
        seeks=[Seek(7, prompt, ((0, 4),), policy, None, to_first_gap=True)],
        turns=[TurnToWrite(prompt, (3,), ((0, 5, 5, None),), policy)],
        overwritten=[1],
        drops=[6],
    )
    load = Load(None, (3,), ((0, 4),), "r", 0, 7)
    metadata = pickle.loads(pickle.dumps(StepMetadata([load], step)))  # noqa: S301 - its own
    assert metadata.loads == [load]
    assert metadata.store.seeks[0].policy == policy
    assert metadata.store.turns[0].prompt.tokens.tolist() == tokens.tolist()
    span = PlacedSpan(0, 4, is_exact=True, hops=0, delta=0)
    given = StoreReport({7: FoundSpans((span,))}, 1)
    assert pickle.loads(pickle.dumps(given)) == given  # noqa: S301 - its own


# --- the plan -------------------------------------------------------------------------------


def spans(*given: tuple[int, int, int]) -> list[PlacedSpan]:
    """Start, end and delta; 0 is exact."""
    return [
        PlacedSpan(start, end, is_exact=not delta, hops=int(bool(delta)), delta=delta)
        for start, end, delta in given
    ]


TWO = [(10, 30, -9), (30, 60, -9), (70, 90, -5)]


@pytest.mark.parametrize(
    ("given", "policy", "stored"),
    [
        # Pieces of one run may be short, and a run may not.
        ([(0, 40, 0), (40, 43, -9), (43, 90, -9)], {}, [(0, 40), (40, 43), (43, 90)]),
        ([(0, 40, 0), (40, 43, -8), (43, 90, -9)], {}, [(0, 40), (43, 90)]),
        # Fronts are of whole runs, and as long for each.
        (TWO, {"recompute_first": 4}, [(14, 30), (30, 60), (74, 90)]),
        (TWO, {"recompute_share": 0.2}, [(17, 30), (30, 60), (77, 90)]),
        ([(10, 30, -9)], {"recompute_last": 5, "recompute_first": 15}, []),
        # What is too much is all left out; exact KV stays.
        ([(0, 10, 0), (10, 90, -9)], {"max_approximate_share": 0.5}, [(0, 10)]),
        ([(0, 10, 0), (10, 30, -9)], {"approximate": False}, [(0, 10)]),
    ],
)  # fmt: skip
def test_the_policy_cuts_what_the_store_supplies(
    given: list[tuple[int, int, int]], policy: dict[str, Any], stored: list[tuple[int, int]]
) -> None:
    index = kvtrie.RadixIndex(num_blocks=8, block_size=16)
    seq = kvtrie.TokenSequence(range(100), kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    wanted = kvtrie.ReusePolicy(**{"approximate": True, "scope": "namespace", **policy})
    plan = FilledPlan(index.plan(seq, wanted), spans(*given), wanted, is_judged=False)
    assert plan.stored == stored
    assert [tuple(one) for one in plan.segments[["start", "end"]].tolist()] == sorted(
        {*stored, *(tuple(one) for one in plan.gaps.tolist())}
    )
    assert plan.num_exact + plan.num_approximate + plan.num_compute == 100
    assert plan.num_exact + plan.num_approximate == sum(end - start for start, end in stored)
    plan.release()


def test_a_gate_file_gets_no_moved_run_of_which_nobody_knows_the_context() -> None:
    index = kvtrie.RadixIndex(num_blocks=8, block_size=16)
    seq = kvtrie.TokenSequence(range(100), kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    policy = kvtrie.ReusePolicy(approximate=True, scope="namespace")
    given = spans((0, 40, 0), (40, 90, -9))
    with index.plan(seq, policy) as plan:
        assert FilledPlan(plan, given, policy, is_judged=True).stored == [(0, 40)]
        assert FilledPlan(plan, given, policy, is_judged=False).stored == [(0, 40), (40, 90)]


def test_a_stricter_policy_of_a_gate_takes_nothing_that_was_built_under_a_laxer_one() -> None:
    """A gate may plan again, under a policy that the store was not asked for."""
    index = kvtrie.RadixIndex(num_blocks=8, block_size=16)
    seq = kvtrie.TokenSequence(range(100), kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    lax = kvtrie.ReusePolicy(approximate=True, scope="namespace")
    strict = lax.replace(recompute_first=8)
    after_moved = PlacedSpan(40, 90, is_exact=False, hops=0, delta=0)
    given = [*spans((0, 40, 0)), after_moved]
    for policy, sought, stored in (
        (lax, lax, [(0, 40), (40, 90)]),
        (strict, lax, [(0, 40)]),
        (lax, strict, [(0, 40), (40, 90)]),
    ):
        with index.plan(seq, policy) as plan:
            assert FilledPlan(plan, given, policy, is_judged=True, sought=sought).stored == stored


def test_what_the_policy_wants_computed_is_not_looked_up() -> None:
    space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    index = kvtrie.RadixIndex(num_blocks=32, block_size=16)
    old = kvtrie.TokenSequence(range(200), space)
    index.insert(old, list(range(12)), num_computed=192, source=kvtrie.COMPUTED)
    new = kvtrie.TokenSequence([*range(1000, 1040), *range(50, 150), *range(2000, 2020)], space)
    for fields, missing in (
        ({}, [(0, 40), (140, 160)]),
        ({"recompute_first": 8}, [(0, 40), (140, 160)]),
        ({"recompute_last": 8}, [(0, 40), (140, 160)]),
        ({"recompute_share": 0.2}, [(0, 40), (140, 160)]),
    ):
        policy = kvtrie.ReusePolicy(approximate=True, scope="namespace", **fields)
        with index.plan(new, policy) as plan:
            assert plan.num_approximate < 100 or not fields
            assert fillable(plan, policy) == missing
