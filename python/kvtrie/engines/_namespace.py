"""The fields of a namespace that depend on the model of a KV pool."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from kvtrie._core import SharedSalt

    Salt = str | SharedSalt

_SAMPLES_PER_TENSOR = 16


def model_id(model: PreTrainedModel) -> str:
    """Name and fingerprint of a loaded model.

    The fingerprint covers the config, the shape of every weight and 16 of its values. That
    distinguishes revisions and fine-tunes loaded by accident, for a few thousand reads. It does not
    resist an adversary; the index of a generator stays inside it.

    Returns:
        ``name@digest``.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(_config_json(model.config).encode())
    with torch.inference_mode():
        for name, weight in sorted(model.state_dict().items()):
            digest.update(f"{name}:{tuple(weight.shape)}:{weight.dtype}".encode())
            flat = weight.detach().reshape(-1)
            if len(flat) and flat.is_floating_point():
                at = torch.linspace(0, len(flat) - 1, _SAMPLES_PER_TENSOR, dtype=torch.float64)
                sample = flat[at.round().long().to(flat.device)].double().cpu()
                digest.update(sample.numpy().tobytes())
    name = Path(str(model.config._name_or_path)).name  # noqa: SLF001 - the only name a config has
    return f"{name or model.config.model_type}@{digest.hexdigest()}"


def rope_id(config: PretrainedConfig) -> str:
    """The RoPE settings of a config as text; ``default`` if there are none."""
    settings: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling", "rope_theta"):
        value = getattr(config, name, None)
        if value is not None:
            settings[name] = value
    if not settings:
        return "default"
    return json.dumps(settings, sort_keys=True, default=str, separators=(",", ":"))


def _config_json(config: PretrainedConfig) -> str:
    fields = config.to_dict()
    # The path that the model was loaded from does not change its KV.
    fields.pop("_name_or_path", None)
    return json.dumps(fields, sort_keys=True, default=str)
