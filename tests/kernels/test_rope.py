"""RopeSpec as a value, the spellings that configs use, and refusals by name."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvtrie
from kvtrie import RopeSpec, UnsupportedRopeError
from kvtrie.rope import MAX_DELTA, Rotary

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "max_position_embeddings": 131072,
    "rope_theta": 10000.0,
}
GEMMA3 = LLAMA | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "rope_local_base_freq": 5000.0,
}
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MISSING = object()


def gemma3(full: dict[str, Any], sliding: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A config with settings for each type of layer, and `more` next to them."""
    types = {"full_attention": full, "sliding_attention": sliding}
    return {"model_type": "gemma3_text", "rope_parameters": types | more}


def made(config: dict[str, Any], **changes: Any) -> RopeSpec:
    return RopeSpec.from_config({**config, **changes})


def first(config: dict[str, Any], **changes: Any) -> Rotary:
    rotary = made(config, **changes).layers[0]
    assert rotary is not None
    return rotary


def test_spec_is_a_value() -> None:
    spec, same = made(LLAMA), made(LLAMA)
    assert spec == same
    assert hash(spec) == hash(same)
    assert spec != made(LLAMA, rope_theta=1e6)
    assert pickle.loads(pickle.dumps(spec)) == spec  # noqa: S301 - our own
    with pytest.raises(AttributeError):
        spec.head_dim = 8  # type: ignore[misc]


def test_layers_with_the_same_rope_share_one_rotary() -> None:
    spec = made(GEMMA3)
    assert len({id(layer) for layer in spec.layers}) == 2
    alike = made(GEMMA3, rope_local_base_freq=10000.0)
    assert len({id(layer) for layer in alike.layers}) == 1


def test_repr_is_for_people() -> None:
    assert repr(made(GEMMA3)) == (
        "RopeSpec(6 layers, head_dim=16: layers 0 to 4 rotate [0, 16) in halves; "
        "layer 5 rotates [0, 16) in halves)"
    )
    yarn = YARN | {"rope_theta": 10000.0}
    assert repr(made(DEEPSEEK, num_hidden_layers=1, rope_scaling=yarn)) == (
        "RopeSpec(1 layer, head_dim=40: layer 0 rotates [32, 40) in pairs, factor 1.139 in K)"
    )
    assert repr(RopeSpec(layers=(None, None), head_dim=4)) == (
        "RopeSpec(2 layers, head_dim=4: layers 0 to 1 stay)"
    )


def test_import_needs_no_torch() -> None:
    code = (
        "import sys, kvtrie, kvtrie.rope; kvtrie.rope.Rotary(inv_freq=(1.0,)).cos_sin([1]); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_error_is_kvtries_own() -> None:
    assert issubclass(UnsupportedRopeError, kvtrie.KvTrieError)
    assert not issubclass(UnsupportedRopeError, ValueError | kvtrie.LayoutError)


@pytest.mark.parametrize(
    ("fields", "expected", "named"),
    [
        pytest.param({"inv_freq": ()}, ValueError, "empty", id="no-pairs"),
        pytest.param({"inv_freq": [1.0]}, TypeError, "tuple", id="list"),
        pytest.param({"inv_freq": (1.0, "a")}, TypeError, r"inv_freq\[1\].*'a'", id="text"),
        pytest.param({"inv_freq": (True,)}, TypeError, "True", id="bool"),
        pytest.param({"inv_freq": (math.nan,)}, ValueError, "nan", id="nan"),
        pytest.param({"inv_freq": (1.0, math.inf)}, ValueError, r"\[1\] is inf", id="inf"),
        pytest.param({"start": -1}, ValueError, "start.*-1", id="start"),
        pytest.param({"start": 1.0}, TypeError, "start", id="start-float"),
        pytest.param({"interleaved": 1}, TypeError, "interleaved.*1", id="order"),
        pytest.param({"attention_factor": 0.0}, ValueError, "attention_factor", id="factor-0"),
        pytest.param({"attention_factor": math.inf}, ValueError, "inf", id="factor-inf"),
        pytest.param({"attention_factor": "1"}, TypeError, "attention_factor", id="factor-text"),
    ],
)
def test_rotary_refuses(fields: dict[str, Any], expected: type[Exception], named: str) -> None:
    with pytest.raises(expected, match=named):
        Rotary(**{"inv_freq": (1.0,), **fields})


@pytest.mark.parametrize(
    ("fields", "expected", "named"),
    [
        pytest.param({"layers": ()}, ValueError, "empty", id="no-layers"),
        pytest.param({"layers": [None]}, TypeError, "tuple", id="list"),
        pytest.param({"layers": (None, 1)}, TypeError, r"layers\[1\].*Rotary.*1", id="number"),
        pytest.param({"head_dim": 0}, ValueError, "head_dim.*0", id="head-0"),
        pytest.param({"head_dim": True}, TypeError, "head_dim", id="head-bool"),
        pytest.param({"head_dim": 3}, ValueError, r"layer 0 .*\[0, 4\).*3", id="head-narrow"),
        pytest.param(
            {"layers": (None, Rotary(inv_freq=(1.0,), start=7))},
            ValueError,
            r"layer 1 .*\[7, 9\).*8",
            id="window-beyond",
        ),
    ],
)
def test_spec_refuses(fields: dict[str, Any], expected: type[Exception], named: str) -> None:
    plain: dict[str, Any] = {"layers": (Rotary(inv_freq=(1.0, 0.5)),), "head_dim": 8}
    with pytest.raises(expected, match=named):
        RopeSpec(**{**plain, **fields})


@pytest.mark.parametrize(
    ("deltas", "expected", "named"),
    [
        pytest.param([1.0], TypeError, "float64", id="float"),
        pytest.param([True], TypeError, "bool", id="bool"),
        pytest.param([[1]], ValueError, r"\[1, 1\]", id="two-axes"),
        pytest.param(3, ValueError, "one axis", id="no-axis"),
        pytest.param([MAX_DELTA + 1], ValueError, str(MAX_DELTA + 1), id="far"),
        pytest.param([-MAX_DELTA - 1], ValueError, str(-MAX_DELTA - 1), id="far-back"),
        pytest.param(np.array([2**63], dtype=np.uint64), ValueError, str(2**63), id="unsigned"),
    ],
)
def test_cos_sin_refuses(deltas: Any, expected: type[Exception], named: str) -> None:
    with pytest.raises(expected, match=named):
        Rotary(inv_freq=(1.0,)).cos_sin(deltas)


def test_cos_sin_of_nothing_and_of_0() -> None:
    rotary = Rotary(inv_freq=(1.0, 0.5))
    cos, sin = rotary.cos_sin([])
    assert cos.shape == sin.shape == (0, 2)
    cos, sin = rotary.cos_sin([0])
    assert (cos.tolist(), sin.tolist()) == ([[1.0, 1.0]], [[0.0, 0.0]])


def test_old_and_new_spelling_are_one_spec() -> None:
    old = made(LLAMA, rope_theta=5e5, rope_scaling={**LLAMA3})
    new = made(LLAMA, rope_theta=None, rope_parameters={**LLAMA3, "rope_theta": 5e5})
    older = made(
        LLAMA,
        rope_theta=5e5,
        rope_scaling={("type" if k == "rope_type" else k): v for k, v in LLAMA3.items()},
    )
    both = made(
        LLAMA,
        rope_theta=5e5,
        rope_scaling={**LLAMA3},
        rope_parameters={**LLAMA3, "rope_theta": 5e5},
    )
    assert old == new == older == both


def test_objects_are_read_like_mappings() -> None:
    assert RopeSpec.from_config(SimpleNamespace(**LLAMA)) == made(LLAMA)


def test_config_is_not_changed() -> None:
    scaling = {**YARN}
    config = {**LLAMA, "rope_scaling": scaling}
    kept = {**config}
    RopeSpec.from_config(config)
    assert config == kept
    assert scaling == YARN


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        pytest.param({"model_type": "phi"}, 8, id="default-of-the-type"),
        pytest.param({"model_type": "phi", "partial_rotary_factor": 0.25}, 4, id="top level"),
        pytest.param(
            {"model_type": "phi", "rope_scaling": {"partial_rotary_factor": 0.25}}, 4, id="inside"
        ),
        pytest.param({"model_type": "gpt_neox", "rotary_pct": 0.5}, 8, id="gpt-neox"),
        pytest.param({"model_type": "gptj", "rotary_dim": 12}, 12, id="gpt-j"),
        pytest.param({"model_type": "minimax_m2", "rotary_dim": 6}, 6, id="minimax"),
        pytest.param({"model_type": "glm4_moe", "partial_rotary_factor": 0.334}, 6, id="odd"),
        pytest.param({"partial_rotary_factor": 1.0}, 16, id="whole"),
        pytest.param({"head_dim": 48}, 48, id="wide-heads"),
    ],
)
def test_window(changes: dict[str, Any], width: int) -> None:
    rotary = first(LLAMA, **changes)
    assert (rotary.start, rotary.width) == (0, width)


@pytest.mark.parametrize(
    ("model_type", "interleaved"),
    [
        ("llama", False),
        ("gpt_neox", False),
        ("gpt_oss", False),
        ("glm4_moe", False),
        ("gptj", True),
        ("glm4", True),
        ("cohere", True),
        ("ernie4_5", True),
        ("helium", True),
    ],
)
def test_pair_order(model_type: str, interleaved: bool) -> None:
    changes = {"model_type": model_type, "rotary_dim": 8 if model_type == "gptj" else None}
    settings = {"rope_type": "default"}
    assert first(LLAMA, **changes, rope_scaling=settings).interleaved is interleaved
    other = RopeSpec.from_config(
        {**LLAMA, **changes, "rope_scaling": settings}, interleaved=not interleaved
    ).layers[0]
    assert other is not None
    assert other.interleaved is not interleaved


def test_latent_and_expanded_rows() -> None:
    latent, expanded = made(DEEPSEEK), RopeSpec.from_config(DEEPSEEK, mla="expanded")
    assert (latent.head_dim, expanded.head_dim) == (40, 24)
    kept, computed = latent.layers[0], expanded.layers[0]
    assert kept is not None
    assert computed is not None
    assert (kept.start, kept.width, kept.interleaved) == (32, 8, True)
    assert (computed.start, computed.width, computed.interleaved) == (16, 8, False)
    assert kept.inv_freq == computed.inv_freq


@pytest.mark.parametrize(
    ("changes", "rotated"),
    [
        pytest.param({"model_type": "cohere2"}, [1, 1, 1, 0, 1, 1], id="cohere2"),
        pytest.param(
            {"model_type": "cohere2", "sliding_window_pattern": 2},
            [1, 0, 1, 0, 1, 0],
            id="cohere2-pattern",
        ),
        pytest.param({"model_type": "smollm3"}, [1, 1, 1, 0, 1, 1], id="smollm3"),
        pytest.param(
            {"model_type": "smollm3", "no_rope_layers": [0, 1, 0, 1, 1, 1]},
            [0, 1, 0, 1, 1, 1],
            id="smollm3-listed",
        ),
        pytest.param(
            {"model_type": "smollm3", "no_rope_layers": [], "no_rope_layer_interval": 3},
            [1, 1, 0, 1, 1, 0],
            id="smollm3-interval",
        ),
        pytest.param({"model_type": "exaone4"}, [1, 1, 1, 1, 1, 1], id="exaone4-no-window"),
        pytest.param(
            {"model_type": "exaone4", "sliding_window": 64}, [1, 1, 1, 0, 1, 1], id="exaone4"
        ),
        pytest.param(
            # The model does not read the flag.
            {"model_type": "exaone4", "sliding_window": 64, "use_sliding_window": False},
            [1, 1, 1, 0, 1, 1],
            id="exaone4-flag",
        ),
        pytest.param(
            {"model_type": "afmoe", "global_attn_every_n_layers": 3}, [1, 1, 0, 1, 1, 0], id="afmoe"
        ),
    ],
)
def test_layers_without_rope(changes: dict[str, Any], rotated: list[int]) -> None:
    layers = made(LLAMA, num_hidden_layers=6, **changes).layers
    assert [int(layer is not None) for layer in layers] == rotated


def test_vllms_own_name_of_yarn() -> None:
    """vLLM writes the name into the config of a DeepSeek model that it has loaded."""
    renamed = YARN | {"rope_type": "deepseek_yarn", "apply_yarn_scaling": True}
    assert made(DEEPSEEK, rope_scaling=renamed) == made(DEEPSEEK, rope_scaling=YARN)


def test_unknown_type_is_read_where_the_caller_vouches_for_the_order() -> None:
    config = LLAMA | {"model_type": "house_brand", "partial_rotary_factor": 0.5}
    for order in (False, True):
        layer = RopeSpec.from_config(config, interleaved=order).layers[0]
        assert layer is not None
        assert (layer.width, layer.interleaved) == (8, order)
    marked = RopeSpec.from_config({**config, "no_rope_layers": [1, 0, 1]}, interleaved=False)
    assert [layer is None for layer in marked.layers] == [False, True, False]
    nested = {
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e6},
            "sliding_attention": {"rope_theta": 1e4},
        },
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    by_type = RopeSpec.from_config({**config, **nested, "rope_theta": None}, interleaved=True)
    assert by_type.layers[0] == by_type.layers[2] != by_type.layers[1]


PUBLISHED = {
    "meta-llama/Llama-3.1-8B": (
        {
            "model_type": "llama",
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "hidden_size": 4096,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rope_scaling": {**LLAMA3},
        },
        "RopeSpec(32 layers, head_dim=128: layers 0 to 31 rotate [0, 128) in halves)",
    ),
    "Qwen/QwQ-32B with YaRN": (
        {
            "model_type": "qwen2",
            "num_hidden_layers": 64,
            "num_attention_heads": 40,
            "hidden_size": 5120,
            "max_position_embeddings": 40960,
            "rope_theta": 1000000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            },
        },
        (
            "RopeSpec(64 layers, head_dim=128: layers 0 to 63 rotate [0, 128) in halves, "
            "factor 1.139 in K)"
        ),
    ),
    "deepseek-ai/DeepSeek-V3": (
        {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "hidden_size": 7168,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "max_position_embeddings": 163840,
            "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"},
            "rope_theta": 10000,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
        },
        "RopeSpec(61 layers, head_dim=576: layers 0 to 60 rotate [512, 576) in pairs)",
    ),
    "openai/gpt-oss-20b": (
        {
            "model_type": "gpt_oss",
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "hidden_size": 2880,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rope_theta": 150000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        (
            "RopeSpec(24 layers, head_dim=64: layers 0 to 23 rotate [0, 64) in halves, "
            "factor 1.347 in K)"
        ),
    ),
    "EleutherAI/pythia-160m": (
        {
            "model_type": "gpt_neox",
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "hidden_size": 768,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
        },
        "RopeSpec(12 layers, head_dim=64: layers 0 to 11 rotate [0, 16) in halves)",
    ),
    "EleutherAI/gpt-j-6b": (
        {
            "model_type": "gptj",
            "n_layer": 28,
            "n_head": 16,
            "n_embd": 4096,
            "rotary": True,
            "rotary_dim": 64,
        },
        "RopeSpec(28 layers, head_dim=256: layers 0 to 27 rotate [0, 64) in pairs)",
    ),
}


@pytest.mark.parametrize(("config", "said"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_configs(config: dict[str, Any], said: str) -> None:
    assert repr(RopeSpec.from_config(config)) == said


def _axes(sections: object) -> dict[str, Any]:
    return {"rope_scaling": {"type": "mrope", "mrope_section": sections}}


REFUSED = [
    # RoPE types
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is dynamic NTK"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is LongRoPE"),
    ({"rope_scaling": {"type": "su"}}, "'su' is LongRoPE"),
    ({"rope_scaling": {"type": "mrope"}}, "M-RoPE"),
    ({"rope_scaling": {"type": "default", "mrope_section": [8]}}, "mrope_section"),
    (
        {"model_type": "hunyuan_vl_text", "rope_scaling": {"mrope_section": [2, 2, 2, 2]}},
        "a hunyuan_vl_text model: its type is unknown",
    ),
    ({"model_type": "qwen2_vl_text", **_axes([2, 3])}, "mrope_section is [2, 3], not a list of"),
    ({"model_type": "qwen2_vl_text", **_axes("233")}, "mrope_section is '233', not a list of"),
    ({"model_type": "qwen2_vl_text", **_axes([9, -3, 2])}, "mrope_section is [9, -3, 2], not"),
    ({"model_type": "qwen2_vl_text", **_axes([2, 3, 4])}, "[2, 3, 4] is of 9 pairs, not 8"),
    ({"model_type": "qwen3_vl_text", **_axes(5)}, "mrope_section is 5, not a list of"),
    ({"model_type": "qwen2_vl", "text_config": {"model_type": "llava"}}, "a llava model"),
    (
        {"model_type": "qwen2_vl", "quantization_config": {"kv_cache_quant_algo": "NVFP4"}},
        "quantization_config.kv_cache_quant_algo='NVFP4'): groups of 4-bit codes",
    ),
    ({"rope_parameters": {"rope_type": "fourier"}}, "rope_type 'fourier' is unknown"),
    ({"rope_parameters": {"rope_type": 3}}, "rope_type 3 is unknown"),
    ({"rope_scaling": {"rope_type": "yarn", "type": "linear"}}, "'yarn' and type 'linear' differ"),
    ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', not a mapping"),
    ({"model_type": "phi3", "rope_scaling": {**YARN}}, "LongRoPE's old name"),
    ({"rope_scaling": {**YARN, "apply_yarn_scaling": False}}, "apply_yarn_scaling"),
    # models
    ({"model_type": "gpt2"}, "gpt2 model: its positions are absolute"),
    ({"model_type": "opt"}, "absolute"),
    ({"model_type": "bloom"}, "ALiBi"),
    ({"model_type": "mpt"}, "ALiBi"),
    ({"model_type": "falcon", "alibi": True}, "ALiBi"),
    ({"model_type": "hunyuan_v1_dense"}, "key_layernorm"),
    ({"model_type": "house_brand"}, "house_brand model: its type is unknown"),
    ({"model_type": None}, "no model_type"),
    ({"model_type": "llama4_text"}, "interleaved=True for transformers"),
    ({"text_config": {}}, "multimodal (text_config)"),
    ({"vision_config": {}}, "multimodal (vision_config)"),
    ({"index_head_dim": 128}, "index_head_dim"),
    ({"index_topk": 2048}, "index_topk"),
    # K that no pool can hold
    ({"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4'): what rounding 4-bit codes again"),
    ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype='nvfp4'): groups of 4-bit codes share a scale"),
    ({"kv_cache_dtype": "fp6"}, "kv_cache_dtype='fp6'): it is unknown"),
    (
        {"quantization_config": {"kv_cache_scheme": {"num_bits": 4}}},
        "kv_cache_scheme={'num_bits': 4}): what rounding 4-bit codes again",
    ),
    (
        {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "strategy": "channel"}}},
        "scales by 'channel' are not supported, only by tensor, attn_head",
    ),
    (
        {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "symmetric": False}}},
        "zero points, and scales that are computed again, do not cancel",
    ),
    (
        {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "dynamic": True}}},
        "zero points, and scales that are computed again, do not cancel",
    ),
    (
        {"quantization_config": {"kv_cache_quant_algo": "NVFP4"}},
        "quantization_config.kv_cache_quant_algo='NVFP4'): groups of 4-bit codes",
    ),
    # missing fields
    ({"num_hidden_layers": MISSING}, "num_hidden_layers"),
    ({"num_attention_heads": MISSING}, "num_attention_heads"),
    ({"hidden_size": MISSING}, "hidden_size"),
    ({"model_type": "gptj"}, "rotary_dim"),
    ({"model_type": "deepseek_v3"}, "kv_lora_rank"),
    ({**DEEPSEEK, "qk_rope_head_dim": MISSING}, "qk_rope_head_dim"),
    ({"model_type": "gpt_oss"}, "rope_parameters"),
    ({"rope_scaling": {"type": "linear"}}, "have no factor"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
    *(
        ({"rope_scaling": {k: v for k, v in LLAMA3.items() if k != name}}, f"have no {name}")
        for name in LLAMA3
        if name not in {"rope_type", "original_max_position_embeddings"}
    ),
    ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries"),
    ({"model_type": "cohere2", "layer_types": ["full_attention"]}, "layer_types has 1 entries"),
    (
        {"model_type": "gemma3_text", "rope_parameters": {"full_attention": {}}},
        "have no 'sliding_attention', which layer 0 is",
    ),
    # contradictions
    ({"rope_parameters": {"rope_theta": 2e4}}, "rope_theta is 10000.0, and 20000.0"),
    (
        {"rope_parameters": {**YARN}, "rope_scaling": {**YARN, "factor": 8.0}},
        "rope_parameters and rope_scaling differ in factor",
    ),
    (
        {"rope_scaling": {**YARN}, "original_max_position_embeddings": 4096},
        "original_max_position_embeddings is 4096, and 32768",
    ),
    (
        {"model_type": "phi", "partial_rotary_factor": 0.5, "rotary_dim": 4},
        "partial_rotary_factor (8) and rotary_dim (4)",
    ),
    (
        {
            "model_type": "phi",
            "partial_rotary_factor": 0.5,
            "rope_scaling": {"partial_rotary_factor": 0.25},
        },
        "partial_rotary_factor is 0.5, and 0.25",
    ),
    ({"kv_lora_rank": 32}, "kv_lora_rank"),
    ({**DEEPSEEK, "rope_interleave": False}, "rope_interleave=False"),
    # nonsense
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2'"),
    ({"rope_scaling": {"type": "linear", "factor": math.nan}}, "factor is nan"),
    ({"rope_scaling": {"factor": 2.0}}, "factor=2.0 has no known meaning"),
    ({"rope_scaling": {**YARN, "alpha": 1000}}, "alpha=1000 has no known meaning"),
    ({"rope_scaling": {**YARN, "truncate": "no"}}, "truncate is 'no'"),
    ({"rope_scaling": {**YARN, "beta_fast": -1}}, "beta_fast is -1"),
    ({"rope_scaling": {**YARN, "attention_factor": 0}}, "attention_factor is 0"),
    ({"rope_scaling": {**YARN, "mscale": -1.0, "mscale_all_dim": 1.0}}, "mscale is -1.0"),
    (
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 0}},
        "original_max_position_embeddings is 0",
    ),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor 1 is not above"),
    ({"rope_theta": 0}, "rope_theta is 0"),
    ({"rope_theta": 1}, "rope_theta is 1"),
    ({"rope_theta": "10000"}, "rope_theta is '10000'"),
    ({"rope_theta": math.inf}, "rope_theta is inf"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    ({"head_dim": 16.0}, "head_dim is 16.0"),
    ({"head_dim": 15}, "head_dim 15 is odd"),
    ({"hidden_size": 66}, "66 does not divide into 4"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, more than 10,000"),
    ({"head_dim": 10**9}, "head_dim is 1000000000, more than 65,536"),
    ({"hidden_size": 4 * 10**9}, "hidden_size 4000000000 gives 4 heads more than 65,536"),
    ({"rope_theta": 10**400}, "rope_theta is 1000"),
    ({"partial_rotary_factor": 0.5}, "models of its type rotate whole heads"),
    ({"rotary_dim": 8}, "models of its type rotate whole heads"),
    ({"model_type": "phi", "partial_rotary_factor": 1.5}, "24 channels"),
    ({"model_type": "phi", "partial_rotary_factor": 0.01}, "0 channels"),
    ({"model_type": "phi", "partial_rotary_factor": -1}, "partial_rotary_factor is -1"),
    ({"model_type": "smollm3", "no_rope_layers": [0, 0, 0]}, "none of its layers"),
    ({"model_type": "smollm3", "no_rope_layers": [0, 2, 0]}, "no_rope_layers"),
    ({"model_type": "smollm3", "no_rope_layers": 3}, "no_rope_layers is 3"),
    ({"model_type": "cohere2", "layer_types": "full"}, "layer_types is 'full'"),
    ({"model_type": "cohere2", "sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
    (
        {"model_type": "gemma3_text", "rope_parameters": {"rope_type": "default"}},
        "do not name layer types",
    ),
    (gemma3({}, {}, factor=2), "mix layer types and fields (factor)"),
    (
        gemma3({**YARN, "truncate": False, "rope_theta": 1e6}, {"rope_theta": 1e4}),
        "truncate in the settings of 'full_attention'",
    ),
    (
        gemma3({"rope_type": "dynamic", "rope_theta": 1e6}, {"rope_theta": 1e4})
        | {"num_hidden_layers": 6},
        "'dynamic' is dynamic NTK",
    ),
    (
        gemma3({"rope_theta": 1e6}, {"rope_type": "default"}),
        "of 'sliding_attention' have no rope_theta",
    ),
]


@pytest.mark.parametrize(("changes", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_from_config_refuses_by_name(changes: dict[str, Any], named: str) -> None:
    config = {k: v for k, v in {**LLAMA, **changes}.items() if v is not MISSING}
    with pytest.raises(UnsupportedRopeError) as caught:
        RopeSpec.from_config(config)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        pytest.param({"rope_theta": None}, "rope_theta", id="no-theta"),
        pytest.param({"alibi": True}, "ALiBi", id="alibi"),
        pytest.param(
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "layer_types",
            id="layers-differ",
        ),
        pytest.param({"rope_local_base_freq": 1e4}, "rope_local_base_freq", id="two-bases"),
        pytest.param({"layer_rope_theta": [1e4, 0, 1e4]}, "layer_rope_theta", id="base-by-layer"),
        pytest.param({"no_rope_layer_interval": 4}, "no_rope_layer_interval", id="interval"),
        pytest.param({"no_rope_layers": []}, "no_rope_layers", id="no-marks"),
        pytest.param(
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "no layer_types",
            id="nested-without-types",
        ),
        pytest.param({"model_type": "gpt2"}, "absolute", id="gpt2"),
        pytest.param({"model_type": "hunyuan_v1_moe"}, "key_layernorm", id="hunyuan"),
    ],
)
def test_vouching_for_the_order_is_not_vouching_for_the_rest(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedRopeError, match=named):
        RopeSpec.from_config({**LLAMA, "model_type": "house_brand", **changes}, interleaved=False)


def test_arguments_of_the_call() -> None:
    mla: Any = "absorbed"
    with pytest.raises(ValueError, match="'absorbed'"):
        RopeSpec.from_config(DEEPSEEK, mla=mla)
    order: Any = 1
    with pytest.raises(TypeError, match=r"interleaved.*1"):
        RopeSpec.from_config(LLAMA, interleaved=order)
    nothings: list[Any] = [None, 3, {}]
    for nothing in nothings:
        with pytest.raises(UnsupportedRopeError, match="no model_type"):
            RopeSpec.from_config(nothing)


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"kv_cache_dtype": "int8_per_token_head"},
        {"kv_cache_dtype": "auto"},
        {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}},
        {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "strategy": "attn_head"}}},
        {"quantization_config": {"kv_cache_quant_algo": "FP8"}},
        {"quantization_config": {"kv_cache_scheme": None}},
    ],
)
def test_keys_rotate_alike_however_their_eight_bits_are_stored(changes: dict[str, Any]) -> None:
    assert RopeSpec.from_config({**LLAMA, **changes}) == RopeSpec.from_config(LLAMA)
