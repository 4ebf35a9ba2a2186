"""What the connector costs where nothing is reused: processor time of vLLM's scheduler and worker.

    make bench-vllm         # a tiny model
    make bench-vllm-cost    # the request of 2,000 tokens with a real one, in exact mode: --model

In one engine in one process the connector is removed and put back, so that all else is the same;
the pool is as if it had never been removed (`Bench.keep_up`). A round has four members in random
order, each with a new prompt. *off* and *control* have no connector: their difference is the error
of the method. *plumbing* has one that does nothing. *kvtrie* plans, finds nothing, tags the tokens
and updates its index. ``pairs.py`` says how the differences from *off* are estimated.

With ``--reasons`` the member *silent*, in the place of *plumbing*, is kvtrie without reasons of
misses: what it lacks of *kvtrie* is their cost.

The pool has room, or is full, so that every allocated block is evicted from vLLM's cache and from
kvtrie's index; ``--rows`` measures some rows alone. With ``--model`` there is no *plumbing*, the
pool is full, and there is one request, of 2,000 tokens or ``--rows short``. A second table then has
the processor time inside kvtrie's own calls, by clocks around them: all that a request makes it do
in the scheduler and in the worker. Its part of the request is far below the error of
the pairs, but it lacks what kvtrie's presence makes vLLM do. The pairs have both, and the clocks.

The measured time is the processor time of the process that runs the engine's core, without
tokenizer, detokenizer and HTTP. The tiny model's steps are short, so the same microseconds are a
far smaller part of a real model's step. Decisions of vLLM at its start, because there is a
connector, are not measured.

``--store`` is kvtrie with a store in host memory, which has nothing of any prompt and stores each
in its own thread, whose time counts. It looks up what was ever written, so no new prompt. The
member *looks* stores nothing, and looks every prompt up, as in a store that others write to;
*silent* is kvtrie without the store. With ``--wall`` time is measured, not processor time.

``--rounds FILE`` keeps the rounds as they end; the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benches")]

from tests.vllm import models
from tests.vllm.engine import BLOCK, Engine
from vllm import SamplingParams
from vllm import __version__ as VLLM  # noqa: N812 - a constant
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.request import Request
from vllm_connector.pairs import Kept, header, measure, report

import kvtrie
from kvtrie import COMPUTED, TokenSequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MEMBERS = ("off", "control", "plumbing", "kvtrie")
WITH_SILENT = ("off", "control", "silent", "kvtrie")
WITH_STORE = ("off", "control", "silent", "looks", "kvtrie")
KVTRIE = ("silent", "looks", "kvtrie")
STORE = {"backend": "host", "max_bytes": 1 << 28}
# A round with a real model takes a quarter of a minute.
WITH_MODEL = ("off", "control", "kvtrie")
# Markers of messages and reasoning: a few of the words that prompts are made of.
FORMAT = {"user": 3, "assistant": 4, "reasoning": [5, 6]}
WARM_UP = 6
# Tokens that a request generates: few, so that costs per request weigh more.
ANSWER = 16
# Rounds that one batch decodes, and the steps of each member in a round that are timed.
ROUNDS = 20
TIMED = 4
CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "build_connector_worker_meta",
)


class Plumbing(KVConnectorBase_V1, SupportsHMA):
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        """Do nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:  # noqa: ANN401 - vLLM's
        """Do nothing."""

    def wait_for_save(self) -> None:
        """Do nothing."""

    def get_num_new_matched_tokens(self, request: Request, num: int) -> tuple[int, bool]:  # noqa: ARG002 - vLLM's
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: Any, num: int) -> None:  # noqa: ANN401 - vLLM's
        """Do nothing."""

    def build_connector_meta(self, output: Any) -> KVConnectorMetadata:  # noqa: ANN401, ARG002 - vLLM's
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Request, ids: Any) -> tuple[bool, None]:  # noqa: ANN401, ARG002 - vLLM's
        return False, None


@dataclass(frozen=True)
class Work:
    """Requests that run at once."""

    name: str
    num_requests: int
    prompt_tokens: int

    @property
    def num_blocks(self) -> int:
        return self.num_requests * -(-(self.prompt_tokens + ANSWER) // BLOCK)


PROMPT = Work("one request, 2,000 new tokens", 1, 2_000)
SHORT = Work("one request, 200 new tokens", 1, 200)
BATCH = Work("16 requests at once, 100 new tokens each", 16, 100)
# Whole requests, and whether the pool is full.
REQUESTS = {
    "room": (PROMPT, False),
    "prompt": (PROMPT, True),
    "short": (SHORT, True),
    "batch": (BATCH, True),
}
# Decode steps, in a full pool.
STEPS = (
    Work("1 running request", 1, 2_000),
    Work("16 running requests", 16, 100),
    Work("64 running requests", 64, 40),
)


class Bench:
    """The engine, and the member that is in place of its connector."""

    def __init__(
        self,
        model: Path,
        num_blocks: int,
        *,
        is_exact: bool = False,
        dtype: str = "float32",
        **settings: object,
    ) -> None:
        how = {"mode": "exact"} if is_exact else {"gate": "unchecked"}
        self.engine = Engine(
            model,
            connector={**how, "chat_format": FORMAT, **settings},
            blocks=num_blocks,
            dtype=dtype,
            shadow=False,
            # A step then returns the tokens that it computes.
            async_scheduling=False,
            max_num_seqs=64,
            max_num_batched_tokens=4096,
        )
        self._core, self._scheduler = self.engine.core, self.engine.scheduler
        if self._scheduler.use_v2_model_runner:
            raise RuntimeError("vLLM's model runner V2 keeps the connector in another place")  # noqa: EM101 - read by a developer
        if self._core.batch_queue is not None:
            raise RuntimeError("steps are in flight when the connector is removed")  # noqa: EM101 - read by a developer
        self.kvtrie = (self.engine.connector, self.engine.worker)
        for half in self.kvtrie:
            # The counting of the tests.
            del half._counts.add
        del self._scheduler.update_from_output
        config, groups = self.kvtrie[0]._vllm_config, self.kvtrie[0]._kv_cache_config
        self._plumbing = tuple(
            Plumbing(config, role, groups)
            for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
        )
        self._plumbing[0].bind_kv_cache_manager(self._scheduler.kv_cache_manager)
        self._reasons = self.kvtrie[0].planner.half.reasons
        self._stored = self.kvtrie[0].planner.half.stored
        self._known_runs = None if self._stored is None else self._stored._known_runs
        self.clock = time.process_time
        self._defers = self._scheduler.defer_block_free
        self._watchers: dict[int, Any] | None = None
        self._number = 0

    def described(self) -> str:
        model = self.kvtrie[0]._vllm_config.model_config
        dtype = str(model.dtype).removeprefix("torch.")
        num_blocks = self.engine.pool.num_gpu_blocks
        name = Path(model.model).name
        return f"vLLM {VLLM}, {name} in {dtype}, a pool of {num_blocks:,} blocks of {BLOCK} tokens"

    def switch(self, member: str) -> None:
        """Put a connector in, or none; no step is under way."""
        halves = {"plumbing": self._plumbing, **dict.fromkeys(KVTRIE, self.kvtrie)}
        mine, workers = halves.get(member, (None, None))
        is_silent, planner = member == "silent", self.kvtrie[0].planner
        reasons = None if is_silent and self._stored is None else self._reasons
        if self._stored is not None:
            planner.half.stored = None if is_silent else self._stored
            given = self._stored._settings
            self._stored._settings = replace(given, turns=0 if member == "looks" else 64)
            self._stored._known_runs = None if member == "looks" else self._known_runs
        planner.half.reasons = planner.half.offers._reasons = reasons
        self._scheduler.connector = mine
        self._scheduler.defer_block_free = self._defers and mine is not None
        kv_transfer_state._KV_CONNECTOR_AGENT = workers
        if member not in KVTRIE:
            # Without kvtrie nothing watches the allocated blocks.
            self._watchers = self.engine.pool._reuse_watchers
            self.engine.pool._reuse_watchers = {}

    def keep_up(self, requests: list[Request]) -> None:
        if self._watchers is None:
            return
        pool, sources = self.engine.pool, self.kvtrie[0].planner.half.sources
        pool._reuse_watchers, self._watchers = self._watchers, None
        gone = [number for number in pool._reuse_watchers if sources.is_stale(number)]
        pool._notify_reuse([pool.blocks[number] for number in gone])
        space = self.kvtrie[0].planner.half.space_of(None, None)
        for request in requests:
            found = [pool.get_cached_block(one, [0]) for one in request.block_hashes]
            ids = [blocks[0].block_id for blocks in found if blocks]
            tokens = list(request.all_token_ids)
            written = [((len(tokens) - 1) // self.engine.scheduler.block_size, COMPUTED)]
            sources.offer(TokenSequence(tokens, space), ids, written)

    def _requests(self, work: Work, answer: int, rng: random.Random) -> list[dict[str, Any]]:
        params = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True, detokenize=False)
        asked = []
        for _ in range(work.num_requests):
            self._number += 1
            prompt = rng.choices(range(3, 500), k=work.prompt_tokens)
            asked.append(
                {
                    "request_id": f"request-{self._number}",
                    "prompt_token_ids": prompt,
                    "sampling_params": params,
                    "pooling_params": None,
                }
            )
        return asked

    def _add(self, asked: list[dict[str, Any]]) -> list[Request]:
        hasher = self._core.request_block_hasher
        requests = [Request(**one, block_hasher=hasher) for one in asked]
        for request in requests:
            self._core.add_request(request)
        return requests

    def _step(self) -> None:
        self._core.post_step(self._core.step_fn()[1])

    def run(self, member: str, work: Work, rng: random.Random) -> dict[str, float]:
        clock = self.clock
        asked = self._requests(work, ANSWER, rng)
        self.switch(member)
        gc.collect()
        began = clock()
        requests = self._add(asked)
        self._step()
        if self._stored is not None:
            # Requests wait for the store at first.
            while not all(request.num_output_tokens for request in requests):
                self._step()
        first = clock()
        # After the decode steps, one more step reports the finished requests to the worker.
        while self._scheduler.has_requests():
            self._step()
        if self._stored is not None and self.clock is time.process_time:
            # What was begun is this member's.
            store = self.kvtrie[1]._store
            if store is None or not store.wait(60):
                msg = f"{work.name}: turns are not stored"
                raise RuntimeError(msg)
        ended = clock()
        self.keep_up(requests)
        if any(request.num_output_tokens != ANSWER for request in requests):
            raise RuntimeError(f"{work.name}: a step did not take all requests")  # noqa: EM102 - read by a developer
        return {
            "to the first token": first - began,
            f"to the end, {ANSWER} answered": ended - began,
        }

    def decode(self, work: Work, rng: random.Random) -> Iterator[dict[str, float]]:
        """Rounds of decode steps of one batch: each member's mean seconds per step."""
        clock = time.process_time
        self.switch("kvtrie")
        self._add(self._requests(work, len(MEMBERS) * ROUNDS * (TIMED + 1) + 8, rng))
        gc.collect()
        # The steps that compute the prompts and record them.
        for _ in range(3):
            self._step()
        for _ in range(ROUNDS):
            order, took = list(MEMBERS), {}
            rng.shuffle(order)
            for member in order:
                self.switch(member)
                # Code that has not run for a while is read from memory; a batch that stays with one
                # scheduler pays for that once.
                self._step()
                began = clock()
                for _ in range(TIMED):
                    self._step()
                took[member] = (clock() - began) / TIMED
                self.keep_up([])
            yield took
        self.switch("kvtrie")
        while self._scheduler.has_requests():
            self._step()

    def reset(self) -> None:
        self.switch("kvtrie")
        self.engine.reset()

    def fill(self, rng: random.Random) -> None:
        self.reset()
        for _ in range(self.engine.pool.num_gpu_blocks // PROMPT.num_blocks + 2):
            self.run("kvtrie", PROMPT, rng)

    def watch_calls(self) -> dict[str, float]:
        spent: dict[str, float] = defaultdict(float)

        def timed(name: str, call: Callable[..., object]) -> Callable[..., object]:
            def inner(*args: object, **kwargs: object) -> object:
                began = time.thread_time()
                try:
                    return call(*args, **kwargs)
                finally:
                    spent[name] += time.thread_time() - began

            return inner

        for half, name in self._called():
            setattr(half, name, timed(name, getattr(half, name)))
        return spent

    def unwatch_calls(self) -> None:
        for half, name in self._called():
            delattr(half, name)

    def _called(self) -> list[tuple[Any, str]]:
        return [(half, name) for half in self.kvtrie for name in CALLS]


@contextmanager
def collected() -> Iterator[None]:
    """Disable automatic garbage collection inside, and exclude older objects from collections."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def report_requests(
    bench: Bench,
    work: Work,
    num_rounds: int,
    rng: random.Random,
    kept: Kept,
    *,
    is_full: bool,
    members: tuple[str, ...] = MEMBERS,
) -> None:
    room, num_blocks = 0, len(members) * work.num_blocks
    if is_full:
        bench.fill(rng)

    def take(member: str) -> dict[str, float]:
        nonlocal room
        if not is_full and room < work.num_blocks:
            bench.reset()
            room = bench.engine.pool.get_num_free_blocks() // num_blocks * num_blocks
        room -= work.num_blocks
        return bench.run(member, work, rng)

    pool = "full pool" if is_full else "pool with room"
    name = f"{work.name}, {pool}: from arrival {{}}"
    with collected():
        rounds = measure(name, members, take, num_rounds, rng, warm_up=WARM_UP, kept=kept)
    report(name, rounds, members)


def report_steps(bench: Bench, work: Work, num_rounds: int, rng: random.Random, kept: Kept) -> None:
    name = f"a decode step, {work.name}"
    rounds = kept.read(name)[:num_rounds]
    bench.fill(rng)
    with collected():
        while len(rounds) < num_rounds:
            # The first steps of a batch warm up.
            for took in list(bench.decode(work, rng))[WARM_UP:]:
                one = {member: {"": seconds} for member, seconds in took.items()}
                kept.add(name, one)
                rounds.append(one)
    report(name, rounds[:num_rounds], MEMBERS)


def report_model(
    bench: Bench,
    work: Work,
    num_rounds: int,
    rng: random.Random,
    kept: Kept,
    members: tuple[str, ...],
) -> None:
    """One request in a full pool, with clocks around kvtrie's calls."""
    spent = bench.watch_calls()
    bench.fill(rng)

    def take(member: str) -> dict[str, float]:
        spent.clear()
        took = bench.run(member, work, rng)
        return took | {name: spent[name] for name in CALLS} if member == "kvtrie" else took

    name = f"{work.name}, full pool: from arrival {{}}"
    with collected():
        rounds = measure(name, members, take, num_rounds, rng, warm_up=1, kept=kept)
    bench.unwatch_calls()
    report(name, rounds, members)
    whole = list(rounds[0]["off"])[-1]
    base = statistics.fmean(one["off"][whole] for one in rounds)
    print("\n| in kvtrie's calls, clocks included | mean (us) | largest (us) | % of the request |")
    print("| --- | --- | --- | --- |")
    parts = {name: [one["kvtrie"][name] for one in rounds] for name in CALLS}
    parts["all"] = [sum(one["kvtrie"][name] for name in CALLS) for one in rounds]
    for name, took in parts.items():
        mean = statistics.fmean(took)
        if mean:
            cells = f"{1e6 * mean:,.0f} | {1e6 * max(took):,.0f} | {100 * mean / base:.4f}"
            print(f"| {name} | {cells} |")


def report_calls(bench: Bench, work: Work, rng: random.Random, num_rounds: int) -> None:
    spent = bench.watch_calls()
    for _ in range(num_rounds):
        bench.run("kvtrie", work, rng)
    bench.unwatch_calls()
    parts = ", ".join(
        f"{name} {1e6 * seconds / num_rounds:.0f}"
        for name, seconds in sorted(spent.items(), key=lambda item: -item[1])
    )
    whole = 1e6 * sum(spent.values()) / num_rounds
    print(f"{work.name}: {whole:.0f} us in kvtrie's calls, clocks included: {parts}", flush=True)


def settings(options: argparse.Namespace, num_blocks: int, **more: object) -> dict[str, object]:
    """What rounds must agree in to be those of one measurement, with the code."""
    digest = hashlib.sha256()
    folder = Path(kvtrie.__file__).parent
    for path in (folder / "_core.abi3.so", *sorted(folder.rglob("*.py"))):
        digest.update(path.read_bytes())
    return {
        "model": options.model.name if options.model else "tiny",
        "blocks": num_blocks,
        "vllm": VLLM,
        "kvtrie": f"{kvtrie.__version__} {digest.hexdigest()[:12]}",
        **more,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200, help="rounds of each row")
    parser.add_argument("--blocks", type=int, help="of the pool: 2,048, with a model 200")
    parser.add_argument("--calls", action="store_true", help="kvtrie's own calls, no pairs")
    parser.add_argument("--decode", action="store_true", help="decode steps alone")
    parser.add_argument("--reasons", action="store_true", help="what reasons of misses cost, alone")
    parser.add_argument("--exact", action="store_true", help="exact mode")
    parser.add_argument("--store", action="store_true", help="with a store that has nothing")
    parser.add_argument("--wall", action="store_true", help="time in the place of processor time")
    parser.add_argument("--model", type=Path, help="a model, else a tiny one; one row of it")
    parser.add_argument("--dtype", help="of the model: auto, of the tiny one float32")
    parser.add_argument("--rows", nargs="+", choices=REQUESTS, help="all, of a model: prompt")
    parser.add_argument("--rounds", type=Path, help="a file that keeps the rounds")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    num_rounds = options.pairs
    num_blocks = options.blocks or (200 if options.model else 2_048)
    members: tuple[str, ...] = WITH_SILENT if options.reasons else MEMBERS
    if options.store or options.model:
        members = WITH_STORE if options.store else WITH_MODEL
    more = {name: getattr(options, name) for name in ("exact", "store", "wall", "dtype")}
    more["members"] = " ".join(members)
    kept = Kept(options.rounds, settings(options, num_blocks, **more))
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or models.llama(Path(folder) / "llama")
        dtype = options.dtype or ("auto" if options.model else "float32")
        store = {"store": STORE} if options.store else {}
        bench = Bench(model, num_blocks, is_exact=options.exact, dtype=dtype, **store)
        if options.wall:
            bench.clock = time.perf_counter
        if options.calls:
            for work in (PROMPT, SHORT, BATCH):
                bench.fill(rng)
                report_calls(bench, work, rng, num_rounds)
            return
        mode = "exact mode" if options.exact else "approximate reuse, without a gate"
        print(f"{bench.described()}; {mode}.\n")
        header("time" if options.wall else "processor time", members)
        if options.model:
            for row in options.rows or ["prompt"]:
                report_model(bench, REQUESTS[row][0], num_rounds, rng, kept, members)
        else:
            for row in () if options.decode else options.rows or REQUESTS:
                work, is_full = REQUESTS[row]
                report_requests(
                    bench, work, num_rounds, rng, kept, is_full=is_full, members=members
                )
            for work in () if options.reasons or options.store or options.rows else STEPS:
                report_steps(bench, work, num_rounds, rng, kept)
        bench.switch("kvtrie")


if __name__ == "__main__":
    main()
