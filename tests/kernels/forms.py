"""KV tensors as engines keep them, with a slow reference for where K and V are.

``Form.split`` finds K and V by slicing and permuting shapes; it shares no code with the axes that
the package reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtrie.kernels.geometry import Geometry
from kvtrie.pool import KVLayout, KVPool
from kvtrie.rope import RopeSpec, Rotary

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

MOVES = np.dtype(
    [("source_slot", "i8"), ("dest_slot", "i8"), ("num_tokens", "i8"), ("delta", "i8")]
)
DTYPES = ("float32", "bfloat16", "float16", "float64")
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Sides = list[tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True)
class Sizes:
    """No size is a power of two, none divides another."""

    layers: int = 3
    blocks: int = 7
    block_size: int = 5
    heads: int = 3
    head_dim: int = 12
    v_head_dim: int = 12

    @property
    def slots(self) -> int:
        return self.blocks * self.block_size


@dataclass(frozen=True)
class Held:
    tensors: Any
    storages: list[torch.Tensor]

    def bits(self) -> list[torch.Tensor]:
        return [storage.view(_BITS[storage.element_size()]).clone() for storage in self.storages]


class Maker:
    """Makes tensors of a logical shape in a physical order, and remembers their storages."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device = dtype, device
        self.storages: list[torch.Tensor] = []

    def __call__(
        self, *shape: int, order: tuple[int, ...] | None = None, pad: int = 0
    ) -> torch.Tensor:
        order = order or tuple(range(len(shape)))
        strides = [0] * len(shape)
        step = 1
        for axis in reversed(order):
            strides[axis] = step
            step *= shape[axis] + pad
        storage = torch.empty(step + 2 * pad, dtype=self.dtype, device=self.device)
        self.storages.append(storage)
        return storage.as_strided(shape, strides, pad)


@dataclass(frozen=True)
class Form:
    """One way to hold KV.

    Attributes:
        name: For test ids.
        axes: The argument of ``KVLayout.from_tensors``.
        make: Makes the tensors of all layers.
        split: K and V of each layer, ``[blocks, tokens, heads, dim]``, copies.
        latent: There is no V, and one head.
        unlike: V may be narrower than K.
    """

    name: str
    axes: str
    make: Callable[[Maker, Sizes], Any]
    split: Callable[[Any, Sizes], Sides]
    latent: bool = False
    unlike: bool = False

    def sizes(self, **changes: int) -> Sizes:
        known: dict[str, int] = {}
        if self.latent:
            known = {"heads": 1, "v_head_dim": 0}
        elif self.unlike:
            known = {"v_head_dim": 9}
        return Sizes(**(known | changes))

    def build(self, dtype: str, sizes: Sizes, device: str = "cpu", seed: int = 0) -> Held:
        maker = Maker(getattr(torch, dtype), device)
        held = Held(self.make(maker, sizes), maker.storages)
        rng = torch.Generator().manual_seed(seed)
        for storage in held.storages:
            storage.copy_(torch.randn(storage.shape, generator=rng))
        return held

    def layout(self, held: Held, sizes: Sizes) -> KVLayout:
        return KVLayout.from_tensors(
            held.tensors,
            axes=self.axes,
            block_size=sizes.block_size,
            num_kv_heads=sizes.heads,
            head_dim=sizes.head_dim,
            v_head_dim=sizes.v_head_dim,
        )

    def pool(self, held: Held, sizes: Sizes, rope: RopeSpec | None = None) -> KVPool:
        return KVPool.wrap(held.tensors, self.layout(held, sizes), rope)


def _each(make: Callable[[Maker, Sizes], torch.Tensor]) -> Callable[[Maker, Sizes], Any]:
    return lambda maker, sizes: [make(maker, sizes) for _ in range(sizes.layers)]


def _split_each(
    split: Callable[[torch.Tensor, Sizes], tuple[torch.Tensor, torch.Tensor | None]],
) -> Callable[[Any, Sizes], Sides]:
    def all_layers(tensors: Any, sizes: Sizes) -> Sides:
        found = [split(tensor, sizes) for tensor in tensors]
        return [(k.clone(), None if v is None else v.clone()) for k, v in found]

    return all_layers


def _bhnc(order: tuple[int, ...], pad: int = 0) -> Form:
    def split(t: torch.Tensor, s: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = t.transpose(1, 2).split([s.head_dim, s.v_head_dim], dim=-1)
        return k, v

    named = "".join("bhnc"[axis] for axis in order)
    return Form(
        f"vllm-{named}{'-padded' if pad else ''}",
        "blocks heads tokens (kv dim)",
        _each(
            lambda m, s: m(
                s.blocks, s.heads, s.block_size, s.head_dim + s.v_head_dim, order=order, pad=pad
            )
        ),
        _split_each(split),
        unlike=True,
    )


def _split_vllm_cpu(t: torch.Tensor, s: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    middle = s.block_size * s.head_dim
    k = t[..., :middle].reshape(s.blocks, s.heads, s.block_size, s.head_dim)
    v = t[..., middle:].reshape(s.blocks, s.heads, s.block_size, s.v_head_dim)
    return k.transpose(1, 2), v.transpose(1, 2)


def _apart(tensors: Any, s: Sizes) -> Sides:
    def side(t: torch.Tensor, dim: int) -> torch.Tensor:
        return t.reshape(s.blocks, s.block_size, s.heads, dim).clone()

    ks, vs = tensors
    return [(side(k, s.head_dim), side(v, s.v_head_dim)) for k, v in zip(ks, vs, strict=True)]


def _one_row_of_k_and_v(m: Maker, s: Sizes) -> Any:
    """K and V passed separately, though their rows alternate in one tensor."""
    both = [m(s.slots, s.heads, s.head_dim + s.v_head_dim) for _ in range(s.layers)]
    return [t[..., : s.head_dim] for t in both], [t[..., s.head_dim :] for t in both]


def _layers_inside_blocks(m: Maker, s: Sizes) -> Any:
    whole = m(s.blocks, s.layers, 2, s.block_size, s.heads, s.head_dim)
    return [whole[:, layer] for layer in range(s.layers)]


FORMS = [
    Form(
        "nhd",
        "kv blocks tokens heads dim",
        _each(lambda m, s: m(2, s.blocks, s.block_size, s.heads, s.head_dim)),
        _split_each(lambda t, _: (t[0], t[1])),
    ),
    Form(
        "nhd-padded",
        "kv blocks tokens heads dim",
        _each(lambda m, s: m(2, s.blocks, s.block_size, s.heads, s.head_dim, pad=3)),
        _split_each(lambda t, _: (t[0], t[1])),
    ),
    Form(
        "block-major-hnd",
        "blocks kv tokens heads dim",
        _each(
            lambda m, s: m(s.blocks, 2, s.block_size, s.heads, s.head_dim, order=(0, 1, 3, 2, 4))
        ),
        _split_each(lambda t, _: (t[:, 0], t[:, 1])),
    ),
    *(_bhnc((*order, 3)) for order in permutations(range(3))),
    _bhnc((3, 0, 2, 1)),
    _bhnc((0, 2, 1, 3), pad=1),
    Form(
        "vllm-cpu",
        "blocks heads (kv tokens dim)",
        _each(lambda m, s: m(s.blocks, s.heads, s.block_size * (s.head_dim + s.v_head_dim))),
        _split_each(_split_vllm_cpu),
        unlike=True,
    ),
    Form(
        "sglang",
        "(blocks tokens) heads dim",
        lambda m, s: (
            [m(s.slots, s.heads, s.head_dim) for _ in range(s.layers)],
            [m(s.slots, s.heads, s.v_head_dim) for _ in range(s.layers)],
        ),
        _apart,
        unlike=True,
    ),
    Form("apart-in-one-row", "(blocks tokens) heads dim", _one_row_of_k_and_v, _apart, unlike=True),
    Form(
        "layers-inside-blocks",
        "blocks kv tokens heads dim",
        _layers_inside_blocks,
        _split_each(lambda t, _: (t[:, 0], t[:, 1])),
    ),
    Form(
        "stacked",
        "layers kv blocks tokens heads dim",
        lambda m, s: m(s.layers, 2, s.blocks, s.block_size, s.heads, s.head_dim),
        lambda t, s: [(t[n, 0].clone(), t[n, 1].clone()) for n in range(s.layers)],
    ),
    Form(
        "stacked-block-major",
        "blocks layers kv heads tokens dim",
        lambda m, s: m(s.blocks, s.layers, 2, s.heads, s.block_size, s.head_dim),
        lambda t, s: [
            (t[:, n, 0].transpose(1, 2).clone(), t[:, n, 1].transpose(1, 2).clone())
            for n in range(s.layers)
        ],
    ),
    Form(
        "mla",
        "blocks tokens dim",
        _each(lambda m, s: m(s.blocks, s.block_size, s.head_dim)),
        _split_each(lambda t, _: (t.unsqueeze(2), None)),
        latent=True,
    ),
    Form(
        "mla-vllm",
        "blocks heads tokens dim",
        _each(lambda m, s: m(s.blocks, 1, s.block_size, s.head_dim)),
        _split_each(lambda t, _: (t.transpose(1, 2), None)),
        latent=True,
    ),
    Form(
        "mla-stacked-padded",
        "layers (blocks tokens) heads dim",
        lambda m, s: m(s.layers, s.slots, 1, s.head_dim, pad=4),
        lambda t, s: [
            (t[n].reshape(s.blocks, s.block_size, 1, s.head_dim).clone(), None)
            for n in range(s.layers)
        ],
        latent=True,
    ),
]


def rotary(pairs: int, base: float = 100.0, **options: Any) -> Rotary:
    return Rotary(tuple(base ** (-i / pairs) for i in range(pairs)), **options)


ROPES: dict[str, tuple[Rotary | None, ...]] = {
    "neox": (rotary(6),) * 3,
    "interleaved": (rotary(6, interleaved=True),) * 3,
    "partial": (rotary(4),) * 3,
    "partial-interleaved": (rotary(3, interleaved=True),) * 3,
    "window-at-offset": (rotary(2, start=8),) * 3,
    "window-in-the-middle": (rotary(3, start=3, interleaved=True),) * 3,
    "other-angles-by-layer": (rotary(6), rotary(6, 1e6), rotary(6)),
    "some-layers-without": (None, rotary(6), None),
    "other-windows-by-layer": (rotary(5, start=1), None, rotary(2, interleaved=True)),
    "still-pairs": (Rotary((0.7, 0.0, 0.1, 0.0, 0.0, 1.0)),) * 3,
    "none": (None,) * 3,
}


def spec(name: str, head_dim: int = 12) -> RopeSpec:
    return RopeSpec(ROPES[name], head_dim)


def random_moves(
    seed: int, slots: int, *, longest: int = 9, deltas: tuple[int, ...] = (0, 1, -3, 977, -131_072)
) -> NDArray[Any]:
    """Pieces of any length and alignment: destinations disjoint, sources may be read twice."""
    rng = np.random.default_rng(seed)
    cuts = [0]
    while cuts[-1] < slots:
        cuts.append(min(slots, cuts[-1] + int(rng.integers(1, longest + 1))))
    pieces = list(pairwise(cuts))
    rng.shuffle(pieces)
    part = int(rng.integers(0, len(pieces) // 2 + 1))
    dests, sources = pieces[:part], pieces[part:]
    found = []
    for start, end in dests:
        first, last = sources[int(rng.integers(len(sources)))]
        count = int(rng.integers(1, min(end - start, last - first) + 1))
        source = int(rng.integers(first, last - count + 1))
        dest = int(rng.integers(start, end - count + 1))
        found.append((source, dest, count, int(rng.choice(deltas))))
    return np.array(found, dtype=MOVES)


def clone_of(held: Held, pool: KVPool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    copies = [storage.clone() for storage in held.storages]
    by_address = {
        storage.untyped_storage().data_ptr(): copy
        for storage, copy in zip(held.storages, copies, strict=True)
    }
    tensors = [
        by_address[tensor.untyped_storage().data_ptr()].as_strided(
            tensor.shape, tensor.stride(), tensor.storage_offset()
        )
        for tensor in tensors_of(pool)
    ]
    return copies, tensors


def tensors_of(pool: KVPool) -> tuple[torch.Tensor, ...]:
    """What is moved in a pool of alike layers."""
    return pool._launches[0].tensors


def geometry_of(pool: KVPool) -> Geometry:
    return Geometry.from_ints(pool._launches[0].geometry)


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    kind = _BITS[one.element_size()]
    return torch.equal(one.contiguous().view(kind), two.contiguous().view(kind))


# One case per form, and forms of every size.
WAYS = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
RANDOM_FORMS = given(
    form=st.sampled_from(FORMS),
    rope=st.sampled_from(sorted(ROPES)),
    dtype=st.sampled_from(DTYPES),
    blocks=st.integers(1, 9),
    block_size=st.integers(1, 7),
    seed=st.integers(0, 2**32),
)
