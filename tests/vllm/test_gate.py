"""A gate file counts for the checkpoint that was measured, as vLLM serves it, and for no other."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from tests.cleared import gate as cleared_gate
from tests.cleared import kind
from vllm.engine.arg_utils import EngineArgs

import kvtrie
from kvtrie import gates
from kvtrie.calibrate import shipped
from kvtrie.integrations.vllm import _gate
from kvtrie.integrations.vllm._settings import Settings
from kvtrie.models.fingerprint import checkpoint_digest, directory_template_id, template_id

if TYPE_CHECKING:
    from pathlib import Path

ROTATED = kvtrie.ReusePolicy(approximate=True, min_run=16)
MODEL = shipped.model_path("gqa")


def gate(path: Path, **changes: Any) -> str:
    fields: dict[str, Any] = {"checkpoint": checkpoint_digest(MODEL), "data": "talk"} | changes
    fields = {"template": directory_template_id(MODEL), "rope": "{}"} | fields
    cleared_gate(policy=ROTATED, model="gqa@1", **fields).write(path)
    return str(path)


def served(model: Path = MODEL, **options: Any) -> Any:
    given: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "bfloat16"} | options
    return EngineArgs(model=str(model), **given).create_engine_config()


def cleared(path: str, config: Any, **policy: Any) -> kvtrie.ReusePolicy:
    settings = Settings.read({"gate": path, "policy": policy})
    return _gate.decision_of(settings, config).policy


def test_gate_of_the_served_directory_clears_what_was_measured(tmp_path: Path) -> None:
    path = gate(tmp_path / "gate.json")
    config = served()
    # The default is runs of 16, which were measured.
    assert cleared(path, config) == kvtrie.ReusePolicy(approximate=True)
    assert cleared(path, config, min_run=8) == kvtrie.EXACT_ONLY
    assert cleared(path, config, max_hops=2) == kvtrie.EXACT_ONLY
    more = {"recompute_first": 4, "forbid_kinds": ["reasoning"]}
    assert cleared(path, config, **more).forbid_kinds == ("reasoning",)
    # The path of the directory does not matter.
    copy = tmp_path / "copy"
    shutil.copytree(MODEL, copy)
    assert cleared(path, served(copy)).approximate


def test_without_a_policy_the_measured_ones_that_vllm_can_run_are_used(tmp_path: Path) -> None:
    path = tmp_path / "gate.json"
    fronts = ROTATED.replace(recompute_share=0.2)
    probe = ROTATED.replace(recompute_share=0.3, repair="probe")
    policies = {"rotated": ROTATED, "rotated+fronts20": fronts, "rotated+probe30": probe}
    gate(path, measured=tuple(gates.Measured(n, p, (kind(),)) for n, p in policies.items()))
    found = _gate.decision_of(Settings.read({"gate": str(path)}), served())
    assert found.reason == ("cleared for edits of the kinds one cut (rotated, rotated+fronts20)")
    assert found.policy == ROTATED
    single = _gate.decision_of(Settings.read({"gate": str(path), "policy": {}}), served())
    assert single.reason == "cleared for edits of the kinds one cut"


def refused(path: str, config: Any, why: str) -> None:
    with pytest.raises(gates.GateMismatchError, match=why) as caught:
        cleared(path, config)
    assert "kvtrie calibrate" in str(caught.value)


def test_gate_of_another_model_is_refused_with_the_fix(tmp_path: Path) -> None:
    path = gate(tmp_path / "gate.json")
    refused(path, served(shipped.model_path("partial")), "measured with checkpoint")
    copy = tmp_path / "copy"
    shutil.copytree(MODEL, copy)
    raw = bytearray((copy / "model.safetensors").read_bytes())
    raw[-1] ^= 1  # what a fine-tuning changes, at its least
    (copy / "model.safetensors").write_bytes(raw)
    refused(path, served(copy), "measured with checkpoint")


def test_gate_of_another_chat_template_is_refused(tmp_path: Path) -> None:
    path = gate(tmp_path / "gate.json")
    copy = tmp_path / "copy"
    shutil.copytree(MODEL, copy)
    with (copy / "chat_template.jinja").open("a") as file:
        file.write("{# another #}")
    refused(path, served(copy), "measured with template")


def test_the_served_template_is_the_one_that_counts(tmp_path: Path) -> None:
    other = (MODEL / "chat_template.jinja").read_text() + "{# served #}"
    path = gate(tmp_path / "gate.json", template=template_id(other))
    refused(path, served(), "measured with template")
    settings = Settings.read({"gate": path, "chat_template": other})
    assert _gate.decision_of(settings, served()).policy.approximate
    mine = Settings.read({"gate": gate(tmp_path / "own.json"), "chat_template": other})
    with pytest.raises(gates.GateMismatchError, match="measured with template"):
        _gate.decision_of(mine, served())


def test_gate_without_a_digest_is_refused(tmp_path: Path) -> None:
    refused(gate(tmp_path / "gate.json", checkpoint=None), served(), "with checkpoint None")


def test_other_weights_than_those_of_the_directory_are_refused(tmp_path: Path) -> None:
    path = gate(tmp_path / "gate.json")
    refused(path, served(load_format="dummy"), "load_format='dummy'")
    config = served()
    config.model_config.quantization = "fp8"
    refused(path, config, r"quantises the weights itself \(fp8\)")


def test_gate_measured_in_another_type_says_which_of_the_two_to_change(tmp_path: Path) -> None:
    path = gate(tmp_path / "gate.json")
    refused(path, served(dtype="float32"), "in bfloat16, but vLLM keeps it in float32")
    refused(path, served(dtype="float32"), "calibrate --dtype float32`, or serve with --dtype bfl")
    for name in ("fp8_e4m3", "fp8_e4m3@3086fc08d045b783"):
        coded = gate(tmp_path / "coded.json", kv_dtype=name)
        refused(coded, served(), f"in {name}, but vLLM keeps it in bfloat16: .* without --kv-dtype")
    refused(coded, served(), "calibrate --dtype bfloat16` without --kv-dtype$")


def test_other_rope_settings_are_refused(tmp_path: Path) -> None:
    path = gate(tmp_path / "gate.json")
    harmless = {"max_position_embeddings": 2048}
    assert cleared(path, served(hf_overrides=harmless)).approximate
    config = json.loads((MODEL / "config.json").read_text())
    rope = dict(config["rope_parameters"]) | {"rope_theta": 12345.0}
    refused(path, served(hf_overrides={"rope_parameters": rope}), "overrides of its config")


def test_gate_that_cannot_be_read_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(gates.GateError, match=r"No such file.*kvtrie calibrate"):
        cleared(str(tmp_path / "none.json"), served())
    (tmp_path / "gate.json").write_text("{}")
    with pytest.raises(gates.GateError, match="'format' is missing"):
        cleared(str(tmp_path / "gate.json"), served())


def test_a_model_that_is_not_there_cannot_be_identified(tmp_path: Path) -> None:
    config = served()
    config.model_config.model = "nobody/nothing"
    refused(gate(tmp_path / "gate.json"), config, "not in the hub's cache")


def test_gate_does_not_cover_adapters(tmp_path: Path) -> None:
    settings = Settings.read({"gate": gate(tmp_path / "gate.json")})
    assert _gate.covers(settings, None)
    assert not _gate.covers(settings, "lora-a")
    assert _gate.covers(Settings.read({"gate": "unchecked"}), "lora-a")
    assert _gate.covers(Settings.read({}), "lora-a")
