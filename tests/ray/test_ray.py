"""The router of Ray Serve, in Ray itself with two replicas on this machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from tests.ray.replicas import SIZE, Engine

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(170)
SETTINGS = {
    "model": "tiny",
    "block_size": SIZE,
    "key": "the key of tests",
    "tokens": "tests.ray.replicas:tokens",
    "shared": True,
}


@pytest.fixture(scope="module")
def handle() -> Iterator[Any]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True)
    serve.start(proxy_location="Disabled")
    deployment = serve.deployment(
        num_replicas=2,
        ray_actor_options={"num_cpus": 0.1},
        request_router_config=RequestRouterConfig(
            request_router_class="kvtrie.fleet.ray_serve:KvRequestRouter",
            request_router_kwargs=SETTINGS,
            request_routing_stats_period_s=0.2,
        ),
    )(Engine)
    try:
        yield serve.run(deployment.bind(), name="tiny", route_prefix=None)
    finally:
        serve.shutdown()
        ray.shutdown()


def ask(handle: Any, ids: list[int], **more: Any) -> str:
    name: str = handle.remote({"ids": ids, **more}).result(timeout_s=30)
    return name


def test_a_conversation_stays_with_the_replica_that_cached_it(handle: Any) -> None:
    # Until the router has met both replicas, and subscribed before their first events.
    first = list(range(1, 1000))
    names = {ask(handle, first, cache=False) for _ in range(40)}
    deadline = time.monotonic() + 60
    while len(names) < 2 and time.monotonic() < deadline:
        names.add(ask(handle, [time.monotonic_ns() % (1 << 31)] * 64, cache=False))
    assert len(names) == 2
    time.sleep(2)
    conversations = [[number * 10_000 + at for at in range(400)] for number in range(6)]
    homes = [ask(handle, ids) for ids in conversations]
    assert set(homes) == names  # cold prompts go around
    time.sleep(1)
    for turn in range(1, 4):
        for ids, home in zip(conversations, homes, strict=True):
            assert ask(handle, [*ids, *range(100 * turn, 100 * turn + 40)]) == home


def test_a_request_without_tokens_is_served_by_any_replica(handle: Any) -> None:
    name = handle.remote({"ids": [], "cache": False}).result(timeout_s=30)
    assert name
