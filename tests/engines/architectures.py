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
}
