"""How a model rotates K with the position: read from a config, or given directly.

Needs no torch, except for `RopeSpec.from_config`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import numpy as np

from kvtrie._core import KvTrieError
from kvtrie.models.config import check_config, is_int, is_number
from kvtrie.models.rope import REGIMES, read_rope

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike, NDArray

    from kvtrie._core import Item

# Up to this delta the error of a float64 angle, delta * 2**-53, is 4 times smaller than the float32
# rounding of its cosine (2**-24).
MAX_DELTA: Final = 2**27


def _check(owner: str, name: str, value: object, kind: Any) -> None:  # noqa: ANN401 - a type
    """A bool is not a number; an int passes as a float."""
    if kind in {int, float}:
        right = is_int(value) if kind is int else is_number(value)
    else:
        right = isinstance(value, kind)
    if not right:
        said = getattr(kind, "__name__", str(kind).replace("kvtrie.rope.", ""))
        msg = f"{owner}: {name} must be {said}, not {value!r}"
        raise TypeError(msg)


def _check_inv_freq(inv_freq: object) -> None:
    _check("Rotary", "inv_freq", inv_freq, tuple)
    values = cast("tuple[object, ...]", inv_freq)
    if not values:
        msg = "Rotary: inv_freq is empty; a layer whose keys are not rotated is None in a RopeSpec"
        raise ValueError(msg)
    for index, value in enumerate(values):
        _check("Rotary", f"inv_freq[{index}]", value, float)
        if not math.isfinite(cast("float", value)):
            msg = f"Rotary: inv_freq[{index}] is {value}, not a finite number"
            raise ValueError(msg)


class ItemPositionsError(KvTrieError, ValueError):
    """An item does not say how many positions it takes, and the model has M-RoPE.

    Nothing was changed.

    Attributes:
        item: The item.
    """

    def __init__(self, message: str, item: Item) -> None:
        super().__init__(message)
        self.item = item

    def __reduce__(self) -> tuple[type[ItemPositionsError], tuple[str, Item]]:
        """Pickle both arguments."""
        return type(self), (str(self), self.item)


@dataclass(frozen=True, slots=True)
class Rotary:
    """How the keys of one layer rotate.

    When a token moves by ``delta`` positions, pair ``i`` of its K rotates by ``delta *
    inv_freq[i]`` radians: channels ``(a, b)`` become ``(a cos - b sin, b cos + a sin)``. Channels
    outside the window ``[start, start + width)`` do not change.

    Args:
        inv_freq: Radians per position, one per pair: the float32 values of engines, held as
            float64. A pair of frequency 0 does not rotate; a negative frequency rotates the other
            way.
        start: First channel of a head's K row that rotates.
        interleaved: If true, pair ``i`` is channels ``(2i, 2i + 1)`` of the window (GPT-J); else
            channels ``(i, i + len(inv_freq))`` (NeoX).
        attention_factor: What the engine multiplied K by (YaRN), for information: stored K
            contains it.

    Raises:
        ValueError: A number is not finite, or out of range.
        TypeError: A field has the wrong type.

    Example:
        >>> rotary = Rotary(inv_freq=(1.0, 0.01), start=2)
        >>> rotary.width
        4
        >>> cos, sin = rotary.cos_sin([0, 3])
        >>> cos.shape, cos.dtype.name, float(cos[1, 0])
        ((2, 2), 'float32', -0.9899924993515015)
    """

    inv_freq: tuple[float, ...]
    start: int = 0
    interleaved: bool = False
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        _check_inv_freq(self.inv_freq)
        _check("Rotary", "start", self.start, int)
        if self.start < 0:
            msg = f"Rotary: start must be at least 0, not {self.start}"
            raise ValueError(msg)
        _check("Rotary", "interleaved", self.interleaved, bool)
        _check("Rotary", "attention_factor", self.attention_factor, float)
        if not 0 < self.attention_factor < math.inf:
            msg = f"Rotary: attention_factor must be above 0, not {self.attention_factor}"
            raise ValueError(msg)

    @property
    def width(self) -> int:
        """Channels that rotate: two per pair."""
        return 2 * len(self.inv_freq)

    def angles(self, deltas: ArrayLike) -> NDArray[np.float64]:
        """Angles in radians, float64, ``[n, pairs]``.

        Args:
            deltas: Positions that tokens move by, integers ``[n]``, at most ``2**27`` either way.

        Raises:
            TypeError: A delta is not an integer.
            ValueError: ``deltas`` is not one-dimensional, or a delta is out of range.
        """
        moved = np.asarray(deltas)
        if moved.ndim != 1:
            msg = f"Rotary: deltas must have one axis, not shape {list(moved.shape)}"
            raise ValueError(msg)
        if moved.size and moved.dtype.kind not in "iu":
            msg = f"Rotary: deltas must be integers, not {moved.dtype.name}"
            raise TypeError(msg)
        outside = (moved > MAX_DELTA) | (moved < -MAX_DELTA)
        if np.any(outside):
            msg = f"Rotary: delta {moved[outside][0]} is beyond {MAX_DELTA} positions"
            raise ValueError(msg)
        return np.multiply.outer(
            moved.astype(np.float64), np.asarray(self.inv_freq, dtype=np.float64)
        )

    def cos_sin(self, deltas: ArrayLike) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines of `angles`, each ``[n, pairs]``, rounded once to float32.

        Args:
            deltas: As for `angles`, like what is raised.
        """
        angles = self.angles(deltas)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How the keys of all layers of a model rotate when tokens move.

    A value: two specs of the same model are equal and hash alike. Layers that rotate in the same
    way share one `Rotary`.

    Args:
        layers: One entry per attention layer, in the model's order. ``None`` is a layer without
            RoPE: its keys hold no position and do not rotate.
        head_dim: Channels of a head's K row. For MLA latent rows: ``kv_lora_rank +
            qk_rope_head_dim``. Where ``head_dims`` differ, those of the widest.
        head_dims: Channels of a head's K row in each layer. Empty: ``head_dim`` in all of them.
        item_positions: M-RoPE: a pair rotates by one of several positions of its token, and an
            item (an image) takes other positions than tokens. Its run moves by the difference of
            positions, for which each `Item` has to say how many it takes; see `check_items`.
        state_layers: Numbers, in the model, of its layers with recurrent state (state-space,
            convolution, linear attention), which no rotation moves. A layer with attention alone
            is not among them, and one with state alone is not in ``layers``.

    Raises:
        ValueError: There is no layer, or a window reaches beyond its row.
        TypeError: A field has the wrong type.

    Example:
        >>> from kvtrie.rope import Rotary
        >>> RopeSpec(layers=(Rotary(inv_freq=(1.0, 0.01)), None), head_dim=8)
        RopeSpec(2 layers, head_dim=8: layer 0 rotates [0, 4) in halves; layer 1 stays)
    """

    layers: tuple[Rotary | None, ...]
    head_dim: int
    head_dims: tuple[int, ...] = ()
    state_layers: tuple[int, ...] = ()
    item_positions: bool = False

    def __post_init__(self) -> None:
        _check("RopeSpec", "layers", self.layers, tuple)
        if not self.layers:
            msg = "RopeSpec: layers is empty"
            raise ValueError(msg)
        for index, layer in enumerate(self.layers):
            _check("RopeSpec", f"layers[{index}]", layer, Rotary | None)
        _check("RopeSpec", "head_dim", self.head_dim, int)
        if self.head_dim < 1:
            msg = f"RopeSpec: head_dim must be at least 1, not {self.head_dim}"
            raise ValueError(msg)
        self._check_head_dims()
        _check("RopeSpec", "state_layers", self.state_layers, tuple)
        for index, number in enumerate(self.state_layers):
            _check("RopeSpec", f"state_layers[{index}]", number, int)
            if number < 0:
                msg = f"RopeSpec: state_layers[{index}] must be at least 0, not {number}"
                raise ValueError(msg)
        _check("RopeSpec", "item_positions", self.item_positions, bool)
        for index, (layer, dim) in enumerate(zip(self.layers, self.dims, strict=True)):
            if layer is not None and layer.start + layer.width > dim:
                msg = (
                    f"RopeSpec: layer {index} rotates channels [{layer.start}, "
                    f"{layer.start + layer.width}), beyond head_dim {dim}"
                )
                raise ValueError(msg)

    def _check_head_dims(self) -> None:
        _check("RopeSpec", "head_dims", self.head_dims, tuple)
        if not self.head_dims:
            return
        if len(self.head_dims) != len(self.layers):
            msg = f"RopeSpec: head_dims has {len(self.head_dims)} of {len(self.layers)} layers"
            raise ValueError(msg)
        for index, dim in enumerate(self.head_dims):
            _check("RopeSpec", f"head_dims[{index}]", dim, int)
            if dim < 1:
                msg = f"RopeSpec: head_dims[{index}] must be at least 1, not {dim}"
                raise ValueError(msg)
        if max(self.head_dims) != self.head_dim:
            msg = f"RopeSpec: head_dim is {self.head_dim}, the widest is {max(self.head_dims)}"
            raise ValueError(msg)
        if len(set(self.head_dims)) == 1:
            object.__setattr__(self, "head_dims", ())

    @property
    def dims(self) -> tuple[int, ...]:
        """Channels of a head's K row, per attention layer."""
        return self.head_dims or (self.head_dim,) * len(self.layers)

    def __repr__(self) -> str:
        runs: list[tuple[int, int, Rotary | None, int]] = []
        for index, (layer, dim) in enumerate(zip(self.layers, self.dims, strict=True)):
            if runs and runs[-1][2:] == (layer, dim):
                runs[-1] = (runs[-1][0], index, layer, dim)
            else:
                runs.append((index, index, layer, dim))
        said = []
        for first, last, layer, dim in runs:
            who = f"layer {first}" if first == last else f"layers {first} to {last}"
            if self.head_dims:
                who += f" of {dim}"
            if layer is None:
                said.append(f"{who} stay{'s' if first == last else ''}")
                continue
            order = "in pairs" if layer.interleaved else "in halves"
            window = f"[{layer.start}, {layer.start + layer.width})"
            factor = f", factor {layer.attention_factor:.4g} in K"
            said.append(
                f"{who} rotate{'s' if first == last else ''} {window} {order}"
                f"{factor if layer.attention_factor != 1.0 else ''}"
            )
        count = f"{len(self.layers)} layer{'' if len(self.layers) == 1 else 's'}"
        if self.state_layers:
            said.append(f"state in {len(self.state_layers)} layers of the model")
        if self.item_positions:
            said.append("items need positions")
        return f"RopeSpec({count}, head_dim={self.head_dim}: {'; '.join(said)})"

    @classmethod
    def from_config(
        cls,
        config: object,
        *,
        mla: Literal["latent", "expanded"] = "latent",
        interleaved: bool | None = None,
        regime: Literal["short", "long"] | None = None,
    ) -> RopeSpec:
        """Read how a Hugging Face causal LM rotates its keys. Needs torch; see ``docs/rope.md``.

        Frequencies equal those of transformers on a CPU, bit for bit, whether or not it is
        installed.

        Args:
            config: A ``transformers`` config, or the mapping read from a ``config.json``.
            mla: What a K row is in a model with multi-head latent attention. ``"latent"``:
                ``[kv_lora_rank | qk_rope_head_dim]``, as in vLLM and SGLang. ``"expanded"``: a head
                of ``[qk_nope_head_dim | qk_rope_head_dim]``, as in transformers.
            interleaved: The order of pairs in the stored keys; ``None``: that of a table of model
                types. Other types need it, because a wrong order gives wrong keys without an error.
            regime: For LongRoPE and dynamic NTK, whose frequencies depend on the tokens of a pass,
                as transformers computes them. ``"short"``: no pass has more than the original
                length. ``"long"`` (LongRoPE alone): each pass ends beyond it. ``None``: refused.
                A key of one regime cannot be moved into the other.

        Raises:
            UnsupportedRopeError: A rotation cannot move the keys of the model, the RoPE type or the
                model type is unknown, or a field is missing or contradicts another one. The
                message names the field.
            ValueError: ``mla`` or ``regime`` is unknown.
            TypeError: ``interleaved`` is not a bool, or ``config`` is a path.
            ImportError: torch is not installed.

        Example:
            >>> config = {"model_type": "llama", "num_hidden_layers": 2, "rope_theta": 500_000.0}
            >>> config |= {"hidden_size": 32, "num_attention_heads": 4}
            >>> RopeSpec.from_config(config)
            RopeSpec(2 layers, head_dim=8: layers 0 to 1 rotate [0, 8) in halves)
        """
        if mla not in {"latent", "expanded"}:
            msg = f"RopeSpec.from_config: mla must be 'latent' or 'expanded', not {mla!r}"
            raise ValueError(msg)
        if regime not in {None, *REGIMES}:
            msg = f"RopeSpec.from_config: regime must be 'short', 'long' or None, not {regime!r}"
            raise ValueError(msg)
        _check("RopeSpec.from_config", "interleaved", interleaved, bool | None)
        check_config("RopeSpec.from_config", config)
        found = read_rope(config, mla, interleaved, regime)
        made = {fields: Rotary(*fields) for fields in found.layers if fields is not None}
        return cls(
            layers=tuple(None if fields is None else made[fields] for fields in found.layers),
            head_dim=max(found.head_dims),
            head_dims=found.head_dims,
            state_layers=found.state_layers,
            item_positions=found.item_positions,
        )

    def check_items(self, items: Iterable[Item]) -> None:
        """Refuse items whose positions the model needs and which do not say them.

        Call it with the items of each sequence before the sequence is planned or inserted.
        `KVPool.apply` calls it for a plan.

        Args:
            items: The items of one sequence.

        Raises:
            ItemPositionsError: The model has M-RoPE, and an item has no ``positions``.

        Example:
            >>> from kvtrie.rope import Rotary
            >>> spec = RopeSpec((Rotary(inv_freq=(1.0,)),), head_dim=2, item_positions=True)
            >>> spec.check_items([kvtrie.Item(1, 97, b"an image of 8 x 12", positions=12)])
        """
        if not self.item_positions:
            return
        for item in items:
            if item.positions is None:
                msg = (
                    f"RopeSpec.check_items: {item!r} has no positions, and the model has M-RoPE: "
                    "give Item(..., positions=), how many the whole item takes"
                )
                raise ItemPositionsError(msg, item)
