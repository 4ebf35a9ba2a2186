"""Reads from a config how a model rotates its keys, and refuses what no rotation can move."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, NamedTuple, cast

from kvtrie._core import UnsupportedRopeError
from kvtrie.models.config import MULTIMODAL, NUM_LAYERS, ConfigFields, is_int
from kvtrie.models.frequencies import frequencies
from kvtrie.models.kv_types import quantized_fields, refusal
from kvtrie.models.layers import fields_of_layer, keeps_state, kv_and_state_layers, layer_kinds
from kvtrie.models.rope_families import ALIBI, FAMILIES, REFUSED, Family
from kvtrie.models.vision import text_fields

_REFUSAL: Final = "RopeSpec.from_config: cannot rotate the keys of"
_INDEX_FIELDS: Final = ("index_head_dim", "index_topk", "index_n_heads")
# Names of configs for what a layout has by its own name.
_EIGHT_BITS: Final = ("fp8", "float8_e4m3fn", "float8_e5m2")
_ONE_SCALE: Final = ("tensor", "attn_head")

_TYPE_NAMES: Final = ("rope_type", "type")
_BY_LENGTH: Final = "frequencies depend on the length of the prompt; give regime="
REFUSED_TYPES: Final[Mapping[str, str]] = {
    "dynamic": f"dynamic NTK: {_BY_LENGTH}",
    "longrope": f"LongRoPE: {_BY_LENGTH}",
    "su": f"LongRoPE under its old name: {_BY_LENGTH}",
    "mrope": "M-RoPE (mrope_section), in which axes and pairs of its type are unknown",
}
_COMMON: Final = frozenset({"rope_theta", "partial_rotary_factor", *_TYPE_NAMES})
# Fields of a type: the required ones, then the optional ones.
FIELDS_OF_TYPE: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        (
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "proportional": ((), ("factor",)),
    "dynamic": (("factor",), ()),
    "longrope": (
        ("short_factor", "long_factor", "original_max_position_embeddings"),
        ("factor", "attention_factor"),
    ),
}
REGIMES: Final = ("short", "long")
BY_REGIME: Final = frozenset({"dynamic", "longrope", "su"})
# These do not change keys: a training parameter, a limit, a scale of queries.
_NEUTRAL_FIELDS: Final = frozenset(
    {"apply_yarn_scaling", "finetuned", "llama_4_scaling_beta", "max_position_embeddings"}
)
# These say by which position of its token a pair rotates.
_AXES: Final = frozenset({"mrope_section", "mrope_interleaved"})


class RotaryFields(NamedTuple):
    """How the keys of one layer rotate: the fields of a `Rotary`."""

    inv_freq: tuple[float, ...]
    start: int
    interleaved: bool
    attention_factor: float


class LayerRopes(NamedTuple):
    """The rotation of each attention layer, the width of its rows, and the layers with state.

    ``item_positions`` as in `Family`.
    """

    layers: tuple[RotaryFields | None, ...]
    head_dims: tuple[int, ...]
    state_layers: tuple[int, ...]
    item_positions: bool


def short_regime(config: object) -> int | None:
    """Most tokens of a pass in which the frequencies of a config are those of short prompts.

    None: they do not depend on the length.
    """
    fields = text_fields(ConfigFields(config, _REFUSAL, UnsupportedRopeError))
    limits = []
    for settings in (_settings(fields), *_settings(fields).values()):
        if not isinstance(settings, Mapping):
            continue
        kind = named_type(fields, settings)
        if kind in ("longrope", "su"):
            limits.append(_original_length(fields, settings))
        elif kind == "dynamic":
            # At its whole length, transformers may keep the frequencies of a longer prompt.
            limits.append(fields.size("max_position_embeddings") - 1)
    return min(limits, default=None)


def read_rope(
    config: object, mla: str, interleaved: bool | None, regime: str | None = None
) -> LayerRopes:
    """Every attention layer's rotation; see `RopeSpec.from_config`."""
    fields = text_fields(ConfigFields(config, _REFUSAL, UnsupportedRopeError))
    family = _family(fields, interleaved)
    order = _pair_order(fields, family, mla, interleaved)
    num_layers = fields.size(*NUM_LAYERS)
    by_layer = _settings_by_layer(fields, family, num_layers)
    attention, state = kv_and_state_layers(fields, num_layers)
    kinds = layer_kinds(fields)
    made: dict[tuple[int, _Head], RotaryFields] = {}
    layers: list[RotaryFields | None] = []
    head_dims: list[int] = []
    for layer in attention:
        is_window = kinds is not None and kinds[layer] == "sliding_attention"
        own = fields_of_layer(fields, layer, is_window=is_window)
        head = _head(own, family, mla)
        head_dims.append(head.dim)
        settings = by_layer[layer]
        if settings is None:
            layers.append(None)
            continue
        key = (id(settings), head)
        if key not in made:
            made[key] = _rotary(own, family, settings, head, order, regime)
        layers.append(made[key])
    if not attention:
        fields.refuse("none of its layers has attention")
    if not made and (family is None or family.layers != "none"):
        fields.refuse("none of its layers rotates its keys")
    has_axes = family is not None and family.item_positions
    return LayerRopes(tuple(layers), tuple(head_dims), tuple(state), has_axes)


@dataclass(frozen=True, slots=True)
class _Head:
    """A head's K row: its channels, and the first and number of those that may rotate."""

    dim: int
    start: int
    rotary: int


# --- which model ----------------------------------------------------------------------------------


def _family(fields: ConfigFields, interleaved: bool | None) -> Family | None:
    """The type's row; None for a type outside the table if the caller gives the order."""
    reason = REFUSED.get(fields.model_type or "")
    if reason is not None:
        fields.refuse(reason)
    for name in MULTIMODAL:
        if fields.get(name) is not None:
            fields.refuse(f"it is multimodal ({name}); give the config of its text model")
    for name in ("alibi", "use_alibi"):
        if fields.get(name):
            fields.refuse(f"{ALIBI} ({name})")
    for name in _INDEX_FIELDS:
        if fields.get(name) is not None:
            fields.refuse(f"it has rotated index rows next to K ({name})")
    _refuse_quantized_k(fields)
    family = FAMILIES.get(fields.model_type or "")
    if family is None and interleaved is None:
        what = (
            "its config has no model_type" if fields.model_type is None else "its type is unknown"
        )
        state = ", and it has layers with recurrent state" if keeps_state(fields) else ""
        fields.refuse(
            f"{what}{state}, and the order of pairs is not in a config; "
            "give interleaved=False (NeoX: halves) or True (GPT-J: pairs)"
        )
    return family


def _refuse_quantized_k(fields: ConfigFields) -> None:
    """Refuse K that no quantised pool can hold; how it is stored does not change its rotation."""
    named = {name: fields.get(name) for name in ("kv_cache_dtype", "quantization_config")}
    for name, value in quantized_fields(named):
        _refuse_kv_type(fields, name, value)


def _refuse_kv_type(fields: ConfigFields, name: str, value: object) -> None:
    if isinstance(value, Mapping):
        # The scheme of compressed-tensors: one scale per tensor or head cancels in a rotation.
        bits, strategy = value.get("num_bits"), value.get("strategy", "tensor")
        if bits != 8:
            why = f"what rounding {bits}-bit codes again costs was not measured"
        elif strategy not in _ONE_SCALE:
            why = f"scales by {strategy!r} are not supported, only by {', '.join(_ONE_SCALE)}"
        elif value.get("symmetric", True) is not True or value.get("dynamic", False) is not False:
            why = "zero points, and scales that are computed again, do not cancel in a rotation"
        else:
            return
        fields.refuse(f"its K is quantised ({name}={dict(value)!r}): {why}")
    text = str(value).removeprefix("torch.").lower()
    why_not = None if text in _EIGHT_BITS else refusal(text)
    if why_not is not None:
        fields.refuse(f"its K is quantised ({name}={value!r}): {why_not}")


def _pair_order(
    fields: ConfigFields, family: Family | None, mla: str, interleaved: bool | None
) -> bool:
    if interleaved is not None:
        return interleaved
    if family is None or family.interleaved is None:
        fields.refuse(
            "engines store its pairs in different orders; give interleaved=True for transformers "
            "or interleaved=False for vLLM, which permutes the weights"
        )
    if not family.is_mla:
        return family.interleaved
    if mla == "expanded":
        return family.expanded_interleaved
    if family.interleaved and fields.get("rope_interleave") is False:
        fields.refuse(
            "the order in which engines store its latents is unknown (rope_interleave=False); "
            "give interleaved="
        )
    return family.interleaved


# --- which channels -------------------------------------------------------------------------------


def _head(fields: ConfigFields, family: Family | None, mla: str) -> _Head:
    is_mla = fields.get("kv_lora_rank") is not None
    if family is not None and family.is_mla != is_mla:
        if is_mla:
            fields.refuse("it has a latent (kv_lora_rank), which models of its type do not have")
        fields.refuse("its config has no kv_lora_rank")
    if is_mla:
        rotary = fields.size("qk_rope_head_dim")
        start = fields.size("kv_lora_rank" if mla == "latent" else "qk_nope_head_dim")
        return _Head(dim=start + rotary, start=start, rotary=rotary)
    dim = fields.head_dim()
    return _Head(dim=dim, start=0, rotary=dim)


def _rotated(
    fields: ConfigFields, family: Family | None, settings: Mapping[str, Any], head: _Head
) -> tuple[int, float]:
    """Channels that rotate, and their share of a head: transformers rounds the product down."""
    inside = settings.get("partial_rotary_factor")
    if fields.model_type == "mistral4" and inside is not None:
        # There it is the share of the whole expanded head.
        whole = fields.size("qk_nope_head_dim") + head.rotary
        if int(whole * fields.number("partial_rotary_factor", inside)) != head.rotary:
            fields.refuse(f"partial_rotary_factor {inside!r} of {whole} is not qk_rope_head_dim")
        return head.rotary, 1.0
    # Settings by layer type may differ from the field of which they were made.
    by_type = family is None or family.layers == "by_type"
    said: dict[str, float] = {}
    if inside is not None:
        said["partial_rotary_factor"] = fields.number("partial_rotary_factor", inside)
    for name in ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction"):
        value = fields.get(name)
        if value is not None:
            if inside is not None and value != inside and not by_type:
                fields.refuse(f"{name} is {value!r}, and {inside!r} in its RoPE settings")
            said.setdefault(name, fields.number(name, value))
    widths = {name: int(head.rotary * share) for name, share in said.items()}
    if fields.get("rotary_dim") is not None:
        widths["rotary_dim"] = fields.size("rotary_dim")
    elif fields.model_type in {"codegen", "gptj"}:
        fields.refuse("its config has no rotary_dim")
    if len(set(widths.values())) > 1 and not by_type:
        both = " and ".join(f"{name} ({width})" for name, width in widths.items())
        fields.refuse(f"{both} give different numbers of rotated channels")
    if not widths:
        share = 1.0 if family is None or family.partial is None else family.partial
        return int(head.rotary * share), share
    name, width = next(iter(widths.items()))
    if not 1 <= width <= head.rotary:
        fields.refuse(f"{name} rotates {width} channels of a head, not 1 to {head.rotary}")
    return width, said.get(name, width / head.rotary)


# --- which layers ---------------------------------------------------------------------------------


def _settings_by_layer(
    fields: ConfigFields, family: Family | None, num_layers: int
) -> list[Mapping[str, Any] | None]:
    """The settings of each layer, ``None`` for no RoPE; shared settings are one object."""
    settings = _settings(fields)
    if family is not None and family.needs_settings and not settings:
        fields.refuse("its config has no rope_parameters (or rope_scaling)")
    rule = _rule_of_unknown(fields, settings) if family is None else family.layers
    if rule == "by_type":
        return _by_type(fields, family, settings)
    if rule == "all" or (rule == "windowed" and fields.get("sliding_window") is None):
        return [settings] * num_layers
    if rule == "none" or (rule == "named" and not _is_named(fields)):
        return [None] * num_layers
    if rule == "named":
        return [settings] * num_layers
    if rule == "listed":
        return _listed(fields, settings, num_layers)
    if rule == "marked":
        marks = _marks(fields, family, num_layers)
        return [settings if mark else None for mark in marks]
    rotates = [kind == "sliding_attention" for kind in _known_kinds(fields)]
    if fields.get("prefix_dense_sliding_window_pattern") == 1:
        # Layers without experts have RoPE in any case (Cohere 2 with experts).
        mlps = fields.get("mlp_layer_types") or ()
        rotates = [one or mlp == "dense" for one, mlp in zip_longest(rotates, mlps[:num_layers])]
    return [settings if one else None for one in rotates]


def _settings(fields: ConfigFields) -> Mapping[str, Any]:
    found = {}
    for name in ("rope_parameters", "rope_scaling"):
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            fields.refuse(f"{name} is {value!r}, not a mapping")
        found[name] = value
    if len(found) == 2:
        for name, value in found["rope_scaling"].items():
            if found["rope_parameters"].get(name) != value:
                fields.refuse(f"rope_parameters and rope_scaling differ in {name}")
    return dict(next(iter(found.values()), {}))


def _rule_of_unknown(fields: ConfigFields, settings: Mapping[str, Any]) -> str:
    if any(isinstance(value, Mapping) for value in settings.values()):
        return "by_type"
    if fields.get("no_rope_layers") is not None:
        return "marked"
    kinds = fields.get("layer_types")
    if keeps_state(fields):
        fields.refuse("its type is unknown, and it has layers with recurrent state")
    if kinds is not None and len(set(kinds)) > 1:
        fields.refuse(
            "its type is unknown, and its layers differ (layer_types), so the rotated layers are "
            "unknown; build a RopeSpec by hand"
        )
    for name in ("no_rope_layer_interval", "rope_local_base_freq", "layer_rope_theta"):
        if fields.get(name) is not None:
            fields.refuse(
                f"its type is unknown, and {name} differs by layer; build a RopeSpec by hand"
            )
    return "all"


def _is_named(fields: ConfigFields) -> bool:
    """Whether a model that may lack RoPE has it."""
    if fields.model_type == "zamba2":
        return bool(fields.get("use_mem_rope"))
    if fields.model_type == "olmo_hybrid":
        return _settings(fields).get("rope_theta") is not None
    return bool(fields.get("position_embedding_type") == "rope")


def _listed(
    fields: ConfigFields, settings: Mapping[str, Any], num_layers: int
) -> list[Mapping[str, Any] | None]:
    """The same settings with a base per layer; 0 is a layer without RoPE."""
    thetas = fields.get("layer_rope_theta")
    if thetas is None:
        return [settings] * num_layers
    if isinstance(thetas, str) or not isinstance(thetas, Sequence) or len(thetas) != num_layers:
        fields.refuse(f"layer_rope_theta is {thetas!r}, not a list for {num_layers} layers")
    made = {theta: {**settings, "rope_theta": theta} for theta in thetas if theta}
    return [made[theta] if theta else None for theta in thetas]


def _marks(fields: ConfigFields, family: Family | None, num_layers: int) -> list[int]:
    marks = fields.get("no_rope_layers")
    if not marks:
        every = family.every if family is not None else 0
        if fields.get("no_rope_layer_interval") is not None:
            every = fields.size("no_rope_layer_interval")
        if not every:
            fields.refuse("no_rope_layers is empty")
        return [int((layer + 1) % every != 0) for layer in range(num_layers)]
    if not isinstance(marks, Sequence) or any(mark not in {0, 1} for mark in marks):
        fields.refuse(f"no_rope_layers is {marks!r}, not a list of 0 (no RoPE) and 1 (RoPE)")
    if len(marks) < num_layers:
        fields.refuse(f"no_rope_layers has {len(marks)} entries for {num_layers} layers")
    return [int(mark) for mark in marks[:num_layers]]


def _known_kinds(fields: ConfigFields) -> list[str]:
    kinds = layer_kinds(fields)
    if kinds is None:
        fields.refuse("its config has no layer_types")
    return kinds


def _by_type(
    fields: ConfigFields, family: Family | None, settings: Mapping[str, Any]
) -> list[Mapping[str, Any] | None]:
    kinds = _known_kinds(fields)
    nested = {name: {**value} for name, value in settings.items() if isinstance(value, Mapping)}
    flat = sorted(set(settings) - set(nested))
    if nested and flat:
        fields.refuse(f"its RoPE settings mix layer types and fields ({', '.join(flat)})")
    by_type = nested or _old_by_type(fields, family, settings)
    for layer, kind in enumerate(kinds):
        if kind not in by_type:
            fields.refuse(f"its RoPE settings have no {kind!r}, which layer {layer} is")
    for name, inner in nested.items():
        # The meaning of an absent base, and of a base next to the layer types, differs by type.
        if inner.get("rope_theta") is None:
            fields.refuse(f"its RoPE settings of {name!r} have no rope_theta")
        # transformers reads it next to the layer types, others inside.
        if inner.get("truncate") not in {None, True}:
            fields.refuse(f"engines read truncate in the settings of {name!r} differently")
    return [by_type[kind] for kind in kinds]


def _old_by_type(
    fields: ConfigFields, family: Family | None, settings: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Settings by layer type of older configs, whose scaling applies to full attention alone."""
    if fields.get("rope_parameters") is not None:
        fields.refuse("its rope_parameters do not name layer types")
    theta = fields.get("rope_theta")
    full = {**settings}
    if theta is not None:
        full.setdefault("rope_theta", theta)
    local: dict[str, Any] = {"rope_type": "default"}
    if fields.model_type == "gemma3_text":
        base = fields.get("rope_local_base_freq")
        local["rope_theta"] = 10_000.0 if base is None else base
    elif theta is not None:
        local["rope_theta"] = theta
    elif family is not None:
        local["rope_theta"] = family.theta
    return {"full_attention": full, "sliding_attention": local}


# --- which frequencies ----------------------------------------------------------------------------


def _rotary(
    fields: ConfigFields,
    family: Family | None,
    settings: Mapping[str, Any],
    head: _Head,
    interleaved: bool,
    regime: str | None,
) -> RotaryFields:
    kind = _rope_type(fields, settings, regime)
    theta = _theta(fields, family, settings)
    width, share = _rotated(fields, family, settings, head)
    is_whole = family is not None and family.partial is None
    if kind != "proportional" and is_whole and width != head.rotary:
        fields.refuse(f"partial_rotary_factor {share:g}: models of its type rotate whole heads")
    checked: dict[str, Any] = {"rope_type": kind, "rope_theta": theta}
    checked |= _parameters(fields, kind, settings, share)
    if kind == "longrope":
        checked |= _longrope_parameters(fields, settings, width, regime == "long")
    if kind == "yarn" and width % 2:
        fields.refuse(f"rope_type 'yarn' needs an even number of rotated channels, not {width}")
    inv_freq, factor = frequencies(checked, head.rotary if kind == "proportional" else width)
    sections = settings.get("mrope_section")
    if sections is not None and sum(sections) != len(inv_freq):
        fields.refuse(
            f"mrope_section {sections!r} is of {sum(sections)} pairs, not {len(inv_freq)}"
        )
    if 2 * len(inv_freq) > head.rotary:
        fields.refuse(f"head_dim {head.rotary} is odd, and all of it rotates")
    if not all(map(math.isfinite, inv_freq)):
        fields.refuse(f"rope_theta {theta:g} gives frequencies that are not finite")
    if family is not None and family.reverse:
        inv_freq = tuple(-value for value in inv_freq)
    return RotaryFields(
        inv_freq=inv_freq,
        start=head.start,
        interleaved=interleaved,
        attention_factor=factor,
    )


def named_type(fields: ConfigFields, settings: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a config's
    """The type that settings name; refuses names that differ, and Phi-3's old "yarn".

    M-RoPE of a known type is "default", and that of other types is refused.
    """
    said = {name: settings[name] for name in _TYPE_NAMES if settings.get(name) is not None}
    if len(set(map(str, said.values()))) > 1:
        fields.refuse(f"rope_type {said['rope_type']!r} and type {said['type']!r} differ")
    kind = next(iter(said.values()), "default")
    family = FAMILIES.get(fields.model_type or "")
    if family is not None and family.item_positions:
        _check_sections(fields, settings)
        kind = "default" if kind == "mrope" else kind
    elif settings.get("mrope_section") is not None or settings.get("mrope_interleaved"):
        fields.refuse(f"it has {REFUSED_TYPES['mrope']}")
    if kind == "yarn" and fields.model_type == "phi3":
        fields.refuse("rope_type 'yarn' is LongRoPE's old name in models of its type")
    if kind == "deepseek_yarn":
        kind = "yarn"  # vLLM writes this into the config of a loaded DeepSeek model
    return kind


def _check_sections(fields: ConfigFields, settings: Mapping[str, Any]) -> None:
    """Which axis a pair follows does not change how far it rotates; but each must have one."""
    sections = settings.get("mrope_section")
    if sections is None:
        return
    is_list = isinstance(sections, Sequence) and not isinstance(sections, str)
    if not is_list or len(sections) != 3 or not all(is_int(one) and one >= 0 for one in sections):
        fields.refuse(f"mrope_section is {sections!r}, not a list of three numbers of pairs")


def _rope_type(fields: ConfigFields, settings: Mapping[str, Any], regime: str | None) -> str:
    kind = named_type(fields, settings)
    if kind == "dynamic" and regime == "long":
        fields.refuse("rope_type 'dynamic' has other frequencies at each length beyond the short")
    if kind in REFUSED_TYPES and not (regime is not None and kind in BY_REGIME):
        fields.refuse(f"rope_type {kind!r} is {REFUSED_TYPES[kind]}")
    if kind == "su":
        kind = "longrope"
    if kind not in FIELDS_OF_TYPE:
        known = ", ".join(FIELDS_OF_TYPE)
        fields.refuse(f"rope_type {kind!r} is unknown (this version: {known})")
    needed, optional = FIELDS_OF_TYPE[kind]
    for name in needed:
        if name not in settings and _outer(fields, name) is None:
            fields.refuse(f"its RoPE settings have no {name}, which rope_type {kind!r} needs")
    if settings.get("apply_yarn_scaling") is False:
        fields.refuse("the effect of apply_yarn_scaling=False on its frequencies is unknown")
    for name, value in settings.items():
        known_names = {*_COMMON, *_NEUTRAL_FIELDS, *_AXES, *needed, *optional}
        if value is not None and name not in known_names:
            fields.refuse(f"{name}={value!r} has no known meaning for rope_type {kind!r}")
    return str(kind)


def _outer(fields: ConfigFields, name: str) -> Any:  # noqa: ANN401 - a config field may be anything
    return fields.get(name) if name == "original_max_position_embeddings" else None


def _theta(fields: ConfigFields, family: Family | None, settings: Mapping[str, Any]) -> float:
    inside = settings.get("rope_theta")
    outer = fields.first("rope_theta", "rotary_emb_base")
    if inside is None and outer is None:
        if family is None:
            fields.refuse("its config has no rope_theta")
        return family.theta
    by_type = family is None or family.layers in {"by_type", "listed"}
    if inside is not None and outer is not None and inside != outer[1] and not by_type:
        fields.refuse(f"{outer[0]} is {outer[1]!r}, and {inside!r} in its RoPE settings")
    value = inside if inside is not None else cast("tuple[str, Any]", outer)[1]
    return fields.number("rope_theta", value, least=1.0)


def _original_length(fields: ConfigFields, settings: Mapping[str, Any]) -> int:
    name = "original_max_position_embeddings"
    inside, outer = settings.get(name), fields.get(name)
    if inside is not None and outer is not None and inside != outer:
        fields.refuse(f"{name} is {outer!r}, and {inside!r} in its RoPE settings")
    value = inside if inside is not None else outer
    if not is_int(value) or value < 1:
        fields.refuse(f"{name} is {value!r}, not a positive integer")
    return value


def _parameters(
    fields: ConfigFields, kind: str, settings: Mapping[str, Any], share: float
) -> dict[str, Any]:
    # In the short regime of dynamic NTK the base is the config's own.
    if kind in {"default", "dynamic", "longrope"}:
        return {"rope_type": "default"} if kind == "dynamic" else {}
    if kind == "yarn":
        return _yarn_parameters(fields, settings)
    factor = settings.get("factor")
    if kind == "proportional":
        scale = 1.0 if factor is None else fields.number("factor", factor)
        return {"partial_rotary_factor": share, "factor": scale}
    checked: dict[str, Any] = {"factor": fields.number("factor", factor)}
    if kind == "linear":
        return checked
    for name in ("low_freq_factor", "high_freq_factor"):
        checked[name] = fields.number(name, settings.get(name))
    low, high = checked["low_freq_factor"], checked["high_freq_factor"]
    if high <= low:
        fields.refuse(f"high_freq_factor {high:g} is not above low_freq_factor {low:g}")
    return checked | {"original_max_position_embeddings": _original_length(fields, settings)}


def _longrope_parameters(
    fields: ConfigFields, settings: Mapping[str, Any], width: int, is_long: bool
) -> dict[str, Any]:
    length = _original_length(fields, settings)
    checked: dict[str, Any] = {"original_max_position_embeddings": length, "is_long": is_long}
    for name in ("short_factor", "long_factor"):
        factors = settings[name]
        if isinstance(factors, str) or not isinstance(factors, Sequence):
            fields.refuse(f"{name} is {factors!r}, not a list")
        if len(factors) != width // 2:
            fields.refuse(f"{name} has {len(factors)} entries for {width // 2} pairs")
        checked[name] = [fields.number(name, factor) for factor in factors]
    factor = settings.get("factor")
    if factor is None:
        factor = fields.size("max_position_embeddings") / length
    checked["factor"] = fields.number("factor", factor)
    given = settings.get("attention_factor")
    if given is not None:
        checked["attention_factor"] = fields.number("attention_factor", given)
    return checked


def _yarn_parameters(fields: ConfigFields, settings: Mapping[str, Any]) -> dict[str, Any]:
    length = _original_length(fields, settings)
    factor = settings["factor"]
    if factor is None:
        factor = fields.size("max_position_embeddings") / length
    factor = fields.number("factor", factor)
    truncate = settings.get("truncate", True)
    if not isinstance(truncate, bool):
        fields.refuse(f"truncate is {truncate!r}, not a bool")
    checked = {
        "factor": factor,
        "original_max_position_embeddings": length,
        "truncate": truncate,
        "beta_fast": fields.number("beta_fast", settings.get("beta_fast") or 32),
        "beta_slow": fields.number("beta_slow", settings.get("beta_slow") or 1),
    }
    given = settings.get("attention_factor")
    if given is not None:
        return checked | {"attention_factor": fields.number("attention_factor", given)}
    scales = {name: settings.get(name) for name in ("mscale", "mscale_all_dim")}
    if factor > 1 and all(scales.values()):
        checked |= {name: fields.number(name, scale) for name, scale in scales.items()}
    return checked
