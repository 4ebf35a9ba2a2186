"""vLLM's side of every comparison: its KV cache manager, and requests that hash their blocks.

The manager is driven as vLLM's scheduler drives it: a `Request` hashes its blocks when it is made,
then `get_computed_blocks`, `allocate_slots` (which evicts, caches and counts references) and
`free`. Hashes are xxHash, the fastest that vLLM offers, or its default, SHA-256.
"""

from collections.abc import Iterable
from itertools import count

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from workloads.documents import BLOCK_SIZE, Tokens

from peers.harness import Untyped

XXHASH = "vLLM"
SHA256 = "vLLM, SHA-256"


class Theirs:
    """vLLM's manager of a pool with one group of full-attention layers."""

    def __init__(self, cached_tokens: int, peer: str = XXHASH) -> None:
        hashing = get_hash_fn_by_name("xxhash" if peer == XXHASH else "sha256")
        init_none_hash(hashing)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, hashing)
        self._sampling = SamplingParams(max_tokens=1)
        self._names = map(str, count())
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        # One more block: the pool keeps block 0 for itself.
        config = KVCacheConfig(
            num_blocks=-(-cached_tokens // BLOCK_SIZE) + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = KVCacheManager(
            config,
            max_model_len=1 << 20,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
        )

    def request(self, tokens: list[int]) -> Untyped:
        return Request(next(self._names), tokens, self._sampling, None, block_hasher=self._hasher)

    def match(self, request: Untyped) -> list[int]:
        ids: list[int] = self.manager.get_computed_blocks(request)[0].get_block_ids()[0]
        return ids

    def match_tokens(self, tokens: list[int]) -> list[int]:
        return self.match(self.request(tokens))

    def allocate(self, request: Untyped) -> tuple[int, list[int]]:
        """Look up, take references, allocate what is missing and cache it."""
        manager = self.manager
        blocks, found, _ = manager.get_computed_blocks(request)
        manager.allocate_slots(request, request.num_tokens - found, found, blocks)
        request.num_computed_tokens = request.num_tokens
        return found, manager.get_block_ids(request.request_id)[0]

    def turn(self, request: Untyped) -> tuple[int, list[int]]:
        """A whole turn of a request."""
        answer = self.allocate(request)
        self.manager.free(request)
        return answer

    def turn_tokens(self, tokens: list[int]) -> tuple[int, list[int]]:
        return self.turn(self.request(tokens))

    def store_all(self, documents: Iterable[Tokens]) -> None:
        """Cache documents."""
        for tokens in documents:
            self.turn(self.request(tokens.tolist()))
