"""SGLang's side of every comparison: one of its radix caches and its allocator.

They are driven as SGLang's scheduler drives them, over its paged allocator with pages of 16. A key
(`RadixKey` over an `array("q")`) is what a `TokenSequence` is here; a call's parameter object is
made inside the call.
"""

from array import array
from collections.abc import Iterable

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from workloads.documents import BLOCK_SIZE, Tokens
from workloads.trees import Tree

from peers.harness import Untyped, expect

RUST = "SGLang Rust"
PYTHON = "SGLang Python"

_EMPTY = torch.empty(0, dtype=torch.int64)


class Theirs:
    """One of SGLang's radix caches and its pool."""

    def __init__(self, cached_tokens: int, core: str) -> None:
        self.pool = PagedTokenToKVPoolAllocator(
            size=-(-cached_tokens // BLOCK_SIZE) * BLOCK_SIZE,
            page_size=BLOCK_SIZE,
            dtype=torch.bfloat16,
            device="cpu",
            kvcache=None,
            need_sort=False,
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.pool,
            page_size=BLOCK_SIZE,
            tree_components=(ComponentType.FULL,),
            tree_core_backend="rust",
        )
        self.cache = UnifiedRadixCache(params) if core == RUST else RadixCache(params)

    def key(self, tokens: Tokens) -> Untyped:
        return RadixKey(array("q", tokens.astype(np.int64).tobytes()))

    def match(self, key: Untyped) -> tuple[Untyped, torch.Tensor]:
        found = self.cache.match_prefix(MatchPrefixParams(key=key))
        node = found.last_device_node
        return node, self.cache.path_device_indices(node)

    def room(self, tokens: int) -> torch.Tensor:
        """Indices for `tokens` tokens, evicted where none are free."""
        missing = tokens - self.pool.available_size()
        if missing > 0:
            self.cache.evict(EvictParams(num_tokens=missing))
        indices: torch.Tensor = self.pool.alloc(tokens)
        return indices

    def insert(self, key: Untyped, indices: torch.Tensor, held: int = 0) -> Untyped:
        """Insert a key with its indices, one per token."""
        return self.cache.insert(InsertParams(key=key, value=indices, prev_prefix_len=held))

    def evict(self, tokens: int) -> int:
        evicted: int = self.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted
        return evicted

    def expect_balance(self) -> None:
        """Check that every index is free or cached, and none is both."""
        free, cached = self.pool.available_size(), self.cache.evictable_size()
        expect(free + cached, self.pool.size, "SGLang's free and cached indices")

    def store(self, tokens: Tokens, start: int = 0) -> None:
        """Insert tokens whose first `start` are cached."""
        held = self.match(self.key(tokens[:start]))[1] if start else _EMPTY
        fresh = self.room(len(tokens) - start)
        self.insert(self.key(tokens), torch.cat([held, fresh]), start)

    def store_all(self, documents: Iterable[Tokens]) -> None:
        """Insert documents, each in one edge."""
        for tokens in documents:
            self.store(tokens)

    def grow(self, tree: Tree) -> None:
        for tokens, start in tree.inserts():
            self.store(tokens, start)

    def turn(self, key: Untyped) -> tuple[int, torch.Tensor]:
        """A whole turn of a request: match, lock, evict and allocate, insert, unlock."""
        node, held = self.match(key)
        lock = self.cache.lock(node)
        row = torch.cat([held, self.room(len(key) - len(held))])
        self.insert(key, row, len(held))
        self.cache.unlock(lock)
        return len(held), row
