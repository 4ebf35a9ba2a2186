"""What the cache supports: checked when SGLang makes it, before a request arrives."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from kvtrie.integrations.sglang._reasoning import tagger_of
from kvtrie.integrations.sglang._version import check_version, installed, refuse
from kvtrie.integrations.sglang.cache import KvtrieCache

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

_LOG = logging.getLogger("sglang.kvtrie")

# Settings of SGLang, the values that are supported, and why no others.
_SETTINGS: Final[dict[str, tuple[tuple[object, ...], str]]] = {
    "speculative_algorithm": ((None,), "drafts have KV and keys of their own"),
    "radix_eviction_policy": (("lru",), "kvtrie evicts the least recently used pages"),
    "strip_thinking_cache": (
        (False,),
        "it drops the answer with the reasoning; kvtrie keeps both",
    ),
    "enable_hierarchical_cache": ((False,), "pages in host memory are not in the index"),
    "enable_lmcache": ((False,), "LMCache brings a cache of its own"),
    "enable_flexkv": ((False,), "FlexKV brings a cache of its own"),
    "enable_unified_cache_external_linker": ((False,), "its pages are not in the index"),
    "enable_streaming_session": ((False,), "sessions keep pages outside of the cache"),
    "enable_session_radix_cache": ((False,), "sessions keep pages outside of the cache"),
    "disaggregation_mode": (("null",), "prefill and decode in two engines was not tested"),
    "enable_dp_attention": ((False,), "it was not tested"),
    "tp_size": ((1,), "more than one rank was not tested"),
    "dp_size": ((1,), "more than one replica in a server was not tested"),
    "pp_size": ((1,), "pipeline stages were not tested"),
    "attn_cp_size": ((1,), "context parallelism was not tested"),
    "disable_radix_cache": ((False,), "there is no cache then"),
}


def make(context: TreeCacheBuildContext) -> KvtrieCache:
    """Check what SGLang was started with, and make its cache.

    Raises:
        SGLangUnsupportedError: Something is not supported; the message names it.
    """
    check_version()
    for name, (supported, why) in _SETTINGS.items():
        found: Any = getattr(context.server_args, name)
        if found not in supported:
            refuse(f"{name}={found!r} is not supported: {why}")
    for name in ("is_hybrid_swa", "is_hybrid_ssm", "is_dsa"):
        if getattr(context, name):
            refuse(f"models with {_KINDS[name]} are not supported: all layers need full attention")
    params = context.params
    allocator = params.token_to_kv_pool_allocator
    if allocator.page_size != params.page_size:
        refuse(
            f"pages of {allocator.page_size} slots in the pool and {params.page_size} in the cache "
            "are not supported"
        )
    num_pages = allocator.size // params.page_size
    args = context.server_args
    cache = KvtrieCache(params, num_pages, args.model_path, tagger_of(args))
    _LOG.info(
        "kvtrie: exact prefix cache of %d pages of %d tokens, in SGLang %s; nothing is moved",
        num_pages,
        params.page_size,
        installed(),
    )
    return cache


_KINDS: Final = {
    "is_hybrid_swa": "sliding windows",
    "is_hybrid_ssm": "states",
    "is_dsa": "sparse attention",
}
