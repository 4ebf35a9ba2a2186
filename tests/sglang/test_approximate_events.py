"""Events of approximate pages: what they say, where they go, and what is refused.

`test_snapshots` compares an index that they feed with a cache that serves requests.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from sglang.srt.disaggregation.kv_events import ZmqEventPublisher
from tests.sglang.caches import Pool, key, params

import kvtrie
from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations.sglang import _events
from kvtrie.integrations.sglang._events import ApproximateEvents, PageEvents
from kvtrie.integrations.sglang._moving import Built
from kvtrie.integrations.sglang._settings import VARIABLE, SGLangSettings

if TYPE_CHECKING:
    from pathlib import Path

SHARED = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
NUM_PAGES = 16


class Heard:
    """In the place of a publisher: what it was given, as subscribers get it."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.fails = False

    def publish(self, batch: Any) -> None:
        if self.fails:
            raise OSError("the queue is full")
        self.batches.append(msgspec.msgpack.encode(batch))

    def events(self) -> list[dict[str, Any]]:
        taken, self.batches = self.batches, []
        return [event for batch in taken for event in msgspec.msgpack.decode(batch)[1]]


def made(*, dynamo: bool = False) -> tuple[PageEvents, Heard]:
    given = params(Pool(NUM_PAGES, 2), events=True)
    given.dynamo_kv_event_format = dynamo
    heard: Any = Heard()
    events = PageEvents(given, NUM_PAGES, ApproximateEvents(given, heard))
    events.take()
    events.publish_approximate()
    assert [one["type"] for one in heard.events()] == ["AllBlocksCleared"]
    return events, heard


def path(*blocks: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(blocks, np.int32)


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("salt", [None, "a"])
def test_what_an_event_says(salt: str | None, dynamo: bool) -> None:
    events, heard = made(dynamo=dynamo)
    ids = key(range(10), salt=salt)
    events.stored(path(3, 4), 0, ids)
    exact = events.take()[-1].block_hashes
    events.stored_approximate(path(3, 4, 5, 6, 7), 2, [1, 2, 0], ids)
    assert events.take() == []
    events.publish_approximate()
    (said,) = heard.events()
    names = said.pop("block_hashes")
    assert len({*names, *exact}) == 5
    assert said == {
        "type": "ApproximateBlockStored",
        "parent_block_hash": exact[-1],
        "token_ids": list(range(4, 10)),
        "block_size": 2,
        "position": 4,
        "classes": ["moved", "moved", "after_moved"],
        "hops": [1, 2, 0],
        "medium": "GPU",
    } | ({} if salt is None else {"cache_salt": salt})
    # One that continues it names the last one.
    events.stored_approximate(path(3, 4, 5, 8), 2, [1, 1], key([*range(6), 20, 21], salt=salt))
    events.removed(path(4, 7))
    events.publish_approximate()
    more, gone = heard.events()
    assert (more["parent_block_hash"], more["token_ids"]) == (names[0], [20, 21])
    assert gone["block_hashes"] == names[2:]
    assert [type(one).__name__ for one in events.take()] == ["BlockRemoved"]


def test_exact_pages_before_them_are_published_if_they_were_not() -> None:
    events, heard = made()
    events.stored_approximate(path(3, 4, 5), 2, [1], key(range(6)))
    events.publish_approximate()
    (stored,) = events.take()
    assert stored.block_hashes[-1] == heard.events()[0]["parent_block_hash"]


def test_conversation_is_that_of_new_pages() -> None:
    events, _ = made()
    # Somebody else has the first page, which no event has said.
    events.stored(path(3, 4, 5), 1, key(range(6)), "talk")
    said = {tuple(one.token_ids): one.session_id for one in events.take()}
    assert said == {(0, 1): None, (2, 3, 4, 5): "talk"}


def test_a_page_that_was_computed_since_leaves_the_topic() -> None:
    events, heard = made()
    events.stored_approximate(path(3, 4), 1, [1], key(range(4)))
    events.stored(path(3, 4), 0, key(range(4)))
    events.publish_approximate()
    stored, removed = heard.events()
    assert removed["block_hashes"] == stored["block_hashes"]
    (exact,) = events.take()
    assert exact.token_ids == [0, 1, 2, 3]


def test_pages_of_a_key_that_events_do_not_tell_are_left_out() -> None:
    events, heard = made()
    events.stored_approximate(path(3, 4), 1, [1], key(range(4), "mine"))
    events.publish_approximate()
    assert heard.events() == []
    events.removed(path(4))
    events.publish_approximate()
    assert heard.events() == []


def test_after_a_batch_that_was_lost_no_subscriber_counts_more() -> None:
    events, heard = made()
    index = kvtrie.KvIndexer(2, b"the key of tests")
    worker = index.add_worker("w", SHARED)

    def entries() -> int:
        for batch in heard.batches:
            index.apply(worker, batch, approximate=True)
        heard.batches.clear()
        index.check()
        return int(index.worker_stats(worker)["entries"])

    events.stored_approximate(path(3, 4), 0, [1, 1], key(range(4)))
    events.publish_approximate()
    assert entries() == 2
    heard.fails = True
    events.removed(path(4))
    with pytest.raises(OSError, match="full"):
        events.publish_approximate()
    heard.fails = False
    # Also if nothing happens any more.
    events.publish_approximate()
    assert entries() == 0
    events.publish_approximate()
    assert not heard.batches
    # What is still cached comes back with what continues it.
    events.stored_approximate(path(3, 9, 10), 0, [1, 1, 1], key([0, 1, *range(20, 24)]))
    events.publish_approximate()
    assert entries() == 3
    assert index.worker_stats(worker)["parked"] == 0


def test_hops_are_those_of_the_labels() -> None:
    policy = kvtrie.ReusePolicy(approximate=True)
    built = Built(3, ((3, 9, 1), (12, 13, 4)), (), 13, policy)
    assert built.hops(0, 20, 2) == [0, 1, 1, 1, 1, 0, 4, 0, 0, 0]
    assert [count for count, _ in built.labels(0, 20, 2)] == [1, 4, 1, 1, 3]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"events": "tcp://*:5560"}, "events must be a mapping such as"),
        ({"events": {}}, "events: endpoint must be an address of ZeroMQ .*, not None"),
        ({"events": {"endpoint": "tcp://*:1", "topic": ""}}, "events: topic must be a topic"),
        ({"events": {"endpoint": "tcp://*:1", "hwm": 0}}, "hwm must be an integer from 1, not 0"),
        ({"events": {"endpoints": ""}}, "unknown key 'endpoints'; did you mean 'endpoint'"),
        ({"events": {"endpoint": "tcp://*:1"}}, '"events" are of approximate pages'),
    ],
)
def test_a_bad_setting_is_refused(
    given: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps(given))
    with pytest.raises(SettingsError, match=why):
        SGLangSettings.read()


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (None, "events needs SGLang's own: start it with"),
        ({"publisher": "null"}, "events needs SGLang's own: start it with"),
        ({"publisher": "zmq", "endpoint": "tcp://*:1"}, "endpoint 'tcp://\\*:1' is in --kv"),
        ({"publisher": "zmq", "replay_endpoint": "tcp://*:1"}, "endpoint 'tcp://\\*:1' is in"),
    ],
)
def test_it_goes_with_events_of_sglang_at_other_endpoints(
    theirs: dict[str, Any] | None, why: str
) -> None:
    text = None if theirs is None else json.dumps(theirs)
    args: Any = SimpleNamespace(kv_events_config=text)
    with pytest.raises(SettingsError, match=why):
        _events.check({"endpoint": "tcp://*:1"}, args)


def test_an_endpoint_that_cannot_be_bound_is_refused(tmp_path: Path) -> None:
    where = f"ipc://{tmp_path}/no/such/folder"
    with pytest.raises(SettingsError, match=f"events: endpoint '{where}'"):
        _events.publisher({"endpoint": where})


def test_the_topic_and_what_the_operator_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def init(_self: object, rank: int, **settings: Any) -> None:
        given.append({"rank": rank, **settings})

    monkeypatch.setattr(ZmqEventPublisher, "__init__", init)
    _events.publisher({"endpoint": "tcp://127.0.0.1:1", "hwm": 5})
    _events.publisher({"endpoint": "tcp://127.0.0.1:1", "topic": "mine"})
    common = {"rank": 0, "endpoint": "tcp://127.0.0.1:1", "bind": True}
    assert given == [common | {"topic": "kvtrie", "hwm": 5}, common | {"topic": "mine"}]
