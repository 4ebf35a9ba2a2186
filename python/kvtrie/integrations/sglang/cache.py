"""SGLang's prefix cache over a kvtrie index: what is cached, who holds it, and what is evicted.

A page of the pool is a block. Ids of blocks are the cache's own, and a table gives the slots of
each. A handle is a sequence and how many of its tokens matched; a lock is a pinned plan of these.
The cache is exact: a match is a prefix of whole pages with the same tokens in the same namespace.

An exception in a method would end SGLang's scheduler. What is not expected is caught, counted and
logged once by its kind; the request then finds nothing, or keeps its KV for itself.

Where that cannot be, nothing wrong is read: a lock that failed stops all evictions until it is
given back, and a checkpoint changes the request only when the index has taken its pages.

A match costs one walk of the prompt, a checkpoint one plan and one insert of what is new, and an
eviction the pages that it takes, however many are cached.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR, FINISH_MATCHED_TOKEN
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    TreeLock,
)
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvtrie._core import COMPUTED, RadixIndex, ReusePolicy, TokenSequence
from kvtrie.integrations.sglang._events import PageEvents
from kvtrie.integrations.sglang._namespaces import Namespaces
from kvtrie.integrations.sglang._order import depth_first
from kvtrie.integrations.sglang._reasoning import Reasoning, evicts_first

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from kvtrie._core import ComputedSource, ReusePlan
    from kvtrie.tags import Tagger

_LOG = logging.getLogger("sglang.kvtrie")
_P = ParamSpec("_P")
_R = TypeVar("_R")
_WHOLE_BLOCKS: Final = ReusePolicy(approximate=False, partial_blocks=False)


class Handle:
    """The end of a match: SGLang keeps it with the request, and locks it."""

    __slots__ = ("blocks", "locks", "seq")

    def __init__(self, seq: TokenSequence | None, blocks: NDArray[np.int32]) -> None:
        self.seq = seq
        """Its tokens; None for the root, which has none and is not locked."""
        self.blocks = blocks
        """Of these tokens, as they were when it was found or locked."""
        self.locks: list[ReusePlan | None] = []
        """A pinned plan for each lock, None for one that failed."""


def _failures(labels: dict[str, str]) -> Callable[[str], Any]:
    """SGLang's labels, and the name that is counted."""
    # SGLang says where its processes keep their metrics before this is imported.
    from prometheus_client import Counter as Metric  # noqa: PLC0415

    metric = Metric(
        "sglang:kvtrie_failures",
        "Calls of kvtrie's cache that failed, each answered as a miss, and keys it cannot cache.",
        [*labels, "call"],
    )
    return lambda name: metric.labels(**labels, call=name)


def _guarded(otherwise: Callable[[Any], _R]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Of a method of the cache: count an exception, and answer what ``otherwise`` says of it."""

    def guard(method: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(method)
        def inner(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return method(*args, **kwargs)
            except Exception as error:  # it would end the scheduler
                cache: Any = args[0]
                cache._failed(method.__name__, error)  # noqa: SLF001 - its own
                return otherwise(cache)

        return inner

    return guard


class KvtrieCache(BasePrefixCache):
    """A prefix cache for one scheduler, in place of SGLang's own.

    Args:
        params: SGLang's pools and page size. The eviction policy is LRU.
        num_pages: Pages that the pool has.
        model: What KV is computed by; other models share nothing.
        tagger: The model's chat format. Without it all tokens are kept alike.
    """

    def __init__(
        self, params: CacheInitParams, num_pages: int, model: str, tagger: Tagger | None = None
    ) -> None:
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size = params.page_size
        self.disable = False
        self.counts: Counter[str] = Counter()
        """Failures by method, and keys that cannot be cached as ``"uncacheable"``."""
        self._metric: Any = None
        if params.enable_metrics:
            self.init_metrics_collector()
            self._metric = _failures(self.metrics_collector.labels)
        allocator = self.token_to_kv_pool_allocator
        self.device = torch.device("cpu" if allocator is None else allocator.device)
        self._namespaces = Namespaces(model)
        self._index = RadixIndex(num_pages, self.page_size, moved_runs=False)
        # The slots of each block, next to each other; torch gathers from one dimension sooner.
        shape = (num_pages, self.page_size) if self.page_size > 1 else (num_pages,)
        self._slots = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._free = np.arange(num_pages, dtype=np.int32)
        self._num_free = num_pages
        self._events = PageEvents(params, num_pages)
        self.kv_events = self._events.recorder
        self._reasoning = None if tagger is None else Reasoning(tagger)
        # Locks that failed: what they should hold is known to nobody.
        self._unpinned = 0
        self.root_node = Handle(None, np.zeros(0, np.int32))

    # --- SGLang's interface ------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all; SGLang clears its pools itself."""
        self._put_back(self._index.reset())
        self._put_back(self._index.take_freed())
        self._events.cleared()
        self.root_node = Handle(None, np.zeros(0, np.int32))

    @_guarded(lambda self: self._matched(self.root_node))
    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        seq = self._sequence(params.key)
        if seq is None:
            return self._matched(self.root_node)
        found = self._index.lookup(seq)
        if not found.num_tokens:
            return self._matched(self.root_node)
        seq.truncate(found.num_tokens)
        return self._matched(Handle(seq, found.blocks))

    @_guarded(lambda _: None)
    def touch_prefix(self, key: RadixKey) -> None:
        seq = self._sequence(key)
        if seq is not None:
            self._index.lookup(seq)

    @_guarded(lambda self: InsertResult(prefix_len=0, last_device_node=self.root_node))
    def insert(self, params: InsertParams) -> InsertResult:
        """Take the whole pages of a key whose slots are given."""
        seq = None if params.key is None else self._sequence(params.key)
        if seq is None:
            return InsertResult(prefix_len=0, last_device_node=self.root_node)
        values = params.value
        if values is None:  # SGLang's own then takes the ids for slots; its tests do that
            values = torch.tensor(params.key.raw_token_ids(), dtype=torch.int64)
        # Ids are few when most of the pool is cached: only what is not known takes some.
        found = self._index.lookup(seq)
        known = found.num_tokens
        new = self._insert(seq, values, known, COMPUTED)
        handle = Handle(seq, np.concatenate([found.blocks, new]))
        self._stored(handle, known, params.key)
        return InsertResult(prefix_len=known, total_len=len(seq), last_device_node=handle)

    @_guarded(lambda _: None)
    def checkpoint(self, req: Req, *, up_to: int, **_: object) -> None:
        """Take what the request has computed up to a position, as SGLang's base class says."""
        token_ids = req.full_untruncated_fill_ids[:up_to]
        key = RadixKey(token_ids, req.extra_key, cache_salt=req.cache_salt)
        seq = self._sequence(key)
        protected = req.kv.cache_protected_len
        if seq is None:
            return
        if len(seq) <= protected:
            self._index.lookup(seq)  # no new page; what it has was used now
            return
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : len(seq)]
        # It pins what is known, and what the insert adds: the lock that the request gets.
        plan = self._index.plan(seq, _WHOLE_BLOCKS, keep_last=0)
        try:
            known = plan.num_exact
            if known < protected:
                self._count("lost")
                plan.release()
                return
            new = self._insert(seq, row.to(dtype=torch.int64, copy=True), known, plan)
            blocks = np.concatenate([plan.blocks, new])
        except BaseException:
            plan.release()
            raise
        handle = Handle(seq, blocks)
        handle.locks.append(plan)
        # From here on nothing can fail, or the request would hold pages that are not its own.
        if known > protected:
            # Another request was first with these pages; the row uses its copy from now on.
            allocator = self.token_to_kv_pool_allocator
            allocator.free_segment(row[protected:known], start_pos=protected)
            first, last = protected // self.page_size, known // self.page_size
            slots = self._slots_of(blocks[first:last])
            self.req_to_token_pool.write((req.kv.req_pool_idx, slice(protected, known)), slots)
        req.kv.cache_protected_len = len(seq)
        req.kv.cache_inserted_len = max(req.kv.cache_inserted_len, len(seq))
        before, req.lock, req.last_node = req.lock, TreeLock(handle, DecLockRefParams()), handle
        self.unlock(before)
        self._stored(handle, known, key)
        if self._reasoning is not None and req.finished():
            self._mark_dead(self._reasoning, handle, req)

    @_guarded(lambda _: EvictResult())
    def evict(self, params: EvictParams) -> EvictResult:
        began = time.perf_counter()
        if self._unpinned:
            return EvictResult()
        num_pages = -(-params.num_tokens // self.page_size)
        count = self._take_back(self._index.evict(num_pages)) * self.page_size
        self.update_eviction_metrics(count, began)
        return EvictResult(num_tokens_evicted=count)

    def inc_lock_ref(self, node: Handle) -> IncLockRefResult:
        if node.seq is None:
            return IncLockRefResult(delta=0)
        before = self.evictable_size()
        try:
            plan = self._index.plan(node.seq, _WHOLE_BLOCKS, keep_last=0)
            node.blocks = plan.blocks
            node.locks.append(plan)
        except Exception as error:  # it would end the scheduler
            self._failed("inc_lock_ref", error)
            node.locks.append(None)
            self._unpinned += 1
        return IncLockRefResult(delta=self.evictable_size() - before)

    @_guarded(lambda _: DecLockRefResult(delta=0))
    def dec_lock_ref(
        self,
        node: Handle,
        params: DecLockRefParams | None = None,  # noqa: ARG002 - a lock is a plan of the handle
    ) -> DecLockRefResult:
        if node.seq is None or not node.locks:
            return DecLockRefResult(delta=0)
        before = self.evictable_size()
        plan = node.locks.pop()
        if plan is None:
            self._unpinned -= 1
        else:
            plan.release()
            self._take_back(self._index.take_freed())
        return DecLockRefResult(delta=self.evictable_size() - before)

    def path_device_indices(self, node: Handle) -> torch.Tensor:
        """The slots of a match, one a token; valid until an eviction, or while it is locked."""
        return self._slots_of(node.blocks)

    def dfs_weight_order(self, node_handles: Sequence[Handle]) -> list[int]:
        return depth_first([one.blocks.tolist() for one in node_handles])

    @_guarded(lambda _: 0)
    def evictable_size(self) -> int:
        return 0 if self._unpinned else self._index.num_evictable * self.page_size

    def protected_size(self) -> int:
        return self.total_size() - self.evictable_size()

    full_evictable_size = evictable_size
    full_protected_size = protected_size

    def total_size(self) -> int:
        size: int = self.page_size
        return (len(self._free) - self._num_free) * size

    def pretty_print(self) -> None:
        _LOG.info("kvtrie: %s", self._index.stats())

    # --- the index -----------------------------------------------------------------------------

    def _sequence(self, key: RadixKey) -> TokenSequence | None:
        """The whole pages of a key; None if there are none, or an id is beyond 32 bits."""
        token_ids = key.raw_token_ids()
        count = len(token_ids) // self.page_size * self.page_size
        if not count:
            return None
        space = self._namespaces.of(key.extra_key, key.cache_salt)
        try:
            return TokenSequence(np.asarray(token_ids, dtype=np.int64)[:count], space)
        except ValueError:
            # Pad values of images are hashes of 64 bits.
            self._count("uncacheable")
            return None

    def _matched(self, handle: Handle) -> MatchResult:
        return MatchResult(
            device_prefix_len=len(handle.blocks) * self.page_size,
            last_device_node=handle,
            last_host_node=handle,
            best_match_node=handle,
        )

    def _insert(
        self,
        seq: TokenSequence,
        values: torch.Tensor,
        known: int,
        source: ReusePlan | ComputedSource,
    ) -> NDArray[np.int32]:
        """Add the pages after those that are known; returns their blocks."""
        count = (len(seq) - known) // self.page_size
        # A page that is cached has a block, and no other has: there are as many as pages.
        offered = self._free[self._num_free - count : self._num_free].copy()
        at = torch.from_numpy(offered.astype(np.int64)).to(self.device)
        self._slots.index_copy_(0, at, values[known : len(seq)].view(count, *self._slots.shape[1:]))
        done = self._index.insert(seq, offered, num_computed=len(seq), start=known, source=source)
        self._num_free -= count
        self._take_back(done.freed)
        return done.blocks

    def _slots_of(self, blocks: NDArray[np.int32]) -> torch.Tensor:
        at = torch.from_numpy(blocks).to(self.device)
        return self._slots.index_select(0, at).view(-1)

    def _take_back(self, blocks: NDArray[np.int32]) -> int:
        """Give the slots of blocks that left the index to the pool, and the ids to the cache."""
        if not len(blocks):
            return 0
        self.token_to_kv_pool_allocator.free_segment(self._slots_of(blocks), start_pos=0)
        self._put_back(blocks)
        self._removed(blocks)
        return len(blocks)

    @_guarded(lambda _: None)
    def _stored(self, handle: Handle, known: int, key: RadixKey) -> None:
        self._events.stored(handle.blocks, known // self.page_size, key)

    @_guarded(lambda _: None)
    def _mark_dead(self, reasoning: Reasoning, handle: Handle, req: Req) -> None:
        """Let the index evict first what no later prompt asks for."""
        try:
            wanted = evicts_first(req.sampling_params.custom_params)
        except ValueError as error:
            self._failed("custom_params", error)
            return
        if not wanted or handle.seq is None:
            return
        stopped = isinstance(req.finished_reason, FINISH_MATCHED_TOKEN | FINISH_MATCHED_STR)
        ids = np.asarray(req.full_untruncated_fill_ids)
        first = reasoning.first_dead(ids, complete=stopped)
        if first is not None and first < len(handle.seq):
            self._index.mark_dead(handle.seq, [(first, len(handle.seq))])

    @_guarded(lambda _: None)
    def _removed(self, blocks: NDArray[np.int32]) -> None:
        self._events.removed(blocks)

    def _put_back(self, ids: NDArray[np.int32]) -> None:
        self._free[self._num_free : self._num_free + len(ids)] = ids
        self._num_free += len(ids)

    def _count(self, name: str) -> None:
        self.counts[name] += 1
        if self._metric is not None:
            self._metric(name).inc()

    def _failed(self, method: str, error: Exception) -> None:
        self._count(method)
        if self.counts[method] == 1:
            _LOG.warning(
                "kvtrie: %s failed, and is answered as a miss; only counted from now on",
                method,
                exc_info=error,
            )
