"""Tiny random models, one per architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers

if TYPE_CHECKING:
    from collections.abc import Callable

VOCAB = 300

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    # Large, so that a random model's answers depend on its prompt.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GQA = {**_SIZES, "num_key_value_heads": 2}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_SHORT: dict[str, Any] = {"vocab_size": VOCAB, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}

_WINDOW: dict[str, Any] = {**_GQA, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 11}
_MIXED = ["sliding_attention", "full_attention"] * 2
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_TWO_BASES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
}

# Windows next to full attention, shorter than the prompts of the tests.
WINDOWS: dict[str, Callable[[], Any]] = {
    # Two bases.
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_WINDOW, layer_types=list(_MIXED), rope_parameters=dict(_TWO_BASES)
    ),
    # YaRN, attention sinks, experts.
    "gpt-oss": lambda: transformers.GptOssConfig(**_WINDOW, **_EXPERTS, layer_types=list(_MIXED)),
    # YaRN in full layers alone.
    "olmo3": lambda: transformers.Olmo3Config(
        **{**_WINDOW, "num_key_value_heads": 4},
        layer_types=list(_MIXED),
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "full_attention": {**_YARN, "rope_theta": 500000.0},
        },
    ),
    # No RoPE in full layers; adjacent pairs.
    "cohere2": lambda: transformers.Cohere2Config(**_WINDOW, layer_types=list(_MIXED)),
    # No RoPE in full layers; halves.
    "exaone4": lambda: transformers.Exaone4Config(**_WINDOW, layer_types=list(_MIXED)),
    # Full layers have wider and fewer heads, of which a quarter rotates.
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **{**_WINDOW, "global_head_dim": 32, "num_global_key_value_heads": 1},
        attention_k_eq_v=True,
        layer_types=list(_MIXED),
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCAB,
    ),
    # More heads in windows, V narrower than K, part of K rotated.
    "mimo-v2": lambda: transformers.MiMoV2FlashConfig(
        **{**_WINDOW, "num_key_value_heads": 1},
        v_head_dim=12,
        layer_types=list(_MIXED),
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ),
    # All layers have the window.
    "mistral": lambda: transformers.MistralConfig(**_WINDOW),
}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama-gqa": lambda: transformers.LlamaConfig(**_GQA),
    "llama-yarn": lambda: transformers.LlamaConfig(**_GQA, rope_parameters=dict(_YARN)),
    # Heads wider than hidden_size / heads, K normed.
    "qwen3": lambda: transformers.Qwen3Config(**_GQA, head_dim=24),
    # MHA, partial rotary, parallel residual.
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**_SIZES),
    # Learned positions, other field names.
    "gpt2": lambda: transformers.GPT2Config(
        **_SHORT, n_embd=64, n_positions=512, bos_token_id=1, eos_token_id=2
    ),
    # ALiBi, no position ids.
    "bloom": lambda: transformers.BloomConfig(**_SHORT, hidden_size=64),
    # One KV head.
    "falcon-mqa": lambda: transformers.FalconConfig(**_SIZES, multi_query=True, alibi=False),
    # Experts.
    "mixtral": lambda: transformers.MixtralConfig(
        **_GQA, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    # Adjacent pairs, half of each head rotated.
    "glm": lambda: transformers.GlmConfig(**_GQA, head_dim=16, attention_bias=True),
    # Every second layer without RoPE.
    "smollm3": lambda: transformers.SmolLM3Config(**_GQA, no_rope_layers=[1, 0]),
    # MLA: V narrower than K, whose last channels are rotated.
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **_SIZES,
        num_key_value_heads=4,
        first_k_dense_replace=2,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
    ),
    # A factor per pair; other factors beyond 256 tokens.
    "phi3-longrope": lambda: transformers.Phi3Config(
        **_GQA,
        original_max_position_embeddings=256,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + pair / 9 for pair in range(8)],
            "long_factor": [3.0 + pair for pair in range(8)],
        },
    ),
    # Other frequencies beyond 512 tokens.
    "llama-ntk": lambda: transformers.LlamaConfig(
        **_GQA, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    ),
    **WINDOWS,
}
