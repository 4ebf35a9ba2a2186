"""Geometry of a paged KV pool, read from a config or from tensors. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NoReturn

from kvtrie import _placement
from kvtrie._core import LayoutError

MAX_BLOCK_SIZE: Final = 4096

_ITEM_SIZES: Final[Mapping[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
}

# Hugging Face configs spell one field in several ways. The first name that is set wins.
_NUM_LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_NUM_HEADS: Final = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_NUM_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HIDDEN_SIZE: Final = ("hidden_size", "n_embd", "d_model")
_HEAD_DIM: Final = ("head_dim", "kv_channels")

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
# Values that make a token attend to the tokens after it.
_BIDIRECTIONAL: Final[Mapping[str, bool]] = {
    "is_causal": False,
    "use_bidirectional_attention": True,
    "prefix_lm": True,
}
_MULTIMODAL_FIELDS: Final = ("text_config", "thinker_config", "vision_config", "audio_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The shape of one KV pool: layers, heads, row widths, element type and block size.

    Args:
        num_layers: Attention layers, each with its own K and V.
        num_kv_heads: KV heads per layer (fewer than query heads under GQA).
        head_dim: Channels of one head's row of K.
        dtype: Name of the element type: ``float32``, ``float16``, ``bfloat16`` or ``float64``.
        block_size: Token slots per block, 1 to 4096.
        v_head_dim: Channels of one head's row of V. ``None``: as ``head_dim``. 0: there is no V
            (MLA latent rows serve as both).
        axes: Axes of an engine's tensors, as given to ``from_tensors``; ``None`` for a pool that
            makes its own tensors.

    Raises:
        LayoutError: If ``dtype`` cannot be held (int8, float8 and int4 need scales), or ``axes``
            are malformed.
        ValueError: If a size is out of range.
        TypeError: If a size is not an integer.

    Example:
        >>> layout = KVLayout(
        ...     num_layers=2, num_kv_heads=2, head_dim=32, dtype="float32", block_size=16
        ... )
        >>> layout.bytes_per_token
        1024
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int = 16
    # None becomes head_dim in __post_init__, so that equal layouts compare equal. Readers see a
    # number.
    v_head_dim: int = None  # type: ignore[assignment] # see above
    axes: str | None = None

    def __post_init__(self) -> None:
        v_head_dim: int | None = self.v_head_dim
        if v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "v_head_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                msg = f"KVLayout: {name} must be an int, not {value!r}"
                raise TypeError(msg)
            least = 0 if name == "v_head_dim" else 1
            if value < least:
                msg = f"KVLayout: {name} must be at least {least}, not {value}"
                raise ValueError(msg)
        if self.block_size > MAX_BLOCK_SIZE:
            msg = f"KVLayout: block_size must be at most {MAX_BLOCK_SIZE}, not {self.block_size}"
            raise ValueError(msg)
        if self.dtype not in _ITEM_SIZES:
            known = ", ".join(_ITEM_SIZES)
            msg = f"KVLayout: a pool of {self.dtype!r} is not supported (this version: {known})"
            raise LayoutError(msg)
        if self.axes is not None:
            _placement.parse_axes(self.axes, "KVLayout")

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return _ITEM_SIZES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token: K and V of all layers."""
        channels = self.head_dim + self.v_head_dim
        return self.num_layers * self.num_kv_heads * channels * self.item_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes per block."""
        return self.bytes_per_token * self.block_size

    @classmethod
    def from_tensors(
        cls,
        tensors: object,
        *,
        axes: str,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
    ) -> KVLayout:
        """Describe the pool that an engine holds, and verify the description.

        ``axes`` names the axes of a tensor's shape in order: ``layers``, ``kv``, ``blocks``,
        ``tokens``, ``heads`` and ``dim``. Axes that the engine merged are in parentheses. The
        physical order is read from the strides. K comes before V. An axis that merges ``kv`` with
        ``dim``, ``kv`` first, may hold K and V of different widths. ``heads`` may be omitted where
        there is one.

        Args:
            tensors: A list with one tensor per layer, or one tensor if ``axes`` names ``layers``.
                If ``axes`` does not name ``kv``: a pair of these, K and V. With ``v_head_dim=0``: K
                alone.
            axes: Such as ``"blocks heads tokens (kv dim)"``.
            block_size: Token slots per block.
            num_kv_heads: KV heads per layer on this device.
            head_dim: Channels of one head's row of K.
            v_head_dim: Channels of one head's row of V; ``None``: as ``head_dim``; 0: no V.

        Returns:
            The layout, for ``KVPool.wrap``.

        Raises:
            LayoutError: If shapes do not fit, if tensors differ in shape, strides, element type or
                device, if the element type needs scales, or if two elements share an address or
                cannot be verified not to.
            TypeError: If ``tensors`` is neither a tensor nor a sequence of tensors.

        Example:
            >>> import torch
            >>> layers = [torch.zeros(2, 8, 16, 4, 32) for _ in range(3)]
            >>> layout = KVLayout.from_tensors(
            ...     layers,
            ...     axes="kv blocks tokens heads dim",
            ...     block_size=16,
            ...     num_kv_heads=4,
            ...     head_dim=32,
            ... )
            >>> layout.num_layers, layout.dtype
            (3, 'float32')
        """
        # Checks the sizes before anything is divided by them.
        sizes = cls(
            num_layers=1,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype="float32",
            block_size=block_size,
            v_head_dim=v_head_dim,  # type: ignore[arg-type] # None: as head_dim
            axes=axes,
        )
        found = sizes.place(tensors, "KVLayout.from_tensors")
        return replace(sizes, num_layers=found.num_layers, dtype=found.dtype)

    def place(self, tensors: object, call: str) -> _placement.Found:
        """Find K and V in the tensors of an engine, for ``KVPool.wrap``.

        Args:
            tensors: As for ``from_tensors``.
            call: The caller, for messages.

        Returns:
            Where K and V are stored. Their layers and element type are not compared with it.

        Raises:
            LayoutError: As for ``from_tensors``, or if the layout has no ``axes``.
        """
        if self.axes is None:
            msg = f"{call}: the layout has no axes of tensors; see KVLayout.from_tensors"
            raise LayoutError(msg)
        sizes = (self.block_size, self.num_kv_heads, self.head_dim, self.v_head_dim)
        return _placement.place(tensors, self.axes, sizes, call=call)

    @classmethod
    def from_config(
        cls,
        config: object,
        block_size: int = 16,
        dtype: object = None,
        *,
        mla: Literal["latent", "expanded"] = "latent",
    ) -> KVLayout:
        """Read the geometry of a Hugging Face causal LM with full attention (MHA, GQA, MQA, MLA).

        Args:
            config: A ``transformers`` config, or the mapping read from a ``config.json``.
            block_size: Token slots per block.
            dtype: A torch dtype or its name; ``None``: the config's own.
            mla: What is stored for an MLA model. ``"latent"``: one row ``[latent | k_pe]`` per
                token that serves as K and V, as in serving engines. ``"expanded"``: heads of K
                ``[nope | rope]`` and heads of V, as attention expands them. Ignored for other
                models.

        Returns:
            The layout.

        Raises:
            LayoutError: If the model stores anything other than one row of K and of V per token and
                layer (sliding windows, state-space layers, ...), if its KV does not depend on the
                prefix alone (bidirectional attention, dynamic RoPE), or if a field is missing.
            ValueError: If ``mla`` has another value.
        """
        if mla not in _MLA_FORMS:
            msg = f"KVLayout.from_config: mla must be one of {', '.join(_MLA_FORMS)}, not {mla!r}"
            raise ValueError(msg)
        fields = _Fields(config)
        _refuse_other_models(fields)
        _refuse_other_layers(fields)
        _refuse_moving_rope(fields)
        heads, head_dim, v_head_dim = _rows(fields, mla)
        return cls(
            num_layers=fields.size(_NUM_LAYERS),
            num_kv_heads=heads,
            head_dim=head_dim,
            dtype=_dtype_name(fields, dtype),
            block_size=block_size,
            v_head_dim=v_head_dim,
        )


class _Fields:
    """Reads fields of a config object or a mapping; an absent field is ``None``."""

    def __init__(self, config: object) -> None:
        self._config = config
        self.model = str(self.get("model_type") or type(config).__name__)

    def get(self, name: str) -> Any:  # noqa: ANN401 - a config field may be anything
        if isinstance(self._config, Mapping):
            return self._config.get(name)
        return getattr(self._config, name, None)

    def size(self, names: Sequence[str]) -> int:
        """The first field of ``names`` that is set, as a positive int."""
        value = self.size_or_none(names)
        if value is None:
            self.refuse(f"its config has no {names[0]}")
        return value

    def size_or_none(self, names: Sequence[str]) -> int | None:
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if isinstance(value, (list, tuple)):
                self.refuse(f"{name} differs from layer to layer")
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                self.refuse(f"{name} is {value!r}, not a positive integer")
            return value
        return None

    def refuse(self, reason: str) -> NoReturn:
        msg = f"KVLayout.from_config: cannot hold the KV of a {self.model} model: {reason}"
        raise LayoutError(msg)


def _refuse_other_models(fields: _Fields) -> None:
    for name in _MULTIMODAL_FIELDS:
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


def _refuse_other_layers(fields: _Fields) -> None:
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


def _refuse_moving_rope(fields: _Fields) -> None:
    for rope in _ropes(fields):
        kind = rope.get("rope_type", rope.get("type"))
        if kind in ("dynamic", "longrope"):
            fields.refuse(
                f"under rope_type {kind!r} the K of a token depends on the length of the prompt"
            )
        if rope.get("mrope_section") is not None:
            fields.refuse("it has multimodal positions (mrope_section)")


def _ropes(fields: _Fields) -> list[Mapping[str, Any]]:
    """The RoPE settings of a config: zero or one, or one per layer type."""
    found: list[Mapping[str, Any]] = []
    for name in ("rope_parameters", "rope_scaling"):
        value = fields.get(name)
        if isinstance(value, Mapping):
            found.append(value)
            found.extend(inner for inner in value.values() if isinstance(inner, Mapping))
    return found


def _rows(fields: _Fields, mla: str) -> tuple[int, int, int]:
    """KV heads, and the channels of a head's row of K and of V."""
    num_heads = fields.size(_NUM_HEADS)
    if fields.get("kv_lora_rank") is None:
        head_dim = _head_dim(fields, num_heads)
        return _num_kv_heads(fields, num_heads), head_dim, head_dim
    latent, k_pe = (_mla_size(fields, name) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    if mla == "latent":
        return 1, latent + k_pe, 0
    nope, v_head_dim = (_mla_size(fields, name) for name in ("qk_nope_head_dim", "v_head_dim"))
    return num_heads, nope + k_pe, v_head_dim


def _mla_size(fields: _Fields, name: str) -> int:
    value = fields.size_or_none((name,))
    if value is None:
        fields.refuse(f"it keeps a latent (MLA, kv_lora_rank), and its config has no {name}")
    return value


def _num_kv_heads(fields: _Fields, num_heads: int) -> int:
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        return 1
    num_kv_heads = fields.size_or_none(_NUM_KV_HEADS)
    if num_kv_heads is None:
        return num_heads
    if num_heads % num_kv_heads:
        fields.refuse(f"{num_heads} query heads do not divide into {num_kv_heads} KV heads")
    return num_kv_heads


def _head_dim(fields: _Fields, num_heads: int) -> int:
    head_dim = fields.size_or_none(_HEAD_DIM)
    if head_dim is None:
        hidden_size = fields.size(_HIDDEN_SIZE)
        if hidden_size % num_heads:
            fields.refuse(f"hidden_size {hidden_size} does not divide into {num_heads} heads")
        head_dim = hidden_size // num_heads
    v_head_dim = fields.get("v_head_dim")
    if v_head_dim is not None and v_head_dim != head_dim:
        fields.refuse(f"V is {v_head_dim} wide and K {head_dim} (v_head_dim)")
    return head_dim


def _dtype_name(fields: _Fields, dtype: object) -> str:
    # The old name comes last: transformers warns when it is read.
    value = dtype or fields.get("dtype") or fields.get("torch_dtype")
    if value is None:
        fields.refuse("no dtype was given, and its config has none")
    return str(value).removeprefix("torch.")
