"""Checks on two tiny passes that a model stores KV the way its layout says."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvtrie._core import LayoutError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvtrie.layout import KVLayout

# K and V of a token may differ in rounding between a pass over two tokens and one over three, but
# not by more than this share of their largest value; attention to later tokens changes them by all.
_TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "float16": 3e-2, "bfloat16": 1e-1}


def forward_inputs(model: PreTrainedModel) -> frozenset[str]:
    """The optional inputs of a model's forward pass that an engine can set."""
    known = {"position_ids", "cache_position", "logits_to_keep"}
    return frozenset(known & set(inspect.signature(model.forward).parameters))


def check_model(model: PreTrainedModel, layout: KVLayout) -> None:
    """Run two and three tokens and compare what the cache holds with the layout.

    Args:
        model: A causal LM in eval mode.
        layout: What its config says.

    Raises:
        LayoutError: If layers, shapes, element type or device differ, or if the KV of a token
            depends on the tokens behind it.
    """
    short, long = _cached(model, 2), _cached(model, 3)
    if len(long) != layout.num_layers:
        msg = f"the model caches {len(long)} layers, its config says {layout.num_layers}"
        raise LayoutError(msg)
    devices = {rows.device for layer in long for rows in layer}
    if len(devices) > 1:
        shown = ", ".join(sorted(map(str, devices)))
        msg = f"the model is spread over {shown}; a pool lies on one device"
        raise LayoutError(msg)
    tolerance = _TOLERANCE[layout.dtype]
    for number, (before, after) in enumerate(zip(short, long, strict=True)):
        for name, old, new, dim in (
            ("K", before[0], after[0], layout.head_dim),
            ("V", before[1], after[1], layout.v_head_dim),
        ):
            want = (1, layout.num_kv_heads, 3, dim)
            if tuple(new.shape) != want or str(new.dtype) != f"torch.{layout.dtype}":
                msg = (
                    f"layer {number} caches {name} of shape {tuple(new.shape)} and {new.dtype}, "
                    f"its config says {want} of {layout.dtype}"
                )
                raise LayoutError(msg)
            change = (new[:, :, :2] - old).abs().max()
            if change > tolerance * new.abs().max():
                msg = f"{name} of layer {number} depends on later tokens: attention is not causal"
                raise LayoutError(msg)


def _cached(model: PreTrainedModel, num_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    cache = DynamicCache(config=model.config)
    ids = torch.arange(num_tokens, device=model.device).unsqueeze(0)
    options: dict[str, Any] = {}
    if "position_ids" in forward_inputs(model):
        options["position_ids"] = ids
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache, use_cache=True, **options)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            msg = f"layer {number} caches through {type(layer).__name__}, not full attention"
            raise LayoutError(msg)
        if layer.keys is None or layer.values is None:
            msg = f"layer {number} stores no K and V through the transformers Cache interface"
            raise LayoutError(msg)
        found.append((layer.keys, layer.values))
    return found
