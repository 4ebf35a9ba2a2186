"""What a request of which nothing is known costs, in calls of the connector's functions.

A clock would say it too, but not on a busy machine. Calls say nothing of what the index does.
"""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm_scheduler.executed import PLACES
from tests.vllm_scheduler.test_exact import FORMAT
from tests.vllm_scheduler.worker import VOCAB

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm_scheduler.core import Core

NUM_REQUESTS = 16


def calls_by(vllm: Core, rng: random.Random) -> float:
    """Calls of a batch of requests from arrival to end, per request."""
    count = 0

    def called(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        if event == "call" and any(place in frame.f_code.co_filename for place in PLACES):
            count += 1

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        for _ in range(NUM_REQUESTS):
            vllm.add(rng.choices(range(16, VOCAB), k=100), max_tokens=16)
        vllm.drain()
    finally:
        sys.setprofile(before)
    return count / NUM_REQUESTS


@pytest.mark.parametrize(
    ("mode", "most"),
    [
        pytest.param({"mode": "exact"}, 177, id="exact"),
        pytest.param({"gate": "unchecked"}, 167, id="moving"),
    ],
)
def test_a_request_of_which_nothing_is_known_takes_few_calls(
    core: Callable[..., Core], mode: dict[str, Any], most: int
) -> None:
    vllm = core(connector={**mode, "chat_format": FORMAT}, shadow=False, max_num_seqs=64)
    rng = random.Random(0)
    calls_by(vllm, rng)
    took = calls_by(vllm, rng)
    assert vllm.counts["errors"] == 0
    assert took < most
