"""Dynamo's events: their hashes, what they leave in the index, and what is never claimed.

Expected hashes are what ai-dynamo-runtime 1.6.1 computes; `tests/routers` compares with the
runtime itself.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import xxhash

import kvtrie
from kvtrie.cluster import DynamoIndexer, DynamoWorker

KEY = b"the key of tests"
NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
SIZE = 4
# `compute_block_hash_for_seq` of the tokens 1 to 8, in blocks of 4.
PLAIN = [14643705804678351452, 16777012769546811212]
LORA = [7908928905110513541, 689742565627756471]  # lora_name="lora"
SALTED = [10036811808434060891, 1735356409867884788]  # cache_namespace="ns"
BOTH = [13788081725960310354, 8275477416381173384]
# What its `RadixTree.dump_tree_as_events` writes.
DUMPED = (
    '{"worker_id":7,"storage_tier":"device","residency_domain":"worker","event":{"event_id":0,'
    '"data":{"stored":{"parent_hash":null,"start_position":null,"blocks":[{"block_hash":11,'
    '"tokens_hash":14643705804678351452,"mm_extra_info":null},{"block_hash":12,'
    '"tokens_hash":16777012769546811212,"mm_extra_info":null}]}},"dp_rank":3}}'
)


def local(tokens: list[int]) -> list[int]:
    raw = np.array(tokens, "<u4").tobytes()
    return [
        xxhash.xxh3_64_intdigest(raw[at : at + 4 * SIZE], 1337)
        for at in range(0, len(raw), 4 * SIZE)
    ]


def event(number: int, data: object, *, worker: int = 7, rank: int = 0, **more: object) -> str:
    inner = {"event_id": number, "data": data, "dp_rank": rank}
    return json.dumps({"worker_id": worker, "event": inner, **more})


def stored(names: list[int], hashes: list[int], parent: int | None = None) -> dict[str, Any]:
    pairs = zip(names, hashes, strict=True)
    blocks = [{"block_hash": name, "tokens_hash": one} for name, one in pairs]
    return {"stored": {"parent_hash": parent, "blocks": blocks}}


def removed(*names: int) -> dict[str, Any]:
    return {"removed": {"block_hashes": list(names)}}


def made() -> DynamoIndexer:
    return DynamoIndexer(SIZE, KEY, NS)


def exact(index: DynamoIndexer, tokens: list[int], **space: str) -> Any:
    found = index.find_matches(kvtrie.TokenSequence(tokens, NS.replace(**space)))
    index.check()
    return found.exact.tolist()


def uncertain(index: DynamoIndexer) -> Any:
    return index.find_matches(kvtrie.TokenSequence([1], NS)).uncertain.tolist()


EIGHT = list(range(1, 9))


def test_what_the_runtime_dumps_is_found() -> None:
    index = made()
    assert index.restore([DUMPED]) == (DynamoWorker(7, 3),)
    found = index.find_matches(kvtrie.TokenSequence([*EIGHT, 9], NS))
    assert found.workers == (DynamoWorker(7, 3),)
    assert (found.exact.tolist(), found.exact.dtype) == ([8], np.dtype(np.uint32))
    assert (found.tier.tolist(), found.tier.dtype) == ([0], np.dtype(np.uint8))
    # A dump does not say which event was its last.
    assert found.uncertain.tolist() == [True]
    # In place of what the worker held.
    index.restore([DUMPED.replace("14643705804678351452", "5")])
    assert exact(index, EIGHT) == [0]


def test_adapters_and_salts_are_in_the_hashes() -> None:
    index = made()
    for worker, hashes in enumerate([PLAIN, LORA, SALTED, BOTH]):
        index.apply(event(1, stored([11, 12], hashes), worker=worker))
    assert exact(index, EIGHT) == [8, 0, 0, 0]
    assert exact(index, EIGHT, adapter="lora") == [0, 8, 0, 0]
    assert exact(index, EIGHT, salt="ns") == [0, 0, 8, 0]
    assert exact(index, EIGHT, adapter="lora", salt="ns") == [0, 0, 0, 8]
    assert exact(index, EIGHT, model="another") == [0, 0, 0, 0]


def test_a_hole_ends_a_match_and_a_restored_block_closes_it() -> None:
    index = made()
    tokens = list(range(40, 52))
    hashes = local(tokens)
    index.apply(event(1, stored([1, 2, 3], hashes)))
    assert exact(index, tokens) == [12]
    index.apply(event(2, removed(2)))
    assert exact(index, tokens) == [4]
    index.apply(event(3, stored([2], hashes[1:2], parent=1)))
    assert exact(index, tokens) == [12]


def test_a_repeated_store_is_no_second_copy() -> None:
    # Publishers pass each `stored` on, and one `removed`, when the last copy is gone.
    index = made()
    for number in (1, 2, 3):
        index.apply(event(number, stored([11, 12], PLAIN)))
    index.apply(event(4, removed(12)))
    assert exact(index, EIGHT) == [4]
    index.apply(event(5, removed(11)))
    assert exact(index, EIGHT) == [0]


def test_each_rank_and_tier_is_its_own() -> None:
    index = made()
    index.apply(event(1, stored([11, 12], PLAIN)))
    index.apply(event(1, stored([11], PLAIN[:1]), rank=1, storage_tier="host_pinned"))
    index.apply(event(1, stored([11], PLAIN[:1]), worker=8, storage_tier="disk"))
    index.apply(event(1, stored([11], PLAIN[:1]), worker=9, storage_tier="external"))
    found = index.find_matches(kvtrie.TokenSequence(EIGHT, NS))
    assert found.workers == ((7, 0), (7, 1), (8, 0), (9, 0))
    assert (found.exact.tolist(), found.tier.tolist()) == ([8, 4, 4, 4], [0, 1, 2, 3])
    index.apply(event(2, "cleared"))
    assert exact(index, EIGHT) == [0, 4, 4, 4]
    index.remove_worker(7)
    assert index.workers == ((8, 0), (9, 0))
    assert exact(index, EIGHT) == [4, 4]
    with pytest.raises(kvtrie.StaleHandleError, match="no worker 7"):
        index.remove_worker(7)


def test_a_worker_is_certain_from_its_first_event_on() -> None:
    index = made()
    index.apply(event(1, stored([11], PLAIN[:1])))
    assert uncertain(index) == [False]
    index.apply(event(3, removed(11)))  # number 2 is lost
    assert (uncertain(index), index.counts["gaps"]) == ([True], 1)
    index.apply(event(4, "cleared"))
    assert uncertain(index) == [False]


def test_a_worker_that_is_met_late_is_uncertain_until_it_clears_its_cache() -> None:
    index = made()
    index.apply(event(5, stored([11], PLAIN[:1])))
    assert (exact(index, EIGHT), uncertain(index)) == ([4], [True])
    index.apply(event(6, "cleared"))
    assert (exact(index, EIGHT), uncertain(index)) == ([0], [False])


def test_a_number_that_goes_back_forgets_the_worker() -> None:
    index = made()
    index.apply(event(1, stored([11], PLAIN[:1])))
    index.apply(event(2, stored([12], PLAIN[1:], parent=11)))
    index.apply(event(1, stored([11], PLAIN[:1])))
    # It may be an old event, so it is no new beginning.
    assert (exact(index, EIGHT), uncertain(index)) == ([4], [True])
    assert index.counts["resyncs"] == 1


def test_a_worker_that_restarts_after_a_dump_is_not_what_the_dump_said() -> None:
    index = made()
    index.restore([event(0, stored([11, 12], PLAIN))])
    assert (exact(index, EIGHT), uncertain(index)) == ([8], [True])
    index.apply(event(1, stored([99], local([9] * SIZE))))
    assert (exact(index, EIGHT), uncertain(index)) == ([0], [True])
    assert index.counts["resyncs"] == 1
    index.apply(event(2, "cleared"))
    assert uncertain(index) == [False]


def test_events_go_on_after_a_dump() -> None:
    index = made()
    index.restore([event(0, stored([11], PLAIN[:1]))])
    index.apply(event(5, stored([12], PLAIN[1:], parent=11)))
    assert (exact(index, EIGHT), uncertain(index)) == ([8], [True])
    # Which one the dump ended with is not known, so this was no gap.
    assert set(index.counts) == {"stored"}
    index.apply(event(7, removed(12)))
    assert (exact(index, EIGHT), index.counts["gaps"]) == ([4], 1)


def test_a_slower_tier_may_outlive_a_cleared_cache() -> None:
    index = made()
    index.apply(event(2, stored([11], PLAIN[:1]), storage_tier="disk"))
    index.apply(event(3, "cleared"))
    assert uncertain(index) == [True]


def test_blocks_that_are_not_the_workers_are_left_out() -> None:
    index = made()
    index.apply(event(1, stored([11, 12], PLAIN), residency_domain="cache_owner"))
    assert (exact(index, EIGHT), uncertain(index)) == ([0], [False])
    assert index.counts["refused_domain"] == 1


@pytest.mark.parametrize(
    ("data", "counted"),
    [
        (
            {"stored": {**stored([11, 12], PLAIN)["stored"], "start_position": 3}},
            "refused_position",
        ),
        ({"moved": {}}, "refused_type"),
    ],
)
def test_blocks_at_an_unknown_position_are_left_out_and_the_worker_uncertain(
    data: object, counted: str
) -> None:
    index = made()
    index.apply(event(1, data))
    assert (exact(index, EIGHT), uncertain(index)) == ([0], [True])
    assert index.counts[counted] == 1


def test_the_largest_hashes_fit() -> None:
    index = made()
    most = (1 << 64) - 1
    index.apply(event(1, stored([most, 0], [most, 0], parent=None)))
    index.apply(event(2, removed(most, 0)))
    assert (exact(index, EIGHT), index.counts["removed"]) == ([0], 2)


def test_whole_blocks_before_an_item_count() -> None:
    index = made()
    index.apply(event(1, stored([11, 12], PLAIN)))
    prompt = kvtrie.TokenSequence(EIGHT, NS)
    assert index.find_matches(prompt, keep_last=1).exact.tolist() == [4]
    assert index.find_matches(prompt, keep_last=99).exact.tolist() == [0]
    item = kvtrie.Item(6, 8, b"a picture of 16 bytes")
    pictured = kvtrie.TokenSequence([], NS)
    pictured.extend(EIGHT, items=[item])
    assert index.find_matches(pictured).exact.tolist() == [4]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\xff", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "the event is .*, not an object"),
        ('{"worker_id": 7}', "event is None"),
        (event(1, None), "data is None"),
        (event(1, {}), "0 entries"),
        (event(-1, "cleared"), "event_id is -1"),
        (event(1, "cleared", worker=1 << 64), "worker_id is 18446744073709551616"),
        (event(1, "cleared", rank=1 << 32), "dp_rank is 4294967296"),
        (event(1, "cleared", storage_tier=5), "storage_tier is 5"),
        (event(1, stored([True], [1])), "block_hash is True"),
        (event(1, stored([1], [1.5])), "tokens_hash is 1.5"),  # type: ignore[list-item]
        (event(1, {"stored": {"parent_hash": None, "blocks": {}}}), "blocks is {}"),
        (event(1, {"removed": {"block_hashes": None}}), "block_hashes is None"),
    ],
)
def test_what_cannot_be_read_changes_nothing(raw: bytes | str, words: str) -> None:
    index = made()
    index.apply(event(1, stored([11], PLAIN[:1])))
    with pytest.raises(kvtrie.EventError, match=words) as caught:
        index.apply(raw)
    assert caught.value.reason == "malformed"
    assert (exact(index, EIGHT), uncertain(index), dict(index.counts)) == (
        [4],
        [False],
        {"stored": 1},
    )


def test_limits_are_named() -> None:
    index = DynamoIndexer(SIZE, KEY, NS, max_workers=1, max_event_bytes=200)
    index.apply(event(1, stored([11], PLAIN[:1])))
    for raw in (event(1, "cleared", worker=8), event(2, "cleared") + " " * 200):
        with pytest.raises(kvtrie.EventError, match="the limit is") as caught:
            index.apply(raw)
        assert caught.value.reason == "limit"
    with pytest.raises(kvtrie.EventError, match="2 workers; the limit is 1"):
        index.restore([event(0, "cleared", worker=8)])
    assert exact(index, EIGHT) == [4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": True}, "block_size is True"),
        ({"max_workers": 0}, "max_workers is 0"),
        ({"max_workers": 1 << 15}, r"DynamoIndexer: max_workers is 32768; .*\[1, 16384\]"),
        ({"max_event_bytes": 1 << 40}, "max_event_bytes is 1099511627776"),
        ({"namespace": "m"}, "namespace is 'm'"),
        ({"namespace": NS.replace(adapter="a")}, "no adapter"),
        ({"namespace": NS.replace(salt="a")}, "no adapter and the salt SHARED"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        DynamoIndexer(**{"block_size": SIZE, "key": KEY, "namespace": NS, **arguments})
    index = made()
    for call in (
        lambda: index.apply(5),  # type: ignore[arg-type]
        lambda: index.find_matches([1]),  # type: ignore[arg-type]
        lambda: index.find_matches(kvtrie.TokenSequence([1], NS), keep_last=1.0),  # type: ignore[arg-type]
        lambda: index.find_matches(kvtrie.TokenSequence([1], NS), keep_last=-1),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()
