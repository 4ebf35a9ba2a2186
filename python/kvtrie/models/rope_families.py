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
            them. 0: there is no such rule, and a config that lists nothing is refused.
        reverse: Keys rotate the other way.
        is_mla: K is a latent and a separate window.
        needs_settings: A config without RoPE settings means a type other than ``default``.
        item_positions: M-RoPE: each pair of K rotates by one of several positions of its token.
            All of them change by the same number when a run moves, so pairs rotate as if there
            was one position.
    """

    interleaved: bool | None = False
    expanded_interleaved: bool = False
    theta: float = 10_000.0
    partial: float | None = None
    layers: Literal[
        "all", "sliding", "windowed", "marked", "by_type", "listed", "named", "none"
    ] = "all"
    every: int = 0
    reverse: bool = False
    is_mla: bool = False
    needs_settings: bool = False
    item_positions: bool = False


_NEOX: Final = Family()
# Latents in the pairs of vLLM and SGLang (is_neox_style=False in their deepseek_v2.py).
_DEEPSEEK_V3: Final = Family(interleaved=True, is_mla=True)

FAMILIES: Final[Mapping[str, Family]] = {
    "afmoe": Family(layers="sliding", every=4),
    "apertus": Family(theta=12_000_000.0, needs_settings=True),
    "arcee": _NEOX,
    "aria_text": _NEOX,
    "axk1": _DEEPSEEK_V3,
    "bamba": Family(partial=0.5),
    "bitnet": Family(theta=500_000.0),
    "codegen": Family(interleaved=True, partial=1.0),
    "cohere": Family(interleaved=True, theta=500_000.0),
    "cohere2": Family(interleaved=True, layers="sliding", every=4),
    "cohere2_moe": Family(interleaved=True, layers="sliding"),
    "cwm": Family(theta=1_000_000.0, needs_settings=True),
    # Complex numbers, stored in pairs. V3 below stores rotated keys in halves.
    "deepseek_v2": Family(interleaved=True, expanded_interleaved=True, is_mla=True),
    "deepseek_v3": _DEEPSEEK_V3,
    "diffllama": _NEOX,
    "doge": _NEOX,
    "dots1": _NEOX,
    "ernie4_5": Family(interleaved=True, theta=500_000.0),
    "ernie4_5_moe": Family(interleaved=True, theta=500_000.0),
    # Its frequencies are stored in the order of axes, and applied in that of pairs.
    "ernie4_5_vl_moe_text": Family(interleaved=True, theta=500_000.0, item_positions=True),
    "exaone4": Family(layers="windowed", every=4),
    "exaone_moe": Family(layers="windowed", every=4),
    "falcon": _NEOX,
    "falcon_h1": _NEOX,
    "flex_olmo": Family(theta=500_000.0),
    "gemma": _NEOX,
    "gemma2": _NEOX,
    "gemma3_text": Family(theta=1_000_000.0, layers="by_type", every=6),
    "gemma3n_text": Family(theta=1_000_000.0, layers="by_type", every=5, needs_settings=True),
    "gemma4_text": Family(theta=1_000_000.0, layers="by_type", needs_settings=True),
    "gemma4_unified_text": Family(theta=1_000_000.0, layers="by_type", needs_settings=True),
    "glm": Family(interleaved=True, partial=0.5),
    "glm4": Family(interleaved=True, partial=0.5),
    "glm4_moe": Family(partial=0.5),
    "glm4_moe_lite": _DEEPSEEK_V3,
    "glm4v_moe_text": Family(partial=0.5, item_positions=True),
    "glm4v_text": Family(interleaved=True, partial=1.0, item_positions=True),
    "glm_ocr_text": Family(interleaved=True, partial=1.0, item_positions=True),
    "gpt_neox": Family(partial=0.25),
    "gpt_neox_japanese": Family(partial=1.0),
    "gpt_oss": Family(theta=150_000.0, needs_settings=True),
    "gptj": Family(interleaved=True, partial=1.0),
    "granite": _NEOX,
    "granite_swa": Family(layers="listed"),
    "granitemoe": _NEOX,
    "granitemoe_swa": Family(layers="listed"),
    "granitemoehybrid": Family(layers="named"),
    "granitemoeshared": _NEOX,
    "helium": Family(interleaved=True, theta=100_000.0),
    "hy_v3": Family(theta=11_158_840.0),
    "hyperclovax": _NEOX,
    "jais2": _NEOX,
    "jamba": Family(layers="none"),
    "jetmoe": _NEOX,
    "kimi_linear": Family(layers="none", is_mla=True),
    "laguna": Family(partial=1.0, layers="by_type", needs_settings=True),
    "lfm2": Family(theta=1_000_000.0),
    "lfm2_moe": Family(theta=1_000_000.0),
    "llama": _NEOX,
    # transformers keeps the checkpoint's pairs; vLLM permutes the weights into halves
    # (permute_qk_weight_for_rotary in its llama4.py).
    "llama4_text": Family(interleaved=None, theta=500_000.0, layers="marked", every=4),
    "mellum": Family(layers="by_type", needs_settings=True),
    "mimo_v2_flash": Family(partial=1.0, layers="by_type", needs_settings=True),
    "minicpm3": Family(interleaved=False, is_mla=True),
    "minimax": Family(theta=1_000_000.0),
    "minimax_m2": Family(theta=5_000_000.0, partial=1.0),
    "ministral": _NEOX,
    "ministral3": Family(needs_settings=True),
    "mistral": _NEOX,
    "mistral4": Family(interleaved=True, is_mla=True, needs_settings=True),
    "mixtral": Family(theta=1_000_000.0),
    "modernbert-decoder": Family(layers="by_type", needs_settings=True),
    "nanochat": Family(reverse=True),
    "nemotron": Family(partial=0.5),
    "nemotron_h": Family(layers="none"),
    "olmo": _NEOX,
    "olmo2": _NEOX,
    "olmo3": Family(theta=500_000.0, layers="by_type", every=4),
    "olmo_hybrid": Family(layers="named"),
    "olmoe": _NEOX,
    "paddleocr_vl_text": Family(theta=500_000.0, item_positions=True),
    "persimmon": Family(partial=0.5),
    "phi": Family(partial=0.5),
    "phi3": Family(partial=1.0),
    "phimoe": Family(theta=1_000_000.0),
    "qwen2": _NEOX,
    "qwen2_5_vl_text": Family(theta=1_000_000.0, item_positions=True),
    "qwen2_moe": _NEOX,
    "qwen2_vl_text": Family(theta=1_000_000.0, item_positions=True),
    "qwen3": _NEOX,
    "qwen3_5_moe_text": Family(partial=0.25, item_positions=True),
    "qwen3_5_text": Family(partial=0.25, item_positions=True),
    "qwen3_moe": _NEOX,
    "qwen3_next": Family(partial=0.25),
    "qwen3_vl_moe_text": Family(theta=500_000.0, item_positions=True),
    "qwen3_vl_text": Family(theta=500_000.0, item_positions=True),
    "seed_oss": _NEOX,
    "smollm3": Family(theta=2_000_000.0, layers="marked", every=4),
    "solar_open": Family(theta=1_000_000.0),
    "stablelm": Family(partial=0.25),
    "starcoder2": _NEOX,
    "step3p5": Family(partial=1.0, layers="by_type", needs_settings=True),
    "vaultgemma": _NEOX,
    "youtu": _DEEPSEEK_V3,
    "zamba2": Family(layers="named"),
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
