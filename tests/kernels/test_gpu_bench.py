"""The GPU benchmark on a CPU: it checks, times nothing and says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.scripts import script

from kvtrie.pool import KVPool

SCRIPT = Path(__file__).parents[2] / "benches" / "gpu.py"


@pytest.fixture(scope="module")
def bench() -> Any:
    return script("benches/gpu.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, which takes minutes")
def test_script_checks_and_says_that_nothing_was_timed(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(figures)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "checked on cpu: Llama-3-8B, Llama-3-8B, fp8_e4m3, " in done.stdout
    assert "QwQ-32B, DeepSeek-MLA\n" in done.stdout
    assert "nothing was timed" in done.stdout
    assert not figures.exists()


def test_script_refuses_to_time_wrong_copies(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = KVPool.apply

    def wrong(self: KVPool, moves: Any, hops: int) -> Any:
        changed = moves.copy()
        changed["delta"] += 1
        return right(self, changed, hops=hops)

    monkeypatch.setattr(bench.KVPool, "apply", wrong)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 1
    assert "nothing was timed: the copies are wrong" in capsys.readouterr().out


@pytest.mark.parametrize("num_tokens", [1, 77, 3000])
def test_moves_are_random_pieces_that_end_at_block_edges(bench: Any, num_tokens: int) -> None:
    num_blocks = bench.SPREAD * -(-num_tokens // 16) + 8
    moves = bench.random_moves(num_tokens, num_blocks)
    assert int(moves["num_tokens"].sum()) == num_tokens
    for name in ("source_slot", "dest_slot"):
        first, last = moves[name] // 16, (moves[name] + moves["num_tokens"] - 1) // 16
        np.testing.assert_array_equal(first, last)
    source, dest, _ = bench.named_slots(moves, "cpu")
    assert len(set(dest.tolist())) == num_tokens
    assert not set(source.tolist()) & set(dest.tolist())


@pytest.mark.parametrize("shape", range(5))
def test_other_ways_do_the_same_work(bench: Any, shape: int) -> None:
    model = bench.SHAPES[shape]
    pools = [model.pool(77, "cpu", 2) for _ in range(3)]
    for pool in pools:
        bench.fill(model, pool)
    moves = bench.random_moves(77, pools[0].num_blocks)
    pools[0].apply(moves, hops=1)
    slots = bench.named_slots(moves, "cpu")
    bench.three_passes(model, pools[1], slots)()
    bench.select_and_copy(pools[2], slots)()
    every = zip(*(bench.rows_of(pool) for pool in pools), strict=True)
    for number, (applied, passed, copied) in enumerate(every):
        assert torch.equal(applied, passed)
        assert torch.equal(applied, copied) == (number >= 2)


def test_table_has_a_row_per_case(bench: Any) -> None:
    row = dict.fromkeys(bench.COLUMNS, 0.5) | {"model": "m", "tokens": 4096, "moves": 512}
    lines = bench.table([row]).splitlines()
    assert len(lines) == 3
    assert len({line.count("|") for line in lines}) == 1
    assert "50%" in lines[2]


def test_the_page_has_the_figures_that_were_measured(bench: Any) -> None:
    page = (SCRIPT.parents[1] / "docs" / "pool.md").read_text(encoding="utf-8")
    assert bench.shown(SCRIPT.parent / "gpu.json") in page
