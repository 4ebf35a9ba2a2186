"""Codes of one byte against the definitions of their formats."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.kernels.coded import LARGEST, NUMBERS, nearest

from kvtrie.kernels import codes
from kvtrie.kernels.codes import CodeForm
from kvtrie.models.kv_types import KV_TYPES

BY_NAME = {"e4m3": codes.E4M3, "e5m2": codes.E5M2, "int8": codes.INT8}
names = pytest.mark.parametrize("name", BY_NAME)


@names
def test_every_byte_has_the_number_of_its_format(name: str) -> None:
    got = codes.decode(torch.arange(256, dtype=torch.uint8), BY_NAME[name]).numpy()
    np.testing.assert_array_equal(got, NUMBERS[name])


@names
def test_every_number_keeps_its_byte(name: str) -> None:
    numbers = NUMBERS[name]
    finite = np.flatnonzero(np.isfinite(numbers) & (np.abs(numbers) <= LARGEST[name]))
    got, saturated = codes.encode(torch.from_numpy(numbers[finite]), BY_NAME[name])
    np.testing.assert_array_equal(got.numpy(), finite)
    assert not saturated.any()


@names
def test_numbers_between_codes_are_rounded_to_the_nearest(name: str) -> None:
    """Halfway, next to halfway, next to the largest, and anywhere."""
    numbers = np.unique(NUMBERS[name][np.isfinite(NUMBERS[name])]).astype(np.float64)
    halfway = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    edge = np.float32(codes.ROUNDS_DOWN[BY_NAME[name]])
    given = np.concatenate(
        [
            halfway,
            np.nextafter(halfway, np.float32(np.inf)),
            np.nextafter(halfway, np.float32(-np.inf)),
            [edge, np.nextafter(edge, np.float32(np.inf)), -edge, np.float32(1e30), 1e-30, -0.0],
            np.random.default_rng(0).normal(0, LARGEST[name] / 2, 500),
        ]
    ).astype(np.float32)
    got, saturated = codes.encode(torch.from_numpy(given), BY_NAME[name])
    want = [nearest(float(number), name) for number in given]
    np.testing.assert_array_equal(saturated.numpy(), [beyond for _, beyond in want])
    np.testing.assert_array_equal(
        codes.decode(got, BY_NAME[name]).numpy(), NUMBERS[name][[byte for byte, _ in want]]
    )
    assert saturated.any()


@names
def test_what_is_no_number_is_not_counted(name: str) -> None:
    got, saturated = codes.encode(torch.tensor([np.nan, np.inf, -np.inf]), BY_NAME[name])
    assert not saturated.any()
    numbers = codes.decode(got, BY_NAME[name])
    assert bool((numbers == 0).all() if name == "int8" else numbers.isnan().all())


@pytest.mark.parametrize("quant", ["fp8_per_token_head", "int8_per_token_head", "fp8_index"])
def test_a_scale_fits_its_row(quant: str) -> None:
    form = CodeForm.of(KV_TYPES[quant])
    assert form is not None
    rows = torch.randn(500, 64, generator=torch.Generator().manual_seed(1)) * 3
    rows[0] = 0
    bytes_, scales = codes.quantize(rows, form)
    numbers = codes.decode(bytes_, form.code) * scales.unsqueeze(-1)
    largest = rows.abs().amax(-1)
    # A step at the top of a row: 2**-4 of it in e4m3, half of 1/127 in int8.
    step = 1 / 254 if form.code == codes.INT8 else 2.0**-4
    assert bool(((numbers - rows).abs() <= largest.unsqueeze(-1) * step * 1.001 + 1e-6).all())
    assert bool((scales * codes.LARGEST[form.code] >= largest * 0.9999).all())
    if form.is_power_of_two:
        assert bool((torch.frexp(scales).mantissa == 0.5).all())
        assert bool((scales[1:] * codes.LARGEST[form.code] / 2 < largest[1:]).all())


@pytest.mark.parametrize("ints", [(), (0, 0), (3, 0, 0), (0, 3, 0), (0, 0, 2), (0, 0, 0, 0)])
def test_numbers_that_are_no_form_are_refused(ints: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not a form"):
        CodeForm.from_ints(ints)


@pytest.mark.parametrize("quant", KV_TYPES)
def test_a_form_survives_being_numbers(quant: str) -> None:
    form = CodeForm.of(KV_TYPES[quant])
    assert (form is None) == (quant == "fp8_ds_mla")
    assert form is None or CodeForm.from_ints(form.to_ints()) == form
