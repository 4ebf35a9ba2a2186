"""The scheduler's half in exact mode: nothing is moved, so nothing needs a gate or a scheduler.

Three things differ from vLLM alone. What a prompt shares with cached KV beyond vLLM's last whole
block is copied. Reasoning that the chat template drops, and what follows it in its turn, is evicted
first. And blocks that are needed again are evicted later (`_retention`). Every request computes
what it would have computed, or copies KV of the same tokens at the same positions.

Models with sliding windows, state spaces or linear attention next to full attention get the last
two, in all groups of blocks: what other groups have at dead reasoning is evicted first, and where
blocks of full attention are kept, what other groups need to continue after them is kept with them.
Nothing is copied: a copy would leave the other groups without KV. With quantised KV nothing is
copied either, as the layouts of its tensors are not known.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from kvtrie._core import EXACT_ONLY, TokenSequence
from kvtrie.integrations._filled_plan import FilledPlan
from kvtrie.integrations.vllm import _ranges, _template
from kvtrie.integrations.vllm._formats import form_of
from kvtrie.integrations.vllm._groups import OtherGroups
from kvtrie.integrations.vllm._half import Half
from kvtrie.integrations.vllm._metadata import StepMetadata
from kvtrie.integrations.vllm._requests import LatestPlan, LiveRequest, Pending, adapter_of
from kvtrie.integrations.vllm._retention import HEADS, Retention
from kvtrie.integrations.vllm._settings import is_last, request_policy, session_of
from kvtrie.integrations.vllm._sources import used_by
from kvtrie.integrations.vllm._support import copies_exact_kv, is_whole
from kvtrie.integrations.vllm._vllm import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvtrie._core import ReusePlan
    from kvtrie.gates import Decision
    from kvtrie.integrations.vllm._settings import Settings
    from kvtrie.integrations.vllm._stats import Counts

_LOG = logging.getLogger("vllm.kvtrie")


class ExactPlanner:
    """Plans copies of exact KV, and orders vLLM's free queue.

    Attributes:
        half: The parts of the scheduler's half.
        copies: Whether anything is copied.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        manager: KVCacheManager,
        settings: Settings,
        decision: Decision,
        counts: Counts,
    ) -> None:
        groups = kv_cache_config.kv_cache_groups
        whole = [at for at, one in enumerate(groups) if is_whole(one.kv_cache_spec)]
        self._first = whole[0]
        self._block_size = block_size = groups[self._first].kv_cache_spec.block_size
        self._settings = settings
        self._counts = counts
        self._others = OtherGroups(manager, kv_cache_config, self._first)
        self._num_whole = len(whole)
        self.copies = copies_exact_kv(vllm_config, kv_cache_config)
        self.half = half = Half(
            vllm_config,
            manager,
            block_size,
            settings,
            decision,
            counts,
            group=self._first,
            is_only_group=self.copies,
            and_after=True,
        )
        self._requests = half.requests
        scheduler = vllm_config.scheduler_config
        per_step = scheduler.max_num_batched_tokens // block_size + scheduler.max_num_seqs
        self._retention = Retention(manager.block_pool, per_step * len(groups), counts)
        self._per_token = len(groups) / block_size
        # vLLM does not tell this half whether other connectors run, which write at once.
        half.held.on = self.copies
        parts = ""
        if len(groups) > 1:
            parts = f"; no copies: {len(groups)} groups of KV blocks"
        elif not self.copies:
            parts = f"; no copies: KV in {vllm_config.cache_config.cache_dtype}"
        _LOG.info("kvtrie: exact mode; %s%s", form_of(half.tagger), parts)
        _LOG.info("kvtrie: chat template: %s", _template.served(settings).source)

    # --- arrival -----------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """Register a request before vLLM looks it up."""
        half = self.half
        half.dead.settle()
        items = self._requests.take(request)
        if items is None:
            return
        request_policy(request.kv_transfer_params, EXACT_ONLY, "exact")
        session = session_of(request)
        is_last(request)
        space = half.space_of(request.cache_salt, adapter_of(request))
        seq = TokenSequence(request.prompt_token_ids, space, items)
        self._requests.live[request.request_id] = LiveRequest(
            seq, EXACT_ONLY, new_reading=half.new_reading, session=session
        )

    # --- admission ---------------------------------------------------------------------------

    def match(self, request: Request, num_local: int) -> int | None:
        """The number of tokens after vLLM's own hit (whole blocks) that are copied.

        The sources are pinned. May be called again for the same request. None: it waits for the
        store, and is to be asked about again.
        """
        half = self.half
        if not self.copies:
            live = self._requests.live.get(request.request_id)
            if live is not None:
                live.begins_with(num_local)
            return 0
        live = self._requests.looked_up(request, num_local)
        if live is None:
            return 0
        stored = half.stored
        if stored is not None and stored.waits(request):
            return None
        key, latest = half.latest(request, live, num_local)
        if latest is not None:
            return self._promise(request, live, latest)
        if half.finds_nothing(request, live, num_local):
            live.latest = LatestPlan(key, [])
            return 0
        made = half.sources.plan(live.seq, EXACT_ONLY)
        if made is None:
            self._counts.add("plans_stale")
            live.why = None
            return 0
        plan: ReusePlan | FilledPlan = made
        if live.stored is not None:
            spans, ticket = live.stored.spans, live.ticket
            plan = FilledPlan(made, spans, EXACT_ONLY, is_judged=False, ticket=ticket)
        if stored is not None and stored.seeks(request, live, plan, num_local, resumes=False):
            plan.release()
            return None
        promised, _ = _ranges.usable(plan, num_local, resumes=False, may_begin=None)
        if half.reasons is not None:
            half.guard.call(half.reasons.look, request, live, plan, num_local, [promised], False)
        used: list[int] = []
        if plan.num_exact or promised[0] < promised[1]:
            used = used_by(plan)
        live.latest = latest = LatestPlan(key, used)
        if promised[0] == promised[1]:
            plan.release()
            return 0
        latest.plan, latest.promised = plan, promised
        return self._promise(request, live, latest)

    def _promise(self, request: Request, live: LiveRequest, latest: LatestPlan) -> int:
        """Pin the sources of a plan that copies something; returns how many tokens it copies."""
        if latest.plan is None:
            return 0
        pinned = self.half.sources.blocks(latest.used)
        self._requests.promise(request, live, Pending(latest.plan, pinned, latest.promised, []))
        return latest.promised[1] - latest.promised[0]

    def allocated(self, request: Request, num_external: int) -> None:
        """Handle vLLM's allocation; ``num_external`` is what `match` promised, or 0 if unused."""
        half = self.half
        live = half.admitted(request)
        if live is None:
            return
        if self.copies and not num_external and request.num_computed_tokens > live.num_local:
            live.loaded_by_others(request.num_computed_tokens)
        pending = live.pending
        if pending is not None:
            pending.allocated = True
            if num_external:
                start, end = pending.promised
                given = [(start, start + num_external)]
                half.loads.add(request, live, pending.plan, given, most=end)
        if request.num_preemptions and self.copies:
            half.guard.call(live.account.tell, request)

    # --- the step ------------------------------------------------------------------------------

    def step(self, output: SchedulerOutput) -> StepMetadata:
        half = self.half
        half.held.begin_step()
        # Copies that vLLM relies on must go out with this step, whatever else fails.
        half.guard.call(half.dead.settle)
        is_idle = not output.total_num_scheduled_tokens
        for request_id, request in list(self._requests.pending.items()):
            live = self._requests.live.get(request_id)
            if live is not None and live.pending is not None and not live.pending.allocated:
                self._requests.refused(request, live, is_idle=is_idle)
            elif live is not None:
                self._requests.drop(request_id, live)
            self._requests.pending.pop(request_id, None)
        half.moved.tell(output)
        if self._settings.images:
            half.moved.send_images(output, self._requests.known)
        if not self.copies:
            self._follow_hits(output)
        half.offers.step(output, self._requests.live)
        loads = half.loads.take()
        store = half.store_step(output, loads)
        if self.copies:
            half.failures.scheduled(output, loads)
        half.guard.call(self._order, output)
        return StepMetadata(loads, store)

    def _order(self, output: SchedulerOutput) -> None:
        hits = sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        tokens = output.total_num_scheduled_tokens + hits
        self._retention.took(tokens * self._per_token + len(output.scheduled_new_reqs))
        self._retention.look()

    def _follow_hits(self, output: SchedulerOutput) -> None:
        """Count hits that end inside a block, which vLLM tells no connector of."""
        for new in output.scheduled_new_reqs:
            live = self._requests.live.get(new.req_id)
            if live is not None:
                live.begins_with(new.num_computed_tokens)

    def sort_events(self) -> None:
        """Do nothing: vLLM's events are all of exact blocks."""

    # --- the end -------------------------------------------------------------------------------

    def finish(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """Index a request's blocks and say how long to keep them, before vLLM frees them."""
        half = self.half
        live = half.leave(request)
        if live is None:
            return
        block_ids = tables[self._first]
        half.offers.offer(request, live, tables, has_ended=True)
        half.ended(request, live, block_ids)
        others = None
        if self._others:
            others = partial(self._others.at, request, tables)
        self._keep(request, live, block_ids, others)
        dead: list[int] = []
        if is_last(request):
            ranges = ((self._num_shared(live) * self._block_size, len(live.seq)),)
            dead = half.dead.drop(live.seq, ranges, block_ids, others)
        elif (
            live.reading is not None
            and self._settings.dead_thinking
            and not live.has_other_template
        ):
            dead = half.dead.close(live.seq, live.reading, block_ids, others)
        self._retention.forget(dead)

    def _keep(
        self,
        request: Request,
        live: LiveRequest,
        block_ids: Sequence[int],
        others: Callable[[Sequence[int]], Collection[int]] | None,
    ) -> None:
        """Say how long to keep a request's blocks."""
        num_shared = self._num_shared(live)
        loops = self._calls(request, live)
        # vLLM keeps no partial block.
        whole = len(live.seq) // self._block_size
        if others is None:
            self._retention.keep(block_ids[:whole], num_shared, loops=loops, session=live.session)
            return
        count = self._retention.keep(
            block_ids[:whole],
            num_shared,
            loops=loops,
            session=live.session,
            others=others(range(whole)),
            per_place=self._num_whole,
            # At the end, and where other requests leave.
            spare=2 * self._others.num_per_hit,
        )
        continuing = self._others.continuing
        self._retention.keep_with(continuing(request, count), live.session)
        head = continuing(request, min(num_shared, count))
        self._retention.keep_with(head, passes=HEADS)

    def _num_shared(self, live: LiveRequest) -> int:
        """The whole blocks before the first user's message that were hit: others begin so too."""
        end: int = 0
        for section in () if live.reading is None else live.reading.stream.sections:
            if section.kind != "system":
                break
            end = section.span.end
        shared: int = min(end, live.first_hit) // self._block_size
        return shared

    def _calls(self, request: Request, live: LiveRequest) -> bool:
        """Whether the model has called a tool, so that its conversation goes on at once."""
        if live.reading is None or request.status != RequestStatus.FINISHED_STOPPED:
            return False
        turns = live.reading.stream.turns
        return bool(turns) and not turns[-1].is_finished

    def shutdown(self) -> None:
        """Stop what runs in the background."""
        self.half.shutdown()
