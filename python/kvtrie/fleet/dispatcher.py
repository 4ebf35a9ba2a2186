"""Chooses a worker for a prompt: by what is cached, and by what was sent and has not ended."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Self

import numpy as np

from kvtrie._core import EXACT_ONLY, KvIndexer, KvTrieError, ReusePolicy, TokenSequence
from kvtrie.router.arguments import instance, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    import numpy.typing as npt

    from kvtrie._core import Namespace


class NoWorkerError(KvTrieError):
    """None of the workers that were asked for is in the index."""


@dataclass
class _Worker:
    """What was sent to a worker and has not ended."""

    outstanding: int = 0  # tokens that it is expected to compute
    requests: int = 0
    last: int = 0  # when it was chosen last


@dataclass(eq=False)
class _Outstanding:
    """What is counted of a request until it has ended."""

    worker: str
    expected: int
    prompt: tuple[Namespace, npt.NDArray[np.uint32]] | None


@dataclass(eq=False)
class Sent:
    """A request that was sent to a worker. As a context manager it ends with the block.

    Attributes:
        worker: The worker's name.
        exact: Tokens that it holds, or will hold when an earlier request ends there.
        moved: Tokens after these that its own plan moves from elsewhere in its cache, as far as
            that is promised (`OverlapScores.moved`): also of the last message, unless
            `Dispatcher.choose` is given where it begins.
        possible: Tokens that it may have elsewhere in its cache, those of `moved` among them.
        uncertain: Whether events of the worker may be missing. Then `exact` counts earlier requests
            only.
    """

    worker: str
    exact: int
    moved: int
    possible: int
    uncertain: bool
    _on_computed: Callable[[], None] = field(repr=False)
    _on_end: Callable[[], None] = field(repr=False)

    def computed(self) -> None:
        """The prompt has been computed: the first piece of the reply has come."""
        self._on_computed()

    def end(self) -> None:
        """The request has ended, however it did. A second call changes nothing."""
        self._on_end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()


class Dispatcher:
    """Chooses the worker with the least to compute, its queue included.

    That is the least prompt - exact + load_weight * outstanding, in tokens. Outstanding is what a
    worker is expected to compute of prompts that were sent and of which no reply has come. Exact is
    what the worker holds, or what the prompt has in common with such a prompt, up to the first item
    of either, if that is more. Of workers that are uncertain only the second counts. Ties go to
    more exact tokens, to more that are promised to be moved, to more that may be, to a shorter
    queue, to fewer requests, then to the worker that was chosen longest ago.

    All calls may be made from any thread.

    Args:
        index: The index.
        policy: With approximate reuse, moved tokens are asked for.
        load_weight: How much a token in the queue counts.
        moved_weight: How much a moved token that is promised counts as exact, 0 to 1. The index
            knows of none unless it was told how workers plan (`KvIndexer.set_policy`).
        max_tracked_tokens: Most tokens of prompts that are kept until they are computed; the load
            of those beyond counts all the same.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is outside its limits.

    Example:
        >>> index = kvtrie.KvIndexer(2, b"a secret of yours")
        >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
        >>> workers = [index.add_worker(name, space) for name in ("decode-0", "decode-1")]
        >>> dispatcher = kvtrie.fleet.Dispatcher(index)
        >>> first = dispatcher.choose(kvtrie.TokenSequence(range(100), space))
        >>> dispatcher.choose(kvtrie.TokenSequence(range(200, 300), space)).worker
        'decode-1'
        >>> first.end()
    """

    def __init__(
        self,
        index: KvIndexer,
        *,
        policy: ReusePolicy | None = None,
        load_weight: float = 1.0,
        moved_weight: float = 0.0,
        max_tracked_tokens: int = 1 << 24,
    ) -> None:
        call = "Dispatcher"
        if not issubclass(type(index), KvIndexer):
            msg = f"{call}: index is {index!r}, not a KvIndexer"
            raise TypeError(msg)
        if policy is not None:
            instance(call, "policy", policy, ReusePolicy, "a ReusePolicy")
        whole(call, "max_tracked_tokens", max_tracked_tokens, 0, 1 << 32)
        for name, value, most in (
            ("load_weight", load_weight, 1e6),
            ("moved_weight", moved_weight, 1.0),
        ):
            instance(call, name, value, (int, float), "a number")
            if not 0 <= value <= most:
                msg = f"{call}: {name} is {value}; it must be in [0, {most}]"
                raise ValueError(msg)
        self._index = index
        self._policy = EXACT_ONLY if policy is None else policy
        self._load_weight = load_weight
        self._moved_weight = moved_weight
        self._max_tracked_tokens = max_tracked_tokens
        self._workers: dict[str, _Worker] = {}
        # Prompts that were sent and not computed, by worker.
        self._tracked: dict[str, list[_Outstanding]] = {}
        self._jobs: set[_Outstanding] = set()
        self._tracked_tokens = 0
        self._turn = 0
        self._lock = threading.Lock()

    @property
    def moves(self) -> bool:
        """Whether moved tokens are asked for."""
        return self._policy.approximate

    def choose(
        self,
        seq: TokenSequence,
        among: Iterable[str] | None = None,
        *,
        session: str | None = None,
        moved_end: int | None = None,
    ) -> Sent:
        """Choose a worker, and count the prompt as sent there.

        Args:
            seq: The prompt.
            among: Names of the workers that may be chosen, or None for all of the index. Names that
                the index does not have are left out.
            session: The id of the prompt's conversation, as `KvIndexer.find_matches` takes it.
            moved_end: Where the last message begins, likewise.

        Returns:
            What was chosen. Call its `computed` and `end`.

        Raises:
            NoWorkerError: There is none.
            TypeError: `seq` is not a `TokenSequence`.
            ValueError: A session has no or more than 256 bytes, or `moved_end` is not in the
                prompt.
        """
        found = self._index.find_matches(
            seq, self._policy, keep_last=1, session=session, moved_end=moved_end
        )
        names = found.workers
        allowed = set(names) if among is None else set(among)
        columns = [at for at, name in enumerate(names) if name in allowed]
        if not columns:
            asked = "any" if among is None else f"one of {len(allowed)}"
            msg = f"Dispatcher.choose: {asked} was asked for; the index has {len(names)} workers"
            raise NoWorkerError(msg)
        exact, moved, all_moved = found.exact, found.moved, found.possible
        uncertain = found.uncertain
        space, items, length = seq.namespace, seq.items, len(seq)
        # Placeholders of an item do not say what it is.
        tokens = seq[: items[0].start if items else length]
        with self._lock:
            ranks = []
            for at in columns:
                known = self._workers.get(names[at], _Worker())
                trusted = not uncertain[at]
                cached = max(
                    int(exact[at]) if trusted else 0,
                    # An engine computes the last token in any case.
                    self._common(names[at], space, tokens[: max(0, length - 1)]),
                )
                # Of exact and moved tokens together is promised that they are reused.
                promised = max(0, int(exact[at]) + int(moved[at]) - cached) if trusted else 0
                possible = min(int(all_moved[at]) if trusted else 0, length - cached)
                expected = int(length - cached - self._moved_weight * promised)
                cost = expected + self._load_weight * known.outstanding
                busy = (known.outstanding, known.requests, known.last)
                order = (cost, -cached, -promised, -possible, *busy)
                ranks.append((order, at, cached, promised, possible, expected))
            _, at, cached, promised, possible, expected = min(ranks)
            job = _Outstanding(names[at], expected, (space, tokens))
            self._note(job, len(tokens), names)
        return Sent(
            names[at],
            cached,
            promised,
            possible,
            bool(uncertain[at]),
            partial(self._computed, job),
            partial(self._ended, job),
        )

    def outstanding(self, worker: str) -> tuple[int, int]:
        """What was sent to a worker.

        Returns:
            Tokens that it is expected to compute, and requests that have not ended.
        """
        with self._lock:
            known = self._workers.get(worker, _Worker())
            return known.outstanding, known.requests

    def _note(self, job: _Outstanding, num_tokens: int, names: Sequence[str]) -> None:
        self._turn += 1
        if job.worker not in self._workers:
            # Where workers come and go, those that are gone are not kept.
            for gone in self._workers.keys() - set(names):
                if not self._workers[gone].requests:
                    del self._workers[gone]
        known = self._workers.setdefault(job.worker, _Worker())
        known.outstanding += job.expected
        known.requests += 1
        known.last = self._turn
        self._jobs.add(job)
        if self._tracked_tokens + num_tokens > self._max_tracked_tokens:
            job.prompt = None
            return
        self._tracked_tokens += num_tokens
        self._tracked.setdefault(job.worker, []).append(job)

    def _common(self, worker: str, space: Namespace, tokens: npt.NDArray[np.uint32]) -> int:
        """Tokens in whole blocks that a prompt has in common with one that is being computed."""
        size = self._index.block_size
        most = 0
        for job in self._tracked.get(worker, ()):
            if job.prompt is None or job.prompt[0] != space:
                continue
            other = job.prompt[1]
            end = min(len(tokens), len(other)) // size * size
            if end > most:
                most = max(most, _same(tokens, other, end) // size * size)
        return most

    def _computed(self, job: _Outstanding) -> None:
        with self._lock:
            if job in self._jobs:
                self._forget_prompt(job)

    def _ended(self, job: _Outstanding) -> None:
        with self._lock:
            if job not in self._jobs:
                return
            self._jobs.remove(job)
            self._forget_prompt(job)
            self._workers[job.worker].requests -= 1

    def _forget_prompt(self, job: _Outstanding) -> None:
        self._workers[job.worker].outstanding -= job.expected
        job.expected = 0
        if job.prompt is not None:
            self._tracked_tokens -= len(job.prompt[1])
            job.prompt = None
            self._tracked[job.worker].remove(job)
            if not self._tracked[job.worker]:
                del self._tracked[job.worker]


def _same(one: npt.NDArray[np.uint32], other: npt.NDArray[np.uint32], end: int) -> int:
    """The length of the common beginning, at most `end`. Costs as much as that is long."""
    at, step = 0, 64
    while at < end:
        until = min(at + step, end)
        differs = np.flatnonzero(one[at:until] != other[at:until])
        if len(differs):
            return at + int(differs[0])
        at, step = until, 2 * step
    return end
