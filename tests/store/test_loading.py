"""Loads into a pool: what is placed, how it is labelled, and what is computed instead."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from tests.engines.architectures import CONFIGS, VOCAB
from tests.store.kit import SECONDS, SECRET, make_store
from tests.store.kit import SPACE as KIT_SPACE

import kvtrie
from kvtrie import KVPool
from kvtrie.engines._runner import Runner
from kvtrie.kernels.reference import rotate
from kvtrie.rope import RopeSpec, Rotary
from kvtrie.store import (
    BackendError,
    Estimate,
    HostBackend,
    PlacedSpan,
    PlacedSpans,
    SpanLoad,
    SpanLoader,
    SpanRun,
    SpanShape,
    SpanStore,
    StoreKey,
    rows_of,
)
from kvtrie.store.loading import TakenSpans, _Room
from kvtrie.store.placing import Arrived
from kvtrie.store.usable import within, without

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

SPACE = kvtrie.Namespace(model="tiny@1", kv_dtype="float32", salt="tenant-a")
NAMESPACE = kvtrie.ReusePolicy(scope="namespace")
BLOCK = 4
BLOCKS = 64
# The parts of a conversation; the next prompt lacks the reasoning.
PARTS = {"question": 40, "reasoning": 24, "answer": 52, "more": 30}


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    pass


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIGS["llama-gqa"]()
    built: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config).eval()
    return built


def ids_of(name: str) -> list[int]:
    draw = np.random.default_rng(sorted(PARTS).index(name))
    return [int(one) for one in draw.integers(3, VOCAB, PARTS[name])]


def prompt_of(*names: str) -> tuple[kvtrie.TokenSequence, list[int]]:
    ids: list[int] = []
    borders = []
    for name in names:
        borders.append(len(ids))
        ids += ids_of(name)
    return kvtrie.TokenSequence(ids, SPACE), borders


class Engine:
    """A pool, an index and the embedded engine's runner, which together compute a prompt."""

    def __init__(self, model: PreTrainedModel) -> None:
        layout = kvtrie.KVLayout.from_config(model.config, block_size=BLOCK, dtype="float32")
        rope = RopeSpec.from_config(model.config)
        self.pool = kvtrie.KVPool(layout, rope, num_blocks=BLOCKS, device=model.device)
        self.index = kvtrie.RadixIndex(num_blocks=BLOCKS, block_size=BLOCK)
        self.runner = Runner(model, self.pool)
        self.free = list(range(BLOCKS))

    def plan(self, seq: kvtrie.TokenSequence, policy: kvtrie.ReusePolicy) -> Any:
        return self.index.plan(seq, policy, keep_last=1)

    def table(self, plan: kvtrie.ReusePlan) -> np.ndarray:
        fresh, self.free = self.free[: plan.num_new_blocks], self.free[plan.num_new_blocks :]
        return np.concatenate([plan.blocks, fresh]).astype(np.int32)

    def compute(
        self, seq: kvtrie.TokenSequence, policy: kvtrie.ReusePolicy = kvtrie.EXACT_ONLY
    ) -> tuple[torch.Tensor, np.ndarray]:
        with self.plan(seq, policy) as plan:
            table = self.table(plan)
            self.pool.apply(plan.moves(table), hops=1)
            logits = self.runner.run(seq, table, [tuple(one) for one in plan.gaps.tolist()])
            self.index.insert(seq, table, num_computed=len(seq), source=plan)
        return logits, table


def store_for(engine: Engine, backend: Any = None) -> SpanStore:
    shape = SpanShape.of(engine.pool.layout)
    backend = backend or HostBackend(1 << 26)
    return SpanStore(backend, StoreKey(SECRET), SPACE, shape, max_bytes=1 << 26)


def filled(model: PreTrainedModel, names: Sequence[str], backend: Any = None) -> SpanStore:
    """A store with the KV of a conversation, without its reasoning."""
    engine = Engine(model)
    store = store_for(engine, backend)
    seq, borders = prompt_of(*names)
    _, table = engine.compute(seq)
    reasoning = borders[names.index("reasoning")] if "reasoning" in names else -1
    session = store.session_of(SPACE, "chat-7")
    for run in store.runs(seq, borders):
        if run.start != reasoning:
            rows = rows_of(engine.pool, table, run.start, run.end)
            assert store.put(run, rows, session=session)
    return store


def served(
    engine: Engine,
    store: SpanStore,
    seq: kvtrie.TokenSequence,
    borders: list[int],
    policy: kvtrie.ReusePolicy,
    **options: Any,
) -> tuple[torch.Tensor, PlacedSpans]:
    loader = SpanLoader(store, pinned=engine.pool.device.type == "cuda")
    with engine.plan(seq, policy) as plan:
        table = engine.table(plan)
        load = loader.start(plan, seq, store.runs(seq, borders), policy, **options)
        engine.pool.apply(plan.moves(table), hops=1)
        assert load.wait(SECONDS)
        placed = load.place(engine.pool, table)
        logits = engine.runner.run(seq, table, placed.compute)
        source = placed.source or plan
        engine.index.insert(seq, table, num_computed=len(seq), source=source)
    assert loader.close(SECONDS)
    return logits, placed


CONVERSATION = ("question", "reasoning", "answer")
FOLLOWING = ("question", "answer", "more")


def test_logits_are_those_of_the_same_plan_served_from_the_pool(model: PreTrainedModel) -> None:
    warm = Engine(model)
    warm.compute(prompt_of(*CONVERSATION)[0])
    seq, borders = prompt_of(*FOLLOWING)
    from_pool, _ = warm.compute(seq, NAMESPACE)

    cold = Engine(model)
    store = filled(model, CONVERSATION)
    from_store, placed = served(cold, store, seq, borders, NAMESPACE)
    assert torch.allclose(from_store, from_pool, atol=1e-5, rtol=1e-5)
    labels = [(one.start, one.end, one.is_exact, one.hops, one.delta) for one in placed.spans]
    assert labels == [(0, 40, True, 0, 0), (40, 92, False, 1, -24)]
    assert placed.compute == ((92, 122),)
    assert placed.source == kvtrie.Imported(exact_until=40, hops=1, policy=NAMESPACE)
    assert cold.index.lookup(seq).num_tokens == 40
    # Whole recomputation differs: what was moved is not called exact for nothing.
    alone, _ = Engine(model).compute(seq)
    assert not torch.allclose(from_store, alone, atol=1e-5, rtol=1e-5)


def test_exact_kv_gives_the_logits_of_recomputation(model: PreTrainedModel) -> None:
    names = ("question", "answer")
    seq, borders = prompt_of(*names, "more")
    store = filled(model, names)
    engine = Engine(model)
    logits, placed = served(engine, store, seq, borders, kvtrie.EXACT_ONLY)
    assert [(one.start, one.end) for one in placed.spans] == [(0, 40), (40, 92)]
    assert all(one.is_exact for one in placed.spans)
    assert placed.source is None
    alone, _ = Engine(model).compute(seq)
    assert torch.allclose(logits, alone, atol=1e-5, rtol=1e-5)
    assert engine.index.lookup(seq).num_tokens == 120


@pytest.mark.cuda
def test_a_pool_on_a_gpu_holds_what_the_store_holds(model: PreTrainedModel) -> None:
    """Rows arrive in pinned memory and are placed on the pool's stream, moved ones rotated."""
    seq, borders = prompt_of(*FOLLOWING)
    on_gpu: Any = transformers.AutoModelForCausalLM.from_config(model.config)
    on_gpu.load_state_dict(model.state_dict())
    engines = [Engine(model), Engine(on_gpu.cuda().eval())]
    store = filled(model, CONVERSATION)
    (want, _), (logits, placed) = (
        served(engine, store, seq, borders, NAMESPACE) for engine in engines
    )
    assert [(one.start, one.end, one.delta) for one in placed.spans] == [(0, 40, 0), (40, 92, -24)]
    # Blocks are handed out in order.
    rows = [rows_of(engine.pool, np.arange(BLOCKS), 0, 92) for engine in engines]
    assert np.array_equal(rows[0].k, rows[1].k)
    assert np.array_equal(rows[0].v, rows[1].v)
    assert torch.allclose(logits.cpu(), want, atol=1e-3, rtol=1e-3)


def test_only_gaps_are_loaded_and_the_last_token_is_computed(model: PreTrainedModel) -> None:
    seq, borders = prompt_of("question", "answer")
    store = filled(model, ("question", "answer"))
    engine = Engine(model)
    engine.compute(kvtrie.TokenSequence(seq[:24], SPACE))
    _, placed = served(engine, store, seq, borders, kvtrie.EXACT_ONLY)
    assert [(one.start, one.end) for one in placed.spans] == [(24, 40), (40, 91)]
    assert placed.compute == ((91, 92),)


@pytest.mark.parametrize(("hops", "end"), [(0, 92), (1, 40)])
def test_what_was_computed_after_moved_runs_may_move_once(
    model: PreTrainedModel, hops: int, end: int
) -> None:
    # As in the pool: it has no hops before it moves, and the policy allows one.
    engine = Engine(model)
    store = store_for(engine)
    seq, borders = prompt_of(*CONVERSATION)
    _, table = engine.compute(seq)
    for run in store.runs(seq, borders):
        rows = rows_of(engine.pool, table, run.start, run.end)
        label: dict[str, Any] = (
            {} if not run.start else {"exact_until": 0, "hops": hops, "policy": NAMESPACE}
        )
        assert store.put(run, rows, **label)
    seq, borders = prompt_of(*FOLLOWING)
    _, placed = served(Engine(model), store, seq, borders, NAMESPACE)
    assert placed.spans[-1].end == end
    assert max(one.hops for one in placed.spans) == (0 if hops else 1)
    assert store.counts().get("hops", 0) == hops


@pytest.mark.parametrize(
    ("why", "policy", "options"),
    [
        ("not_exact", kvtrie.EXACT_ONLY, {}),
        ("scope", kvtrie.ReusePolicy(), {}),
        ("scope", kvtrie.ReusePolicy(), {"session": "chat-8"}),
        ("short", NAMESPACE.replace(min_run=53), {}),
        ("hops", NAMESPACE.replace(max_hops=0), {}),
        ("context", NAMESPACE.replace(max_cuts=1), {}),
        ("repair", NAMESPACE.replace(recompute_share=0.2), {}),
        ("share", NAMESPACE.replace(max_approximate_share=0.1), {}),
        ("short", NAMESPACE, {"moved_end": 50}),
    ],
)
def test_what_a_policy_forbids_is_computed_and_counted(
    model: PreTrainedModel, why: str, policy: kvtrie.ReusePolicy, options: dict[str, Any]
) -> None:
    store = filled(model, CONVERSATION)
    seq, borders = prompt_of(*FOLLOWING)
    _, placed = served(Engine(model), store, seq, borders, policy, **options)
    assert [(one.start, one.end) for one in placed.spans] == [(0, 40)]
    assert placed.compute == ((40, 122),)
    assert store.counts()[why] == 1


def test_a_conversation_may_use_its_own_runs_without_their_edges(model: PreTrainedModel) -> None:
    store = filled(model, CONVERSATION)
    seq, borders = prompt_of(*FOLLOWING)
    policy = kvtrie.ReusePolicy(recompute_first=5, recompute_last=3)
    _, placed = served(Engine(model), store, seq, borders, policy, session="chat-7")
    assert [(one.start, one.end, one.is_exact) for one in placed.spans] == [
        (0, 40, True),
        (45, 89, False),
    ]
    assert placed.compute == ((40, 45), (89, 122))


class Damaged(HostBackend):
    """Flips a bit of what is read at some position."""

    at = -1

    def read(self, name: str, ranges: Any) -> Any:
        found = super().read(name, ranges)
        if found is None or self.at < 0 or name == "kvtrie/store":
            return found
        parts = [bytearray(part) for part in found]
        if len(parts) > 1 and len(parts[1]) > self.at:
            parts[1][self.at] ^= 1
        return [memoryview(part) for part in parts]


def test_a_corrupt_range_is_computed_and_the_answer_is_right(model: PreTrainedModel) -> None:
    backend = Damaged(1 << 26)
    store = filled(model, ("question", "answer"), backend)
    backend.at = 100
    seq, borders = prompt_of("question", "answer", "more")
    logits, placed = served(Engine(model), store, seq, borders, kvtrie.EXACT_ONLY)
    assert placed.spans == ()
    assert placed.compute == ((0, 122),)
    assert store.counts()["corrupt"] == 2
    alone, _ = Engine(model).compute(seq)
    assert torch.allclose(logits, alone, atol=1e-5, rtol=1e-5)


class Slow(HostBackend):
    """Answers once the gate is open."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.gate = threading.Event()
        self.gate.set()

    def exists(self, names: Any) -> list[bool]:
        assert self.gate.wait(SECONDS)
        return super().exists(names)


@pytest.mark.parametrize("encryption", ["none", "aes-256-gcm"])
def test_nothing_of_a_damaged_run_is_placed(encryption: Any) -> None:
    """One bit of a run's header or units is flipped; the run next to it is placed."""
    if encryption != "none":
        pytest.importorskip("cryptography", reason="cryptography is not installed")
    layout = kvtrie.KVLayout(
        num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32", block_size=16
    )
    rope = RopeSpec(layers=(Rotary((1.0, 0.1)),) * 2, head_dim=4)
    backend = HostBackend(1 << 26)
    shape = SpanShape.of(layout)
    store = make_store(
        backend, key=StoreKey(SECRET, encryption=encryption), space=SPACE, shape=shape
    )
    loader = SpanLoader(store)
    blocks = np.arange(40)
    draw = np.random.default_rng(3)
    sentinel = 7.0
    num_placed = 0
    for number in range(400):
        lengths = draw.integers(16, 257, 2).tolist()
        ids = draw.integers(0, 1 << 20, sum(lengths)).tolist()
        first = kvtrie.TokenSequence(ids, SPACE)
        runs = store.runs(first, [lengths[0]])
        pool = kvtrie.KVPool(layout, rope, num_blocks=40)
        drawn = torch.randn(2, 2, len(ids), 1, 4)
        pool.scatter(drawn[0], drawn[1], blocks, 0)
        kept = [rows_of(pool, blocks, run.start, run.end) for run in runs]
        for run, of_run in zip(runs, kept, strict=True):
            assert store.put(run, of_run)
        # Where it was computed, or elsewhere.
        before = [] if number % 2 else draw.integers(0, 1 << 20, 24).tolist()
        prompt = kvtrie.TokenSequence([*before, *ids, 5], SPACE)
        named = store.runs(prompt, [len(before), len(before) + lengths[0], len(prompt) - 1])
        wanted = [run for run in named if run.name in {one.name for one in runs}]
        which = int(draw.integers(2))
        size = shape.num_bytes(lengths[which])
        bit = int(draw.integers(0, 1024 * 8 if draw.random() < 0.2 else size * 8))
        backend._values[runs[which].name][bit // 8] ^= 1 << bit % 8
        for k, v in zip(pool.k, pool.v, strict=True):
            assert v is not None
            k.fill_(sentinel)
            v.fill_(sentinel)
        index = kvtrie.RadixIndex(num_blocks=40, block_size=16)
        with index.plan(prompt, NAMESPACE, keep_last=1) as plan:
            load = loader.start(plan, prompt, named, NAMESPACE)
            assert load.wait(SECONDS)
            placed = load.place(pool, blocks)
        good = wanted[1 - which]
        assert [(one.start, one.end) for one in placed.spans] == [(good.start, good.end)]
        num_placed += good.num_tokens
        of_good = rows_of(pool, blocks, good.start, good.end)
        assert np.array_equal(of_good.v, kept[1 - which].v)
        k, v = pool.gather(blocks, 0, 40 * 16)
        assert v is not None
        for side in (k, v):
            side[:, good.start : good.end] = sentinel
            assert bool((side == sentinel).all())
        for run in runs:
            store.delete(run)
    assert store.counts()["placed_exact"] + store.counts()["placed_approximate"] == num_placed
    assert loader.close(SECONDS)


def test_a_slow_store_makes_nobody_wait(model: PreTrainedModel) -> None:
    backend = Slow(1 << 26)
    store = filled(model, ("question", "answer"), backend)
    seq, borders = prompt_of("question", "answer", "more")
    runs = store.runs(seq, borders)
    engine = Engine(model)
    backend.gate.clear()
    loader = SpanLoader(store, threads=1, max_waiting=1)
    with engine.plan(seq, kvtrie.EXACT_ONLY) as plan:
        table = engine.table(plan)
        loads: list[SpanLoad] = []
        while not store.counts().get("busy"):
            loads.append(loader.start(plan, seq, runs))
        assert loads[-1].is_done
        assert not loads[0].wait(0.01)
        before = [one.clone() for one in engine.pool.k]
        placed = loads[0].place(engine.pool, table)
        assert placed.compute == ((0, 122),)
        assert store.counts()["late"] == 1
        with pytest.raises(ValueError, match="placed or cancelled"):
            loads[0].place(engine.pool, table)
        backend.gate.set()
        assert loader.close(SECONDS)
        assert all(torch.equal(*pair) for pair in zip(before, engine.pool.k, strict=True))
        plan.release()


def test_what_was_sought_is_written_in_parts_and_is_what_place_writes(
    model: PreTrainedModel,
) -> None:
    store = filled(model, CONVERSATION)
    seq, borders = prompt_of(*FOLLOWING)
    whole, parts = Engine(model), Engine(model)
    served(whole, store, seq, borders, NAMESPACE)
    table = np.arange(40)
    loader = SpanLoader(store)
    # No policy cuts it: its caller does.
    policy = NAMESPACE.replace(recompute_first=9, min_run=80)
    done = threading.Event()
    runs = store.runs(seq, borders)
    load = loader.seek(seq, [(0, 92)], lambda: runs, policy, done=done.set)
    assert done.wait(SECONDS)
    taken = load.take(parts.pool)
    load.cancel()
    assert [(one.start, one.end) for one in taken.spans] == [(0, 40), (40, 92)]
    with pytest.raises(ValueError, match="placed or cancelled"):
        load.take(parts.pool)
    # Blocks from the one that holds the first token of each part.
    for start, end in ((0, 30), (30, 55), (55, 92)):
        first = start // BLOCK * BLOCK
        used = table[start // BLOCK : -(-end // BLOCK)]
        assert taken.write(parts.pool, used, [(start, end)], first=first) == end - start
    assert taken.write(parts.pool, table, [(80, 120)]) == 12
    for ours, theirs in zip(
        parts.pool.gather(table, 0, 92), whole.pool.gather(table, 0, 92), strict=True
    ):
        assert ours is not None
        assert theirs is not None
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert loader.close(SECONDS)


def test_a_search_up_to_the_first_gap_ends_there(model: PreTrainedModel) -> None:
    store = filled(model, ("question", "answer", "more"))
    seq, borders = prompt_of("question", "reasoning", "answer", "more")
    engine, loader = Engine(model), SpanLoader(store)
    found = []
    for to_first_gap in (False, True):
        load = loader.seek(
            seq,
            [(0, len(seq))],
            lambda: store.runs(seq, borders),
            NAMESPACE,
            to_first_gap=to_first_gap,
        )
        assert load.wait(SECONDS)
        found.append([(one.start, one.end) for one in load.take(engine.pool).spans])
    assert found == [[(0, 40), (64, 116), (116, 146)], [(0, 40)]]
    assert loader.close(SECONDS)


def test_loads_have_bounded_room_until_they_are_placed_or_cancelled(model: PreTrainedModel) -> None:
    store = filled(model, ("question", "answer"))
    seq, borders = prompt_of("question", "answer", "more")
    runs = store.runs(seq, borders)
    room = store.shape.token_bytes * 92
    loader = SpanLoader(store, max_bytes=room)

    def seek() -> SpanLoad:
        load = loader.seek(seq, [(0, 92)], lambda: runs)
        assert load.wait(SECONDS)
        return load

    first = seek()
    assert first.num_arrived == 92
    assert seek().num_arrived == 0
    assert store.counts()["busy"] == 1
    first.cancel()
    first.cancel()
    third = seek()
    assert third.num_arrived == 92
    # What was taken is held until it is cancelled.
    third.take(Engine(model).pool)
    assert seek().num_arrived == 0
    third.cancel()
    assert seek().num_arrived == 92
    assert loader.close(SECONDS)
    with pytest.raises(ValueError, match="max_bytes is 0"):
        SpanLoader(store, max_bytes=0)


def test_a_tenant_leaves_others_room_for_rows() -> None:
    room = _Room(100, is_shared=True)
    assert not room.take(51, "hostile")
    assert room.take(50, "hostile")
    assert not room.take(1, "hostile")
    assert room.take(25, None)
    room.give(50, "hostile")
    assert room.take(30, "hostile")
    alone = _Room(100, is_shared=False)
    assert alone.take(100, "who comes first")


def test_runs_that_cannot_be_named_end_the_search_alone(model: PreTrainedModel) -> None:
    store = filled(model, ("question",))
    seq, _ = prompt_of("question", "answer")
    loader = SpanLoader(store)

    def fails() -> list[SpanRun]:
        raise RuntimeError("no names")

    load = loader.seek(seq, [(0, 40)], fails)
    assert load.wait(SECONDS)
    assert loader.close(SECONDS)
    assert store.counts()["load_failed"] == 1


def test_on_a_slow_link_it_is_recomputed_and_the_counters_say_why(model: PreTrainedModel) -> None:
    store = filled(model, ("question", "answer"))
    seq, borders = prompt_of("question", "answer", "more")
    engine = Engine(model)
    estimate = Estimate(prefill_tokens_per_s=1e6)
    estimate.loaded(num_bytes=1_000, seconds=5.0)
    loader = SpanLoader(store, estimate=estimate)
    with engine.plan(seq, kvtrie.EXACT_ONLY) as plan:
        load = loader.start(plan, seq, store.runs(seq, borders))
        assert load.wait(SECONDS)
        assert load.num_arrived == 0
        assert store.counts()["chose_recompute_slower"] == 1
        load.cancel()
    assert loader.close(SECONDS)


def test_bad_calls_write_nothing(model: PreTrainedModel) -> None:
    store = filled(model, ("question", "answer"))
    seq, borders = prompt_of("question", "answer")
    engine = Engine(model)
    loader = SpanLoader(store)
    other = kvtrie.KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32")
    with engine.plan(seq, kvtrie.EXACT_ONLY) as plan:
        table = engine.table(plan)
        load = loader.start(plan, seq, store.runs(seq, borders))
        with pytest.raises(ValueError, match="geometry"):
            load.place(kvtrie.KVPool(other, num_blocks=4), table)
        with pytest.raises(ValueError, match="has 3 blocks, the prompt 23"):
            load.place(engine.pool, table[:3])
        beyond = table.copy()
        beyond[-1] = BLOCKS
        with pytest.raises(ValueError, match=f"block {BLOCKS} is not in the pool of {BLOCKS}"):
            load.place(engine.pool, beyond)
        assert load.wait(SECONDS)
        assert load.place(engine.pool, table).compute == ((91, 92),)
    assert loader.close(SECONDS)


ROTARY = Rotary(inv_freq=(1.0, 0.25))
TEXT = list(range(100, 140))
IMAGE = kvtrie.Item(8, 20, b"an image", positions=4)


def after_an_image(
    asked: kvtrie.Item, *, item_positions: bool
) -> tuple[PlacedSpans, KVPool, torch.Tensor, dict[str, int]]:
    """8 tokens, an image and 40 of text are stored; the prompt has the text without the image.

    Its own item is after it.
    """
    layout = kvtrie.KVLayout(
        num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32", block_size=BLOCK
    )
    rope = RopeSpec(layers=(ROTARY,), head_dim=4, item_positions=item_positions)
    pool = KVPool(layout, rope, num_blocks=64)
    keys = torch.randn(1, 60, 1, 4, generator=torch.Generator().manual_seed(0))
    pool.scatter(keys, -keys, range(15), 0)
    shape = SpanShape.of(layout)
    store = SpanStore(HostBackend(1 << 20), StoreKey(SECRET), SPACE, shape, max_bytes=1 << 20)
    source = kvtrie.TokenSequence([*range(8), *[9] * 12, *TEXT], SPACE, [IMAGE])
    for run in store.runs(source, [8, 20]):
        assert store.put(run, rows_of(pool, np.arange(15), run.start, run.end))
    prompt = kvtrie.TokenSequence([*range(8), *TEXT, *[9] * 3, 7], SPACE, [asked])
    index = kvtrie.RadixIndex(num_blocks=64, block_size=BLOCK)
    loader = SpanLoader(store)
    with index.plan(prompt, NAMESPACE, keep_last=1) as plan:
        load = loader.start(plan, prompt, store.runs(prompt, [8, 48]), NAMESPACE)
        assert load.wait(SECONDS)
        placed = load.place(pool, np.arange(15, 28))
    assert loader.close(SECONDS)
    return placed, pool, keys, store.counts()


@pytest.mark.parametrize("item_positions", [True, False])
def test_a_run_after_a_deleted_image_rotates_by_positions(*, item_positions: bool) -> None:
    """By D20: 12 tokens of an image took 4 positions, so the text moves by 4 and not by 12."""
    asked = kvtrie.Item(48, 51, b"another", positions=2)
    placed, pool, keys, _ = after_an_image(asked, item_positions=item_positions)
    assert [(one.start, one.end, one.is_exact, one.delta) for one in placed.spans] == [
        (0, 8, True, 0),
        (8, 48, False, -4),
    ]
    found, values = pool.gather(np.arange(15, 28), 8, 48)
    rope = RopeSpec(layers=(ROTARY,), head_dim=4)
    assert torch.allclose(found[0, :, 0], rotate(keys[0, 20:, 0], rope, -4), atol=1e-5)
    assert values is not None
    assert torch.equal(values[0, :, 0], -keys[0, 20:, 0])


def test_no_run_rotates_where_an_item_does_not_say_its_positions() -> None:
    placed, _, _, counts = after_an_image(kvtrie.Item(48, 51, b"another"), item_positions=True)
    assert [(one.start, one.end) for one in placed.spans] == [(0, 8)]
    assert counts["not_rotated"] == 1


def test_an_image_of_other_positions_is_not_exact_and_not_used(model: PreTrainedModel) -> None:
    engine = Engine(model)
    store = store_for(engine)

    def prompt_with(positions: int | None) -> kvtrie.TokenSequence:
        item = kvtrie.Item(2, 8, b"i", positions=positions)
        return kvtrie.TokenSequence(range(3, 43), SPACE, [item])

    seq = prompt_with(3)
    _, table = engine.compute(seq)
    for run in store.runs(seq, [20]):
        assert store.put(run, rows_of(engine.pool, table, run.start, run.end))
    for positions in (None, 4):
        _, placed = served(Engine(model), store, prompt_with(positions), [20], kvtrie.EXACT_ONLY)
        assert placed.spans == ()


def test_an_estimate_learns_from_loads_that_nobody_waited_for(model: PreTrainedModel) -> None:
    """Else a slow link is never measured, because each of its loads is late."""

    class Gated(HostBackend):
        first = threading.Event()
        gate = threading.Event()

        def read(self, name: str, ranges: Any) -> Any:
            if self.first.is_set() or (name != "kvtrie/store" and len(ranges) > 1):
                self.first.set()
                assert self.gate.wait(SECONDS)
            return super().read(name, ranges)

    backend = Gated(1 << 26)
    store = filled(model, ("question", "answer"), backend)
    seq, borders = prompt_of("question", "answer", "more")
    engine, estimate = Engine(model), Estimate()
    loader = SpanLoader(store, estimate=estimate)
    with engine.plan(seq, kvtrie.EXACT_ONLY) as plan:
        load = loader.start(plan, seq, store.runs(seq, borders))
        assert backend.first.wait(SECONDS)
        load.cancel()
        backend.gate.set()
    assert loader.close(SECONDS)
    assert estimate.load_seconds(1_000) is not None


def test_an_estimate_learns_nothing_from_what_was_not_read(model: PreTrainedModel) -> None:
    """A run that is not exact, or a backend that fails at once, is no fast link."""

    class Failing(HostBackend):
        fails = False

        def read(self, name: str, ranges: Any) -> Any:
            if self.fails:
                raise BackendError(name, reason="unreachable")
            return super().read(name, ranges)

    backend = Failing(1 << 26)
    store = filled(model, CONVERSATION, backend)
    seq, borders = prompt_of("answer", "more")
    estimate = Estimate()
    loader = SpanLoader(store, estimate=estimate)
    with Engine(model).plan(seq, kvtrie.EXACT_ONLY) as plan:
        runs = store.runs(seq, borders)
        assert loader.start(plan, seq, runs).wait(SECONDS)
        assert store.counts()["not_exact"] == 1
        backend.fails = True
        assert loader.start(plan, seq, runs, NAMESPACE).wait(SECONDS)
        assert store.counts()["read_unreachable"] == 1
    assert loader.close(SECONDS)
    assert estimate.load_seconds(1_000) is None


def test_what_is_in_gaps_and_what_is_left_of_them() -> None:
    draw = np.random.default_rng(11)
    store = make_store()
    for _ in range(100):
        marks = np.unique(draw.integers(0, 200, 14)).tolist()
        gaps = tuple(zip(marks[::2], marks[1::2], strict=False))
        inside = {at for low, high in gaps for at in range(low, high)}
        seq = kvtrie.TokenSequence(range(200), KIT_SPACE)
        spans = []
        for run in store.runs(seq, draw.integers(0, 200, 9).tolist()):
            parts = within(run, gaps, [high for _, high in gaps])
            found = [run.start + at for low, high in parts for at in range(low, high)]
            assert found == sorted(inside & set(range(run.start, run.end)))
            spans += [
                PlacedSpan(run.start + low, run.start + high, True, 0, 0)
                for low, high in parts
                if draw.random() < 0.5
            ]
        placed = {at for one in spans for at in range(one.start, one.end)}
        left = [at for low, high in without(gaps, spans) for at in range(low, high)]
        assert left == sorted(inside - placed)


def spans_of(*groups: tuple[int, int, int, int, int]) -> list[PlacedSpan]:
    """Spans of so many tokens, from a start to an end, with their delta and hops."""
    return [
        PlacedSpan(at, min(at + length, end), not delta, hops, delta)
        for start, end, length, delta, hops in groups
        for at in range(start, end, length)
    ]


# Long ones are longer than what is rotated at once.
@pytest.mark.parametrize(
    ("groups", "scatters", "rotations"),
    [
        ([(0, 3000, 3, 0, 0)], 2, 0),
        ([(0, 30, 3, 0, 0), (33, 60, 3, 0, 0)], 2, 0),
        (
            [(0, 30, 3, 0, 0), (30, 60, 3, 5, 1), (60, 90, 3, 5, 2), (90, 96, 3, -7, 2)],
            1 + 2 + 3,
            2,
        ),
        ([(5, 3000, 3000, 4, 1)], 2 * 2, 2),
        ([(5, 3000, 2000, 4, 1)], 2 * 2, 2),
        ([(8 * at, 8 * at + 7, 7, 200 - at, 1 + at % 2) for at in range(200)], 2 + 200, 2),
        ([(8 * at, 8 * at + 8, 8, 1 + at, 1) for at in range(300)], 2 + 300, 2),
    ],
    ids=["short", "a hole", "moved", "a long one", "long ones", "two hops", "many"],
)
def test_short_spans_are_written_together(
    groups: list[tuple[int, int, int, int, int]],
    scatters: int,
    rotations: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = kvtrie.KVLayout(
        num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32", block_size=BLOCK
    )
    rope = RopeSpec(layers=(ROTARY,) * 2, head_dim=4)
    whole, alone = (KVPool(layout, rope, num_blocks=800) for _ in range(2))
    source = KVPool(layout, rope, num_blocks=800)
    table = np.random.default_rng(5).permutation(800)
    rows = torch.randn(2, 3000, 2, 4, generator=torch.Generator().manual_seed(0))
    source.scatter(rows, -rows, table, 0)
    arrived = [
        Arrived(one, rows_of(source, table, one.start, one.end)) for one in spans_of(*groups)
    ]
    for one in arrived:
        TakenSpans((one,)).write(alone, table, [(0, 3000)])
    counts: Counter[str] = Counter()
    scatter, apply = KVPool.scatter, KVPool.apply

    def scattered(*args: Any) -> None:
        counts["scatter"] += 1
        scatter(*args)

    def applied(*args: Any, **rest: Any) -> Any:
        counts["apply"] += 1
        return apply(*args, **rest)

    monkeypatch.setattr(KVPool, "scatter", scattered)
    monkeypatch.setattr(KVPool, "apply", applied)
    num_tokens = sum(one.span.end - one.span.start for one in arrived)
    ranges = [(one.span.start, one.span.end) for one in arrived]
    assert TakenSpans(tuple(arrived)).write(whole, table, ranges) == num_tokens
    assert (counts["scatter"], counts["apply"]) == (scatters, rotations)
    for mine, other in zip((*whole.k, *whole.v), (*alone.k, *alone.v), strict=True):
        assert mine is not None
        assert other is not None
        assert torch.equal(mine, other)
