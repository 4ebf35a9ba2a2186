"""The tiers of `tiers.py`: figures worked by hand, and what always holds between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import tiers
from tiers import BLOCK_SIZE, Found, Request, Traffic
from workloads.history import Piece, conversation

from kvtrie.store import SpanRows, rows_of

if TYPE_CHECKING:
    from kvtrie.pool.kv_pool import KVPool


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
    # Of each second prompt the question and the answer, 4 of 6 blocks, were computed before.
    assert blocks(tiers.measured(asked, None)) == {
        "store": 8,
        "any order": 8,
        "last use": 8,
        "chained hashes": 4,
    }
    # The second agent's 4 blocks, and of the first one's what has room before its turn comes: that
    # of the end of the second is known to be useless to one ceiling only.
    some = {name: blocks(tiers.measured(asked, 6))[name] for name in ("any order", "last use")}
    assert some == {"any order": 6, "last use": 4}
    # Each turn has 6 blocks, and the reasoning keeps its room: the second agent finds its question.
    assert tiers.chained(asked, 6).tokens == 2 * BLOCK_SIZE


@pytest.mark.parametrize("budget", [1_200, None])
def test_the_store_is_next_to_its_ceiling_and_takes_fewer_bytes(budget: int | None) -> None:
    asked = tiers.traffic(6, 3, seed=1, scale=0.5)
    assert len(asked.requests) == 6 * 3 * 13
    found = tiers.measured(asked, budget)
    assert found["store"].tokens <= found["any order"].tokens
    assert found["last use"].tokens <= found["any order"].tokens
    assert found["store"].tokens >= 0.95 * found["last use"].tokens
    assert found["store"].tokens > 1.5 * found["chained hashes"].tokens
    assert found["store"].stored_bytes < 0.7 * found["chained hashes"].stored_bytes
    if budget is not None:
        assert found["store"].counts["evicted"]
        assert found["store"].most_bytes <= budget * BLOCK_SIZE * tiers.SHAPE.token_bytes


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
    assert [line.split(" | ")[0] for line in printed[4:]] == ["| 40", "| unlimited"]
