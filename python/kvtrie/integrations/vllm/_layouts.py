"""Where K and V are stored in the tensors that vLLM registers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtrie._core import LayoutError
from kvtrie.integrations.vllm._vllm import cpu_isa
from kvtrie.pool.layout import KVLayout

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch
    from vllm.v1.kv_cache_interface import AttentionSpec

_CPU: Final = "CPU_ATTN"
# As in vLLM's interface. Others split a page differently: ROCm into [channels / x, tokens, x],
# TurboQuant and NVFP4 into codes and scales.
_K_THEN_V: Final = (
    *("FLASH_ATTN", "FLASH_ATTN_DIFFKV", "TRITON_ATTN", "TRITON_ATTN_DIFFKV"),
    *("FLASHINFER", "FLEX_ATTENTION"),
)
# One latent row per token.
_LATENT: Final = ("FLASH_ATTN_MLA", "FLASHINFER_MLA", "FLASHMLA", "CUTLASS_MLA", "TRITON_MLA")
# Instruction sets for which vLLM's CPU attention stores each head's K as [channels, tokens].
_PLAIN_ISAS: Final = ("vec", "vec16")


def locate(
    tensors: list[torch.Tensor], spec: AttentionSpec, backends: Collection[str]
) -> tuple[object, KVLayout]:
    """Views of a worker's KV tensors, and their layout: the arguments of `kvtrie.KVPool.wrap`.

    Tensors have the shape ``[blocks, heads, tokens, channels]``; strides give the physical order.
    Channels are K and then V. The CPU backend instead splits each head's page into all of K and all
    of V, and stores K channel by channel. A kernel may use smaller blocks than the manager; slots
    are the same.
    """
    k, v = spec.head_size, spec.head_size_v
    known = (*_K_THEN_V, _CPU) if v else _LATENT
    for backend in backends:
        if backend not in known:
            msg = (
                f"KvtrieConnector: how attention backend {backend} stores KV is unknown: choose "
                f"one by --attention-backend (known for this model: {', '.join(known)})"
            )
            raise LayoutError(msg)
    first = tensors[0]
    if first.dim() != 4:
        msg = f"KvtrieConnector: KV tensors have the shape {tuple(first.shape)}, not four axes"
        raise LayoutError(msg)
    _, heads, tokens, channels = first.shape
    if heads != spec.num_kv_heads or channels != k + v:
        msg = (
            f"KvtrieConnector: KV tensors have {heads} heads of {channels} channels, and the model "
            f"keeps {spec.num_kv_heads} of {k} + {v} (packed or quantised KV is not supported)"
        )
        raise LayoutError(msg)
    axes = "blocks heads tokens (kv dim)" if v else "blocks heads tokens dim"
    located: object = tensors
    if _CPU in backends:
        located = _cpu_pages(tensors, k, v)
        axes = "blocks heads tokens dim"
    layout = KVLayout.from_tensors(
        located,
        axes=axes,
        block_size=tokens,
        num_kv_heads=heads,
        head_dim=k,
        v_head_dim=v,
    )
    return located, layout


def _cpu_pages(
    tensors: list[torch.Tensor], k: int, v: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Each ``[blocks, heads, tokens, channels]``."""
    blocks, heads, tokens, _ = tensors[0].shape
    isa = cpu_isa(tensors[0].dtype, tokens, k)
    if isa not in _PLAIN_ISAS or k != v:
        msg = (
            f"KvtrieConnector: the CPU backend packs {tensors[0].dtype} keys of {k} and values of "
            f"{v} channels for {isa!r}: only {', '.join(_PLAIN_ISAS)} and equal widths are "
            "supported; on a machine with AMX start vLLM with --dtype float32"
        )
        raise LayoutError(msg)
    pages = [tensor.view(blocks, heads, 2, tokens * k) for tensor in tensors]
    of_k = [page[:, :, 0].view(blocks, heads, k, tokens).transpose(2, 3) for page in pages]
    of_v = [page[:, :, 1].view(blocks, heads, tokens, k) for page in pages]
    return of_k, of_v
