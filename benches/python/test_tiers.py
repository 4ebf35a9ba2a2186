"""The tiers of `tiers.py`: figures worked by hand, and what always holds between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tiers
from tiers import BLOCK_SIZE, Found, Request, Traffic
from workloads.history import Piece, conversation

import kvtrie
from kvtrie.store import HostBackend, SpanRows, SpanStore, StoreKey, rows_of

if TYPE_CHECKING:
    from kvtrie.pool.kv_pool import KVPool
    from kvtrie.store import PrefixMarks, SpanRun


def text(first: int, kind: str) -> Piece:
    return Piece(np.arange(first, first + 2 * BLOCK_SIZE, dtype=np.uint32), kind)


def two_agents() -> Traffic:
    """Each has a turn of question, reasoning and answer, and asks again: the first one last."""
    talks, requests = [], []
    for at in range(2):
        first, reasoning, answer, second, more, last, third = (
            text(1_000 * at + 100 * part, kind)
            for part, kind in enumerate(
                ("user", "reasoning", "answer", "user", "reasoning", "answer", "user")
            )
        )
        prompt = [first, answer, second]
        talks.append(
            [
                conversation([first, reasoning, answer], prompt, sampled=False),
                conversation([*prompt, more, last], [*prompt, last, third], sampled=False),
            ]
        )
    for talk, turn in ((0, 0), (1, 0), (1, 1), (0, 1)):
        requests.append(Request(talk, turn, 6 * BLOCK_SIZE if turn else 2 * BLOCK_SIZE, True, True))
    return Traffic(talks, requests)


def blocks(found: dict[str, Found]) -> dict[str, float]:
    return {name: one.tokens / BLOCK_SIZE for name, one in found.items()}


def test_found_by_hand() -> None:
    asked = two_agents()
    assert asked.asked == 12 * BLOCK_SIZE
    # The first one has requests 1 to 4, the second 2 and 3.
    assert asked.num_live == (4 + 2) / 4
    # Of each second prompt the question and the answer, 4 of 6 blocks, were computed before.
    assert blocks(tiers.measured(asked, None)) == {
        "store": 8,
        "SmolLM2": 8,
        "by cost": 8,
        "any order": 8,
        "last use": 8,
        "times used": 8,
        "chained hashes": 4,
    }
    # The second agent's 4 blocks, and of the first one's what has room before its turn comes: that
    # of the end of the second is known to be useless to one ceiling only.
    some = blocks(tiers.measured(asked, 6))
    ceilings = {name: some[name] for name in ("any order", "last use", "times used")}
    assert ceilings == {"any order": 6, "last use": 4, "times used": 4}
    # Each turn has 6 blocks, and the reasoning keeps its room: the second agent finds its question.
    assert tiers.chained(asked, 6).tokens == 2 * BLOCK_SIZE


@pytest.mark.parametrize("budget", [1_200, None])
def test_the_store_is_next_to_its_ceiling_and_takes_fewer_bytes(budget: int | None) -> None:
    asked = tiers.traffic(6, 3, seed=1, scale=0.5)
    assert len(asked.requests) == 6 * 3 * 13
    found = tiers.measured(asked, budget)
    assert found["store"].tokens <= found["any order"].tokens
    assert found["last use"].tokens <= found["any order"].tokens
    assert found["SmolLM2"].tokens >= 0.95 * found["last use"].tokens
    # Of a small model headers and marks take a share of the budget.
    assert found["store"].tokens >= 0.85 * found["last use"].tokens
    assert found["store"].tokens > 1.5 * found["chained hashes"].tokens
    assert found["store"].stored_bytes < 0.7 * found["chained hashes"].stored_bytes
    if budget is not None:
        for name, shape in (("store", tiers.SHAPE), ("SmolLM2", tiers.SMOLLM2)):
            assert found[name].counts["evicted"]
            assert found[name].most_bytes <= budget * BLOCK_SIZE * shape.token_bytes


def test_runs_are_stored_with_the_marks_of_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were left out, and the connectors always store them."""
    given: list[PrefixMarks | None] = []
    put = SpanStore.put

    def watched(store: SpanStore, run: SpanRun, slots: SpanRows, **labels: Any) -> bool:  # noqa: ANN401 - as given
        given.append(labels["marks"])
        return put(store, run, slots, **labels)

    monkeypatch.setattr(SpanStore, "put", watched)
    asked = two_agents()
    tiers.store_of_runs(asked, None)
    # Question and answer of each first turn, and what each second one adds: a question, an answer.
    assert len(given) == 8
    ends = {0 if one is None else int(one.marks["position"][-1]) for one in given}
    assert ends == {talk[turn].num_computed for talk in asked.turns for turn in range(2)}


def test_another_geometry_is_counted_as_a_store_of_it_counts() -> None:
    small = tiers.CountedStore(tiers.SMOLLM2, 1 << 30)
    whole = SpanStore(
        HostBackend(1 << 30),
        StoreKey(bytes(32)),
        tiers.NAMESPACE,
        tiers.SMOLLM2,
        max_bytes=1 << 30,
    )
    seq = kvtrie.TokenSequence(range(100), tiers.NAMESPACE)
    for store in (small, whole):
        marks = store.marks(seq, [40])
        for run in store.runs(seq, [40]):
            assert store.put(run, store.shape.empty(run.num_tokens), marks=marks)
    assert small.num_bytes == small.stored_bytes == whole.num_bytes
    assert tiers.SMOLLM2.token_bytes == 22.5 * 1024


def test_what_costs_least_leaves_first_unless_it_was_used_much_later() -> None:
    # A token at position 0 costs 1, and at 6,912 three times that.
    assert tiers.work(0, 1) == pytest.approx(1, abs=1e-3)
    assert tiers.work(6912, 6913) == pytest.approx(3, abs=1e-3)
    budget = tiers.ByCost()
    budget.costs = {"tenant/front": 1.0, "tenant/end": 3.0, "tenant/next": 1.0}
    left = []
    for name in ("tenant/end", "tenant/front"):
        budget.add(name, num_bytes=1, written=0, exactness=None)
    for _ in range(3):
        # A new run of a front for each that leaves.
        gone = budget.leaving(None)
        assert gone is not None
        budget.remove(gone)
        left.append(gone.partition("/")[2])
        budget.add("tenant/next", num_bytes=1, written=0, exactness=None)
    assert left == ["front", "next", "end"]
    assert len(budget) == 1


def test_other_bytes_than_were_stored_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(pool: KVPool, table: np.ndarray, start: int, end: int) -> SpanRows:
        rows = rows_of(pool, table, start, end)
        rows.v[0, -1, 0] ^= 1
        return rows

    monkeypatch.setattr(tiers, "rows_of", other)
    with pytest.raises(RuntimeError, match="have other KV than was stored"):
        tiers.store_of_runs(two_agents(), None)


def test_main(capsys: pytest.CaptureFixture[str]) -> None:
    tiers.main(["--conversations", "2", "--scale", "0.1", "--budgets", "40", "unlimited"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("78 requests; ")
    assert printed[0].endswith(" conversations at a time")
    assert [line.split(" | ")[0] for line in printed[4:]] == ["| 40", "| unlimited"]
