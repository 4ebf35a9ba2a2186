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
from tests.vllm.conftest import APPROXIMATE
from tests.vllm.engine import Engine
from tests.vllm.inside import SCHEDULER, connector_config
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

import kvtrie
from kvtrie import gates
from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations.vllm import KvtrieConnector, _planner, _settings, _support, _version
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
