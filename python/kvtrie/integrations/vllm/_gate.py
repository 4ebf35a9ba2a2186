"""What the model's gate file allows requests to reuse."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from huggingface_hub import snapshot_download

from kvtrie import gates
from kvtrie._core import EXACT_ONLY, UnsupportedRopeError
from kvtrie.integrations.vllm import _template
from kvtrie.integrations.vllm._copies import rope_of
from kvtrie.integrations.vllm._settings import LEAST_RUN
from kvtrie.models.fingerprint import (
    CheckpointError,
    checkpoint_digest,
    directory_template_id,
    template_id,
)
from kvtrie.rope import RopeSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvtrie.integrations.vllm._settings import Settings

_LOG = logging.getLogger("vllm.kvtrie")

# Formats that load the directory's weights unchanged.
_PLAIN_FORMATS: Final = (
    *("auto", "hf", "safetensors"),
    *("fastsafetensors", "instanttensor", "runai_streamer"),
)
_FIX: Final = (
    'run `kvtrie calibrate` on the served directory, or set "gate": "unchecked" and be responsible '
    "for the quality"
)


def decision_of(settings: Settings, vllm_config: VllmConfig) -> gates.Decision:
    """What requests may reuse; its ``of`` decides on each plan."""
    if settings.gate is None and settings.shadow:
        reason = "shadow mode counts without a gate"
        return gates.Decision(settings.wanted(), is_cleared=True, reason=reason)
    if settings.gate is None:
        return gates.Decision(EXACT_ONLY, is_cleared=True, reason="there is no gate")
    wanted = settings.wanted()
    gate = read(settings)
    if gate is None:
        reason = "the operator is responsible for the quality"
        return gates.Decision(wanted, is_cleared=True, reason=reason)
    # A gate compares the shortest run, and the index finds none shorter than this.
    explicit = wanted if wanted.min_run is not None else wanted.replace(min_run=LEAST_RUN)
    try:
        served, template = _served(vllm_config), _template_id(settings, vllm_config)
        if settings.policy is None:
            decision = gate.ladder(repairs=("fronts",), checkpoint=served, template=template)
        else:
            decision = gate.policy(explicit, checkpoint=served, template=template)
        _check_rope(vllm_config)
    except (gates.GateMismatchError, CheckpointError) as error:
        msg = (
            f"KvtrieConnector: gate {settings.gate} (of {gate.model}) is not for this model: "
            f"{error}; {_FIX}"
        )
        raise gates.GateMismatchError(msg) from error
    # A separate message, because measuring the same directory again would not help.
    kv_dtype = _kv_dtype(vllm_config)
    if gate.kv_dtype != kv_dtype:
        msg = (
            f"KvtrieConnector: gate {settings.gate} was measured with KV in {gate.kv_dtype}, but "
            f"vLLM keeps it in {kv_dtype}: run `kvtrie calibrate --dtype {kv_dtype}`, or serve "
            f"with --dtype {gate.kv_dtype}"
        )
        raise gates.GateMismatchError(msg)
    if not decision.is_cleared:
        _LOG.warning("kvtrie: exact reuse only: %s", decision.reason)
        return decision
    _LOG.info("kvtrie: %s", decision.reason)
    return decision if settings.policy is None else replace(decision, policy=wanted)


def read(settings: Settings) -> gates.Gate | None:
    if settings.gate is None or settings.gate == "unchecked":
        return None
    try:
        return gates.read(settings.gate)
    except OSError as error:
        msg = f"KvtrieConnector: gate {settings.gate}: {error.strerror or error}; {_FIX}"
        raise gates.GateError(msg) from error


def covers(settings: Settings, adapter: str | None) -> bool:
    """Whether a request may use the gate, which was measured without an adapter."""
    return adapter is None or settings.gate in (None, "unchecked")


def _served(vllm_config: VllmConfig) -> str:
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format not in _PLAIN_FORMATS:
        msg = f"vLLM loads the weights by load_format={load.load_format!r}, not unchanged"
        raise gates.GateMismatchError(msg)
    directory = _directory(vllm_config)
    if model.quantization is not None and not _is_quantised(directory):
        msg = f"vLLM quantises the weights itself ({model.quantization})"
        raise gates.GateMismatchError(msg)
    return checkpoint_digest(directory)


def _template_id(settings: Settings, vllm_config: VllmConfig) -> str | None:
    text = _template.served(settings).text
    return directory_template_id(_directory(vllm_config)) if text is None else template_id(text)


def _directory(vllm_config: VllmConfig) -> Path:
    model = vllm_config.model_config
    directory = Path(model.model)
    if directory.is_dir():
        return directory
    try:
        found = snapshot_download(
            model.model,
            revision=model.revision,
            cache_dir=vllm_config.load_config.download_dir,
            local_files_only=True,
            allow_patterns=[
                *("config.json", "*.safetensors", "*.safetensors.index.json"),
                *("tokenizer_config.json", "chat_template.jinja"),
            ],
        )
    except Exception as error:  # hubs raise errors of many types
        msg = f"{model.model!r} is not a directory, and not in the hub's cache"
        raise CheckpointError(msg) from error
    return Path(found)


def _config(directory: Path) -> dict[str, Any]:
    found = json.loads((directory / "config.json").read_bytes())
    return found if isinstance(found, dict) else {}


def _is_quantised(directory: Path) -> bool:
    config = _config(directory)
    places = [one for one in (config, config.get("text_config")) if isinstance(one, dict)]
    return (directory / "hf_quant_config.json").is_file() or any(
        name in one for one in places for name in ("quantization_config", "compression_config")
    )


def _kv_dtype(vllm_config: VllmConfig) -> str:
    dtype = str(vllm_config.cache_config.cache_dtype)
    return str(vllm_config.model_config.dtype).removeprefix("torch.") if dtype == "auto" else dtype


def _check_rope(vllm_config: VllmConfig) -> None:
    if not vllm_config.model_config.hf_overrides:
        return
    config = _config(_directory(vllm_config))
    nested = config.get("text_config")
    try:
        interleaved = True if vllm_config.model_config.use_mla else None
        said = RopeSpec.from_config(nested or config, interleaved=interleaved)
        if said == rope_of(vllm_config):
            return
    except UnsupportedRopeError:
        pass
    msg = "hf_overrides change how it rotates its keys (RoPE), so the measurement does not apply"
    raise gates.GateMismatchError(msg)
