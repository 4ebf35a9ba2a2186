"""Serves a trace from kvtrie's own index: exact prefixes, moved runs, and dead blocks first.

`exact` needs ids of blocks alone, and gives the index one token per block. `planned` gives it the
tokens, and reuses what a plan with the default policy reuses: moved runs of the same conversation
where the trace knows conversations, else of all. KV of moved runs is approximate, and stays so.

Both serve one request at a time. `exact` takes about 10 ns per block, `planned` 5 to 40 ns per
token, the more the less is found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import kvtrie

if TYPE_CHECKING:
    from kvtrie.replay.trace import Tokens, Trace, TraceRequest

_SPACE: Final = kvtrie.Namespace(model="replay", salt=kvtrie.SHARED)
_OF_ALL: Final = kvtrie.ReusePolicy(scope="namespace")
_OF_SESSION: Final = kvtrie.ReusePolicy(scope="conversation")
_IN_PLACE: Final = kvtrie.ReusePolicy(approximate=False, partial_blocks=False)


def exact(trace: Trace, num_blocks: int, *, dead_first: bool) -> int:
    """Tokens that an index finds exactly.

    Args:
        trace: The requests.
        num_blocks: Blocks in the pool, at least as many as the longest request caches.
        dead_first: Whether blocks that the trace marks as dead are evicted before others.
    """
    num_blocks = _filled(trace, num_blocks)
    index = kvtrie.RadixIndex(num_blocks, 1, moved_runs=False, seed=0)
    pool = kvtrie.BlockAllocator(num_blocks)
    size = trace.block_size
    hits = 0
    for one in trace.requests:
        seq = kvtrie.TokenSequence(one.cached, _SPACE)
        found = index.lookup(seq).num_tokens
        hits += min(found, one.findable(size))
        fresh = pool.allocate(len(one.cached) - found, evict_from=index)
        done = index.insert(seq, fresh, num_computed=len(seq), start=found, source=kvtrie.COMPUTED)
        pool.free(done.duplicates)
        if dead_first and one.dead:
            index.mark_dead(seq, _whole_blocks(one, size))
    return hits * size


def planned(trace: Trace, num_blocks: int, min_run: int) -> tuple[int, int]:
    """Tokens that plans reuse: exact ones, and approximate ones (moved runs, and what they built).

    Args:
        trace: Requests with tokens.
        num_blocks: As for `exact`.
        min_run: The shortest run that is moved, in tokens.

    Raises:
        TraceError: A request has no tokens.
    """
    num_blocks = _filled(trace, num_blocks)
    index = kvtrie.RadixIndex(num_blocks, trace.block_size, min_run=min_run, seed=0)
    pool = kvtrie.BlockAllocator(num_blocks)
    num_exact = num_approximate = 0
    for one in trace.requests:
        prompt, cached = _tokens(trace, one)
        seq = kvtrie.TokenSequence(prompt, _SPACE)
        whole = kvtrie.TokenSequence(cached, _SPACE)
        policy = _OF_ALL if one.session is None else _OF_SESSION
        plan = index.plan(seq, policy, session=one.session)
        if len(one.cached) - len(plan.blocks) > pool.num_free + index.num_evictable:
            # Sources are pinned. What is in place alone leaves room for the rest of the request.
            plan.release()
            plan = index.plan(seq, _IN_PLACE, session=one.session)
        with plan:
            known = len(plan.blocks)
            fresh = pool.allocate(len(one.cached) - known, evict_from=index)
            done = index.insert(
                whole,
                fresh,
                num_computed=len(one.cached) * trace.block_size,
                start=known * trace.block_size,
                source=plan,
                session=one.session,
            )
            num_exact += plan.num_exact
            num_approximate += plan.num_approximate
        for ids in (done.duplicates, done.surplus, done.freed, index.take_freed()):
            pool.free(ids)
    return num_exact, num_approximate


def _filled(trace: Trace, num_blocks: int) -> int:
    """No more blocks than can ever be in use: a list of free ones takes memory."""
    return min(num_blocks, trace.num_ids + len(trace.longest.cached) + 1)


def _tokens(trace: Trace, one: TraceRequest) -> tuple[Tokens, Tokens]:
    if one.tokens is None:
        raise trace.error(one, "there are no tokens, so nothing can be planned")
    return one.tokens()


def _whole_blocks(one: TraceRequest, size: int) -> list[tuple[int, int]]:
    """Ranges of blocks that are wholly inside the dead ranges of tokens, which touch none."""
    found = []
    for start, end in one.dead:
        first, last = -(-start // size), min(end // size, len(one.cached))
        if first < last:
            found.append((first, last))
    return found
