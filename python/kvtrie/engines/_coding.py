"""K and V as codes: rounded when a pass writes them, numbers again when attention reads them.

As in serving engines, a pass attends to the codes of its own tokens, too. So what a token sees does
not depend on how a prompt is cut into passes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from kvtrie._core import LayoutError
from kvtrie.engines._paged_cache import pool_rows
from kvtrie.engines._probe import cached, context_of
from kvtrie.kernels import codes
from kvtrie.models.directory import directory_of
from kvtrie.models.fingerprint import CheckpointError
from kvtrie.models.kv_scales import checkpoint_scales, scaled_name
from kvtrie.models.kv_types import KV_TYPES, SCALE_BYTES, refusal
from kvtrie.models.vision import TEXT_OF_VISION

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvtrie.pool.layout import KVLayout

CODED: Final = tuple(name for name, kind in KV_TYPES.items() if not kind.is_single)
"""The types that the embedded engine can keep K and V in."""

_PROBED: Final = 256
"""Tokens by which scales of int8 are found."""


@dataclass(frozen=True, slots=True)
class KVCoding:
    """How K and V of each layer become codes, and numbers again.

    Attributes:
        form: How a row is coded.
        scales: Of K and of V, per layer; 1 where rows have scales of their own.
        name: What a namespace and a gate call this KV: its type, and a digest of these scales.
        saturated: On the model's device, int64: how many elements were stored as another number
            so far, beyond the largest code, or in int8 NaN and infinity, as 0.
    """

    form: codes.CodeForm
    scales: tuple[tuple[float, float], ...]
    name: str
    saturated: torch.Tensor

    def encode(self, rows: torch.Tensor, layer: int, side: int) -> torch.Tensor:
        """Rows ``[..., channels]`` as bytes, ``[..., k_row]``; ``side`` is 0 for K, 1 for V."""
        if self.form.scales == codes.IN_ROW:
            found, scales = codes.quantize(rows, self.form)
            return torch.cat([found, scales.unsqueeze(-1).view(torch.uint8)], dim=-1)
        numbers = rows.to(torch.float32) / self.scales[layer][side]
        found, saturated = codes.encode(numbers, self.form.code)
        if self.form.code == codes.INT8:
            saturated |= ~numbers.isfinite()
        self.saturated.add_(saturated.sum())
        return found

    def decode(
        self, stored: torch.Tensor, layer: int, side: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """The numbers of bytes, ``[..., channels]``: computed in float32, then rounded."""
        if self.form.scales == codes.IN_ROW:
            numbers = codes.decode(stored[..., :-SCALE_BYTES].contiguous(), self.form.code)
            scales = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
            return (numbers * scales).to(dtype)
        numbers = codes.decode(stored, self.form.code)
        return (numbers * self.scales[layer][side]).to(dtype)


def coded(
    model: PreTrainedModel, layout: KVLayout, kv_dtype: str, where: str
) -> tuple[KVLayout, KVCoding]:
    """The layout of a model's KV in this type, and how it is coded.

    Where rows have no scale of their own: scales of fp8 are those of the checkpoint, else 1; scales
    of int8 are the largest magnitudes of a layer over 127, in a pass over 256 random tokens.

    Args:
        model: The model, with its weights.
        layout: Of its KV in floats.
        kv_dtype: As ``KVLayout.quant``.
        where: What a message begins with.

    Raises:
        LayoutError: The engine cannot keep the model's KV in this type, or the scales of fp8 cannot
            be read: the model was loaded from what is not found now.
    """
    why = refusal(kv_dtype)
    if why is None and kv_dtype not in CODED:
        why = f"it has rows of another attention; known are {', '.join(CODED)}"
    if why is None and model.config.model_type in TEXT_OF_VISION:
        why = "a model that takes images keeps its KV in its own type"
    if why is not None:
        msg = f"{where}: kv_dtype {kv_dtype!r} is not supported: {why}"
        raise LayoutError(msg)
    found = replace(layout, dtype="uint8", quant=kv_dtype)
    form = codes.CodeForm.of(KV_TYPES[kv_dtype])
    if form is None:
        msg = f"{where}: kv_dtype {kv_dtype!r} rounds no codes"
        raise LayoutError(msg)
    scales: tuple[tuple[float, float], ...] | None = None
    if form.scales == codes.IN_LAYER:
        is_probed = form.code == codes.INT8
        scales = _probed(model, layout) if is_probed else _of_checkpoint(model, layout, where)
    scales = scales or ((1.0, 1.0),) * layout.num_layers
    saturated = torch.zeros((), dtype=torch.int64, device=model.device)
    return found, KVCoding(form, scales, scaled_name(found.kv_dtype, scales), saturated)


def kv_name(layout: KVLayout, coding: KVCoding | None) -> str:
    """What a namespace and a gate call an engine's KV; without a coding, it is in floats."""
    return layout.kv_dtype if coding is None else coding.name


def generator_coding(
    model: PreTrainedModel,
    layout: KVLayout,
    kv_dtype: str,
    records: str | None,
    num_window_blocks: int | None,
) -> tuple[KVLayout, KVCoding]:
    """As `coded`; what only floats have is refused."""
    for name, value in (("records", records), ("num_window_blocks", num_window_blocks)):
        if value is not None:
            msg = f"Generator: {name}={value!r} needs KV in floats, and kv_dtype is {kv_dtype!r}"
            raise LayoutError(msg)
    return coded(model, layout, kv_dtype, "Generator")


def _of_checkpoint(
    model: PreTrainedModel, layout: KVLayout, where: str
) -> tuple[tuple[float, float], ...] | None:
    name = str(model.name_or_path or "")
    if not name:
        # Of no checkpoint.
        return None
    try:
        directory = directory_of(name, getattr(model.config, "_commit_hash", None))
    except CheckpointError as error:
        msg = (
            f"{where}: the scales of fp8 are in the model's checkpoint, and {error}: load the "
            "model by an absolute path"
        )
        raise LayoutError(msg) from error
    return checkpoint_scales(directory, layout.num_layers)


def _probed(model: PreTrainedModel, layout: KVLayout) -> tuple[tuple[float, float], ...]:
    embeddings: Any = model.get_input_embeddings()
    count = min(_PROBED, context_of(model) or _PROBED)
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(int(embeddings.weight.shape[0]), (1, count), generator=rng)
    found = []
    for group, pair in zip(layout.layers, cached(model, layout, ids), strict=True):
        most = [float(rows.abs().max()) for rows in pool_rows(group, *pair)]
        k, v = (one / codes.LARGEST[codes.INT8] or 1.0 for one in (most[0], most[-1]))
        found.append((k, v))
    return tuple(found)
