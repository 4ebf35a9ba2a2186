"""The router's own parts, with replicas made here and no cluster."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from ray.serve.request_router import RequestRouter

from kvtrie.fleet.ray_serve import KvRequestRouter

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS: dict[str, Any] = {
    "model": "tiny",
    "block_size": 4,
    "key": "the key of tests",
    "tokens": "tests.ray.replicas:tokens",
    "shared": True,
}


def replica(name: str, events: object = "tcp://127.0.0.1:1", **more: object) -> Any:
    stats = {} if events is None else {"kvtrie": {"events": events, **more}}
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=stats)


def request(name: str, ids: object) -> Any:
    metadata = SimpleNamespace(internal_request_id=name)
    future: Any = SimpleNamespace(add_done_callback=lambda _: None)
    return SimpleNamespace(args=[{"ids": ids}], kwargs={}, metadata=metadata, future=future)


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda *_: None)
    found = KvRequestRouter.__new__(KvRequestRouter)
    found.initialize_state(**SETTINGS)
    yield found
    found.update_replicas([])


def choose(router: Any, replicas: list[Any], of: Any) -> list[list[str]]:
    ranks = asyncio.run(router.choose_replicas(replicas, of))
    return [[one.replica_id.unique_id for one in rank] for rank in ranks]


def test_a_replica_is_subscribed_to_while_it_is_there(router: Any) -> None:
    a, b = replica("a"), replica("b")
    router.update_replicas([a, b, replica("c", None), replica("d", 5), replica("e", "nowhere")])
    assert router._index.workers == ("a", "b")
    before = router._subscribed["a"][2]
    router.update_replicas([a])
    assert router._index.workers == ("a",)
    assert router._subscribed["a"][2] is before
    # Another endpoint is another engine.
    router.update_replicas([replica("a", "tcp://127.0.0.1:2")])
    assert router._subscribed["a"][2] is not before
    assert before.state == "stale"


def test_the_chosen_replica_comes_first_and_the_others_after_it(router: Any) -> None:
    replicas = [replica("a"), replica("b"), replica("c", None)]
    router.update_replicas(replicas)
    assert choose(router, replicas, request("1", list(range(40)))) == [["a"], ["b", "c"]]
    assert choose(router, replicas, request("2", list(range(99, 130)))) == [["b"], ["a", "c"]]
    # One that begins like the first follows it.
    assert choose(router, replicas, request("3", list(range(60)))) == [["a"], ["b", "c"]]
    assert router._dispatcher.outstanding("a") == (60, 2)
    # Asked again, a request counts once.
    assert choose(router, replicas, request("3", list(range(60)))) == [["a"], ["b", "c"]]
    assert router._dispatcher.outstanding("a") == (60, 2)
    for name in "13":
        router.on_request_completed(replicas[0].replica_id, name)
    assert router._dispatcher.outstanding("a") == (0, 0)


def test_a_request_counts_where_it_was_sent(router: Any) -> None:
    replicas = [replica("a"), replica("b"), replica("c", None)]
    router.update_replicas(replicas)
    for name, where, expected in (("1", 1, (40, 1)), ("2", 2, (40, 1))):
        asked = request(name, list(range(40)))
        choose(router, replicas, asked)
        router.on_request_routed(asked, replicas[where].replica_id, None)
        assert router._dispatcher.outstanding("a") == (0, 0)
        assert router._dispatcher.outstanding("b") == expected
    router.on_request_completed(replicas[1].replica_id, "1")
    assert router._dispatcher.outstanding("b") == (0, 0)


def test_what_a_replica_says_wrongly_stops_no_other(router: Any) -> None:
    wrong = [replica("a", replay=5), replica("b", snapshot=["x"]), replica("c", replay="x")]
    for _ in range(2):
        router.update_replicas([*wrong, replica("", "tcp://127.0.0.1:1"), replica("d")])
        assert router._index.workers == ("d",)
        assert set(router._subscribed) == {"d"}


def test_a_request_that_is_cancelled_before_it_is_sent_counts_no_more(router: Any) -> None:
    replicas = [replica("a"), replica("b")]
    router.update_replicas(replicas)

    async def test() -> None:
        asked = request("1", list(range(40)))
        asked.future = asyncio.get_running_loop().create_future()
        for _ in range(3):
            await router.choose_replicas(replicas, asked)
        assert router._dispatcher.outstanding("a") == (40, 1)
        asked.future.cancel()
        await asyncio.sleep(0)
        assert router._dispatcher.outstanding("a") == (0, 0)
        assert not router._open
        # One that is sent counts until it is completed.
        asked = request("2", list(range(40)))
        asked.future = asyncio.get_running_loop().create_future()
        await router.choose_replicas(replicas, asked)
        asked.future.set_result(replicas[0])
        await asyncio.sleep(0)
        router.on_request_routed(asked, replicas[0].replica_id, None)
        assert sum(router._dispatcher.outstanding(name)[1] for name in "ab") == 1
        # Its prompt is not kept.
        assert router._open["2"][1] is None

    asyncio.run(test())


@pytest.mark.parametrize("ids", [None, [-1], ["a"], 5])
def test_a_request_without_tokens_goes_to_any(router: Any, ids: object) -> None:
    replicas = [replica("a"), replica("b")]
    router.update_replicas(replicas)
    assert choose(router, replicas, request("1", ids)) == [["a", "b"]]


def test_without_events_any_replica_will_do(router: Any) -> None:
    replicas = [replica("a", None)]
    assert choose(router, replicas, request("1", [1, 2])) == [["a"]]
    assert asyncio.run(router.choose_replicas(replicas, None)) == [replicas]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"salt": "s"}, "give one of both"),
        ({"shared": False}, "give one of both"),
        ({"key": "short"}, "key"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KvRequestRouter.__new__(KvRequestRouter).initialize_state(**{**SETTINGS, **changes})
