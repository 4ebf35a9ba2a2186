"""What may be moved: by the settings, the gate file and how the server keeps its KV."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from tests.cleared import gate, kind
from tests.sglang.processes import forked
from tests.sglang.test_parts import context
from tests.vllm import models
from transformers import AutoConfig

import kvtrie
from kvtrie import gates
from kvtrie.integrations.sglang import _gaps, _settings, _support, _version
from kvtrie.models.fingerprint import checkpoint_digest

if TYPE_CHECKING:
    from pathlib import Path

LAYERS, HEADS, DIM = 3, 2, 32
ROTATED = kvtrie.ReusePolicy(approximate=True, min_run=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(models.llama(tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if SGLang's plug-ins were loaded, with hooks."""
    monkeypatch.setattr(_gaps, "is_installed", lambda _: True)


def served(
    model: str,
    *,
    backend: str = "triton",
    dtype: Any = torch.float32,
    generates: bool = True,
    **given: Any,
) -> Any:
    """What SGLang gives a factory for a model, with a pool of its own kind."""
    made = context(model_path=model, **given)
    pool = MHATokenToKVPool(80, 4, dtype, HEADS, DIM, LAYERS, "cpu", enable_memory_saver=False)
    made.params.token_to_kv_pool_allocator.get_kvcache = lambda: pool
    config = AutoConfig.from_pretrained(model)
    made.model_config = SimpleNamespace(hf_text_config=config, is_generation=generates)
    made.tp_worker = SimpleNamespace(
        model_runner=SimpleNamespace(prefill_attention_backend_str=backend)
    )
    return made


def file(path: Path, model: str, **changes: Any) -> str:
    """A gate file that clears every plan of the model."""
    fields = {"checkpoint": checkpoint_digest(model), "kv_dtype": "float32", "data": "talk"}
    fronts = ROTATED.replace(recompute_share=0.2)
    policies = {"rotated": ROTATED, "rotated+fronts20": fronts}
    measured = tuple(gates.Measured(n, p, (kind(),)) for n, p in policies.items())
    gate(measured=measured, **(fields | changes)).write(path)
    return str(path)


def moving(
    settings: dict[str, Any] | str, context: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, str]:
    """What the cache moves by, and what the log says of it."""
    text = settings if isinstance(settings, str) else json.dumps(settings)
    monkeypatch.setenv(_settings.VARIABLE, text)
    return _support._moving_of(context, None)


def test_nothing_is_moved_without_a_gate(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert moving("", served(model), monkeypatch) == (None, "exact reuse only (no gate)")


def test_the_gate_of_the_served_model_says_what_may_be_moved(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file(tmp_path / "gate.json", model)
    found, why = moving({"gate": path}, served(model), monkeypatch)
    assert why == f"approximate reuse up to the first gap (gate: {path})"
    assert (
        found.decision.reason
        == "cleared for edits of the kinds one cut (rotated, rotated+fronts20)"
    )
    given = {"gate": path, "gaps": True, "default": "exact", "policy": {"min_run": 32}}
    found, why = moving(given, served(model), monkeypatch)
    assert why == f"approximate reuse after gaps too (gate: {path}), for requests that opt in"
    assert found.decision.policy == ROTATED.replace(min_run=32)
    # What the gate does not clear is not moved, and the server starts.
    given = {"gate": path, "policy": {"min_run": 8}}
    assert moving(given, served(model), monkeypatch)[0] is None


@pytest.mark.parametrize(
    ("changes", "given", "why"),
    [
        ({"checkpoint": "0" * 64}, {}, "is not for this model: "),
        ({"kv_dtype": "bfloat16"}, {}, "was measured with KV in bfloat16, but SGLang keeps it in"),
        ({}, {"load_format": "gguf"}, "SGLang loads the weights by load_format='gguf'"),
        ({}, {"quantization": "fp8"}, "SGLang quantises the weights itself (fp8)"),
        ({}, {"chat_template": "chatml"}, "measured with template"),
    ],
    ids=lambda one: str(one)[:30],
)
def test_with_a_gate_of_another_model_nothing_is_moved(
    changes: dict[str, Any],
    given: dict[str, Any],
    why: str,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server starts, warns once, and reuses as without kvtrie's gate."""
    path = file(tmp_path / "gate.json", model, **changes)
    settings = {"gate": path, "gaps": True}
    monkeypatch.setenv(_settings.VARIABLE, json.dumps(settings))
    caplog.set_level(logging.INFO)
    cache = _support.make(served(model, skip_tokenizer_init=True, **given))
    assert cache._moving is None
    assert cache.counts == {"gate": 1}
    (said,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert said.startswith("kvtrie: exact reuse only: ")
    assert why in said
    assert "\n" not in said
    (started,) = [one for one in caplog.messages if "prefix cache of" in one]
    assert started.endswith("; exact reuse only (the gate is of another model)")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "KVTRIE_SGLANG: not JSON: "),
        ('{"a":' * 20_000, "KVTRIE_SGLANG: not JSON: "),
        ("/nowhere.json", "KVTRIE_SGLANG: /nowhere.json: No such file or directory"),
        ("{}", None),
        ('{"gates": 1}', "unknown key 'gates'; did you mean 'gate'?"),
        ('{"gate": 1}', 'gate must be a path, or "unchecked", not 1'),
        ('{"gate": "/nowhere.json"}', "gate /nowhere.json: No such file or directory"),
        ('{"gate": "unchecked", "policy": {"minrun": 3}}', "did you mean 'min_run'?"),
        ('{"gate": "unchecked", "policy": {"min_run": 0}}', "policy: "),
        ('{"gate": "unchecked", "policy": 3}', "policy must be a mapping"),
        ('{"default": "all"}', "default must be"),
        ('{"reasoning": "never"}', "reasoning must be"),
        ('{"gaps": 1}', "gaps must be true or false, not 1"),
        ('{"shadow": true}', '"shadow" counts what a gate would let move: set "gate" too'),
        ('{"record": {"pth": "a"}}', "did you mean 'path'?"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(
    text: str, why: str | None, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why is None:
        assert moving(text, served(model), monkeypatch)[0] is None
        return
    with pytest.raises(_version.SGLangUnsupportedError) as caught:
        moving(text, served(model), monkeypatch)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"backend": "flashinfer"},
            "the attention backend flashinfer is not among fa3, torch",
        ),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"enable_mixed_chunk": True}, "--enable-mixed-chunk"),
        ({"enable_watermark": True}, "--enable-watermark"),
    ],
    ids=lambda one: str(one)[:30],
)
def test_where_gaps_are_not_computed_the_server_does_not_start(
    given: dict[str, Any], why: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"gate": "unchecked", "gaps": True}
    with pytest.raises(_version.SGLangUnsupportedError, match=why):
        moving(settings, served(model, **given), monkeypatch)
    del settings["gaps"]
    assert moving(settings, served(model, **given), monkeypatch)[0] is not None


def test_kv_that_cannot_be_moved_is_reused_exactly(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fp8 = served(model, dtype=torch.float8_e4m3fn)
    unknown = served(model)
    unknown.params.token_to_kv_pool_allocator.get_kvcache = lambda: SimpleNamespace(
        dtype=torch.float32
    )
    images = served(model)
    images.model_config.hf_text_config.rope_parameters = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [4, 6, 6],
    }
    vision = served(model)
    vision.model_config.hf_text_config = {
        **vision.model_config.hf_text_config.to_dict(),
        "model_type": "qwen2_vl_text",
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]},
    }
    cases = (
        *((fp8, "quantised"), (unknown, "is not known"), (images, "M-RoPE")),
        (vision, "knows no positions of images"),
    )
    for one, why in cases:
        found, said = moving({"gate": "unchecked"}, one, monkeypatch)
        assert (found, said) == (None, "exact reuse only (its KV cannot be moved)")
        assert why in caplog.text
        caplog.clear()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tp_size": 2}, "tp_size=2: moves on more than one rank were not tested"),
        ({"is_embedding": True}, "the model generates nothing"),
        ({"generates": False}, "the model generates nothing"),
        ({"dllm_algorithm": "LowConfidence"}, "--dllm-algorithm"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"enable_return_routed_experts": True}, "--enable-return-routed-experts"),
        ({"enable_return_indexer_topk": True}, "--enable-return-indexer-topk"),
    ],
    ids=lambda one: str(one)[:30],
)
def test_servers_that_read_slots_in_other_ways_move_nothing(
    given: dict[str, Any],
    why: str,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found, said = moving({"gate": "unchecked", "gaps": True}, served(model, **given), monkeypatch)
    assert (found, said) == (None, "exact reuse only (its KV is not moved)")
    assert why in caplog.text


def test_a_server_that_could_not_be_hooked_does_not_start(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with pytest.raises(_version.SGLangUnsupportedError, match="could not be hooked"):
        moving({"gate": "unchecked", "gaps": True}, served(model), monkeypatch)


@pytest.mark.parametrize(("overlaps", "stream"), [(True, "forward"), (False, None)])
def test_copies_are_on_the_stream_that_steps_run_on(
    model: str, overlaps: bool, stream: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = served(model, disable_overlap_schedule=not overlaps)
    made.tp_worker.model_runner.forward_stream = "forward"
    device = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    monkeypatch.setattr(_support, "pool_of", lambda *_: device)
    found, _ = moving({"gate": "unchecked"}, made, monkeypatch)
    assert found._stream == stream


@pytest.mark.parametrize(
    ("settings", "is_hooked"),
    [
        ("", False),
        ('{"gate": "unchecked"}', False),
        ('{"gate": "unchecked", "gaps": true}', True),
        ('{"gate": "unchecked", "gaps": true, "shadow": true}', False),
        ("{", False),
    ],
)
def test_hooks_are_there_if_they_are_asked_for(settings: str, is_hooked: bool) -> None:
    assert forked("tests.sglang.hooked", KVTRIE_SGLANG=settings) is is_hooked
