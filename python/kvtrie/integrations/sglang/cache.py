"""SGLang's prefix cache over a kvtrie index: what is cached, who holds it, and what is evicted.

A page of the pool is a block. Ids of blocks are the cache's own, and a table gives the slots of
each. A handle is a sequence and how many of its tokens matched; a lock pins these.
A match is a prefix of whole pages with the same tokens in the same namespace. Without a gate file
it is exact. With one, a request may continue it by approximate pages, in place or copied
(`kvtrie.integrations.sglang._moving`); its pages stay its own until it ends, and are then in the
index as approximate, where no exact match finds them.

An exception in a method would end SGLang's scheduler. What is not expected is caught, counted and
logged once by its kind; the request then finds nothing, or keeps its KV for itself.

Where that cannot be, nothing wrong is read: pages of a lock that failed may leave the index, but
nobody gets their slots until it is given back, and a checkpoint changes the request only when the
index has taken its pages. Pages that left the index, and could not be given back, are given back
with the next.

A match costs one walk of the prompt, a checkpoint one plan and one insert of what is new, and an
eviction the pages that it takes, however many are cached.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR, FINISH_MATCHED_TOKEN
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    CacheRequestHandle,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InitLoadBackParams,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    TreeLock,
)
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvtrie._core import COMPUTED, Pin, RadixIndex, ReusePolicy, TokenSequence
from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations._filled_plan import FilledPlan
from kvtrie.integrations._served import LEAST_RUN
from kvtrie.integrations.sglang._events import ApproximateEvents, PageEvents
from kvtrie.integrations.sglang._guards import guarded, guarded_call, nothing
from kvtrie.integrations.sglang._handles import NO_BLOCKS, Handle
from kvtrie.integrations.sglang._ids import sequence_of, text_of
from kvtrie.integrations.sglang._metrics import Metrics
from kvtrie.integrations.sglang._moving import Built, num_tokens
from kvtrie.integrations.sglang._namespaces import Namespaces
from kvtrie.integrations.sglang._order import depth_first
from kvtrie.integrations.sglang._reasoning import Reasoning
from kvtrie.integrations.sglang._reasons import ComputedReasons
from kvtrie.integrations.sglang._recording import reused_of
from kvtrie.integrations.sglang._settings import Wish
from kvtrie.integrations.sglang._slots import PageSlots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from kvtrie._core import ComputedSource, Imported, Match, ReusePlan, Span
    from kvtrie._core import InsertResult as Inserted
    from kvtrie.integrations._snapshots import SnapshotSource
    from kvtrie.integrations.sglang._moving import Ask, Moving
    from kvtrie.integrations.sglang._recording import RequestLog
    from kvtrie.integrations.sglang._stored import FoundRuns, PoolStore
    from kvtrie.record import Would
    from kvtrie.tags import Stream, Tagger

_LOG = logging.getLogger("sglang.kvtrie")
_WHOLE_BLOCKS: Final = ReusePolicy(approximate=False, partial_blocks=False)
# What is counted, and is no failure of a call.
_BAD_INPUT: Final = {
    "uncacheable": "a prompt is not cached",
    "custom_params": "a request's parameters are ignored",
}
_NEW_TUPLE: Final = tuple.__new__
_NEW_OBJECT: Final = object.__new__
_DEFAULTS: Final = MatchResult(0, None, None, None)[4:]
# A lock is a pin of its handle. SGLang gives back what it gets, and writes nothing into it.
_RECEIPT: Final = DecLockRefParams()


class KvtrieCache(BasePrefixCache):
    """A prefix cache for one scheduler, in place of SGLang's own.

    Args:
        params: SGLang's pools and page size. The eviction policy is LRU.
        num_pages: Pages that the pool has.
        model: What KV is computed by; other models share nothing.
        tagger: The model's chat format. Without it all tokens are kept alike.
        moving: What continues a match after an edit; None: all is exact.
        recording: Where requests are recorded when they have finished; None: nowhere.
        snapshots: What gives snapshots of the KV events; None: nothing does.
        approximate: What publishes the events of approximate pages; None: nothing does.
        stored: The store next to the pool; None: there is none.
        reasoning: What is done with dead reasoning of a request that does not ask.
        seed: What all ranks of tensor parallelism share; None: the index draws one.
        counts_for_all: Whether this rank has the metrics of all, which do the same.
    """

    def __init__(
        self,
        params: CacheInitParams,
        num_pages: int,
        model: str,
        tagger: Tagger | None = None,
        moving: Moving | None = None,
        recording: RequestLog | None = None,
        snapshots: SnapshotSource | None = None,
        approximate: ApproximateEvents | None = None,
        stored: PoolStore | None = None,
        *,
        reasoning: str = "evict_first",
        seed: int | None = None,
        counts_for_all: bool = True,
    ) -> None:
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size = params.page_size
        self.disable = False
        self.counts: Counter[str] = Counter()
        """Failures by method, and bad input: ``"uncacheable"``, ``"custom_params"``, ``"gate"``."""
        self.num_approximate = 0
        """Approximate tokens of requests that have ended, or were put back into the queue."""
        self.would: Counter[str] = Counter()
        """In shadow mode, prompt tokens by what their KV would have been."""
        self.computed: Counter[tuple[str, str]] = Counter()
        """With metrics or a log, prompt tokens that were computed, by reason and kind."""
        self._recording = recording
        self._metrics: Metrics | None = None
        if params.enable_metrics:
            self.init_metrics_collector()
            if counts_for_all:
                self._metrics = Metrics(self.metrics_collector.labels)
        allocator = self.token_to_kv_pool_allocator
        self.device = torch.device("cpu" if allocator is None else allocator.device)
        self._namespaces = Namespaces(model)
        self._moving = moving
        self._is_shadow = moving is not None and moving.is_shadow
        self._seed = seed
        self._num_pages = num_pages
        self._make_empty()
        # How often blocks have left the index: blocks that a lookup found since then are still so.
        self._epoch = 0
        self._snapshots = snapshots
        self._store = stored
        if stored is not None and self._metrics is not None:
            stored.tell = self._metrics.stored
        tells_all = snapshots is not None
        self._events = PageEvents(params, num_pages, approximate, tells_all=tells_all)
        self.kv_events = self._events.recorder
        self._tagger = tagger
        self._reasoning = None if tagger is None else Reasoning(tagger)
        self._kept_reasoning = reasoning
        self._wishes: WeakKeyDictionary[Req, Wish] = WeakKeyDictionary()
        self._would: WeakKeyDictionary[Req, Would | None] = WeakKeyDictionary()
        # What each prompt has reused, and computed by reason, when it was admitted first.
        self._accounts: WeakKeyDictionary[
            Req, tuple[list[tuple[int, int, str]], dict[str, int]]
        ] = WeakKeyDictionary()
        # Blocks of locks that failed, each as often as it is held; and those that left the index.
        self._held: Counter[int] = Counter()
        self._withheld: set[int] = set()
        # Blocks that left the index and could not be given back: with their slots, and without.
        self._unfreed: list[NDArray[np.int32]] = []
        self._unreturned: list[NDArray[np.int32]] = []
        self.root_node = Handle(None, 0)

    def _make_empty(self) -> None:
        """An index without pages, and what depends on it."""
        moving = self._moving
        if moving is None:
            self._index = RadixIndex(
                self._num_pages, self.page_size, moved_runs=False, seed=self._seed
            )
        else:
            self._index = RadixIndex(
                self._num_pages,
                self.page_size,
                min_run=moving.decision.policy.min_run or LEAST_RUN,
                seed=self._seed,
            )
        self._slots = PageSlots(self._num_pages, self.page_size, self.device)
        self._reasons: ComputedReasons | None = None
        if self._metrics is not None or self._recording is not None:
            self._reasons = ComputedReasons(
                self._index,
                None if moving is None else moving.decision,
                goes_on=moving is not None and moving.goes_on,
                is_shadow=self._is_shadow,
            )

    # --- SGLang's interface ------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all; SGLang clears its pools itself."""
        self._epoch += 1
        if self._store is not None:
            self._given_up(self._store)
        try:
            for blocks in (self._index.reset(), self._index.take_freed()):
                self._slots.put_back(blocks)
            for blocks in (*self._unfreed, *self._unreturned):
                self._slots.put_back(blocks)
            self._slots.put_back(np.array(sorted(self._withheld), dtype=np.int32))
        except Exception as error:  # it would end the scheduler
            self._failed("reset", error)
            self._make_empty()
        self._held.clear()
        self._withheld.clear()
        self._unfreed.clear()
        self._unreturned.clear()
        self._cleared()
        self.root_node = Handle(None, 0)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        # Called most often: its guard, `_whole_pages`, `_find` and its answer are written out here.
        try:
            key, req = params.key, params.req
            ids, limit = key.token_ids, key.limit
            count = len(ids)
            if limit is not None and limit < count:
                count = limit
            count -= count % self.page_size
            if not count:
                return _matched(0, self.root_node)
            if key.extra_key is None and key.cache_salt is None:
                space = self._namespaces.shared
            else:
                space = self._namespaces.of(key.extra_key, key.cache_salt)
            try:
                found = self._index.match(ids, space, count)
            except ValueError:  # an id has more than 32 bits
                wide = self._find_wide(key)
                if wide is None:
                    return _matched(0, self.root_node)
                found = wide
            if req is not None and (
                self._moving is not None or self._reasons is not None or self._store is not None
            ):
                return self._match_of(req, found)
            known = found.num_tokens
            node = self.root_node
            if known:
                node = _NEW_OBJECT(Handle)  # without a frame of Python
                node.found, node.epoch = found, self._epoch
            fields = (known, node, node, node) + _DEFAULTS  # noqa: RUF005 - sooner than unpacked
            return _NEW_TUPLE(MatchResult, fields)
        except Exception as error:  # it would end the scheduler
            self._failed("match_prefix", error)
            return _matched(0, self.root_node)

    def _match_of(self, req: Req, found: Match) -> MatchResult:
        """The answer for a request, of which it is asked what continues the match."""
        seq, known, ask, stored = found.sequence, found.num_tokens, None, 0
        arrived = None if self._store is None else self._arrived(self._store, req)
        if self._moving is not None and not seq.items:
            ask = self._asked(self._moving, seq, known, req, arrived)
        asked = ask
        if self._reasons is not None:
            self._look(self._reasons, req, seq, known, ask)
        if ask is not None and (not ask.promised or self._is_shadow):
            ask = None
        if self._store is not None:
            covered = 0 if ask is None else ask.promised
            stored = self._sought(self._store, req, seq, known, covered, asked)
            # What is exact goes first where it reaches as far.
            if stored and stored >= covered:
                ask = None
            else:
                stored = 0
        handle = Handle(found if known else None, self._epoch)
        if ask is not None:
            handle.ask = ask
            if known:  # its plan needs all of the sequence
                handle.seq = TokenSequence(seq[:known], seq.namespace)
        handle.stored = stored
        return _matched(known, handle, stored if ask is None else ask.promised)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Handle]:
        """Copy what continues a match into pages of the request: all that was promised, or none."""
        handle: Handle = params.best_match_node
        count = params.host_hit_length
        req = params.req
        if handle.lock_failed:
            return 0, handle  # making room could take what is locked out of the index
        if handle.stored:
            stored = self._from_store(handle, count, req)
            return (0, handle) if stored is None else (count, stored)
        loaded = self._loaded(handle, count, req)
        if loaded is None or loaded.built is None:
            return 0, handle
        # What SGLang subtracts from the prefix to get what was cached.
        req.already_computed = num_tokens(loaded.built.gaps)
        return count, loaded

    def load_back_is_cache_owned(self) -> bool:
        """The pages belong to the request until it ends."""
        return False

    @guarded_call(nothing)
    def touch_prefix(self, key: RadixKey) -> None:
        self._find(key)

    @guarded_call(lambda self: InsertResult(prefix_len=0, last_device_node=self.root_node))
    def insert(self, params: InsertParams) -> InsertResult:
        """Take the whole pages of a key whose slots are given."""
        # Ids are few when most of the pool is cached: only what is not known takes some.
        found = None if params.key is None else self._find(params.key)
        if found is None:
            return InsertResult(prefix_len=0, last_device_node=self.root_node)
        values = params.value
        if values is None:  # SGLang's own then takes the ids for slots; its tests do that
            values = torch.tensor(params.key.raw_token_ids(), dtype=torch.int64)
        seq, known = found.sequence, found.num_tokens
        length = len(seq)
        new, _ = self._insert(seq, values, known, length, COMPUTED)
        handle = Handle(found, self._epoch)
        handle.add(new, seq)
        if self._events.recorder.enabled:
            self._stored(handle.blocks, known, params.key)
        return InsertResult(prefix_len=known, total_len=length, last_device_node=handle)

    @guarded(nothing)
    def checkpoint(self, req: Req, *, up_to: int, **_: object) -> None:
        """Take what the request has computed up to a position, as SGLang's base class says."""
        token_ids = req.full_untruncated_fill_ids[:up_to]
        key = RadixKey(token_ids, req.extra_key, cache_salt=req.cache_salt)
        seq = self._sequence(key)
        protected = req.kv.cache_protected_len
        if seq is None:
            return
        if self._store is not None:
            self._admitted(self._store, req)
        if len(seq) <= protected:
            self._index.lookup(seq)  # no new page; what it has was used now
            if self._store is not None and req.finished() and req.last_node.built is None:
                blocks = req.last_node.blocks[: len(seq) // self.page_size]
                self._write_turn(self._store, req, seq, blocks, up_to, self._read(req))
            return
        if req.last_node is not None and req.last_node.built is not None:
            if req.finished():
                self._keep_approximate(req, req.last_node.built, seq, key)
            return
        self._keep_exact(req, seq, key, up_to)

    def _keep_exact(self, req: Req, seq: TokenSequence, key: RadixKey, up_to: int) -> None:
        """Take the pages of a request that computed, or found, all that it followed."""
        size, protected = self.page_size, req.kv.cache_protected_len
        session = None if self._moving is None else self._wish(req).session
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : len(seq)]
        # It pins what is known, and what the insert adds: the lock that the request gets.
        plan = self._index.plan(seq, _WHOLE_BLOCKS, keep_last=0)
        try:
            known, first = plan.num_exact, protected
            if known < protected:
                self._count("lost")
                plan.release()
                return
            before = req.lock
            if before is not None and (before.node.lock_failed or before.node.kept):
                first = 0  # pages of the row before that may go with the lock
            cached = plan.blocks
            slots: torch.Tensor | None = None
            if first < known:
                slots = self._slots.of(cached[first // size : known // size])
            new, others = self._insert(seq, row, known, len(seq), plan, session)
            blocks = np.concatenate([cached, new.blocks])
        except BaseException:
            plan.release()
            raise
        handle = Handle.of(seq, blocks, self._epoch)
        handle.locks = (plan,)
        # From here on nothing can fail, or the request would hold pages that are not its own.
        if slots is not None:
            self._use_cached(req, first, known, slots)
        for start, end in others:
            theirs = self._slots_of(blocks[start // size : end // size])
            if theirs is None:
                handle.kept += ((row[start:end].clone(), start),)
            else:
                self._use_cached(req, start, end, theirs)
        req.kv.cache_protected_len = len(seq)
        req.kv.cache_inserted_len = max(req.kv.cache_inserted_len, len(seq))
        req.lock, req.last_node = TreeLock(handle, _RECEIPT), handle
        self.unlock(before)
        if self._events.recorder.enabled:
            self._stored(blocks, known, key, session)
        if req.finished():
            self._settle(req, seq, blocks, blocks, up_to)

    def _use_cached(self, req: Req, start: int, end: int, slots: torch.Tensor) -> None:
        """Let a row read cached slots: another request was first with these pages.

        Those of the request's own are freed.
        """
        index, own = req.kv.req_pool_idx, max(start, req.kv.cache_protected_len)
        if own < end:
            row = self.req_to_token_pool.req_to_token[index, own:end]
            self.token_to_kv_pool_allocator.free_segment(row, start_pos=own)
        self.req_to_token_pool.write((index, slice(start, end)), slots)

    @guarded(nothing)
    def on_release(self, req: Req, *, checkpointed: bool) -> None:  # noqa: ARG002 - SGLang's
        """Count what was approximate, once for each time that a request is admitted."""
        built = None if req.last_node is None else req.last_node.built
        if built is not None:
            self.num_approximate += built.num_approximate
            if self._metrics is not None:
                self._metrics.approximate(built.num_approximate)
        self._account(req, built)
        if req.finished():
            self._ended(req)

    @guarded(nothing)
    def _account(self, req: Req, built: Built | None) -> None:
        """Count why its prompt was computed, the first time; what is computed again is not."""
        if self._reasons is None or req in self._accounts:
            return
        reused = reused_of(req, built)
        # An aborted one may not have computed all of its prompt.
        end = req.kv.kv_committed_len
        computed = self._reasons.ended(req, reused, end, lambda: self._spans(req))
        self.computed.update(computed)
        if self._metrics is not None:
            self._metrics.computed(computed)
        by_reason: Counter[str] = Counter()
        for (reason, _), count in computed.items():
            by_reason[reason] += count
        self._accounts[req] = reused, dict(by_reason)

    @guarded(nothing)
    def _ended(self, req: Req) -> None:
        """Count what would have been moved, and record the request."""
        would = self._would.get(req)
        if would is not None:
            self.would += Counter(exact=would.exact, moved=would.moved, computed=would.computed)
            if self._metrics is not None:
                self._metrics.would(would)
        if self._recording is not None and req in self._accounts:
            session = self._wish(req).session
            self._recording.ended(req, session, *self._accounts[req], would)
            if self._metrics is not None:
                self._metrics.recorded(*self._recording.news())

    def _spans(self, req: Req) -> list[Span]:
        """The kinds of a prompt's tokens."""
        if self._tagger is None:
            return []
        return list(self._tagger.spans(text_of(req.origin_input_ids)))

    def evict(self, params: EvictParams) -> EvictResult:
        """Free tokens; what fails is tried once more, as SGLang ends where it finds no room."""
        began = time.perf_counter()
        size: int = self.page_size
        num_pages = -(-params.num_tokens // size)
        try:
            blocks = self._index.evict(num_pages)
        except Exception as error:  # it would end the scheduler
            self._failed("evict", error)
            blocks = self._evicted_again(num_pages)
        count = self._take_back(blocks)
        if self._unfreed:
            count += self._take_back(NO_BLOCKS)
        if self.metrics_collector is not None:
            self._count_evicted(count * size, began)
        return EvictResult(count * size)

    @guarded(lambda _: NO_BLOCKS)
    def _evicted_again(self, num_pages: int) -> NDArray[np.int32]:
        return self._index.evict(num_pages)

    @guarded(nothing)
    def _count_evicted(self, num_tokens: int, began: float) -> None:
        self.update_eviction_metrics(num_tokens, began)

    @guarded(lambda _: [])
    def take_events(self) -> list[Any]:
        """What SGLang publishes next, as one batch if it is not empty."""
        self._publish_approximate()
        events = self._events.take()
        if self._snapshots is not None:
            self._hand_over(self._snapshots, events)
        return events

    @guarded(nothing)
    def _publish_approximate(self) -> None:
        self._events.publish_approximate()

    def _hand_over(self, snapshots: SnapshotSource, events: list[Any]) -> None:
        """Give what is published to the source of snapshots, which has all of it or ends."""
        try:
            if snapshots.hand_over(events):
                self._count("snapshots")
        except Exception as error:  # the events would not be published
            self._failed("take_events", error)
            snapshots.fail("a batch of events was not handed over")

    def lock(self, node: Handle) -> TreeLock:
        self._lock(node)
        return TreeLock(node, _RECEIPT)

    def unlock(self, lock: TreeLock | None) -> None:
        if lock is not None:
            self._unlock(lock.node)

    def inc_lock_ref(self, node: Handle) -> IncLockRefResult:
        before = self.evictable_size()
        self._lock(node)
        return IncLockRefResult(delta=self.evictable_size() - before)

    def dec_lock_ref(
        self,
        node: Handle,
        params: DecLockRefParams | None = None,  # noqa: ARG002 - a lock is a pin of the handle
    ) -> DecLockRefResult:
        before = self.evictable_size()
        self._unlock(node)
        return DecLockRefResult(delta=self.evictable_size() - before)

    def _lock(self, node: Handle) -> None:
        if node.locks and node.lock_failed:
            self._hold(node)  # some of it may be in the index no more
            return
        try:
            found = node.found
            if found is None or node.new is not None:
                if node.seq is None:
                    return
                found = self._index.lookup(node.seq)
            pin = self._index.pin(found)
            if node.epoch != self._epoch:
                # What was found may have left, and have come back in other blocks.
                node.now(pin.found, self._epoch)
            node.locks += (pin,)
        except Exception as error:  # it would end the scheduler
            self._failed("inc_lock_ref", error)
            self._hold(node)

    def _hold(self, node: Handle) -> None:
        """Lock without the index: slots of these blocks go to nobody until it is given back."""
        if not node.locks and node.epoch != self._epoch:
            # They may be another prompt's by now. SGLang, which locks what it has just matched,
            # then ends with an error, and reads none of them.
            node.forget_blocks()
        node.locks += (node.blocks,)
        self._held.update(node.blocks.tolist())

    def _unlock(self, node: Handle) -> None:
        if not node.locks:
            return
        try:
            lock, node.locks = node.locks[-1], node.locks[:-1]
            if isinstance(lock, Pin):
                if lock.release():
                    self._take_back(self._index.take_freed())
            elif isinstance(lock, np.ndarray):
                self._let_go(lock)
            else:
                lock.release()
                self._take_back(self._index.take_freed())
        except Exception as error:  # it would end the scheduler
            self._failed("dec_lock_ref", error)
        if node.kept and not node.locks:
            kept, node.kept = node.kept, ()
            for slots, start in kept:
                self.token_to_kv_pool_allocator.free_segment(slots, start_pos=start)

    def path_device_indices(self, node: Handle) -> torch.Tensor:
        """The slots of a match, one a token; valid until an eviction, or while it is locked."""
        try:
            found = node.found
            if found is None or node.new is not None:
                slots = self._slots.of(node.blocks)
            else:
                piece = self._slots.pieces.get((found.consecutive_from, found.num_tokens))
                slots = self._slots.of_match(found) if piece is None else piece
        except Exception as error:  # it would end the scheduler
            self._failed("path_device_indices", error)
            # What fails here too ends the scheduler: no other slots would be right.
            slots = self._slots.of(node.blocks)
        return slots if node.own is None else torch.cat([slots, node.own])

    def dfs_weight_order(self, node_handles: Sequence[Handle]) -> list[int]:
        try:
            return depth_first([one.blocks.tolist() for one in node_handles])
        except Exception as error:  # it would end the scheduler
            self._failed("dfs_weight_order", error)
            return list(range(len(node_handles)))

    def evictable_size(self) -> int:
        size: int = self.page_size
        try:
            count = self._index.num_evictable
        except Exception as error:  # it would end the scheduler
            self._failed("evictable_size", error)
            count = self._num_evictable_again()
        return max(0, count - len(self._held)) * size

    # SGLang ends with an error if its sizes do not add up. So what failed is asked once more.
    @guarded(lambda _: 0)
    def _num_evictable_again(self) -> int:
        return self._index.num_evictable

    @guarded(lambda _: 0)
    def _num_free_again(self) -> int:
        return self._slots.num_free

    def protected_size(self) -> int:
        return self.total_size() - self.evictable_size()

    full_evictable_size = evictable_size
    full_protected_size = protected_size

    def total_size(self) -> int:
        size: int = self.page_size
        try:
            num_free = self._slots.num_free
        except Exception as error:  # it would end the scheduler
            self._failed("total_size", error)
            num_free = self._num_free_again()
        return (self._num_pages - num_free) * size

    @guarded(lambda self: torch.zeros(0, dtype=torch.int64, device=self.device))
    def all_values_flatten(self) -> torch.Tensor:
        """All slots of cached pages, which SGLang compares with the free ones if some are lost."""
        return self._slots.used()

    @guarded(nothing)
    def pretty_print(self) -> None:
        _LOG.info("kvtrie: %s", self._index.stats())

    # --- matches -----------------------------------------------------------------------------

    def _sequence(self, key: RadixKey) -> TokenSequence | None:
        """The whole pages of a key; None if there are none, or an id is negative."""
        count = _whole_pages(key, self.page_size)
        if not count:
            return None
        space = self._namespaces.of(key.extra_key, key.cache_salt)
        try:
            return sequence_of(key.token_ids, space, limit=count)
        except ValueError as error:
            self._failed("uncacheable", error)
            return None

    def _find(self, key: RadixKey) -> Match | None:
        """Look up the whole pages of a key; None if it has none, or an id is negative."""
        count = _whole_pages(key, self.page_size)
        if not count:
            return None
        space = self._namespaces.shared
        if key.extra_key is not None or key.cache_salt is not None:
            space = self._namespaces.of(key.extra_key, key.cache_salt)
        try:
            return self._index.match(key.token_ids, space, count)
        except ValueError:  # an id has more than 32 bits
            return self._find_wide(key)

    def _find_wide(self, key: RadixKey) -> Match | None:
        """As `_find`, of a key with ids beyond 32 bits."""
        seq = self._sequence(key)
        return None if seq is None else self._index.lookup(seq)

    # --- after an edit -------------------------------------------------------------------------

    @guarded(lambda self: Wish(self._kept_reasoning))
    def _wish(self, req: Req) -> Wish:
        """What a request asks for; what is not known is counted once for each request."""
        if req not in self._wishes:
            self._wishes[req] = Wish(self._kept_reasoning)
            try:
                asked = req.sampling_params.custom_params
                self._wishes[req] = Wish.read(asked, self._kept_reasoning)
            except SettingsError as error:
                self._failed("custom_params", error)
        return self._wishes[req]

    @guarded(nothing)
    def _asked(
        self, moving: Moving, seq: TokenSequence, known: int, req: Req, arrived: FoundRuns | None
    ) -> Ask | None:
        """How a match of a request is continued; None if nothing was planned."""
        ask = moving.ask(self._index, seq, known, req, self._wish(req), arrived)
        if moving.is_shadow and not req.retracted_stain:
            # The last match before it is admitted first counts.
            self._would[req] = None if ask is None else ask.would
        return ask

    @guarded(nothing)
    def _look(
        self, reasons: ComputedReasons, req: Req, seq: TokenSequence, known: int, ask: Ask | None
    ) -> None:
        """Label what a request that is matched computes."""
        moving = self._moving
        is_exact = moving is None or bool(seq.items) or moving.is_exact(self._wish(req))
        reasons.look(req, seq.namespace, known, ask, is_exact=is_exact)

    @guarded(nothing)
    def _loaded(self, handle: Handle, count: int, req: Req) -> Handle | None:
        """The match with its copies, in slots of its own; None if they cannot be made."""
        ask = handle.ask
        if ask is None or self._moving is None:
            return None
        try:
            return self._copied(self._moving, self._store, handle, ask, count, req)
        finally:
            if self._store is not None:
                self._admitted(self._store, req)

    def _copied(
        self,
        moving: Moving,
        stored: PoolStore | None,
        handle: Handle,
        ask: Ask,
        count: int,
        req: Req,
    ) -> Handle | None:
        if ask.arrived is not None and (stored is None or stored.arrived(req) is not ask.arrived):
            return None  # it was given up in the meantime
        size = self.page_size
        known = len(handle.blocks) * size
        with ask.plan(self._index, pin=True) as plan:
            gaps = moving.gaps(plan, ask, known + count)
            if len(plan.blocks) * size < known or gaps is None:
                return None
            evict_from_tree_cache(self, count)
            allocator = self.token_to_kv_pool_allocator
            own = allocator.alloc(count)
            if own is None:
                return None
            try:
                moving.copy(self._copies(plan, known, own))
                num_stored = 0
                if stored is not None and isinstance(plan, FilledPlan):
                    num_stored = stored.load_plan(req, plan, own, known)
                loaded = self._again(handle)
                loaded.own = own
                loaded.built = Built.of(plan, gaps, known + count, ask.decision.policy)
                is_storage = stored is not None and bool(num_stored) and not stored.is_in_host
            except BaseException:
                allocator.free_segment(own, start_pos=known)
                raise
        # SGLang reports the rest as found in the device's pool.
        req.host_hit_length, req.host_hit_is_storage = num_stored, is_storage
        # Whoever writes the sources next does so on the same stream, after the copies.
        self._take_freed()
        return loaded

    # --- the store -----------------------------------------------------------------------------

    @guarded(nothing)
    def _arrived(self, stored: PoolStore, req: Req) -> FoundRuns | None:
        """What has arrived from the store for a request that may use moved runs."""
        return stored.arrived(req)

    @guarded(lambda _: 0)
    def _sought(
        self,
        stored: PoolStore,
        req: Req,
        seq: TokenSequence,
        known: int,
        covered: int,
        ask: Ask | None,
    ) -> int:
        """Tokens after an exact match that have arrived from the store, which is asked once."""
        stored.seek(req, seq, known, covered, None if ask is None else ask.wanted)
        if ask is not None and self._moving is not None and self._moving.drops_fronts(ask):
            stored.repairs(req)
        return stored.promised(req, seq, known)

    @guarded(lambda _: False)
    def waits(self, req: Req, adder: object, *, is_idle: bool) -> bool:
        """Whether a request waits for the store, and others are admitted before it."""
        return self._store is not None and self._store.waits(req, adder, is_idle=is_idle)

    @guarded(nothing)
    def _admitted(self, stored: PoolStore, req: Req) -> None:
        stored.admitted(req)

    @guarded(nothing)
    def _left(self, stored: PoolStore, blocks: NDArray[np.int32]) -> None:
        stored.left(blocks)

    @guarded(nothing)
    def _given_up(self, stored: PoolStore) -> None:
        stored.give_up()

    @guarded(nothing)
    def computed_prefill(self, num_tokens: int, began: float) -> None:
        """Measure a step that has ended, by the tokens of prompts in it."""
        if self._store is not None:
            self._store.computed(num_tokens, began)

    @guarded(nothing)
    def _from_store(self, handle: Handle, count: int, req: Req) -> Handle | None:
        """The match with what was loaded, in slots of its own; None if it cannot be made."""
        known = len(handle.blocks) * self.page_size
        if self._store is None or known != req.prefix_len or count != handle.stored:
            return None
        allocator = self.token_to_kv_pool_allocator
        own = None
        try:
            evict_from_tree_cache(self, count)
            own = allocator.alloc(count)
            if own is None:
                return None
            self._store.load(req, own, known)
            # How SGLang reports it.
            req.host_hit_is_storage = not self._store.is_in_host
            loaded = self._again(handle)
            loaded.own = own
        except BaseException:
            if own is not None:
                allocator.free_segment(own, start_pos=known)
            raise
        finally:
            self._admitted(self._store, req)
        return loaded

    def _settle(
        self,
        req: Req,
        seq: TokenSequence,
        blocks: NDArray[np.int32],
        exact: NDArray[np.int32],
        up_to: int,
    ) -> None:
        """At its end, write a request to the store, and let go of what no later prompt asks for."""
        stream = self._read(req)
        if self._store is not None:
            self._write_turn(self._store, req, seq, exact, up_to, stream)
        if stream is not None:
            self._mark_dead(stream, seq, blocks, req)

    @guarded(nothing)
    def _write_turn(
        self,
        stored: PoolStore,
        req: Req,
        seq: TokenSequence,
        blocks: NDArray[np.int32],
        up_to: int,
        stream: Stream | None,
    ) -> None:
        """Have what a request leaves up to a position written to the store."""
        if self._reasoning is not None and stream is None:
            return  # what it must not leave is not known
        wish = self._wish(req)
        keeps = wish.reasoning == "keep" or (
            stream is not None and self._reasoning is not None and self._reasoning.keeps(stream)
        )
        start = len(blocks) * self.page_size
        after = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, start:up_to]
        stored.ended(
            req,
            blocks,
            self._slots.of(blocks),
            after,
            seq.namespace,
            stream=stream,
            keeps=keeps,
            session=wish.session,
        )

    @guarded(nothing)
    def _read(self, req: Req) -> Stream | None:
        """Prompt and reply of a request that has ended, in the model's chat format."""
        if self._reasoning is None:
            return None
        stopped = isinstance(req.finished_reason, FINISH_MATCHED_TOKEN | FINISH_MATCHED_STR)
        return self._reasoning.read(text_of(req.full_untruncated_fill_ids), complete=stopped)

    @guarded(nothing)
    def release_aborted_request(self, handle: CacheRequestHandle) -> None:
        if self._store is not None:
            self._store.aborted(handle.rid)

    @guarded(nothing)
    def release_host_resources(self) -> None:
        if self._store is not None:
            self._store.close()

    def _copies(
        self, plan: ReusePlan | FilledPlan, known: int, own: torch.Tensor
    ) -> NDArray[np.void]:
        """The copies of a plan from a page on into slots, in SGLang's numbers."""
        size = self.page_size
        dest = own[::size].numpy(force=True)
        in_place = plan.blocks[known // size :][: len(dest)]
        # Ids that no page has now, for the plan: SGLang has just allocated as many pages.
        spare = self._slots.spare(len(dest) - len(in_place))
        start, end = len(plan.blocks) * size, known + len(own)
        moves = plan.moves(np.concatenate([plan.blocks, spare]), min(start, end), end)
        copies = np.zeros(len(in_place), moves.dtype)
        copies["source_slot"], copies["num_tokens"] = in_place.astype(np.int64) * size, size
        copies["dest_slot"] = dest[: len(in_place)]
        # A copy is inside one page, whose slots are next to each other.
        moves["dest_slot"] = _begins(moves["dest_slot"], size, spare, dest[len(in_place) :])
        both = np.concatenate([copies, moves])
        ids = np.unique(both["source_slot"] // size)
        both["source_slot"] = _begins(both["source_slot"], size, ids, self._slots.firsts(ids))
        return both

    def _keep_approximate(self, req: Req, built: Built, seq: TokenSequence, key: RadixKey) -> None:
        """At its end, take the pages of a request that did not compute all that it followed."""
        known = start = req.kv.cache_protected_len
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : len(seq)]
        values = row.to(dtype=torch.int64, copy=True)
        session = self._wish(req).session
        blocks = [req.last_node.blocks]
        for num_pages, label in built.labels(start, len(seq), self.page_size):
            end = start + num_pages * self.page_size
            new, others = self._insert(seq, values, start, end, label, session)
            blocks.append(new.blocks)
            # From here on the request has these pages no more.
            req.kv.cache_protected_len = start = end
            for first, last in others:
                self.token_to_kv_pool_allocator.free_segment(values[first:last], start_pos=first)
        all_blocks = np.concatenate(blocks)
        # Copies and gaps before the first approximate token are exact.
        exact = all_blocks[: built.exact_until // self.page_size]
        if len(exact) * self.page_size > known:
            self._stored(exact, known, key, session)
        self._stored_approximate(all_blocks, len(exact), built, key)
        # What is approximate is not stored.
        self._settle(req, seq, all_blocks, exact, len(exact) * self.page_size)

    def _again(self, handle: Handle) -> Handle:
        """Another handle of the same blocks."""
        again = Handle(None, self._epoch)
        if handle.seq is not None:
            again = Handle.of(handle.seq, handle.blocks, self._epoch)
        return again

    # --- the index -----------------------------------------------------------------------------

    def _insert(
        self,
        seq: TokenSequence,
        values: torch.Tensor,
        known: int,
        length: int,
        source: ReusePlan | ComputedSource | Imported,
        session: str | None = None,
    ) -> tuple[Inserted, list[tuple[int, int]]]:
        """Add the pages after those that are known, up to a length.

        Returns:
            What the index says of them, and ranges of tokens whose pages were cached already; the
            slots given for these are still the caller's.
        """
        taken = self._slots.take(values, known, length)
        try:
            done = self._index.insert(
                seq, taken, num_computed=length, start=known, source=source, session=session
            )
        except BaseException:
            self._put_back(taken[::-1])
            raise
        # The index has them: from here on nothing may fail.
        if self._moving is not None:  # else nothing approximate was there to be replaced
            self._take_back(done.freed)
        if not done.num_refused:
            return done, []
        blocks = done.blocks
        mine = blocks == taken[: len(blocks)]
        # The ids of pages that were cached already are free again, their slots are not.
        self._put_back(np.setdiff1d(taken, blocks))
        size = self.page_size
        others = [
            (known + page * size, known + (page + 1) * size) for page in np.flatnonzero(~mine)
        ]
        return done, others

    @guarded(nothing)
    def _take_freed(self) -> None:
        """Take what the index has freed; what it does not give now, it gives the next time."""
        self._take_back(self._index.take_freed())

    def _take_back(self, blocks: NDArray[np.int32]) -> int:
        """Take blocks that left the index; returns how many pages the pool got. It never fails."""
        if self._unreturned:
            self._put_back(NO_BLOCKS)
        if not len(blocks):
            return self._free_pages(blocks) if self._unfreed else 0
        self._epoch += 1
        if self._events.recorder.enabled:
            self._removed(blocks)
        if self._held:
            is_held = np.array([one in self._held for one in blocks.tolist()])
            self._withheld.update(blocks[is_held].tolist())
            blocks = blocks[~is_held]
        return self._free_pages(blocks)

    def _free_pages(self, blocks: NDArray[np.int32]) -> int:
        """Give the slots of blocks to the pool, and the ids to the cache; no turn reads them.

        What fails is tried again with the next ones.
        """
        if self._unfreed:
            blocks = np.concatenate([*self._unfreed, blocks])
            self._unfreed.clear()
        if not len(blocks):
            return 0
        try:
            if self._store is not None:
                self._left(self._store, blocks)
            self._slots.free(blocks, self.token_to_kv_pool_allocator)
        except Exception as error:  # they would be lost
            self._failed("_free_pages", error)
            self._unfreed.append(blocks)
            return 0
        return len(blocks)

    def _put_back(self, blocks: NDArray[np.int32]) -> None:
        """Give ids back whose slots are not the cache's; what fails is tried again with others."""
        try:
            while self._unreturned:
                self._slots.put_back(self._unreturned[-1])
                self._unreturned.pop()
            self._slots.put_back(blocks)
        except Exception as error:  # they would be lost
            self._failed("_put_back", error)
            self._unreturned.append(blocks)

    @guarded(nothing)
    def _slots_of(self, blocks: NDArray[np.int32]) -> torch.Tensor | None:
        return self._slots.of(blocks)

    def _let_go(self, blocks: NDArray[np.int32]) -> None:
        """Give back a lock that failed, and the pages that left the index in the meantime."""
        self._held -= Counter(blocks.tolist())
        back = [one for one in blocks.tolist() if one in self._withheld and one not in self._held]
        self._withheld.difference_update(back)
        self._free_pages(np.array(back, dtype=np.int32))

    @guarded(nothing)
    def _stored(
        self,
        blocks: NDArray[np.int32],
        known: int,
        key: RadixKey,
        session: str | None = None,
    ) -> None:
        """Publish the exact pages of a key after those that are known."""
        self._events.stored(blocks, known // self.page_size, key, session)

    @guarded(nothing)
    def _stored_approximate(
        self, blocks: NDArray[np.int32], num_exact: int, built: Built, key: RadixKey
    ) -> None:
        """Publish the pages of a key after those that are exact."""
        size = self.page_size
        hops = built.hops(num_exact * size, len(blocks) * size, size)
        self._events.stored_approximate(blocks, num_exact, hops, key)

    @guarded(nothing)
    def _mark_dead(
        self, stream: Stream, seq: TokenSequence, blocks: NDArray[np.int32], req: Req
    ) -> None:
        """Let the index evict first, or drop, what no later prompt asks for."""
        wish = self._wish(req).reasoning
        if wish == "keep" or self._reasoning is None:
            return
        dead = self._reasoning.dead(stream)
        if dead and (self._moving is None or self._moving.is_shadow):
            # The next prompt has what follows after other tokens, and nothing is moved.
            dead = [(dead[0][0], len(seq))]
        ranges = [(start, min(end, len(seq))) for start, end in dead if start < len(seq)]
        if ranges and wish == "evict_first":
            self._index.mark_dead(seq, ranges)
        size = self.page_size
        for start, end in ranges if wish == "drop" else ():
            # The request holds its pages until its lock is given back.
            self._epoch += 1
            self._take_back(self._index.discard(blocks[-(-start // size) : end // size]))

    def _removed(self, blocks: NDArray[np.int32]) -> None:
        """Publish that pages left; if that fails, that all did: no subscriber counts more.

        What is still cached is published again when a request continues it.
        """
        try:
            self._events.removed(blocks)
        except Exception as error:  # it would end the scheduler
            self._failed("_removed", error)
            self._cleared()

    @guarded(nothing)
    def _cleared(self) -> None:
        self._events.cleared()

    def _count(self, name: str) -> None:
        """Count a failure, or bad input, by its name."""
        self.counts[name] += 1
        if self._metrics is None:
            return
        try:
            self._metrics.failed(name)
        except Exception as error:  # as of a full disk, where SGLang's processes keep their metrics
            self.counts["metrics"] += 1
            if self.counts["metrics"] == 1:
                _LOG.warning("kvtrie: failures are not in the metrics", exc_info=error)

    def _failed(self, method: str, error: Exception) -> None:
        self._count(method)
        if self.counts[method] == 1:
            why = _BAD_INPUT.get(method)
            if why is not None:
                _LOG.warning("kvtrie: %s: %s; only counted from now on", why, error)
                return
            _LOG.warning(
                "kvtrie: %s failed, and is answered as a miss; only counted from now on",
                method,
                exc_info=error,
            )


def _whole_pages(key: RadixKey, page_size: int) -> int:
    """Tokens of a key in whole pages."""
    count, limit = len(key.token_ids), key.limit
    if limit is not None and limit < count:
        count = limit
    return count - count % page_size


def _matched(known: int, handle: Handle, promised: int = 0) -> MatchResult:
    """The answer to a match."""
    return MatchResult(known, handle, handle, handle, promised)


def _begins(
    slots: NDArray[np.int64], size: int, ids: NDArray[Any], pages: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Slots of the index as slots of SGLang's, by the first slot of each page."""
    order = np.argsort(ids)
    at = order[np.searchsorted(ids, slots // size, sorter=order)]
    found: NDArray[np.int64] = pages[at] + slots % size
    return found
