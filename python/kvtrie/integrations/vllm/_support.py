"""Checks at start-up which vLLM, models and settings the connector works with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtrie._core import UnsupportedRopeError
from kvtrie.integrations.vllm._model import check_kv_dtype, check_stored_dtype, is_float
from kvtrie.integrations.vllm._others import check_around
from kvtrie.integrations.vllm._version import UnsupportedError, check_version, refuse
from kvtrie.integrations.vllm._vllm import (
    FullAttentionSpec,
    KVConnectorBase_V1,
    MLAAttentionSpec,
    SlidingWindowSpec,
    current_platform,
    get_current_vllm_config_or_none,
    probe,
)
from kvtrie.models.kv_types import quantized_fields
from kvtrie.rope import RopeSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["UnsupportedError", "check", "check_others", "check_pool", "check_version"]

# Classes below these keep something else: a part of the tokens, sinks, or hidden states.
_WHOLE: Final = (FullAttentionSpec, MLAAttentionSpec)


def check(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    *,
    moves: bool = True,
    is_exact: bool = False,
    has_modes: bool = True,
) -> None:
    """Check everything that is known at start-up.

    ``moves``: whether KV may be approximate. ``is_exact``: whether the mode is exact.
    ``has_modes``: whether the connector could do without moving.
    """
    check_version(moves=moves, has_modes=has_modes)
    probe()
    if moves and has_modes and len(kv_cache_config.kv_cache_groups) > 1:
        _check_windows(vllm_config, kv_cache_config)
    else:
        _check_groups(kv_cache_config, is_exact=is_exact, has_modes=has_modes)
    if not is_exact:
        check_kv_dtype(_kv_dtype(vllm_config), has_modes=has_modes)
    _check_settings(vllm_config)


def _check_groups(kv_cache_config: KVCacheConfig, *, is_exact: bool, has_modes: bool) -> None:
    """Refuse KV that does not depend on exactly all tokens before it, or is not per token."""
    groups = kv_cache_config.kv_cache_groups
    if is_exact and len(groups) > 1:
        if not any(is_whole(one.kv_cache_spec) for one in groups):
            kinds = ", ".join(sorted({type(one.kv_cache_spec).__name__ for one in groups}))
            refuse(f"the model has no group of full attention ({kinds}), and exact mode orders one")
        return
    if len(groups) != 1:
        refuse(
            f"the model keeps {len(groups)} groups of KV blocks (sliding windows, state spaces, "
            "or draft layers next to full attention), and one group of full attention is supported"
            + (': set "mode": "exact", which works with these models' if has_modes else "")
        )
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, FullAttentionSpec) or type(spec) not in _WHOLE:
        kind = type(spec).__name__
        refuse(f"the model's KV is {kind}; full attention (MHA, GQA, MQA, MLA) is supported")
    if spec.sliding_window is not None:
        refuse(f"the model has layers with a sliding window of {spec.sliding_window} tokens")
    if spec.attention_chunk_size is not None:
        refuse(f"the model has layers with chunked attention ({spec.attention_chunk_size} tokens)")
    if spec.non_causal:
        refuse("the model's attention is not causal, so KV depends on more than the prefix")
    if spec.tokens_per_state != 1:
        refuse("the model's KV cache compresses several tokens into one state")
    if groups[0].is_eagle_group:
        refuse("draft layers (EAGLE, MTP) share its KV blocks: turn speculative decoding off")


def _check_windows(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse to move KV between blocks of several groups, unless all are copied alike."""
    groups = kv_cache_config.kv_cache_groups
    instead = ': set "mode": "exact", which works with these models'
    for one in groups:
        spec = one.kv_cache_spec
        if not is_whole(spec) and window_of(spec) is None:
            refuse(
                f"the model has groups of KV blocks of the kind {type(spec).__name__}, and KV is "
                f"moved of full attention and sliding windows{instead}"
            )
        if one.is_eagle_group:
            refuse("draft layers (EAGLE, MTP) share its KV blocks: turn speculative decoding off")
    if not any(is_whole(one.kv_cache_spec) for one in groups):
        refuse(f"the model has no group of full attention, which moved runs are found by{instead}")
    sizes = sorted({one.kv_cache_spec.block_size for one in groups})
    if len(sizes) > 1:
        refuse(f"the model's groups have KV blocks of {sizes} tokens, and one size moves{instead}")
    if kv_cache_config.prefix_cache_retention_interval == 0:
        refuse(
            "vLLM keeps windows at the ends of prompts alone, and moved runs end elsewhere: set "
            f"--prefix-cache-retention-interval {sizes[0]}{instead.replace(':', ', or', 1)}"
        )
    if vllm_config.aux_output_config.enabled:
        refuse(
            "with auxiliary outputs (routed experts, say) vLLM may take a part of a run, whose "
            f"window then is another: turn them off{instead.replace(':', ', or', 1)}"
        )
    if vllm_config.scheduler_config.policy == "priority":
        refuse(
            "by priority vLLM takes a request out of the step that it is already in, and the "
            "windows it was about to copy with it: remove --scheduling-policy priority"
            f"{instead.replace(':', ', or', 1)}"
        )
    events = vllm_config.kv_events_config
    if events is not None and events.enable_kv_cache_events:
        refuse(
            "events of approximate blocks are sorted for one group of KV blocks: remove "
            f"--kv-events-config{instead.replace(':', ', or', 1)}"
        )


def window_of(spec: object) -> int | None:
    """The window of a group whose KV is that of the last tokens, each in its slot."""
    # Classes below it keep something else.
    if isinstance(spec, SlidingWindowSpec) and type(spec) is SlidingWindowSpec:
        is_plain = not spec.extra_retained_tokens and spec.tokens_per_state == 1
        return int(spec.sliding_window) if is_plain else None
    return None


def is_whole(spec: object) -> bool:
    """Whether a group's KV is that of all tokens, each in its slot, by full attention."""
    return (
        isinstance(spec, FullAttentionSpec)
        and type(spec) in _WHOLE
        and spec.sliding_window is None
        and spec.attention_chunk_size is None
        and not spec.non_causal
        and spec.tokens_per_state == 1
    )


def copies_exact_kv(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Whether exact mode copies, and not only orders blocks: one group of KV blocks, of floats."""
    return len(kv_cache_config.kv_cache_groups) == 1 and is_float(_kv_dtype(vllm_config))


def _kv_dtype(vllm_config: VllmConfig) -> str:
    return str(vllm_config.cache_config.cache_dtype)


def _check_settings(vllm_config: VllmConfig) -> None:
    # Checked first: the processor decides between settings checked below.
    if vllm_config.model_config.use_mla and current_platform.is_cpu():
        refuse(
            "the model has latent attention (MLA), which vLLM runs on a CPU without prefix caching "
            "(CPU_MLA) or, where the CPU has AMX, by a backend whose KV is not known (AMX_MLA): "
            "serve the model on a GPU"
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        refuse("prefix caching is off: start vLLM with --enable-prefix-caching")
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            refuse(
                "under context parallelism a moved token may belong to another rank: set "
                f"{name} to 1, not {size}"
            )
    if parallel.pipeline_parallel_size != 1:
        refuse(
            "a rank of a pipeline holds only some of the layers: set pipeline_parallel_size to 1, "
            f"not {parallel.pipeline_parallel_size}; tensor parallelism is supported"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "suffix"):
        method = speculative.method
        refuse(f"speculative decoding by {method!r} has its own KV: use ngram, or none")


def check_others(vllm_config: VllmConfig, *, moves: bool, is_exact: bool, snapshots: bool) -> bool:
    """Whether other connectors run next to this one, which only a worker's configuration shows."""
    return check_around(
        get_current_vllm_config_or_none(),
        vllm_config,
        moves=moves,
        is_exact=is_exact,
        snapshots=snapshots,
    )


def check_store(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, is_among_others: bool
) -> None:
    """Refuse where a store would keep a part of the KV, or KV of other weights.

    Raises:
        UnsupportedError: It would.
    """
    if len(kv_cache_config.kv_cache_groups) > 1:
        refuse('a store keeps one group of KV blocks, and the model has several: remove "store"')
    check_stored_dtype(_kv_dtype(vllm_config))
    if is_among_others:
        refuse('a store was not run next to other connectors: remove "store", or the others')
    size = vllm_config.parallel_config.tensor_parallel_size
    if size != 1:
        refuse(
            f"with tensor parallelism each of {size} ranks would store its heads, which was not "
            'run: remove "store"'
        )
    if vllm_config.model_config.enable_sleep_mode and not hasattr(
        KVConnectorBase_V1, "unregister_kv_caches"
    ):
        refuse(
            "this vLLM tells no connector of sleep mode, and turns are read from blocks that it "
            'unmaps: turn sleep mode off, remove "store", or use vLLM 0.33'
        )
    if vllm_config.weight_transfer_config is not None:
        refuse('weights that change while vLLM runs have other KV: remove "store"')


def check_images(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, is_exact: bool
) -> None:
    """Refuse to follow requests with images where a part of an image is not enough.

    ``is_exact``: whether the mode is exact.

    Raises:
        UnsupportedError: It may not be, or it was not run.
    """
    if is_exact and not copies_exact_kv(vllm_config, kv_cache_config):
        # Blocks are ordered, and what a request finds of them is for vLLM to say.
        return
    if vllm_config.model_config.is_mm_prefix_lm:
        refuse(
            "tokens of an image attend to later ones of it, and KV that is copied may be of a "
            'part: remove "images"'
        )
    if is_exact:
        return
    if len(kv_cache_config.kv_cache_groups) > 1:
        refuse(
            "prompts with images were not run with several groups of KV blocks: remove "
            '"images", or set "mode": "exact"'
        )
    if vllm_config.scheduler_config.disable_chunked_mm_input:
        refuse(
            "a moved run may begin inside an image, where with --disable-chunked-mm-input vLLM "
            'ends no step: remove it, or "images"'
        )


def check_pool(pool: BlockPool, block_size: int) -> None:
    if pool.hash_block_size != block_size:
        refuse(
            f"vLLM hashes {pool.hash_block_size} tokens of its blocks of {block_size} at once: "
            "turn fine-grained prefix matching off"
        )


def rope_of(vllm_config: VllmConfig) -> RopeSpec:
    """How the model that vLLM runs rotates its keys.

    For MLA vLLM stores the interleaved order, whatever the checkpoint's code does.

    Raises:
        UnsupportedRopeError: It cannot be moved, it has M-RoPE, or the checkpoint quantises KV:
            vLLM then does so itself.
    """
    config = vllm_config.model_config.hf_text_config
    for name, value in quantized_fields(config):
        msg = f"KvtrieConnector: quantised KV is not supported ({name}={value!r})"
        raise UnsupportedRopeError(msg)
    interleaved = True if vllm_config.model_config.use_mla else None
    rope = RopeSpec.from_config(config, interleaved=interleaved)
    if rope.item_positions:
        msg = "KvtrieConnector: M-RoPE is not supported: the connector knows no positions of images"
        raise UnsupportedRopeError(msg)
    return rope
