"""One-byte codes of K: numbers from codes, and codes from numbers, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from kvtrie.models.kv_types import KVType

E4M3: Final = 0
E5M2: Final = 1
INT8: Final = 2

# The largest number that has a code, and the largest float32 that is rounded to it: what is larger
# saturates. Halfway between 448 and 480 is even at 448; the other two round up.
LARGEST: Final = (448.0, 57344.0, 127.0)
ROUNDS_DOWN: Final = (464.0, 61440.0 - 2.0**-8, 127.5 - 2.0**-17)
# vLLM's kernels make no smaller scale: of a row, and where scales are powers of two.
LEAST_SCALE: Final = 1e-6
LEAST_OF_POWER: Final = 1e-4

IN_LAYER: Final = 0
IN_ROW: Final = 1
IN_V: Final = 2

_FLOATS: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
BY_NAME: Final = {"e4m3": E4M3, "e5m2": E5M2, "int8": INT8}
_PLACES: Final = {"layer": IN_LAYER, "row": IN_ROW, "block": IN_V}


@dataclass(frozen=True, slots=True)
class CodeForm:
    """How the codes of a row of K are stored, as numbers, for a custom op.

    Attributes:
        code: ``E4M3``, ``E5M2`` or ``INT8``.
        scales: ``IN_LAYER``: it cancels. ``IN_ROW``: float32, after the codes of the row. ``IN_V``:
            float32, in the rows of V.
        is_power_of_two: Whether a scale is rounded up to a power of two.
    """

    code: int
    scales: int
    is_power_of_two: bool

    @classmethod
    def of(cls, kind: KVType) -> CodeForm | None:
        """The form of a KV type; None if a rotation does not change its codes."""
        if not kind.requantizes:
            return None
        return cls(BY_NAME[kind.codes], _PLACES[kind.scales], kind.is_power_of_two)

    def to_ints(self) -> tuple[int, int, int]:
        """The form as numbers."""
        return self.code, self.scales, int(self.is_power_of_two)

    @classmethod
    def from_ints(cls, ints: tuple[int, ...]) -> CodeForm:
        """The form of ``to_ints``; a ValueError for other numbers."""
        if (
            len(ints) != 3
            or ints[0] not in (E4M3, E5M2, INT8)
            or ints[1] not in (IN_LAYER, IN_ROW, IN_V)
            or ints[2] not in (0, 1)
        ):
            msg = f"CodeForm.from_ints: {ints} is not a form of codes"
            raise ValueError(msg)
        return cls(ints[0], ints[1], bool(ints[2]))


def decode(codes: Tensor, code: int) -> Tensor:
    """The numbers of codes (uint8), float32, without a scale."""
    if code == INT8:
        return codes.view(torch.int8).to(torch.float32)
    return codes.view(_FLOATS[code]).to(torch.float32)


def encode(numbers: Tensor, code: int) -> tuple[Tensor, Tensor]:
    """Round float32 to the nearest codes, ties to even.

    Returns:
        Codes, uint8; and where a finite number was beyond the largest and saturated, bool. Infinity
        and NaN become NaN; int8, which has none, gets 0.
    """
    saturated = (numbers.abs() > ROUNDS_DOWN[code]) & numbers.isfinite()
    bounded = numbers.clamp(-LARGEST[code], LARGEST[code])
    if code == INT8:
        bounded = torch.where(numbers.isfinite(), bounded, 0.0)
        return bounded.round().to(torch.int8).view(torch.uint8), saturated
    bounded = torch.where(numbers.isfinite(), bounded, torch.nan)
    return bounded.to(_FLOATS[code]).view(torch.uint8), saturated


def scale_of(largest: Tensor, form: CodeForm) -> Tensor:
    """The scale of rows whose largest magnitude is given, float32."""
    # A tensor: a GPU would multiply by the reciprocal of a number, which is one bit off at times.
    most = largest.new_full((), LARGEST[form.code])
    if not form.is_power_of_two:
        return (largest / most).clamp_min(LEAST_SCALE)
    # The next power of two, from the bits: logarithms differ between machines.
    scale = largest.clamp_min(LEAST_OF_POWER) / most
    return ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def quantize(rows: Tensor, form: CodeForm) -> tuple[Tensor, Tensor]:
    """Round rows ``[..., channels]`` to codes with a scale each, as an engine's cache does.

    Returns:
        Codes, uint8; and scales ``[...]``, float32.
    """
    numbers = rows.to(torch.float32)
    scales = scale_of(numbers.abs().amax(dim=-1), form)
    return encode(numbers * scales.reciprocal().unsqueeze(-1), form.code)[0], scales
