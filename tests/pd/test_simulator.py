"""The simulator detects wrong loads: of peers' rules, broken plans, readers that do not wait."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.pd import driver, groups

if TYPE_CHECKING:
    from collections.abc import Callable

from tests import pd
from tests.pd.leases import Leases
from tests.pd.serving import Envelope, ServingEngine

import kvtrie

SEEDS = 40


class Broken:
    def __init__(self, change: Callable[[SimpleNamespace], None]) -> None:
        self.change = change

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = kvtrie.plan_transfer(*args, **kwargs)
        names = ("pairs", "compute", "exact_until", "hops", "source", "missing")
        changed = SimpleNamespace(**{name: getattr(plan, name) for name in names})
        changed.length = len(args[1])
        changed.pairs = changed.pairs.copy()
        self.change(changed)
        return changed


def one_block_on(plan: SimpleNamespace) -> None:
    plan.pairs["remote"] = np.roll(plan.pairs["remote"], 1)


def blocks_swapped(plan: SimpleNamespace) -> None:
    plan.pairs["local"] = np.roll(plan.pairs["local"], 1)


def one_token_more(plan: SimpleNamespace) -> None:
    if len(plan.compute):
        plan.compute = plan.missing = plan.compute.copy()
        plan.compute[0, 0] += 1
        if plan.compute[0, 0] >= plan.compute[0, 1]:
            plan.compute = plan.missing = plan.compute[1:]


def called_exact(plan: SimpleNamespace) -> None:
    plan.exact_until = plan.length
    plan.pairs["class"] = 0
    plan.source = kvtrie.Imported(exact_until=plan.length, hops=0)


def no_hops(plan: SimpleNamespace) -> None:
    """Label moved KV as if it were where it was computed."""
    plan.hops = 0
    plan.pairs["hops"] = 0
    plan.source = kvtrie.Imported(exact_until=plan.exact_until, hops=0)


def finds(play: Callable[[int], object]) -> bool:
    for seed in range(SEEDS):
        try:
            play(seed)
        except driver.WrongError:
            return True
    return False


BREAKS = [one_block_on, blocks_swapped, one_token_more, called_exact, no_hops]


@pytest.mark.parametrize("change", BREAKS, ids=lambda change: change.__name__)
def test_broken_plans_show_in_serving(
    change: Callable[[SimpleNamespace], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the check of plans, only labels show it.
    monkeypatch.setattr(driver.Episode, "check_plan", lambda *_: None)
    assert finds(lambda seed: driver.play(seed, 20, Broken(change)))


@pytest.mark.parametrize("change", BREAKS, ids=lambda change: change.__name__)
def test_broken_plans_show_in_groups(change: Callable[[SimpleNamespace], None]) -> None:
    def play(seed: int) -> None:
        for at in range(20):
            groups.play(20 * seed + at, Broken(change))

    assert finds(play)


def test_unbroken_plans_show_nothing() -> None:
    assert not finds(lambda seed: driver.play(seed, 5, Broken(lambda _: None)))


def test_k_that_is_not_turned_shows() -> None:
    moving = kvtrie.ReusePolicy(approximate=True)
    held = pd.Engine("D").compute(range(100))

    def rule(offer: pd.Computed, want: pd.Want) -> pd.Answer:
        answer = pd.RangePlan(moving)(offer, want)
        answer.pieces[:] = [piece._replace(delta=0) for piece in answer.pieces]
        return answer

    outcome = pd.transfer(held, pd.Engine("P"), range(32, 100), rule=rule)
    assert outcome.wrong == outcome.loaded == 68


def test_a_reader_that_does_not_wait_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters ahead of the device: the manifest is right, and the KV is not there yet."""
    episode = driver.Episode(Random(0))
    engine = episode.prefill
    engine.depth = 2
    live, plan = engine.prepare(1, list(range(60)), kvtrie.EXACT_ONLY, 0)
    engine.begin(live, plan)
    live.future = [1, 2, 3]
    while live.to_compute or live.future:
        engine.step([live.name])
        if engine.ledger.final_range(1)[1] >= 60:
            break
    sent = engine.export(live, driver.KEYS[0])
    assert engine.device, "nothing is in flight"
    other = episode.decode
    there, local = other.prepare(2, list(range(60)), kvtrie.EXACT_ONLY, 0)
    seq = kvtrie.TokenSequence(list(range(60)), other.namespace)
    transfer = kvtrie.plan_transfer(
        kvtrie.TransferManifest.from_bytes(sent.raw),
        seq,
        there.table,
        key=driver.KEYS[0],
        block_size=other.block_size,
    )
    other.drain()
    monkeypatch.setattr(engine, "drain", lambda: None)
    other.load(there, sent, transfer)
    other.begin_imported(there, local, transfer)
    assert other.wrong(there)
    monkeypatch.undo()
    engine.drain()
    other.load(there, sent, transfer)
    assert not other.wrong(there)
    other.finish(there)
    engine.finish(live)


def test_blocks_read_without_a_lease_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leases, "require", lambda *_: None)
    assert finds(lambda seed: driver.play(seed, 40))


def test_suffix_trim_is_right_until_something_is_edited() -> None:
    rng, wrong = Random(0), 0
    for _ in range(300):
        sent = [rng.randrange(5000) for _ in range(rng.randrange(1, 100))]
        held = pd.Engine("P", block_size=4).compute(sent)
        cached = rng.randrange(0, len(sent) + 1, 4)
        receiver = pd.Engine("D", block_size=4)
        right = pd.transfer(held, receiver, sent, cached=cached, rule=pd.vllm.suffix_trim)
        assert (right.wrong, right.tainted, right.failed) == (0, 0, None)
        prompt = groups.edited(groups.Text(sent), rng).ids
        if prompt[: len(sent)] != sent[: len(prompt)]:
            edited = pd.transfer(held, receiver, prompt, rule=pd.vllm.suffix_trim)
            wrong += edited.wrong > 0
    assert wrong > 50


def test_a_sender_that_counts_ids_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last sampled id has no KV, and the KV of drafts is of unknown tokens."""

    def counted(self: ServingEngine, live: Any, key: bytes) -> Envelope:
        self.drain()
        room = len(live.table) * self.block_size
        ids = kvtrie.TokenSequence(live.ids[:room], self.namespace)
        raw = kvtrie.TransferManifest.from_blocks(
            ids, live.table, key=key, num_computed=len(ids), block_size=self.block_size
        ).to_bytes()
        return Envelope(self, self.leases.grant(live.name, live.table), raw)

    monkeypatch.setattr(ServingEngine, "export", counted)
    assert finds(lambda seed: driver.play(seed, 20))
