"""Products of half-precision tensors in float32 differ by the order of sums alone."""

from __future__ import annotations

import pytest
import torch

from kvtrie.calibrate import shipped
from kvtrie.calibrate._engine import divergence
from kvtrie.engines import _products
from kvtrie.engines.transformers import Generator

transformers = pytest.importorskip("transformers")

HALVES = (torch.bfloat16, torch.float16)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without instructions for bfloat16 and float16."""
    monkeypatch.setattr(_products, "_ASKED", dict.fromkeys(HALVES, lambda: False))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_products, "_ASKED", dict.fromkeys(HALVES, lambda: True))


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 4, 33])
@pytest.mark.parametrize("size", [1, 576 * 7, 576 * 200])
def test_a_layer_gives_the_rounded_exact_product(
    dtype: torch.dtype, rows: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``size``: elements of the weight that are widened at a time."""
    monkeypatch.setattr(_products, "_SLICE", size)
    torch.manual_seed(rows)
    layer = torch.nn.Linear(576, 200, dtype=dtype)
    given = torch.randn(1, rows, 576, dtype=dtype)
    _products.speed_up(layer)
    with torch.inference_mode():
        found = layer(given)
        exact = torch.nn.functional.linear(
            given.double(), layer.weight.double(), layer.bias.double()
        )
    assert found.dtype == dtype
    assert found.shape == (1, rows, 200)
    # One rounding is at most half a unit in the last place; sums in another order cross a few ties.
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps * 0.51, atol=1e-5)
    assert (found != exact.to(dtype)).sum() <= 0.01 * found.numel()


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_product_is_the_rounded_exact_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(3, 20, 64, dtype=dtype), torch.randn(3, 64, 30, dtype=dtype)
    found, exact = _products.product(left, right), left.double() @ right.double()
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps * 0.51, atol=1e-5)


@pytest.mark.usefixtures("slow")
def test_a_model_keeps_its_weights_its_type_and_its_predictions() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        shipped.model_path("gqa"), dtype=torch.bfloat16
    ).eval()
    ids = torch.arange(3, 90).unsqueeze(0) % model.config.vocab_size
    with torch.inference_mode():
        before = model(ids).logits[0]
    weights = {name: (one.data_ptr(), one.dtype) for name, one in model.named_parameters()}
    _products.speed_up(model)
    with torch.inference_mode():
        after = model(ids).logits[0]
    assert {name: (one.data_ptr(), one.dtype) for name, one in model.named_parameters()} == weights
    assert after.dtype == torch.bfloat16
    widened = sum(type(one) is _products._Linear for one in model.modules())
    assert widened == sum(isinstance(one, torch.nn.Linear) for one in model.modules()) > 0
    assert float(divergence(before, after).mean()) < 1e-3


@pytest.mark.usefixtures("slow")
def test_float32_and_layers_of_their_own_kind_stay_as_they_are() -> None:
    class Quantised(torch.nn.Linear):
        pass

    layers = (torch.nn.Linear(4, 4), Quantised(4, 4, dtype=torch.bfloat16))
    model = torch.nn.Sequential(*layers)
    _products.speed_up(model)
    assert [type(one) for one in model] == [torch.nn.Linear, Quantised]


@pytest.mark.usefixtures("quick")
def test_a_processor_with_the_instructions_uses_them() -> None:
    layer = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    _products.speed_up(layer)
    assert type(layer) is torch.nn.Linear
    assert not _products.is_slow(layer.weight)


@pytest.mark.usefixtures("slow")
def test_a_generator_that_loads_a_model_speeds_it_up_and_leaves_the_callers_alone() -> None:
    path = shipped.model_path("gqa")
    ours = Generator.from_pretrained(path, num_blocks=16, dtype=torch.bfloat16)
    given = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    theirs = Generator(given, num_blocks=16)
    prompt = list(range(3, 40))
    found = [
        one.generate(prompt, max_new_tokens=4, ignore_eos=True, return_logits=True)
        for one in (ours, theirs)
    ]
    kinds = [{type(one) for one in each.model.modules()} for each in (ours, theirs)]
    assert _products._Linear in kinds[0]
    assert torch.nn.Linear not in kinds[0]
    assert _products._Linear not in kinds[1]
    first = [one.logits[0] for one in found if one.logits is not None]
    assert float(divergence(*(row.unsqueeze(0) for row in first)).mean()) < 1e-3
