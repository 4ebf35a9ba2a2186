"""The scheduler's half: which KV each request reuses, and the state of its plan."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from kvtrie._core import EXACT_ONLY, TokenSequence
from kvtrie.integrations._filled_plan import APPROXIMATE, FilledPlan, common
from kvtrie.integrations.vllm import _gate, _lineage, _ranges, _shadow, _template
from kvtrie.integrations.vllm._carried_copies import NOTHING, Carried
from kvtrie.integrations.vllm._events import Events
from kvtrie.integrations.vllm._formats import form_of
from kvtrie.integrations.vllm._gaps import Gaps
from kvtrie.integrations.vllm._groups import OtherGroups
from kvtrie.integrations.vllm._half import Half
from kvtrie.integrations.vllm._metadata import StepMetadata
from kvtrie.integrations.vllm._plans import Plans
from kvtrie.integrations.vllm._requests import LatestPlan, LiveRequest, Pending, adapter_of
from kvtrie.integrations.vllm._settings import request_policy, session_of
from kvtrie.integrations.vllm._sources import used_by
from kvtrie.integrations.vllm._support import is_whole, window_of
from kvtrie.integrations.vllm._tags import openings_of
from kvtrie.integrations.vllm._vllm import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import EventPublisher
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvtrie._core import ReusePlan, ReusePolicy
    from kvtrie.gates import Decision
    from kvtrie.integrations.vllm._carried import Carrier
    from kvtrie.integrations.vllm._ranges import Range
    from kvtrie.integrations.vllm._settings import Settings
    from kvtrie.integrations.vllm._stats import Counts
    from kvtrie.tags import Tagger

_LOG = logging.getLogger("vllm.kvtrie")


def summary(settings: Settings, cleared: ReusePolicy, tagger: Tagger | None) -> str:
    if cleared.approximate:
        reuse = f"approximate reuse (gate: {settings.gate})"
        if settings.default == "exact":
            reuse += ", for requests that opt in"
    else:
        why = "no gate" if settings.gate is None else "the gate does not clear the policy"
        reuse = f"exact reuse only ({why})"
    if settings.shadow:
        reuse = f"exact reuse; shadow mode counts what would be moved (gate: {settings.gate})"
    return f"{reuse}; {form_of(tagger)}"


class Planner:
    """Plans for requests, and carries the plans out.

    Attributes:
        half: The parts of the scheduler's half.
        gaps: What lets requests skip what is cached after gaps.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        manager: KVCacheManager,
        settings: Settings,
        decision: Decision,
        counts: Counts,
        publisher: EventPublisher | None = None,
    ) -> None:
        groups = kv_cache_config.kv_cache_groups
        self._first = first = next(
            at for at, one in enumerate(groups) if is_whole(one.kv_cache_spec)
        )
        self._manager = manager
        self._pool = manager.block_pool
        self._block_size = groups[first].kv_cache_spec.block_size
        self._settings = settings
        self._counts = counts
        self.half = half = Half(
            vllm_config,
            manager,
            self._block_size,
            settings,
            decision,
            counts,
            group=first,
            is_only_group=len(groups) == 1,
            windows={
                at: window_of(one.kv_cache_spec) for at, one in enumerate(groups) if at != first
            },
        )
        self._requests = half.requests
        self._plans = Plans(half.sources, decision, counts)
        self._others = OtherGroups(manager, kv_cache_config, first)
        self._decision = decision
        cleared = EXACT_ONLY if settings.shadow else decision.policy
        self._openings = openings_of(settings, vllm_config, half.tagger, moves=cleared.approximate)
        requests, guarded = half.requests, half.guard.call
        self.gaps = Gaps(half.loads, half.moved, requests.live, requests.pending, guarded)
        self._events: Events | None = None
        if self._pool.enable_kv_cache_events and cleared.approximate:
            known = requests.known.values
            self._events = Events(self._pool, self._block_size, known, publisher)
            half.loads.moved = self._events.moved
        parts = f"; windows are copied along: {len(groups)} groups of KV blocks"
        said = summary(settings, cleared, half.tagger)
        _LOG.info("kvtrie: %s%s", said, parts if self._others else "")
        _LOG.info("kvtrie: chat template: %s", _template.served(settings).source)

    @property
    def has_groups(self) -> bool:
        """Whether the model has several groups of KV blocks."""
        return bool(self._others)

    # --- arrival -----------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """Register a request before vLLM looks it up."""
        half = self.half
        half.dead.settle()
        items = self._requests.take(request)
        if items is None:
            return
        granted = self._decision.policy
        policy = request_policy(request.kv_transfer_params, granted, self._settings.default)
        session = session_of(request)
        adapter, is_uncalibrated = adapter_of(request), False
        if policy.approximate and not _gate.covers(self._settings, adapter):
            self._counts.add("requests_uncalibrated")
            policy, is_uncalibrated = EXACT_ONLY, True
        might = policy
        if self._settings.shadow:
            policy = EXACT_ONLY
        space = half.space_of(request.cache_salt, adapter)
        seq = TokenSequence(request.prompt_token_ids, space, items)
        live = LiveRequest(
            seq,
            policy,
            new_reading=half.new_reading,
            openings=self._openings,
            session=session,
            is_uncalibrated=is_uncalibrated,
        )
        if self._settings.shadow:
            live.shadow_policy = might
        self._requests.live[request.request_id] = live
        if policy.approximate and not request.skip_reading_prefix_cache:
            self._join(request, live)

    def run_with_others(self) -> None:
        """Take into account that other connectors store and load this engine's blocks."""
        self.half.held.on = True

    def _join(self, request: Request, live: LiveRequest) -> None:
        """Let vLLM find approximate blocks in place, under their own hashes.

        Other connectors would find more of such blocks than the plan that the gate has judged. Next
        to them, approximate blocks are copied.
        """
        half = self.half
        if half.held.on or not half.sources.has_approximate:
            return
        plan = self._plans.of(live, request.num_prompt_tokens)
        if plan is None:
            return
        first = _lineage.join(request, half.sources.blocks(plan.blocks.tolist()))
        if first is not None:
            live.becomes_approximate(first * self._block_size)
        plan.release()

    def _look_in_shadow(self, request: Request, live: LiveRequest, num_local: int) -> None:
        """Plan as if KV were moved, at the first admission, and keep the counts."""
        policy = live.shadow_policy
        if policy is None or live.account.reached:
            return
        plan, decision = self._plans.judged(live, policy, request.num_prompt_tokens)
        if plan is None:
            return
        try:
            live.would = _shadow.would(
                plan,
                num_local,
                request.num_prompt_tokens,
                may_begin=lambda token: _lineage.covers(request, token // self._block_size),
                cleared=decision.policy.approximate or not policy.approximate,
            )
        finally:
            plan.release()

    # --- admission ---------------------------------------------------------------------------

    def match(self, request: Request, num_local: int) -> int | None:
        """The number of tokens after vLLM's own hit (whole blocks) that need no computing.

        The sources are pinned. May be called again for the same request. None: it waits for the
        store, and is to be asked about again.
        """
        half = self.half
        live = self._requests.looked_up(request, num_local)
        if live is None:
            return 0
        stored = half.stored
        if stored is not None and stored.waits(request):
            return None
        resumes = self.gaps.resumes
        key, latest = half.latest(request, live, num_local)
        if latest is not None:
            return self._promise(request, live, latest, NOTHING)
        if live.shadow_policy is not None:
            half.guard.call(self._look_in_shadow, request, live, num_local)
        elif half.finds_nothing(request, live, num_local):
            self._plans.judge_nothing(live)
            live.latest = LatestPlan(key, [])
            return 0
        plan = self._plans.of(live, request.num_prompt_tokens)
        if plan is None:
            self._counts.add("plans_stale")
            live.why = None
            return 0
        if stored is not None and stored.seeks(request, live, plan, num_local, resumes=resumes):
            plan.release()
            return None
        promised, after_gaps = _ranges.usable(
            plan,
            num_local,
            resumes=resumes,
            # KV must not become approximate in a block that vLLM hashes by tokens alone.
            may_begin=None
            if live.exact_until is not None
            else lambda token: _lineage.covers(request, token // self._block_size),
        )
        carried = NOTHING
        if half.carrier is not None:
            promised, carried = self._carried(half.carrier, live, plan, promised)
        ranges = [promised, *after_gaps]
        if half.reasons is not None:
            half.guard.call(half.reasons.look, request, live, plan, num_local, ranges, resumes)
        is_empty = promised[0] == promised[1] and not after_gaps
        used: list[int] = []
        if not is_empty or plan.num_exact or plan.num_approximate:
            used = used_by(plan)
        latest = LatestPlan(key, used)
        if half.carrier is None and live.shadow_policy is None:
            live.latest = latest
        if is_empty:
            plan.release()
            return 0
        latest.plan, latest.promised, latest.after_gaps = plan, promised, tuple(after_gaps)
        self._label(request, live, plan, ranges)
        return self._promise(request, live, latest, carried)

    def _carried(
        self, carrier: Carrier, live: LiveRequest, plan: ReusePlan | FilledPlan, promised: Range
    ) -> tuple[Range, Carried]:
        """As much of a range as other groups can take along, and what they take."""
        end = promised[1]
        promised, carried = carrier.cut(plan, promised, live.granted or live.policy)
        if promised[1] < end:
            self._counts.add("tokens_without_window", end - promised[1])
        return promised, carried

    def _promise(
        self, request: Request, live: LiveRequest, latest: LatestPlan, carried: Carried
    ) -> int:
        """Pin the sources of a plan that copies something; returns what needs no computing."""
        plan = latest.plan
        if plan is None:
            return 0
        pinned = self.half.sources.blocks([*latest.used, *sorted(carried.blocks)])
        after_gaps = list(latest.after_gaps)
        pending = Pending(plan, pinned, latest.promised, after_gaps, carried=carried)
        self._requests.promise(request, live, pending)
        self.gaps.promise(request, pending)
        start, end = pending.promised
        return end - start

    def _label(
        self,
        request: Request,
        live: LiveRequest,
        plan: ReusePlan | FilledPlan,
        ranges: Sequence[Range],
    ) -> None:
        """Start a separate lineage at the first approximate KV.

        After an eviction of the exact prefix it may begin earlier than at the last admission.
        """
        if not plan.num_approximate:
            return
        moved = [(one[0], one[1]) for one in plan.segments.tolist() if one[4] == APPROXIMATE]
        first = next((start for start, _, _ in common(ranges, moved)), None)
        if first is None:
            return
        block = first // self._block_size
        if live.exact_until is None or block < live.exact_until // self._block_size:
            _lineage.start(request, block)
            if self._events is not None:
                self._events.begin(request.block_hashes[block], block)
        live.becomes_approximate(first)

    def allocated(self, request: Request, num_external: int) -> None:
        """Handle vLLM's allocation; ``num_external`` is what `match` promised, or 0 if unused."""
        half = self.half
        live = half.admitted(request)
        if live is None:
            return
        if half.held.on and not num_external and request.num_computed_tokens > live.num_local:
            live.loaded_by_others(request.num_computed_tokens)
        pending = live.pending
        if pending is not None:
            pending.allocated = True
            # vLLM relies on this number, not on the promised one.
            self.gaps.admit(request, live, pending, num_external)
        if request.num_preemptions:
            half.guard.call(live.account.tell, request)

    # --- the step ------------------------------------------------------------------------------

    def step(self, output: SchedulerOutput) -> StepMetadata:
        half = self.half
        half.held.begin_step()
        # Copies that vLLM relies on must go out with this step, whatever else fails.
        half.guard.call(half.dead.settle)
        for request_id, request in list(self._requests.pending.items()):
            live = self._requests.live.get(request_id)
            if live is None or live.pending is None:
                del self._requests.pending[request_id]
                continue
            jumped = live.pending.jumped
            try:
                self._advance(request, live, live.pending, output)
            except Exception:
                if jumped is not None and request_id in output.num_scheduled_tokens:
                    raise
                half.continues_alone(request_id)
        half.moved.tell(output)
        if self._settings.images:
            half.moved.send_images(output, self._requests.known)
        half.offers.step(output, self._requests.live)
        if half.carrier is not None:
            half.guard.call(half.carrier.step, output, self._requests.known, self._requests.live)
        loads = half.loads.take()
        store = half.store_step(output, loads)
        if half.carrier is None:
            half.failures.scheduled(output, loads)
        if loads:
            # vLLM sets this only for what `match` promised. Otherwise it copies after the forward
            # pass: too late for segments after gaps.
            output.has_sync_kv_loads = True
        # Until here, vLLM has cached what this step writes.
        self.sort_events()
        return StepMetadata(loads, store)

    def sort_events(self) -> None:
        """Keep approximate blocks out of vLLM's events."""
        if self._events is not None:
            self.half.guard.call(self._events.sort)

    def shutdown(self) -> None:
        """Stop what runs in the background."""
        self.half.shutdown()
        if self._events is not None:
            self._events.shutdown()

    def forget_unwritten(self, request: Request) -> None:
        """Before a preemption, hide the blocks that this step was to write.

        vLLM caches blocks when it allocates their slots, so they would stay in the cache unwritten.
        """
        live = self._requests.live.get(request.request_id)
        jumped = live.pending.jumped if live is not None and live.pending is not None else None
        written = request.num_computed_tokens if jumped is None else jumped[0]
        ids = self._manager.get_block_ids(request.request_id)[0][written // self._block_size :]
        self._pool.evict_blocks({block.block_id for block in self.half.sources.blocks(ids)})

    def _advance(
        self, request: Request, live: LiveRequest, pending: Pending, output: SchedulerOutput
    ) -> None:
        is_scheduled = request.request_id in output.num_scheduled_tokens
        self.gaps.advance(request, live, pending, is_scheduled=is_scheduled)
        if not pending.allocated:
            self._requests.refused(request, live, is_idle=not output.total_num_scheduled_tokens)
        elif not pending.after_gaps or request.status != RequestStatus.RUNNING:
            self._requests.drop(request.request_id, live)

    # --- the end -------------------------------------------------------------------------------

    def finish(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """Index a request's blocks, which it has in each group, before vLLM frees them."""
        half = self.half
        live = half.leave(request)
        if live is None:
            return
        block_ids = tables[self._first]
        half.offers.offer(request, live, tables, has_ended=True)
        if half.carrier is not None:
            half.carrier.ended(request, live)
        half.ended(request, live, block_ids)
        if (
            self._settings.dead_thinking
            and live.reading is not None
            and not live.has_other_template
        ):
            others = partial(self._others.at, request, tables) if self._others else None
            half.dead.close(live.seq, live.reading, block_ids, others)
