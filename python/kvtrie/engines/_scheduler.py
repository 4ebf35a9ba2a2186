"""Schedules requests over one pool: waiting, admission, preemption and cancelling."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtrie._core import OutOfBlocksError, ReusePolicy
from kvtrie.engines._lease import Lease
from kvtrie.engines._request import Event, FinishReason, Request, Usage
from kvtrie.engines._sampling import Sampling, pick
from kvtrie.engines._watch import UNWATCHED, Watched
from kvtrie.engines._window_lease import WindowLease

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvtrie._core import TokenSequence
    from kvtrie.engines._images import PlacedImages
    from kvtrie.engines._runner import Runner
    from kvtrie.engines._store import Store
    from kvtrie.engines._text import TextStream
    from kvtrie.engines._watch import Phase
    from kvtrie.gates import Decision

# A plan that copies nothing needs no block except its table, so it fits if the table does.
_IN_PLACE_ONLY: Final = ReusePolicy(approximate=False, partial_blocks=False)


@dataclass(slots=True, eq=False)
class Job:
    request: Request
    seq: TokenSequence
    sampling: Sampling
    rng: torch.Generator
    text: TextStream
    stop_ids: frozenset[int]
    max_len: int
    decision: Decision
    without_records: Decision | None
    return_logits: bool
    session: str | None = None
    moved_end: int | None = None
    images: PlacedImages | None = None
    lease: Lease | WindowLease | None = None
    was_admitted: bool = False
    events: deque[Event] | None = None
    watch: Watched = UNWATCHED

    @property
    def policy(self) -> ReusePolicy:
        """What it may reuse before its plan is judged."""
        return self.decision.policy


class Scheduler:
    """Runs jobs step by step, oldest first, with one model pass per job."""

    def __init__(self, store: Store, runner: Runner, prefill_chunk: int) -> None:
        self._store = store
        self._runner = runner
        self._prefill_chunk = prefill_chunk
        self._num_preemptions = 0
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []

    @property
    def num_held(self) -> int:
        return sum(job.lease.num_held for job in self.running if job.lease is not None)

    @property
    def num_held_windows(self) -> int:
        leases = (job.lease for job in self.running)
        return sum(lease.windows.num_held for lease in leases if isinstance(lease, WindowLease))

    def add(self, job: Job) -> None:
        self.waiting.append(job)
        job.watch.submitted()

    def step(self) -> list[Event]:
        """Run one pass for every running job, then for every job that can be admitted."""
        events: list[Event] = []
        num_preemptions = self._num_preemptions
        for job in list(self.running):
            # An older request may have preempted a younger one within this step.
            if job.lease is not None:
                self._advance(job, job.lease, events)
        # A job preempted in this step would be preempted again.
        while self.waiting and (not self.running or num_preemptions == self._num_preemptions):
            job = self.waiting[0]
            self._admit(job, events)
            if job.lease is not None:
                self._advance(job, job.lease, events)
            elif job.request.status == "waiting":
                break
        return events

    def cancel(self, request: Request) -> None:
        """End a request now, in any state; no effect if it has ended."""
        for job in [*self.waiting, *self.running]:
            if job.request is request:
                self._end(job, "cancelled")
                return

    def _admit(self, job: Job, events: list[Event]) -> None:
        """Admit the first waiting request; without enough blocks it keeps waiting."""
        try:
            lease = self._lease(job)
        except OutOfBlocksError as error:
            if not self.running:
                self._fail(job, error, events)
            return
        except Exception as error:  # noqa: BLE001 - the request ends with it, stream() raises it
            self._fail(job, error, events)
            return
        self.waiting.popleft()
        job.lease = lease
        # Oldest first: the order of service, and the reverse of the order of preemption.
        self.running.append(job)
        self.running.sort(key=lambda running: running.request.number)
        job.request.status = "running"
        if not job.was_admitted:
            job.was_admitted = True
            plan = lease.plan
            if lease.decision is not None:
                job.request.decision = lease.decision
            job.request.usage = Usage(plan.num_exact, plan.num_approximate, plan.num_compute)
            job.watch.admitted(plan)

    def _lease(self, job: Job) -> Lease | WindowLease:
        wanted = job.policy
        if self.running:
            # A running request that needs a block soon would otherwise preempt the new one.
            return self._planned(job, wanted, len(self.running), job.decision)
        try:
            return self._planned(job, wanted, decision=job.decision)
        except OutOfBlocksError:
            return self._planned(job, _IN_PLACE_ONLY)

    def _planned(
        self, job: Job, policy: ReusePolicy, headroom: int = 0, decision: Decision | None = None
    ) -> Lease | WindowLease:
        windows = self._store.windows
        if windows is not None:
            return WindowLease(
                self._store,
                windows,
                job.seq,
                policy,
                session=job.session,
                moved_end=job.moved_end,
                headroom=headroom,
                decision=decision,
                watch=job.watch,
            )
        return Lease(
            self._store,
            job.seq,
            policy,
            session=job.session,
            moved_end=job.moved_end,
            headroom=headroom,
            decision=decision,
            without_records=job.without_records,
            watch=job.watch,
        )

    def _advance(self, job: Job, lease: Lease | WindowLease, events: list[Event]) -> None:
        try:
            ranges = lease.next_ranges(self._prefill_chunk)
            if len(ranges) > 1 and not self._runner.is_sparse:
                ranges = ranges[:1]
            if all(self._make_room(job, lease, end) for _, end in ranges):
                with job.watch.phase(_pass(job, ranges), sum(end - at for at, end in ranges)):
                    logits = self._runner.run(
                        job.seq, lease.table, ranges, job.images, lease.windows
                    )
                lease.advance(ranges[-1][1])
                if lease.is_computed:
                    self._emit(job, lease, logits, events)
        except Exception as error:  # noqa: BLE001 - the request ends with it, stream() raises it
            self._fail(job, error, events)
        except BaseException as error:
            self._fail(job, error, events)
            raise

    def _make_room(self, job: Job, lease: Lease | WindowLease, end: int) -> bool:
        """Allocate blocks up to ``end``; if none is left, preempt younger requests."""
        while True:
            try:
                lease.issue(end)
            except OutOfBlocksError:
                if len(self.running) == 1:
                    raise
                victim = self.running[-1]
                self._preempt(victim)
                if victim is job:
                    return False
            else:
                return True

    def _preempt(self, job: Job) -> None:
        """Move a request to the front of the queue, with its tokens so far."""
        self._num_preemptions += 1
        self.running.remove(job)
        self.waiting.appendleft(job)
        job.request.status = "waiting"
        job.request.num_preemptions += 1
        self._close(job)
        job.watch.preempted()

    def _emit(
        self, job: Job, lease: Lease | WindowLease, logits: torch.Tensor, events: list[Event]
    ) -> None:
        request = job.request
        token = pick(logits, job.sampling, job.rng)
        lease.append([token])
        reason: FinishReason | None = None
        if token in job.stop_ids:
            reason = "stop"
        elif len(job.seq) >= job.max_len:
            reason = "length"
        text = job.text.push(token)
        if reason is not None:
            text += job.text.flush()
        request.tokens.append(token)
        request.text += text
        job.watch.emitted()
        row = logits if job.return_logits else None
        event = Event(request, token, text, request.usage, reason, row)
        if reason is not None:
            self._end(job, reason)
        self._tell(job, event, events)

    def _fail(self, job: Job, error: BaseException, events: list[Event]) -> None:
        request = job.request
        request.error = error
        try:
            self._end(job, "error")
        except Exception as second:  # noqa: BLE001 - the first error is the one to see
            error.add_note(f"and when its blocks were freed: {second!r}")
        self._tell(job, Event(request, None, "", request.usage, "error"), events)

    def _end(self, job: Job, reason: FinishReason) -> None:
        if job in self.waiting:
            self.waiting.remove(job)
        if job in self.running:
            self.running.remove(job)
        job.request.status = "finished"
        job.request.finish_reason = reason
        # Where an answer's blocks cannot be shared, the request ends again, with the error.
        is_ended = reason in ("cancelled", "error")
        try:
            self._close(job)
            is_ended = True
        finally:
            if is_ended:
                job.watch.ended()

    def _close(self, job: Job) -> None:
        lease, job.lease = job.lease, None
        if lease is not None:
            lease.close()

    def _tell(self, job: Job, event: Event, events: list[Event]) -> None:
        events.append(event)
        if job.events is not None:
            job.events.append(event)


def _pass(job: Job, ranges: Sequence[tuple[int, int]]) -> Phase:
    """A pass over prompt tokens, or tokens that a preemption lost, or over the last token alone."""
    last = len(job.seq) - 1
    return "decode" if job.request.tokens and ranges[0][0] == last else "compute"
