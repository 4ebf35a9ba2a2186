"""Routers, by what they know of the workers' caches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

import kvtrie
from simulation.workers import SPACE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulation.workers import Job, Tokens, Worker

KEY = b"sixteen bytes .."
MOST_WORKERS = 1024


class Router(ABC):
    """What a router knows of the workers' caches.

    `promises` says that its exact tokens are those that a worker holds from position 0,
    `counts_sent` that it counts prompts which a worker has not ended, too.
    """

    promises = True
    counts_sent = False

    @abstractmethod
    def claims(self, job: Job) -> tuple[Tokens, Tokens]:
        """Exact and moved tokens of each worker."""

    def sent(self, job: Job, worker: int) -> None:  # noqa: B027 - not all routers note it
        """A prompt was sent to a worker."""

    def heard(self, worker: int, payload: bytes, *, is_approximate: bool) -> None:  # noqa: B027 - likewise
        """A worker has published a batch of events."""

    def restarted(self, worker: int) -> None:  # noqa: B027 - likewise
        """A worker has restarted."""


class PrefixOnly(Router):
    """Knows the blocks of the prompts that it sent, the latest of as many as a pool has."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._size = workers[0].texts.trace.block_size
        self._num_blocks = workers[0].num_blocks
        self._trees = [self._tree() for _ in workers]

    def _tree(self) -> tuple[kvtrie.RadixIndex, kvtrie.BlockAllocator]:
        index = kvtrie.RadixIndex(self._num_blocks, 1, moved_runs=False, seed=0)
        return index, kvtrie.BlockAllocator(self._num_blocks)

    def claims(self, job: Job) -> tuple[Tokens, Tokens]:
        seq = kvtrie.TokenSequence(job.one.prompt, SPACE)
        most = job.one.findable(self._size)
        found = [min(tree.lookup(seq, touch=False).num_tokens, most) for tree, _ in self._trees]
        return np.array(found, np.int64) * self._size, np.zeros(len(found), np.int64)

    def sent(self, job: Job, worker: int) -> None:
        index, free = self._trees[worker]
        seq = kvtrie.TokenSequence(job.one.prompt, SPACE)
        found = index.lookup(seq).num_tokens
        fresh = free.allocate(len(seq) - found, evict_from=index)
        index.insert(seq, fresh, num_computed=len(seq), start=found, source=kvtrie.COMPUTED)

    def restarted(self, worker: int) -> None:
        self._trees[worker] = self._tree()


class ByEvents(Router):
    """Knows what a `KvIndexer` has from the workers' events."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._texts = texts = workers[0].texts
        self.index = kvtrie.KvIndexer(
            texts.block_size, KEY, moved_runs=texts.shows_tokens, max_workers=MOST_WORKERS
        )
        self._numbers = [self.index.add_worker(f"{at}", SPACE) for at in range(len(workers))]

    def claims(self, job: Job) -> tuple[Tokens, Tokens]:
        policy = self._texts.policy(job.one)
        found = self.index.find_matches(job.prompt, policy, keep_last=1)
        scale = self._texts.scale
        return found.exact.astype(np.int64) * scale, found.possible.astype(np.int64) * scale

    def heard(self, worker: int, payload: bytes, *, is_approximate: bool) -> None:
        self.index.apply(self._numbers[worker], payload, approximate=is_approximate)

    def restarted(self, worker: int) -> None:
        # As `kvtrie.cluster.subscribe` does at another incarnation.
        self.index.clear_worker(self._numbers[worker])


class ByEventsAndSent(ByEvents):
    """Counts what it has sent, until events say what has become of it."""

    counts_sent = True


class Oracle(Router):
    """Asks each worker for a plan, which also counts parts of blocks, and blocks after holes."""

    promises = False
    counts_sent = True

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers

    def claims(self, job: Job) -> tuple[Tokens, Tokens]:
        found = np.array([one.reusable(job) for one in self._workers], np.int64)
        return found[:, 0], found[:, 1]


ROUTERS: dict[str, type[PrefixOnly | ByEvents | Oracle] | None] = {
    "round robin": None,
    "prefix only": PrefixOnly,
    "KvIndexer": ByEvents,
    "KvIndexer and sent": ByEventsAndSent,
    "oracle": Oracle,
}
