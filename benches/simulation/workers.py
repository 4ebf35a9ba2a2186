"""A worker: a pool, the prompts that wait for it, and events of what it stores and removes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvtrie.replay import Trace, TraceRequest

    Tokens = NDArray[np.int64]

SPACE = kvtrie.Namespace(model="simulate", salt=kvtrie.SHARED)
# No block of a trace has this number. It is never cached.
_REST = np.uint32(2**32 - 1)


@dataclass
class Job:
    """A request on its way: its prompt, with its reply, and all of their ids.

    `expected` is what the router thinks will be computed.
    """

    one: TraceRequest
    arrived: float
    prompt: kvtrie.TokenSequence
    whole: kvtrie.TokenSequence
    ids: NDArray[np.uint32]
    expected: int = 0
    began: float = 0.0
    exact: int = 0
    moved: int = 0

    @property
    def computed(self) -> int:
        return self.one.num_tokens - self.exact - self.moved


class Texts:
    """A trace's requests as sequences of tokens, or of one number per block where it shows none."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.shows_tokens = trace.shows_tokens
        self.block_size = trace.block_size if self.shows_tokens else 1
        # Tokens of the trace in a token of the sequences.
        self.scale = trace.block_size // self.block_size

    def job(self, one: TraceRequest, arrived: float) -> Job:
        if one.tokens is not None and self.shows_tokens:
            prompt, whole = one.tokens()
        else:
            whole = np.append(one.cached, _REST)
            # The last block is computed: it is not full, or has the prompt's last token.
            prompt = whole[: one.findable(self.trace.block_size) + 1]
        seqs = kvtrie.TokenSequence(prompt, SPACE), kvtrie.TokenSequence(whole, SPACE)
        return Job(one, arrived, *seqs, ids=whole)

    def policy(self, one: TraceRequest) -> kvtrie.ReusePolicy:
        if not self.shows_tokens:
            return kvtrie.EXACT_ONLY
        return kvtrie.ReusePolicy(scope="namespace" if one.session is None else "conversation")

    def dead(self, one: TraceRequest) -> list[tuple[int, int]]:
        """Ranges of what the template drops, in tokens of the sequences."""
        most = len(one.cached) * self.block_size
        ranges = [(-(-a // self.scale), min(b // self.scale, most)) for a, b in one.dead]
        return [(first, last) for first, last in ranges if first < last]


class Worker:
    """A pool, the prompts that wait for it, and events of what it stores and removes."""

    def __init__(
        self, texts: Texts, num_blocks: int, publish: Callable[[bytes, bool], object]
    ) -> None:
        self.texts = texts
        self.num_blocks = num_blocks
        self._publish = publish
        self.queue: deque[Job] = deque()
        # How many prompts in the queue have each block, whose id says what is before it, too.
        self._queued: dict[int, int] = {}
        self.outstanding = 0
        self.computed = 0
        self.life = 0
        self._plan: kvtrie.ReusePlan | None = None
        self.clear()

    def clear(self) -> None:
        """An empty pool; events say nothing of it."""
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.release()
        size, moved = self.texts.block_size, self.texts.shows_tokens
        self.index = kvtrie.RadixIndex(self.num_blocks, size, moved_runs=moved, seed=0)
        self._free = kvtrie.BlockAllocator(self.num_blocks)
        # The hash under which each block was published, and whether as approximate.
        self._hashes = np.full(self.num_blocks, -1, np.int64)
        self._is_approximate = np.zeros(self.num_blocks, bool)

    def exact(self, job: Job) -> int:
        """Tokens that the pool holds from position 0."""
        found = self.index.lookup(job.prompt, keep_last=1, touch=False).num_tokens
        return found * self.texts.scale

    def put(self, job: Job) -> None:
        """A prompt has been sent here."""
        self.queue.append(job)
        self.outstanding += job.expected
        self._count(job, 1)

    def sent(self, ids: list[int]) -> int:
        """Blocks that a prompt has in common with one that has not ended here."""
        return next((at for at, one in enumerate(ids) if one not in self._queued), len(ids))

    def _count(self, job: Job, change: int) -> None:
        for one in job.one.prompt.tolist():
            left = self._queued.pop(one, 0) + change
            if left:
                self._queued[one] = left

    def reusable(self, job: Job) -> tuple[int, int]:
        """Exact tokens and those in moved runs that a plan would reuse now."""
        if not self.texts.shows_tokens:
            return self.exact(job), 0
        policy = self.texts.policy(job.one)
        saved = self.index.explain(job.prompt, policy, session=job.one.session).would_save
        return saved.exact, saved.approximate

    def begin(self, now: float) -> Job:
        """Plan the next prompt, and pin what it reuses."""
        job = self.queue[0]
        job.began = now
        texts, one = self.texts, job.one
        plan = self.index.plan(job.prompt, texts.policy(one), session=one.session)
        needed = len(one.cached) - len(plan.blocks)
        if needed > self._free.num_free + self.index.num_evictable:
            # Sources are pinned. What is in place alone leaves room for the rest of the request.
            plan.release()
            in_place = kvtrie.ReusePolicy(approximate=False, partial_blocks=False)
            plan = self.index.plan(job.prompt, in_place, session=one.session)
        self._plan = plan
        job.exact = plan.num_exact * texts.scale
        job.moved = plan.num_approximate * texts.scale
        return job

    def end(self, now: float) -> Job:
        """Cache the prompt that was begun, with its reply, and publish what that changed."""
        plan, self._plan = self._plan, None
        if plan is None:
            message = "a prompt ended that was not begun"
            raise RuntimeError(message)
        job = self.queue.popleft()
        self.outstanding -= job.expected
        self.computed += job.computed
        self._count(job, -1)
        one, size = job.one, self.texts.block_size
        with plan:
            known = len(plan.blocks)
            needed = len(one.cached) - known
            gone = [self.index.evict(max(0, needed - self._free.num_free))]
            self._free.free(gone[0])
            fresh = self._free.allocate(needed)
            done = self.index.insert(
                job.whole,
                fresh,
                num_computed=len(one.cached) * size,
                start=known * size,
                source=plan,
                session=one.session,
            )
        for ids in (done.duplicates, done.surplus, done.freed, self.index.take_freed()):
            self._free.free(ids)
            gone.append(ids)
        dead = self.texts.dead(one)
        if dead:
            self.index.mark_dead(job.whole, dead)
        self._say(job, known, done.num_exact // size, done.blocks, np.concatenate(gone), now)
        return job

    def _say(
        self,
        job: Job,
        known: int,
        num_exact: int,
        blocks: NDArray[np.int32],
        gone: NDArray[np.int32],
        now: float,
    ) -> None:
        # Ids that were offered and not taken had no hash.
        left = gone[self._hashes[gone] >= 0]
        are_approximate = self._is_approximate[left]
        is_new = np.isin(blocks, left) | (self._hashes[blocks] < 0)
        places = known + np.flatnonzero(is_new)
        for is_approximate in (False, True):
            hashes = self._hashes[left[are_approximate == is_approximate]].tolist()
            events = [{"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}]
            mine = places[(places >= num_exact) == is_approximate]
            runs = np.split(mine, np.flatnonzero(np.diff(mine) > 1) + 1)
            stored = [self._stored(job, run, is_approximate) for run in runs if len(run)]
            events = (events if hashes else []) + stored
            if events:
                self._publish(msgpack.packb([now, events, 0]), is_approximate)
        self._hashes[left] = -1
        ids = blocks[is_new]
        self._hashes[ids] = job.one.cached[places]
        self._is_approximate[ids] = places >= num_exact

    def _stored(self, job: Job, places: Tokens, is_approximate: bool) -> dict[str, Any]:
        first, last = int(places[0]), int(places[-1]) + 1
        size, names = self.texts.block_size, job.one.cached
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": names[first:last].tolist(),
            "parent_block_hash": int(names[first - 1]) if first else None,
            "token_ids": job.ids[first * size : last * size].tolist(),
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
        }
        if is_approximate:
            many = {"classes": ["moved"] * len(places), "hops": [1] * len(places)}
            event |= {"type": "ApproximateBlockStored", "position": first * size, **many}
        return event
