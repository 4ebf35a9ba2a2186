"""Requests in order of time, from one event to the next, and what a router brings about."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from simulation.routers import ROUTERS
from simulation.workers import Texts, Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtrie.replay import Trace
    from simulation.routers import Router
    from simulation.workers import Job, Tokens


@dataclass(frozen=True)
class Setting:
    """A fleet and its router's weight of load.

    `num_blocks` and `speed` (prompt tokens computed per second) are per worker; `speedup` divides
    the times of arrival.
    """

    workers: int
    num_blocks: int
    speed: float = 8000.0
    overhead: float = 0.02
    load_weight: float = 1.0
    speedup: float = 1.0
    restarts: int = 0
    seed: int = 0


@dataclass
class Outcome:
    """What one router brought about, in tokens and seconds.

    `over` and `under` compare the exact tokens that the router claimed with those that each
    worker's pool held at that moment: claims, and their tokens. `claimed_moved` and `found_moved`
    are of the worker that was chosen, when the request arrived and when it was begun.
    """

    router: str
    prompt: int = 0
    exact: int = 0
    moved: int = 0
    computed: int = 0
    claims: int = 0
    over: int = 0
    over_tokens: int = 0
    under: int = 0
    under_tokens: int = 0
    claimed_moved: int = 0
    restarts: int = 0
    holes: int = 0
    by_worker: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return 1 - self.computed / self.prompt

    @property
    def spread(self) -> float:
        """Computed tokens of the worker with most, by the mean of all."""
        return max(self.by_worker) * len(self.by_worker) / max(1, self.computed)


# Kinds of events; of those at one time the earlier kind comes first.
_ENDS, _RESTARTS, _ARRIVES = range(3)


class Fleet:
    """Workers and a router, from one event to the next."""

    def __init__(self, texts: Texts, setting: Setting, router: str) -> None:
        self.texts = texts
        self._setting = setting
        self.workers = [
            Worker(texts, setting.num_blocks, self._published(at)) for at in range(setting.workers)
        ]
        made = ROUTERS[router]
        self.router = None if made is None else made(self.workers)
        self.outcome = Outcome(router)
        self._turn = 0
        self._holes = [0] * setting.workers
        self._now = 0.0
        self._events: list[tuple[float, int, int, tuple[int, ...]]] = []
        self._number = 0

    def _published(self, at: int) -> Callable[[bytes, bool], object]:
        def heard(payload: bytes, is_approximate: bool) -> None:
            if self.router is not None:
                self.router.heard(at, payload, is_approximate=is_approximate)

        return heard

    def _later(self, time: float, kind: int, *of: int) -> None:
        heapq.heappush(self._events, (time, kind, self._number, of))
        self._number += 1

    def run(self) -> Outcome:
        setting, requests = self._setting, self.texts.trace.requests
        times = arrivals(self.texts.trace, setting.speedup)
        for number, time in enumerate(times):
            self._later(time, _ARRIVES, number)
        rng = random.Random(setting.seed)
        for _ in range(setting.restarts):
            time = rng.uniform(0, max(times))
            self._later(time, _RESTARTS, rng.randrange(setting.workers))
        while self._events:
            self._now, kind, _, of = heapq.heappop(self._events)
            if kind == _ARRIVES:
                self._arrive(self.texts.job(requests[of[0]], self._now))
            elif kind == _RESTARTS:
                self._restart(of[0])
            else:
                self._end(*of)
        self.outcome.by_worker = [one.computed for one in self.workers]
        return self.outcome

    def _arrive(self, job: Job) -> None:
        workers = self.workers
        if self.router is None:
            at, self._turn = self._turn, (self._turn + 1) % len(workers)
            job.expected = job.one.num_tokens
        else:
            at = self._chosen(job, self.router)
            self.router.sent(job, at)
        workers[at].put(job)
        if len(workers[at].queue) == 1:
            self._begin(at)

    def _chosen(self, job: Job, router: Router) -> int:
        workers, most = self.workers, job.one.num_tokens
        exact, moved = router.claims(job)
        if router.promises:
            self._compare(job, exact)
        if router.counts_sent:
            size = self.texts.trace.block_size
            ids = job.one.prompt[: job.one.findable(size)].tolist()
            exact = np.maximum(exact, [one.sent(ids) * size for one in workers])
            moved = np.minimum(moved, most - exact)
        outstanding = np.array([one.outstanding for one in workers])
        computed = np.array([one.computed for one in workers])
        expected = most - exact - moved
        cost = expected + self._setting.load_weight * outstanding
        at = int(np.lexsort((computed, outstanding, cost))[0])
        job.expected = int(expected[at])
        self.outcome.claimed_moved += int(moved[at])
        return at

    def _compare(self, job: Job, exact: Tokens) -> None:
        more = exact - np.array([one.exact(job) for one in self.workers])
        out = self.outcome
        out.claims += len(more)
        out.over += int(np.sum(more > 0))
        out.over_tokens += int(more[more > 0].sum())
        out.under += int(np.sum(more < 0))
        out.under_tokens -= int(more[more < 0].sum())

    def _begin(self, at: int) -> None:
        setting, worker = self._setting, self.workers[at]
        job = worker.begin(self._now)
        seconds = setting.overhead + job.computed / setting.speed
        self._later(self._now + seconds, _ENDS, at, worker.life)

    def _end(self, at: int, life: int) -> None:
        worker, out = self.workers[at], self.outcome
        if life != worker.life:
            return
        job = worker.end(self._now)
        out.prompt += job.one.num_tokens
        out.exact += job.exact
        out.moved += job.moved
        out.computed += job.computed
        out.waits.append(job.began - job.arrived)
        out.firsts.append(self._now - job.arrived)
        self._holes[at] = worker.index.stats().holes
        out.holes = max(out.holes, sum(self._holes))
        if worker.queue:
            self._begin(at)

    def _restart(self, at: int) -> None:
        worker = self.workers[at]
        worker.life += 1
        worker.clear()
        self._holes[at] = 0
        if self.router is not None:
            self.router.restarted(at)
        self.outcome.restarts += 1
        if worker.queue:
            self._begin(at)


def arrivals(trace: Trace, speedup: float) -> list[float]:
    """Seconds after the first arrival, of each request.

    Raises:
        TraceError: A request has no time.
    """
    for one in trace.requests:
        if one.arrived is None:
            raise trace.error(one, "there is no time of arrival that is a number")
    times = [one.arrived or 0.0 for one in trace.requests]
    began = min(times)
    return [(one - began) / speedup for one in times]


def simulated(trace: Trace, setting: Setting, router: str) -> Outcome:
    """One router over a trace.

    Raises:
        TraceError: A request has no time, or a pool does not hold it.
    """
    most = len(trace.longest.cached) if trace.requests else 0
    if most > setting.num_blocks:
        reason = (
            f"the request has {most} blocks of {trace.block_size} tokens, and a pool of "
            f"{setting.num_blocks} blocks does not hold them"
        )
        raise trace.error(trace.longest, reason)
    return Fleet(Texts(trace), setting, router).run()
