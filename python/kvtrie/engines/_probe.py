"""Checks on two tiny passes that a model stores KV the way its layout says."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvtrie._core import LayoutError, UnsupportedRopeError
from kvtrie.engines._paged_cache import check_rows, pool_rows
from kvtrie.kernels import reference
from kvtrie.rope import RopeSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvtrie.layout import KVLayout

# K and V of a token may differ in rounding between a pass over two tokens and one over three, but
# not by more than this share of their largest value; attention to later tokens changes them by all.
_TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "float16": 3e-2, "bfloat16": 1e-1}


# How far a pass is moved to see whether its keys turn as the config says: no multiple of a period.
_SHIFT: Final = 37


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
    dtype = getattr(torch, layout.dtype)
    for number, (before, after) in enumerate(zip(short, long, strict=True)):
        old, new = pool_rows(layout, *before), pool_rows(layout, *after)
        check_rows(layout, new, 3, dtype, number)
        for name, early, late in zip("KV", old, new, strict=False):
            change = (late[:, :, :2] - early).abs().max()
            if change > tolerance * late.abs().max():
                msg = f"{name} of layer {number} depends on later tokens: attention is not causal"
                raise LayoutError(msg)


def checked_rope(model: PreTrainedModel, layout: KVLayout) -> RopeSpec:
    """How a model turns its keys, compared with what it does.

    RoPE tells apart distances alone: a prompt that begins at another position has the same V in
    every layer, and the same K but for its turn. Three tokens are run at two places.

    Args:
        model: A causal LM in eval mode, of this layout.
        layout: What its config says.

    Returns:
        What its config says of RoPE, with the order of pairs that the model keeps.

    Raises:
        UnsupportedRopeError: If its KV cannot be moved, or moves otherwise than its config says.
    """
    if "position_ids" not in forward_inputs(model):
        msg = "the model takes no positions, so its KV cannot be checked at another one"
        raise UnsupportedRopeError(msg)
    here, there = _cached(model, 3), _cached(model, 3, first=_SHIFT)
    refusal: UnsupportedRopeError | None = None
    differs = None
    # Which channels make a pair is not in a config, and for MLA it is the engine's choice.
    for interleaved in (None, False, True):
        try:
            rope = RopeSpec.from_config(model.config, interleaved=interleaved)
        except UnsupportedRopeError as error:
            refusal = refusal or error
            continue
        found = _moves_otherwise(layout, rope, here, there)
        if found is None:
            return rope
        differs = differs or found
    if differs is None and refusal is not None:
        raise refusal
    msg = f"{differs} is not what its config's RoPE makes of it at another position"
    raise UnsupportedRopeError(msg)


def _moves_otherwise(
    layout: KVLayout,
    rope: RopeSpec,
    here: list[tuple[torch.Tensor, torch.Tensor]],
    there: list[tuple[torch.Tensor, torch.Tensor]],
) -> str | None:
    """What a RoPE does not explain of rows that were computed ``_SHIFT`` positions further on."""
    tolerance = _TOLERANCE[layout.dtype]
    for number, (before, after) in enumerate(zip(here, there, strict=True)):
        old, new = pool_rows(layout, *before), pool_rows(layout, *after)
        old[0] = reference.rotate(old[0], rope, _SHIFT, layer=number)
        for name, expected, found in zip("KV", old, new, strict=False):
            if (found - expected).abs().max() > tolerance * found.abs().max():
                return f"{name} of layer {number}"
    return None


def _cached(
    model: PreTrainedModel, num_tokens: int, first: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    cache = DynamicCache(config=model.config)
    ids = torch.arange(num_tokens, device=model.device).unsqueeze(0)
    options: dict[str, Any] = {}
    if "position_ids" in forward_inputs(model):
        options["position_ids"] = ids + first
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
