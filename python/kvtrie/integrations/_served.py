"""What an engine serves, as a gate knows it: the checkpoint, the chat template, KV and RoPE.

One reader of gate files for all engines. Nothing of an engine is imported here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvtrie import gates
from kvtrie._core import EXACT_ONLY, ReusePolicy, UnsupportedRopeError
from kvtrie.models import directory
from kvtrie.models.fingerprint import (
    CheckpointError,
    checkpoint_digest,
    directory_template_id,
    template_id,
)
from kvtrie.models.kv_types import KV_TYPES
from kvtrie.rope import RopeSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LEAST_RUN: Final = 16
"""The shortest moved run in tokens, unless the policy sets it."""

UNCHECKED: Final = "unchecked"
"""In the place of a gate file: the operator is responsible for the quality."""

# Formats that load the directory's weights unchanged.
_PLAIN_FORMATS: Final = (
    *("auto", "hf", "safetensors"),
    *("fastsafetensors", "instanttensor", "runai_streamer"),
)
_FIX: Final = (
    'run `kvtrie calibrate` on the served directory, or set "gate": "unchecked" and be responsible '
    "for the quality"
)


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A model as an engine was told to serve it.

    Attributes:
        engine: The engine's name, for messages.
        where: What a message begins with.
        model: A directory, or a name in the hub's cache.
        load_format: How the weights are loaded.
        quantization: The engine's quantisation; None without one.
        kv_dtype: Element type of the KV.
        rope: How the running model rotates its keys; None where its config is the directory's.
        is_mla: Whether it keeps latent rows, whose keys have interleaved pairs.
        template: The text of the served chat template; None for the directory's.
        revision: Of a name.
        cache_dir: Of the hub; None for its own choice.
    """

    engine: str
    where: str
    model: str
    load_format: str
    quantization: str | None
    kv_dtype: str
    rope: Callable[[], RopeSpec] | None = None
    is_mla: bool = False
    template: str | None = None
    revision: str | None = None
    cache_dir: str | None = None


def read(path: str | None, where: str) -> gates.Gate | None:
    """The gate file; None without one, or for `UNCHECKED`.

    Raises:
        GateError: It cannot be read, or is none.
        GateMismatchError: Its version is not supported.
    """
    if path is None or path == UNCHECKED:
        return None
    try:
        return gates.read(path)
    except OSError as error:
        msg = f"{where}: gate {path}: {error.strerror or error}; {_FIX}"
        raise gates.GateError(msg) from error


def decide(path: str | None, wanted: ReusePolicy | None, served: EngineModel) -> gates.Decision:
    """What requests may reuse; its ``of`` decides on each plan.

    Args:
        path: The gate file, or `UNCHECKED`; None: exact reuse only.
        wanted: The policy of all requests; None: the cheapest that the gate clears for each plan.
        served: The model.

    Raises:
        GateError: The file cannot be read, or is none.
        GateMismatchError: It is of another model, element type, RoPE setting or chat template.
    """
    if path is None:
        return gates.Decision(EXACT_ONLY, is_cleared=True, reason="there is no gate")
    policy = ReusePolicy(approximate=True) if wanted is None else wanted
    gate = read(path, served.where)
    if gate is None:
        reason = "the operator is responsible for the quality"
        return gates.Decision(policy, is_cleared=True, reason=reason)
    # A gate compares the shortest run, and the index finds none shorter than this.
    explicit = policy if policy.min_run is not None else policy.replace(min_run=LEAST_RUN)
    try:
        checkpoint, template = checkpoint_of(served), _template_id(served)
        if wanted is None:
            decision = gate.ladder(repairs=("fronts",), checkpoint=checkpoint, template=template)
        else:
            decision = gate.policy(explicit, checkpoint=checkpoint, template=template)
        _check_rope(served)
    except (gates.GateMismatchError, CheckpointError) as error:
        msg = (
            f"{served.where}: gate {path} (of {gate.model}) is not for this model: {error}; {_FIX}"
        )
        raise gates.GateMismatchError(msg) from error
    # A separate message, because measuring the same directory again would not help.
    if gate.kv_dtype != served.kv_dtype:
        fix = f"run `kvtrie calibrate --dtype {served.kv_dtype}`"
        if gate.kv_dtype.partition("@")[0] in KV_TYPES:
            fix += " without --kv-dtype"
        else:
            fix += f", or serve with --dtype {gate.kv_dtype}"
        msg = (
            f"{served.where}: gate {path} was measured with KV in {gate.kv_dtype}, but "
            f"{served.engine} keeps it in {served.kv_dtype}: {fix}"
        )
        raise gates.GateMismatchError(msg)
    if not decision.is_cleared or wanted is None:
        return decision
    return replace(decision, policy=policy)


def checkpoint_of(served: EngineModel, digest: Callable[[Path], str] = checkpoint_digest) -> str:
    """The digest of a served checkpoint.

    Args:
        served: The model.
        digest: What makes it of the model's directory.

    Raises:
        GateMismatchError: The engine does not load it unchanged.
        CheckpointError: It cannot be read.
    """
    if served.load_format not in _PLAIN_FORMATS:
        msg = f"{served.engine} loads the weights by load_format={served.load_format!r}, "
        raise gates.GateMismatchError(msg + "not unchanged")
    root = directory_of(served)
    if served.quantization is not None and not _is_quantised(root):
        msg = f"{served.engine} quantises the weights itself ({served.quantization})"
        raise gates.GateMismatchError(msg)
    return digest(root)


def _template_id(served: EngineModel) -> str | None:
    if served.template is None:
        return directory_template_id(directory_of(served))
    return template_id(served.template)


def directory_of(served: EngineModel) -> Path:
    return directory.directory_of(served.model, served.revision, served.cache_dir)


def _config(root: Path) -> dict[str, Any]:
    found = json.loads((root / "config.json").read_bytes())
    return found if isinstance(found, dict) else {}


def _is_quantised(root: Path) -> bool:
    config = _config(root)
    places = [one for one in (config, config.get("text_config")) if isinstance(one, dict)]
    return (root / "hf_quant_config.json").is_file() or any(
        name in one for one in places for name in ("quantization_config", "compression_config")
    )


def _check_rope(served: EngineModel) -> None:
    if served.rope is None:
        return
    config = _config(directory_of(served))
    try:
        said = RopeSpec.from_config(
            config.get("text_config") or config, interleaved=True if served.is_mla else None
        )
        if said == served.rope():
            return
    except UnsupportedRopeError:
        pass
    msg = "overrides of its config change how it rotates its keys (RoPE): it was not measured so"
    raise gates.GateMismatchError(msg)
