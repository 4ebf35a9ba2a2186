"""The scheduler's half of the store: requests that wait for runs, and turns that are written.

A request whose prompt the pool does not cover is looked up once. Meanwhile vLLM asks again each
step, and the engine goes on; the request holds no block. What has arrived is laid over the plan of
the pool (`_filled_plan`), and copied when the request is admitted.
"""

from __future__ import annotations

import heapq
import logging
import os
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtrie.integrations._filled_plan import limits_contexts, missing
from kvtrie.integrations._store_settings import HOST, MAX_WAITING
from kvtrie.integrations._turns import MOST_RUNS, StorePrompt, TurnToWrite, borders_of
from kvtrie.integrations.vllm._metadata import (
    Seek,
    StoreReport,
    StoreStep,
)
from kvtrie.integrations.vllm._requests import adapter_of
from kvtrie.integrations.vllm._vllm import RequestStatus
from kvtrie.store.runs import Gone, gone_of, pieces
from kvtrie.store.threads import Shares
from kvtrie.tags import TurnPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvtrie._core import ReusePlan
    from kvtrie.integrations._filled_plan import FilledPlan
    from kvtrie.integrations._store_settings import StoreSettings
    from kvtrie.integrations.vllm._metadata import Load
    from kvtrie.integrations.vllm._ranges import Range
    from kvtrie.integrations.vllm._requests import LiveRequest
    from kvtrie.integrations.vllm._stats import Counts

_LOG: Final = logging.getLogger("vllm.kvtrie")
# Fewer tokens in a step say little of how fast a prompt is computed.
_LEAST_PREFILL: Final = 64
# Runs whose hashes are kept, in some 40 MB; beyond that every prompt is looked up.
_MOST_WRITTEN: Final = 1 << 19
_TURN: Final = TurnPolicy()
# What ends a request between two steps, while one that it is in may be under way.
_CUT_OFF: Final = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)


@dataclass(frozen=True, slots=True)
class _OpenStep:
    """A step that was sent.

    Attributes:
        sent: When, in seconds.
        num_tokens: What it computes.
        begun: Requests that it admits, or copies for.
    """

    sent: float
    num_tokens: int
    begun: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Sought:
    """A request that waits for the store, or has found something there."""

    request_id: str
    tenant: str | None
    since: float


class StoreRequests:
    """Decides what is looked up, how long a request waits, and what is written.

    Args:
        settings: The setting ``store``.
        block_size: Tokens of a block.
        counts: Where everything is counted.
        judges: Whether a gate judges plans by the context of their moved runs.
    """

    def __init__(
        self, settings: StoreSettings, block_size: int, counts: Counts, *, judges: bool
    ) -> None:
        self._settings = settings
        self._block_size = block_size
        self._counts = counts
        self._judges = judges
        # Requests that were looked up and have not ended, with their tickets; 0: nothing is kept.
        self._tickets: dict[str, int] = {}
        # By ticket: those that wait for the store, and those that wait for vLLM with what it has.
        self._waiting: dict[int, _Sought] = {}
        self._loaded: dict[int, _Sought] = {}
        self._places = Shares(MAX_WAITING)
        # Hashes of all runs that were written, where nobody else writes; None: they are not known.
        self._known_runs: set[int] | None = set() if settings.backend == HOST else None
        self._last_ticket = 0
        self._next = StoreStep()
        # Turns that were sent and not reported.
        self._num_turns = 0
        # Steps whose output is not handled.
        self._steps: deque[_OpenStep] = deque(maxlen=64)
        self._last = 0.0

    def __len__(self) -> int:
        """The number of requests that were looked up and have not ended."""
        return len(self._tickets)

    # --- loading -------------------------------------------------------------------------------

    def waits(self, request: Request) -> bool:
        """Whether a request waits for the store. It does not for long."""
        ticket = self._tickets.get(request.request_id, 0)
        found = self._waiting.get(ticket)
        if found is None:
            return False
        if time.monotonic() - found.since <= self._settings.wait:
            return True
        self._counts.add("store_late")
        self._drop(ticket)
        return False

    def seeks(
        self,
        request: Request,
        live: LiveRequest,
        plan: ReusePlan | FilledPlan,
        num_local: int,
        *,
        resumes: bool,
    ) -> bool:
        """Begin to look a request up, once; whether it waits now."""
        request_id = request.request_id
        if request_id in self._tickets or request.num_preemptions:
            return False
        if not _may_be_stored(request):
            return False
        policy = live.granted or live.policy
        gaps = missing(plan, policy, num_local, request.num_prompt_tokens - 1)
        if not resumes:
            gaps = gaps[:1]
        if sum(end - start for start, end in gaps) < max(1, self._settings.min_tokens):
            return False
        tenant = request.cache_salt or None
        self._tickets[request_id] = 0
        prompt = self._prompt(request, live)
        if self._known_runs is not None:
            named = self._named(prompt, gaps)
            if self._known_runs.isdisjoint(named):
                # The store is this process's own, and has none of them.
                self._counts.add("store/absent", len(named))
                return False
        if not self._places.take(tenant):
            self._counts.add("store_busy")
            return False
        self._last_ticket += 1
        live.ticket = self._tickets[request_id] = self._last_ticket
        self._waiting[live.ticket] = _Sought(request_id, tenant, time.monotonic())
        self._counts.add("store_requests")
        self._next.seeks.append(
            Seek(
                live.ticket,
                prompt,
                tuple(gaps),
                live.policy,
                live.moved_end,
                to_first_gap=not resumes,
                judges=self._judges or limits_contexts(live.policy),
            )
        )
        return True

    def arrived(self, report: StoreReport, lives: Mapping[str, LiveRequest]) -> None:
        """Take what the worker's half has loaded and written."""
        self._num_turns -= report.num_written
        for ticket, given in report.found.items():
            found = self._waiting.get(ticket)
            if found is None:
                continue
            live = lives.get(found.request_id)
            # Its id may be another request's by now.
            if live is not None and live.ticket == ticket and given.spans:
                self._leave(ticket)
                self._loaded[ticket] = found
                live.stored = given
                self._counts.add("store_found")
            else:
                self._drop(ticket)

    def forget(self, request_id: str) -> None:
        """A request has ended, or goes on without kvtrie."""
        ticket = self._tickets.pop(request_id, 0)
        if ticket in self._waiting or ticket in self._loaded:
            self._drop(ticket)

    def _leave(self, ticket: int) -> None:
        """A request waits for the store no more."""
        found = self._waiting.pop(ticket, None)
        if found is not None:
            self._places.give(found.tenant)

    def _drop(self, ticket: int) -> None:
        """Nothing is kept of a request."""
        self._leave(ticket)
        self._loaded.pop(ticket, None)
        seeks = self._next.seeks
        self._next.seeks = [one for one in seeks if one.ticket != ticket]
        if len(self._next.seeks) == len(seeks):
            self._next.drops.append(ticket)

    # --- writing -------------------------------------------------------------------------------

    def ended(self, request: Request, live: LiveRequest, block_ids: Sequence[int]) -> None:
        """Have a turn written, whose last tokens the tags of the request have read."""
        if not self._settings.turns or not _may_be_stored(request):
            return
        if live.is_before_reset:
            # It may have KV of other weights.
            return
        if request.status in _CUT_OFF and self._begins(request.request_id):
            # What it was to copy, or has hit of a request of the same step, may be unwritten.
            return
        done = request.num_computed_tokens - request.num_in_flight_tokens
        done = max(0, min(done, len(live.seq), len(block_ids) * self._block_size))
        prompt = self._prompt(request, live, done)
        if live.is_untagged:
            # What of it is reasoning, which is not to be left, is not known.
            return
        gone = Gone(()) if live.reading is None else gone_of(live.reading.stream, _TURN)
        exact_until = done if live.exact_until is None else live.exact_until
        hops = MostHops(live.moved)
        wanted = []
        for start, end in pieces(done, prompt.borders, longest=self._settings.run_tokens):
            if start == end or gone.has_some_of(start, end):
                continue
            exact = max(0, min(exact_until - start, end - start))
            most = hops.within(start + exact, end) if exact < end - start else None
            wanted.append((start, end, exact, most))
        if not wanted:
            return
        if len(wanted) > MOST_RUNS:
            self._counts.add("store/too_many", len(wanted) - MOST_RUNS)
            wanted = wanted[:MOST_RUNS]
        if self._known_runs is not None:
            self._known_runs.update(self._named(prompt, [(one[0], one[1]) for one in wanted]))
            if len(self._known_runs) > _MOST_WRITTEN:
                self._known_runs = None
        self._num_turns += 1
        used = tuple(block_ids[: -(-done // self._block_size)])
        policy = live.policy if live.built_under is None else live.built_under
        self._next.turns.append(TurnToWrite(prompt, used, tuple(wanted), policy))

    def reset(self, lives: Iterable[LiveRequest]) -> None:
        """Find nothing that was stored before, which may be of other weights.

        No turn is written that was not sent: its blocks hold other KV, or none, from now on.
        """
        _LOG.warning(
            "kvtrie: store: the cache was reset: this process finds nothing that was stored "
            "before, and others find nothing that it stores. Others go on to use what is stored: "
            "after a change of weights, reset them too, or give all another folder, bucket or "
            "master for the store"
        )
        for ticket in (*self._waiting, *self._loaded):
            self._drop(ticket)
        for live in lives:
            live.stored = None
            live.is_before_reset = True
        self._next.generation = os.urandom(16)
        if self._known_runs is not None:
            self._known_runs.clear()
        turns, self._next.turns = self._next.turns, []
        self._num_turns -= len(turns)
        for turn in turns:
            self._counts.add("store/overwritten", len(turn.pieces))

    def _begins(self, request_id: str) -> bool:
        """Whether a step that admits a request, or copies for it, is under way."""
        return any(request_id in one.begun for one in self._steps)

    # --- the step ------------------------------------------------------------------------------

    def step(
        self,
        output: SchedulerOutput,
        loads: Sequence[Load],
        requests: Mapping[str, Request],
        lives: Mapping[str, LiveRequest],
    ) -> StoreStep | None:
        """What the workers do in this step; None for nothing."""
        begun = {new.req_id for new in output.scheduled_new_reqs}
        begun |= output.scheduled_cached_reqs.resumed_req_ids
        begun |= {load.request_id for load in loads}
        self._steps.append(
            _OpenStep(time.monotonic(), output.total_num_scheduled_tokens, frozenset(begun))
        )
        for ticket, found in list(self._loaded.items()):
            request, live = requests.get(found.request_id), lives.get(found.request_id)
            if request is None or live is None:
                continue
            if request.status == RequestStatus.RUNNING and live.pending is None:
                # All that it could use is copied.
                live.stored = None
                self._drop(ticket)
        step, self._next = self._next, StoreStep()
        if self._num_turns:
            step.overwritten = self._written(output, loads, lives)
        step.waits = bool(self._waiting) and not output.total_num_scheduled_tokens
        if step.overwritten:
            # Else vLLM's workers look at it after the forward pass, which writes to them.
            output.has_sync_kv_loads = True
        says = step.seeks, step.turns, step.overwritten, step.drops, step.waits, step.generation
        if not any(says):
            self._next.prefills = step.prefills[-16:]
            return None
        return step

    def step_is_done(self) -> None:
        """Measure how fast prompts are computed."""
        if not self._steps:
            return
        step = self._steps.popleft()
        now = time.monotonic()
        began, self._last = max(step.sent, self._last), now
        if step.num_tokens >= _LEAST_PREFILL:
            self._next.prefills.append((step.num_tokens, now - began))

    def _written(
        self, output: SchedulerOutput, loads: Sequence[Load], lives: Mapping[str, LiveRequest]
    ) -> list[int]:
        """Blocks that this step may write: all that it gives to requests, but for vLLM's hits."""
        blocks = [block for load in loads for block in load.blocks]
        for new in output.scheduled_new_reqs:
            live = lives.get(new.req_id)
            kept = new.num_computed_tokens if live is None else live.num_local
            blocks += new.block_ids[0][min(kept, new.num_computed_tokens) // self._block_size :]
        cached = output.scheduled_cached_reqs
        for request_id, given, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if given is None:
                continue
            if request_id in cached.resumed_req_ids:
                live = lives.get(request_id)
                kept = computed if live is None else min(computed, live.num_local)
                blocks += given[0][kept // self._block_size :]
            else:
                blocks += given[0]
        return blocks

    def _named(self, prompt: StorePrompt, ranges: Sequence[Range]) -> set[int]:
        """Hashes of the runs of a prompt that have tokens of ascending ranges."""
        found: set[int] = set()
        number = 0
        cut = pieces(len(prompt.tokens), prompt.borders, longest=self._settings.run_tokens)
        for start, end in cut:
            while number < len(ranges) and ranges[number][1] <= start:
                number += 1
            if number < len(ranges) and ranges[number][0] < end:
                found.add(hash((prompt.salt, prompt.tokens[start:end].tobytes())))
        return found

    def _prompt(self, request: Request, live: LiveRequest, end: int | None = None) -> StorePrompt:
        borders: tuple[int, ...] = ()
        spans: tuple[tuple[int, int, str], ...] = ()
        num = len(live.seq) if end is None else end
        reading = live.read()
        if reading is not None:
            borders = tuple(one for one in borders_of(reading.stream) if one <= num)
            spans = tuple((one.start, one.end, one.kind) for one in reading.spans())
        salt = request.cache_salt or None
        return StorePrompt(live.seq[:num], salt, borders, spans, live.session)


def _may_be_stored(request: Request) -> bool:
    """Whether its runs are of one adapter's model, and of token ids alone."""
    return adapter_of(request) is None and not request.mm_features


class MostHops:
    """The most hops of what was moved into ranges that are asked for in order.

    All ranges together cost one sorting of what was moved.

    Args:
        moved: Where each begins and ends, and its hops.
    """

    def __init__(self, moved: Iterable[tuple[int, int, int]]) -> None:
        self._coming = deque(sorted(moved))
        # Those that began before the end of the latest range, the most hops first.
        self._begun: list[tuple[int, int]] = []

    def within(self, start: int, end: int) -> int:
        """Of a range, which begins and ends no sooner than the one before; 0 if it has none."""
        while self._coming and self._coming[0][0] < end:
            _, stop, hops = self._coming.popleft()
            heapq.heappush(self._begun, (-hops, stop))
        while self._begun and self._begun[0][1] <= start:
            heapq.heappop(self._begun)
        return -self._begun[0][0] if self._begun else 0
