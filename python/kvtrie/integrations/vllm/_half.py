"""What the scheduler's half does in every mode: who its requests are, copies that fail, the end."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeVar

from kvtrie._core import SHARED, Namespace
from kvtrie.integrations._filled_plan import judges
from kvtrie.integrations.vllm._carried import Carrier
from kvtrie.integrations.vllm._dead import DeadReasoning
from kvtrie.integrations.vllm._failures import Failures, first_of
from kvtrie.integrations.vllm._held import Held
from kvtrie.integrations.vllm._loads import Loads
from kvtrie.integrations.vllm._offers import Offers
from kvtrie.integrations.vllm._reasons import Reasons
from kvtrie.integrations.vllm._recording import Recording
from kvtrie.integrations.vllm._runners import MovedRequests
from kvtrie.integrations.vllm._sources import Sources
from kvtrie.integrations.vllm._stored import StoreRequests
from kvtrie.integrations.vllm._tags import tagger_of
from kvtrie.integrations.vllm._vllm import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvtrie._core import ReusePlan
    from kvtrie.gates import Decision
    from kvtrie.integrations._filled_plan import FilledPlan
    from kvtrie.integrations.vllm._metadata import Load, StoreReport, StoreStep
    from kvtrie.integrations.vllm._requests import LiveRequest
    from kvtrie.integrations.vllm._settings import Settings
    from kvtrie.integrations.vllm._stats import Counts

_LOG = logging.getLogger("vllm.kvtrie")
_Result = TypeVar("_Result")

# Failed admissions with pinned sources, after which a request gets no copies.
_MAX_REFUSALS: Final = 2
# A server may see any number of salts.
_MAX_NAMESPACES: Final = 1024


class Half:
    """Keeps the requests that vLLM has, with their plans, and what they leave.

    Args:
        vllm_config: vLLM's configuration.
        manager: vLLM's cache manager.
        block_size: Tokens of a block.
        settings: The connector's settings.
        decision: What requests may reuse.
        counts: Where everything is counted.
        group: The group of KV blocks that is indexed.
        is_only_group: Whether there is no other, of which something may be copied. Else no reason
            is given.
        and_after: Whether what follows dead reasoning is dead.
        windows: The window of each group of which copies take blocks along; None: full attention.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        manager: KVCacheManager,
        block_size: int,
        settings: Settings,
        decision: Decision,
        counts: Counts,
        *,
        group: int = 0,
        is_only_group: bool = True,
        and_after: bool = False,
        windows: Mapping[int, int | None] | None = None,
    ) -> None:
        self._vllm_config = vllm_config
        self._manager = manager
        self._pool = manager.block_pool
        self._block_size = block_size
        self._settings = settings
        self._counts = counts
        self._space_of = lru_cache(maxsize=_MAX_NAMESPACES)(self._new_namespace)
        # Includes requests without kvtrie: they may read what it copied.
        self._requests: dict[str, Request] = {}
        self._live: dict[str, LiveRequest] = {}
        # Requests with work in the current step, so that a decode step skips the others.
        self._pending: dict[str, Request] = {}
        self._tagger = tagger_of(settings, vllm_config)
        self.sources = Sources(self._pool, block_size, decision.policy, seed=settings.seed)
        self._held = Held(self._pool)
        self._dead = DeadReasoning(
            self._pool, self.sources, block_size, counts, and_after=and_after
        )
        self._reasons: Reasons | None = None
        if is_only_group:
            self._reasons = Reasons(self.sources, decision, block_size, counts, self._dead.was_dead)
        self._carrier: Carrier | None = None
        if windows:
            self._carrier = Carrier(manager, self.sources, block_size, windows)
        self._offers = Offers(
            manager,
            self.sources,
            block_size,
            counts,
            self._continues_alone,
            self._reasons,
            group=group,
            forbids=bool(settings.wanted().forbid_kinds),
        )
        self._failures = Failures(manager, block_size, follows=is_only_group)
        self._loads = Loads(
            manager, block_size, counts, self._failures, self._note_surprise, group=group
        )
        self._moved = MovedRequests(vllm_config, manager)
        stored = settings.stored()
        self.stored: StoreRequests | None = None
        if stored is not None:
            self.stored = StoreRequests(stored, block_size, counts, judges=judges(decision))
        options = settings.recorded()
        self._recording: Recording | None = None
        if options is not None:
            self._recording = Recording(options, vllm_config, block_size, counts)

    # --- requests ------------------------------------------------------------------------------

    def _take(self, request: Request) -> bool:
        """Register a request before vLLM looks it up; whether it is of token ids alone."""
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
            _LOG.debug("kvtrie: request %s: not only token ids", request.request_id)
            return False
        return True

    def _new_namespace(self, salt: str | None, adapter: str | None) -> Namespace:
        return Namespace(
            model=self._vllm_config.model_config.model,
            kv_dtype=str(self._vllm_config.cache_config.cache_dtype),
            adapter=adapter,
            salt=salt or SHARED,
        )

    def _looked_up(self, request: Request, num_local: int) -> LiveRequest | None:
        """The request, with vLLM's own hit noted; None if nothing may be copied for it."""
        live = self._live.get(request.request_id)
        if live is None:
            return None
        live.begins_with(num_local)
        if request.skip_reading_prefix_cache:
            return None
        if live.pending is not None:
            self._drop_pending(request.request_id, live)
        if live.num_refused >= _MAX_REFUSALS:
            return None
        live.follow(request)
        return live

    def _admitted(self, request: Request) -> LiveRequest | None:
        """The request that vLLM has allocated blocks for."""
        self._failures.admitted(request.request_id)
        live = self._live.get(request.request_id)
        if live is None:
            return None
        self._offers.admitted(request, live)
        if live.num_refused >= _MAX_REFUSALS and not live.is_without_room:
            # vLLM may ask any number of times before, and again after a preemption.
            live.is_without_room = True
            self._counts.add("requests_without_room")
        return live

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
            self._held.release(pending.pinned, are_read=pending.is_read)

    def preempted(self, request_id: str) -> None:
        """Release the sources: vLLM may need these blocks."""
        live = self._live.get(request_id)
        if live is not None:
            self._drop_pending(request_id, live)

    # --- copies that fail ----------------------------------------------------------------------

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
        self._moved.back(request)
        live = self._live.get(request_id)
        if live is not None:
            self._drop_pending(request_id, live)
            live.account.fail(position)
            self.guarded(live.account.tell, request)

    # --- the store -----------------------------------------------------------------------------

    def reported(self, report: StoreReport) -> None:
        """Take what the worker's half has loaded from the store and written to it."""
        if self.stored is not None:
            self.guarded(self.stored.arrived, report, self._live)

    def _waits(self, request: Request) -> bool:
        """Whether a request waits for the store, and is to be asked about again."""
        return self.stored is not None and self.stored.waits(request)

    def _seeks(
        self,
        request: Request,
        live: LiveRequest,
        plan: ReusePlan | FilledPlan,
        num_local: int,
        *,
        resumes: bool,
    ) -> bool:
        """Look up in the store what a plan computes; whether the request waits for it now."""
        return self.stored is not None and self.stored.seeks(
            request, live, plan, num_local, resumes=resumes
        )

    def _store_step(self, output: SchedulerOutput, loads: Sequence[Load]) -> StoreStep | None:
        if self.stored is None:
            return None
        return self.stored.step(output, loads, self._requests, self._live)

    def step_is_done(self) -> None:
        """Take note that a step's output is handled, with its failures."""
        if self.stored is not None:
            self.stored.step_is_done()
        self._held.end_step()
        self._failures.done()
        if self._recording is not None:
            self.guarded(self._recording.look, self._offers.prefilling)

    # --- errors --------------------------------------------------------------------------------

    def guarded(self, call: Callable[..., _Result], *args: object) -> _Result | None:
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

    def _leave(self, request: Request) -> LiveRequest | None:
        """Take a finished request out, before vLLM frees its blocks."""
        self._requests.pop(request.request_id, None)
        request_id = request.request_id
        self._moved.forget(request_id)
        live = self._live.pop(request_id, None)
        self._offers.forget(request_id)
        if self.stored is not None:
            self.stored.forget(request_id)
        if live is not None and live.pending is not None:
            self._drop_pending(request_id, live)
        return live

    def _store(self, request: Request, live: LiveRequest, block_ids: Sequence[int]) -> None:
        """Have a finished request written to the store, whose blocks are indexed."""
        if self.stored is not None:
            self.guarded(self.stored.ended, request, live, block_ids)

    def _record(self, request: Request, live: LiveRequest) -> None:
        """Record a finished request, whose blocks are indexed."""
        if self._recording is not None:
            self.guarded(self._recording.ended, request, live)

    def abandon(self, request_id: str) -> None:
        """Forget the request; vLLM continues with it alone."""
        live = self._live.pop(request_id, None)
        self._offers.forget(request_id)
        if self.stored is not None:
            self.stored.forget(request_id)
        if self._recording is not None:
            self._recording.forget(request_id)
        if live is not None:
            self._drop_pending(request_id, live)

    def reset(self) -> None:
        for request_id in list(self._pending):
            self.preempted(request_id)
        self.sources.reset()
        if self._carrier is not None:
            self._carrier.reset()
        if self.stored is not None:
            self.stored.reset(self._live.values())

    def shutdown(self) -> None:
        """Stop what runs in the background."""
        if self._recording is not None:
            self._recording.close()
