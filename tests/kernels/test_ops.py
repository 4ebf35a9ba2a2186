"""The custom op: what it declares is what it does, and compiled code orders it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.kernels.coded import coded, forms_of
from tests.kernels.forms import FORMS, Form, Held, random_moves, spec, tensors_of

from kvtrie.kernels import ops
from kvtrie.pool.angles import AngleTables
from kvtrie.pool.moves import check_moves

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtrie.pool import KVPool

BY_NAME = {form.name: form for form in FORMS}


def arguments(form: Form, held: Held) -> tuple[Any, ...]:
    pool = form.pool(held, form.sizes(), spec("partial"))
    pieces = check_moves(random_moves(11, form.sizes().slots), form.sizes().slots)
    slots, deltas = pieces.expand(form.sizes().slots)
    cos, sin = AngleTables(pool._rotaries, deltas).of(pool.dtype)
    return (
        list(tensors_of(pool)),
        torch.from_numpy(slots),
        cos,
        sin,
        list(pool._launches[0].geometry),
    )


@pytest.mark.parametrize("name", ["nhd", "vllm-bhnc", "sglang", "mla"])
def test_opcheck(name: str) -> None:
    form = BY_NAME[name]
    held = form.build("bfloat16", form.sizes())
    torch.library.opcheck(torch.ops.kvtrie.move_rows.default, arguments(form, held))


@pytest.mark.parametrize("quant", ["fp8_e4m3", "fp8_index"])
def test_opcheck_of_codes(quant: str) -> None:
    it = coded(forms_of(quant)[0], quant, spec("partial"))
    pieces = check_moves(random_moves(11, 35), 35)
    slots, deltas = pieces.expand(35)
    cos, sin = AngleTables(it.pool._rotaries, deltas).of(it.pool.dtype)
    assert it.pool._launches[0].form is not None
    given = (
        *(list(tensors_of(it.pool)), torch.zeros(1, dtype=torch.int64)),
        *(torch.from_numpy(slots), cos, sin, list(it.pool._launches[0].geometry)),
        list(it.pool._launches[0].form.to_ints()),
    )
    torch.library.opcheck(torch.ops.kvtrie.requantize_rows.default, given)


def test_schema_of_codes_declares_what_changes() -> None:
    schema = str(torch.ops.kvtrie.requantize_rows.default._schema)
    assert re.search(r"Tensor\(a\d*!\)\[\] tensors, Tensor\(b\d*!\) saturated", schema), schema
    assert schema.count("!") == 2


# torch's own compiler of C++ code calls what torch warns of.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        "aot_eager",
        pytest.param(
            "inductor",
            marks=pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
        ),
    ],
)
@pytest.mark.parametrize("name", ["nhd", "sglang"])
def test_compiled_whole_it_is_ordered_among_its_neighbours(name: str, backend: str) -> None:
    """A reader before it sees the old rows, a reader after it the new ones."""
    form = BY_NAME[name]
    # A product needs no code from inductor, which g++ takes a minute to compile.
    weights = torch.eye(12)

    def step(tensors: list[torch.Tensor], *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        before = tensors[0].view(-1, 12) @ weights
        torch.ops.kvtrie.move_rows(tensors, *rest)
        return before, tensors[0].view(-1, 12) @ weights

    wanted, given = (form.build("float32", form.sizes(), seed=4) for _ in range(2))
    compiled: Callable[..., Any] = torch.compile(step, fullgraph=True, backend=backend)
    want = step(*arguments(form, wanted))
    got = compiled(*arguments(form, given))
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(mine, other)
    for mine, other in zip(given.bits(), wanted.bits(), strict=True):
        assert torch.equal(mine, other)
    assert not torch.equal(want[0], want[1])


def test_schema_declares_what_changes() -> None:
    schema = str(torch.ops.kvtrie.move_rows.default._schema)
    assert re.search(r"Tensor\(a\d*!\)\[\] tensors", schema), schema
    assert schema.count("!") == 1


def test_without_data_nothing_is_computed() -> None:
    form = BY_NAME["nhd"]
    tensors, *rest = arguments(form, form.build("bfloat16", form.sizes()))
    bare = [tensor.to("meta") for tensor in tensors]
    ops.move_rows(bare, *rest)
    assert [tensor.shape for tensor in bare] == [tensor.shape for tensor in tensors]
    assert all(tensor.is_meta for tensor in bare)


def test_numbers_that_are_no_geometry_are_refused() -> None:
    form = BY_NAME["nhd"]
    held = form.build("bfloat16", form.sizes())
    tensors, slots, cos, sin, geometry = arguments(form, held)
    bits = held.bits()
    with pytest.raises(ValueError, match="geometry"):
        ops.move_rows(tensors, slots, cos, sin, geometry[:-1])
    assert all(torch.equal(now, then) for now, then in zip(held.bits(), bits, strict=True))


def test_first_copy_does_not_import_the_compiler() -> None:
    """It would take seconds of the first request."""
    code = (
        "import sys, numpy as np\n"
        "from kvtrie.pool import KVLayout\n"
        "from kvtrie.pool import KVPool\n"
        "layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, dtype='float32')\n"
        "names = ('source_slot', 'dest_slot', 'num_tokens', 'delta')\n"
        "moves = np.array([(0, 16, 4, 0)], dtype=[(name, 'i8') for name in names])\n"
        "KVPool(layout, num_blocks=2).apply(moves)\n"
        "sys.exit('torch._dynamo' in sys.modules or 'triton' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_pool_calls_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(ops, "move_rows", lambda *_: called.append(1))
    form = BY_NAME["nhd"]
    pool: KVPool = form.pool(form.build("float32", form.sizes()), form.sizes(), spec("neox"))
    pool.apply(random_moves(11, form.sizes().slots))
    assert called == [1]
