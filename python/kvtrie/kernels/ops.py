"""Copies of rows as torch custom ops: ``kvtrie::move_rows`` and, for codes, ``requantize_rows``.

They declare what they mutate, so that ``torch.compile`` orders it with other readers and writers of
the pool. CPU tensors go to the reference, CUDA tensors to the Triton kernel, without fallback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from kvtrie.kernels import reference
from kvtrie.kernels.codes import CodeForm
from kvtrie.kernels.geometry import Geometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

DEVICE_TYPES: Final = ("cpu", "cuda")

# The decorators of torch.library would import the compiler at the first call: seconds, for a copy.
_LIBRARY: Final = torch.library.Library("kvtrie", "DEF")
_LIBRARY.define(
    "move_rows(Tensor(a!)[] tensors, Tensor slots, Tensor cos, Tensor sin, SymInt[] geometry) -> ()"
)
_LIBRARY.define(
    "requantize_rows(Tensor(a!)[] tensors, Tensor(b!) saturated, Tensor slots, Tensor cos, "
    "Tensor sin, SymInt[] geometry, int[] form) -> ()"
)


def move_rows(
    tensors: Sequence[Tensor], slots: Tensor, cos: Tensor, sin: Tensor, geometry: Sequence[int]
) -> None:
    """Do the work of ``reference.move_rows`` on CPU or CUDA tensors; all else is on the CPU.

    Only the geometry's form (``Geometry.to_ints()``) is checked here. A slot outside the pool would
    read and write foreign memory. No two tensors may overlap. ``slots`` are int32 or int64.
    """
    torch.ops.kvtrie.move_rows(tensors, slots, cos, sin, geometry)


def requantize_rows(
    tensors: Sequence[Tensor],
    saturated: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    geometry: Sequence[int],
    form: Sequence[int],
) -> None:
    """Do the work of ``reference.requantize_rows``; ``form`` is ``CodeForm.to_ints()``.

    All but ``tensors`` and ``saturated`` is on the CPU. Nothing else is checked, as in
    ``move_rows``.
    """
    torch.ops.kvtrie.requantize_rows(tensors, saturated, slots, cos, sin, geometry, form)


def _on_cpu(
    tensors: Sequence[Tensor], slots: Tensor, cos: Tensor, sin: Tensor, geometry: Sequence[int]
) -> None:
    reference.move_rows(tensors, slots, cos, sin, Geometry.from_ints(geometry))


def _on_cuda(
    tensors: Sequence[Tensor], slots: Tensor, cos: Tensor, sin: Tensor, geometry: Sequence[int]
) -> None:
    # Triton is installed with CUDA; other machines may lack it.
    from kvtrie.kernels import triton as fused  # noqa: PLC0415 - for CUDA alone

    fused.move_rows(tensors, slots, cos, sin, Geometry.from_ints(geometry))


def _codes_on_cpu(
    tensors: Sequence[Tensor],
    saturated: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    geometry: Sequence[int],
    form: Sequence[int],
) -> None:
    of_k = CodeForm.from_ints(tuple(form))
    at = Geometry.from_ints(geometry)
    reference.requantize_rows(tensors, saturated, slots, cos, sin, at, of_k)


def _on_nothing(*_: object) -> None:
    """An op on tensors without data: it returns nothing, and its mutations are declared."""


def _codes_on_cuda(
    tensors: Sequence[Tensor],
    saturated: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    geometry: Sequence[int],
    form: Sequence[int],
) -> None:
    from kvtrie.kernels import triton_codes as fused  # noqa: PLC0415 - for CUDA alone

    of_k = CodeForm.from_ints(tuple(form))
    at = Geometry.from_ints(geometry)
    fused.requantize_rows(tensors, saturated, slots, cos, sin, at, of_k)


_LIBRARY.impl("move_rows", _on_cpu, "CPU")
_LIBRARY.impl("move_rows", _on_cuda, "CUDA")
torch.library.register_fake("kvtrie::move_rows", _on_nothing, lib=_LIBRARY)
_LIBRARY.impl("requantize_rows", _codes_on_cpu, "CPU")
_LIBRARY.impl("requantize_rows", _codes_on_cuda, "CUDA")
torch.library.register_fake("kvtrie::requantize_rows", _on_nothing, lib=_LIBRARY)
