"""Groups of a model's layers: those that store rows of one shape and attend over one window.

A group has its attention (every token, or a window of the last ones), its KV heads and its row
widths. All groups of a pool have one element type and one table of block ids: a layer with a window
keeps the KV of every token, which is more than it attends to. How keys rotate is not part of a
group: `kvtrie.RopeSpec` says it for every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtrie._core import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that store and attend alike.

    Args:
        layers: Their numbers among the attention layers, ascending.
        num_kv_heads: KV heads per layer.
        head_dim: Channels of one head's row of K.
        v_head_dim: Channels of one head's row of V. ``None``: as ``head_dim``. 0: there is no V.
        window: Tokens that a token attends to, itself included. ``None``: all before it.

    Raises:
        ValueError: A size is out of range, or ``layers`` are empty or not ascending.
        TypeError: A field has the wrong type.

    Example:
        >>> KVGroup(layers=(0, 2), num_kv_heads=2, head_dim=32, window=128).shape
        (2, 32, 32)
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    # None becomes head_dim in __post_init__.
    v_head_dim: int = None  # type: ignore[assignment] # see above
    window: int | None = None

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

    @property
    def shape(self) -> tuple[int, int, int]:
        """KV heads, channels of K, channels of V."""
        return self.num_kv_heads, self.head_dim, self.v_head_dim


def _check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"KVGroup: {name} must be an int, not {value!r}"
        raise TypeError(msg)
    if value < least:
        msg = f"KVGroup: {name} must be at least {least}, not {value}"
        raise ValueError(msg)


def check_groups(groups: object, num_layers: int, shape: tuple[int, int, int]) -> None:
    """Check that groups, if any, hold every layer once, the first in the layout's shape."""
    if not isinstance(groups, tuple) or not all(isinstance(one, KVGroup) for one in groups):
        msg = f"KVLayout: groups must be a tuple of KVGroup, not {groups!r}"
        raise TypeError(msg)
    if not groups:
        return
    numbers = sorted(layer for group in groups for layer in group.layers)
    if numbers != list(range(num_layers)):
        msg = f"KVLayout: groups hold the layers {numbers}, not each of {num_layers} once"
        raise LayoutError(msg)
    if groups[0].shape != shape:
        msg = (
            f"KVLayout: num_kv_heads, head_dim and v_head_dim are {shape}, those of the first "
            f"group {groups[0].shape}"
        )
        raise LayoutError(msg)


def by_layer(groups: Sequence[KVGroup]) -> tuple[KVGroup, ...]:
    """The group of each layer."""
    found = {layer: group for group in groups for layer in group.layers}
    return tuple(found[layer] for layer in range(len(found)))
