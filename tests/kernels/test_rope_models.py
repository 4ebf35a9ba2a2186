"""Specs against the models themselves: frequencies, and keys computed at other positions.

Every model type that `RopeSpec.from_config` knows is built tiny, with random weights. Norms get
random weights too: with weights of one, a norm after the rotation would go unnoticed.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvtrie import KVLayout, LayoutError, UnsupportedRopeError
from kvtrie.kernels.reference import rotate
from kvtrie.models.rope import FIELDS_OF_TYPE, REFUSED_TYPES, short_regime
from kvtrie.models.rope_families import FAMILIES
from kvtrie.rope import RopeSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

HEAD_DIM = 16
NUM_LAYERS = 4
NUM_TOKENS = 20
LENGTH = 1024

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "intermediate_size": 48,
    "max_position_embeddings": LENGTH,
    "sliding_window": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # experts
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_num_experts": 4,
    "moe_k": 2,
    # latent attention
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    # state next to attention
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_STATE = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_WITHOUT_HEAD_DIM = {
    *("axk1", "deepseek_v2", "deepseek_v3", "falcon", "glm4_moe_lite", "jetmoe"),
    *("kimi_linear", "minicpm3", "mistral4", "youtu"),
}
# Models without RoPE, in each layer or in these configs.
NOPE = ("jamba", "kimi_linear", "nemotron_h")
# No class of transformers for text alone loads them by their config.
_CLASSES = {
    "ernie4_5_vl_moe_text": (
        "transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe.Ernie4_5_VLMoeTextModel"
    ),
    "glm4v_moe_text": "transformers.models.glm4v_moe.modeling_glm4v_moe.Glm4vMoeTextModel",
    "glm4v_text": "transformers.models.glm4v.modeling_glm4v.Glm4vTextModel",
    "glm_ocr_text": "transformers.models.glm_ocr.modeling_glm_ocr.GlmOcrTextModel",
    "mistral4": "transformers.models.mistral4.modeling_mistral4.Mistral4ForCausalLM",
    "paddleocr_vl_text": (
        "transformers.models.paddleocr_vl.modeling_paddleocr_vl.PaddleOCRTextModel"
    ),
    "qwen2_5_vl_text": "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLTextModel",
    "qwen2_vl_text": "transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VLTextModel",
    "qwen3_vl_moe_text": (
        "transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeTextModel"
    ),
    "qwen3_vl_text": "transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLTextModel",
    "step3p5": "transformers.models.step3p7.modeling_step3p7.Step3p7TextModel",
}
MLA = (
    *("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "minicpm3"),
    *("mistral4", "youtu"),
)
_MIXED = ["sliding_attention", "full_attention"] * 2


def _axes(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "mrope_section": [*sections], **more}}


_CONV = ["conv", "full_attention"] * 2
_GEMMA4: dict[str, Any] = {
    "layer_types": _MIXED,
    "head_dim": HEAD_DIM,
    "global_head_dim": 2 * HEAD_DIM,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 64,
}
_CHANGES: dict[str, dict[str, Any]] = {
    **{name: {"num_key_value_heads": 4} for name in MLA},
    "bamba": {"attn_layer_indices": [1, 3]},
    "gemma3n_text": {
        "layer_types": _MIXED,
        "num_kv_shared_layers": 0,
        "intermediate_size": 48,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16], **_axes(3, 3, 2)},
    "glm4v_moe_text": _axes(1, 2, 1, partial_rotary_factor=0.5),
    "glm4v_text": _axes(2, 3, 3),
    "glm_ocr_text": _axes(2, 3, 3),
    "paddleocr_vl_text": _axes(2, 3, 3),
    "qwen2_5_vl_text": _axes(2, 3, 3),
    "qwen2_vl_text": _axes(2, 3, 3),
    "qwen3_5_moe_text": _axes(1, 1, 0, mrope_interleaved=True, partial_rotary_factor=0.25),
    "qwen3_5_text": _axes(1, 1, 0, mrope_interleaved=True, partial_rotary_factor=0.25),
    "qwen3_vl_moe_text": _axes(4, 2, 2, mrope_interleaved=True) | {"sliding_window": None},
    "qwen3_vl_text": _axes(4, 2, 2, mrope_interleaved=True),
    "granite_swa": {"layer_types": _MIXED, "layer_rope_theta": [1e4, 0, 1e6, 1e4]},
    "granitemoe_swa": {"layer_types": _MIXED, "layer_rope_theta": [1e4, 0, 1e6, 1e4]},
    "granitemoehybrid": {"layer_types": _STATE, "position_embedding_type": "rope"},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {
        "layer_types": _STATE,
        "num_key_value_heads": 4,
        "num_experts_per_token": 2,
        "num_experts_per_tok": 2,
    },
    "laguna": {"layer_types": _MIXED},
    "lfm2": {"layer_types": _CONV},
    "lfm2_moe": {"layer_types": _CONV},
    "mellum": {"layer_types": _MIXED},
    "mistral4": {"num_key_value_heads": 4, "qk_nope_head_dim": 8},
    "step3p5": {"layer_types": _MIXED, "num_sliding_attention_heads": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "use_mem_rope": True},
    "codegen": {"rotary_dim": 8},
    "falcon": {"alibi": False},
    "gemma3_text": {"sliding_window_pattern": 3},
    "gptj": {"rotary_dim": 8},
    "jetmoe": {"kv_channels": HEAD_DIM, "num_key_value_heads": 2, "num_experts_per_tok": 2},
    "minimax_m2": {"rotary_dim": 8},
    "ministral": {"head_dim": HEAD_DIM},
    "persimmon": {"qk_layernorm": True},
    "phi": {"qk_layernorm": True},
    "stablelm": {"qk_layernorm": True},
}


@dataclass(frozen=True, eq=False)
class Case:
    """A model type, and the fields of its config that differ from transformers' defaults."""

    name: str
    model_type: str
    changes: tuple[tuple[str, Any], ...] = ()

    def config(self) -> Any:
        cls = CONFIG_MAPPING[self.model_type]
        known = cls()
        # Reading a field that differs from layer to layer raises an error of another kind.
        known.allow_global_per_layer_attribute_access = True
        kwargs = {name: value for name, value in _SIZES.items() if hasattr(known, name)}
        if self.model_type in _WITHOUT_HEAD_DIM:
            kwargs.pop("head_dim", None)
        kwargs |= _CHANGES.get(self.model_type, {})
        return cls(**(kwargs | {name: _copy(value) for name, value in self.changes}))


def _copy(value: Any) -> Any:
    return (
        {name: _copy(inner) for name, inner in value.items()} if isinstance(value, dict) else value
    )


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
GPT_OSS = YARN | {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
DEEPSEEK = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 256,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}


def _variant(name: str, model_type: str, **changes: Any) -> Case:
    return Case(f"{model_type}-{name}", model_type, tuple(changes.items()))


VARIANTS = [
    _variant("old", "llama", rope_theta=123456.0),
    _variant("linear", "llama", rope_scaling={"type": "linear", "factor": 3.0}),
    _variant("llama3", "llama", rope_parameters=LLAMA3),
    _variant("yarn", "llama", rope_parameters=YARN),
    _variant("yarn-wide", "qwen2", rope_parameters=YARN | {"beta_fast": 8, "beta_slow": 2}),
    _variant("yarn-factor", "qwen3", rope_parameters=YARN | {"attention_factor": 1.25}),
    _variant("yarn-no-factor", "llama", rope_parameters=YARN | {"factor": None}),
    _variant("yarn-untruncated", "gpt_oss", rope_parameters=GPT_OSS),
    _variant("yarn-mscale", "deepseek_v2", rope_theta=10000, rope_scaling=DEEPSEEK),
    _variant("yarn-mscale", "deepseek_v3", rope_theta=10000, rope_scaling=DEEPSEEK),
    _variant("halves", "deepseek_v3", rope_interleave=False),
    _variant(
        "proportional",
        "llama",
        rope_parameters={
            "rope_type": "proportional",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
        },
    ),
    _variant("old-scaled", "gpt_neox", rotary_pct=0.5, rotary_emb_base=20000),
    _variant("odd", "glm4_moe", partial_rotary_factor=0.334),
    _variant("scaled-partial", "glm", rope_parameters={**YARN, "partial_rotary_factor": 0.5}),
    _variant(
        "old-linear",
        "gemma3_text",
        rope_theta=1e6,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    _variant("old-yarn", "olmo3", rope_theta=5e5, rope_scaling={**YARN, "rope_theta": 5e5}),
    _variant("listed", "smollm3", no_rope_layers=[0, 1, 1, 0]),
    _variant("no-window", "exaone4", sliding_window=None, layer_types=["full_attention"] * 4),
    _variant("mixed", "cohere2", layer_types=["full_attention", "sliding_attention"] * 2),
]
TYPES = [Case(name, name) for name in FAMILIES]
CASES = TYPES + VARIANTS
CASE = {case.name: case for case in CASES}
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RopeSpec]:
    def read(config: Any, **options: Any) -> RopeSpec:
        with monkeypatch.context() as hidden:
            hidden.setitem(sys.modules, "transformers", None)
            hidden.setitem(sys.modules, "transformers.modeling_rope_utils", None)
            return RopeSpec.from_config(config, **options)

    return read


@cache
def _model(case: Case) -> Any:
    torch.manual_seed(0)
    path = _CLASSES.get(case.model_type)
    if path is None:
        model = transformers.AutoModelForCausalLM.from_config(case.config()).eval()
    else:
        module, name = path.rsplit(".", 1)
        model = getattr(import_module(module), name)._from_config(case.config()).eval()
    model = model.float()
    # The grouped matrix product of experts has no float64.
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.data.uniform_(0.5, 1.5, generator=generator)
        else:
            weight.data.normal_(0, 0.08, generator=generator)
    return model


@cache
def _caches(case: Case) -> list[Any]:
    tokens = torch.arange(3, 9)[None]
    with torch.no_grad():
        layers = _model(case)(input_ids=tokens, use_cache=True).past_key_values.layers
    return [*layers]


@cache
def _keys(case: Case, start: int) -> list[Tensor]:
    """Cached K of every layer ``[heads, tokens, dim]``; of MLA, latent rows."""
    return _run(case, _model(case), torch.arange(start, start + NUM_TOKENS))


def _unrotated_keys(case: Case) -> Tensor:
    """K of the first layer in float64, with every token at position 0, where nothing is rotated."""
    model = _model(case).to(torch.float64)
    keys = _run(case, model, torch.zeros(NUM_TOKENS, dtype=torch.int64))[0]
    model.to(torch.float32)
    return keys


def _run(case: Case, model: Any, positions: Tensor) -> list[Tensor]:
    tokens = torch.randint(3, 60, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        done = model(input_ids=tokens, position_ids=positions[None], use_cache=True)
    layers = [
        layer
        for layer in done.past_key_values.layers
        if getattr(layer, "keys", None) is not None and layer.keys.numel()
    ]
    if case.model_type in MLA:
        return [torch.cat((layer.keys, layer.values), -1)[0] for layer in layers]
    return [layer.keys[0] for layer in layers]


def _spec(case: Case) -> RopeSpec:
    config = case.config()
    if case.model_type in MLA and case.model_type not in NOPE:
        # transformers rotates expanded heads in the order in which it keeps latents.
        expanded = RopeSpec.from_config(config, mla="expanded").layers[0]
        assert expanded is not None
        return RopeSpec.from_config(config, interleaved=expanded.interleaved)
    if case.model_type == "llama4_text":
        return RopeSpec.from_config(config, interleaved=True)
    return RopeSpec.from_config(config)


def _attention_layers(case: Case) -> list[int]:
    """The model's layers that keep K and V, by what its cache holds."""
    return [
        number
        for number, layer in enumerate(_caches(case))
        if getattr(layer, "keys", None) is not None and layer.keys.numel()
    ]


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def _embeddings(model: Any) -> Any:
    return next(
        module
        for name, module in model.named_modules()
        if name.endswith(("rotary_emb", "pos_emb")) and "layers" not in name
    )


@pytest.mark.parametrize(
    "case",
    # Two keep a table of sines instead of frequencies: see the next test. Three have none.
    [case for case in CASES if case.model_type not in {"codegen", "gptj", *NOPE}],
    ids=lambda case: case.name,
)
def test_frequencies_are_those_of_the_model_bit_for_bit(case: Case) -> None:
    config, spec = case.config(), _spec(case)
    module = _embeddings(_model(case))
    numbers = _attention_layers(case)
    assert len(spec.layers) == len(numbers)
    for layer, rotary in zip(numbers, spec.layers, strict=True):
        if rotary is None:
            continue
        if case.model_type in {"granite_swa", "granitemoe_swa"}:
            module = next(
                one
                for one in _model(case).model.rotary_embs
                if one.config.rope_parameters["rope_theta"] == config.layer_rope_theta[layer]
            )
        prefix = f"{config.layer_types[layer]}_" if not hasattr(module, "inv_freq") else ""
        inv_freq = getattr(module, f"{prefix}inv_freq")
        if case.model_type == "ernie4_5_vl_moe_text":
            # It keeps those of its first two axes apart, and applies them in turn.
            of_height, of_width, of_time = inv_freq.split(module.mrope_section)
            inv_freq = torch.cat([torch.stack([of_height, of_width], dim=-1).flatten(), of_time])
        sign = -1.0 if case.model_type == "nanochat" else 1.0
        assert rotary.inv_freq == tuple(sign * value for value in inv_freq.tolist())
        assert rotary.attention_factor == getattr(module, f"{prefix}attention_scaling")


@pytest.mark.parametrize("model_type", ["codegen", "gptj"])
def test_frequencies_of_a_table_of_sines(model_type: str) -> None:
    rotary = _spec(CASE[model_type]).layers[0]
    assert rotary is not None
    # As create_sinusoidal_positions of modeling_gptj.py has it.
    want = 1.0 / (10000 ** (torch.arange(0, 8, 2, dtype=torch.int64) / 8))
    assert rotary.inv_freq == tuple(want.tolist())


@pytest.mark.parametrize(("start", "delta"), [(5, 811), (816, -811)])
@by_name
def test_rotated_keys_are_those_that_the_model_computes_there(
    case: Case, start: int, delta: int
) -> None:
    spec = _spec(case)
    old, new = _keys(case, start), _keys(case, start + delta)
    assert len(old) == len(spec.layers)
    # In deeper layers of these the model's own rounding is more.
    most = 5e-5 if case.model_type in {"gemma4_text", "gemma4_unified_text", "step3p5"} else 2e-5
    for layer, keys in enumerate(old):
        assert keys.shape[-1] == spec.dims[layer]
        assert _error(rotate(keys, spec, delta, layer), new[layer]) < most
        if spec.layers[layer] is not None:
            assert _error(keys, new[layer]) > 1e-2  # else the test would show nothing


@by_name
def test_first_layer_is_within_twice_the_models_own_error(case: Case) -> None:
    spec, start, delta = _spec(case), 5, 811
    exact = rotate(_unrotated_keys(case), spec, torch.arange(NUM_TOKENS) + start + delta)
    own = _error(_keys(case, start + delta)[0], exact)
    rotated = rotate(_keys(case, start)[0], spec, delta)
    assert own < 2e-5
    assert _error(rotated, exact) <= 2 * own


@pytest.mark.parametrize("model_type", [name for name in MLA if name not in NOPE])
def test_expanded_heads_of_latent_attention(model_type: str) -> None:
    case = CASE[model_type]
    spec, delta = RopeSpec.from_config(case.config(), mla="expanded"), 811
    assert spec.head_dim == case.config().qk_nope_head_dim + 8
    attention = _model(case).model.layers[0].self_attn
    heads = []
    for start in (5, 5 + delta):
        latent = _keys(case, start)[0][None]
        with torch.no_grad():
            heads.append(attention.expand_kv(latent[..., :24], latent[..., 24:])[0])
    assert heads[0].shape[1] == 4
    assert _error(rotate(heads[0], spec, delta), heads[1]) < 2e-5


@pytest.mark.parametrize(
    "model_type", [name for name in MLA if name not in {"kimi_linear", "minicpm3"}]
)
def test_latent_rows_rotate_in_the_pairs_that_vllm_and_sglang_keep(model_type: str) -> None:
    """They rotate ``k_pe`` in place, in pairs; transformers' DeepseekV3 stores it in halves."""
    case = CASE[model_type]
    spec, delta = RopeSpec.from_config(case.config()), 811
    assert spec.head_dim == 24 + 8
    assert spec.layers[0] is not None
    assert (spec.layers[0].start, spec.layers[0].interleaved) == (24, True)
    order = list(range(8))
    if model_type != "deepseek_v2":
        order = [0, 4, 1, 5, 2, 6, 3, 7]
    in_pairs = list(range(24)) + [24 + channel for channel in order]
    old, new = (_keys(case, start)[0] for start in (5, 5 + delta))
    assert _error(rotate(old[..., in_pairs], spec, delta), new[..., in_pairs]) < 2e-5
    assert torch.equal(rotate(old[..., in_pairs], spec, delta)[..., :24], old[..., :24])


# Their config.json does not list which layers have attention: it must be read by transformers.
UNLISTED = ("bamba", "jamba", "kimi_linear", "nemotron_h")
by_listed_name = pytest.mark.parametrize(
    "case", [case for case in CASES if case.model_type not in UNLISTED], ids=lambda case: case.name
)


@pytest.mark.parametrize("model_type", UNLISTED)
def test_a_json_that_does_not_list_layers_with_state_is_refused(model_type: str) -> None:
    config = CASE[model_type].config().to_dict() | {"num_hidden_layers": NUM_LAYERS}
    for name in ("layer_types", "layers_block_type"):
        config.pop(name, None)
    with pytest.raises(UnsupportedRopeError, match="does not list them"):
        RopeSpec.from_config(config)


def test_a_json_with_the_older_names_of_layers() -> None:
    """Published files say mamba and attention, which the config class renames."""
    config = CASE["granitemoehybrid"].config()
    older = {"linear_attention": "mamba", "full_attention": "attention"}
    written = config.to_dict() | {"layer_types": [older[kind] for kind in config.layer_types]}
    assert RopeSpec.from_config(written) == RopeSpec.from_config(config)
    assert RopeSpec.from_config(written).state_layers


@pytest.mark.parametrize(
    ("listed", "named"),
    [(5, "layer_types is 5, not a list"), ([[1]] * 4, r"layer_types has \[1\] for layer 0")],
    ids=["number", "lists"],
)
def test_a_list_of_layers_that_is_none_is_refused_by_name(listed: object, named: str) -> None:
    config = CASE["granitemoehybrid"].config().to_dict() | {"layer_types": listed}
    with pytest.raises(UnsupportedRopeError, match=named):
        RopeSpec.from_config(config)


@by_listed_name
def test_config_and_its_json_give_one_spec(case: Case) -> None:
    config = case.config()
    order = True if case.name in {"llama4_text", "deepseek_v3-halves"} else None
    spec = RopeSpec.from_config(config, interleaved=order)
    assert RopeSpec.from_config(config.to_dict(), interleaved=order) == spec
    assert RopeSpec.from_config(case.config(), interleaved=order) == spec
    assert hash(RopeSpec.from_config(case.config(), interleaved=order)) == hash(spec)


@pytest.mark.parametrize(
    "model_type",
    [
        name
        for name, family in FAMILIES.items()
        if not (family.needs_settings or name in {*UNLISTED, "falcon_h1", "olmo_hybrid"})
    ],
)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    """A config.json without RoPE has the defaults of its config class."""
    case = CASE[model_type]
    needed = {
        *("model_type", "num_hidden_layers", "num_attention_heads", "hidden_size", "head_dim"),
        *("kv_channels", "n_layer", "n_embd", "n_head", "rotary_dim", "sliding_window"),
        *("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "sliding_window_pattern"),
        *("layer_types", "layers_block_type", "layer_rope_theta", "position_embedding_type"),
        *("use_mem_rope", "num_kv_shared_layers", "mlp_layer_types"),
    }
    if model_type == "minimax_m2":
        needed.discard("rotary_dim")
    full = case.config().to_dict()
    if model_type in MLA:
        full.pop("head_dim", None)
    short = {name: value for name, value in full.items() if name in needed and value is not None}
    order = True if model_type == "llama4_text" else None
    made = case.config()
    if "layer_types" not in short and "layers_block_type" not in short:
        made = CONFIG_MAPPING[model_type](**{k: v for k, v in short.items() if k != "model_type"})
    assert RopeSpec.from_config(short, interleaved=order) == RopeSpec.from_config(
        made, interleaved=order
    )


@pytest.mark.parametrize(
    "model_type", [name for name, family in FAMILIES.items() if family.needs_settings]
)
def test_types_that_are_scaled_by_default_need_settings(model_type: str) -> None:
    full = CASE[model_type].config().to_dict()
    if FAMILIES[model_type].layers != "by_type":
        assert full["rope_parameters"]["rope_type"] != "default"
    full.pop("rope_parameters")
    with pytest.raises(UnsupportedRopeError, match="rope_parameters"):
        RopeSpec.from_config(full)


# At a base of 50 YaRN's ramp can end after the last pair.
THETAS = [50, 10000.0, 500000, 1e6, 8e6]
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "linear": [{"factor": 2.0}, {"factor": 7}],
    "llama3": [
        {k: v for k, v in LLAMA3.items() if k not in {"rope_type", "rope_theta"}},
        {
            "factor": 6,
            "low_freq_factor": 1,
            "high_freq_factor": 4,
            "original_max_position_embeddings": 8192,
        },
    ],
    "yarn": [
        {"factor": 4.0, "original_max_position_embeddings": 32768},
        {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        {
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        {
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "mscale": 0.707,
            "mscale_all_dim": 0.5,
        },
        {"factor": 0.5, "original_max_position_embeddings": 4096},
        {"factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 128},
        {"factor": 16.0, "original_max_position_embeddings": 64, "beta_fast": 4, "beta_slow": 1},
    ],
    "proportional": [{}, {"partial_rotary_factor": 0.25}, {"factor": 2.0}],
}


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param(kind, each, id=f"{kind}-{number}")
        for kind, all_settings in SETTINGS.items()
        for number, each in enumerate(all_settings)
    ],
)
def test_frequencies_are_those_of_rope_init_functions(
    kind: str,
    settings: dict[str, Any],
    head_dim: int,
    without_transformers: Callable[..., RopeSpec],
) -> None:
    for theta in THETAS:
        config = transformers.LlamaConfig(
            num_hidden_layers=1,
            num_attention_heads=2,
            hidden_size=2 * head_dim,
            head_dim=head_dim,
            max_position_embeddings=131072,
            rope_parameters={"rope_type": kind, "rope_theta": theta, **settings},
        )
        want, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        for read in (RopeSpec.from_config, without_transformers):
            made = read(config).layers[0]
            assert made is not None
            assert made.inv_freq == tuple(want.tolist())
            assert made.attention_factor == factor


def test_frequencies_come_from_transformers_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = CASE["llama-linear"].config().to_dict()
    before = RopeSpec.from_config(config).layers[0]
    compute = ROPE_INIT_FUNCTIONS["linear"]

    def doubled(*arguments: Any) -> tuple[Tensor, float]:
        inv_freq, factor = compute(*arguments)
        return 2 * inv_freq, factor

    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "linear", doubled)
    after = RopeSpec.from_config(config).layers[0]
    assert before is not None
    assert after is not None
    assert after.inv_freq == tuple(2 * value for value in before.inv_freq)


@by_listed_name
def test_transformers_changes_no_frequency_of_a_model(
    case: Case, without_transformers: Callable[..., RopeSpec]
) -> None:
    config = case.config().to_dict()
    spec = RopeSpec.from_config(config, interleaved=True)
    assert without_transformers(config, interleaved=True) == spec


def _numbers(least: float, most: float) -> st.SearchStrategy[float]:
    return st.floats(least, most) | st.integers(math.ceil(least), int(most))


_FACTORS = _numbers(0.1, 64)
_LENGTHS = st.integers(1, 1 << 20)
_PARAMETERS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "default": {},
    "linear": {"factor": _FACTORS},
    "llama3": {
        "factor": _FACTORS,
        "low_freq_factor": _numbers(0.1, 4),
        "high_freq_factor": _numbers(4.5, 32),
        "original_max_position_embeddings": _LENGTHS,
    },
    "yarn": {
        "factor": _FACTORS | st.none(),
        "original_max_position_embeddings": _LENGTHS,
        "truncate": st.booleans(),
        "beta_fast": _numbers(1, 64) | st.none(),
        "beta_slow": _numbers(0.1, 8) | st.none(),
        "mscale": _numbers(0.1, 2) | st.none(),
        "mscale_all_dim": _numbers(0.1, 2) | st.none(),
        "attention_factor": _numbers(0.1, 2) | st.none(),
    },
    "proportional": {"factor": _FACTORS, "partial_rotary_factor": st.floats(0.25, 1)},
}


@st.composite
def _accepted(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(sorted(_PARAMETERS)))
    parameters = {name: draw(values) for name, values in _PARAMETERS[kind].items()}
    share = draw(st.sampled_from([0.25, 0.5, 0.75, 1.0]))
    return {
        "model_type": "phi",
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": draw(st.integers(1, 32)) * 8,
        "max_position_embeddings": draw(_LENGTHS),
        "rope_parameters": {
            "rope_type": kind,
            "rope_theta": draw(_numbers(1.5, 1e8)),
            "partial_rotary_factor": share,
            **parameters,
        },
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_accepted())
def test_transformers_changes_no_generated_frequency(
    without_transformers: Callable[..., RopeSpec], config: dict[str, Any]
) -> None:
    spec, own = RopeSpec.from_config(config), without_transformers(config)
    (with_it,), (without,) = spec.layers, own.layers
    assert with_it is not None
    assert without is not None
    # At most one float32 rounding apart; in fact equal, so a moved key has the same bytes.
    both = np.array([with_it.inv_freq, without.inv_freq], np.float32)
    assert (np.abs(both[0] - both[1]) <= np.spacing(np.abs(both).max(axis=0))).all()
    assert own == spec


def test_frequencies_are_those_of_a_cpu_whatever_the_default_device() -> None:
    config = CASE["llama-yarn"].config().to_dict()
    with torch.device("meta"):
        found = RopeSpec.from_config(config)
    assert found == RopeSpec.from_config(config)


def test_float64_rounded_once_is_not_what_engines_compute() -> None:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 96}
    config = {"model_type": "llama", "rope_theta": 8e6, **sizes}
    rotary = RopeSpec.from_config(config).layers[0]
    assert rotary is not None
    rounded = (8e6 ** -(np.arange(0, 96, 2) / 96)).astype(np.float32)
    found = np.array(rotary.inv_freq, np.float32)
    roundings = np.abs(rounded.view(np.int32) - found.view(np.int32))
    assert roundings.max() > 1


LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + pair / 7 for pair in range(HEAD_DIM // 2)],
    "long_factor": [4.0 + pair for pair in range(HEAD_DIM // 2)],
}


def _longrope(original: int) -> Case:
    parameters = {**LONGROPE, "original_max_position_embeddings": original}
    changes = {"original_max_position_embeddings": original, "rope_parameters": parameters}
    return _variant(f"longrope-{original}", "phi3", **changes)


# Passes at 5 and at 816: all tokens are of short prompts, or all of long ones.
@pytest.mark.parametrize(("original", "regime"), [(1000, "short"), (4, "long")])
def test_longrope_within_one_regime(
    original: int, regime: Any, without_transformers: Callable[..., RopeSpec]
) -> None:
    case, delta = _longrope(original), 811
    spec = RopeSpec.from_config(case.config(), regime=regime)
    assert without_transformers(case.config().to_dict(), regime=regime) == spec
    old, new = _keys(case, 5), _keys(case, 5 + delta)
    for layer in range(NUM_LAYERS):
        assert _error(rotate(old[layer], spec, delta, layer), new[layer]) < 2e-5
    other = RopeSpec.from_config(case.config(), regime="long" if regime == "short" else "short")
    assert _error(rotate(old[0], other, delta), new[0]) > 1e-2
    rotary = spec.layers[0]
    assert rotary is not None
    assert rotary.attention_factor == _embeddings(_model(case)).attention_scaling


def test_longrope_across_regimes_is_no_rotation() -> None:
    case = _longrope(100)
    old, new = _keys(case, 5), _keys(case, 816)
    for regime in ("short", "long"):
        spec = RopeSpec.from_config(case.config(), regime=regime)
        assert _error(rotate(old[0], spec, 811), new[0]) > 1e-2


def test_dynamic_ntk_within_the_original_length() -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    case, delta = _variant("dynamic", "llama", rope_parameters=parameters), 811
    spec = RopeSpec.from_config(case.config(), regime="short")
    assert spec == RopeSpec.from_config(CASE["llama"].config())
    old, new = _keys(case, 5), _keys(case, 5 + delta)
    assert _error(rotate(old[1], spec, delta, 1), new[1]) < 2e-5
    assert short_regime(case.config()) == LENGTH - 1
    with pytest.raises(UnsupportedRopeError, match=r"dynamic.* at each length"):
        RopeSpec.from_config(case.config(), regime="long")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"short_factor": [1.0] * 3}, "short_factor has 3 entries for 8 pairs"),
        ({"long_factor": "x"}, "long_factor is 'x', not a list"),
        ({"short_factor": [0.0] * 8}, "short_factor is 0.0, not a number above 0"),
        ({"long_factor": None}, "long_factor"),
    ],
)
def test_longrope_settings_are_checked(changes: dict[str, Any], said: str) -> None:
    config = _longrope(100).config().to_dict()
    config["rope_parameters"] = {
        name: value
        for name, value in {**config["rope_parameters"], **changes}.items()
        if value is not None
    }
    with pytest.raises(UnsupportedRopeError, match=said):
        RopeSpec.from_config(config, regime="short")
    with pytest.raises(ValueError, match="regime must be 'short', 'long' or None, not 'x'"):
        RopeSpec.from_config(config, regime="x")  # type: ignore[arg-type]


def test_torch_is_needed_and_the_message_says_which_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CASE["llama"].config().to_dict()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"RopeSpec\.from_config needs torch.*kvtrie\[torch\]"):
        RopeSpec.from_config(config)


def test_page_lists_every_known_model_type() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "rope.md").read_text(encoding="utf-8")
    rows = dict(
        re.findall(
            r"^\| (halves|pairs|MLA, by engine|must be given) \| (.*) \|$", text, re.MULTILINE
        )
    )
    listed = {kind: set(re.split(r", |: ", row)) for kind, row in rows.items()}
    for name, family in FAMILIES.items():
        kind = {None: "must be given", True: "pairs", False: "halves"}[family.interleaved]
        if family.is_mla and family.interleaved:
            kind = "MLA, by engine"
        assert name in listed[kind]
    assert sum(map(len, listed.values())) <= len(FAMILIES) + 3


def test_every_type_of_transformers_is_read_or_refused() -> None:
    known = {*FIELDS_OF_TYPE, *REFUSED_TYPES}
    assert {*ROPE_INIT_FUNCTIONS, "default"} <= known


# A config that does not list its layers is read as transformers reads it.
PERIODS = {"afmoe", "cohere2", "exaone4", "exaone_moe", "gemma3_text", "gemma3n_text", "olmo3"}


@pytest.mark.parametrize("num_layers", [6, 7])
@pytest.mark.parametrize("name", sorted(set(FAMILIES) & set(CONFIG_MAPPING)))
def test_a_config_without_a_list_of_its_layers_is_read_like_its_object_or_refused(
    name: str, num_layers: int
) -> None:
    more: dict[str, Any] = {"num_hidden_layers": num_layers}
    if name == "gemma3n_text":
        more["num_kv_shared_layers"] = 0
    try:
        config: Any = CONFIG_MAPPING[name](**more)
    except StrictDataclassClassValidationError:
        pytest.skip("its default config lists its layers")
    lists = ("layer_types", "layers_block_type", "attention_layers", "no_rope_layers")
    unlisted = {key: value for key, value in config.to_dict().items() if key not in lists}
    interleaved = False if FAMILIES[name].interleaved is None else None
    is_read = []
    for read in (
        lambda one: RopeSpec.from_config(one, interleaved=interleaved),
        lambda one: KVLayout.from_config(one, dtype="float32"),
    ):
        try:
            found = read(unlisted)
        except (UnsupportedRopeError, LayoutError):
            continue
        is_read.append(found)
        assert found == read(config)
    assert name not in PERIODS or len(is_read) == 2
