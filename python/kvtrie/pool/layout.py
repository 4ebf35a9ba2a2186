"""Geometry of a paged KV pool, read from a config or from tensors. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

from kvtrie._core import LayoutError
from kvtrie.models.kv_shape import read_kv_shape
from kvtrie.pool import placement
from kvtrie.pool.groups import KVGroup, by_layer, check_element, checked_groups, types_text

if TYPE_CHECKING:
    from kvtrie.models.kv_types import KVType

MAX_BLOCK_SIZE: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The shape of one KV pool: layers, heads, row widths, element types and block size.

    Args:
        num_layers: Attention layers, each with its own K and V.
        num_kv_heads: KV heads per layer (fewer than query heads under GQA).
        head_dim: Channels of one head's row of K.
        dtype: Name of the tensors' element type: ``float32``, ``float16``, ``bfloat16`` or
            ``float64``; with ``quant`` that of a byte: ``uint8``, ``int8`` or a float8.
        block_size: Token slots per block, 1 to 4096.
        v_head_dim: Channels of one head's row of V. ``None``: as ``head_dim``. 0: there is no V
            (MLA latent rows serve as both).
        axes: Axes of an engine's tensors, as given to ``from_tensors``; ``None`` for a pool that
            makes its own.
        quant: How quantised rows are stored: ``fp8_e4m3``, ``fp8_e5m2``, ``int8``,
            ``fp8_per_token_head``, ``int8_per_token_head``, ``fp8_ds_mla`` or ``fp8_index``;
            ``docs/pool.md`` has their bytes. ``None``: rows are floats.
        groups: Layers that differ in shape or element type, or attend over a window; see
            ``kvtrie.pool.KVGroup``. They hold every layer once, and the first has the sizes and the
            type above. One that names this type itself is as one that names none. Empty: all
            layers are alike and attend to all tokens before.

    Raises:
        LayoutError: ``dtype`` or ``quant`` cannot be held, they do not fit each other or the
            sizes, ``axes`` are malformed, ``groups`` do not hold each layer once, the first has
            another shape or type, or they differ in shape or type next to ``axes``.
        ValueError: A size is out of range.
        TypeError: A size is not an integer.

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
    # None becomes head_dim in __post_init__: equal layouts compare equal, and readers see a number.
    v_head_dim: int = None  # type: ignore[assignment] # see above
    axes: str | None = None
    quant: str | None = None
    groups: tuple[KVGroup, ...] = ()
    _layers: tuple[KVGroup, ...] = field(init=False, repr=False, compare=False)

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
        shape = (self.num_kv_heads, self.head_dim, self.v_head_dim)
        check_element("KVLayout: ", self.dtype, self.quant, shape)
        if self.axes is not None:
            placement.parse_axes(self.axes, "KVLayout")
        self._set_groups()

    @property
    def layers(self) -> tuple[KVGroup, ...]:
        """The group of each layer, with its element type."""
        return self._layers

    @property
    def is_uniform(self) -> bool:
        """Whether the rows of all layers have one shape and one element type."""
        return len({(group.shape, group.dtype, group.quant) for group in self._layers}) == 1

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that a token attends to, per layer; ``None``: all before it."""
        return tuple(group.window for group in self._layers)

    def _set_groups(self) -> None:
        whole = KVGroup(
            layers=tuple(range(self.num_layers)),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            dtype=self.dtype,
            quant=self.quant,
        )
        found = checked_groups(self.groups, whole)
        object.__setattr__(self, "_layers", by_layer(found))
        if self.axes is not None and not self.is_uniform:
            msg = (
                "KVLayout: tensors of one axes have one shape and one element type; these layers "
                f"have {types_text(self._layers)}: wrap the groups one by one"
            )
            raise LayoutError(msg)
        # Equal layouts compare equal: a group has no type where it has the layout's.
        kept = tuple(
            replace(one, dtype=None, quant=None)
            if (one.dtype, one.quant) == (self.dtype, self.quant)
            else one
            for one in found
        )
        if len(kept) == 1 and kept[0].window is None:
            kept = ()
        object.__setattr__(self, "groups", kept)

    @property
    def kv_dtype(self) -> str:
        """What a gate or a namespace calls this KV: ``quant``, or the type of floats.

        Where layers differ in type, that of layer 0, and each other one with its layers:
        ``bfloat16+fp8_e4m3[5,11]``.
        """
        return types_text(self._layers)

    @property
    def kv_type(self) -> KVType | None:
        """How quantised rows are stored; None for floats. Of the first group, as what follows."""
        return self._first.kv_type

    @property
    def k_row(self) -> int:
        """Elements of a head's stored row of K: channels; of quantised rows, bytes."""
        return self._first.k_row

    @property
    def v_row(self) -> int:
        """Elements of a head's stored row of V; 0 for none. For ``fp8_index``, of the scale."""
        return self._first.v_row

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return self._first.item_size

    @property
    def _first(self) -> KVGroup:
        return self._layers[self.groups[0].layers[0] if self.groups else 0]

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token: K and V of all layers, with the scales that are stored with them."""
        return sum(group.bytes_per_token for group in self._layers)

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
        quant: str | None = None,
    ) -> KVLayout:
        """Describe the pool that an engine holds, and verify the description.

        ``docs/pool.md`` says what the names in ``axes`` mean, and has the axes of engines. The
        physical order is read from the strides. K comes before V.

        Args:
            tensors: A list with one tensor per layer, or one tensor if ``axes`` names ``layers``.
                If ``axes`` does not name ``kv``: a pair of these, K and V. With ``v_head_dim=0``: K
                alone.
            axes: The axes of a tensor's shape in order, merged ones in parentheses, such as
                ``"blocks heads tokens (kv dim)"``. ``heads`` may be omitted where there is one.
            block_size: As for the class.
            num_kv_heads: KV heads per layer on this device.
            head_dim: As for the class.
            v_head_dim: As for the class.
            quant: As for the class. Then ``dim`` counts bytes, with a scale in the row, and
                tensors have elements of one byte.

        Raises:
            LayoutError: Shapes do not fit, tensors differ in shape, strides, element type or
                device, the element type needs ``quant``, or two elements share an address or
                cannot be verified not to.
            TypeError: ``tensors`` is neither a tensor nor a sequence of tensors.

        Example:
            >>> import torch
            >>> layers = [torch.zeros(2, 8, 16, 4, 32) for _ in range(3)]
            >>> axes = "kv blocks tokens heads dim"
            >>> KVLayout.from_tensors(
            ...     layers, axes=axes, block_size=16, num_kv_heads=4, head_dim=32
            ... ).bytes_per_block
            49152
        """
        # Checks the sizes before anything is divided by them.
        sizes = cls(
            num_layers=1,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype="float32" if quant is None else "uint8",
            block_size=block_size,
            v_head_dim=v_head_dim,  # type: ignore[arg-type] # None: as head_dim
            axes=axes,
            quant=quant,
        )
        found = sizes.place(tensors, "KVLayout.from_tensors")
        return replace(sizes, num_layers=found.num_layers, dtype=found.dtype)

    def place(self, tensors: object, call: str) -> placement.Found:
        """Find K and V in an engine's tensors; layers and element type are not compared.

        Args:
            tensors: As for ``from_tensors``.
            call: The caller, for messages.

        Raises:
            LayoutError: As for ``from_tensors``, or the layout has no ``axes``.
        """
        if self.axes is None:
            msg = f"{call}: the layout has no axes of tensors; see KVLayout.from_tensors"
            raise LayoutError(msg)
        sizes = (self.block_size, self.num_kv_heads, self.k_row, self.v_row)
        return placement.place(tensors, self.axes, sizes, call=call)

    @classmethod
    def from_config(
        cls,
        config: object,
        block_size: int = 16,
        dtype: object = None,
        *,
        mla: Literal["latent", "expanded"] = "latent",
        regime: Literal["short"] | None = None,
    ) -> KVLayout:
        """Read the geometry of a Hugging Face causal LM: full attention, windows, MLA.

        ``docs/models.md`` lists every model type.

        Args:
            config: A ``transformers`` config, or the mapping read from a ``config.json``.
            block_size: Token slots per block.
            dtype: A torch dtype or its name; ``None``: the config's own.
            mla: What is stored for an MLA model; ignored for others. ``"latent"``: one row
                ``[latent | k_pe]`` per token that serves as K and V, as in serving engines.
                ``"expanded"``: heads of K ``[nope | rope]`` and heads of V, as attention expands
                them.
            regime: ``"short"``: no prompt is longer than the original length of LongRoPE or of
                dynamic NTK, so that a token has one K. ``None``: such models are refused.

        Raises:
            LayoutError: The model stores anything other than one row of K and of V per token and
                layer (state, index rows, ...), its KV does not depend on the prefix alone
                (bidirectional attention, dynamic RoPE), or a field is missing.
            ValueError: ``mla`` or ``regime`` has another value.
            TypeError: ``config`` is a path.
        """
        if regime not in {None, "short"}:
            msg = f"KVLayout.from_config: regime must be 'short' or None, not {regime!r}"
            raise ValueError(msg)
        shape = read_kv_shape(config, dtype, mla, is_short=regime == "short")
        groups = tuple(KVGroup(**group._asdict()) for group in shape.groups)
        first = groups[0]
        return cls(
            num_layers=sum(len(group.layers) for group in groups),
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            v_head_dim=first.v_head_dim,
            dtype=shape.dtype,
            block_size=block_size,
            groups=groups,
        )
