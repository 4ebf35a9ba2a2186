"""`make bench-vllm-pressure` counts what the scheduler lets a model compute."""

from __future__ import annotations

import argparse
import json

import pytest
from vllm_connector import pressure


@pytest.mark.parametrize("seed", [0, 1])
def test_a_small_run_counts_computed_tokens(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(scale=128, agents=4, chats=12, budget=2048, parts=(0.5,))
    pressure.measure(seed, options)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ROW ")]
    rows = [json.loads(line.removeprefix("ROW ")) for line in lines]
    assert [(row["part"], row["name"]) for row in rows] == [
        ("unbounded", "vLLM"),
        (0.5, "vLLM"),
        (0.5, "exact mode"),
    ]
    unbounded, vllm, exact = rows
    # Each request has at least its last token computed.
    assert sum(unbounded[f"{kind}_computed"] for kind in pressure.KINDS) > unbounded["requests"]
    for row in rows:
        for kind in pressure.KINDS:
            assert 0 < row[f"{kind}_computed"] < row[f"{kind}_prompt"]
    assert unbounded["agent_computed"] < exact["agent_computed"] < vllm["agent_computed"]
