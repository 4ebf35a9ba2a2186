"""The digest that ties a gate file to a checkpoint, whoever loads it."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from transformers import AutoTokenizer

from kvtrie import gates
from kvtrie.calibrate import shipped
from kvtrie.calibrate.measure import calibrate
from kvtrie.models.fingerprint import (
    CheckpointError,
    checkpoint_digest,
    directory_template_id,
    template_id,
    weights_digest,
)

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

RNG = np.random.default_rng(7)
WEIGHTS = {
    "embed": RNG.standard_normal((40, 8), dtype=np.float32),
    "layers.0.k": RNG.standard_normal((8, 8), dtype=np.float32),
    "norm": np.ones(3, np.float32),
    "empty": np.ones((0, 4), np.float32),
}
CONFIG = {"model_type": "llama", "rope_theta": 10000.0}


def write(root: Path, weights: dict[str, npt.NDArray[np.float32]], **config: object) -> Path:
    root.mkdir(exist_ok=True)
    save_file(weights, root / "model.safetensors")
    (root / "config.json").write_text(json.dumps(CONFIG | config))
    return root


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", WEIGHTS)


def test_digest_is_that_of_gate_files_written_before(model: Path) -> None:
    assert checkpoint_digest(model) == "a48901666cc7c0372c190bf032e6cf9f"


def test_digest_ignores_place_indent_and_how_tensors_are_cut(model: Path, tmp_path: Path) -> None:
    found = checkpoint_digest(model)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(
        json.dumps(CONFIG | {"_name_or_path": "x", "transformers_version": "1"}, indent=3)
    )
    parts = [dict(list(WEIGHTS.items())[:2]), dict(list(WEIGHTS.items())[2:])]
    names = [f"model-{number}.safetensors" for number in (1, 2)]
    for name, part in zip(names, parts, strict=True):
        save_file(part, other / name, metadata={"format": "pt"})
    index = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    (other / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    # Copies of the weights under other names are not read.
    save_file(WEIGHTS, other / "consolidated.safetensors")
    assert checkpoint_digest(other) == found
    assert len(found) == 32


@pytest.mark.parametrize("name", ["embed", "layers.0.k", "norm"])
def test_digest_differs_where_weights_were_trained_on(model: Path, name: str) -> None:
    before = checkpoint_digest(model)
    write(model, WEIGHTS | {name: WEIGHTS[name] + np.float32(0.001)})
    assert checkpoint_digest(model) != before


def test_digest_of_all_bytes_differs_where_a_few_rows_were_trained_on(model: Path) -> None:
    """As when an added token is trained; `checkpoint_digest` reads samples."""
    rows = np.zeros((512, 64), np.float32)
    write(model, WEIGHTS | {"embed": rows})
    before = checkpoint_digest(model), weights_digest(model)
    assert weights_digest(model) == before[1]
    trained = rows.copy()
    trained[5] = 1
    write(model, WEIGHTS | {"embed": trained})
    assert checkpoint_digest(model) == before[0]
    assert weights_digest(model) != before[1]
    write(model, WEIGHTS | {"embed": rows})
    assert weights_digest(model) == before[1]
    (model / "modeling_own.py").write_text("")
    assert weights_digest(model) != before[1]


def test_digest_differs_by_config_name_type_and_shape(model: Path) -> None:
    found = {checkpoint_digest(model)}
    write(model, WEIGHTS, rope_theta=5e5)
    found.add(checkpoint_digest(model))
    norm = WEIGHTS["norm"]
    for changed in ({"norm2": norm}, {"norm": norm.reshape(1, 3)}, {"norm": norm.view(np.int32)}):
        rest = {name: value for name, value in WEIGHTS.items() if name != "norm"}
        write(model, rest | changed)  # type: ignore[arg-type] # one of them is of another type
        found.add(checkpoint_digest(model))
    assert len(found) == 5


def damage(model: Path, what: str) -> None:
    file = model / "model.safetensors"
    raw = file.read_bytes()
    if what == "config":
        (model / "config.json").unlink()
    elif what == "list":
        (model / "config.json").write_text("[]")
    elif what == "nested":
        (model / "config.json").write_text("[" * 100_000)
    elif what == "weights":
        file.unlink()
    elif what == "short":
        file.write_bytes(raw[:5])
    elif what == "header":
        file.write_bytes((1 << 40).to_bytes(8, "little") + raw[8:])
    elif what == "json":
        file.write_bytes(raw[:8] + b"x" * (len(raw) - 8))
    elif what == "bounds":
        file.write_bytes(raw[:-40])
    elif what == "outside":
        text = json.dumps({"weight_map": {"a": "../model.safetensors"}})
        (model / "model.safetensors.index.json").write_text(text)
    else:
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b"}}))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("config", "No such file"),
        ("list", "not a JSON object"),
        ("nested", "not JSON"),
        ("weights", "there are no safetensors files"),
        ("short", "has 5 bytes"),
        ("header", f"header should have {1 << 40}"),
        ("json", "not JSON"),
        ("bounds", "should be at"),
        ("outside", "outside of the directory"),
        ("missing", "No such file"),
    ],
)
def test_digest_of_a_broken_directory_is_refused(model: Path, what: str, message: str) -> None:
    damage(model, what)
    with pytest.raises(CheckpointError, match=message):
        checkpoint_digest(model)


def test_a_tensor_in_two_files_is_refused(model: Path) -> None:
    shutil.copy(model / "model.safetensors", model / "a.safetensors")
    (model / "model.safetensors").rename(model / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"is in a\.safetensors as well"):
        checkpoint_digest(model)


def test_calibration_writes_the_digest_of_what_it_measured(tmp_path: Path) -> None:
    directory = shipped.model_path("gqa")
    report = calibrate(directory, policies=["rotated"], is_recall=True, most_cases=1)
    assert report.checkpoint == checkpoint_digest(directory)
    path = tmp_path / "gate.json"
    report.gate(gates.Thresholds()).write(path)
    gate = gates.read(path)
    assert gate.checkpoint == report.checkpoint
    wanted = gate.measured[0].policy
    assert not gate.policy(wanted, checkpoint=gate.checkpoint).is_cleared  # one conversation is few
    with pytest.raises(gates.GateMismatchError, match="checkpoint"):
        gate.policy(wanted, checkpoint="0" * 32)
    with pytest.raises(ValueError, match="give the running model"):
        gate.policy(wanted)


def test_a_model_without_safetensors_is_measured_and_not_identified(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(shipped.model_path("gqa"), directory)
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    report = calibrate(directory, policies=["rotated"], is_recall=True, most_cases=1)
    assert report.checkpoint is None
    gate = report.gate(gates.Thresholds())
    assert gate.checkpoint is None
    with pytest.raises(gates.GateMismatchError, match="measured with checkpoint None"):
        gate.policy(gate.measured[0].policy, checkpoint="0" * 32)


@pytest.mark.parametrize("kind", shipped.KINDS)
def test_template_of_a_directory_is_that_of_its_tokenizer(kind: str) -> None:
    directory = shipped.model_path(kind)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert directory_template_id(directory) == template_id(tokenizer.chat_template)


def test_template_in_the_tokenizers_settings_is_found(model: Path) -> None:
    text, named = "{{ messages }}", {"default": "a", "tool_use": "b"}
    (model / "chat_template.jinja").unlink(missing_ok=True)
    settings = model / "tokenizer_config.json"
    for given, wanted in (
        (text, text),
        ([{"name": name, "template": one} for name, one in named.items()], named),
        (None, None),
    ):
        settings.write_text(json.dumps({"chat_template": given}), encoding="utf-8")
        assert directory_template_id(model) == template_id(wanted)
    settings.write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="it is not JSON"):
        directory_template_id(model)
    settings.unlink()
    assert directory_template_id(model) is None
