"""Tiny models with random weights, shaped like real ones, that vLLM and transformers both run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tokenizers
import torch
import transformers
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

if TYPE_CHECKING:
    from pathlib import Path

VOCAB = 512

_COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Wide enough that attention is not a plain average: another context gives other KV.
    "initializer_range": 0.15,
}


def llama(folder: Path, seed: int = 0) -> Path:
    config = transformers.LlamaConfig(
        **_COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=32
    )
    return _save(transformers.LlamaForCausalLM, config, folder, seed)


def deepseek(folder: Path, seed: int = 0) -> Path:
    """MLA: one latent row per token, with a rotated part."""
    config = transformers.DeepseekV2Config(
        **_COMMON,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=3,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_shared_experts=1,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
    )
    return _save(transformers.DeepseekV2ForCausalLM, config, folder, seed)


def gemma(folder: Path, seed: int = 0) -> Path:
    """Layers with a sliding window next to full attention."""
    config = transformers.Gemma3TextConfig(
        **_COMMON | {"num_hidden_layers": 4},
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=96,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    return _save(transformers.Gemma3ForCausalLM, config, folder, seed)


def lfm(folder: Path, seed: int = 0) -> Path:
    """Layers whose convolution has a state next to full attention."""
    size = _COMMON["hidden_size"]
    config = transformers.Lfm2Config(
        **{name: one for name, one in _COMMON.items() if name != "rms_norm_eps"}
        # Published checkpoints say the two widths, and vLLM reads them.
        | {"num_hidden_layers": 4, "block_dim": size, "conv_dim": size},
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"] * 2,
        block_auto_adjust_ff_dim=False,
    )
    return _save(transformers.Lfm2ForCausalLM, config, folder, seed)


def granite(folder: Path, seed: int = 0) -> Path:
    """Layers with state spaces (Mamba 2) next to full attention."""
    config = transformers.GraniteMoeHybridConfig(
        **_COMMON | {"num_hidden_layers": 4},
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["mamba", "attention"] * 2,
        position_embedding_type="rope",
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=32,
    )
    return _save(transformers.GraniteMoeHybridForCausalLM, config, folder, seed)


def qwen_next(folder: Path, seed: int = 0) -> Path:
    """Layers with a gated delta net next to full attention."""
    config = transformers.Qwen3NextConfig(
        **_COMMON | {"num_hidden_layers": 4},
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_conv_kernel_dim=4,
        # The least that vLLM's kernels for CPUs take.
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    return _save(transformers.Qwen3NextForCausalLM, config, folder, seed)


# Of `idefics`: the token in the place of an image in a prompt, those before and after the tokens of
# the image, which are so many, and the sides of what it sees, in pixels.
IMAGE, BORDER, BEGIN, IMAGE_TOKENS, PIXELS = 500, 501, 502, 36, 96


def idefics(folder: Path, seed: int = 0) -> Path:
    """Images before a Llama, whose tokens attend to earlier ones alone, with plain positions."""
    config = transformers.Idefics3Config(
        image_token_id=IMAGE,
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=0,
        text_config=transformers.LlamaConfig(
            **_COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=32, pad_token_id=0
        ),
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": PIXELS,
            "patch_size": 8,
            # Wide enough that different images have different features.
            "initializer_range": 0.15,
        },
    )
    names = {
        IMAGE: "<image>",
        BORDER: "<fake_token_around_image>",
        BEGIN: "<global-img>",
        BEGIN + 1: "<end_of_utterance>",
    }
    vocabulary = {names.get(at, f"w{at}"): at for at in range(VOCAB)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="w0",
        bos_token="w1",
        eos_token="w2",
        pad_token="w0",
        additional_special_tokens=list(names.values()),
    )
    side = {"longest_edge": PIXELS}
    # Without torchvision.
    pictures = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    transformers.Idefics3Processor(pictures, tokenizer, image_seq_len=IMAGE_TOKENS).save_pretrained(
        folder
    )
    return _save(transformers.Idefics3ForConditionalGeneration, config, folder, seed)


# Ways to scale the frequencies by which keys are rotated.
SCALED: dict[str, dict[str, object]] = {
    "yarn": {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 8192},
    "llama3": {
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4096,
    },
}


def scaled(folder: Path, name: str, seed: int = 0) -> Path:
    rope = {"rope_type": name, **SCALED[name]}
    config = transformers.LlamaConfig(
        **_COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=32, rope_parameters=rope
    )
    return _save(transformers.LlamaForCausalLM, config, folder, seed)


def _save(kind: Any, config: Any, folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    model = kind(config).to(torch.float32).eval()
    model.save_pretrained(folder)
    return folder
