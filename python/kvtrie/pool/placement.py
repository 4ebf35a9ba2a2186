"""Where every element of a KV pool is stored: tensors, offsets and strides, from named axes.

Only shape, strides, element type, device and address of a tensor are read: torch is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

from kvtrie._core import LayoutError
from kvtrie.kernels.geometry import Placement, Rows

if TYPE_CHECKING:
    from collections.abc import Iterator

AXES: Final = ("layers", "kv", "blocks", "tokens", "heads", "dim")
MAX_BLOCKS: Final = 2**31

_TOKEN: Final = re.compile(r"\s*(?:(?P<name>[A-Za-z_]+)|(?P<paren>[()])|(?P<bad>\S))")

# A torch tensor.
TensorLike: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Found:
    """The KV found in tensors, which are in the order of their numbers in ``placement``."""

    placement: Placement
    tensors: tuple[TensorLike, ...]
    num_layers: int
    dtype: str


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Known axis sizes; ``dim`` is K's, ``v_dim`` V's (0: none)."""

    tokens: int
    heads: int
    dim: int
    v_dim: int

    def of(self, name: str, dim: int) -> int | None:
        """The size of an axis; ``None``: read it from the tensor."""
        known = {"kv": 2, "tokens": self.tokens, "heads": self.heads, "dim": dim}
        return known.get(name)


def place(tensors: object, axes: str, sizes: tuple[int, int, int, int], *, call: str) -> Found:
    """Find K and V in tensors as `KVLayout.from_tensors` says, and check all that can be checked.

    ``sizes`` are tokens per block, KV heads, channels of K, channels of V (0: no V).
    """
    finder = _Finder(axes, _Sizes(*sizes), call)
    return finder.find(tensors)


def parse_axes(axes: object, call: str) -> tuple[tuple[str, ...], ...]:
    """Read an axes string: one tuple of names per axis, outermost first."""
    if not isinstance(axes, str):
        msg = f"{call}: axes must be a str such as 'blocks tokens heads dim', not {axes!r}"
        raise TypeError(msg)
    groups: list[tuple[str, ...]] = []
    inside: list[str] | None = None
    for match in _TOKEN.finditer(axes):
        name, paren = match["name"], match["paren"]
        if match["bad"] or (paren == "(" and inside is not None) or (paren == ")" and not inside):
            _refuse(call, f"axes {axes!r} are malformed at {match[0].strip()!r}")
        if name and name not in AXES:
            _refuse(call, f"axes {axes!r} name {name!r}; known are {', '.join(AXES)}")
        if paren == "(":
            inside = []
        elif paren == ")":
            groups.append(tuple(inside or ()))
            inside = None
        elif inside is None:
            groups.append((name,))
        else:
            inside.append(name)
    if inside is not None:
        _refuse(call, f"axes {axes!r} are malformed: a parenthesis is not closed")
    names = [name for group in groups for name in group]
    for name in AXES:
        if names.count(name) > 1:
            _refuse(call, f"axes {axes!r} name {name!r} twice")
        if name in ("blocks", "tokens", "dim") and name not in names:
            _refuse(call, f"axes {axes!r} do not name {name!r}")
    return tuple(groups)


def _refuse(call: str, reason: str) -> NoReturn:
    msg = f"{call}: {reason}"
    raise LayoutError(msg)


def is_tensor(value: object) -> bool:
    """Whether a value looks like a tensor."""
    return hasattr(value, "data_ptr") and hasattr(value, "stride")


def dtype_name(tensor: TensorLike) -> str:
    """The name of a tensor's element type, without ``torch.``."""
    return str(tensor.dtype).removeprefix("torch.")


class _Finder:
    def __init__(self, axes: str, sizes: _Sizes, call: str) -> None:
        self._axes = axes
        self._sizes = sizes
        self._call = call
        self._groups = parse_axes(axes, call)
        names = {name for group in self._groups for name in group}
        self._has_layers = "layers" in names
        self._has_kv = "kv" in names
        if self._has_kv and not sizes.v_dim:
            self._refuse("axes name 'kv', but v_head_dim=0 says that there is no V")
        if "heads" not in names and sizes.heads != 1:
            self._refuse(f"axes {axes!r} do not name 'heads', and there are {sizes.heads}")

    def find(self, tensors: object) -> Found:
        sizes = self._sizes
        if self._has_kv or not sizes.v_dim:
            of_k, of_v = self._members(tensors, "tensors"), []
        else:
            if is_tensor(tensors) or not isinstance(tensors, Sequence) or len(tensors) != 2:
                self._refuse(
                    f"axes {self._axes!r} do not name 'kv', so tensors must be a pair: K and V "
                    "(v_head_dim=0 says that there is no V)"
                )
            of_k = self._members(tensors[0], "tensors[0] (K)")
            of_v = self._members(tensors[1], "tensors[1] (V)")
            if len(of_k) != len(of_v):
                self._refuse(f"{len(of_k)} tensors of K, but {len(of_v)} of V")
        every = (*of_k, *of_v)
        for number, tensor in enumerate(every):
            self._check_alone(number, tensor, every[0])
        self._check_alike(of_k, 0)
        self._check_alike(of_v, len(of_k))
        self._check_overlap(every)
        k_rows, v_rows, num_blocks = self._rows(of_k, sizes.dim, first=0)
        if of_v:
            v_rows, _, v_blocks = self._rows(of_v, sizes.v_dim, first=len(of_k))
            if v_blocks != num_blocks:
                self._refuse(f"K has {num_blocks} blocks, V {v_blocks}")
            if len(v_rows.tensors) != len(k_rows.tensors):
                self._refuse(f"K has {len(k_rows.tensors)} layers, V {len(v_rows.tensors)}")
        if not 1 <= num_blocks <= MAX_BLOCKS:
            self._refuse(f"the tensors hold {num_blocks} blocks, not [1, {MAX_BLOCKS}]")
        return Found(
            placement=Placement(num_blocks, sizes.tokens, sizes.heads, k_rows, v_rows),
            tensors=every,
            num_layers=len(k_rows.tensors),
            dtype=dtype_name(every[0]),
        )

    def _refuse(self, reason: str) -> NoReturn:
        _refuse(self._call, reason)

    def _members(self, value: object, what: str) -> list[TensorLike]:
        """The tensors of one side: one, or one per layer."""
        if is_tensor(value):
            if self._has_layers:
                return [value]
            self._refuse(
                f"axes {self._axes!r} do not name 'layers', so {what} must be a list, one per layer"
            )
        if isinstance(value, Mapping) or not isinstance(value, Sequence):
            msg = f"{self._call}: {what} must be a tensor or a list of tensors, not {type(value)}"
            raise TypeError(msg)
        for number, member in enumerate(value):
            if not is_tensor(member):
                msg = f"{self._call}: {what}[{number}] must be a tensor, not {type(member)}"
                raise TypeError(msg)
        if not value:
            self._refuse(f"{what} is empty")
        if self._has_layers and len(value) != 1:
            self._refuse(f"axes {self._axes!r} name 'layers', so {what} must be one tensor")
        return list(value)

    def _check_alone(self, number: int, tensor: TensorLike, first: TensorLike) -> None:
        if str(tensor.layout) != "torch.strided" or tensor.device.type == "meta":
            self._refuse(f"tensor {number} has no addresses ({tensor.layout}, {tensor.device})")
        if tensor.dtype != first.dtype:
            self._refuse(f"tensor {number} is {tensor.dtype}, tensor 0 {first.dtype}")
        if tensor.device != first.device:
            self._refuse(f"tensor {number} is on {tensor.device}, tensor 0 on {first.device}")
        if tensor.dim() != len(self._groups):
            self._refuse(
                f"tensor {number} has {tensor.dim()} axes, {tuple(tensor.shape)}; "
                f"{self._axes!r} name {len(self._groups)}"
            )
        if tensor.numel() == 0:
            self._refuse(f"tensor {number} has no elements: {tuple(tensor.shape)}")

    def _check_alike(self, tensors: Sequence[TensorLike], first: int) -> None:
        for number, tensor in enumerate(tensors):
            for name, mine, other in (
                ("shape", tuple(tensor.shape), tuple(tensors[0].shape)),
                ("strides", tuple(tensor.stride()), tuple(tensors[0].stride())),
            ):
                if mine != other:
                    self._refuse(
                        f"tensor {first + number} has {name} {mine}, tensor {first} {other}"
                    )

    def _check_overlap(self, tensors: Sequence[TensorLike]) -> None:
        boxes = [_Extent.of(tensor, number) for number, tensor in enumerate(tensors)]
        for box in boxes:
            if not box.is_nested:
                self._refuse(
                    f"elements of tensor {box.number} share addresses, or cannot be verified not "
                    f"to: shape {box.shape}, strides {box.strides}"
                )
        for one, two in _meeting(boxes):
            if one.strides != two.strides or one.shape[:-1] != two.shape[:-1]:
                if not one.may_meet(two):
                    continue
                reason = "are interleaved with different strides: not verified"
            elif one.shares_with(two):
                reason = "overlap: they share addresses"
            else:
                continue
            self._refuse(f"tensors {one.number} and {two.number} {reason}")

    def _rows(
        self, tensors: Sequence[TensorLike], dim: int, first: int
    ) -> tuple[Rows, Rows | None, int]:
        """The rows of one side, the rows of V if an axis holds both, and the number of blocks."""
        shape, strides = tuple(tensors[0].shape), tuple(tensors[0].stride())
        counts = {"layers": 1}
        k_strides = {"layers": 0, "kv": 0, "heads": 0}
        v_strides = dict(k_strides)
        v_offset = 0
        for group, size, stride in zip(self._groups, shape, strides, strict=True):
            v_offset += self._group(group, size, stride, dim, counts, k_strides, v_strides)

        def rows(steps: dict[str, int], channels: int, offset: int) -> Rows:
            layers = range(counts["layers"])
            named = (steps["blocks"], steps["tokens"], steps["heads"], steps["dim"])
            if self._has_layers:
                offsets = tuple(offset + layer * steps["layers"] for layer in layers)
                return Rows(channels, named, (first,) * len(layers), offsets)
            numbers = tuple(range(first, first + len(tensors)))
            return Rows(channels, named, numbers, (offset,) * len(tensors))

        of_v = rows(v_strides, self._sizes.v_dim, v_offset) if self._has_kv else None
        return rows(k_strides, dim, 0), of_v, counts["blocks"]

    def _group(
        self,
        group: tuple[str, ...],
        size: int,
        stride: int,
        dim: int,
        counts: dict[str, int],
        k_strides: dict[str, int],
        v_strides: dict[str, int],
    ) -> int:
        """Split one axis of a tensor; returns the offset from K to V in it."""
        v_dim = self._sizes.v_dim if self._has_kv else dim
        inner = group
        sides: tuple[int, ...] = (dim,)
        if group[0] == "kv" and len(group) > 1:
            inner, sides = group[1:], (dim, v_dim)
        elif v_dim != dim and ("kv" in group or "dim" in group):
            self._refuse(
                f"K has {dim} channels and V {v_dim}: axes {self._axes!r} cannot hold both "
                "(in one axis 'kv' comes before 'dim': '(kv dim)')"
            )
        known = [self._known(inner, side) for side in sides]
        open_names = [name for name in inner if self._sizes.of(name, dim) is None]
        shown = f"axis '{' '.join(group)}' of length {size}"
        if len(open_names) > 1:
            self._refuse(f"{shown} merges {' and '.join(open_names)}: neither is known")
        if open_names:
            counts[open_names[0]], rest = divmod(size, sum(known))
            if rest:
                self._refuse(f"{shown} is not a multiple of {sum(known)}")
        elif size != sum(known):
            self._refuse(f"{shown} should have length {sum(known)}")
        for side, found in zip((dim, v_dim), (k_strides, v_strides), strict=True):
            step = stride
            for name in reversed(inner):
                found[name] = step
                step *= counts[name] if name in open_names else self._sizes.of(name, side) or 1
        if len(sides) == 2:
            return stride * known[0] * (counts[open_names[0]] if open_names else 1)
        return k_strides["kv"] if "kv" in group else 0

    def _known(self, names: Sequence[str], dim: int) -> int:
        return prod(self._sizes.of(name, dim) or 1 for name in names)


@dataclass(frozen=True, slots=True)
class _Extent:
    """The addresses of a strided tensor, in bytes."""

    number: int
    start: int
    item_size: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: TensorLike, number: int) -> _Extent:
        return cls(
            number,
            int(tensor.data_ptr()),
            int(tensor.element_size()),
            tuple(int(size) for size in tensor.shape),
            tuple(int(stride) for stride in tensor.stride()),
        )

    @property
    def end(self) -> int:
        last = sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        return self.start + (last + 1) * self.item_size

    @property
    def is_nested(self) -> bool:
        """Whether each stride is longer than everything inside it, so that no address repeats."""
        reach = 0
        for step, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1:
                if step <= reach:
                    return False
                reach += (size - 1) * step
        return True

    def shares_with(self, other: _Extent) -> bool:
        """Whether two tensors of equal strides share the address of an element."""
        apart, rest = divmod(other.start - self.start, self.item_size)
        if rest:
            return True
        axes = sorted(zip(self.strides, self.shape, other.shape, strict=True), reverse=True)
        return _can_meet(apart, tuple(axes))

    def may_meet(self, other: _Extent) -> bool:
        """Whether the addresses of two tensors may overlap; False is certain for any strides.

        Axes with equal strides in both stay axes; everything inside counts as a run without gaps.
        """
        apart, rest = divmod(other.start - self.start, self.item_size)
        if rest:
            return True
        mine, others = self._axes(), other._axes()
        alike = 0
        for (step, _), (other_step, _) in zip(mine, others, strict=False):
            if step != other_step:
                break
            alike += 1
        outer = [
            (step, size, other_size)
            for (step, size), (_, other_size) in zip(mine[:alike], others[:alike], strict=True)
        ]
        runs = (_reach(mine[alike:]), _reach(others[alike:]))
        if outer and outer[-1][0] < max(runs):
            return True
        return _can_meet(apart, (*outer, (1, *runs)))

    def _axes(self) -> list[tuple[int, int]]:
        """The longest stride first; axes of one element are skipped."""
        axes = zip(self.strides, self.shape, strict=True)
        return sorted(((step, size) for step, size in axes if size > 1), reverse=True)


def _reach(axes: Sequence[tuple[int, int]]) -> int:
    return 1 + sum(step * (size - 1) for step, size in axes)


def _can_meet(apart: int, axes: tuple[tuple[int, int, int], ...]) -> bool:
    """Whether ``apart == sum((a - b) * step)`` for some a < size, b < other size, axis by axis."""
    if len(axes) == 0:
        return apart == 0
    (step, size, other), inner = axes[0], axes[1:]
    if size == other == 1:
        return _can_meet(apart, inner)
    below = apart // step
    return any(
        -other < count < size and _can_meet(apart - count * step, inner)
        for count in (below, below + 1)
    )


def _meeting(boxes: Sequence[_Extent]) -> Iterator[tuple[_Extent, _Extent]]:
    ordered = sorted(boxes, key=lambda box: box.start)
    if all(one.end <= two.start for one, two in pairwise(ordered)):
        return
    for number, one in enumerate(ordered):
        for two in ordered[number + 1 :]:
            if two.start >= one.end:
                break
            yield one, two
