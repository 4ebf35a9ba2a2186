"""The scheduler's half in exact mode: nothing is moved, so nothing needs a gate or a scheduler.

Three things differ from vLLM alone. What a prompt shares with cached KV beyond vLLM's last whole
block is copied. Reasoning that the chat template drops, and what follows it in its turn, is evicted
first. And blocks that are needed again are evicted later (`_retention`). Every request computes
what it would have computed, or copies KV of the same tokens at the same positions.

Models with sliding windows, state spaces or linear attention next to full attention get the last
two, on their groups of full attention: a copy would leave the other groups without KV.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeVar

from kvtrie._core import EXACT_ONLY, SHARED, Namespace, TokenSequence
from kvtrie.integrations.vllm import _ranges
from kvtrie.integrations.vllm._dead import DeadReasoning
from kvtrie.integrations.vllm._failures import Failures, first_of
from kvtrie.integrations.vllm._metadata import Load, StepMetadata
from kvtrie.integrations.vllm._offers import Offers
from kvtrie.integrations.vllm._requests import LiveRequest, Pending, adapter_of
from kvtrie.integrations.vllm._retention import Retention
from kvtrie.integrations.vllm._runners import send_whole
from kvtrie.integrations.vllm._settings import is_last, request_policy, request_session
from kvtrie.integrations.vllm._sources import Sources, used_by
from kvtrie.integrations.vllm._support import is_whole
from kvtrie.integrations.vllm._tags import Reading, tagger_of
from kvtrie.integrations.vllm._vllm import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvtrie.integrations.vllm._settings import Settings
    from kvtrie.integrations.vllm._stats import Counts

_LOG = logging.getLogger("vllm.kvtrie")
_Result = TypeVar("_Result")

# Failed admissions with pinned sources, after which a request gets no copies.
_MAX_REFUSALS: Final = 2
# A server may see any number of salts.
_MAX_NAMESPACES: Final = 1024


class ExactPlanner:
    """Plans copies of exact KV, and orders vLLM's free queue."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        manager: KVCacheManager,
        settings: Settings,
        counts: Counts,
    ) -> None:
        self._vllm_config = vllm_config
        self._manager = manager
        self._pool = manager.block_pool
        groups = kv_cache_config.kv_cache_groups
        whole = [at for at, one in enumerate(groups) if is_whole(one.kv_cache_spec)]
        self._first = whole[0]
        self._block_size = groups[self._first].kv_cache_spec.block_size
        # Groups whose blocks hold the same tokens as those of the first.
        self._same = [
            at for at in whole[1:] if groups[at].kv_cache_spec.block_size == self._block_size
        ]
        self.copies = len(groups) == 1
        self._settings = settings
        self._counts = counts
        self._space_of = lru_cache(maxsize=_MAX_NAMESPACES)(self._new_namespace)
        self._requests: dict[str, Request] = {}
        self._live: dict[str, LiveRequest] = {}
        # Requests with a plan in the current step.
        self._pending: dict[str, Request] = {}
        self._loads: list[Load] = []
        # Requests that continue at another position than their workers have.
        self._moved: dict[str, Request] = {}
        self._counts_itself = vllm_config.use_v2_model_runner
        self._has_steps_in_flight = vllm_config.scheduler_config.async_scheduling
        self._tagger = tagger_of(settings, vllm_config)
        self.sources = Sources(self._pool, self._block_size, EXACT_ONLY, seed=settings.seed)
        self._offers = Offers(
            manager,
            self.sources,
            self._block_size,
            counts,
            self._continues_alone,
            group=self._first,
        )
        self._failures = Failures(manager, self._block_size)
        self._dead = DeadReasoning(
            self._pool, self.sources, self._block_size, counts, and_after=True
        )
        scheduler = vllm_config.scheduler_config
        per_step = scheduler.max_num_batched_tokens // self._block_size + scheduler.max_num_seqs
        self._retention = Retention(self._pool, per_step * len(groups), counts)
        self._per_token = len(groups) / self._block_size
        form = "unknown" if self._tagger is None else self._tagger.format.name
        parts = "" if self.copies else f"; no copies: {len(groups)} groups of KV blocks"
        _LOG.info("kvtrie: exact mode; chat format: %s%s", form, parts)

    # --- arrival -----------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """Register a request before vLLM looks it up."""
        self._dead.settle()
        self._requests[request.request_id] = request
        # vLLM truncates and extends a resumable request's tokens without notice.
        if (
            request.mm_features
            or request.prompt_token_ids is None
            or request.prompt_is_token_ids
            or request.resumable
        ):
            self._counts.add("requests_unsupported")
            return
        request_policy(request.kv_transfer_params, EXACT_ONLY, "exact")
        session = request_session(request.kv_transfer_params) or request.session_id
        is_last(request)
        space = self._space_of(request.cache_salt, adapter_of(request))
        seq = TokenSequence(request.prompt_token_ids, space)
        reading = None if self._tagger is None else Reading(self._tagger)
        self._live[request.request_id] = LiveRequest(
            seq, EXACT_ONLY, reading=reading, session=session
        )

    def _new_namespace(self, salt: str | None, adapter: str | None) -> Namespace:
        return Namespace(
            model=self._vllm_config.model_config.model,
            kv_dtype=str(self._vllm_config.cache_config.cache_dtype),
            adapter=adapter,
            salt=salt or SHARED,
        )

    # --- admission ---------------------------------------------------------------------------

    def match(self, request: Request, num_local: int) -> int:
        """The number of tokens after vLLM's own hit (whole blocks) that are copied.

        The sources are pinned. May be called again for the same request.
        """
        live = self._live.get(request.request_id)
        if live is None:
            return 0
        live.begins_with(num_local)
        if not self.copies or request.skip_reading_prefix_cache:
            return 0
        self._drop_pending(request.request_id, live)
        if live.num_refused >= _MAX_REFUSALS:
            return 0
        live.follow(request)
        plan = self.sources.plan(live.seq, EXACT_ONLY)
        if plan is None:
            self._counts.add("plans_stale")
            return 0
        promised, _ = _ranges.usable(plan, num_local, resumes=False, may_begin=None)
        if promised[0] == promised[1]:
            plan.release()
            return 0
        pinned = self.sources.blocks(used_by(plan))
        self._pool.touch(pinned)
        live.pending = Pending(plan, pinned, promised, [])
        self._pending[request.request_id] = request
        return promised[1] - promised[0]

    def allocated(self, request: Request, num_external: int) -> None:
        """Handle vLLM's allocation; ``num_external`` is what `match` promised, or 0 if unused."""
        self._failures.admitted(request.request_id)
        live = self._live.get(request.request_id)
        if live is None:
            return
        self._offers.admitted(request, live)
        if live.num_refused >= _MAX_REFUSALS and not live.is_without_room:
            live.is_without_room = True
            self._counts.add("requests_without_room")
        pending = live.pending
        if pending is not None:
            pending.allocated = True
            if num_external:
                self._load(request, live, pending, num_external)
        if request.num_preemptions and self.copies:
            self._guarded(live.account.tell, request)

    def _load(self, request: Request, live: LiveRequest, pending: Pending, count: int) -> None:
        """Copy tokens on which vLLM relies from now on; what cannot be copied has failed."""
        start, most = pending.promised
        end, size = start + count, self._block_size
        ids = self._manager.get_block_ids(request.request_id)[0]
        blocks = tuple(ids[start // size : -(-end // size)])
        try:
            if end > most:
                msg = f"vLLM expects tokens [{start}, {end}); [{start}, {most}) were promised"
                raise RuntimeError(msg)  # noqa: TRY301 - logged and counted like other errors
            moves = _ranges.moves(pending.plan, ids, size, start, end)
        except Exception:
            self._note_surprise("the copies of request %s failed", request.request_id)
            self._loads.append(Load(None, blocks))
            return
        self._loads.append(Load(moves, blocks))
        self._counts.add("tokens_exact", count)
        live.account.copy(start, end, is_approximate=False)

    # --- the step ------------------------------------------------------------------------------

    def step(self, output: SchedulerOutput) -> StepMetadata:
        # Copies that vLLM relies on must go out with this step, whatever else fails.
        self._guarded(self._dead.settle)
        for request_id, request in list(self._pending.items()):
            live = self._live.get(request_id)
            if live is not None and live.pending is not None and not live.pending.allocated:
                self._note_refusal(request, live)
            elif live is not None:
                self._drop_pending(request_id, live)
            self._pending.pop(request_id, None)
        self._tell_workers(output)
        if not self.copies:
            self._follow_hits(output)
        self._offers.step(output, self._live)
        loads, self._loads = self._loads, []
        if self.copies:
            self._failures.scheduled(output, loads)
        self._guarded(self._order, output)
        return StepMetadata(loads)

    def _order(self, output: SchedulerOutput) -> None:
        hits = sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        tokens = output.total_num_scheduled_tokens + hits
        self._retention.took(tokens * self._per_token + len(output.scheduled_new_reqs))
        self._retention.look()

    def _follow_hits(self, output: SchedulerOutput) -> None:
        """Count hits that end inside a block, which vLLM tells no connector of."""
        for new in output.scheduled_new_reqs:
            live = self._live.get(new.req_id)
            if live is not None:
                live.begins_with(new.num_computed_tokens)

    def _tell_workers(self, output: SchedulerOutput) -> None:
        """Send requests that continue at another position in full, once they continue."""
        if not self._moved:
            return
        for new in output.scheduled_new_reqs:
            self._moved.pop(new.req_id, None)
        for request_id in output.scheduled_cached_reqs.resumed_req_ids:
            self._moved.pop(request_id, None)
        going_on = self._moved.keys() & set(output.scheduled_cached_reqs.req_ids)
        sent = {one: request for one, request in self._moved.items() if one in going_on}
        if sent:
            send_whole(
                output,
                sent,
                self._manager,
                counts_itself=self._counts_itself,
                uses_mrope=self._vllm_config.model_config.uses_mrope,
            )
            for one in sent:
                del self._moved[one]

    def failed(self, block_ids: Collection[int]) -> None:
        """Compute everything that was to be copied into failed blocks, and all tokens after it.

        vLLM has reset the requests that it knows to read these blocks, and dropped this step's
        output for them. But it keeps the output of steps in flight, counts the tokens that these
        were to sample, lets other requests hit the blocks, and does not notify model runner V2.
        Only what these blocks have touched is forgotten.
        """
        tables = {
            request_id: self._manager.get_block_ids(request_id)[0]
            for request_id, request in self._requests.items()
            if request.status == RequestStatus.RUNNING
        }
        touched = self._failures.touched(block_ids, tables.values())
        for request_id, table in tables.items():
            first = first_of(table, touched)
            if first is not None:
                self._set_back(self._requests[request_id], first * self._block_size)
        for request_id in list(self._pending):
            live = self._live.get(request_id)
            if live is not None and live.pending is not None and live.pending.reads(touched):
                self._drop_pending(request_id, live)
        self.sources.forget(touched)
        cached = {block.block_id for block in self.sources.blocks(touched) if block.block_hash}
        self._manager.evict_blocks(cached)

    def _set_back(self, request: Request, position: int) -> None:
        """Compute a request again from a position on."""
        request_id = request.request_id
        position = min(request.num_computed_tokens, position)
        request.num_computed_tokens = position
        request.num_output_placeholders = 0
        request.spec_token_ids = []
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.drop_stale_output = True
        if self._counts_itself or self._has_steps_in_flight:
            self._moved[request_id] = request
        live = self._live.get(request_id)
        if live is not None:
            self._drop_pending(request_id, live)
            live.account.fail(position)
            self._guarded(live.account.tell, request)

    def step_is_done(self) -> None:
        """Take note that a step's output is handled, with its failures."""
        self._failures.done()

    def sort_events(self) -> None:
        """Do nothing: vLLM's events are all of exact blocks."""

    def reset(self) -> None:
        for request_id in list(self._pending):
            live = self._live.get(request_id)
            if live is not None:
                self._drop_pending(request_id, live)
        self.sources.reset()

    def shutdown(self) -> None:
        """Do nothing: there is no publisher."""

    def _note_refusal(self, request: Request, live: LiveRequest) -> None:
        before = self._pool.get_num_free_blocks()
        self._drop_pending(request.request_id, live)
        after = self._pool.get_num_free_blocks()
        needed = -(-request.num_tokens // self._block_size)
        if before < needed <= after or before == live.last_free:
            live.num_refused += 1
        live.last_free = before

    def _drop_pending(self, request_id: str, live: LiveRequest) -> None:
        pending, live.pending = live.pending, None
        self._pending.pop(request_id, None)
        if pending is not None:
            pending.plan.release()
            self._pool.free_blocks(pending.pinned)

    def _guarded(self, call: Callable[..., _Result], *args: object) -> _Result | None:
        """Call; count an error and return None if it raises."""
        try:
            return call(*args)
        except Exception:
            self._note_surprise("%s failed", getattr(call, "__name__", call))
            return None

    def _continues_alone(self, request_id: str) -> None:
        self._note_surprise("request %s continues without kvtrie", request_id)
        self.abandon(request_id)

    def _note_surprise(self, what: str, *given: object) -> None:
        _LOG.exception(f"kvtrie: {what}", *given)
        self._counts.add("errors")

    # --- the end -------------------------------------------------------------------------------

    def finish(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """Index a request's blocks and say how long to keep them, before vLLM frees them."""
        self._requests.pop(request.request_id, None)
        self._moved.pop(request.request_id, None)
        live = self._live.pop(request.request_id, None)
        self._offers.forget(request.request_id)
        if live is None:
            return
        self._drop_pending(request.request_id, live)
        block_ids = tables[self._first]
        self._offers.offer(request, live, block_ids, has_ended=True)
        same = [tables[at] for at in self._same]
        num_shared = self._num_shared(live)
        loops = self._calls(request, live)
        # vLLM keeps no partial block.
        whole = len(live.seq) // self._block_size
        self._retention.keep(block_ids[:whole], num_shared, loops=loops, session=live.session)
        for table in same:
            self._retention.keep(table[:whole], num_shared, loops=loops)
        dead: list[int] = []
        if is_last(request):
            ranges = ((num_shared * self._block_size, len(live.seq)),)
            dead = self._dead.drop(live.seq, ranges, block_ids, same)
        elif live.reading is not None and self._settings.dead_thinking:
            dead = self._dead.close(live.seq, live.reading, block_ids, same)
        self._retention.forget(dead)

    def _num_shared(self, live: LiveRequest) -> int:
        """The whole blocks before the first user's message that were hit: others begin so too."""
        end: int = 0
        for section in () if live.reading is None else live.reading.stream.sections:
            if section.kind != "system":
                break
            end = section.span.end
        shared: int = min(end, live.num_local) // self._block_size
        return shared

    def _calls(self, request: Request, live: LiveRequest) -> bool:
        """Whether the model has called a tool, so that its conversation goes on at once."""
        if live.reading is None or request.status != RequestStatus.FINISHED_STOPPED:
            return False
        turns = live.reading.stream.turns
        return bool(turns) and not turns[-1].is_finished

    def abandon(self, request_id: str) -> None:
        """Forget the request; vLLM continues with it alone."""
        live = self._live.pop(request_id, None)
        self._offers.forget(request_id)
        if live is not None:
            self._drop_pending(request_id, live)
