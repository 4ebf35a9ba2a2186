"""Reads from a config what each layer is: full attention, a window, state; and its own fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kvtrie.models.config import NUM_LAYERS, is_int
from kvtrie.models.rope_families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtrie.models.config import ConfigFields

# Layer types whose KV is one row of K and of V per token as long as the request lives.
_FULL_ATTENTION: Final = frozenset({"full_attention", "global"})

_LAYER_KINDS: Final = ("layer_types", "layers_block_type", "attention_layers")
# What transformers renames when it reads a config; published configs have either.
_OLDER_NAMES: Final[Mapping[str, str]] = {
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "mamba": "linear_attention",
    "qwen_sparse_attention": "indexed_attention",
}
_STATE: Final = "its state is of one prefix, and has no rows of tokens"
_STATE_KINDS: Final = frozenset(
    {"linear_attention", "recurrent", "conv", "hybrid", "hybrid_sliding"}
)
_NO_KV_KINDS: Final = frozenset({"linear_attention", "recurrent", "conv", "mlp", "moe"})
_OTHER_KINDS: Final[Mapping[str, str]] = {
    "chunked_attention": "the edges of its chunks are absolute positions",
    "indexed_attention": "it keeps index rows next to K and V",
    "compressed_sparse_attention": "it keeps compressed rows of absolute windows",
    "heavily_compressed_attention": "it keeps compressed rows of absolute windows",
    **dict.fromkeys(_STATE_KINDS, _STATE),
}
# Each of their layers has attention and state.
_ALL_HYBRID: Final = frozenset({"falcon_h1"})
# All of their layers have the window that their configs name.
_ALL_WINDOWED: Final = frozenset(
    {"doge", "ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2"}
)
# Full attention has other heads than windows.
_GLOBAL_HEADS: Final = frozenset({"gemma4_text", "gemma4_unified_text"})

_STATE_FIELDS: Final = (
    "attn_layer_period",
    "conv_L_cache",
    "d_state",
    "full_attn_idxs",
    "hybrid_override_pattern",
    "linear_attn_alpha_factor",
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


def num_kv_layers(fields: ConfigFields) -> int:
    """Layers that keep K and V of their own, in a model without state."""
    num_layers = fields.size(*NUM_LAYERS)
    # They are at the end, and attend to the KV of the last layers that keep theirs.
    shared = fields.get("num_kv_shared_layers")
    if shared is None or shared == 0:
        return num_layers
    if not is_int(shared) or not 0 < shared < num_layers:
        fields.refuse(f"num_kv_shared_layers is {shared!r} of {num_layers} layers")
    return num_layers - shared


def sliding_window(fields: ConfigFields) -> int | None:
    """The window that a config names for some or all of its layers; None if they have none."""
    if fields.get("sliding_window") is None or fields.get("use_sliding_window") is False:
        return None
    return fields.size("sliding_window")


def layer_kinds(fields: ConfigFields) -> list[str] | None:
    """What each layer is, as a config of transformers lists it; None where all are alike.

    A config that lists nothing is read where the rule of its type is known to be a period.
    """
    num_layers = fields.size(*NUM_LAYERS)
    name = _listing(fields)
    if name is not None:
        kinds = fields.get(name)
        if isinstance(kinds, str) or not isinstance(kinds, Sequence):
            fields.refuse(f"{name} is {kinds!r}, not a list")
        if len(kinds) != num_layers:
            fields.refuse(f"{name} has {len(kinds)} entries for {num_layers} layers")
        for layer, kind in enumerate(kinds):
            if not isinstance(kind, str):
                fields.refuse(f"{name} has {kind!r} for layer {layer}, not a name")
        return [_OLDER_NAMES.get(kind, kind) for kind in kinds]
    family = FAMILIES.get(fields.model_type or "")
    if family is None or family.layers not in {"sliding", "windowed", "by_type"}:
        return None
    # Models of these types ask whether there is a number, and not for use_sliding_window.
    if family.layers == "windowed" and fields.get("sliding_window") is None:
        return None
    if not family.every:
        fields.refuse(
            "its config does not list its layers (layer_types); give the config object of "
            "transformers"
        )
    every = family.every
    for name in ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers"):
        if fields.get(name) is not None:
            every = fields.size(name)
            break
    return [
        "sliding_attention" if (layer + 1) % every else "full_attention"
        for layer in range(num_layers)
    ]


def layer_windows(fields: ConfigFields, num_layers: int) -> list[int | None]:
    """The window of each layer, ``None`` for full attention; refuses layers of other kinds."""
    kinds = layer_kinds(fields)
    windows = None
    if kinds is not None:
        windows = [_window(fields, layer, kind) for layer, kind in enumerate(kinds[:num_layers])]
    for name in _STATE_FIELDS:
        if fields.get(name) is not None:
            fields.refuse(f"it has state-space, convolution or linear attention layers ({name})")
    if fields.get("attention_chunk_size") is not None:
        fields.refuse("its chunked attention has absolute edges (attention_chunk_size)")
    if windows is not None:
        return windows
    window = sliding_window(fields)
    if window is not None and fields.model_type not in _ALL_WINDOWED:
        fields.refuse(
            f"it has sliding window layers (sliding_window={window}), and its config does not "
            "list them (layer_types)"
        )
    return [window] * num_layers


def _listing(fields: ConfigFields) -> str | None:
    """The field that lists what each layer is."""
    return next((name for name in _LAYER_KINDS if fields.get(name)), None)


def _window(fields: ConfigFields, layer: int, kind: str) -> int | None:
    if kind in _FULL_ATTENTION:
        return None
    where = _listing(fields) or "by the rule of its type"
    if kind == "sliding_attention":
        window = fields.of_layer(layer).size_or_none("sliding_window")
        if window is None:
            fields.refuse(f"layer {layer} is {kind!r} ({where}), and there is no sliding_window")
        return window
    why = _OTHER_KINDS.get(kind, "not full attention or a sliding window")
    return fields.refuse(f"layer {layer} is {kind!r} ({where}): {why}")


def fields_of_layer(fields: ConfigFields, layer: int, *, is_window: bool) -> ConfigFields:
    """The fields of a layer, with what models of some types derive from its attention."""
    own = fields.of_layer(layer)
    if fields.model_type == "mimo_v2_flash" and is_window:
        doubled = 2 * fields.size("num_key_value_heads")
        if fields.get("swa_num_key_value_heads") not in {None, doubled}:
            fields.refuse("swa_num_key_value_heads is not twice num_key_value_heads")
        return own.changed(num_key_value_heads=doubled)
    if own is fields and fields.model_type in _GLOBAL_HEADS and not is_window:
        changes: dict[str, Any] = {"head_dim": fields.get("global_head_dim") or 512}
        heads = fields.get("num_global_key_value_heads")
        if heads is not None and fields.get("attention_k_eq_v"):
            changes["num_key_value_heads"] = heads
        return own.changed(**changes)
    return own


def keeps_state(fields: ConfigFields) -> bool:
    """Whether some layer has recurrent state."""
    listed = _listing(fields) is not None and not _STATE_KINDS.isdisjoint(layer_kinds(fields) or ())
    return listed or any(fields.get(name) is not None for name in _STATE_FIELDS)


def kv_and_state_layers(fields: ConfigFields, num_layers: int) -> tuple[list[int], list[int]]:
    """Numbers of the layers that keep K and V, and of those that keep state."""
    if not keeps_state(fields):
        return list(range(num_kv_layers(fields))), []
    kinds = layer_kinds(fields)
    if kinds is None and fields.model_type in _ALL_HYBRID:
        kinds = ["hybrid"] * num_layers
    if kinds is None:
        fields.refuse(
            "it has layers with recurrent state, and its config does not list them (layer_types); "
            "give the config object of transformers"
        )
    known = _STATE_KINDS | _NO_KV_KINDS | _FULL_ATTENTION | {"sliding_attention"}
    for layer, kind in enumerate(kinds):
        if kind not in known:
            fields.refuse(f"layer {layer} is {kind!r}, whose keys are unknown")
    with_kv = [layer for layer, kind in enumerate(kinds) if kind not in _NO_KV_KINDS]
    return with_kv, [layer for layer, kind in enumerate(kinds) if kind in _STATE_KINDS]
