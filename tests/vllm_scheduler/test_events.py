"""KV events: an index that is fed by them never has more than a plain request finds."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq
from tests.vllm.prompts import ANSWER, EDITED, QUESTION, REASONING, words
from tests.vllm.traffic import Traffic
from tests.vllm_scheduler.test_traffic import SMALL, Run
from tests.vllm_scheduler.worker import BLOCK
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import Request

from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations.vllm import _events, _settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.vllm_scheduler.core import Core

UNCHECKED = {"gate": "unchecked", "policy": {"scope": "namespace"}}
NUM_PROBES = 10_000
in_flight = pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])


def enabled() -> KVEventsConfig:
    """vLLM's events, which a test takes where vLLM would publish them."""
    return KVEventsConfig(enable_kv_cache_events=True, publisher="null")


class Router:
    """An index by tokens, as routers have it: blocks are found by their parent and their tokens."""

    def __init__(self) -> None:
        self.children: dict[tuple[Any, tuple[int, ...], str], Any] = {}
        self.stored: Counter[Any] = Counter()

    def take(self, batch: Any) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored | _events.ApproximateBlockStored):
                parent = event.parent_block_hash
                for at, one in enumerate(event.block_hashes):
                    tokens = tuple(event.token_ids[at * BLOCK : (at + 1) * BLOCK])
                    extra = str((event.extra_keys or {at: None})[at])
                    self.children[(parent, tokens, extra)] = one
                    self.stored[one] = 1
                    parent = one
            elif isinstance(event, BlockRemoved):
                for one in event.block_hashes:
                    self.stored[one] = 0
            elif isinstance(event, AllBlocksCleared):
                self.stored.clear()

    def claims(self, tokens: Sequence[int]) -> int:
        parent, count = None, 0
        for start in range(0, (len(tokens) - 1) // BLOCK * BLOCK, BLOCK):
            block = tuple(tokens[start : start + BLOCK])
            parent = self.children.get((parent, block, "None"))
            if parent is None or not self.stored[parent]:
                return count
            count += BLOCK
        return count


def listen(vllm: Core, *mixed: Router) -> tuple[Router, list[Any]]:
    """What vLLM publishes, and what kvtrie does; others take both for the same."""
    router, others = Router(), list[Any]()

    def publish(batch: Any) -> None:
        for one in (router, *mixed):
            one.take(batch)

    vllm.scheduler.kv_event_publisher.publish = publish
    events = vllm.connector.planner._events
    assert events is not None

    class Publisher:
        def publish(self, batch: Any) -> None:
            others.extend(batch.events)
            for one in mixed:
                one.take(batch)

        def shutdown(self) -> None: ...

    events._publisher = Publisher()
    return router, others


def finds(vllm: Core, tokens: Sequence[int]) -> int:
    """What a plain request of these tokens would find now."""
    params = SamplingParams(max_tokens=1)
    hasher = vllm.core.request_block_hasher
    request = Request("probe", list(tokens), params, None, block_hasher=hasher)
    return int(vllm.scheduler.kv_cache_manager.get_computed_blocks(request)[1])


def probes(vllm: Core, run: Run) -> Iterator[list[int]]:
    """Beginnings of what requests have left, some with other words after them."""
    seen = [list(ask.prompt) + vllm.answers[name].tokens for name, (ask, _) in run.asked.items()]
    rng = Traffic(seed=5).random
    for _ in range(NUM_PROBES):
        history = rng.choice(seen)
        yield history[: rng.randrange(1, len(history) + 1)] + words(rng.randrange(3), 1)


@in_flight
def test_an_index_fed_by_events_has_what_plain_requests_find(
    core: Callable[..., Core], in_flight: bool
) -> None:
    options = SMALL | {"kv_events_config": enabled()}
    vllm = core(connector=UNCHECKED, gaps=True, in_flight=in_flight, **options)
    mixed = Router()
    router, _ = listen(vllm, mixed)
    run = Run(vllm, seed=91 + in_flight)
    run.go(300)
    # What is left to find does not hang on when the last reset was.
    run.resets = False
    run.go(360)
    num_over = num_equal = num_found = 0
    num_fooled = 0
    for probe in probes(vllm, run):
        claimed, found = router.claims(probe), finds(vllm, probe)
        num_over += claimed > found
        num_equal += claimed == found
        num_found += found > 0
        num_fooled += mixed.claims(probe) > found
    assert num_over == 0
    assert num_equal == NUM_PROBES
    assert num_found > NUM_PROBES // 20
    # An index that took approximate blocks for plain ones.
    assert num_fooled > 0
    assert vllm.counts["errors"] == 0


@in_flight
def test_approximate_blocks_are_published_with_class_hops_and_position(
    core: Callable[..., Core], in_flight: bool
) -> None:
    vllm = core(connector=UNCHECKED, in_flight=in_flight, kv_events_config=enabled())
    router, others = listen(vllm)
    vllm.ask(QUESTION + REASONING + ANSWER)
    assert not others
    vllm.ask(EDITED, max_tokens=40)
    stored = [event for event in others if isinstance(event, _events.ApproximateBlockStored)]
    # From the block with the first moved token to the last whole block.
    position, contents = len(QUESTION) // BLOCK * BLOCK, list[tuple[str, int]]()
    for event in stored:
        assert event.position == position
        contents += zip(event.classes, event.hops, strict=True)
        position += len(event.block_hashes) * BLOCK
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
    num_moved = -(-len(QUESTION + ANSWER) // BLOCK) - len(QUESTION) // BLOCK
    assert contents[:num_moved] == [("moved", 1)] * num_moved
    assert set(contents[num_moved:]) == {("after_moved", 0)}
    assert [token for event in stored for token in event.token_ids][: len(ANSWER)] == (
        EDITED[len(QUESTION) // BLOCK * BLOCK :][: len(ANSWER)]
    )
    assert router.claims(EDITED) == len(QUESTION) // BLOCK * BLOCK == finds(vllm, EDITED)
    hashes = {one for event in stored for one in event.block_hashes}
    assert not hashes & router.stored.keys()
    # Their eviction is reported on the same topic.
    others.clear()
    vllm.pool.evict_blocks({block.block_id for block in vllm.pool.blocks if block.block_hash})
    vllm.ask(words(40, 1))
    gone = {
        one for event in others if isinstance(event, BlockRemoved) for one in event.block_hashes
    }
    assert gone == hashes


def test_an_event_that_cannot_be_sorted_is_dropped(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = core(connector=UNCHECKED, kv_events_config=enabled())
    router, _ = listen(vllm)
    vllm.ask(QUESTION + REASONING + ANSWER)
    before = dict(router.stored)

    def boom(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(_events.Events, "_sort_stored", boom)
    assert len(vllm.ask(EDITED)) == 8
    monkeypatch.undo()
    assert +router.stored == +Counter(before)
    assert vllm.counts["errors"] > 0


def test_hashes_of_blocks_that_are_gone_are_forgotten(core: Callable[..., Core]) -> None:
    vllm = core(connector=UNCHECKED, blocks=60, max_model_len=640, kv_events_config=enabled())
    listen(vllm)
    events = vllm.connector.planner._events
    assert events is not None
    for number in range(30):
        reasoning, answer = words(90, 100 + number), words(90, 200 + number)
        vllm.ask(QUESTION + reasoning + answer)
        vllm.ask(QUESTION + answer + words(40, number), max_tokens=20)
    assert 0 < len(events._approximate) <= 2 * 60
    assert max(len(events._begun), len(events._begun_after)) <= 2 * 60
    assert maybe_convert_block_hash(b"\0" * 32) not in events._approximate


def test_the_topic_over_zeromq(core: Callable[..., Core], tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    vllm = core(
        connector=UNCHECKED | {"events": {"endpoint": endpoint}}, kv_events_config=enabled()
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.SUB) as socket:
        socket.connect(endpoint)
        socket.setsockopt(zmq.SUBSCRIBE, b"kvtrie")
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        received: list[Any] = []
        # A subscriber that has just connected may miss the first events.
        for number in range(20):
            vllm.ask(QUESTION + words(100, number) + ANSWER)
            vllm.ask(QUESTION + ANSWER + words(40, number))
            if socket.poll(500):
                break
        topic, _, payload = socket.recv_multipart()
        received = msgspec.msgpack.decode(payload)[1]
    assert topic == b"kvtrie"
    assert received[0]["type"] in ("ApproximateBlockStored", "BlockRemoved")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("tcp://*:5558", "events must be a mapping such as"),
        ({}, "events: endpoint must be an address of ZeroMQ such as"),
        ({"endpoint": 5}, "events: endpoint must be an address .*, not 5"),
        ({"endpoint": "5558"}, "events: endpoint must be an address .*, not '5558'"),
        (
            {"endpoint": "tcp://*:1", "replay_endpoint": "localhost:2"},
            "events: replay_endpoint must be an address .*, not 'localhost:2'",
        ),
        ({"endpoints": "tcp://*:5558"}, "events: unknown key 'endpoints'; did you mean 'endpoint'"),
        ({"endpoint": "inproc://a", "hwm": 0}, "events: hwm must be an integer from 1, not 0"),
        ({"endpoint": "inproc://a", "hwm": True}, "events: hwm must be an integer from 1"),
        ({"endpoint": "inproc://a", "topic": ""}, "events: topic must be a topic, not ''"),
    ],
)
def test_a_bad_setting_is_refused(given: Any, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        _settings.Settings.read({"events": given})


def test_an_endpoint_that_cannot_be_used_is_refused(core: Callable[..., Core]) -> None:
    config = core(connector=UNCHECKED, kv_events_config=enabled()).core.vllm_config
    for given, why in (
        ({"endpoint": config.kv_events_config.endpoint}, "is in --kv-events-config too"),
        ({"endpoint": "no-address*"}, "events: endpoint 'no-address.': "),
    ):
        with pytest.raises(SettingsError, match=why):
            _events.publisher(given, config)
    config = core(connector=UNCHECKED).core.vllm_config
    with pytest.raises(SettingsError, match="events needs vLLM's own: start it with"):
        _events.publisher({"endpoint": "inproc://kvtrie"}, config)
