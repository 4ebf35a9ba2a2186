"""Gates of quantised KV: what is compared, and for which engine the file holds."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import kvtrie
from kvtrie import LayoutError, gates
from kvtrie.calibrate import measure, recall, shipped
from kvtrie.calibrate._engine import MOST_TOKENS, Model, divergence
from kvtrie.cli.app import app
from kvtrie.engines._coding import CODED
from kvtrie.engines.transformers import Generator

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel
    from typer.testing import Result

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    loaded: Any = AutoModelForCausalLM.from_pretrained(shipped.model_path("gqa"))
    found: PreTrainedModel = loaded.eval()
    return found


def prompt_of(model: PreTrainedModel, count: int = 60) -> list[int]:
    size = int(model.config.vocab_size)
    rng = torch.Generator().manual_seed(1)
    return torch.randint(3, size, (count,), generator=rng).tolist()


@pytest.mark.parametrize("kv_dtype", CODED)
def test_the_reference_is_the_same_engine_without_reuse(
    kv_dtype: str, model: PreTrainedModel
) -> None:
    """Full recomputation attends to codes, as the generator does; floats give something else."""
    coded, floats = Model(model, 16, kv_dtype), Model(model, 16)
    prompt = prompt_of(model)
    generator = Generator(model, num_blocks=8, kv_dtype=kv_dtype)
    options: Any = {"max_new_tokens": MOST_TOKENS, "ignore_eos": True, "return_logits": True}
    done = generator.generate(prompt, **options)
    greedy = coded.greedy(prompt, MOST_TOKENS, frozenset())
    assert greedy.reply == done.tokens
    torch.testing.assert_close(greedy.rows.float(), done.logits, atol=1e-4, rtol=0)
    whole = coded.whole(prompt, done.tokens)
    apart = divergence(whole, floats.whole(prompt, done.tokens)).max()
    # One pass and one per token: rounding may change a code, which a quantised cache shows.
    assert float(divergence(whole, greedy.rows).max()) < apart / 10
    eos = frozenset(done.tokens[2:3])
    assert coded.greedy(prompt, MOST_TOKENS, eos).reply == done.tokens[:3]


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8_per_token_head"])
def test_a_measured_gate_holds_for_its_type_alone(
    kv_dtype: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    report = measure.calibrate(
        shipped.model_path("gqa"),
        policies=["rotated"],
        is_recall=True,
        most_cases=4,
        seed=1,
        kv_dtype=kv_dtype,
    )
    assert report.kv_dtype == kv_dtype
    (measured,) = report.measured
    (kind,) = [one for one in measured.kinds if one.name == "one cut"]
    assert kind.figures.moved > 0
    # Exact reuse is that of the same type: rounding alone.
    assert kind.floor.kl_mean < 1e-4
    controls = {one.name: one.figures for one in kind.controls}
    assert controls["unrotated"].kl_mean > 2 * kind.figures.kl_mean
    report.gate(gates.Thresholds()).write(tmp_path / "gate.json")
    gate = gates.read(tmp_path / "gate.json")
    policy = kvtrie.ReusePolicy(min_run=16)
    its: Any = {"num_blocks": 8, "policy": policy, "gate": gate}
    Generator(model, kv_dtype=kv_dtype, **its)
    other = next(one for one in CODED if one != kv_dtype)
    for wrong in (None, other):
        with pytest.raises(gates.GateMismatchError, match=f"with kv_dtype {kv_dtype!r}, not"):
            Generator(model, kv_dtype=wrong, **its)


def test_a_measured_gate_of_floats_is_refused_for_codes(model: PreTrainedModel) -> None:
    report = measure.calibrate(
        shipped.model_path("gqa"), policies=["rotated"], is_recall=True, most_cases=1
    )
    gate = report.gate(gates.Thresholds())
    its: Any = {"num_blocks": 8, "gate": gate}
    Generator(model, **its)
    with pytest.raises(gates.GateMismatchError, match="with kv_dtype 'float32', not 'int8@"):
        Generator(model, kv_dtype="int8", **its)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
def test_a_measured_gate_holds_for_its_scales_alone(kv_dtype: str, tmp_path: Path) -> None:
    """Of the same weights: fp8 has the scales of the checkpoint, int8 those that it finds."""
    directory = tmp_path / "gqa"
    shutil.copytree(shipped.model_path("gqa"), directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)

    def loaded(scale: float) -> PreTrainedModel:
        layers = len({name.split(".")[2] for name in tensors if ".layers." in name})
        own = [f"model.layers.{layer}.self_attn" for layer in range(layers)]
        scales = {f"{one}.{side}_scale": torch.tensor([scale]) for one in own for side in "kv"}
        save_file({**tensors, **scales}, file, metadata={"format": "pt"})
        found: Any = AutoModelForCausalLM.from_pretrained(directory)
        model: PreTrainedModel = found.eval()
        return model

    its: Any = {"num_blocks": 8, "policy": kvtrie.ReusePolicy(min_run=16), "kv_dtype": kv_dtype}
    model = loaded(0.05)
    report = measure.calibrate(
        directory, policies=["rotated"], is_recall=True, most_cases=1, kv_dtype=kv_dtype
    )
    report.gate(gates.Thresholds()).write(tmp_path / "gate.json")
    gate = gates.read(tmp_path / "gate.json")
    generator = Generator(model, gate=gate, **its)
    assert gate.kv_dtype == generator.namespace().kv_dtype
    assert gate.kv_dtype.startswith(f"{kv_dtype}@")
    if kv_dtype == "int8":
        Generator(loaded(0.07), gate=gate, **its)
    else:
        with pytest.raises(gates.GateMismatchError, match=f"with kv_dtype '{kv_dtype}@.*', not"):
            Generator(loaded(0.07), gate=gate, **its)


def test_policies_that_need_records_are_refused() -> None:
    with pytest.raises(LayoutError, match="needs KV in floats, not int8: measure fronts"):
        measure.calibrate(
            shipped.model_path("gqa"),
            policies=["rotated+probe30"],
            is_recall=True,
            most_cases=1,
            kv_dtype="int8",
        )


def run(*args: Any) -> Result:
    return CliRunner().invoke(app, ["calibrate", *map(str, args)])


def test_command_writes_a_gate_of_the_type(tmp_path: Path) -> None:
    chat, out = tmp_path / "chat.jsonl", tmp_path / "gate.json"
    chat.write_text(json.dumps({"messages": recall.conversation(5, 4)}) + "\n", encoding="utf-8")
    given = ("gqa", "--conversations", chat, "--policies", "rotated", "--out", out)
    result = run(*given, "--kv-dtype", "fp8_e4m3")
    assert result.exit_code == 0, result.stderr
    assert "KV in fp8_e4m3" in result.stdout
    assert gates.read(out).kv_dtype == "fp8_e4m3"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("int4", "kv_dtype 'int4' is not supported: what rounding 4-bit codes again costs"),
        ("fp8_ds_mla", "kv_dtype 'fp8_ds_mla' is not supported: it has rows of another attention"),
        ("bfloat16", "kv_dtype 'bfloat16' is not supported: it is unknown; known are fp8_e4m3"),
    ],
)
def test_command_type_that_is_none_is_named(name: str, said: str) -> None:
    result = run("gqa", "--kv-dtype", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr.splitlines()[-1]


def test_a_partial_file_of_another_type_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "gate.json"
    given = ("gqa", "--policies", "rotated", "--minutes", "0.05", "--out", out)
    assert run(*given, "--kv-dtype", "int8").exit_code == 0
    result = run(*given)
    assert result.exit_code == 2
    assert "kv_dtype" in result.stderr.splitlines()[-1]
