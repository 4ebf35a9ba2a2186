"""Geometry of a paged KV pool, read from a config or from tensors. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from kvtrie._core import LayoutError
from kvtrie.models.kv_shape import read_kv_shape
from kvtrie.pool import placement

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_BLOCK_SIZE: Final = 4096

_ITEM_SIZES: Final[Mapping[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
}


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
            makes its own.

    Raises:
        LayoutError: ``dtype`` cannot be held (int8, float8 and int4 need scales), or ``axes``
            are malformed.
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
            placement.parse_axes(self.axes, "KVLayout")

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

        Raises:
            LayoutError: Shapes do not fit, tensors differ in shape, strides, element type or
                device, the element type needs scales, or two elements share an address or cannot
                be verified not to.
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
            dtype="float32",
            block_size=block_size,
            v_head_dim=v_head_dim,  # type: ignore[arg-type] # None: as head_dim
            axes=axes,
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
        sizes = (self.block_size, self.num_kv_heads, self.head_dim, self.v_head_dim)
        return placement.place(tensors, self.axes, sizes, call=call)

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
            mla: What is stored for an MLA model; ignored for others. ``"latent"``: one row
                ``[latent | k_pe]`` per token that serves as K and V, as in serving engines.
                ``"expanded"``: heads of K ``[nope | rope]`` and heads of V, as attention expands
                them.

        Raises:
            LayoutError: The model stores anything other than one row of K and of V per token and
                layer (sliding windows, state-space layers, ...), its KV does not depend on the
                prefix alone (bidirectional attention, dynamic RoPE), or a field is missing.
            ValueError: ``mla`` has another value.
        """
        shape = read_kv_shape(config, dtype, mla)
        return cls(block_size=block_size, **shape._asdict())
