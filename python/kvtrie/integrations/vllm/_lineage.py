"""Hashes for blocks with approximate KV, so that vLLM never takes them for exact ones.

vLLM caches a block under a hash chained over all tokens before it, whoever wrote its KV. After
approximate KV the chain therefore continues from a hash that no tokens have. Requests that may use
that KV get the same chain, and find it in vLLM's own cache.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from kvtrie.integrations.vllm._vllm import BlockHash, get_block_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

_PURPOSE: Final = b"kvtrie: approximate KV"


def start(request: Request, block: int) -> None:
    """Start a separate hash chain at ``block``, the first with an approximate token."""
    hashes = request.block_hashes
    plain = hashes[block]
    own = hashlib.blake2b(plain, key=_PURPOSE, digest_size=min(len(plain), 64))
    own.update(request.request_id.encode())
    del hashes[block:]
    hashes.append(BlockHash(own.digest()))
    request.update_block_hashes()


def covers(request: Request, block: int) -> bool:
    """Whether a block is full: only full blocks have a hash to replace."""
    return block < len(request.block_hashes)


def join(request: Request, blocks: Sequence[KVCacheBlock]) -> int | None:
    """Chain a request that was not looked up yet through the cached blocks of its first tokens.

    Returns:
        The first block whose lineage differs from plain tokens; None if there is none, and nothing
        was changed.
    """
    hashes, first = request.block_hashes, None
    labels: list[BlockHash] = []
    for number, (block, plain) in enumerate(zip(blocks, hashes, strict=False)):
        found = None if block.block_hash is None else get_block_hash(block.block_hash)
        if found is not None and found != plain:
            first = number if first is None else first
            labels.append(found)
        elif first is not None:
            # Of an exact block: if it leaves before the request begins, the request would compute
            # this block after approximate KV, and keep it under the hash of plain tokens.
            break
    if first is None:
        return None
    hashes[first:] = labels
    request.update_block_hashes()
    return first
