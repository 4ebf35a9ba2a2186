"""The parts of the scheduler's half in every mode, and what becomes of a request and of a step.

A planner has one of these, and decides what its requests reuse (`_planner`, `_exact`).
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

from kvtrie._core import SHARED, Namespace
from kvtrie.integrations._asked import named
from kvtrie.integrations._filled_plan import judges
from kvtrie.integrations.vllm._carried import Carrier
from kvtrie.integrations.vllm._dead import DeadReasoning
from kvtrie.integrations.vllm._failures import Failures
from kvtrie.integrations.vllm._guard import Guard
from kvtrie.integrations.vllm._held import Held
from kvtrie.integrations.vllm._live import LiveRequests
from kvtrie.integrations.vllm._loads import Loads
from kvtrie.integrations.vllm._offers import Offers
from kvtrie.integrations.vllm._reasons import Reasons
from kvtrie.integrations.vllm._recording import Recording
from kvtrie.integrations.vllm._recovery import Recovery
from kvtrie.integrations.vllm._runners import MovedRequests
from kvtrie.integrations.vllm._sources import Sources
from kvtrie.integrations.vllm._stored import StoreRequests
from kvtrie.integrations.vllm._tags import Reading, tagger_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvtrie.gates import Decision
    from kvtrie.integrations.vllm._metadata import Load, StoreReport, StoreStep
    from kvtrie.integrations.vllm._requests import LatestPlan, LiveRequest
    from kvtrie.integrations.vllm._settings import Settings
    from kvtrie.integrations.vllm._stats import Counts

# A server may see any number of salts.
_MAX_NAMESPACES: Final = 1024


class Half:
    """Builds the parts, and tells them what vLLM does with its requests and steps.

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

    Attributes:
        requests: vLLM's requests, and the plans that they hold.
        sources: The blocks that copies come from.
        held: What keeps them until they are read.
        dead: What is evicted first.
        reasons: Why tokens are computed; None: it is not said.
        carrier: What copies take along in other groups; None: nothing.
        offers: What indexes the blocks of requests.
        failures: Copies whose outcome is not known.
        recovery: What follows a failed copy.
        loads: The copies of the next step.
        moved: Requests that go on at another position.
        stored: Requests that use the store; None without one.
        recording: What records requests; None: nothing.
        guard: What logs and counts errors.
        tagger: What finds kinds of tokens; None without a chat format.
        new_reading: Begins to read a request's spans; None likewise.
        space_of: The namespace of a salt and an adapter.
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
        pool = manager.block_pool
        self._vllm_config = vllm_config
        self._counts = counts
        self.guard = Guard(counts)
        self.space_of = lru_cache(maxsize=_MAX_NAMESPACES)(self._new_namespace)
        self.tagger = tagger = tagger_of(settings, vllm_config)
        self.new_reading = None if tagger is None else partial(Reading, tagger, counts)
        self.sources = Sources(pool, block_size, decision.policy, seed=settings.seed)
        self.held = Held(pool)
        self.requests = LiveRequests(
            pool, block_size, counts, self.held, with_images=settings.images
        )
        self.dead = DeadReasoning(pool, self.sources, block_size, counts, and_after=and_after)
        self.reasons: Reasons | None = None
        if is_only_group:
            self.reasons = Reasons(self.sources, decision, block_size, counts, self.dead.was_dead)
        self.carrier: Carrier | None = None
        if windows:
            self.carrier = Carrier(manager, self.sources, block_size, windows)
        self.offers = Offers(
            manager,
            self.sources,
            block_size,
            counts,
            self.continues_alone,
            self.reasons,
            group=group,
            forbids=bool(settings.wanted().forbid_kinds),
        )
        self.failures = Failures(manager, block_size, follows=is_only_group)
        self.loads = Loads(manager, block_size, counts, self.failures, self.guard.note, group=group)
        self.moved = MovedRequests(vllm_config, manager)
        self.recovery = Recovery(
            manager,
            block_size,
            self.requests,
            self.sources,
            self.failures,
            self.moved,
            self.guard,
        )
        stored = settings.stored()
        self.stored: StoreRequests | None = None
        if stored is not None:
            self.stored = StoreRequests(stored, block_size, counts, judges=judges(decision))
        options = settings.recorded()
        self.recording: Recording | None = None
        if options is not None:
            self.recording = Recording(options, vllm_config, block_size, counts)

    def _new_namespace(self, salt: str | None, adapter: str | None) -> Namespace:
        return Namespace(
            model=self._vllm_config.model_config.model,
            kv_dtype=str(self._vllm_config.cache_config.cache_dtype),
            adapter=adapter,
            salt=salt or SHARED,
        )

    # --- a request -----------------------------------------------------------------------------

    def admitted(self, request: Request) -> LiveRequest | None:
        """The request that vLLM has allocated blocks for; None if it goes on without kvtrie."""
        self.failures.admitted(request.request_id)
        live = self.requests.admitted(request.request_id)
        if live is not None:
            self.offers.admitted(request, live)
        return live

    def finds_nothing(self, request: Request, live: LiveRequest, num_local: int) -> bool:
        """Whether it is clear without a plan that nothing of a prompt is copied.

        Most prompts of which vLLM has no block are such, and a plan takes longer than the question.
        """
        if num_local or live.account.reached or self.reasons is None or self.stored is not None:
            return False
        return bool(self.guard.call(self.reasons.find_nothing, request, live))

    def latest(
        self, request: Request, live: LiveRequest, num_local: int
    ) -> tuple[tuple[int, ...], LatestPlan | None]:
        """What a plan is made from, and what the latest one came to if it would be the same again.

        It would be while nothing was indexed and every block that it reads is there.
        """
        ticket = live.ticket if live.stored is not None else 0
        key = (self.sources.num_changes, num_local, len(live.seq), ticket)
        latest = live.latest
        if latest is None:
            return key, None
        if latest.key == key and self.sources.has_all(latest.used):
            return key, latest
        self.requests.drop(request.request_id, live)
        return key, None

    def continues_alone(self, request_id: str) -> None:
        """Log and count the error that is being handled; vLLM goes on with the request alone."""
        self.guard.note("request %s continues without kvtrie", named(request_id))
        self.abandon(request_id)

    def abandon(self, request_id: str) -> None:
        """Forget the request; vLLM continues with it alone."""
        self.requests.unfollow(request_id)
        self.offers.forget(request_id)
        if self.stored is not None:
            self.stored.forget(request_id)
        if self.recording is not None:
            self.recording.forget(request_id)

    def leave(self, request: Request) -> LiveRequest | None:
        """Take a finished request out, before vLLM frees its blocks."""
        request_id = request.request_id
        self.requests.known.pop(request_id, None)
        self.moved.forget(request_id)
        self.offers.forget(request_id)
        if self.stored is not None:
            self.stored.forget(request_id)
        return self.requests.unfollow(request_id)

    def ended(self, request: Request, live: LiveRequest, block_ids: Sequence[int]) -> None:
        """Record a finished request, and have it stored. Its blocks are indexed."""
        if self.recording is not None:
            self.guard.call(self.recording.ended, request, live)
        if self.stored is not None:
            self.guard.call(self.stored.ended, request, live, block_ids)

    # --- a step --------------------------------------------------------------------------------

    def store_step(self, output: SchedulerOutput, loads: Sequence[Load]) -> StoreStep | None:
        """What a step does with the store."""
        if self.stored is None:
            return None
        return self.stored.step(output, loads, self.requests.known, self.requests.live)

    def reported(self, report: StoreReport) -> None:
        """Take what the worker's half has loaded from the store and written to it."""
        if self.stored is not None:
            self.guard.call(self.stored.arrived, report, self.requests.live)

    def step_is_done(self) -> None:
        """Take note that a step's output is handled, with its failures."""
        if self.stored is not None:
            self.stored.step_is_done()
        self.held.end_step()
        self.failures.done()
        if self.recording is not None:
            self.guard.call(self.recording.look, self.offers.prefilling)

    # --- all -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every block."""
        for request_id in list(self.requests.live):
            self.requests.preempted(request_id)
        self.sources.reset()
        if self.carrier is not None:
            self.carrier.reset()
        if self.stored is not None:
            self.stored.reset(self.requests.live.values())

    def shutdown(self) -> None:
        """Stop what runs in the background."""
        if self.recording is not None:
            self.recording.close()
