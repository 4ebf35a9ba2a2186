"""Counts what a generator does; `Collector` exports it."""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

from kvtrie.engines._watch import Watcher
from kvtrie.metrics.prompts import Prompts
from kvtrie.metrics.reasons import Context
from kvtrie.tags import Tagger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie._core import ReusePlan, ReusePolicy, Span, TokenSequence
    from kvtrie.engines._watch import Phase, Planned
    from kvtrie.engines.transformers import Generator, Request
    from kvtrie.tags import Stream

FIRST_TOKEN_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds in seconds; one more bucket has no bound."""


@dataclass(slots=True)
class GeneratorTotals:
    """Counts so far.

    Attributes:
        plans_not_cleared: Plans that a gate had made exact.
        requests_in_place_only: Requests without room for copies.
        requests: Requests that ended, by how.
        preemptions: Requests that gave their blocks away.
        generation_tokens: Tokens generated.
        forward_tokens: Tokens run through the model, in passes that did not fail.
        phase_seconds: Time by phase.
        phases: Number by phase.
        first_tokens: First tokens by bucket of time since submission.
        first_token_seconds: The sum of these times.
    """

    plans_not_cleared: int = 0
    requests_in_place_only: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    generation_tokens: int = 0
    forward_tokens: int = 0
    phase_seconds: dict[str, float] = field(default_factory=dict)
    phases: Counter[str] = field(default_factory=Counter)
    first_tokens: list[int] = field(default_factory=lambda: [0] * (len(FIRST_TOKEN_BUCKETS) + 1))
    first_token_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Looked:
    """What a watcher remembers of a request until it is admitted."""

    seq: TokenSequence
    policy: ReusePolicy
    asked: ReusePolicy
    labels: NDArray[np.int8]
    is_without_room: bool

    @property
    def is_not_cleared(self) -> bool:
        """Whether a gate had the plan made exact."""
        return self.asked.approximate and not self.policy.approximate and not self.is_without_room


class PromptReader:
    """Why tokens of a generator's prompts are computed, for its watchers."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.prompts = Prompts(generator.index)
        self._tagger: Tagger | None = None
        if generator.tokenizer is not None:
            # Tokens of an unknown template have no kind.
            with contextlib.suppress(TypeError, ValueError):
                self._tagger = Tagger.from_tokenizer(cast("Any", generator.tokenizer))

    def look(self, request: Request, planned: Planned, before: Looked | None) -> Looked:
        """Label the tokens of a plan; ``before`` is of the request's plan before this one."""
        # Until a request is admitted, it has the decision that it came with.
        asked, default = request.decision.policy, self._generator.default_decision
        moved_end = planned.moved_end
        if not asked.approximate and default.policy.approximate:
            stream = self._stream(planned.seq)
            moved_end = None if stream is None else stream.moved_end
        no_room = planned.is_without_room and before is not None
        context = Context(
            policy=planned.policy,
            asked=asked,
            default=default,
            session=planned.session,
            moved_end=moved_end,
            wanted=before.policy if no_room and before is not None else None,
        )
        labels = self.prompts.look(planned.seq, planned.plan, context)
        return Looked(planned.seq, planned.policy, asked, labels, planned.is_without_room)

    def add(self, looked: Looked, plan: ReusePlan) -> dict[str, int]:
        """Count an admitted prompt; returns its computed tokens by reason."""
        stream = self._stream(looked.seq)
        spans: list[Span] = []
        if stream is not None:
            stream.finish()
            spans = [section.span for section in stream.sections]
        return self.prompts.add(looked.seq, plan, looked.labels, spans)

    def _stream(self, seq: TokenSequence) -> Stream | None:
        if self._tagger is None:
            return None
        stream = self._tagger.stream()
        stream.feed(seq[:])
        return stream


class GeneratorCounter(Watcher):
    """Counts a generator's requests from here on. The counts may be read from any thread."""

    def __init__(self, generator: Generator) -> None:
        self._reader = PromptReader(generator)
        self._lock = threading.Lock()
        self._totals = GeneratorTotals()
        self._looked: dict[int, Looked] = {}
        self._began: dict[int, float] = {}
        generator.watch(self)

    @property
    def prompts(self) -> Prompts:
        """Counts of prompts."""
        return self._reader.prompts

    def totals(self) -> GeneratorTotals:
        """A copy of the counts, all of one moment."""
        with self._lock:
            now = self._totals
            return GeneratorTotals(
                plans_not_cleared=now.plans_not_cleared,
                requests_in_place_only=now.requests_in_place_only,
                requests=now.requests.copy(),
                preemptions=now.preemptions,
                generation_tokens=now.generation_tokens,
                forward_tokens=now.forward_tokens,
                phase_seconds=dict(now.phase_seconds),
                phases=now.phases.copy(),
                first_tokens=list(now.first_tokens),
                first_token_seconds=now.first_token_seconds,
            )

    def submitted(self, request: Request) -> None:
        """Remember when."""
        self._began[request.number] = time.perf_counter()

    def phase(
        self, request: Request, name: Phase, num_tokens: int
    ) -> AbstractContextManager[object]:
        """Measure it."""
        del request
        return self._timed(name, num_tokens)

    def planned(self, request: Request, planned: Planned) -> None:
        """Say why its tokens would be computed, before blocks are evicted for it."""
        if request.number in self._began and request.usage.prompt == 0:
            before = self._looked.get(request.number)
            self._looked[request.number] = self._reader.look(request, planned, before)

    def admitted(self, request: Request, plan: ReusePlan) -> None:
        """Count its prompt."""
        looked = self._looked.pop(request.number)
        self._reader.add(looked, plan)
        with self._lock:
            self._totals.plans_not_cleared += looked.is_not_cleared
            self._totals.requests_in_place_only += looked.is_without_room

    def emitted(self, request: Request) -> None:
        """Count the token."""
        began = self._began.get(request.number)
        with self._lock:
            self._totals.generation_tokens += 1
            if began is not None and len(request.tokens) == 1:
                seconds = time.perf_counter() - began
                self._totals.first_tokens[bisect_left(FIRST_TOKEN_BUCKETS, seconds)] += 1
                self._totals.first_token_seconds += seconds

    def preempted(self, request: Request) -> None:
        """Count it."""
        del request
        with self._lock:
            self._totals.preemptions += 1

    def ended(self, request: Request) -> None:
        """Count how."""
        self._looked.pop(request.number, None)
        self._began.pop(request.number, None)
        with self._lock:
            self._totals.requests[str(request.finish_reason)] += 1

    @contextlib.contextmanager
    def _timed(self, name: Phase, num_tokens: int) -> Iterator[None]:
        began = time.perf_counter()
        is_done = False
        try:
            yield
            is_done = True
        finally:
            seconds = time.perf_counter() - began
            with self._lock:
                totals = self._totals
                totals.phase_seconds[name] = totals.phase_seconds.get(name, 0.0) + seconds
                totals.phases[name] += 1
                if is_done and name in ("compute", "decode"):
                    totals.forward_tokens += num_tokens
