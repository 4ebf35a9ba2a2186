"""The Triton kernel: its cases in another process, and what it compiles to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvtrie.kernels.codes import CodeForm
from kvtrie.kernels.geometry import Geometry, Placement, Rows, Window
from kvtrie.models.kv_types import KV_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def run_cases(variables: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(HERE / "triton_cases.py")]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        env={**os.environ, **variables},
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_cases_under_the_interpreter() -> None:
    run_cases({"TRITON_INTERPRET": "1"})


@pytest.mark.cuda
def test_cases_on_a_gpu() -> None:
    run_cases({"TRITON_INTERPRET": "0"})


BLOCK_SIZE, BLOCKS = 16, 1000


def _rows(number: int, layers: int, heads: int, dim: int) -> Rows:
    token = heads * dim
    offsets = tuple(layer * BLOCKS * BLOCK_SIZE * token for layer in range(layers))
    return Rows(dim, (BLOCK_SIZE * token, token, dim, 1), (number,) * layers, offsets)


def _geometry(layers: int, heads: int, dim: int, v_dim: int, window: Window) -> Geometry:
    v = _rows(1, layers, heads, v_dim) if v_dim else None
    k = _rows(0, layers, heads, dim)
    return Geometry(Placement(BLOCKS, BLOCK_SIZE, heads, k, v), (window,) * layers)


GEOMETRIES = {
    "llama-3-8b": _geometry(32, 8, 128, 128, Window(0, 0, 64, interleaved=False)),
    "deepseek-mla": _geometry(61, 1, 576, 0, Window(0, 512, 32, interleaved=True)),
}


def built(
    kernel: Any,
    geometry: Geometry,
    constants: dict[str, Any],
    *,
    architecture: int,
    is_aligned: bool,
) -> Any:
    """A kernel compiled for bfloat16 or codes, which needs no GPU."""
    from triton import compile as compile_kernel  # noqa: PLC0415 - only where it is installed
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415 - likewise
    from triton.compiler import ASTSource  # noqa: PLC0415 - likewise

    from kvtrie.kernels.triton import NUM_WARPS  # noqa: PLC0415 - imports triton

    at = geometry.placement
    names = [f"{side}_{axis}" for side in "kv" for axis in ("block", "token", "head", "channel")]
    of_v = at.v.strides if at.v else (0, 0, 0, 0)
    strides = dict(zip(names, (*at.k.strides, *of_v), strict=True))
    pointers = {"layers": "*i64", "slots": "*i32", "cos": "*fp32", "sin": "*fp32", "count": "*i64"}
    signature: dict[str, str] = {}
    known: dict[tuple[int, ...], Any] = {}
    for number, name in enumerate(kernel.arg_names):
        if strides.get(name) == 1:
            constants[name] = 1
        signature[name] = "constexpr" if name in constants else pointers.get(name, "i32")
        if is_aligned and (name in pointers or (name in strides and name not in constants)):
            known[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, known)
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    return compile_kernel(source, target=GPUTarget("cuda", architecture, 32), options=options)


def compiled(geometry: Geometry) -> Any:
    """The kernel of floats for sm_90."""
    from kvtrie.kernels import triton as fused  # noqa: PLC0415 - imports triton

    angles = next(window.num_pairs for window in geometry.windows if window)
    constants = dict(fused._settings(geometry, torch.bfloat16, 16, angles))
    return built(fused._move_rows, geometry, constants, architecture=90, is_aligned=True)


def test_windows_that_differ_compile() -> None:
    windows = (Window(0, 0, 64, interleaved=False), None, Window(1, 4, 20, interleaved=True))
    geometry = replace(_geometry(3, 8, 128, 128, windows[0]), windows=windows)
    assert "st.global" in compiled(geometry).asm["ptx"]


@pytest.mark.parametrize("name", GEOMETRIES)
def test_compiled_it_moves_16_bytes_at_a_time(name: str) -> None:
    ptx = compiled(GEOMETRIES[name]).asm["ptx"]
    stores = set(re.findall(r"st\.global[\w.]*", ptx))
    assert stores == {"st.global.v4.b32"}
    # Slots, addresses and windows come one by one, KV and angles do not.
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= 10


@pytest.mark.parametrize("name", GEOMETRIES)
def test_compiled_it_adds_64_bit_offsets_to_pools(name: str) -> None:
    ir = compiled(GEOMETRIES[name]).asm["ttir"]
    offsets = re.findall(r"tt\.addptr .* : (?:tensor<[\dx]*)?!tt\.ptr<i16>>?, (.*) loc", ir)
    assert offsets
    assert all("i64" in offset for offset in offsets), offsets


@pytest.mark.parametrize("name", GEOMETRIES)
def test_compiled_it_uses_no_fused_multiply_add(name: str) -> None:
    assert "fma" not in compiled(GEOMETRIES[name]).asm["ptx"]


CODED = {
    "fp8_e4m3": _geometry(32, 8, 128, 128, Window(0, 0, 64, interleaved=False)),
    "fp8_e5m2": _geometry(32, 8, 128, 128, Window(0, 0, 64, interleaved=True)),
    "int8_per_token_head": _geometry(32, 8, 132, 132, Window(0, 0, 64, interleaved=False)),
    "fp8_index": _geometry(61, 1, 128, 4, Window(0, 0, 32, interleaved=False)),
}


@pytest.mark.parametrize(
    ("quant", "architecture"),
    [("fp8_e4m3", 90), ("fp8_e5m2", 80), ("int8_per_token_head", 90), ("fp8_index", 80)],
)
def test_the_kernel_of_codes_compiles(quant: str, architecture: int) -> None:
    """For GPUs without instructions of float8, too; and without fused multiply-add."""
    from kvtrie.kernels import triton_codes as fused  # noqa: PLC0415 - imports triton

    geometry = CODED[quant]
    form = CodeForm.of(KV_TYPES[quant])
    assert form is not None
    angles = next(window.num_pairs for window in geometry.windows if window)
    constants = dict(fused._settings(geometry, form, 16, angles))
    kernel = fused._requantize_rows
    done = built(kernel, geometry, constants, architecture=architecture, is_aligned=False)
    ptx = done.asm["ptx"]
    assert "st.global" in ptx
    assert "fma" not in ptx
    assert "atom" in ptx
    assert "e4m3" not in ptx


def test_codes_of_aligned_rows_move_16_bytes_at_a_time() -> None:
    from kvtrie.kernels import triton_codes as fused  # noqa: PLC0415 - imports triton

    form = CodeForm.of(KV_TYPES["fp8_e4m3"])
    assert form is not None
    geometry = CODED["fp8_e4m3"]
    constants = dict(fused._settings(geometry, form, 16, 64))
    ptx = built(fused._requantize_rows, geometry, constants, architecture=90, is_aligned=True).asm[
        "ptx"
    ]
    assert set(re.findall(r"st\.global[\w.]*", ptx)) == {"st.global.v4.b32"}
    assert "ld.global.b8" not in ptx
