"""Picking tokens: greedy, cut distributions, seeds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvtrie.engines._sampling import Sampling, pick

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.9])


def draws(sampling: Sampling, count: int = 4_000) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    picked = [pick(LOGITS, sampling, rng) for _ in range(count)]
    return torch.bincount(torch.tensor(picked), minlength=len(LOGITS)) / count


def test_greedy_picks_the_highest_and_draws_nothing() -> None:
    rng = torch.Generator().manual_seed(0)
    before = rng.get_state()
    assert pick(LOGITS, Sampling(), rng) == 1
    assert torch.equal(rng.get_state(), before)


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(temperature=1.0, top_k=1), id="top-k-1"),
        pytest.param(Sampling(temperature=1.0, top_p=1e-9), id="top-p-tiny"),
        pytest.param(Sampling(temperature=1e-4), id="cold"),
    ],
)
def test_narrowest_cut_is_greedy(sampling: Sampling) -> None:
    assert draws(sampling, 50)[1] == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    want = (LOGITS / temperature).softmax(dim=-1)
    # 4000 draws: a standard error of 0.008 at most.
    torch.testing.assert_close(draws(Sampling(temperature=temperature)), want, atol=0.035, rtol=0)


def test_top_k_keeps_the_k_highest() -> None:
    seen = draws(Sampling(temperature=1.0, top_k=3))
    assert (seen > 0).tolist() == [False, True, True, False, True]
    assert draws(Sampling(temperature=1.0, top_k=99), 50).sum() == 1


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    shares = LOGITS.softmax(dim=-1)
    both = float(shares[1] + shares[4])
    at_edge = draws(Sampling(temperature=1.0, top_p=both - 1e-4))
    assert (at_edge > 0).tolist() == [False, True, False, False, True]
    wider = draws(Sampling(temperature=1.0, top_p=both + 1e-4))
    assert (wider > 0).tolist() == [False, True, True, False, True]


def test_seed_decides() -> None:
    flat, sampling = torch.zeros(1_000), Sampling(temperature=1.0)

    def run(seed: int) -> list[int]:
        rng = torch.Generator().manual_seed(seed)
        return [pick(flat, sampling, rng) for _ in range(8)]

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -0.1}, "temperature.*-0.1"),
        ({"temperature": math.nan}, "temperature.*nan"),
        ({"temperature": math.inf}, "temperature.*inf"),
        ({"top_k": 0}, "top_k.*0"),
        ({"top_k": -3}, "top_k.*-3"),
        ({"top_p": 0.0}, r"top_p.*0\.0"),
        ({"top_p": 1.5}, r"top_p.*1\.5"),
        ({"top_p": math.nan}, "top_p.*nan"),
    ],
)
def test_out_of_range_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Sampling(**options)
