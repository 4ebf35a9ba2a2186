"""Reads from a config what one token stores per layer, and refuses models that store other KV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from kvtrie._core import LayoutError
from kvtrie.models.config import MULTIMODAL, NUM_HEADS, NUM_LAYERS, ConfigFields

_REFUSAL: Final = "KVLayout.from_config: cannot hold the KV of"
_NUM_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")

_MLA_FORMS: Final = ("latent", "expanded")

# Layer types whose KV is one row of K and of V per token as long as the request lives.
_FULL_ATTENTION: Final = frozenset({"full_attention", "attention", "global"})

_STATE_SPACE_FIELDS: Final = (
    "attn_layer_period",
    "conv_L_cache",
    "d_state",
    "full_attn_idxs",
    "hybrid_override_pattern",
    "linear_attn_config",
    "linear_conv_kernel_dim",
    "linear_num_value_heads",
    "mamba_d_state",
    "mamba_expand",
    "qk_dim_factor",
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
    "time_step_rank",
)
# Values that make a token attend to those after it.
_BIDIRECTIONAL: Final[Mapping[str, bool]] = {
    "is_causal": False,
    "use_bidirectional_attention": True,
    "prefix_lm": True,
}


class KVShape(NamedTuple):
    """The fields of a `KVLayout` that a config determines."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str


def read_kv_shape(config: object, dtype: object, mla: str) -> KVShape:
    """What a model stores per token and layer; see `KVLayout.from_config`."""
    if mla not in _MLA_FORMS:
        msg = f"KVLayout.from_config: mla must be one of {', '.join(_MLA_FORMS)}, not {mla!r}"
        raise ValueError(msg)
    fields = ConfigFields(config, _REFUSAL, LayoutError)
    _refuse_other_models(fields)
    _refuse_other_layers(fields)
    _refuse_moving_rope(fields)
    heads, head_dim, v_head_dim = _rows(fields, mla)
    num_layers = fields.size(*NUM_LAYERS)
    return KVShape(num_layers, heads, head_dim, v_head_dim, _dtype_name(fields, dtype))


def _refuse_other_models(fields: ConfigFields) -> None:
    for name in MULTIMODAL:
        if fields.get(name) is not None:
            fields.refuse(f"it is multimodal ({name}); only text models are supported")
    if fields.get("is_encoder_decoder") or fields.get("add_cross_attention"):
        fields.refuse("it has cross attention (encoder-decoder)")
    if fields.get("cross_attention_layers"):
        fields.refuse("it has cross attention (cross_attention_layers)")
    for name, bidirectional in _BIDIRECTIONAL.items():
        if fields.get(name) is bidirectional:
            fields.refuse(f"KV depends on later tokens too ({name}={bidirectional})")
    if fields.get("index_head_dim") is not None:
        fields.refuse("it keeps index rows next to K and V (sparse attention, index_head_dim)")
    if fields.get("num_kv_shared_layers"):
        fields.refuse("some layers share the KV of others (num_kv_shared_layers)")
    if fields.get("block_configs"):
        fields.refuse("its layers differ in geometry (block_configs)")


def _refuse_other_layers(fields: ConfigFields) -> None:
    for name in ("layer_types", "layers_block_type", "attention_layers"):
        kinds = fields.get(name)
        for layer, kind in enumerate(kinds or ()):
            if kind not in _FULL_ATTENTION:
                fields.refuse(f"layer {layer} is {kind!r} ({name}), not full attention")
    for name in _STATE_SPACE_FIELDS:
        if fields.get(name) is not None:
            fields.refuse(f"it has state-space, convolution or linear attention layers ({name})")
    if fields.get("attention_chunk_size") is not None:
        fields.refuse("it has chunked attention (attention_chunk_size)")
    window = fields.get("sliding_window")
    is_off = fields.get("use_sliding_window") is False or fields.get("layer_types") is not None
    if window is not None and not is_off:
        fields.refuse(f"it has sliding window layers (sliding_window={window})")


def _refuse_moving_rope(fields: ConfigFields) -> None:
    for rope in _ropes(fields):
        kind = rope.get("rope_type", rope.get("type"))
        if kind in ("dynamic", "longrope"):
            fields.refuse(
                f"under rope_type {kind!r} the K of a token depends on the length of the prompt"
            )
        if rope.get("mrope_section") is not None:
            fields.refuse("it has multimodal positions (mrope_section)")


def _ropes(fields: ConfigFields) -> list[Mapping[str, Any]]:
    """The RoPE settings of a config: none, one, or one per layer type."""
    found: list[Mapping[str, Any]] = []
    for name in ("rope_parameters", "rope_scaling"):
        value = fields.get(name)
        if isinstance(value, Mapping):
            found.append(value)
            found.extend(inner for inner in value.values() if isinstance(inner, Mapping))
    return found


def _rows(fields: ConfigFields, mla: str) -> tuple[int, int, int]:
    num_heads = fields.size(*NUM_HEADS)
    if fields.get("kv_lora_rank") is None:
        head_dim = _head_dim(fields)
        return _num_kv_heads(fields, num_heads), head_dim, head_dim
    latent, k_pe = (_mla_size(fields, name) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    if mla == "latent":
        return 1, latent + k_pe, 0
    nope, v_head_dim = (_mla_size(fields, name) for name in ("qk_nope_head_dim", "v_head_dim"))
    return num_heads, nope + k_pe, v_head_dim


def _mla_size(fields: ConfigFields, name: str) -> int:
    value = fields.size_or_none(name)
    if value is None:
        fields.refuse(f"it keeps a latent (MLA, kv_lora_rank), and its config has no {name}")
    return value


def _num_kv_heads(fields: ConfigFields, num_heads: int) -> int:
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        return 1
    num_kv_heads = fields.size_or_none(*_NUM_KV_HEADS)
    if num_kv_heads is None:
        return num_heads
    if num_heads % num_kv_heads:
        fields.refuse(f"{num_heads} query heads do not divide into {num_kv_heads} KV heads")
    return num_kv_heads


def _head_dim(fields: ConfigFields) -> int:
    head_dim = fields.head_dim()
    v_head_dim = fields.get("v_head_dim")
    if v_head_dim is not None and v_head_dim != head_dim:
        fields.refuse(f"V is {v_head_dim} wide and K {head_dim} (v_head_dim)")
    return head_dim


def _dtype_name(fields: ConfigFields, dtype: object) -> str:
    # The old name comes last: transformers warns when it is read.
    value = dtype or fields.get("dtype") or fields.get("torch_dtype")
    if value is None:
        fields.refuse("no dtype was given, and its config has none")
    return str(value).removeprefix("torch.")
