"""Why tokens of a prompt are computed: a case for each reason, and sums over random prompts."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

import kvtrie
from kvtrie.gates.decision import Decision
from kvtrie.metrics import REASONS, Prompts
from kvtrie.metrics.reasons import NAMES, Context

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZE = 16
NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
WIDE = kvtrie.ReusePolicy(scope="namespace", min_run=16)
HISTORY = range(100, 100 + 8 * SIZE)


class Engine:
    """An index, the blocks of its pool, and counts of what is asked."""

    def __init__(self, **options: Any) -> None:
        self.index = kvtrie.RadixIndex(64, SIZE, min_run=16, **options)
        self.pool = kvtrie.BlockAllocator(64)
        self.prompts = Prompts(self.index)

    def keep(
        self,
        ids: Sequence[int],
        source: kvtrie.ReusePlan | kvtrie.ComputedSource | kvtrie.Imported = kvtrie.COMPUTED,
        space: kvtrie.Namespace = NS,
        session: str | None = None,
    ) -> None:
        seq = kvtrie.TokenSequence(ids, space)
        known = self.index.lookup(seq).num_tokens
        fresh = self.pool.allocate(len(ids) // SIZE - known // SIZE)
        self.index.insert(
            seq, fresh, num_computed=len(ids), start=known, source=source, session=session
        )

    def ask(
        self,
        ids: Sequence[int],
        policy: kvtrie.ReusePolicy = kvtrie.EXACT_ONLY,
        space: kvtrie.Namespace = NS,
        **options: Any,
    ) -> dict[str, int]:
        seq = kvtrie.TokenSequence(ids, space)
        where = {name: options[name] for name in ("session",) if name in options}
        with self.index.plan(seq, policy, keep_last=options.get("keep_last", 1), **where) as plan:
            found = self.prompts.count(seq, plan, policy, **options)
            assert sum(found.values()) == plan.num_compute
        assert set(found) <= set(REASONS)
        return found


@pytest.fixture
def engine() -> Engine:
    found = Engine()
    found.keep(HISTORY)
    return found


def edited() -> list[int]:
    """The history without its third block, and with 10 new tokens."""
    return [*HISTORY[: 2 * SIZE], *HISTORY[3 * SIZE :], *range(1000, 1010)]


def test_first_seen(engine: Engine) -> None:
    assert engine.ask(range(500, 540)) == {"first_seen": 40}
    # Ten tokens in common are less than a block: one of them is copied, and none is shared.
    assert engine.ask([*HISTORY[:10], *range(500, 530)]) == {"first_seen": 30}


def test_new(engine: Engine) -> None:
    assert engine.ask([*HISTORY, *range(500, 530)]) == {"new": 30}


def test_diverged(engine: Engine) -> None:
    assert engine.ask([*HISTORY[: 3 * SIZE], *range(500, 530)]) == {"diverged": 30}


def test_evicted(engine: Engine) -> None:
    engine.pool.free(engine.index.evict(2))
    assert engine.ask(HISTORY) == {"evicted": 2 * SIZE}


def test_other_namespace(engine: Engine) -> None:
    other = kvtrie.Namespace(model="m", adapter="a", salt=kvtrie.SHARED)
    assert engine.ask(HISTORY, space=other) == {"other_namespace": len(HISTORY)}


def test_other_salt() -> None:
    engine = Engine()
    tenants = [kvtrie.Namespace(model="m", salt=salt) for salt in ("tenant-a", "tenant-b")]
    assert engine.ask(HISTORY, space=tenants[0]) == {"first_seen": len(HISTORY)}
    assert engine.ask(HISTORY, space=tenants[1]) == {"other_salt": len(HISTORY)}
    # The latest one counts.
    assert engine.ask(HISTORY, space=tenants[1]) == {"first_seen": len(HISTORY)}


def test_approximate_only() -> None:
    engine = Engine()
    laxer = WIDE.replace(max_hops=3)
    engine.keep(HISTORY, kvtrie.Imported(exact_until=2 * SIZE, policy=laxer))
    assert engine.ask(HISTORY) == {"approximate_only": 6 * SIZE}
    assert engine.ask([*HISTORY, *range(20)], laxer) == {"new": 20}
    # Built without computing fronts, so a policy that computes them does not use it.
    assert engine.ask(HISTORY, laxer.replace(recompute_first=8)) == {
        "recomputed": 6 * SIZE - 1,
        "last_token": 1,
    }


def test_moved_runs_and_their_limits(engine: Engine) -> None:
    found = engine.ask(edited(), WIDE)
    assert found == {"new": 10}
    # Two tokens of each run are recomputed.
    found = engine.ask(edited(), WIDE.replace(recompute_first=2))
    assert found == {"recomputed": 2, "new": 10}
    # A policy without hops: the same runs are limited.
    found = engine.ask(edited(), WIDE.replace(max_approximate_share=0.01))
    assert found == {"limited": 5 * SIZE, "new": 10}
    found = engine.ask(edited(), WIDE.replace(scope="conversation", shared_prefix=64))
    assert found == {"out_of_scope": 5 * SIZE, "new": 10}


def test_last_token(engine: Engine) -> None:
    assert engine.ask(HISTORY) == {"last_token": 1}
    assert engine.ask(HISTORY, keep_last=5) == {"last_token": 5}


@pytest.mark.parametrize(("is_cleared", "reason"), [(True, "exact_asked"), (False, "not_cleared")])
def test_exact_asked_and_not_cleared(engine: Engine, is_cleared: bool, reason: str) -> None:
    class Fixed(Decision):
        def of(self, plan: Any) -> Decision:
            exact = Decision(kvtrie.EXACT_ONLY, is_cleared=False, reason="")
            return self if is_cleared or not plan.num_approximate else exact

    default = Fixed(WIDE, is_cleared=True, reason="")
    for asked in (kvtrie.EXACT_ONLY, WIDE)[: 1 if is_cleared else 2]:
        seq = kvtrie.TokenSequence(edited(), NS)
        with engine.index.plan(seq) as plan:
            context = Context(policy=kvtrie.EXACT_ONLY, asked=asked, default=default)
            found = engine.prompts.add(seq, plan, engine.prompts.look(seq, plan, context))
        assert found == {reason: 5 * SIZE, "new": 10}


def test_no_room(engine: Engine) -> None:
    in_place = kvtrie.ReusePolicy(approximate=False, partial_blocks=False)
    seq = kvtrie.TokenSequence(edited(), NS)
    with engine.index.plan(seq, in_place) as plan:
        context = Context(policy=in_place, asked=WIDE, wanted=WIDE)
        found = engine.prompts.add(seq, plan, engine.prompts.look(seq, plan, context))
    assert found == {"no_room": 5 * SIZE, "new": 10}


def test_every_reason_has_a_case() -> None:
    """Each name is in a test above."""
    text = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in NAMES if f'"{name}"' not in text] == []


def test_kinds_are_counted_by_span_and_bounded(engine: Engine) -> None:
    spans = [kvtrie.Span(0, 3 * SIZE, "user"), kvtrie.Span(SIZE, SIZE + 4, "reasoning")]
    engine.ask([*HISTORY[: 2 * SIZE], *range(500, 530)], spans=spans)
    totals = engine.prompts.totals()
    assert totals.prompt == {
        ("exact", "user"): 2 * SIZE - 4,
        ("exact", "reasoning"): 4,
        ("recomputed", "user"): SIZE,
        ("recomputed", "other"): 14,
    }
    assert totals.computed == {("diverged", "user"): SIZE, ("diverged", "other"): 14}
    for number in range(100):
        engine.ask(range(500, 510), spans=[kvtrie.Span(0, 5, f"kind-{number}")])
    assert len({kind for _, kind in engine.prompts.totals().prompt}) == 64
    assert engine.prompts.totals().prompt.total() == 2 * SIZE + 30 + 1000


def test_a_plan_of_another_prompt_is_refused(engine: Engine) -> None:
    with engine.index.plan(kvtrie.TokenSequence([1, 2, 3], NS)) as plan:
        other = kvtrie.TokenSequence([1, 2], NS)
        with pytest.raises(ValueError, match="the prompt has 2 tokens, the plan 3"):
            engine.prompts.count(other, plan)
    with pytest.raises(kvtrie.StaleHandleError):
        engine.prompts.count(kvtrie.TokenSequence([1, 2, 3], NS), plan)
    assert engine.prompts.totals().prompt.total() == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_prompts_add_up(seed: int) -> None:
    rng = Random(seed)
    engine = Engine(seed=seed)
    policies = [kvtrie.EXACT_ONLY, WIDE, WIDE.replace(recompute_first=3), kvtrie.ReusePolicy()]
    expected = dict.fromkeys(("exact", "moved", "recomputed"), 0)
    num_copied = 0
    texts: list[list[int]] = [[rng.randrange(50) for _ in range(200)]]
    for _ in range(150):
        base = rng.choice(texts)
        start = rng.randrange(0, 100)
        end = start + rng.randrange(0, 40)
        ids = [*base[:start], *(rng.randrange(50) for _ in range(rng.randrange(5))), *base[end:]]
        ids = ids[:240]
        texts = [*texts[-5:], ids]
        policy = rng.choice(policies)
        session = rng.choice([None, "a", "b"])
        seq = kvtrie.TokenSequence(ids, NS)
        with engine.index.plan(seq, policy, session=session) as plan:
            found = engine.prompts.count(seq, plan, policy, session=session)
            assert sum(found.values()) == plan.num_compute
            assert min(found.values()) > 0
            expected["exact"] += plan.num_exact
            expected["moved"] += plan.num_approximate
            expected["recomputed"] += plan.num_compute
            fresh = engine.pool.allocate(plan.num_new_blocks, evict_from=engine.index)
            table = [*plan.blocks.tolist(), *fresh.tolist()]
            num_copied += int(plan.moves(table)["num_tokens"].sum())
            done = engine.index.insert(
                seq, table, num_computed=len(ids), source=plan, session=session
            )
            for gone in (done.duplicates, done.surplus, done.freed):
                engine.pool.free(gone)
        engine.pool.free(engine.index.take_freed())
    totals = engine.prompts.totals()
    assert {how: totals.prompt[how, "other"] for how in expected} == expected
    assert totals.computed.total() == expected["recomputed"]
    assert totals.copied.total() == num_copied
    assert totals.copied["exact"] > 0 < totals.copied["moved"]
    assert len(totals.computed) > 3
