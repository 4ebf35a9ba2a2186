"""Whatever fails inside the cache: SGLang's server lives, and nothing is lost, wrong or uncounted.

Each call that a method of the cache makes of its parts raises, in SGLang's scheduler and model
runner, in pools that are too small (`tests.sglang.faults`). The methods and the calls are found, so
that one that is added later is tried too.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from tests.sglang.engine import Job, scheduled
from tests.sglang.faults import EVERY, LAST, public
from tests.vllm import models

from kvtrie.integrations.sglang.cache import KvtrieCache

STORE = {"backend": "host", "max_bytes": 64 << 20, "min_tokens": 8, "run_tokens": 16, "wait": 30.0}
GAPS = {"gate": "unchecked", "gaps": True}
KINDS: dict[str, dict[str, Any]] = {
    "exact": {"page_size": 1, "num_slots": 700},
    "moving": {
        "page_size": 4,
        "num_slots": 1000,
        "turns": 3,
        "settings": json.dumps({**GAPS, "events": {"endpoint": "inproc://approximate"}}),
    },
    "store": {"page_size": 16, "num_slots": 800, "settings": json.dumps({**GAPS, "store": STORE})},
}
# One of the servers shows what all have in common.
SERVERS = [pytest.param(one, marks=[pytest.mark.long] * (one != "exact")) for one in KINDS]
METHODS = public(KvtrieCache)
# Methods of the cache that call none of its parts, and those of a setting that none of these has.
WITHOUT_PARTS = {"dfs_weight_order", "load_back_is_cache_owned"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(models.llama(tmp_path_factory.mktemp("models") / "llama"))


@cache
def ran(model: str, kind: str) -> Any:
    """What came of each method."""
    overrides = {
        "enable_metrics": True,
        "chunked_prefill_size": 128,
        # Nobody listens.
        "kv_events_config": '{"publisher": "zmq", "endpoint": "inproc://events"}',
    }
    common: dict[str, Any] = {"talks": 3, "turns": 2, "policy": "dfs-weight", "retract": True}
    more = common | KINDS[kind]
    return scheduled(Job(model, overrides=overrides, **more), "tests.sglang.faults", timeout=800)


def lives(found: dict[str, Any]) -> None:
    assert "died" not in found, f"{found['raised']}\n{found['died']}"
    assert found["wrong"] == []


def balanced(found: dict[str, Any]) -> None:
    names = ("protected", "lost", "not evicted", "held", "claimed")
    assert {name: found[name] for name in names} == dict.fromkeys(names, 0)


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("method", [*METHODS, EVERY])
def test_a_method_in_which_a_call_fails(model: str, kind: str, method: str) -> None:
    """Each call of a part raises, a few times each; other requests go on."""
    done = ran(model, kind)
    found = done["found"].get(method)
    if found is None:
        last = list(done["found"].values())[-1]
        assert "died" not in last, f"it was not tried: {last['raised']}\n{last['died']}"
        assert method not in done["sites"]  # it calls no part
        return
    lives(found)
    balanced(found)
    # Each failure is counted, once.
    assert sum(count for name, count in found["counts"].items() if name != "lost") == found["total"]
    if found["called"].get(method):
        assert found["total"] > 0 or method == LAST
    if kind == "exact":
        (first, *_), replies = done["found"][""]["replies"], found["replies"]
        assert replies == [first] * len(replies)


@pytest.mark.long
def test_what_a_method_calls_is_tried(model: str) -> None:
    """Of each method that the cache has itself, in one of the servers."""
    sites: dict[str, set[str]] = {}
    raised: dict[str, set[str]] = {}
    for kind in KINDS:
        done = ran(model, kind)
        for method, found in done["sites"].items():
            sites.setdefault(method, set()).update(found)
        for found in done["found"].values():
            for method in found.get("called", ()):
                tried = {site for site, count in found["raised"].items() if count}
                raised.setdefault(method, set()).update(tried)
    own = {name for name, one in vars(KvtrieCache).items() if name in METHODS and callable(one)}
    assert own - WITHOUT_PARTS <= sites.keys()
    # Some calls of parts are rare in requests like these.
    assert sum(map(len, raised.values())) > 100


@pytest.mark.parametrize("kind", SERVERS)
def test_an_abort_after_any_number_of_steps(model: str, kind: str) -> None:
    """Before its match, between its chunks, in each step of its reply, and after its end."""
    found = ran(model, kind)["found"]["aborts"]
    lives(found)
    for one in found["balances"]:
        balanced(one)
    # Four tokens take four steps at least, and one abort comes before the first.
    assert len(found["balances"]) >= 5
    assert max(found["cached"]) >= 256
    # Another request is served next to it, with the same reply each time.
    first = found["outputs"][0]
    assert len(first) == 4
    assert found["outputs"] == [first] * len(found["outputs"])


@pytest.mark.parametrize("kind", SERVERS)
def test_a_pool_without_room_for_copies(model: str, kind: str) -> None:
    found = ran(model, kind)["found"]["full"]
    lives(found)
    balanced(found)
    assert found["counts"] == {}
    assert (found["refused"] > 0) == (kind != "exact")
