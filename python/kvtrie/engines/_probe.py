"""Checks with tiny passes that a model stores KV as its layout says."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvtrie._core import LayoutError, UnsupportedRopeError
from kvtrie.engines._paged_cache import check_rows, pool_rows
from kvtrie.kernels import reference
from kvtrie.models.rope import short_regime
from kvtrie.models.vision import TEXT_OF_VISION
from kvtrie.rope import RopeSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvtrie.pool.layout import KVLayout
    from kvtrie.rope import Rotary

# Share of their largest value by which K and V may differ by rounding between a pass over two
# tokens and one over three. Attention to later tokens changes them far more.
TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "float16": 3e-2, "bfloat16": 1e-1}


# Not multiples of a period. At the near shift, K must be equal except for rounding; the far shift
# shows frequencies that differ in their last bits.
_SHIFTS: Final = (37, 2000)
_PROBED: Final = 5
_TINY: Final = 1e-7


def language_config(model: PreTrainedModel) -> Any:  # noqa: ANN401 - a config may have any field
    """The config of the text model; of a model of text alone, its own."""
    if model.config.model_type in TEXT_OF_VISION:
        return model.config.get_text_config()
    return model.config


def forward_inputs(model: PreTrainedModel) -> frozenset[str]:
    known = {"position_ids", "cache_position", "logits_to_keep"}
    return frozenset(known & set(inspect.signature(model.forward).parameters))


def check_model(model: PreTrainedModel, layout: KVLayout) -> None:
    """Run two and three tokens and compare the cache with the layout.

    The KV of a token must not depend on the tokens after it.
    """
    short, long = _cached(model, layout, 2), _cached(model, layout, 3)
    if len(long) != layout.num_layers:
        msg = f"the model caches {len(long)} layers, its config says {layout.num_layers}"
        raise LayoutError(msg)
    devices = {rows.device for layer in long for rows in layer}
    if len(devices) > 1:
        shown = ", ".join(sorted(map(str, devices)))
        msg = f"the model is spread over {shown}; a pool is on one device"
        raise LayoutError(msg)
    tolerance = TOLERANCE[layout.dtype]
    dtype = getattr(torch, layout.dtype)
    for number, group in enumerate(layout.layers):
        old, new = pool_rows(group, *short[number]), pool_rows(group, *long[number])
        check_rows(group, new, 3, dtype, number)
        for name, early, late in zip("KV", old, new, strict=False):
            change = (late[:, :, :2] - early).abs().max()
            if change > tolerance * late.abs().max():
                msg = f"{name} of layer {number} depends on later tokens: attention is not causal"
                raise LayoutError(msg)


def checked_rope(model: PreTrainedModel, layout: KVLayout) -> RopeSpec:
    """The RoPE of a model's config, with the order of pairs that it uses, checked by running it.

    A prompt that begins at another position has the same V, and the same K up to rotation. A few
    tokens are run at three positions, or at as many as fit the context.
    """
    if "position_ids" not in forward_inputs(model):
        msg = "the model takes no positions, so its KV cannot be checked at another one"
        raise UnsupportedRopeError(msg)
    candidates: list[RopeSpec] = []
    refusal: UnsupportedRopeError | None = None
    # No config has the pairing of channels.
    for interleaved in (None, False, True):
        try:
            rope = RopeSpec.from_config(model.config, interleaved=interleaved, regime="short")
        except UnsupportedRopeError as error:
            refusal = refusal or error
        else:
            candidates.append(rope)
    # Before any pass: positions without RoPE may end where the probe begins.
    if not candidates and refusal is not None:
        raise refusal
    here = _cached(model, layout, _PROBED)
    moved = [(shift, _cached(model, layout, _PROBED, first=shift)) for shift in _shifts(model)]
    differs = None
    for rope in candidates:
        found = (_moves_otherwise(layout, rope, here, there, shift) for shift, there in moved)
        differing = next((name for name in found if name is not None), None)
        if differing is None:
            return rope
        differs = differs or differing
    msg = (
        f"{differs} at another position is not what its config's RoPE gives (a model that was "
        "cast rotates by rounded frequencies: load it with dtype= instead)"
    )
    raise UnsupportedRopeError(msg)


def context_of(model: PreTrainedModel) -> int | None:
    """Most tokens of a prompt whose K is that of shorter prompts; None: the config has no limit."""
    config = language_config(model)
    limits = (getattr(config, "max_position_embeddings", None), short_regime(config))
    return min((limit for limit in limits if limit is not None), default=None)


def _shifts(model: PreTrainedModel) -> list[int]:
    context_len = context_of(model)
    if context_len is None:
        return [_SHIFTS[0]]
    if context_len <= _PROBED:
        msg = f"its context of {context_len} tokens leaves no room to check how its keys rotate"
        raise UnsupportedRopeError(msg)
    return sorted({min(shift, context_len - _PROBED) for shift in _SHIFTS})


def _moves_otherwise(
    layout: KVLayout,
    rope: RopeSpec,
    here: list[tuple[torch.Tensor, torch.Tensor]],
    there: list[tuple[torch.Tensor, torch.Tensor]],
    shift: int,
) -> str | None:
    """The first rows that, computed ``shift`` positions later, contradict this RoPE; or None."""
    # Models rotate float64 keys by float32 angles.
    tolerance = max(TOLERANCE[layout.dtype], TOLERANCE["float32"])
    for number, group in enumerate(layout.layers):
        old, new = pool_rows(group, *here[number]), pool_rows(group, *there[number])
        old[0] = reference.rotate(old[0], rope, shift, layer=number)
        sizes = (_sizes(new[0], rope.layers[number]), new[-1].abs().max())
        for name, expected, found, size in zip("KV", old, new, sizes, strict=False):
            # A wrong rotation changes every token; rounding that routes a token to other experts
            # changes that token alone. So the median is tested. NaN is a mismatch.
            misses = (found - expected).abs() / (tolerance * size).clamp(min=_TINY)
            if not float(misses.amax(dim=(0, 1, 3)).median()) <= 1:
                return f"{name} of layer {number}"
    return None


def _sizes(keys: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """The size of each channel of K, ``[head_dim]``, by which its error is measured.

    One size for all would hide errors: channels may be a hundred times larger than others (Qwen2),
    or a latent be next to rotated keys (MLA). Both channels of a pair count as the larger one, and
    channels smaller than the median as the median.
    """
    sizes = keys.abs().amax(dim=(0, 1, 2))
    if rotary is None:
        return sizes.clamp(min=sizes.median())
    end = rotary.start + rotary.width
    pairs = sizes[rotary.start : end].unflatten(0, (-1, 2) if rotary.interleaved else (2, -1))
    most = pairs.amax(dim=1 if rotary.interleaved else 0)
    most = most.clamp(min=most.median())
    is_rest = torch.ones_like(sizes, dtype=torch.bool)
    is_rest[rotary.start : end] = False
    rest = sizes[is_rest]
    if len(rest):
        sizes[is_rest] = rest.clamp(min=rest.median())
    sizes[rotary.start : end] = most.repeat_interleave(2) if rotary.interleaved else most.repeat(2)
    return sizes


def _cached(
    model: PreTrainedModel, layout: KVLayout, num_tokens: int, first: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return cached(model, layout, torch.arange(num_tokens).unsqueeze(0), first)


def cached(
    model: PreTrainedModel, layout: KVLayout, ids: torch.Tensor, first: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What transformers caches of a prompt ``[1, tokens]`` from a position on, in each layer.

    Raises:
        LayoutError: The model caches in another way.
    """
    cache = DynamicCache(config=model.config)
    for number, window in enumerate(layout.windows):
        if window is not None and number < len(cache.layers):
            if type(cache.layers[number]) is not DynamicSlidingWindowLayer:
                msg = f"layer {number} caches no window, and its config says {window} tokens"
                raise LayoutError(msg)
            # The other kind drops what is before the window.
            cache.layers[number] = DynamicLayer()
    ids = ids.to(model.device)
    options: dict[str, Any] = {}
    if "position_ids" in forward_inputs(model):
        positions = torch.arange(first, first + ids.shape[1], device=model.device)
        options["position_ids"] = positions.unsqueeze(0)
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache, use_cache=True, **options)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            msg = f"layer {number} caches through {type(layer).__name__}: not what its config says"
            raise LayoutError(msg)
        if layer.keys is None or layer.values is None:
            msg = f"layer {number} stores no K and V through the transformers Cache interface"
            raise LayoutError(msg)
        found.append((layer.keys, layer.values))
    return found
