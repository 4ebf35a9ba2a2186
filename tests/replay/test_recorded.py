"""Recorded traces, where they are: what is known of them, and the time that ten sizes take."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvtrie.replay import read_trace, replay

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"


@pytest.mark.parametrize(
    ("name", "requests", "block_size", "share"),
    [("agentic40", 2481, 64, 0.9607), ("mooncake_conversation", 12_031, 512, 0.3734)],
)
def test_ten_sizes_take_less_than_a_minute(
    name: str, requests: int, block_size: int, share: float
) -> None:
    path = TRACES / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"the recorded trace {path} is not there")
    began = time.process_time()
    trace = read_trace(path)
    report = replay(trace)
    # Both traces together may take a minute.
    assert time.process_time() - began < 30
    assert (len(trace.requests), trace.block_size) == (requests, block_size)
    assert report.unlimited.hit_rate == pytest.approx(share, abs=5e-5)
    assert len(report.rows) == 10
    for row in report.rows:
        assert row.prefix.exact == row.kvtrie.exact <= row.optimum.exact <= report.unlimited.exact


def test_the_texts_of_agents_are_found_where_they_moved() -> None:
    path = TRACES / "lmcache_agent.tar.gz"
    if not path.exists():
        pytest.skip(f"the recorded trace {path} is not there")
    trace = read_trace(path)
    assert len(trace.requests) == 873
    (row,) = replay(trace, [trace.num_ids]).rows
    assert row.prefix.hit_rate == pytest.approx(0.932, abs=5e-4)
    assert row.kvtrie.hit_rate == pytest.approx(0.961, abs=1e-3)
