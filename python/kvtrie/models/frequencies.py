"""RoPE frequencies from checked settings: by transformers if installed, else by its arithmetic.

A moved key needs the same bits as the engine's. So `_own` runs the float32 operations of
transformers in the same order, in torch. float64 with one rounding at the end would differ: float32
rounds the exponent ``2i / width``, and a difference in the last bit grows to several.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    Compute = Callable[[Any, Any, int | None], tuple[Tensor, float]]


def frequencies(settings: Mapping[str, Any], head_dim: int) -> tuple[tuple[float, ...], float]:
    """Radians per position of each pair, and the attention factor. Needs torch.

    Args:
        settings: Checked ``rope_parameters`` of one kind of layer, in the spelling of transformers
            5, with ``rope_type`` and ``rope_theta``.
        head_dim: Channels that rotate; for ``proportional``, all channels of a head.
    """
    try:
        import torch  # noqa: PLC0415 - only reading a config needs torch
    except ImportError as error:
        msg = "RopeSpec.from_config needs torch: pip install 'kvtrie[torch]'"
        raise ImportError(msg, name="torch") from error

    # Frequencies of a GPU may differ in the last bit.
    with torch.device("cpu"):
        compute = _of_transformers(settings["rope_type"])
        if compute is None:
            inv_freq, factor = _own(settings, head_dim)
        else:
            config = SimpleNamespace(
                head_dim=head_dim,
                hidden_size=head_dim,
                num_attention_heads=1,
                rope_parameters=settings,
                standardize_rope_params=lambda: None,
            )
            # LongRoPE alone asks for a length.
            longer = settings.get("original_max_position_embeddings", 0) + 1
            seq_len = longer if settings.get("is_long") else None
            inv_freq, factor = compute(config, torch.device("cpu"), seq_len)
        return tuple(float(value) for value in inv_freq.tolist()), float(factor)


def _of_transformers(kind: str) -> Compute | None:
    """A function of transformers, or None: each model of transformers 5 defines ``default``."""
    if kind == "default":
        return None
    try:
        # The mixin marks the versions whose functions read `rope_parameters`.
        from transformers.modeling_rope_utils import (  # noqa: PLC0415 - if installed
            ROPE_INIT_FUNCTIONS,
            RotaryEmbeddingConfigMixin,  # noqa: F401
        )
    except ImportError:
        return None
    found: Compute | None = ROPE_INIT_FUNCTIONS.get(kind)
    return found


def _own(settings: Mapping[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """The operations of transformers 5.19 (modeling_rope_utils.py), in their order."""
    import torch  # noqa: PLC0415 - only reading a config needs torch

    kind, theta = settings["rope_type"], settings["rope_theta"]
    if kind == "proportional":
        pairs = int(settings["partial_rotary_factor"] * head_dim // 2)
        steps = torch.arange(0, 2 * pairs, 2, dtype=torch.float32)
        rotating = 1.0 / (theta ** (steps / head_dim))
        still = torch.zeros(head_dim // 2 - pairs, dtype=torch.float32)
        return torch.cat((rotating, still)) / settings["factor"], 1.0
    if kind == "longrope":
        return _longrope(settings, head_dim)
    powers = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if kind == "yarn":
        return _yarn(settings, powers, head_dim), _yarn_attention_factor(settings)
    plain = 1.0 / powers
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / settings["factor"], 1.0
    return _llama3(settings, plain), 1.0


def _llama3(settings: Mapping[str, Any], plain: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended."""
    import torch  # noqa: PLC0415 - only reading a config needs torch

    factor, length = settings["factor"], settings["original_max_position_embeddings"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    wave = 2 * math.pi / plain
    is_long, is_short = wave > length / low, wave < length / high
    stretched = torch.where(is_long, plain / factor, plain)
    smooth = (length / wave - low) / (high - low)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    return torch.where(is_long | is_short, stretched, blended)


def _longrope(settings: Mapping[str, Any], width: int) -> tuple[Tensor, float]:
    """LongRoPE: a factor per pair, of two lists, by the length of the prompt."""
    import torch  # noqa: PLC0415 - only reading a config needs torch

    name = "long_factor" if settings["is_long"] else "short_factor"
    factors = torch.tensor(settings[name], dtype=torch.float32)
    steps = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    inv_freq = 1.0 / (factors * settings["rope_theta"] ** steps)
    given, factor = settings.get("attention_factor"), settings["factor"]
    if given is not None:
        return inv_freq, float(given)
    if factor <= 1.0:
        return inv_freq, 1.0
    length = settings["original_max_position_embeddings"]
    return inv_freq, math.sqrt(1 + math.log(factor) / math.log(length))


def _yarn(settings: Mapping[str, Any], powers: Tensor, width: int) -> Tensor:
    """YaRN: a ramp over the pairs from their own frequencies to stretched ones."""
    import torch  # noqa: PLC0415 - only reading a config needs torch

    theta, factor = settings["rope_theta"], settings["factor"]
    length = settings["original_max_position_embeddings"]

    def pair_with(rotations: float) -> float:
        return (width * math.log(length / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = pair_with(settings["beta_fast"]), pair_with(settings["beta_slow"])
    if settings["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)
    own = 1 - torch.clamp(ramp, 0, 1)
    blended: Tensor = 1.0 / (factor * powers) * (1 - own) + 1.0 / powers * own
    return blended


def _yarn_attention_factor(settings: Mapping[str, Any]) -> float:
    given = settings.get("attention_factor")
    if given is not None:
        return float(given)
    factor: float = settings["factor"]
    if factor <= 1:
        return 1.0
    own, shared = settings.get("mscale"), settings.get("mscale_all_dim")
    if own and shared:
        return float((0.1 * own * math.log(factor) + 1.0) / (0.1 * shared * math.log(factor) + 1.0))
    return 0.1 * math.log(factor) + 1.0
