"""Processor time of what SGLang's scheduler asks of its cache: kvtrie's, and its own in Rust.

Both live in this process, over SGLang's allocators, and get the same keys and tensors in turn. A
request of N tokens finds all but its last 64, locks them, evicts 64 tokens from a full pool,
inserts, and unlocks. The other leaves are documents of 64 tokens. Prompts are stored in one piece,
or in several with documents between them, as turns of a conversation are. Times are medians of this
thread's processor time. It runs in the environment of ``make test-sglang``.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from array import array
from random import Random
from statistics import median
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvtrie.integrations.sglang.cache import KvtrieCache

NEW = 64
PROMPTS = 4
CALLS = ("match", "lock", "evict", "insert", "unlock")


class Side:
    def __init__(self, page_size: int, num_tokens: int, mine: bool) -> None:
        common = {"dtype": torch.bfloat16, "device": "cpu", "kvcache": None, "need_sort": False}
        if page_size == 1:
            self.pool = TokenToKVPoolAllocator(num_tokens, **common)
        else:
            self.pool = PagedTokenToKVPoolAllocator(num_tokens, page_size=page_size, **common)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.pool,
            page_size=page_size,
            tree_components=(ComponentType.FULL,),
            tree_core_backend="rust",
        )
        self.cache: Any
        if mine:
            self.cache = KvtrieCache(params, num_tokens // page_size, "model")
        else:
            self.cache = UnifiedRadixCache(params)

    def store(self, ids: array[int], before: torch.Tensor | None = None) -> torch.Tensor:
        """Store a prompt, whose first slots may be stored; returns all of its slots."""
        known = 0 if before is None else len(before)
        slots: torch.Tensor = self.pool.alloc(len(ids) - known)
        if before is not None:
            slots = torch.cat([before, slots])
        self.cache.insert(InsertParams(key=RadixKey(ids), value=slots, prev_prefix_len=known))
        return slots

    def request(self, ids: array[int]) -> list[int]:
        """Nanoseconds of each call."""
        cache, clock = self.cache, time.thread_time_ns
        times = [clock()]
        found = cache.match_prefix(MatchPrefixParams(key=RadixKey(ids)))
        held = cache.path_device_indices(found.last_device_node)
        times.append(clock())
        lock = cache.lock(found.last_device_node)
        times.append(clock())
        missing = len(ids) - len(held)
        evicted = cache.evict(EvictParams(num_tokens=missing)).num_tokens_evicted
        times.append(clock())
        if (len(held), evicted) != (len(ids) - NEW, NEW):
            msg = f"{type(cache).__name__} found {len(held)} of {len(ids)}, evicted {evicted}"
            raise RuntimeError(msg)
        row = torch.cat([held, self.pool.alloc(missing)])
        before = clock()
        cache.insert(InsertParams(key=RadixKey(ids), value=row, prev_prefix_len=len(held)))
        after = clock()
        cache.unlock(lock)
        times.append(clock())
        first = [times[n + 1] - times[n] for n in range(3)]
        return [*first, after - before, times[-1] - after]


def measure(
    page_size: int, length: int, leaves: int, pieces: int, rounds: int, *, alone: bool = False
) -> list[list[float]]:
    """Medians in microseconds of each call: kvtrie's, and SGLang's if it is not alone."""
    rng = Random(1)

    def draw(count: int) -> array[int]:
        return array("q", (rng.randrange(2**31) for _ in range(count)))

    prompts = [draw(length - NEW) for _ in range(PROMPTS)]
    documents = [draw(NEW) for _ in range(leaves)]
    num_tokens = sum(map(len, prompts)) + NEW * leaves
    sides = [Side(page_size, num_tokens, mine) for mine in ((True,) if alone else (True, False))]
    for side in sides:
        # The oldest are evicted: documents, of which the last lie between the pieces.
        first = leaves - PROMPTS * (pieces - 1)
        for ids in documents[:first]:
            side.store(ids)
        between = iter(documents[first:])
        for ids in prompts:
            slots = None
            for piece in range(1, pieces + 1):
                if piece > 1:
                    side.store(next(between))
                end = len(ids) * piece // pieces // page_size * page_size
                slots = side.store(ids[:end], slots)
    del documents
    gc.collect()
    gc.disable()
    times: list[list[list[int]]] = [[] for _ in sides]
    for number in range(rounds):
        ids = prompts[number % PROMPTS] + draw(NEW)
        for which in range(len(sides)) if number % 2 else reversed(range(len(sides))):
            times[which].append(sides[which].request(ids))
    gc.enable()
    warm = PROMPTS
    return [[median(one) / 1000 for one in zip(*each[warm:], strict=True)] for each in times]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="one row, to see that it runs")
    parser.add_argument("--alone", action="store_true", help="kvtrie alone, by leaves")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = (
        [(16, 1024, 1000, 1)]
        if options.quick
        else [
            *((page, length, 20_000, 1) for page in (1, 16) for length in (1024, 8192, 32_768)),
            *((page, 8192, 20_000, 16) for page in (1, 16)),
            *((page, 8192, leaves, 1) for page in (1, 16) for leaves in (1000, 100_000)),
        ]
    )
    if options.alone:
        rows = [(page, 8192, count, 1) for page in (1, 16) for count in (1000, 20_000, 100_000)]
    out = sys.stdout.write
    out("| page, tokens, leaves, pieces | " + " | ".join(CALLS) + " | all five |\n")
    out("|---" * (len(CALLS) + 2) + "|\n")
    for page_size, length, leaves, pieces in rows:
        found = measure(page_size, length, leaves, pieces, options.rounds, alone=options.alone)
        columns = zip(*([*one, sum(one)] for one in found), strict=True)
        cells = [
            " / ".join(f"{one:.0f}" for one in times)
            + "".join(f" ({theirs / times[0]:.1f}x)" for theirs in times[1:])
            for times in columns
        ]
        out(f"| {page_size}, {length:,}, {leaves:,}, {pieces} | " + " | ".join(cells) + " |\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
