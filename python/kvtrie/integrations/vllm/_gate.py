"""What the model's gate file allows requests to reuse."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kvtrie import gates
from kvtrie._core import EXACT_ONLY
from kvtrie.integrations import _served
from kvtrie.integrations.vllm import _template
from kvtrie.integrations.vllm._support import rope_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvtrie.integrations.vllm._settings import Settings

_LOG = logging.getLogger("vllm.kvtrie")
_WHERE: Final = "KvtrieConnector"


def decision_of(settings: Settings, vllm_config: VllmConfig) -> gates.Decision:
    """What requests may reuse; its ``of`` decides on each plan."""
    if settings.gate is None and settings.shadow:
        reason = "shadow mode counts without a gate"
        return gates.Decision(settings.wanted(), is_cleared=True, reason=reason)
    if settings.gate is None:
        return gates.Decision(EXACT_ONLY, is_cleared=True, reason="there is no gate")
    wanted = None if settings.policy is None else settings.wanted()
    decision = _served.decide(settings.gate, wanted, engine_model(settings, vllm_config))
    if not decision.is_cleared:
        _LOG.warning("kvtrie: exact reuse only: %s", decision.reason)
    elif settings.gate != _served.UNCHECKED:
        _LOG.info("kvtrie: %s", decision.reason)
    return decision


def read(settings: Settings) -> gates.Gate | None:
    return _served.read(settings.gate, _WHERE)


def covers(settings: Settings, adapter: str | None) -> bool:
    """Whether a request may use the gate, which was measured without an adapter."""
    return adapter is None or settings.gate in (None, _served.UNCHECKED)


def engine_model(settings: Settings, vllm_config: VllmConfig) -> _served.EngineModel:
    """The model as vLLM serves it."""
    model, load = vllm_config.model_config, vllm_config.load_config
    kv_dtype = str(vllm_config.cache_config.cache_dtype)
    if kv_dtype == "auto":
        kv_dtype = str(model.dtype).removeprefix("torch.")
    return _served.EngineModel(
        engine="vLLM",
        where=_WHERE,
        model=model.model,
        load_format=load.load_format,
        quantization=model.quantization,
        kv_dtype=kv_dtype,
        rope=(lambda: rope_of(vllm_config)) if model.hf_overrides else None,
        is_mla=model.use_mla,
        template=_template.served(settings).text,
        revision=model.revision,
        cache_dir=load.download_dir,
    )
