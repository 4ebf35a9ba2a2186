"""Groups of a model's layers: those that store rows of one shape and type, and attend alike.

A group has its attention (every token, or a window of the last ones), its KV heads, its row widths
and its element type. All groups of a pool have one table of block ids: a layer with a window
keeps the KV of every token, which is more than it attends to. How keys rotate is not part of a
group: `kvtrie.RopeSpec` says it for every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from kvtrie._core import LayoutError
from kvtrie.models.kv_types import DS_MLA_LATENT, KV_TYPES, KVType, refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ITEM_SIZES: Final[Mapping[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that store and attend alike.

    Args:
        layers: Their numbers among the attention layers, ascending.
        num_kv_heads: KV heads per layer.
        head_dim: Channels of one head's row of K.
        v_head_dim: Channels of one head's row of V. ``None``: as ``head_dim``. 0: there is no V.
        window: Tokens that a token attends to, itself included. ``None``: all before it.
        dtype: Element type, as for ``KVLayout``. ``None``: ``"uint8"`` with ``quant``, and else the
            layout's type. Floats next to a quantised layout are named here.
        quant: How quantised rows are stored, as for ``KVLayout``. ``None``: ``dtype`` are floats;
            without ``dtype``, as the layout's.

    Raises:
        LayoutError: The type cannot be held, or does not fit the sizes.
        ValueError: A size is out of range, or ``layers`` are empty or not ascending.
        TypeError: A field has the wrong type.

    Example:
        >>> group = KVGroup(layers=(0, 2), num_kv_heads=2, head_dim=32, quant="int8_per_token_head")
        >>> group.shape, group.k_row, group.dtype
        ((2, 32, 32), 36, 'uint8')
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    # None becomes head_dim in __post_init__.
    v_head_dim: int = None  # type: ignore[assignment] # see above
    window: int | None = None
    dtype: str | None = None
    quant: str | None = None

    def __post_init__(self) -> None:
        v_head_dim: int | None = self.v_head_dim
        if v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        layers: object = self.layers
        if not isinstance(layers, tuple):
            msg = f"KVGroup: layers must be a tuple, not {layers!r}"
            raise TypeError(msg)
        for number in self.layers:
            _check_int("layers", number, 0)
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            msg = f"KVGroup: layers must be ascending numbers, at least one, not {self.layers!r}"
            raise ValueError(msg)
        for name, least in (("num_kv_heads", 1), ("head_dim", 1), ("v_head_dim", 0)):
            _check_int(name, getattr(self, name), least)
        if self.window is not None:
            _check_int("window", self.window, 1)
        if self.quant is not None and self.dtype is None:
            object.__setattr__(self, "dtype", "uint8")
        if self.dtype is not None:
            where = f"KVGroup: layers {layers_text(self.layers)}: "
            check_element(where, self.dtype, self.quant, self.shape)

    @property
    def shape(self) -> tuple[int, int, int]:
        """KV heads, channels of K, channels of V."""
        return self.num_kv_heads, self.head_dim, self.v_head_dim

    @property
    def kv_type(self) -> KVType | None:
        """How quantised rows are stored; None for floats, or as the layout's."""
        return None if self.quant is None else KV_TYPES[self.quant]

    @property
    def k_row(self) -> int:
        """Elements of a head's stored row of K: channels; of quantised rows, bytes."""
        kind = self.kv_type
        return self.head_dim if kind is None else kind.k_row(self.head_dim)

    @property
    def v_row(self) -> int:
        """Elements of a head's stored row of V; 0 for none. For ``fp8_index``, of the scale."""
        kind = self.kv_type
        return self.v_head_dim if kind is None else kind.v_row(self.v_head_dim)

    @property
    def first_rotated(self) -> int:
        """The first channel of K that may rotate."""
        kind = self.kv_type
        return 0 if kind is None or kind.requantizes else DS_MLA_LATENT

    @property
    def item_size(self) -> int:
        """Bytes of one element.

        Raises:
            LayoutError: The group has its layout's type: ``KVLayout.layers`` says which that is.
        """
        if self.dtype is None:
            msg = (
                f"KVGroup: layers {layers_text(self.layers)} have the element type of their "
                "layout: KVLayout.layers has it"
            )
            raise LayoutError(msg)
        return 1 if self.quant is not None else _ITEM_SIZES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of a token in one of the layers, with scales that are stored with them.

        Raises:
            LayoutError: As for ``item_size``.
        """
        return self.num_kv_heads * (self.k_row + self.v_row) * self.item_size


def _check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"KVGroup: {name} must be an int, not {value!r}"
        raise TypeError(msg)
    if value < least:
        msg = f"KVGroup: {name} must be at least {least}, not {value}"
        raise ValueError(msg)


def check_element(where: str, dtype: str, quant: str | None, shape: tuple[int, int, int]) -> None:
    """Check that rows of this shape can be stored in a type.

    Args:
        where: What a message begins with.
        dtype: Name of the tensors' element type.
        quant: How quantised rows are stored; None for floats.
        shape: As ``KVGroup.shape``.

    Raises:
        LayoutError: They cannot.
    """
    if quant is None:
        if dtype in _ITEM_SIZES:
            return
        msg = (
            f"{where}a pool of {dtype!r} is not supported without quant "
            f"(floats are {', '.join(_ITEM_SIZES)})"
        )
        raise LayoutError(msg)
    why = refusal(quant)
    if why is not None:
        msg = f"{where}KV of {quant!r} is not supported: {why}"
        raise LayoutError(msg)
    kind = KV_TYPES[quant]
    heads, head_dim, v_head_dim = shape
    if dtype not in kind.dtypes:
        msg = f"{where}tensors of {kind.name} are {' or '.join(kind.dtypes)}, not {dtype!r}"
        raise LayoutError(msg)
    if kind.head_dim not in (None, head_dim):
        msg = f"{where}{kind.name} has head_dim {kind.head_dim}, not {head_dim}"
        raise LayoutError(msg)
    if kind.is_single and (heads, v_head_dim) != (1, 0):
        msg = (
            f"{where}{kind.name} is one row per token, so num_kv_heads is 1 and v_head_dim "
            f"0, not {heads} and {v_head_dim}"
        )
        raise LayoutError(msg)


def checked_groups(groups: object, whole: KVGroup) -> tuple[KVGroup, ...]:
    """Check that groups hold every layer once, the first in the layout's shape and type.

    Args:
        groups: The argument of ``KVLayout``.
        whole: All layers in the layout's shape and type.

    Returns:
        The groups, each with its type; ``whole`` without groups.

    Raises:
        LayoutError: They do not, or a type does not fit a group's shape.
        TypeError: They are no tuple of groups.
    """
    if not isinstance(groups, tuple) or not all(isinstance(one, KVGroup) for one in groups):
        msg = f"KVLayout: groups must be a tuple of KVGroup, not {groups!r}"
        raise TypeError(msg)
    if not groups:
        return (whole,)
    numbers = sorted(layer for group in groups for layer in group.layers)
    if numbers != list(whole.layers):
        msg = f"KVLayout: groups hold the layers {numbers}, not each of {len(whole.layers)} once"
        raise LayoutError(msg)
    if groups[0].shape != whole.shape:
        msg = (
            f"KVLayout: num_kv_heads, head_dim and v_head_dim are {whole.shape}, those of the "
            f"first group {groups[0].shape}"
        )
        raise LayoutError(msg)
    found = tuple(
        replace(one, dtype=whole.dtype, quant=whole.quant) if one.dtype is None else one
        for one in groups
    )
    first = found[0]
    if (first.dtype, first.quant) != (whole.dtype, whole.quant):
        msg = (
            f"KVLayout: dtype and quant are {(whole.dtype, whole.quant)}, those of the first "
            f"group (layers {layers_text(first.layers)}) {(first.dtype, first.quant)}"
        )
        raise LayoutError(msg)
    return found


def by_layer(groups: Sequence[KVGroup]) -> tuple[KVGroup, ...]:
    """The group of each layer."""
    found = {layer: group for group in groups for layer in group.layers}
    return tuple(found[layer] for layer in range(len(found)))


def layers_text(layers: Sequence[int]) -> str:
    """Ascending numbers of layers, with ranges: ``0-4,6``."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1][1:] = [layer]
        else:
            parts.append([layer])
    return ",".join("-".join(map(str, part)) for part in parts)


def types_text(layers: Sequence[KVGroup]) -> str:
    """The types of layers, as one name.

    That of all layers, if they have one: ``quant``, or the type of floats. Else that of layer 0,
    and each other one with its layers: ``bfloat16+fp8_e4m3[5,11]``. So for one number of layers, a
    name is of one assignment of types. Tensors of bytes have one name, whatever their ``dtype``.
    """
    found: dict[str, list[int]] = {}
    for layer, group in enumerate(layers):
        found.setdefault(str(group.quant or group.dtype), []).append(layer)
    (first, _), *others = found.items()
    return "+".join([first, *(f"{name}[{layers_text(its)}]" for name, its in others)])
