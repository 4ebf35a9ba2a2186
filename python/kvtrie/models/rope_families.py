"""What configs of known model types do not say about RoPE: one row per type.

Source: transformers 5.19, ``modeling_<type>.py`` for the order of pairs and the rotated layers,
    ``configuration_<type>.py`` for defaults. tests/kernels/test_rope_models.py compares rotated
    keys of all of them with recomputed ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the config of a model type does not say.

    Args:
        interleaved: Order of pairs in stored keys; ``None`` if engines differ.
        expanded_interleaved: The same for expanded MLA heads.
        theta: Base if the config has none.
        partial: Share of a head that rotates if the config does not say. ``None``: a whole head,
            and a config that says otherwise is refused.
        layers: Which layers rotate: all; those with a sliding window; those, or all if the model
            has no window; those that ``no_rope_layers`` marks with 1; or settings by type.
        every: One in this many layers has full attention (or no RoPE) if the config does not list
            layer types.
        reverse: Keys rotate the other way.
        is_mla: K is a latent and a separate window.
        needs_settings: A config without RoPE settings means a type other than ``default``.
    """

    interleaved: bool | None = False
    expanded_interleaved: bool = False
    theta: float = 10_000.0
    partial: float | None = None
    layers: Literal["all", "sliding", "windowed", "marked", "by_type"] = "all"
    every: int = 4
    reverse: bool = False
    is_mla: bool = False
    needs_settings: bool = False


_NEOX: Final = Family()
# Latents in the pairs of vLLM and SGLang (is_neox_style=False in their deepseek_v2.py).
_DEEPSEEK_V3: Final = Family(interleaved=True, is_mla=True)

FAMILIES: Final[Mapping[str, Family]] = {
    "afmoe": Family(layers="sliding"),
    "apertus": Family(theta=12_000_000.0, needs_settings=True),
    "arcee": _NEOX,
    "aria_text": _NEOX,
    "axk1": _DEEPSEEK_V3,
    "bitnet": Family(theta=500_000.0),
    "codegen": Family(interleaved=True, partial=1.0),
    "cohere": Family(interleaved=True, theta=500_000.0),
    "cohere2": Family(interleaved=True, layers="sliding"),
    "cwm": Family(theta=1_000_000.0, needs_settings=True),
    # Complex numbers, stored in pairs. V3 below stores rotated keys in halves.
    "deepseek_v2": Family(interleaved=True, expanded_interleaved=True, is_mla=True),
    "deepseek_v3": _DEEPSEEK_V3,
    "diffllama": _NEOX,
    "doge": _NEOX,
    "dots1": _NEOX,
    "ernie4_5": Family(interleaved=True, theta=500_000.0),
    "ernie4_5_moe": Family(interleaved=True, theta=500_000.0),
    "exaone4": Family(layers="windowed"),
    "exaone_moe": Family(layers="windowed"),
    "falcon": _NEOX,
    "flex_olmo": Family(theta=500_000.0),
    "gemma": _NEOX,
    "gemma2": _NEOX,
    "gemma3_text": Family(theta=1_000_000.0, layers="by_type", every=6),
    "glm": Family(interleaved=True, partial=0.5),
    "glm4": Family(interleaved=True, partial=0.5),
    "glm4_moe": Family(partial=0.5),
    "glm4_moe_lite": _DEEPSEEK_V3,
    "gpt_neox": Family(partial=0.25),
    "gpt_neox_japanese": Family(partial=1.0),
    "gpt_oss": Family(theta=150_000.0, needs_settings=True),
    "gptj": Family(interleaved=True, partial=1.0),
    "granite": _NEOX,
    "granitemoe": _NEOX,
    "granitemoeshared": _NEOX,
    "helium": Family(interleaved=True, theta=100_000.0),
    "hyperclovax": _NEOX,
    "jais2": _NEOX,
    "jetmoe": _NEOX,
    "llama": _NEOX,
    # transformers keeps the checkpoint's pairs; vLLM permutes the weights into halves
    # (permute_qk_weight_for_rotary in its llama4.py).
    "llama4_text": Family(interleaved=None, theta=500_000.0, layers="marked"),
    "minicpm3": Family(interleaved=False, is_mla=True),
    "minimax_m2": Family(theta=5_000_000.0, partial=1.0),
    "ministral": _NEOX,
    "ministral3": Family(needs_settings=True),
    "mistral": _NEOX,
    "mixtral": Family(theta=1_000_000.0),
    "nanochat": Family(reverse=True),
    "nemotron": Family(partial=0.5),
    "olmo": _NEOX,
    "olmo2": _NEOX,
    "olmo3": Family(theta=500_000.0, layers="by_type", every=4),
    "olmoe": _NEOX,
    "persimmon": Family(partial=0.5),
    "phi": Family(partial=0.5),
    "phi3": Family(partial=1.0),
    "phimoe": Family(theta=1_000_000.0),
    "qwen2": _NEOX,
    "qwen2_moe": _NEOX,
    "qwen3": _NEOX,
    "qwen3_moe": _NEOX,
    "seed_oss": _NEOX,
    "smollm3": Family(theta=2_000_000.0, layers="marked"),
    "solar_open": Family(theta=1_000_000.0),
    "stablelm": Family(partial=0.25),
    "starcoder2": _NEOX,
    "vaultgemma": _NEOX,
    "youtu": _DEEPSEEK_V3,
}

_ABSOLUTE: Final = "its positions are absolute: they are in its keys where no rotation reaches"
ALIBI: Final = "it has ALiBi biases instead of RoPE"
_NORMED: Final = (
    "it scales each channel of K after rotating it (key_layernorm): no rotation remains"
)
REFUSED: Final[Mapping[str, str]] = {
    "biogpt": _ABSOLUTE,
    "bloom": ALIBI,
    "ctrl": _ABSOLUTE,
    "gpt-sw3": _ABSOLUTE,
    "gpt2": _ABSOLUTE,
    "gpt_bigcode": _ABSOLUTE,
    "gpt_neo": _ABSOLUTE,
    "hunyuan_v1_dense": _NORMED,
    "hunyuan_v1_moe": _NORMED,
    "mpt": ALIBI,
    "openai-gpt": _ABSOLUTE,
    "opt": _ABSOLUTE,
    "xglm": _ABSOLUTE,
}
