"""Reads from a config what one token stores per layer, and refuses models that store other KV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from kvtrie._core import LayoutError
from kvtrie.models.config import MULTIMODAL, NUM_HEADS, ConfigFields, check_config
from kvtrie.models.layers import fields_of_layer, layer_windows, num_kv_layers
from kvtrie.models.rope import BY_REGIME, named_type
from kvtrie.models.vision import text_fields

_REFUSAL: Final = "KVLayout.from_config: cannot hold the KV of"
_NUM_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")

_MLA_FORMS: Final = ("latent", "expanded")

_NARROW_V: Final = frozenset({"mimo_v2_flash"})

# Values that make a token attend to those after it.
_BIDIRECTIONAL: Final[Mapping[str, bool]] = {
    "is_causal": False,
    "use_bidirectional_attention": True,
    "prefix_lm": True,
}


class GroupShape(NamedTuple):
    """The fields of a `KVGroup`."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None


class KVShape(NamedTuple):
    """The fields of a `KVLayout` that a config determines."""

    groups: tuple[GroupShape, ...]
    dtype: str


def read_kv_shape(config: object, dtype: object, mla: str, *, is_short: bool = False) -> KVShape:
    """What a model stores per token and layer; see `KVLayout.from_config`."""
    if mla not in _MLA_FORMS:
        msg = f"KVLayout.from_config: mla must be one of {', '.join(_MLA_FORMS)}, not {mla!r}"
        raise ValueError(msg)
    check_config("KVLayout.from_config", config)
    fields = text_fields(ConfigFields(config, _REFUSAL, LayoutError))
    _refuse_other_models(fields)
    _refuse_moving_rope(fields, is_short=is_short)
    num_layers = num_kv_layers(fields)
    found: dict[tuple[int, int, int, int | None], list[int]] = {}
    for layer, window in enumerate(layer_windows(fields, num_layers)):
        shape = _rows(fields_of_layer(fields, layer, is_window=window is not None), mla)
        found.setdefault((*shape, window), []).append(layer)
    groups = tuple(
        GroupShape(tuple(layers), heads, head_dim, v_head_dim, window)
        for (heads, head_dim, v_head_dim, window), layers in found.items()
    )
    return KVShape(groups, _dtype_name(fields, dtype))


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
    if fields.get("block_configs"):
        fields.refuse("its layers differ in geometry (block_configs)")


def _refuse_moving_rope(fields: ConfigFields, *, is_short: bool) -> None:
    for rope in _ropes(fields):
        kind = named_type(fields, rope)
        if kind in BY_REGIME and not is_short:
            fields.refuse(
                f"under rope_type {kind!r} the K of a token depends on the length of the prompt; "
                "give regime='short' if no prompt is longer than the original length"
            )


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
        v_head_dim = fields.size("v_head_dim") if fields.model_type in _NARROW_V else head_dim
        return _num_kv_heads(fields, num_heads), head_dim, v_head_dim
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
    is_known = fields.model_type in _NARROW_V
    if v_head_dim is not None and v_head_dim != head_dim and not is_known:
        fields.refuse(f"V is {v_head_dim} wide and K {head_dim} (v_head_dim)")
    return head_dim


def _dtype_name(fields: ConfigFields, dtype: object) -> str:
    # The old name comes last: transformers warns when it is read.
    value = dtype or fields.get("dtype") or fields.get("torch_dtype")
    if value is None:
        fields.refuse("no dtype was given, and its config has none")
    return str(value).removeprefix("torch.")
