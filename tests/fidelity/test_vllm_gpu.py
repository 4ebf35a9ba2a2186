"""What `benches/vllm_connector/gpu.py` compares with, and what it makes of its rows."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.kernels.forms import MOVES
from vllm_connector import gpu

import kvtrie

if TYPE_CHECKING:
    from pathlib import Path

THETA = 100_000.0
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
}


@pytest.mark.parametrize("delta", [-917, -1, 3000])
def test_reference_rotation_is_the_pools(delta: int) -> None:
    layout = kvtrie.KVLayout(num_layers=2, num_kv_heads=3, head_dim=64, dtype="float32")
    pool = kvtrie.KVPool(layout, kvtrie.RopeSpec.from_config(CONFIG), num_blocks=2)
    torch.manual_seed(0)
    k, v = (torch.randn(2, 4, 3, 64) for _ in range(2))
    pool.scatter(k, v, blocks=[0], start=0)
    pool.apply(np.array([(0, 16, 4, delta)], dtype=MOVES)).wait()
    moved, same = pool.gather([1], start=0, end=4)
    wanted = gpu.rotated_by(k, delta, THETA)
    torch.testing.assert_close(moved.double(), wanted, atol=1e-6, rtol=0)
    assert same is not None
    assert torch.equal(same, v)


def reply(tokens: list[int], *others: int) -> dict[str, Any]:
    """Its tokens are 0.5 likelier than the others."""
    best = [[[token, -1.0], *([other, -1.5] for other in others)] for token in tokens]
    return {"tokens": tokens, "best": best}


def test_replies_are_compared_to_the_first_difference() -> None:
    assert gpu.same_tokens(reply([5, 6, 7]), reply([5, 6, 7])) == (3, None)
    assert gpu.same_tokens(reply([5, 8, 7]), reply([5, 6, 7], 8)) == (1, 0.5)
    # The other token is not among the likeliest.
    assert gpu.same_tokens(reply([5, 9, 7]), reply([5, 6, 7], 8)) == (1, None)


def test_divergence_of_log_probabilities() -> None:
    p, q = (np.log(np.array(one, np.float32)) for one in ([0.5, 0.25, 0.25], [0.25, 0.25, 0.5]))
    assert gpu.divergence(p, p) == 0
    assert gpu.divergence(p, q) == pytest.approx(0.25 * np.log(2), rel=1e-5)


def test_what_did_not_run_is_listed_next_to_what_did(tmp_path: Path) -> None:
    options = argparse.Namespace(out=tmp_path / "rows.jsonl", arrays=tmp_path, kinds=["strip"])
    times = {"seconds": 0.004, "computed": 30, "tokens_moved": 0, "tokens_exact": 2}
    case = {"kind": "strip", "number": 0, "timed": True, "prompt": 100, "edited": times}
    tokens = list(range(gpu.REPLY))
    rows = gpu.Rows(options.out, "alone")
    rows.add("case", **case, reply=reply(tokens), full=times, **{"full reply": reply(tokens)})
    with rows.failing("talk"):
        int("three")
    np.savez(tmp_path / "alone-strip-0.npz", edited=np.zeros(2), full=np.zeros(2))
    # What a killed process left.
    with options.out.open("a") as file:
        file.write('{"run": "rotated", "part"')
    found = gpu.summary(options, {"alone": "ran", "rotated": "ran out of time"})
    json.dumps(found)
    assert list(found["runs"]) == ["alone"]
    assert found["runs"]["alone"]["strip"]["median ms"] == 4.0
    assert found["runs"]["alone"]["strip"]["replies as vLLM alone"] == 1
    (failed,) = found["failed"]
    assert failed["what"] == "talk"
    assert failed["error"].startswith("ValueError: invalid literal")
    assert "rotated: ran out of time" in gpu.told(found, gpu.read(options.out))
