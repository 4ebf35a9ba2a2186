"""The index from Python: arguments, results, and events as an engine's own encoder writes them."""

from __future__ import annotations

import threading
from typing import Any

import msgpack
import numpy as np
import pytest
from tests.cluster.publisher import CLEARED, packed, removed, stored

import kvtrie

KEY = b"the key of tests"
NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)


def two() -> tuple[kvtrie.KvIndexer, int, int]:
    index = kvtrie.KvIndexer(2, KEY)
    return index, index.add_worker("a", NS), index.add_worker("b", NS)


def test_scores_are_arrays_in_the_order_of_the_workers() -> None:
    index, first, second = two()
    index.apply(first, packed(stored([1, 2, 3], None, range(6))))
    index.apply(second, packed({**stored([9], None, range(2)), "medium": "CPU"}))
    prompt = kvtrie.TokenSequence(range(8), NS)
    scores = index.find_matches(prompt)
    assert scores.workers == ("a", "b")
    assert scores.exact.tolist() == [6, 2]
    assert scores.exact.dtype == np.dtype(np.uint32)
    assert scores.tier.tolist() == [0, 1]
    assert scores.tier.dtype == np.dtype(np.uint8)
    assert scores.moved.tolist() == [0, 0]
    assert scores.uncertain.tolist() == [False, False]
    assert index.find_matches(prompt, keep_last=3).exact.tolist() == [4, 2]
    index.remove_worker(first)
    again = index.find_matches(prompt)
    assert (again.workers, again.exact.tolist()) == (("b",), [2])
    # What was found before stays as it was.
    assert scores.workers == ("a", "b")
    third = index.add_worker("a", NS)
    assert third not in {first, second}
    assert index.find_matches(prompt).exact.tolist() == [2, 0]
    index.check()


def test_moved_runs_need_a_policy_and_their_digests() -> None:
    index, first, _ = two()
    index.apply(first, packed(stored(range(10), None, range(100, 120))))
    prompt = kvtrie.TokenSequence([7, *range(104, 120)], NS)
    policy = kvtrie.ReusePolicy()
    assert index.find_matches(prompt).moved.tolist() == [0, 0]
    assert index.find_matches(prompt, policy).possible.tolist() == [16, 0]
    digests = index.digests(prompt, moved=True)
    assert digests.num_tokens == 17
    assert index.find_matches(digests, policy).possible.tolist() == [16, 0]
    assert index.find_matches(digests, policy, keep_last=4).possible.tolist() == [12, 0]
    with pytest.raises(ValueError, match="without moved=True"):
        index.find_matches(index.digests(prompt), policy)
    plain = kvtrie.KvIndexer(2, KEY, moved_runs=False)
    worker = plain.add_worker("a", NS)
    plain.apply(worker, packed(stored(range(10), None, range(100, 120))))
    assert plain.find_matches(prompt, policy).possible.tolist() == [0]


def test_indexes_with_one_key_have_equal_digests() -> None:
    index, worker, _ = two()
    index.apply(worker, packed(stored([1], None, range(2))))
    prompt = kvtrie.TokenSequence(range(2), NS)
    assert index.find_matches(kvtrie.KvIndexer(2, KEY).digests(prompt)).exact.tolist() == [2, 0]
    for other in (kvtrie.KvIndexer(2, KEY[::-1]), kvtrie.KvIndexer(4, KEY)):
        with pytest.raises(ValueError, match="another key or block size"):
            index.find_matches(other.digests(prompt))


@pytest.mark.parametrize("size", [16, 32], ids=["md5", "sha256"])
def test_hashes_may_be_bytes(size: int) -> None:
    index, worker, _ = two()
    hashes: Any = [bytes([at]) * size for at in range(3)]
    index.apply(worker, packed(stored(hashes, None, range(6))))
    index.apply(worker, packed(removed(hashes[2])))
    prompt = kvtrie.TokenSequence(range(6), NS)
    assert index.find_matches(prompt).exact.tolist() == [4, 0]


def test_sglangs_signed_hashes_and_array_form() -> None:
    index, worker, _ = two()
    array = ["BlockStored", [-7, 2**63 - 1], None, [0, 1, 2, 3], 2, None, "GPU"]
    done = index.apply(worker, msgpack.packb([0.5, [array, ["BlockRemoved", [-7]]], None]))
    assert done == {"events": 2, "refused": 0, "cleared": False}
    stats = index.worker_stats(worker)
    assert (stats["stored"], stats["removed"], stats["entries"]) == (2, 1, 1)
    done = index.apply(worker, msgpack.packb([0.5, [["AllBlocksCleared"]]]))
    assert done["cleared"]


def test_salts_of_tenants_do_not_meet() -> None:
    index, worker, _ = two()
    salted = {**stored([1], None, range(2)), "extra_keys": [["tenant-a"]]}
    index.apply(worker, packed(salted))
    found = {
        salt: index.find_matches(
            kvtrie.TokenSequence(range(2), kvtrie.Namespace(model="m", salt=salt))
        ).exact.tolist()
        for salt in ("tenant-a", "tenant-b", kvtrie.SHARED)
    }
    assert found == {"tenant-a": [2, 0], "tenant-b": [0, 0], kvtrie.SHARED: [0, 0]}
    # Events without a salt are shared only if the worker's namespace says so.
    own = index.add_worker("c", kvtrie.Namespace(model="m", salt="tenant-b"))
    index.apply(own, packed(stored([1], None, range(2))))
    shared = kvtrie.TokenSequence(range(2), NS)
    assert index.find_matches(shared).exact.tolist() == [0, 0, 0]


def test_batch_that_is_refused_changes_nothing() -> None:
    index, worker, _ = two()
    good = stored([1], None, range(2))
    cases = [
        ("malformed", "byte 0", b""),
        ("malformed", "1 token ids for 1 blocks of 2", packed(good, stored([2], None, [1]))),
        ("block_size", "blocks of 16 tokens", packed(good, {**good, "block_size": 16})),
    ]
    for reason, message, payload in cases:
        with pytest.raises(kvtrie.EventError, match=message) as failed:
            index.apply(worker, payload)
        assert failed.value.reason == reason
    assert index.stats()["entries"] == 0
    assert index.worker_stats(worker)["refused_batches"] == 3
    index.apply(worker, packed(good, rank=0))
    with pytest.raises(kvtrie.EventError, match="data-parallel rank 1") as failed:
        index.apply(worker, packed(CLEARED, rank=1))
    assert failed.value.reason == "rank"
    small = kvtrie.KvIndexer(2, KEY, max_batch_bytes=8)
    with pytest.raises(kvtrie.EventError, match="the limit is 8") as failed:
        small.apply(small.add_worker("a", NS), bytes(9))
    assert failed.value.reason == "limit"


def test_wrong_arguments_name_the_value_and_the_limit() -> None:
    index, worker, _ = two()
    api: Any = index
    make: Any = kvtrie.KvIndexer
    cases: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "KvIndexer: block_size is 0; it must be in", lambda: make(0, KEY)),
        (ValueError, "key has 3 bytes", lambda: make(16, b"key")),
        (TypeError, "key is of type 'str'", lambda: make(16, "key")),
        (ValueError, "max_workers is 0", lambda: make(16, KEY, max_workers=0)),
        (ValueError, "name is empty", lambda: api.add_worker("", NS)),
        (ValueError, 'name is "a", and a live worker has it', lambda: api.add_worker("a", NS)),
        (TypeError, "payload is of type 'list'", lambda: api.apply(worker, [])),
        (TypeError, "worker is of type 'str'", lambda: api.apply("a", b"")),
        (ValueError, "worker is -1", lambda: api.clear_worker(-1)),
        (kvtrie.StaleHandleError, "no worker 99", lambda: api.apply(99, packed(CLEARED))),
        (kvtrie.StaleHandleError, "no worker 99", lambda: api.remove_worker(99)),
        (ValueError, "milliseconds is 0;", lambda: api.set_certain_for(worker, 0)),
        (ValueError, "milliseconds is 2147483648;", lambda: api.set_certain_for(worker, 1 << 31)),
        (TypeError, "milliseconds is of type 'float'", lambda: api.set_certain_for(worker, 0.5)),
        (kvtrie.StaleHandleError, "no worker 99", lambda: api.set_certain_for(99, None)),
        (TypeError, "seq is of type 'list'", lambda: api.find_matches([1, 2])),
        (
            ValueError,
            "keep_last is -1",
            lambda: api.find_matches(kvtrie.TokenSequence([1], NS), keep_last=-1),
        ),
    ]
    for kind, message, call in cases:
        with pytest.raises(kind, match=message):
            call()
    full = kvtrie.KvIndexer(16, KEY, max_workers=1)
    full.add_worker("a", NS)
    with pytest.raises(ValueError, match="there are 1 workers"):
        full.add_worker("b", NS)
    assert full.workers == ("a",)


def test_many_threads_feed_and_ask() -> None:
    index = kvtrie.KvIndexer(2, KEY)
    workers = [index.add_worker(f"w{number}", NS) for number in range(8)]
    prompt = kvtrie.TokenSequence(range(64), NS)
    wrong: list[object] = []

    def feed(column: int) -> None:
        worker = workers[column]
        for _ in range(60):
            for at in range(32):
                parent = at - 1 if at else None
                index.apply(worker, packed(stored([at], parent, [2 * at, 2 * at + 1])))
                found = int(index.find_matches(prompt).exact[column])
                if found != 2 * (at + 1):
                    wrong.append((column, at, found))
            index.apply(worker, packed(CLEARED))

    threads = [threading.Thread(target=feed, args=(column,)) for column in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    index.check()
    assert index.stats()["entries"] == 0
