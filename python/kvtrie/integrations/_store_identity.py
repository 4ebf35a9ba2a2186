"""What stores and transfers call the KV of a served model: no other model's is taken for it."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from kvtrie.gates import GateMismatchError
from kvtrie.integrations import _served
from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations._store_settings import HOST
from kvtrie.models.fingerprint import (
    CheckpointError,
    checkpoint_digest,
    rope_id,
    settings_digest,
    weights_digest,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PretrainedConfig

    from kvtrie.integrations._served import EngineModel
    from kvtrie.integrations._store_settings import StoreSettings


def identity(
    given: StoreSettings,
    served: EngineModel,
    config: PretrainedConfig,
    where: str,
    *,
    dtype: str,
    context: int,
    overrides: object = None,
) -> str:
    """What a store calls the KV of a model; arguments and errors as for `model_identity`."""
    return model_identity(
        given.model,
        served,
        config,
        (f"{where}: store", "model"),
        # What another process has stored may be of weights that differ in a few rows.
        digest=checkpoint_digest if given.backend == HOST else weights_digest,
        dtype=dtype,
        context=context,
        overrides=overrides,
    )


def model_identity(
    name: str | None,
    served: EngineModel,
    config: PretrainedConfig,
    asked: tuple[str, str],
    *,
    digest: Callable[[Path], str],
    dtype: str,
    context: int,
    overrides: object = None,
) -> str:
    """What the KV of a model depends on: its weights, and how an engine computes with them.

    Args:
        name: What the operator calls the weights; None: they are read.
        served: The model.
        config: Of its text part, as it is used.
        asked: What a message begins with, and the setting of the name.
        digest: Of a directory with weights.
        dtype: Element type of the computation.
        context: Tokens that the engine serves at most.
        overrides: What the engine was told to change in the config.

    Raises:
        SettingsError: There is no name for what cannot be told from others.
    """
    said = [_digest(served, digest, asked) if name is None else name, dtype]
    said.append(settings_digest(config))
    if "longrope" in rope_id(config) or '"su"' in rope_id(config):
        # The factors of all positions are chosen by the longest context that is served.
        said.append(f"context {context}")
    if served.quantization is not None:
        said.append(served.quantization)
    if callable(overrides):
        if name is None:
            why = "hf_overrides is a function"
            raise _nameless(why, asked)
    elif overrides:
        text = json.dumps(overrides, default=repr, sort_keys=True)
        # A description has room for names alone.
        said.append(hashlib.blake2b(text.encode(), digest_size=16).hexdigest())
    return " ".join(said)


def _digest(served: EngineModel, digest: Callable[[Path], str], asked: tuple[str, str]) -> str:
    try:
        return _served.checkpoint_of(served, digest)
    except (GateMismatchError, CheckpointError) as error:
        raise _nameless(error, asked) from error


def _nameless(why: object, asked: tuple[str, str]) -> SettingsError:
    where, setting = asked
    return SettingsError(
        f"{where}: the model cannot be told from others: {why}; give it a name that "
        f'changes with its weights: "{setting}"'
    )
