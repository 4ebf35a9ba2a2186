"""Which elements of stored rows of a quantised pool are finite numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtrie.kernels import codes
from kvtrie.models.kv_types import DS_MLA_LATENT, DS_MLA_TAIL, SCALE_BYTES

if TYPE_CHECKING:
    from kvtrie.models.kv_types import KVType


def finite(rows: torch.Tensor, kind: KVType, is_v: bool) -> torch.Tensor:
    """Whether numbers and scales of rows of bytes are finite: ``[..., numbers and scales]``."""
    code = codes.BY_NAME[kind.codes]
    if kind.scales == "layer":
        return codes.decode(rows, code).isfinite()
    if kind.scales == "block":
        return _floats(rows) if is_v else codes.decode(rows, code).isfinite()
    if kind.scales == "row":
        numbers, scales = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:]
        return torch.cat([codes.decode(numbers, code).isfinite(), _floats(scales)], dim=-1)
    latent = codes.decode(rows[..., :DS_MLA_LATENT], code).isfinite()
    scales = _floats(rows[..., DS_MLA_LATENT:DS_MLA_TAIL])
    tail = rows[..., DS_MLA_TAIL:].contiguous().view(torch.bfloat16).isfinite()
    return torch.cat([latent, scales, tail], dim=-1)


def _floats(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.float32).isfinite()
