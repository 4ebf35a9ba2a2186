"""What is refused at start-up, with a sentence that says what to change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import vllm
from tests.cleared import gate as cleared_gate
from tests.tags.templates import QWEN3
from tests.vllm import chat
from tests.vllm.conftest import APPROXIMATE
from tests.vllm.engine import Engine
from tests.vllm.inside import SCHEDULER, connector_config
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

import kvtrie
from kvtrie import gates
from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations.vllm import KvtrieConnector, _planner, _settings, _support, _version
from kvtrie.models.fingerprint import checkpoint_digest, directory_template_id
from kvtrie.tags import Tagger

if TYPE_CHECKING:
    from tests.vllm.kept import Kept


def refused(engines: Kept, model: Path, **options: Any) -> str:
    engines.close()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - vLLM may wrap what the connector raises
        Engine(model, **options)
    messages: list[str] = []
    error: BaseException | None = caught.value
    while error is not None:
        messages.append(str(error))
        error = error.__cause__ or error.__context__
    from vllm.distributed.kv_transfer import kv_transfer_state  # noqa: PLC0415
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory  # noqa: PLC0415

    kv_transfer_state.ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()
    return "\n".join(messages)


def test_an_unknown_key(engines: Kept, llama: Path) -> None:
    said = refused(engines, llama, connector={"gates": "unchecked"})
    assert "unknown key 'gates'; did you mean 'gate'?" in said


def test_settings_are_refused_before_a_weight_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM asks this of the class in its first process, where CUDA graphs are on.
    ask = KvtrieConnector.requires_piecewise_for_cudagraph
    assert not ask({"gate": "unchecked"})
    with pytest.raises(SettingsError, match="did you mean 'gate'"):
        ask({"gates": "unchecked"})
    with pytest.raises(gates.GateError, match=r"No such file.*kvtrie calibrate"):
        ask({"gate": str(tmp_path / "gate.json")})
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    with pytest.raises(_support.UnsupportedError, match=r"install one of 0\.32\.x and 0\.33\.x"):
        ask({"gate": "unchecked"})
    # What is the same to the probe serves exact reuse.
    assert not ask({})
    # Transfers have no gate to remove.
    with pytest.raises(_support.UnsupportedError, match=r"a kvtrie that supports this one$"):
        _support.check_version(has_modes=False)


def test_the_log_says_what_will_be_reused() -> None:
    may = kvtrie.ReusePolicy(approximate=True)
    reasoning = Tagger.from_ids(reasoning=([7], [8]), initial="assistant", boundary="never")

    def said(cleared: kvtrie.ReusePolicy, tagger: Tagger | None = None, **given: Any) -> str:
        return _planner.summary(_settings.Settings.read(given), cleared, tagger)

    assert said(kvtrie.EXACT_ONLY) == "exact reuse only (no gate); chat format: unknown"
    failed = said(kvtrie.EXACT_ONLY, gate="a.json")
    assert failed.startswith("exact reuse only (the gate does not clear the policy)")
    assert said(may, reasoning, gate="a.json") == (
        "approximate reuse (gate: a.json); chat format: from_ids; reasoning dropped at: never"
    )
    assert "for requests that opt in" in said(may, gate="unchecked", default="exact")


@pytest.mark.parametrize("program", ["serve", "module"])
def test_vllms_server_refuses_before_it_loads_weights(
    monkeypatch: pytest.MonkeyPatch, llama: Path, program: str
) -> None:
    # Eager mode, on a CPU: vLLM asks for the connector's class alone.
    config = connector_config(gates="unchecked")
    before = {
        "serve": ["/usr/bin/vllm", "serve", str(llama)],
        "module": [str(Path(vllm.__file__).parent / "entrypoints/openai/api_server.py")],
    }[program]
    given = {"model": str(llama), "skip_tokenizer_init": True, "enforce_eager": True}
    given |= {"dtype": "float32", "kv_transfer_config": KVTransferConfig(**config)}
    monkeypatch.setattr(sys, "argv", [*before, "--kv-transfer-config", json.dumps(config)])
    with pytest.raises(ValueError, match=r"unknown key 'gates'; did you mean 'gate'\?"):
        EngineArgs(**given).create_engine_config()
    # Another program's options say nothing.
    monkeypatch.setattr(sys, "argv", ["bench.py", *sys.argv[1:]])
    EngineArgs(**given).create_engine_config()


def started(monkeypatch: pytest.MonkeyPatch, config: dict[str, object], *more: str) -> None:
    """Make vLLM's configuration of tiny options, as its server does."""
    model = more[0]
    given = {"model": model, "skip_tokenizer_init": True, "enforce_eager": True}
    given |= {"dtype": "float32", "kv_transfer_config": KVTransferConfig(**config)}
    line = ["/usr/bin/vllm", "serve", *more, "--kv-transfer-config", json.dumps(config)]
    monkeypatch.setattr(sys, "argv", line)
    EngineArgs(**given).create_engine_config()


def test_what_the_model_decides_is_refused_before_it_loads_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = str(chat.model(tmp_path / "model"))
    started(monkeypatch, connector_config(template_arguments={"preserve": True}), model)
    wrong = connector_config(template_arguments={"preserves": True})
    with pytest.raises(ValueError, match="the chat template reads no 'preserves'; did you mean"):
        started(monkeypatch, wrong, model)
    with pytest.raises(ValueError, match=r"chat_format: .* has no token"):
        started(monkeypatch, connector_config(chat_format="glm"), model)
    # Another tokenizer is not looked for.
    started(monkeypatch, connector_config(chat_format="glm"), model, "--tokenizer", "other")
    (tmp_path / "keeping.jinja").write_text(QWEN3.replace("preserve", "keep"))
    served = ("--chat-template", str(tmp_path / "keeping.jinja"))
    started(monkeypatch, connector_config(template_arguments={"keep": True}), model, *served)
    path = str(tmp_path / "gate.json")
    fields: dict[str, Any] = {"checkpoint": checkpoint_digest(model), "rope": "{}"}
    fields |= {"template": directory_template_id(model), "model": "m@1", "kv_dtype": "float32"}
    cleared_gate(policy=kvtrie.ReusePolicy(approximate=True, min_run=16), **fields).write(path)
    started(monkeypatch, connector_config(gate=path), model)
    with pytest.raises(ValueError, match="the gate was measured with template"):
        started(monkeypatch, connector_config(gate=path), model, *served)
    with pytest.raises(ValueError, match="measured with KV in float32, but vLLM"):
        started(monkeypatch, connector_config(gate=path), model, "--dtype", "bfloat16")


def test_options_that_do_not_go_with_the_settings_are_refused_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, llama: Path
) -> None:
    """They were refused minutes later, when scheduler and cache manager are made."""
    on = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5601"}'
    published = ("--kv-events-config", on)
    mine, exact = connector_config, connector_config(mode="exact")
    events = mine(gate="unchecked", events={"endpoint": "tcp://*:5601"})
    snapshot = mine(mode="exact", snapshot={"endpoint": "tcp://*:5601"})
    for config, more, why in (
        (exact, ("--scheduler-cls", SCHEDULER), "no gaps to continue after: omit --scheduler-cls"),
        (events, (), "events needs vLLM's own: --kv-events-config"),
        (events, published, "'tcp://.:5601' is in --kv-events-config too"),
        (snapshot, (), "snapshot needs vLLM's events: --kv-events-config"),
        (snapshot, published, "'tcp://.:5601' is another one's too"),
    ):
        with pytest.raises(ValueError, match=why):
            started(monkeypatch, config, str(llama), *more)
    # What is spread over several options is checked when the connector is made, and a shadow
    # publishes no events of its own.
    parts = ("--kv-events-config.enable_kv_cache_events", "true")
    started(monkeypatch, snapshot, str(llama), *parts)
    started(monkeypatch, events, str(llama), *parts)
    started(monkeypatch, mine(shadow=True, events={"endpoint": "tcp://*:5601"}), str(llama))
    started(monkeypatch, mine(gate="unchecked"), str(llama), "--scheduler-cls", SCHEDULER)
    started(monkeypatch, exact, str(llama), *published)


def test_connectors_next_to_it_are_refused_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, llama: Path
) -> None:
    def several(*children: dict[str, object]) -> dict[str, object]:
        extra = {"connectors": list(children)}
        return {"kv_connector": "MultiConnector", "kv_role": "kv_both"} | {
            "kv_connector_extra_config": extra
        }

    other: dict[str, object] = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
    scheduler = (str(llama), "--scheduler-cls", SCHEDULER)
    started(monkeypatch, several(connector_config(), other), *scheduler)
    with pytest.raises(ValueError, match="did you mean 'gate'"):
        started(monkeypatch, several(connector_config(gates="unchecked"), other), *scheduler)
    with pytest.raises(ValueError, match="only KvtrieScheduler keeps blocks"):
        started(monkeypatch, several(connector_config(), other), str(llama))
    events = ("--kv-events-config", '{"enable_kv_cache_events": true}')
    moving = several(connector_config(gate="unchecked"), other)
    with pytest.raises(ValueError, match="would publish approximate blocks"):
        started(monkeypatch, moving, *scheduler, *events)


def test_a_transfer_is_refused_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "key").write_bytes(b"0" * 32)
    given = {"kvtrie_key_file": str(tmp_path / "key"), "kvtrie_modle": "m"}
    config = connector_config(**given) | {"kv_connector": "KvtrieNixlConnector"}
    config["kv_connector_module_path"] = "kvtrie.integrations.vllm.transfer"
    with pytest.raises(ValueError, match="'kvtrie_modle'; did you mean 'kvtrie_model'"):
        started(monkeypatch, config, str(llama))
    # With CUDA graphs vLLM asks the class.
    transfer = pytest.importorskip("kvtrie.integrations.vllm._transfer")
    with pytest.raises(SettingsError, match="'kvtrie_modle'; did you mean 'kvtrie_model'"):
        transfer.KvtrieNixlConnector.requires_piecewise_for_cudagraph(given)


def test_a_gate_file_that_is_not_there(engines: Kept, llama: Path, tmp_path: Path) -> None:
    assert "gate.json" in refused(engines, llama, connector={"gate": str(tmp_path / "gate.json")})


def test_a_vllm_that_was_not_tested(
    engines: Kept, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    said = refused(engines, llama, connector=APPROXIMATE)
    assert "vLLM 0.99.0 is not among the tested versions" in said
    monkeypatch.undo()
    assert vllm.__version__.startswith(_version.TESTED)


@pytest.mark.long
def test_a_vllm_without_what_is_imported_from_it() -> None:
    script = (
        "import sys, vllm\n"
        "vllm.__version__ = '0.99.0'\n"
        "sys.modules['vllm.v1.core.sched.async_scheduler'] = None\n"
        "from kvtrie.integrations.vllm import KvtrieConnector\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode
    assert "vLLM 0.99.0 is not among the tested versions" in done.stderr.splitlines()[-1]


def test_no_prefix_caching(engines: Kept, llama: Path) -> None:
    said = refused(engines, llama, connector=APPROXIMATE, enable_prefix_caching=False)
    assert "--enable-prefix-caching" in said


def test_the_scheduler_without_the_connector(engines: Kept, llama: Path) -> None:
    assert "--scheduler-cls" in refused(engines, llama, scheduler_cls=SCHEDULER)


@pytest.mark.parametrize("amx", [False, True], ids=["without-amx", "with-amx"])
def test_mla_on_a_cpu(
    engines: Kept, deepseek: Path, monkeypatch: pytest.MonkeyPatch, *, amx: bool
) -> None:
    # Where the processor has AMX, vLLM takes another backend for MLA, which takes these weights in
    # bfloat16 only; no backend computes anything here.
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    if not hasattr(torch.ops._C, "convert_weight_packed"):
        # Nor has vLLM for a processor without AVX-512, which never has AMX, what packs them.
        monkeypatch.setattr(torch.ops._C, "convert_weight_packed", torch.clone, raising=False)
    said = refused(engines, deepseek, connector=APPROXIMATE, max_model_len=1024, dtype="bfloat16")
    assert "the model has latent attention (MLA), which vLLM runs on a CPU without" in said


def test_the_seed_is_random_unless_said_and_in_no_log() -> None:
    read = _settings.Settings.read
    assert read({}).seed is read({"seed": None}).seed is None
    given = read({"seed": 987654321})
    assert given.seed == 987654321
    assert "987654321" not in repr(given)
    for wrong in (True, "0", 1.0, -1, 1 << 64):
        with pytest.raises(SettingsError, match=r"seed must be an integer from 0 to"):
            read({"seed": wrong})


def test_a_request_names_its_conversation() -> None:
    def read(given: dict[str, Any] | None, session_id: object = None) -> str | None:
        request: Any = SimpleNamespace(kv_transfer_params=given, session_id=session_id)
        return _settings.session_of(request)

    assert read(None) is read({}) is read({"kvtrie": "exact"}) is None
    assert read({"session": "chat-7"}) == read({"session": "chat-7"}, "8") == "chat-7"
    # The moving modes ignored vLLM's own.
    assert read(None, "8") == read({}, "8") == "8"
    for wrong in ("", "s" * 257, 7, ["a"], "\ud800"):
        with pytest.raises(SettingsError, match="session must be a text of 1 to 256"):
            read({"session": wrong})
        with pytest.raises(SettingsError, match="session_id must be a text of 1 to 256"):
            read(None, wrong)
