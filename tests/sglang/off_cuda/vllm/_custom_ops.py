"""The function that SGLang takes from vLLM's extension where there is no CUDA."""

from __future__ import annotations

import torch


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Rotate queries and keys in place; the rows of the cache are cosines, then sines."""
    chosen = cos_sin_cache[positions.flatten()].unsqueeze(1)
    cos, sin = chosen.chunk(2, dim=-1)
    for rows in (query, key):
        heads = rows.view(len(cos), -1, head_size)[..., : chosen.shape[-1]]
        first, second = heads.chunk(2, -1) if is_neox else (heads[..., ::2], heads[..., 1::2])
        turned = first * cos - second * sin, second * cos + first * sin
        heads.copy_(torch.cat(turned, -1) if is_neox else torch.stack(turned, -1).flatten(-2))
