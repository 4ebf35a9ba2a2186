"""Which requests share, in which order they come, and what is refused at start-up."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import Counter
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, Req
from sglang.srt.mem_cache import registry
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from tests.sglang.caches import Pool, Side, key, mine, params, theirs

from kvtrie._core import COMPUTED, RadixIndex
from kvtrie.integrations import sglang
from kvtrie.integrations.sglang import _slots, _support, _version
from kvtrie.integrations.sglang._ids import sequence_of
from kvtrie.integrations.sglang._namespaces import Namespaces
from kvtrie.integrations.sglang._order import depth_first
from kvtrie.integrations.sglang._reasons import ComputedReasons
from kvtrie.integrations.sglang._recording import RequestLog
from kvtrie.integrations.sglang.cache import KvtrieCache
from kvtrie.record import RecordOptions

if TYPE_CHECKING:
    from kvtrie._core import TokenSequence


def one_side(page_size: int) -> Side:
    pool = Pool(20, page_size)
    return Side(mine(pool), pool)


def test_each_pair_of_key_and_salt_has_a_namespace_of_its_own() -> None:
    texts = [None, "", "-", "1:a", "a", "a-", "0:", "0:-"]
    names = Namespaces("model")
    spaces = {names.of(*pair) for pair in product(texts, texts)}
    assert len(spaces) == len(texts) ** 2
    assert Namespaces("other").of(None, None) not in spaces
    assert names.of("a", None) == Namespaces("model").of("a", None)


def test_of_keys_and_salts_of_any_size_little_is_kept() -> None:
    names = Namespaces("model")
    longer = "a" * 257
    named = f"#{hashlib.sha256(longer.encode()).hexdigest()}"
    texts = [None, "a", "a" * 256, longer, "a" * 256 + "b", "b" * 1_000_000, named]
    spaces = {names.of(*pair): pair for pair in product(texts, texts)}
    assert len(spaces) == len(texts) ** 2
    salts = [space.salt for space in spaces if isinstance(space.salt, str)]
    assert len(salts) == len(spaces) - 1
    assert max(map(len, salts)) < 600
    assert names.of("b" * 1_000_000, "a") == names.of("b" * 1_000_000, "a")
    kept = [text for pair in names._made for text in pair if text is not None]
    assert max(map(len, kept)) <= 256


def test_paths_with_the_same_beginning_are_next_to_each_other() -> None:
    paths = [(1, 2), (5,), (1, 3), (), (1, 2, 4), (5,), (1, 2, 4)]
    assert depth_first([]) == []
    # Four of seven begin with 1; what goes on comes before what ends.
    assert depth_first(paths) == [4, 6, 0, 2, 1, 5, 3]


def test_a_long_path_is_no_deep_recursion() -> None:
    paths = [tuple(range(count)) for count in range(0, 5000, 500)]
    assert depth_first(paths) == list(range(9, -1, -1))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_key_is_known_by_whole_pages(page_size: int) -> None:
    side = one_side(page_size)
    ids = list(range(5 * page_size))
    assert side.insert(ids) == 0
    for length, known in ((0, 0), (1, page_size == 1), (3 * page_size + page_size // 2, 3)):
        assert side.match(ids[:length]).device_prefix_len == known * page_size
    changed = [*ids[: 2 * page_size], 99, *ids[2 * page_size + 1 :]]
    assert side.match(changed).device_prefix_len == 2 * page_size
    assert side.match([*ids, 7, 8]).device_prefix_len == 5 * page_size


def test_pages_are_removed_first_page_first_in_one_event() -> None:
    pool = Pool(20, 2)
    side = Side(mine(pool, events=True), pool)
    side.insert([1, 2, 3, 4], None, "tenant")
    side.evict(4)
    cleared, stored, removed = side.cache.take_events()
    assert type(cleared).__name__ == "AllBlocksCleared"
    assert (stored.token_ids, stored.cache_salt) == ([1, 2, 3, 4], "tenant")
    assert removed.block_hashes == stored.block_hashes


def test_an_insert_without_slots_takes_the_ids_for_them() -> None:
    side = one_side(2)
    side.cache.insert(InsertParams(key=key([4, 5, 6, 7, 8]), value=None))
    found = side.match([4, 5, 6, 7, 8]).last_device_node
    assert side.cache.path_device_indices(found).tolist() == [4, 5, 6, 7]


def test_a_negative_id_is_not_cached_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    side = one_side(1)
    side.insert([1, 2])
    assert side.match([1, 2, -1]).device_prefix_len == 0
    done = side.cache.insert(InsertParams(key=key([2**40, -1]), value=torch.tensor([5, 6])))
    assert done.prefix_len == 0
    assert side.cache.counts == {"uncacheable": 2}
    (said,) = caplog.messages
    assert said.startswith("kvtrie: a prompt is not cached: ")
    assert "-1" in said
    assert side.match([1, 2]).device_prefix_len == 2


IMAGE, OTHER = (
    MultimodalDataItem(modality=Modality.IMAGE, hash=number) for number in (2**63 + 5, 2**63 + 6)
)
"""Two images, as SGLang names them."""


def pads(image: MultimodalDataItem, count: int) -> list[int]:
    image.set_pad_value()
    ids: list[int] = image.padding_sequence(count)
    assert min(ids) >= 1 << 32
    return ids


@pytest.mark.parametrize("page_size", [1, 4])
def test_images_are_cached_as_sglangs_own_cache_does(page_size: int) -> None:
    """A prompt with pad values of images, which are beyond 32 bits, was not cached at all."""
    ends = [4, 8, 11, 12, 13, 20, 24, 28, 36, 40]
    prompts = [
        [1, 2, 3, 4, *pads(first, 9), *pads(second, 11), *range(5, 21)]
        for first, second in [(IMAGE, OTHER), (IMAGE, IMAGE), (OTHER, IMAGE)]
    ]
    # The low half of an id alone is not the image.
    prompts.append([one % (1 << 32) for one in prompts[0]])
    pools = [Pool(200, page_size) for _ in range(2)]
    mine_, theirs_ = Side(mine(pools[0]), pools[0]), Side(theirs(pools[1]), pools[1])
    found = []
    for ids in prompts:
        for end in ends:
            both = [
                [side.match(ids[:end]).device_prefix_len, side.insert(ids[:end])]
                for side in (mine_, theirs_)
            ]
            assert both[0] == both[1]
            found.append(both[0][0])
    assert not mine_.cache.counts
    assert max(found) == 36 // page_size * page_size
    assert [mine_.match(ids).device_prefix_len for ids in prompts] == [40] * 4


def test_prompts_share_their_ids_up_to_the_first_that_differs() -> None:
    """Whatever is cut where, in patterns that begin, break off and go on."""
    rng = Random(0)
    space = Namespaces("model").of(None, None)
    draw = [0, 1, 2**32, 2**32 + 1, 2**33, 2**33 + 1]
    shared = 0
    for _ in range(2000):
        first = rng.choices(draw, k=rng.randrange(1, 5)) * 8
        first[rng.randrange(len(first)) :] = rng.choices(draw, k=rng.randrange(1, 12))
        second = list(first)
        second[rng.randrange(len(second))] = rng.choice(draw)
        cut = rng.randrange(1, len(first) + 1)
        index = RadixIndex(64, 1)
        seq = sequence_of(array("q", first), space, limit=cut)
        index.insert(seq, np.arange(cut), num_computed=cut, source=COMPUTED)
        both = [one == two for one, two in zip(first[:cut], second, strict=False)]
        same = both.index(False) if False in both else cut
        assert index.lookup(sequence_of(second, space, limit=len(second))).num_tokens == same
        shared += same > 4 and max(first[:same]) >= 1 << 32
    assert shared > 500


def test_nothing_moves_into_a_prompt_with_an_image() -> None:
    side = one_side(1)
    asked: list[int] = []

    class Moving:
        is_shadow = False

        def ask(self, _: object, seq: TokenSequence, *__: object) -> None:
            asked.append(len(seq))

    side.cache._moving = Moving()
    request = Asked(sampling_params=SimpleNamespace(custom_params=None), retracted_stain=False)
    for ids in ([*range(20)], [*range(10), *pads(IMAGE, 9), 1, 2]):
        found = side.cache.match_prefix(MatchPrefixParams(key=key(ids), req=request))
        assert found.device_prefix_len == 0
    assert asked == [20]
    assert not side.cache.counts


class Asked:
    """What is read of a request, which is a key, as SGLang's is."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def test_what_is_computed_of_a_prompt_with_an_image_has_its_reason() -> None:
    index = RadixIndex(40, 4)
    space = Namespaces("model").of(None, None)
    ids = [1, 2, 3, 4, *pads(IMAGE, 9), *range(5, 12)]
    seq = sequence_of(ids[:12], space, limit=12)
    index.insert(seq, np.arange(3), num_computed=12, source=COMPUTED)
    reasons = ComputedReasons(index, None, goes_on=False, is_shadow=False)
    request: Any = Asked(full_untruncated_fill_ids=ids, origin_input_ids=ids, retracted_stain=False)
    reasons.look(request, space, 12, None, is_exact=True)
    counted = reasons.ended(request, [(0, 12, "exact")], len(ids), list)
    assert counted == {("new", "other"): 8}


def test_a_request_with_an_image_is_not_recorded(tmp_path: Path) -> None:
    """It was a failure with a traceback."""
    path = tmp_path / "kvtrie.log"
    log = RequestLog(RecordOptions(path=str(path)), 1, "model", None)
    request: Any = SimpleNamespace(rid="r1", origin_input_ids=pads(IMAGE, 9), output_ids=[1])
    log.ended(request, None, [], {}, None)
    log._recorder.flush()
    assert log.news() == (0, 0)


def test_pages_of_a_lock_that_failed_go_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    side = one_side(1)
    side.insert([1, 2, 3])
    found = side.match([1, 2, 3])
    index = side.cache._index

    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(index, name)

        def pin(self, *_: Any, **__: Any) -> Any:
            msg = "for the test"
            raise RuntimeError(msg)

    monkeypatch.setattr(side.cache, "_index", Broken())
    lock = side.cache.lock(found.last_device_node)
    assert side.cache.counts == {"inc_lock_ref": 1}
    assert (side.cache.evictable_size(), side.cache.protected_size()) == (0, 3)
    slots = side.cache.path_device_indices(found.last_device_node).tolist()
    free = len(side.pool.free)
    assert side.cache.evict(EvictParams(num_tokens=2)).num_tokens_evicted == 0
    # Two of them are in the index no more, and still where the request reads them.
    assert len(side.pool.free) == free
    assert side.cache.path_device_indices(found.last_device_node).tolist() == slots
    assert (side.cache.evictable_size(), side.cache.protected_size()) == (0, 3)
    side.cache.unlock(lock)
    assert len(side.pool.free) == free + 2
    assert (side.cache.evictable_size(), side.cache.total_size()) == (1, 1)
    assert side.evict(3) == 1


def test_turns_read_no_page_of_a_lock_that_failed_once_it_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, log = Pool(64, 1), []
    store: Any = SimpleNamespace(
        is_in_host=True, left=lambda blocks: log.append(("left", sorted(blocks.tolist())))
    )
    cache = KvtrieCache(params(pool), 64, "model", stored=store)
    side = Side(cache, pool)
    side.insert([1, 2, 3])
    found = side.match([1, 2, 3]).last_device_node
    with monkeypatch.context() as failing:
        failing.setattr(cache, "_index", SimpleNamespace())
        lock = cache.lock(found)
    blocks = sorted(found.blocks.tolist())
    slots = sorted(cache.path_device_indices(found).tolist())
    free = pool.free_segment

    def freed(given: torch.Tensor, *, start_pos: int) -> None:
        log.append(("slots", sorted(given.tolist())))
        free(given, start_pos=start_pos)

    monkeypatch.setattr(pool, "free_segment", freed)
    assert side.evict(3) == 0
    # A request that ends now may still have them written.
    assert log == []
    cache.unlock(lock)
    assert log == [("left", blocks), ("slots", slots)]
    assert cache.counts == {"inc_lock_ref": 1}


class Failing:
    """An index of which one call raises."""

    def __init__(self, index: Any, name: str) -> None:
        self._index, self._name = index, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            msg = f"{name} fails for the test"
            raise RuntimeError(msg)
        return getattr(self._index, name)


class Row:
    """A request of four tokens or more, with a row of slots."""

    def __init__(self, side: Side, ids: list[int]) -> None:
        cache = side.cache
        self.table = torch.zeros(1, 20, dtype=torch.int32)
        cache.req_to_token_pool = SimpleNamespace(req_to_token=self.table, write=self._write)
        self.extra_key = self.cache_salt = self.lora_id = None
        self.full_untruncated_fill_ids = array("q", ids)
        found = side.match(ids)
        known = found.device_prefix_len
        self.kv = SimpleNamespace(
            req_pool_idx=0, cache_protected_len=known, cache_inserted_len=known
        )
        self.last_node = found.last_device_node
        self.lock = cache.lock(self.last_node)
        slots = cache.path_device_indices(self.last_node)
        self.table[0, : len(ids)] = torch.cat([slots, side.pool.alloc(len(ids) - known)])

    def _write(self, at: Any, slots: torch.Tensor) -> None:
        self.table[at] = slots.to(torch.int32)

    def finished(self) -> bool:
        return False


def test_a_request_reads_no_page_that_went_with_a_lock_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another request has computed the prefix again; the row had the slots of before."""
    side = one_side(1)
    side.insert([1, 2, 3])
    with monkeypatch.context() as failing:
        failing.setattr(side.cache, "_index", Failing(side.cache._index, "pin"))
        request = Row(side, [1, 2, 3, 4, 5])
    assert side.evict(3) == 0
    side.insert([1, 2, 3])
    side.cache.checkpoint(request, up_to=5)
    assert side.cache.counts == {"inc_lock_ref": 1}
    row = request.table[0, :5].tolist()
    assert not set(row) & set(side.pool.free)
    assert row == side.cache.path_device_indices(request.last_node).tolist()
    side.cache.unlock(request.lock)
    assert side.evict(5) == 5
    assert len(side.pool.free) == 20


def test_a_match_whose_lock_failed_is_continued_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """To make room for copies could take what is locked out of the index."""
    side = one_side(1)
    side.insert([1, 2, 3])
    found = side.match([1, 2, 3]).last_device_node
    found.stored = 4
    asked: list[Any] = []
    monkeypatch.setattr(side.cache, "_from_store", lambda *given: asked.append(given))
    params = InitLoadBackParams(best_match_node=found, host_hit_length=4, req=None)
    with monkeypatch.context() as failing:
        failing.setattr(side.cache, "_index", Failing(side.cache._index, "pin"))
        lock = side.cache.lock(found)
    assert side.cache.init_load_back(params) == (0, found)
    assert not asked
    # A lock after it holds the same pages, wherever they are.
    assert side.evict(3) == 0
    slots = side.cache.path_device_indices(found).tolist()
    again = side.cache.lock(found)
    side.cache.unlock(lock)
    assert side.cache.path_device_indices(found).tolist() == slots
    assert not set(slots) & set(side.pool.free)
    side.cache.unlock(again)
    assert len(side.pool.free) == 20
    assert side.cache.counts == {"inc_lock_ref": 1}


def test_what_may_have_left_is_not_read_if_it_cannot_be_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = one_side(1)
    side.insert([1, 2, 3])
    found = side.match([1, 2, 3]).last_device_node
    side.evict(3)
    side.insert([7, 8, 9])
    monkeypatch.setattr(side.cache, "_index", Failing(side.cache._index, "pin"))
    lock = side.cache.lock(found)
    assert side.cache.path_device_indices(found).tolist() == []
    assert side.cache.protected_size() == 0
    side.cache.unlock(lock)


@pytest.mark.parametrize("who", ["kvtrie", "sglang"])
def test_pages_that_could_not_be_given_back_are_given_back_with_the_next(
    monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """Their ids were free already where SGLang's pool failed: no page was ever given back again."""
    side = one_side(4)
    side.insert(list(range(40)))
    owner, name = {
        "kvtrie": (side.cache._slots, "free"),
        "sglang": (side.pool, "free_segment"),
    }[who]
    free, calls = getattr(owner, name), []

    def once(*given: Any, **more: Any) -> None:
        calls.append(given)
        if len(calls) <= 2:
            msg = "it fails for the test"
            raise RuntimeError(msg)
        free(*given, **more)

    monkeypatch.setattr(owner, name, once)
    assert side.evict(8) == 0
    # Their pages are the cache's, and of no use until then.
    assert (side.cache.total_size(), side.cache.evictable_size()) == (40, 32)
    assert side.evict(8) == 16
    assert (side.cache.total_size(), side.cache.evictable_size()) == (24, 24)
    assert len(side.pool.free) == 14
    assert side.cache.counts == {"_free_pages": 2}


def test_a_row_keeps_its_own_pages_where_those_of_another_are_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a prefix with a hole, the pages after it are cached already."""
    side = one_side(1)
    side.insert([1, 2, 3, 4])
    blocks = side.match([1, 2, 3, 4]).last_device_node.blocks
    side.cache._take_back(side.cache._index.discard(blocks[1:2]))
    request = Row(side, [1, 2, 3, 4, 5])
    own = request.table[0, 1:5].tolist()
    with monkeypatch.context() as failing:
        failing.setattr(side.cache._slots, "of", None)
        side.cache.checkpoint(request, up_to=5)
    assert side.cache.counts == {"_slots_of": 2}
    assert request.table[0, 1:5].tolist() == own
    assert not set(own) & set(side.pool.free)
    request.full_untruncated_fill_ids.append(6)
    request.table[0, 5:6] = side.pool.alloc(1)
    side.cache.checkpoint(request, up_to=6)
    row = request.table[0, :6].tolist()
    assert row == side.cache.path_device_indices(request.last_node).tolist()
    assert not set(row) & set(side.pool.free)


def test_a_flush_that_fails_forgets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    side = one_side(4)
    side.insert(list(range(40)))
    monkeypatch.setattr(side.cache, "_index", Failing(side.cache._index, "take_freed"))
    side.cache.reset()
    assert side.cache.counts == {"reset": 1}
    assert side.cache.total_size() == side.cache.evictable_size() == 0
    side.pool.free = list(range(1, 21))
    assert side.match(list(range(40))).device_prefix_len == 0
    assert side.insert(list(range(80))) == 0
    assert side.cache.total_size() == 80


def test_a_flush_that_was_not_published_is_published_before_what_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool(20, 2)
    side = Side(mine(pool, events=True), pool)
    side.insert([1, 2])
    side.cache.take_events()
    with monkeypatch.context() as failing:
        failing.setattr(side.cache._events.recorder, "record_all_cleared", None)
        side.cache.reset()
        assert side.cache.take_events() == []
    side.pool.free = list(range(1, 21))
    side.insert([3, 4])
    events = [type(one).__name__ for one in side.cache.take_events()]
    assert events == ["AllBlocksCleared", "BlockStored"]
    assert side.cache.counts == {"_cleared": 1, "take_events": 1}


@pytest.mark.parametrize("call", ["record_store", "record_remove"])
def test_events_that_fail_claim_no_page_that_is_not_there(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(20, 2)
    side = Side(mine(pool, events=True), pool)
    theirs_ = Side(theirs(Pool(20, 2), events=True), Pool(20, 2))
    claimed: Counter[int] = Counter()

    def read(events: list[Any]) -> None:
        for event in events:
            if type(event).__name__ == "AllBlocksCleared":
                claimed.clear()
            else:
                added = 1 if type(event).__name__ == "BlockStored" else -1
                claimed.update(dict.fromkeys(event.block_hashes, added))

    ids = list(range(12))
    with monkeypatch.context() as failing:
        failing.setattr(side.cache._events.recorder, call, None)
        side.insert(ids)
        side.evict(4)
    read(side.cache.take_events())
    # What is cached is published when it is used again, each page after those before it.
    side.insert(ids)
    read(side.cache.take_events())
    theirs_.insert(ids)
    stored = [one for event in theirs_.cache.take_events()[1:] for one in event.block_hashes]
    assert +claimed == dict.fromkeys(stored, 1)
    side.evict(12)
    read(side.cache.take_events())
    assert not +claimed


def test_failures_are_counted_where_the_metrics_fail(caplog: pytest.LogCaptureFixture) -> None:
    side = one_side(1)
    side.cache._metrics = SimpleNamespace()
    side.cache._index = None
    assert [side.match([1, 2, 3]).device_prefix_len for _ in range(2)] == [0, 0]
    assert side.cache.counts == {"match_prefix": 2, "metrics": 2}
    assert len(caplog.messages) == 2


def test_events_that_no_snapshot_has_are_published_and_end_the_snapshots() -> None:
    pool = Pool(20, 2)
    said: list[str] = []
    side = Side(mine(pool, events=True), pool)
    side.cache._snapshots = SimpleNamespace(hand_over=None, fail=said.append)
    side.insert([1, 2])
    assert [type(one).__name__ for one in side.cache.take_events()] == [
        "AllBlocksCleared",
        "BlockStored",
    ]
    assert said == ["a batch of events was not handed over"]
    assert side.cache.counts == {"take_events": 1}


@pytest.mark.parametrize("method", ["match_prefix", "touch_prefix", "insert"])
def test_what_fails_is_a_miss(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    side = one_side(1)
    side.insert([1, 2, 3])
    monkeypatch.setattr(side.cache, "_index", None)
    calls: dict[str, Any] = {
        "match_prefix": lambda: side.match([1, 2, 3]).device_prefix_len,
        "touch_prefix": lambda: side.cache.touch_prefix(key([1, 2, 3])) or 0,
        "insert": lambda: _insert(side),
    }
    assert calls[method]() == 0
    assert side.cache.counts == {method: 1}


def test_requests_are_taken_in_their_order_if_none_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = one_side(1)
    side.insert([1, 2, 3])
    found = [side.match(ids).last_device_node for ids in ([1], [1, 2, 3], [1, 2])]
    assert side.cache.dfs_weight_order(found) == [1, 2, 0]
    monkeypatch.setattr("kvtrie.integrations.sglang.cache.depth_first", None)
    assert side.cache.dfs_weight_order(found) == [0, 1, 2]
    assert side.cache.counts == {"dfs_weight_order": 1}


def test_counts_of_a_request_that_fail_leave_it_alone() -> None:
    side = one_side(1)
    request: Any = SimpleNamespace(last_node=SimpleNamespace(built=SimpleNamespace()))
    side.cache.on_release(request, checkpointed=True)
    assert side.cache.counts == {"on_release": 1}


def _insert(side: Side) -> int:
    value = torch.tensor([7, 8, 9])
    done: int = side.cache.insert(InsertParams(key=key([1, 2, 3]), value=value)).prefix_len
    return done


def test_a_lock_has_the_blocks_of_now() -> None:
    """What was matched left, and came back in other slots, before it was locked."""
    side = one_side(2)
    ids = list(range(8))
    side.insert(ids)
    found = side.match(ids).last_device_node
    slots = side.cache.path_device_indices(found).tolist()
    assert side.evict(8) == 8
    side.insert([100, 101])
    side.insert(ids)
    lock = side.cache.lock(found)
    now = side.cache.path_device_indices(side.match(ids).last_device_node).tolist()
    assert now != slots
    assert side.cache.path_device_indices(found).tolist() == now
    side.cache.unlock(lock)
    assert side.cache.path_device_indices(found).tolist() == now


@pytest.mark.parametrize("page_size", [1, 4])
def test_slots_of_a_lock_stay_while_others_come_and_go(page_size: int) -> None:
    """The tensor itself, as SGLang reads it after it has evicted for the request."""
    side = one_side(page_size)
    ids = list(range(8 * page_size))
    side.insert(ids)
    found = side.match(ids).last_device_node
    lock = side.cache.lock(found)
    slots = side.cache.path_device_indices(found)
    before = slots.tolist()
    for number in range(1, 30):
        side.evict(max(0, 4 - len(side.pool.free)) * page_size)
        side.insert([1000 * number + at for at in range(4 * page_size)])
        assert slots.tolist() == before
    side.cache.unlock(lock)


@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_of_a_prefix_have_consecutive_ids(page_size: int) -> None:
    """Their slots are copied at once. Also after an eviction, which frees the last page first."""
    side = one_side(page_size)
    ids = list(range(12 * page_size))
    for _ in range(3):
        side.insert(ids)
        blocks = side.match(ids).last_device_node.blocks.tolist()
        assert blocks == list(range(blocks[0], blocks[0] + 12))
        assert side.evict(12 * page_size) == 12 * page_size


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_prefix_in_one_piece_is_not_copied(page_size: int) -> None:
    """Its slots are the table's own, and of the same prefix they are one tensor."""
    side = one_side(page_size)
    table = side.cache._slots._slots
    ids = list(range(10 * page_size))
    side.insert(ids)
    whole, again, part = (
        side.cache.path_device_indices(side.match(ids[:count]).last_device_node)
        for count in (10 * page_size, 10 * page_size, 6 * page_size)
    )
    assert again is whole
    assert part.tolist() == whole.tolist()[: 6 * page_size]
    for slots in (whole, part):
        assert table.data_ptr() <= slots.data_ptr() < table.data_ptr() + 8 * len(table)
    # In two pieces, with another prompt between them.
    side.insert([1000 + at for at in range(2 * page_size)])
    side.insert([*ids, *(2000 + at for at in range(2 * page_size))])
    longer = [*ids, *(2000 + at for at in range(2 * page_size))]
    found = side.match(longer).last_device_node
    assert found.found.consecutive_from is None
    slots = side.cache.path_device_indices(found).tolist()
    assert slots[: 10 * page_size] == whole.tolist()
    assert len(slots) == len(set(slots)) == 12 * page_size


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_match_makes_two_calls_of_python(page_size: int) -> None:
    """Of the cache's own: each takes longer than to compare a hundred tokens."""
    side = one_side(page_size)
    ids = list(range(10 * page_size))
    side.insert(ids)
    given = MatchPrefixParams(key=key([*ids, 7]))
    made: list[str] = []

    def called(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(
            str(Path(_slots.__file__).parent)
        ):
            made.append(frame.f_code.co_name)

    for _ in range(2):
        made.clear()
        sys.setprofile(called)
        try:
            found = side.cache.match_prefix(given)
            side.cache.path_device_indices(found.last_device_node)
        finally:
            sys.setprofile(None)
    assert made == ["match_prefix", "path_device_indices"]


@pytest.mark.parametrize("blocks", [[2, 3, 4], [4, 3, 2], [1, 4, 2], [3]])
def test_pages_are_freed_as_sglang_frees_their_slots(blocks: list[int]) -> None:
    size = 4
    freed = []
    for on_device in (False, True):
        pool = PagedTokenToKVPoolAllocator(32, size, torch.float32, "cpu", None, need_sort=False)
        slots = _slots.PageSlots(8, size, torch.device("cpu"))
        slots.take(pool.alloc(32), 0, 32)
        if on_device:
            slots._host = None
        slots.free(np.array(blocks, np.int32), pool)
        assert pool.available_size() == len(blocks) * size
        freed.append(sorted(pool.free_pages.tolist()))
    # Page 0 of the pool is padding.
    assert freed[0] == freed[1] == sorted(block + 1 for block in blocks)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("in_a_group", [False, True])
def test_pages_that_were_freed_stay_free(page_size: int, need_sort: bool, in_a_group: bool) -> None:
    """Of as many pages each time, whose tensor may be one: the allocators must not keep it."""
    more = {"dtype": torch.float32, "device": "cpu", "kvcache": None, "need_sort": need_sort}
    pool: Any
    if page_size == 1:
        pool = TokenToKVPoolAllocator(8, **more)
    else:
        pool = PagedTokenToKVPoolAllocator(32, page_size, **more)
    slots = _slots.PageSlots(8, page_size, torch.device("cpu"))
    slots.take(pool.alloc(8 * page_size), 0, 8 * page_size)
    if in_a_group:
        pool.free_group_begin()
    for blocks in ([1, 0], [3, 2], [7, 5]):
        slots.free(np.array(blocks, np.int32), pool)
    if in_a_group:
        pool.free_group_end()
    assert pool.available_size() == 6 * page_size
    back = pool.alloc(6 * page_size).tolist()
    # Page 0 of the pool is padding.
    pages = [1, 2, 3, 4, 6, 8]
    assert sorted(back) == [page * page_size + at for page in pages for at in range(page_size)]


def test_an_allocator_of_another_kind_frees_pages_in_its_own_way() -> None:
    """As SGLang's for sharded pages does, which keeps free pages in lists of its own."""

    class Own(PagedTokenToKVPoolAllocator):
        def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
            assert start_pos == 0
            freed.extend(free_index.tolist())

    freed: list[int] = []
    pool = Own(32, 4, torch.float32, "cpu", None, need_sort=False)
    slots = _slots.PageSlots(8, 4, torch.device("cpu"))
    slots.take(pool.alloc(32), 0, 32)
    slots.free(np.array([2, 3], np.int32), pool)
    assert sorted(freed) == list(range(12, 20))
    assert pool.available_size() == 0


def test_pieces_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_slots, "_MAX_PIECES", 4)
    side = one_side(1)
    ids = list(range(12))
    side.insert(ids)
    for count in range(1, 13):
        path = side.cache.path_device_indices(side.match(ids[:count]).last_device_node)
        assert len(path) == count
        assert len(side.cache._slots.pieces) <= 4


def test_all_slots_of_cached_pages_are_listed() -> None:
    side = one_side(4)
    assert side.cache.all_values_flatten().tolist() == []
    side.insert(list(range(24)))
    side.evict(8)
    cached = set(side.cache.all_values_flatten().tolist())
    free = {page * 4 + offset for page in side.pool.free for offset in range(4)}
    assert len(cached) == side.cache.total_size() == 16
    assert cached | free == set(range(4, 84))


@pytest.mark.parametrize("page_size", [1, 4])
def test_slots_on_a_device_are_those_on_the_host(page_size: int) -> None:
    """The way of devices, on tensors of the host."""
    sides = [one_side(page_size), one_side(page_size)]
    sides[1].cache._slots._host = None
    rng = Random(page_size)
    for _ in range(300):
        ids = [rng.randrange(3) for _ in range(rng.randrange(6 * page_size))]
        answers: list[Any] = []
        for side in sides:
            missing = -(-len(ids) // page_size) - len(side.pool.free)
            evicted = side.evict(missing * page_size) if missing > 0 else 0
            known = side.insert(ids)
            path = side.cache.path_device_indices(side.match(ids).last_device_node)
            used = sorted(side.cache.all_values_flatten().tolist())
            answers.append([evicted, known, path.dtype, path.tolist(), used])
        assert answers[0] == answers[1]


def test_adapters_share_nothing() -> None:
    """SGLang appends an adapter's id to the key of its requests."""
    side = one_side(1)
    ids = list(range(6))
    spaces = [
        Req(
            "name",
            "",
            array("q", ids),
            SamplingParams(),
            lora_id=adapter,
            extra_key=extra,
            cache_salt=salt,
        )
        for adapter, extra, salt in product((None, "a1", "b2"), (None, "team"), (None, "a1"))
    ]
    seen = set()
    for number, one in enumerate(spaces):
        pair = one.extra_key, one.cache_salt
        assert pair not in seen
        seen.add(pair)
        own = ids[: 1 + number % 3]
        side.evict(20)
        assert side.insert(own, *pair) == 0
        found = [side.match(ids, other.extra_key, other.cache_salt) for other in spaces]
        expected = [len(own) if other is one else 0 for other in spaces]
        assert [match.device_prefix_len for match in found] == expected


def test_reset_forgets_all() -> None:
    side = one_side(4)
    side.insert(list(range(40)))
    side.cache.reset()
    assert side.cache.total_size() == side.cache.evictable_size() == 0
    assert side.match(list(range(40))).device_prefix_len == 0
    side.pool.free = list(range(1, 21))
    assert side.insert(list(range(80))) == 0
    assert side.cache.total_size() == 80


def test_registers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    backends: dict[str, Any] = {}
    monkeypatch.setattr(registry, "_RADIX_CACHE_REGISTRY", backends)
    sglang.register()
    sglang.register()
    assert list(backends) == ["kvtrie"]


def context(**settings: Any) -> Any:
    """What SGLang gives a factory, with SGLang's own defaults."""
    pool = Pool(settings.pop("num_pages", 20), settings.pop("pool_page", 4))
    rank = settings.pop("tp_rank", 0)
    server: dict[str, Any] = {one.name: one.default for one in msgspec.structs.fields(ServerArgs)}
    server |= {"model_path": "model"}
    flags = dict.fromkeys(("is_hybrid_swa", "is_hybrid_ssm", "is_dsa"), False)
    decision = settings.pop("decides_against_it", False)
    for name, one in settings.items():
        (flags if name in flags else server)[name] = one
    asked = params(pool)
    asked.page_size = 4
    return SimpleNamespace(
        server_args=SimpleNamespace(**server),
        params=asked,
        tp_rank=rank,
        disable_radix_cache=decision,
        **flags,
    )


def test_defaults_are_supported() -> None:
    cache = _support.make(context())
    assert (cache.page_size, cache._slots.num_pages) == (4, 20)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm='EAGLE' is not supported: dr"),
        ({"radix_eviction_policy": "lfu"}, "radix_eviction_policy='lfu' is not supported: kvtrie"),
        ({"strip_thinking_cache": True}, "kvtrie keeps both"),
        ({"enable_hierarchical_cache": True}, "pages in host memory are not in the index"),
        ({"enable_lmcache": True}, "LMCache"),
        ({"enable_flexkv": True}, "FlexKV"),
        ({"enable_unified_cache_external_linker": True}, "its pages are not in the index"),
        ({"enable_streaming_session": True}, "sessions"),
        ({"enable_session_radix_cache": True}, "sessions"),
        ({"disaggregation_mode": "prefill"}, "disaggregation_mode='prefill'"),
        ({"enable_dp_attention": True}, "enable_dp_attention=True is not supported"),
        ({"attn_dp_size": 2}, "attn_dp_size=2 is not supported: data-parallel attention"),
        ({"pp_size": 2}, "pp_size=2"),
        ({"dp_size": 2}, "dp_size=2"),
        ({"attn_cp_size": 2}, "attn_cp_size=2"),
        ({"disable_radix_cache": True}, "there is no cache then"),
        ({"decides_against_it": True}, "SGLang keeps no prefix cache for them"),
        ({"is_hybrid_swa": True}, "models with sliding windows are not supported"),
        ({"is_hybrid_ssm": True}, "models with states are not supported"),
        ({"is_dsa": True}, "models with sparse attention are not supported"),
        ({"pool_page": 2}, "pages of 2 slots in the pool and 4 in the cache are not supported"),
    ],
    ids=lambda one: str(one)[:40],
)
def test_refused_by_name(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(_version.SGLangUnsupportedError) as caught:
        _support.make(context(**settings))
    assert str(caught.value).startswith("--radix-cache-backend kvtrie: ")
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_sglang_decides_is_checked_and_not_what_was_given() -> None:
    """As it takes another eviction policy for some models."""
    made = context()
    decided = [("a model", {"radix_eviction_policy": "priority"})]
    made.server_args._resolved_overrides = decided
    with pytest.raises(_version.SGLangUnsupportedError, match="radix_eviction_policy='priority'"):
        _support.make(made)
    decided.append(("the operator", {"radix_eviction_policy": "lru"}))
    given = made.server_args
    assert _support.make(made).page_size == 4
    assert made.server_args is given


@pytest.mark.parametrize("version", ["0.5.22", "0.6.0", "0.5.2", "1.0", "0.5.23.dev4", "0.5.23rc1"])
def test_other_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_version, "installed", lambda: version)
    why = f"SGLang {version} is not among the tested versions: install 0.5.23"
    with pytest.raises(_version.SGLangUnsupportedError, match=why):
        _support.make(context())


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23+cpu"])
def test_builds_of_the_tested_version_are_not(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_version, "installed", lambda: version)
    _version.check_version()
