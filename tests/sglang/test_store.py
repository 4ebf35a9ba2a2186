"""The store in SGLang's scheduler and model runner: what the pool has lost comes from the store."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.sglang.engine import Job, scheduled
from tests.vllm import models

HOST: dict[str, Any] = {
    "backend": "host",
    "max_bytes": 64 << 20,
    "min_tokens": 8,
    "run_tokens": 16,
    "wait": 30.0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(models.llama(tmp_path_factory.mktemp("models") / "llama"))


def settings(store: dict[str, Any] = HOST, **more: Any) -> str:
    return json.dumps({"store": store, **more})


def stored(what: str, job: Job) -> Any:
    return scheduled(job, "tests.sglang.stored", what)


def balanced(found: dict[str, Any]) -> None:
    assert (found["lost"], found["protected"]) == (0, 0)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_what_the_pool_has_lost_is_loaded_exactly(model: str, page_size: int) -> None:
    found = stored("same", Job(model, page_size=page_size, num_slots=1024, settings=settings()))
    first = found["first"]
    assert first["cached"] == 0
    # Runs of 16 tokens, and pages that are whole.
    for name in ("flushed", "overwritten"):
        assert found[name]["reply"] == first["reply"]
        assert found[name]["cached"] == 192
    # The very bytes that were computed; the rest is computed after them.
    for one in (*found["apart"], *found["apart overwritten"]):
        assert max(one) <= 1e-4
    assert found["next"]["cached"] == (203 + 11) // 16 * 16
    assert found["other salt"]["cached"] == 0
    assert found["other salt"]["reply"] == first["reply"]
    assert found["other salt again"]["cached"] == 192
    assert found["counts"] == {}
    assert found["requests"]["store_tokens_exact"] == found["events"]["placed_exact"] > 700
    balanced(found)
