"""Nothing that a tenant chooses buys more than a multiple of ordinary work on the scheduler.

Work is what the connector's functions run (`executed`), and how often they call others. Work that
is proportional to a prompt doubles with it; a tenant would choose what grows with the square.
"""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.vllm.prompts import words
from tests.vllm_scheduler.core import Answer
from tests.vllm_scheduler.executed import executed
from tests.vllm_scheduler.test_exact import ASSISTANT, END, FORMAT, USER
from tests.vllm_scheduler.worker import BLOCK, VOCAB
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.request import Request

import kvtrie
from kvtrie.integrations.vllm import _ranges, _requests, _shadow
from kvtrie.integrations.vllm._account import Account
from kvtrie.integrations.vllm._carried import Carrier
from kvtrie.integrations.vllm._carried_copies import CarriedCopy
from kvtrie.integrations.vllm._dead import DeadReasoning
from kvtrie.integrations.vllm._stats import Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.vllm_scheduler.core import Core

MOVING: dict[str, Any] = {"gate": "unchecked", "policy": {"scope": "namespace", "max_hops": 8}}
LONG = 4800
OPTIONS: dict[str, Any] = {
    "connector": MOVING,
    "blocks": 2000,
    "max_model_len": 16_384,
    "max_num_batched_tokens": 16_384,
    "max_num_seqs": 256,
    "shadow": False,
}
SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
SEGMENTS = np.dtype(
    [
        ("start", "i8"),
        ("end", "i8"),
        ("old", "i8"),
        ("delta", "i8"),
        ("class", "i8"),
        ("hops", "i8"),
    ]
)


class Plan:
    """A plan with as many segments as it has gaps."""

    def __init__(self, count: int, kind: int) -> None:
        rows = []
        for at in range(0, 20 * count, 20):
            rows += [(at, at + 16, at, 0, kind, 0), (at + 16, at + 20, 0, 0, 2, 0)]
        self.segments = np.array(rows, SEGMENTS)
        self.num_exact, self.num_approximate = (16 * count * (kind == one) for one in (0, 1))


def pieces(history: Sequence[int], length: int, gap: int) -> list[int]:
    """A history in pieces that are moved, with new tokens before each."""
    rng = random.Random(7)
    found = [history[at : at + length] for at in range(8, len(history) - length, length)]
    rng.shuffle(found)
    return [token for one in found for token in (*rng.choices(range(3, VOCAB), k=gap), *one)]


def run_by(vllm: Core, prompt: Sequence[int]) -> int:
    with executed() as count:
        vllm.ask(prompt, max_tokens=2)
    assert vllm.counts["errors"] == 0
    return count[0]


def chat(length: int, text: int = 60) -> list[int]:
    """Messages of users and replies, of so many tokens each."""
    found: list[int] = []
    while len(found) < length:
        body = words(2 * text, len(found))
        found += [USER, *body[:text], END, ASSISTANT, *body[text:], END]
    return found[:length]


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param({"mode": "exact"}, id="exact"),
        pytest.param(MOVING, id="moving"),
        pytest.param({**MOVING, "shadow": True}, id="shadow"),
    ],
)
def test_no_prompt_costs_as_much_as_ten_chats_of_its_length(
    core: Callable[..., Core], mode: dict[str, Any]
) -> None:
    gaps = mode is MOVING
    options = {**OPTIONS, "connector": {**mode, "chat_format": FORMAT}}
    history = [token for token in words(2 * LONG, 1) if token > END][:LONG]
    rows = {
        "delimiters": [USER, ASSISTANT] * (LONG // 2),
        "gaps": pieces(history, 24, 1),
        "short gaps": pieces(history, 17, 1),
        "moved segments": pieces(history, BLOCK, 0),
        "one token": [77] * LONG,
        "a period": [70 + at % 17 for at in range(LONG)],
    }
    took = {}
    for name, prompt in {"ordinary": chat(LONG), **rows}.items():
        vllm = core(gaps=gaps, **options)
        vllm.ask(history, max_tokens=1)
        if name in ("one token", "a period"):
            vllm.ask(prompt[5:], max_tokens=1)
        took[name] = run_by(vllm, prompt[:LONG])
        if gaps and "gaps" in name:
            vllm = core(gaps=gaps, **options)
            vllm.ask(history, max_tokens=1)
            with vllm.gap_by_gap():
                took[f"{name}, one by one"] = run_by(vllm, prompt[:LONG])
    ordinary = took.pop("ordinary")
    shares = {name: round(count / ordinary, 1) for name, count in took.items()}
    assert max(shares.values()) < 10, shares


@pytest.mark.parametrize("kind", [0, 1], ids=["exact", "moved"])
@pytest.mark.parametrize("what", ["usable", "shadow"])
def test_ranges_of_a_plan_take_one_pass(kind: int, what: str) -> None:
    """Each range was compared with each segment: a second for a prompt of 128,000 tokens."""
    took = []
    for count in (200, 400):
        plan: Any = Plan(count, kind)
        with executed() as run:
            if what == "usable":
                _, after = _ranges.usable(plan, 0, resumes=True, may_begin=lambda _: True)
                assert len(after) == count - 1
            else:
                would = _shadow.would(plan, 0, 20 * count, may_begin=lambda _: True, cleared=True)
                assert would.moved + would.exact == 16 * count
        took.append(run[0])
    assert took[1] < 2.2 * took[0]


@pytest.mark.parametrize("by_gap", [False, True], ids=["rows", "gap by gap"])
def test_gaps_cost_in_proportion_to_their_number(core: Callable[..., Core], by_gap: bool) -> None:
    took, tables = [], []
    for length in (LONG // 2, LONG):
        vllm = core(gaps=True, **OPTIONS)
        history = words(length, 1)
        vllm.ask(history, max_tokens=1)
        asked: list[str] = []
        get = KVCacheManager.get_block_ids

        def counting(self: Any, request_id: str, get: Any = get, asked: Any = asked) -> Any:
            asked.append(request_id)
            return get(self, request_id)

        prompt = pieces(history, 24, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KVCacheManager, "get_block_ids", counting)
            if by_gap:
                with vllm.gap_by_gap():
                    took.append(run_by(vllm, prompt))
            else:
                took.append(run_by(vllm, prompt))
        tables.append(len(asked))
        assert vllm.counts["tokens_moved"] > 0.9 * length
    assert took[1] < 2.3 * took[0]
    if not by_gap:
        # A table is as long as the prompt: it is read per step, not per gap.
        assert max(tables) < 20


def test_moved_segments_next_to_each_other_cost_in_proportion_to_their_number(
    core: Callable[..., Core],
) -> None:
    """With events, which say of each block what it holds, and with other requests."""
    took = []
    for length in (LONG // 2, LONG):
        events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        vllm = core(gaps=True, kv_events_config=events, **OPTIONS)
        history = words(length, 1)
        vllm.ask(history, max_tokens=1)
        took.append(run_by(vllm, pieces(history, BLOCK, 0)))
        assert vllm.counts["tokens_moved"] > 0.9 * length
    assert took[1] < 2.3 * took[0]


def test_a_request_that_waits_keeps_the_labels_of_one_plan(core: Callable[..., Core]) -> None:
    """Each plan that differed added its own: vLLM asks in each step while there is no room."""
    vllm = core(gaps=True, **OPTIONS)
    history = words(LONG, 1)
    vllm.ask(history, max_tokens=1)
    name = vllm.add(pieces(history, 24, 1))
    request = vllm.request(name)
    planner = vllm.connector.planner
    live = planner.half.requests.live[request.request_id]
    counts = []
    for at in range(20):
        planner.match(request, 0)
        assert live.why is not None
        counts.append(len(live.why.paints))
        # One more block of its sources has left.
        block = live.pending.pinned[at].block_id
        planner.half.requests.drop(request.request_id, live)
        planner.half.sources.forget([block])
    assert max(counts) <= 1.1 * counts[0]
    vllm.drain()


def test_labels_of_what_was_computed_before_a_preemption_stay(core: Callable[..., Core]) -> None:
    vllm = core(gaps=True, **{**OPTIONS, "max_num_batched_tokens": 64, "max_num_seqs": 4})
    prompt = words(200, 1)
    name = vllm.add(prompt)
    vllm.step()
    vllm.preempt(name)
    # Its own blocks leave, so that nothing is found again.
    planner = vllm.connector.planner
    vllm.pool.evict_blocks(set(range(1, 10)))
    planner.half.sources.reset()
    vllm.drain()
    found = {key: n for key, n in vllm.counts.items() if key.startswith("computed_tokens/")}
    assert found == {"computed_tokens/first_seen/other": len(prompt)}


def test_blocks_that_others_need_are_looked_up() -> None:
    """Each place was compared with each block that other conversations continue from."""

    class Block(int):
        num_compared = 0

        def __eq__(self, other: object) -> bool:
            Block.num_compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    count = 500
    kept = [Block(at) for at in range(count)]
    sources: Any = SimpleNamespace(
        remove=lambda *_: ([], kept), blocks=lambda _: [], block_size=BLOCK
    )
    dead = DeadReasoning(SimpleNamespace(), sources, BLOCK, Counts())
    table = list(range(count))
    seen: list[int] = []

    def others(places: Sequence[int]) -> list[int]:
        seen.extend(places)
        return []

    seq: Any = None
    assert dead.drop(seq, [(0, count * BLOCK)], table, others) == []
    assert seen == []
    assert Block.num_compared <= 4 * count


def hops_of(source: object) -> int:
    assert isinstance(source, kvtrie.Imported)
    return source.hops


def test_a_request_has_few_stretches_of_other_hops() -> None:
    """Each takes a call of the index; beyond the bound all have the most hops."""
    policy = kvtrie.ReusePolicy(approximate=True, scope="namespace", max_hops=8)
    seq = kvtrie.TokenSequence(range(16), SPACE)
    live = _requests.LiveRequest(seq, policy, exact_until=0)
    most = _requests.MOST_STRETCHES
    live.moved = [(at * BLOCK, (at + 1) * BLOCK, 1 + at % 2) for at in range(most)]
    found = live.stretches(most, BLOCK)
    assert [hops_of(source) for _, source in found] == [1, 2] * (most // 2)
    live.moved += [(at * BLOCK, (at + 1) * BLOCK, 3 + at % 2) for at in range(most, 2 * most)]
    ((length, source),) = live.stretches(2 * most, BLOCK)
    assert (length, hops_of(source)) == (2 * most, 4)


def test_what_a_block_holds_is_looked_up() -> None:
    rng = random.Random(5)
    policy = kvtrie.ReusePolicy(approximate=True, scope="namespace", max_hops=8)
    live = _requests.LiveRequest(kvtrie.TokenSequence(range(16), SPACE), policy, exact_until=0)
    at = 0
    while at < 3000:
        at += rng.choice([0, 0, 3, 40])
        end = at + rng.randrange(1, 30)
        live.moved.append((at, end, rng.randrange(1, 5)))
        at = end
    took = []
    for block in range(len(live.moved)):
        first, last = block * BLOCK, (block + 1) * BLOCK
        hops = [n for start, end, n in live.moved if start < last and end > first]
        with executed() as run:
            found = live.hops_of(block, BLOCK)
        took.append(run[0])
        assert found == max(hops, default=0)
    assert max(took) < 500


def test_what_was_told_is_not_summed_again() -> None:
    """Each gap that is skipped summed all ranges of its request."""
    told: dict[str, int] = {}
    request: Any = SimpleNamespace(
        prefill_stats=SimpleNamespace(set=told.update), num_prompt_tokens=100_000
    )
    request.prefill_stats.set = lambda **given: told.update(given)
    account = Account()
    account.admit(160, 160)
    took = []
    for at in range(1000):
        account.copy(200 + 20 * at, 210 + 20 * at, is_approximate=True)
        with executed() as run:
            account.tell(request)
        took.append(run[0])
    assert max(took[1:]) < 2 * took[1]
    assert told["num_local_cached_tokens"] == 160
    assert told["num_external_cached_tokens"] == 10_000
    account.fail(1200)
    account.tell(request)
    assert told["num_external_cached_tokens"] == 500


def test_copies_of_ranges_are_those_of_each() -> None:
    """Of all ranges of a step at once, as of one after the other."""
    rng = random.Random(11)
    policy = kvtrie.ReusePolicy(approximate=True, scope="namespace", min_run=16)
    index = kvtrie.RadixIndex(num_blocks=1000, block_size=BLOCK, min_run=16)
    history = words(3000, 2)
    index.insert(
        kvtrie.TokenSequence(history, SPACE),
        np.arange(187, dtype=np.int32),
        num_computed=187 * BLOCK,
        source=kvtrie.COMPUTED,
    )
    num_seen = 0
    for number in range(20):
        prompt = history[: 48 * (number % 3)]
        while len(prompt) < 1500:
            at = rng.randrange(2900)
            prompt = [*prompt, *words(rng.randrange(4), number), *history[at : at + 40]]
        seq = kvtrie.TokenSequence(prompt, SPACE)
        with index.plan(seq, policy, keep_last=1, pin=False) as plan:
            table = rng.sample(range(400, 1000), -(-len(prompt) // BLOCK))
            first, after = _ranges.usable(plan, 0, resumes=True, may_begin=None)
            ranges = [first, *after] if first[1] else after
            ranges = ranges[rng.randrange(3) :]
            ranges[-1] = (ranges[-1][0], ranges[-1][1] - rng.randrange(5))
            whole = _ranges.moves(plan, table, BLOCK, ranges)
            each = [_ranges.moves(plan, table, BLOCK, [one]) for one in ranges]
            assert sorted(whole.tolist()) == sorted(np.concatenate(each).tolist())
            num_seen += len(ranges)
    assert num_seen > 200


def test_holes_of_an_exact_prompt_cost_in_proportion_to_their_number(
    core: Callable[..., Core],
) -> None:
    took = []
    for length in (LONG // 2, LONG):
        vllm = core(gaps=True, **OPTIONS)
        history = words(length, 1)
        vllm.ask(history, max_tokens=1)
        hashes = set(vllm.plain_hashes(history)[1::2])
        gone = {
            block.block_id
            for block in vllm.pool.blocks
            if block.block_hash is not None and get_block_hash(block.block_hash) in hashes
        }
        vllm.pool.evict_blocks(gone)
        vllm.connector.planner.half.sources.forget(gone)
        took.append(run_by(vllm, history[:-3]))
        assert vllm.counts["tokens_exact"] > 0.4 * length
    assert took[1] < 2.3 * took[0]


def test_rows_of_a_request_with_a_long_id_have_short_names(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client chooses the id, which each row of each step had."""
    vllm = core(gaps=True, **OPTIONS)
    history = words(2000, 1)
    vllm.ask(history, max_tokens=1)
    names: list[str] = []
    execute = vllm.worker.execute_model

    def watching(output: Any, *given: Any, **more: Any) -> Any:
        names.extend(output.num_scheduled_tokens)
        return execute(output, *given, **more)

    monkeypatch.setattr(vllm.worker, "execute_model", watching)
    name = "n" * 5000
    request = Request(
        name,
        pieces(history, 24, 1),
        SamplingParams(max_tokens=1, ignore_eos=True),
        None,
        block_hasher=vllm.core.request_block_hasher,
    )
    vllm.answers[name] = Answer()
    vllm.core.add_request(request)
    vllm.drain()
    rows = [one for one in names if one != name]
    assert len(rows) > 50
    assert len(set(rows)) == len(rows)
    assert max(map(len, rows)) < 100


@pytest.mark.parametrize("window", [None, 1024], ids=["full attention", "window"])
def test_a_run_is_cut_in_one_pass(window: int | None) -> None:
    """Where each block lacks what another group needs, and that group has full attention."""
    took = []
    for count in (400, 800):
        carrier: Any = Carrier.__new__(Carrier)
        carrier.block_size, carrier._windows = BLOCK, {1: None, 2: window}
        rows = [CarriedCopy(at * BLOCK, at * BLOCK, BLOCK, 0) for at in range(count)]
        carrier._rows = lambda *_, rows=rows: rows
        # The first group has everything, and the second nothing.
        carrier.find = lambda group, *_: SimpleNamespace(block=0) if group == 1 else None
        plan: Any = Plan(0, 1)
        plan.segments = np.array([(0, count * BLOCK, 0, 0, 1, 1)], SEGMENTS)
        with executed() as run:
            found, carried = carrier.cut(plan, (0, count * BLOCK), kvtrie.EXACT_ONLY)
        assert found == (0, 0)
        assert not carried.blocks
        took.append(run[0])
    assert took[1] < 2.3 * took[0]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_ids_of_any_length_make_short_log_lines(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = core(connector={"gate": "unchecked"}, shadow=False)
    log, kept = logging.getLogger("vllm.kvtrie"), _Lines()
    before = log.level
    log.setLevel(logging.DEBUG)
    log.addHandler(kept)
    try:
        for number, given in enumerate((None, {"kvtrie": "x" * 1_000_000}, None)):
            request = Request(
                f"{number}\n" + "a" * 1_000_000,
                words(40, number),
                SamplingParams(max_tokens=2, extra_args={"kv_transfer_params": given}),
                None,
                block_hasher=vllm.core.request_block_hasher,
            )
            if number == 2:
                monkeypatch.setattr(vllm.connector.planner, "match", len)
            vllm.answers[request.request_id] = Answer()
            vllm.core.add_request(request)
            vllm.drain()
    finally:
        log.removeHandler(kept)
        log.setLevel(before)
    told = [line for line in kept.lines if "request '" in line]
    assert len(told) >= 3
    assert vllm.counts["requests_refused"] == vllm.counts["errors"] == 1
    assert max(map(len, kept.lines)) < 1_000
    assert not any("\n" in line for line in kept.lines)
