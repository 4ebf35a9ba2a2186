"""Snapshots of SGLang's KV events: an index that subscribes late has what the cache finds."""

from __future__ import annotations

import gc
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sglang.srt.disaggregation.kv_events import (
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    StorageMedium,
)
from tests import asking
from tests.asking import until
from tests.sglang.caches import Pool, Side, params
from tests.sglang.engine import Job, scheduled
from tests.vllm import models

import kvtrie
from kvtrie.integrations import _asked
from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations._snapshots import StreamBlocks
from kvtrie.integrations.sglang import _snapshots, _support
from kvtrie.integrations.sglang._settings import VARIABLE, SGLangSettings
from kvtrie.integrations.sglang._version import SGLangUnsupportedError
from kvtrie.integrations.sglang.cache import KvtrieCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvtrie.integrations._snapshots import SnapshotSource

SHARED = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
GAPS = {"gate": "unchecked", "gaps": True, "policy": {"scope": "namespace"}}
NUM_PAGES = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = models.llama(tmp_path_factory.mktemp("models") / "llama")
    return str(folder)


@pytest.mark.parametrize("settings", [{}, GAPS], ids=["exact", "approximate"])
def test_an_index_that_subscribes_late_has_what_sglang_finds(
    model: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    events = {
        "publisher": "zmq",
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
        # It holds next to nothing.
        "buffer_steps": 2,
    }
    snapshot: dict[str, Any] = {"snapshot": {"endpoint": f"ipc://{tmp_path}/snapshot"}}
    if settings:
        snapshot["events"] = {
            "endpoint": f"ipc://{tmp_path}/approximate",
            "replay_endpoint": f"ipc://{tmp_path}/approximate-replay",
        }
    job = Job(
        model,
        page_size=4,
        num_slots=2600,
        turns=5,
        seed=9,
        retract=True,
        settings=json.dumps(settings | snapshot),
        overrides={"kv_events_config": json.dumps(events)},
    )
    found = scheduled(job, "tests.sglang.late")
    assert found["counts"] == {}
    for one in [*found["compared"], found["asked"]]:
        assert (one["over"], one["under"]) == (0, 0)
    assert sum(one["probes"] for one in found["compared"]) == 12_500
    assert min(one["found"] for one in found["compared"]) > 500
    assert sum(one["salted"] for one in found["compared"]) > 500
    assert found["asked"]["found"] > 3
    assert found["evicted"] > 500
    assert found["with_keys"] > 2
    # The record is the pool's own map, of exact pages.
    assert (found["held"], found["copies"]) == (found["pages"], [1])
    assert (found["labelled"] > 10) == bool(settings)
    # Those that are approximate have a topic of their own.
    assert found["published"] == found["labelled"]
    assert found["blocks"] == [found["pages"] + found["labelled"]] * 2
    # Conversations count where KV may move.
    assert found["said"].get("own", 0) == found["said"].get("known", 0)
    assert (found["said"].get("own", 0) > 20) == bool(settings)
    assert found["number"] > 20
    for one in found["subscriptions"]:
        assert one["snapshots"] >= 1
        assert one["batches"] > 0
        assert "snapshots_refused" not in one


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., tuple[Side, SnapshotSource]]]:
    """Makes a cache of pages of two tokens, with a source of snapshots."""
    sources = []

    def make(num_pages: int = NUM_PAGES) -> tuple[Side, SnapshotSource]:
        source = _snapshots.source(f"ipc://{tmp_path}/snapshot", num_pages)
        sources.append(source)
        pool = Pool(num_pages, 2)
        cache = KvtrieCache(params(pool, events=True), num_pages, "model", snapshots=source)
        return Side(cache, pool), source

    yield make
    for source in sources:
        source.shutdown()


def claims(batch: bytes, ids: list[int], space: kvtrie.Namespace = SHARED) -> int:
    """What an index has that got one batch."""
    index = kvtrie.KvIndexer(2, b"the key of tests")
    worker = index.add_worker("w", SHARED)
    index.apply(worker, batch)
    index.check()
    return int(index.find_matches(kvtrie.TokenSequence(ids, space)).exact[0])


def packed(events: list[Any]) -> bytes:
    batch = KVEventBatch(ts=0.0, events=events, attn_dp_rank=0)
    done: bytes = msgspec.msgpack.Encoder().encode(batch)
    return done


def test_a_batch_counts_if_it_is_published(
    made: Callable[..., tuple[Side, SnapshotSource]],
) -> None:
    side, source = made()
    assert [type(one).__name__ for one in side.cache.take_events()] == ["AllBlocksCleared"]
    # SGLang publishes no empty batch.
    assert side.cache.take_events() == []
    side.insert([1, 2, 3, 4])
    until(lambda: source._number == 0)
    assert not source._held.copies
    side.cache.take_events()
    until(lambda: source._number == 1)
    assert len(source._held.copies) == 2
    side.cache.reset()
    side.cache.take_events()
    until(lambda: source._number == 2)
    assert not source._held.copies


def test_a_snapshot_is_what_all_events_leave(
    made: Callable[..., tuple[Side, SnapshotSource]],
) -> None:
    """Holes, salts and the end of a life, in bytes that an index reads."""
    side, source = made()
    side.insert([1, 2, 3, 4, 5, 6])
    side.insert([1, 2, 3, 4, 5, 6], None, "tenant")
    side.cache.take_events()
    found = side.match([1, 2, 3, 4, 5, 6]).last_device_node
    side.cache._take_back(side.cache._index.discard(found.blocks[1:2]))
    assert side.match([1, 2, 3, 4, 5, 6]).device_prefix_len == 2
    side.cache.take_events()
    until(lambda: source._number == 1)
    assert (len(source._held), len(source._held.copies)) == (6, 5)
    batch = asking.answers(source, 1)
    assert claims(batch, [1, 2, 3, 4, 5, 6]) == 2
    assert claims(batch, [1, 2, 3, 4, 5, 6], SHARED.replace(salt="tenant")) == 6
    assert claims(batch, [1, 2, 3, 4, 5, 6], SHARED.replace(salt="other")) == 0
    _, events, rank = msgspec.msgpack.decode(batch)
    assert rank == 0
    assert events[0] == {"type": "AllBlocksCleared"}
    assert {one.get("medium", "GPU") for one in events} == {"GPU"}


def test_a_snapshot_has_images(made: Callable[..., tuple[Side, SnapshotSource]]) -> None:
    """An id beyond 32 bits ended the source."""
    side, source = made()
    ids = [1, 2, 2**40, 2**62 + 1, 3, 4]
    side.insert(ids)
    side.cache.take_events()
    until(lambda: source._number == 0)
    batch = asking.answers(source, 0)
    assert claims(batch, [1, 2, 0, 1, 3, 4]) == 2
    _, events, _ = msgspec.msgpack.decode(batch)
    assert [one for event in events[1:] for one in event["token_ids"]] == ids


def test_pages_of_a_key_that_no_event_tells_are_left_out(
    made: Callable[..., tuple[Side, SnapshotSource]],
) -> None:
    """A client may choose it: an index took such pages for those of everybody."""
    side, _ = made()
    side.cache.take_events()
    side.insert([1, 2, 3, 4], "mine")
    side.insert([1, 2, 3, 4], "m" * 32)
    side.insert([5, 6], "mine", "tenant")
    assert side.match([1, 2, 3, 4], "mine").device_prefix_len == 4
    assert side.cache.take_events() == []
    side.evict(4)
    assert side.cache.take_events() == []
    side.insert([1, 2])
    events = side.cache.take_events()
    assert claims(packed(events), [1, 2, 3, 4]) == 2
    assert not side.cache.counts


def test_pages_of_a_named_adapter_are_its_own(
    made: Callable[..., tuple[Side, SnapshotSource]],
) -> None:
    side, source = made()
    number = "0123456789abcdef" * 2
    names = side.cache._events.recorder.lora_names
    for extra in (number, f"mine{number}"):
        names.register(SimpleNamespace(lora_id=number, extra_key=extra), "adapter")
    side.insert([1, 2, 3, 4], number)
    side.insert([1, 2, 3, 4, 5, 6], f"mine{number}")
    side.cache.take_events()
    until(lambda: source._number == 0)
    batch = bytes(source._held.encoded(0))
    assert claims(batch, [1, 2, 3, 4]) == 0
    assert claims(batch, [1, 2, 3, 4, 5, 6], SHARED.replace(adapter="adapter")) == 4


def test_without_snapshots_events_are_those_of_sglang() -> None:
    pool = Pool(NUM_PAGES, 2)
    side = Side(KvtrieCache(params(pool, events=True), NUM_PAGES, "model"), pool)
    side.insert([1, 2, 3, 4], "mine")
    assert [type(one).__name__ for one in side.cache.take_events()] == [
        "AllBlocksCleared",
        "BlockStored",
    ]


def test_the_record_is_bounded_by_the_pool(
    made: Callable[..., tuple[Side, SnapshotSource]],
) -> None:
    side, source = made()
    for number in range(300):
        first = 10 * number
        side.evict(8)
        side.insert([first, *range(first, first + 7)], None, f"tenant {number % 7}")
        side.cache.take_events()
    until(lambda: source._number == 299)
    assert len(source._held.copies) <= NUM_PAGES
    assert len(source._held) <= 2 * NUM_PAGES
    assert sum(one is not None for one in side.cache._events._nodes) == len(source._held.copies)


def test_holes_are_bounded() -> None:
    held = StreamBlocks(_snapshots.EVENTS, 10)
    for number in range(100):
        pair = [2 * number, 2 * number + 1]
        stored = BlockStored(pair, None, [1, 2, 3, 4], 2, None, StorageMedium.GPU)
        held.apply([stored, BlockRemoved(pair[:1], StorageMedium.GPU)])
        assert len(held) - len(held.copies) <= 10


def test_the_garbage_collector_follows_no_block() -> None:
    held = StreamBlocks(_snapshots.EVENTS, 10)
    held.apply([BlockStored([1, 2], None, [1, 2, 3, 4], 2, None, StorageMedium.GPU)])
    # A tuple is let go after those in it.
    gc.collect()
    gc.collect()
    assert not any(map(gc.is_tracked, held._blocks.values()))


def test_a_source_that_holds_more_than_the_pool_ends(
    made: Callable[..., tuple[Side, SnapshotSource]],
) -> None:
    side, source = made()
    source.hand_over([BlockStored([1], None, [1, 2], 2, None)] * (NUM_PAGES + 1))
    until(lambda: not source._thread.is_alive())
    side.cache.take_events()
    side.cache.take_events()
    assert side.cache.counts == {"snapshots": 1}


def test_a_failure_ends_it_and_nothing_else(
    made: Callable[..., tuple[Side, SnapshotSource]], monkeypatch: pytest.MonkeyPatch
) -> None:
    side, source = made()

    def boom(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(source._held, "apply", boom)
    side.cache.take_events()
    until(lambda: not source._thread.is_alive())
    for number in range(3):
        side.insert([number, 1, 2, 3])
        assert len(side.cache.take_events()) == 1
        assert side.match([number, 1, 2, 3]).device_prefix_len == 4
    assert side.cache.counts == {"snapshots": 1}
    assert not source._batches


def test_rests_after_each_snapshot(made: Callable[..., tuple[Side, SnapshotSource]]) -> None:
    asking.rests(made()[1])


def test_who_does_not_read_gets_no_more(
    made: Callable[..., tuple[Side, SnapshotSource]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asking.does_not_read(made()[1], monkeypatch)


def test_a_flood_of_requests_is_read_in_parts(
    made: Callable[..., tuple[Side, SnapshotSource]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asking.floods(made()[1], monkeypatch)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("tcp://*:5559", "snapshot must be a mapping such as"),
        (True, "snapshot must be a mapping such as"),
        ({"endpoint": 5}, "snapshot: endpoint must be an address of ZeroMQ .*, not 5"),
        ({"endpoint": ""}, "snapshot: endpoint must be an address of ZeroMQ .*, not ''"),
        ({"endpoint": None}, "snapshot: endpoint must be an address of ZeroMQ .*, not None"),
        ({"endpoints": "tcp://*:5559"}, "snapshot: unknown key 'endpoints'; did you mean 'endpoi"),
    ],
)
def test_a_bad_setting_is_refused(given: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps({"snapshot": given}))
    with pytest.raises(SettingsError, match=f"{VARIABLE}: {why}"):
        SGLangSettings.read()


def arguments(config: dict[str, Any] | None, load: str | None = None) -> Any:
    text = None if config is None else json.dumps(config)
    return SimpleNamespace(kv_events_config=text, load_publish_endpoint=load)


@pytest.mark.parametrize(
    ("endpoint", "config", "load"),
    [
        ("tcp://*:5557", {}, None),
        ("tcp://127.0.0.1:5557", {}, None),
        ("tcp://127.0.0.1:6001", {"replay_endpoint": "tcp://*:6001"}, None),
        ("ipc:///tmp/one", {"endpoint": "ipc:///tmp/one"}, None),
        ("tcp://127.0.0.1:5558", {}, "auto"),
        (_asked.SNAPSHOTS, {"replay_endpoint": "tcp://*:5558"}, "auto"),
        ("tcp://127.0.0.1:7000", {}, "tcp://*:7000"),
    ],
)
def test_an_endpoint_of_another_one_is_refused(
    endpoint: str, config: dict[str, Any], load: str | None
) -> None:
    why = f"{VARIABLE}: snapshot: endpoint '.*' is another one's too: choose another"
    with pytest.raises(SettingsError, match=why):
        _snapshots.check({"endpoint": endpoint}, arguments({"publisher": "zmq"} | config, load))


@pytest.mark.parametrize("config", [None, {}, {"publisher": "null"}])
def test_snapshots_need_the_events_of_sglang(config: dict[str, Any] | None) -> None:
    with pytest.raises(SettingsError, match="snapshot needs SGLang's events: start it with"):
        _snapshots.check({}, arguments(config))


def test_an_address_is_of_this_machine_unless_said_otherwise() -> None:
    zmq = {"publisher": "zmq"}
    assert _snapshots.check({}, arguments(zmq, "auto")) == "tcp://127.0.0.1:5559"
    assert _snapshots.check({"endpoint": "tcp://*:7000"}, arguments(zmq)) == "tcp://*:7000"
    assert _snapshots.check(None, arguments(None)) is None


def test_a_server_with_a_bad_setting_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    context: Any = SimpleNamespace(
        server_args=arguments(None), params=SimpleNamespace(enable_kv_cache_events=True)
    )
    monkeypatch.setenv(VARIABLE, '{"snapshot": {}}')
    why = f"--radix-cache-backend kvtrie: {VARIABLE}: snapshot needs SGLang's events"
    with pytest.raises(SGLangUnsupportedError, match=why):
        _support._snapshots_of(context, NUM_PAGES)
    context.server_args = arguments({"publisher": "zmq"})
    monkeypatch.setenv(VARIABLE, '{"snapshot": {"endpoint": "tcp://nowhere"}}')
    with pytest.raises(SGLangUnsupportedError, match=r"snapshot: endpoint .tcp://nowhere.: "):
        _support._snapshots_of(context, NUM_PAGES)
    endpoint = f"ipc://{tmp_path}/snapshot"
    monkeypatch.setenv(VARIABLE, json.dumps({"snapshot": {"endpoint": endpoint}}))
    source = _support._snapshots_of(context, NUM_PAGES)
    assert source is not None
    source.shutdown()
    assert source.endpoint == endpoint
    # A rank that publishes nothing gives none.
    context.params.enable_kv_cache_events = False
    assert _support._snapshots_of(context, NUM_PAGES) is None
    # Off by default.
    context.params.enable_kv_cache_events = True
    monkeypatch.delenv(VARIABLE)
    assert _support._snapshots_of(context, NUM_PAGES) is None
