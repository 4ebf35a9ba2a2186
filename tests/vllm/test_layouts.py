"""KV is found where vLLM's attention backends keep it, in every physical order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.vllm.test_equality import rotated
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvtrie import LayoutError, UnsupportedRopeError
from kvtrie.integrations.vllm._layouts import locate
from kvtrie.integrations.vllm._support import rope_of
from kvtrie.pool import KVLayout, KVPool
from kvtrie.rope import RopeSpec

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 3, 6, 2, 16, 32
LATENT, ROTATED = 48, 16
# Seven tokens, into the middle of another block, forty positions to the front.
MOVES = np.array(
    [(5, 3 * TOKENS + 9, 7, -40)],
    [(name, np.int64) for name in ("source_slot", "dest_slot", "num_tokens", "delta")],
)
FULL = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32)
MLA = MLAAttentionSpec(
    block_size=TOKENS, num_kv_heads=1, head_size=LATENT + ROTATED, dtype=torch.float32
)


def tensors(order: KVCacheLayout, heads: int, channels: int) -> list[torch.Tensor]:
    """One tensor per layer, ``[blocks, heads, tokens, channels]``, as vLLM lays the order out."""
    shape = (LAYERS, BLOCKS, heads, TOKENS, channels)
    physical = torch.randn([shape[axis] for axis in order.stride_order])
    back = [order.stride_order.index(axis) for axis in range(len(shape))]
    return list(physical.permute(back))


def rope(**more: Any) -> RopeSpec:
    config = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": LAYERS}
    return RopeSpec.from_config({"rope_theta": 10_000.0, **config, **more})


def moved(mine: list[torch.Tensor], spec: Any, backend: str, how: RopeSpec) -> list[torch.Tensor]:
    before = [one.clone().transpose(1, 2) for one in mine]
    views, layout = locate(mine, spec, {backend})
    KVPool.wrap(views, layout, how).apply(MOVES)
    untouched = torch.ones(BLOCKS, TOKENS, dtype=torch.bool)
    untouched[3, 9:16] = False
    for now, old in zip(mine, before, strict=True):
        assert torch.equal(now.transpose(1, 2)[untouched], old[untouched])
    return before


@pytest.mark.parametrize("order", list(KVCacheLayout), ids=lambda order: order.name)
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"])
def test_k_and_v_move_in_every_order(order: KVCacheLayout, backend: str) -> None:
    mine = tensors(order, HEADS, 2 * DIM)
    before = moved(mine, FULL, backend, rope(model_type="llama"))
    for now, old in zip(mine, before, strict=True):
        # As these backends split them.
        k, v = now.transpose(1, 2).split(DIM, dim=-1)
        assert (k[3, 9:16] - rotated(old[0, 5:12, :, :DIM], -40)).abs().max() < 1e-5
        assert torch.equal(v[3, 9:16], old[0, 5:12, :, DIM:])


@pytest.mark.parametrize("order", list(KVCacheLayout), ids=lambda order: order.name)
def test_only_the_end_of_latent_rows_is_rotated(order: KVCacheLayout) -> None:
    sizes = {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROTATED, "qk_nope_head_dim": 32}
    how = rope(model_type="deepseek_v3", v_head_dim=32, q_lora_rank=None, **sizes)
    mine = tensors(order, 1, LATENT + ROTATED)
    before = moved(mine, MLA, "FLASHMLA", how)
    for now, old in zip(mine, before, strict=True):
        got, source = now.transpose(1, 2)[3, 9:16], old[0, 5:12]
        assert torch.equal(got[..., :LATENT], source[..., :LATENT])
        # vLLM keeps MLA's channels in pairs.
        halves = torch.cat([source[..., LATENT::2], source[..., LATENT + 1 :: 2]], -1)
        wanted = rotated(halves, -40).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        assert (got[..., LATENT:] - wanted).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("backend", "spec", "channels"),
    [
        ("ROCM_ATTN", FULL, 2 * DIM),
        ("ROCM_AITER_FA", FULL, 2 * DIM),
        ("CUSTOM", FULL, 2 * DIM),
        ("FLASHMLA_SPARSE", MLA, LATENT + ROTATED),
        ("FLASH_ATTN", MLA, LATENT + ROTATED),
    ],
)
def test_a_backend_whose_pages_are_not_known_is_refused(
    backend: str, spec: Any, channels: int
) -> None:
    mine = tensors(KVCacheLayout.LBHNC, spec.num_kv_heads, channels)
    with pytest.raises(LayoutError, match=f"how attention backend {backend} stores KV"):
        locate(mine, spec, {backend})


def test_packed_kv_is_refused() -> None:
    mine = tensors(KVCacheLayout.LBHNC, HEADS, 2 * DIM + 4)
    with pytest.raises(LayoutError, match=r"68 channels, and the model keeps 2 of 32 \+ 32"):
        locate(mine, FULL, {"TRITON_ATTN"})


@pytest.mark.parametrize("order", list(KVCacheLayout), ids=lambda order: order.name)
@pytest.mark.parametrize(
    ("quant", "dtype"),
    [("fp8_per_token_head", torch.uint8), ("int8_per_token_head", torch.int8)],
)
def test_scales_of_rows_are_where_vllm_reads_them(
    order: KVCacheLayout, quant: str, dtype: torch.dtype
) -> None:
    """The connector refuses such KV; a pool that wraps it finds what vLLM's backend finds."""
    mine = [
        torch.zeros_like(one, dtype=dtype).copy_(one * 50)
        for one in tensors(order, HEADS, 2 * (DIM + 4))
    ]
    layout = KVLayout.from_tensors(
        mine,
        axes="blocks heads tokens (kv dim)",
        block_size=TOKENS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        quant=quant,
    )
    pool = KVPool.wrap(mine, layout, rope(model_type="llama"))
    backend: Any = object.__new__(TritonAttentionImpl)
    backend.head_size = backend.head_size_v = DIM
    backend.fp8_dtype = torch.float8_e4m3fn
    for one, of_k, of_v in zip(mine, pool.k, pool.v, strict=True):
        backend._k_scale_cache = backend._v_scale_cache = None
        backend._ensure_scale_caches(one)
        assert of_v is not None
        for its, view in ((backend._k_scale_cache, of_k), (backend._v_scale_cache, of_v)):
            its.copy_(torch.rand(its.shape))
            assert torch.equal(view[..., DIM:].contiguous().view(torch.float32).squeeze(-1), its)
        keys = one.transpose(1, 2)[..., :DIM].contiguous().view(torch.uint8)
        assert torch.equal(of_k[..., :DIM], keys)


def test_a_checkpoint_with_quantised_kv_is_refused_by_name() -> None:
    """vLLM quantises KV as the checkpoint says, whatever the command line does."""
    text = SimpleNamespace(quantization_config={"kv_cache_scheme": {"num_bits": 8}})
    model = SimpleNamespace(hf_text_config=text, use_mla=False)
    with pytest.raises(UnsupportedRopeError, match=r"quantised KV .*kv_cache_scheme="):
        rope_of(SimpleNamespace(model_config=model))


def test_positions_of_images_are_unknown_to_the_connector() -> None:
    text = SimpleNamespace(
        model_type="qwen2_vl_text", num_hidden_layers=1, num_attention_heads=1, head_dim=16
    )
    text.rope_parameters = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    model = SimpleNamespace(hf_text_config=text, use_mla=False)
    with pytest.raises(UnsupportedRopeError, match="M-RoPE is not supported"):
        rope_of(SimpleNamespace(model_config=model))
