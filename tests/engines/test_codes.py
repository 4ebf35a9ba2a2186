"""A generator that keeps K and V as codes: what attention reads, what moves, what is refused.

The oracle is the bare model with a cache that rounds K and V when they are stored, by torch's own
casts: kvtrie's codes are not used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.cleared import gate
from tests.engines.architectures import CONFIGS
from tests.kernels.coded import expected_of
from transformers import DynamicCache

import kvtrie
from kvtrie import LayoutError, gates
from kvtrie.engines._coding import CODED
from kvtrie.engines.transformers import Generator
from kvtrie.models.kv_scales import checkpoint_scales

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    Make = Callable[..., Generator]
    Ids = Callable[..., np.ndarray]
    Check = Callable[[Generator], None]
    Models = Callable[[str], PreTrainedModel]

# In float64: in float32, rounding of a pass of another shape may change a code, and that a logit.
TOLERANCE = 1e-6
APPROXIMATE = kvtrie.ReusePolicy(min_run=16, scope="namespace")
types = pytest.mark.parametrize("kv_dtype", CODED)


@pytest.fixture(scope="module")
def precise() -> Models:
    """Tiny models in float64."""
    built: dict[str, PreTrainedModel] = {}

    def build(architecture: str) -> PreTrainedModel:
        if architecture not in built:
            torch.manual_seed(0)
            built[architecture] = transformers.AutoModelForCausalLM.from_config(
                CONFIGS[architecture](), dtype=torch.float64
            ).eval()
        return built[architecture]

    return build


class _Rounded(DynamicCache):
    """Rounds what it stores to a type and back."""

    def __init__(self, kv_dtype: str, scales: list[tuple[float, float]]) -> None:
        super().__init__()
        self._kv_dtype = kv_dtype
        self._scales = scales

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self._scales[layer_idx]
        k_states, v_states = self._rounded(key_states, k), self._rounded(value_states, v)
        return super().update(k_states, v_states, layer_idx, *args, **kwargs)

    def _rounded(self, states: torch.Tensor, scale: float) -> torch.Tensor:
        rows = states.float()
        numbers, its = rows / scale, torch.tensor(scale)
        if self._kv_dtype.endswith("per_token_head"):
            most = 127.0 if self._kv_dtype.startswith("int8") else 448.0
            its = rows.abs().amax(-1, keepdim=True) / torch.tensor(most)
            numbers = rows * its.reciprocal()
        if self._kv_dtype.startswith("int8"):
            rounded = numbers.round().clamp(-127, 127)
        else:
            kind = torch.float8_e5m2 if self._kv_dtype == "fp8_e5m2" else torch.float8_e4m3fn
            rounded = numbers.to(kind).float()
        found: torch.Tensor = (rounded * its).to(states.dtype)
        return found


def scales_of(generator: Generator) -> list[tuple[float, float]]:
    coding = generator._scheduler._runner._coding
    assert coding is not None
    return list(coding.scales)


def logits(
    model: PreTrainedModel, generator: Generator, prompt: Sequence[int], answer: Sequence[int]
) -> torch.Tensor:
    """The rows of logits of an answer, by one pass over prompt and answer."""
    cache = _Rounded(generator.pool.layout.kv_dtype, scales_of(generator))
    with torch.inference_mode():
        out = model(
            input_ids=torch.tensor([[*prompt, *answer[:-1]]]), past_key_values=cache, use_cache=True
        )
    rows: torch.Tensor = out.logits[0, len(prompt) - 1 :].float()
    return rows


@types
@pytest.mark.parametrize("architecture", ["llama-gqa", "qwen3", "gpt-neox"])
def test_turns_that_append_are_as_without_reuse(
    kv_dtype: str, architecture: str, ids: Ids, precise: Models, check_drained: Check
) -> None:
    """Next to the same engine without reuse, and to the bare model with a cache that rounds."""
    model = precise(architecture)
    known: Any = {"num_blocks": 64, "block_size": 4, "kv_dtype": kv_dtype}
    generator = Generator(model, prefill_chunk=7, **known)
    plain = Generator(model, **known)
    prompt: list[int] = []
    for turn in range(3):
        prompt += ids(15 + turn, seed=turn).tolist()
        options: Any = {"max_new_tokens": 6, "ignore_eos": True, "return_logits": True}
        done = generator.generate(prompt, **options)
        plain.forget()
        alone = plain.generate(prompt, **options)
        assert (done.usage.exact > 0, alone.usage.exact) == (turn > 0, 0)
        assert done.tokens == alone.tokens
        torch.testing.assert_close(done.logits, alone.logits, atol=TOLERANCE, rtol=0)
        want = logits(model, generator, prompt, done.tokens)
        torch.testing.assert_close(done.logits, want, atol=TOLERANCE, rtol=0)
        # Floats would have shown another answer: the type is what is measured.
        assert float((want - model_logits(model, prompt, done.tokens)).abs().max()) > 1e-3
        prompt += done.tokens
    check_drained(generator)


def model_logits(
    model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]
) -> torch.Tensor:
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([[*prompt, *answer[:-1]]]), use_cache=False)
    rows: torch.Tensor = out.logits[0, len(prompt) - 1 :].float()
    return rows


@pytest.mark.parametrize("architecture", ["gemma3", "deepseek-v3"])
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
def test_windows_and_latent_rows_are_coded(
    architecture: str, kv_dtype: str, ids: Ids, precise: Models, check_drained: Check
) -> None:
    generator, plain = (
        Generator(precise(architecture), num_blocks=64, block_size=4, kv_dtype=kv_dtype)
        for _ in range(2)
    )
    first = ids(40).tolist()
    generator.generate(first, max_new_tokens=4, ignore_eos=True)
    options: Any = {"max_new_tokens": 4, "ignore_eos": True, "return_logits": True}
    second = [*first, *ids(9, seed=1).tolist()]
    done, alone = (each.generate(second, **options) for each in (generator, plain))
    assert (done.usage.exact > 0, alone.usage.exact) == (True, 0)
    torch.testing.assert_close(done.logits, alone.logits, atol=TOLERANCE, rtol=0)
    check_drained(generator)


@types
def test_moved_rows_are_what_the_pool_gives(
    kv_dtype: str, make: Make, ids: Ids, monkeypatch: pytest.MonkeyPatch, check_drained: Check
) -> None:
    """Rotated once and rounded to codes again; V is copied; and attention reads that."""
    generator = make(kv_dtype=kv_dtype, policy=APPROXIMATE, gate="unchecked")
    pool, seen = generator.pool, []
    apply = pool.apply

    def spy(moves: Any, *, hops: int | None, items: Any) -> Any:
        want = [expected_of(pool, layer, moves) for layer in range(pool.layout.num_layers)]
        event = apply(moves, hops=hops, items=items)
        for layer, (k, v, _) in enumerate(want):
            got_v = pool.v[layer]
            np.testing.assert_array_equal(pool.k[layer].flatten(0, 1).numpy(), k)
            assert v is not None
            assert got_v is not None
            np.testing.assert_array_equal(got_v.flatten(0, 1).numpy(), v)
        seen.append((hops, event.num_requantized, int(moves["num_tokens"].sum())))
        return event

    monkeypatch.setattr(pool, "apply", spy)
    text = ids(100).tolist()
    generator.generate(text, max_new_tokens=3, ignore_eos=True)
    done = generator.generate(text[:20] + text[45:], max_new_tokens=3, ignore_eos=True)
    assert done.usage.moved > 0
    assert [hops for hops, _, _ in seen] == [0, 1]
    _, requantized, tokens = seen[-1]
    # Two layers of two heads of 16 channels, all of which rotate.
    assert (tokens, requantized) == (done.usage.moved, done.usage.moved * 2 * 2 * 16)
    check_drained(generator)


def test_a_third_prompt_computes_what_would_be_a_second_hop(
    make: Make, ids: Ids, check_drained: Check
) -> None:
    generator = make(kv_dtype="int8", policy=APPROXIMATE, gate="unchecked", num_blocks=40)
    text = ids(100).tolist()
    for cut in (20, 36, 52):
        done = generator.generate(text[:12] + text[cut:], max_new_tokens=2, ignore_eos=True)
        assert done.finish_reason == "length"
    check_drained(generator)


def test_more_hops_than_one_are_refused(make: Make, ids: Ids) -> None:
    policy = APPROXIMATE.replace(max_hops=2)
    said = "max_hops=2, and K of fp8_e4m3 may be rounded to codes again only once"
    with pytest.raises(ValueError, match=said):
        make(kv_dtype="fp8_e4m3", policy=policy, gate="unchecked")
    generator = make(kv_dtype="fp8_e4m3", gate="unchecked")
    with pytest.raises(ValueError, match=said):
        generator.generate(ids(20).tolist(), policy=policy)
    make(policy=policy, gate="unchecked")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_dtype": "fp8_ds_mla"}, "'fp8_ds_mla' is not supported: it has rows of another atte"),
        ({"kv_dtype": "fp8_index"}, "'fp8_index' is not supported: it has rows of another attent"),
        ({"kv_dtype": "int4"}, "'int4' is not supported: .*4-bit codes"),
        ({"kv_dtype": "fp8"}, "'fp8' is not supported: the name has several formats"),
        ({"kv_dtype": "bfloat16"}, "'bfloat16' is not supported: it is unknown; known are"),
        ({"kv_dtype": "int8", "records": "model"}, "records='model' needs KV in floats"),
        ({"kv_dtype": "int8", "num_window_blocks": 8}, "num_window_blocks=8 needs KV in floats"),
    ],
)
def test_what_cannot_be_coded_is_refused(options: dict[str, Any], said: str, make: Make) -> None:
    with pytest.raises(LayoutError, match=said):
        make(**options)


@types
def test_gates_are_of_one_type(kv_dtype: str, make: Make) -> None:
    its = make(kv_dtype=kv_dtype).namespace()
    assert its.kv_dtype == kv_dtype
    own = gate(model=its.model, kv_dtype=kv_dtype, rope=its.rope)
    make(kv_dtype=kv_dtype, gate=own)
    for other in (None, *(set(CODED) - {kv_dtype})):
        said = f"kv_dtype {kv_dtype!r}, not {other or 'float32'!r}"
        with pytest.raises(gates.GateMismatchError, match=said):
            make(kv_dtype=other, gate=own)
    with pytest.raises(gates.GateMismatchError, match=f"kv_dtype 'float32', not {kv_dtype!r}"):
        make(kv_dtype=kv_dtype, gate=replace(own, kv_dtype="float32"))


@types
def test_one_pass_may_compute_several_ranges(kv_dtype: str, make: Make, ids: Ids) -> None:
    """What the model can is found in floats: codes round apart what differs by rounding."""
    generator = make(kv_dtype=kv_dtype)
    assert generator._scheduler._runner.is_sparse
    generator.generate(ids(20).tolist(), max_new_tokens=2)


# --- scales ---------------------------------------------------------------------------------------


def saved(directory: Path, scales: dict[str, torch.Tensor]) -> Path:
    """A tiny model whose checkpoint has these scales."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CONFIGS["llama-gqa"]()).save_pretrained(directory)
    file = directory / "model.safetensors"
    save_file({**load_file(file), **scales}, file, metadata={"format": "pt"})
    return directory


def scalars(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([0.25 * (at + 1)]) for at, name in enumerate(names)}


OWN = [f"model.layers.{layer}.self_attn.{side}_scale" for layer in (0, 1) for side in "kv"]


@pytest.mark.parametrize(
    ("names", "want"),
    [
        ([], None),
        (OWN, ((0.25, 0.5), (0.75, 1.0))),
        ([f"model.layers.{n}.self_attn.{s}_proj.{s}_scale" for n in (0, 1) for s in "kv"], ...),
        ([f"model.layers.{n}.self_attn.{s}_proj.output_scale" for n in (0, 1) for s in "kv"], ...),
        ([f"model.layers.{n}.self_attn.attn.{s}_scale" for n in (0, 1) for s in "kv"], ...),
        ([f"model.layers.{n}.self_attn.kv_scale" for n in (0, 1)], ((0.25, 0.25), (0.5, 0.5))),
        (["model.layers.0.self_attn.q_proj.weight_scale"], None),
    ],
)
def test_scales_of_a_checkpoint(names: list[str], want: Any, tmp_path: Path) -> None:
    expected = ((0.25, 0.5), (0.75, 1.0)) if want is ... else want
    assert checkpoint_scales(saved(tmp_path, scalars(*names)), 2) == expected


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        (scalars(*OWN[:3]), "no scale of V in layer 1"),
        (scalars(*OWN, OWN[0].replace(".0.", ".7.")), "a scale of K in layer 7.* has 2 layers"),
        (scalars(*OWN) | {OWN[1]: torch.ones(2)}, r"v_scale of shape \(2,\) must be one positive"),
        (scalars(*OWN) | {OWN[1]: torch.zeros(1)}, r"v_scale of shape \(1,\) must be one positive"),
    ],
)
def test_scales_that_are_not_of_layers_are_refused(
    scales: dict[str, torch.Tensor], said: str, tmp_path: Path
) -> None:
    with pytest.raises(LayoutError, match=said):
        checkpoint_scales(saved(tmp_path, scales), 2)


def test_weights_of_another_format_have_no_scales(tmp_path: Path) -> None:
    assert checkpoint_scales(tmp_path, 2) is None


@pytest.mark.parametrize(
    ("kv_dtype", "is_read"), [("fp8_e4m3", True), ("fp8_e5m2", True), ("int8", False)]
)
def test_an_engine_codes_by_the_scales_of_its_checkpoint(
    kv_dtype: str, is_read: bool, ids: Ids, tmp_path: Path
) -> None:
    directory = saved(tmp_path, scalars(*OWN))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    generator = Generator(model, num_blocks=16, block_size=4, kv_dtype=kv_dtype)
    assert (scales_of(generator) == [(0.25, 0.5), (0.75, 1.0)]) == is_read
    prompt = ids(20).tolist()
    done = generator.generate(prompt, max_new_tokens=3, ignore_eos=True, return_logits=True)
    want = logits(model, generator, prompt, done.tokens)
    torch.testing.assert_close(done.logits, want, atol=TOLERANCE, rtol=0)


def test_scales_of_int8_are_those_of_one_pass(make: Make, models: Models) -> None:
    model = models("llama-gqa")
    one, two = (scales_of(make(kv_dtype="int8")) for _ in range(2))
    assert one == two
    rng = torch.Generator().manual_seed(0)
    ids_ = torch.randint(300, (1, 256), generator=rng)
    cache = DynamicCache()
    with torch.inference_mode():
        model(input_ids=ids_, past_key_values=cache, use_cache=True)
    layers: list[Any] = cache.layers
    want = [tuple(float(x.abs().max()) / 127 for x in (at.keys, at.values)) for at in layers]
    np.testing.assert_allclose(one, want)
    assert scales_of(make(kv_dtype="fp8_e4m3")) == [(1.0, 1.0)] * 2
