"""A generator that keeps K and V as codes: what attention reads, what moves, what is refused.

The oracle is the bare model with a cache that rounds K and V when they are stored, by torch's own
casts: kvtrie's codes are not used.
"""

from __future__ import annotations

import json
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
from kvtrie.models.kv_scales import checkpoint_scales, scaled_name

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
    names = {one: make(kv_dtype=one).namespace().kv_dtype for one in (None, *CODED)}
    assert len(set(names.values())) == len(names)
    its = make(kv_dtype=kv_dtype).namespace()
    assert its.kv_dtype.partition("@")[0] == kv_dtype
    # Scales of int8 are measured; others here are 1, or of rows.
    assert (its.kv_dtype != kv_dtype) == (kv_dtype == "int8")
    own = gate(model=its.model, kv_dtype=its.kv_dtype, rope=its.rope)
    make(kv_dtype=kv_dtype, gate=own)
    for other in (None, *(set(CODED) - {kv_dtype})):
        said = f"kv_dtype {its.kv_dtype!r}, not {names[other]!r}"
        with pytest.raises(gates.GateMismatchError, match=said):
            make(kv_dtype=other, gate=own)
    with pytest.raises(gates.GateMismatchError, match=f"kv_dtype 'float32', not {its.kv_dtype!r}"):
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


BOTH = "model.layers.0.self_attn.kv_scale"
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
        (
            scalars(*OWN, BOTH),
            "kv_scale are both scales of K in layer 0|kv_scale and .* of K in la",
        ),
        (
            scalars(OWN[0], BOTH),
            "kv_scale are both scales of K in layer 0|kv_scale and .* of K in la",
        ),
    ],
)
def test_scales_that_are_not_of_layers_are_refused(
    scales: dict[str, torch.Tensor], said: str, tmp_path: Path
) -> None:
    with pytest.raises(LayoutError, match=said):
        checkpoint_scales(saved(tmp_path, scales), 2)


def test_weights_of_another_format_have_no_scales(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert checkpoint_scales(tmp_path, 2) is None


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "index.json: cannot identify the checkpoint: it is not JSON"),
        ("{}", "it has no weight_map"),
        (json.dumps({"weight_map": {"a": "gone.safetensors"}}), "gone.safetensors"),
        (json.dumps({"weight_map": {"a": "cut.safetensors"}}), "[Hh]eader"),
    ],
)
@pytest.mark.parametrize("has_weights", [False, True])
def test_a_broken_index_is_not_another_format(
    index: str, said: str, has_weights: bool, tmp_path: Path
) -> None:
    if has_weights:
        saved(tmp_path, scalars(*OWN))
    if "cut" in index:
        (tmp_path / "cut.safetensors").write_bytes(b"\x01")
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    with pytest.raises(LayoutError, match=f"cannot read the scales of the checkpoint: .*{said}"):
        checkpoint_scales(tmp_path, 2)


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


def loaded(path: Path | str) -> PreTrainedModel:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path)
    found: PreTrainedModel = model.eval()
    return found


def test_scales_are_part_of_the_name_of_kv(tmp_path: Path) -> None:
    """The same weights under other scales: codes mean other numbers, and nothing is shared."""
    quarter = {name: torch.tensor([0.25]) for name in OWN}
    models = [loaded(saved(tmp_path / at / "m", its)) for at, its in (("a", {}), ("b", quarter))]
    plain, scaled = (Generator(one, num_blocks=8, kv_dtype="fp8_e4m3") for one in models)
    assert plain.namespace().model == scaled.namespace().model
    assert plain.namespace().kv_dtype == "fp8_e4m3"
    assert scaled.namespace().kv_dtype == scaled_name("fp8_e4m3", [(0.25, 0.25)] * 2)
    assert scaled.namespace("b").kv_dtype == scaled.namespace().kv_dtype
    for own, other in ((plain, models[1]), (scaled, models[0])):
        its = own.namespace()
        ours = gate(model=its.model, kv_dtype=its.kv_dtype, rope=its.rope)
        with pytest.raises(gates.GateMismatchError, match=f"kv_dtype {its.kv_dtype!r}, not"):
            Generator(other, num_blocks=8, kv_dtype="fp8_e4m3", gate=ours)
    # Rows that have their own scales do not use the checkpoint's.
    rows = Generator(models[1], num_blocks=8, kv_dtype="fp8_per_token_head")
    assert rows.namespace().kv_dtype == "fp8_per_token_head"


def test_a_name_depends_on_each_scale() -> None:
    scales = [(0.5, 0.25), (1.0, 2.0)]
    assert scaled_name("int8", [(1.0, 1.0)] * 2) == "int8"
    others = [[(0.25, 0.5), scales[1]], scales[::-1], scales[:1], [scales[0], (1.0, 1.0)]]
    names = {scaled_name("int8", each) for each in (scales, *others)}
    assert len(names) == 5
    assert scaled_name("int8", scales) == scaled_name("int8", list(scales)) in names
    assert scaled_name("fp8_e5m2", scales) not in names


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_scales_of_a_directory_that_is_gone_are_not_1(
    kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path means another directory after a change of the working directory."""
    saved(tmp_path / "a", scalars(*OWN))
    monkeypatch.chdir(tmp_path)
    model = loaded("a")
    here = Generator(model, num_blocks=8, kv_dtype=kv_dtype)
    assert scales_of(here) == [(0.25, 0.5), (0.75, 1.0)]
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    said = "the scales of fp8 are in the model's checkpoint, and 'a' is not a directory, and not in"
    with pytest.raises(LayoutError, match=said):
        Generator(model, num_blocks=8, kv_dtype=kv_dtype)
    # These need no checkpoint.
    for other in (None, "int8", "fp8_per_token_head"):
        Generator(model, num_blocks=8, kv_dtype=other)


def test_scales_of_a_name_on_the_hub_are_of_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the revision that was loaded."""
    hub = tmp_path / "models--kvtrie--tiny"
    for revision, factor in (("a" * 40, 1.0), ("b" * 40, 2.0)):
        scales = {name: factor * scale for name, scale in scalars(*OWN).items()}
        saved(hub / "snapshots" / revision, scales)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("b" * 40, encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = loaded(hub / "snapshots" / ("a" * 40))
    model.config._name_or_path = model.name_or_path = "kvtrie/tiny"
    wanted: list[tuple[Any, tuple[float, float]]] = [("a" * 40, (0.25, 0.5)), (None, (0.5, 1.0))]
    for revision, want in wanted:
        model.config._commit_hash = revision
        assert scales_of(Generator(model, num_blocks=8, kv_dtype="fp8_e4m3"))[0] == want


# --- saturation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_dtype", "want"),
    [("fp8_e4m3", 1), ("fp8_e5m2", 1), ("int8", 4), ("fp8_per_token_head", 0)],
)
def test_what_a_pass_stores_as_another_number_is_counted(
    kv_dtype: str, want: int, make: Make
) -> None:
    generator = make(kv_dtype=kv_dtype)
    coding = generator._scheduler._runner._coding
    assert coding is not None
    k, _ = coding.scales[0]
    rows = torch.tensor([[1e6 * k, k, torch.nan, torch.inf, -torch.inf, 0.0]])
    coding.encode(rows, 0, 0)
    assert generator.num_saturated == want
    coding.encode(rows, 0, 0)
    assert generator.num_saturated == 2 * want


def test_a_request_that_saturates_is_counted(make: Make, ids: Ids, tmp_path: Path) -> None:
    tiny = {name: torch.tensor([1e-4]) for name in OWN}
    generator = Generator(loaded(saved(tmp_path, tiny)), num_blocks=8, kv_dtype="fp8_e4m3")
    assert generator.num_saturated == 0
    generator.generate(ids(20).tolist(), max_new_tokens=2, ignore_eos=True)
    # Two layers of K and V, 21 tokens, two heads of 16 channels.
    assert 0 < generator.num_saturated <= 2 * 2 * 21 * 2 * 16
    for plain in (None, "fp8_e4m3"):
        other = make(kv_dtype=plain)
        other.generate(ids(20).tolist(), max_new_tokens=2, ignore_eos=True)
        assert other.num_saturated == 0
