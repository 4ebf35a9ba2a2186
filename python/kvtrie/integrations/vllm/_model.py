"""What a model's directory says of the settings, before its weights are loaded.

Its config, tokenizer and chat template are read, and of a gate's checkpoint what identifies it.
Neither vLLM nor torch is imported.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kvtrie._nearest import hint
from kvtrie.integrations import _tokenizer_json
from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations.vllm import _command, _formats, _template
from kvtrie.integrations.vllm._version import refuse
from kvtrie.models.fingerprint import CheckpointError
from kvtrie.tags import PRESETS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvtrie.integrations._served import EngineModel
    from kvtrie.integrations.vllm._settings import Settings

_CONNECTOR: Final = "KvtrieConnector"
_AUTO: Final = "auto"
_LONGEST: Final = 300
# Published configs have either name.
_FULL: Final = frozenset({"full_attention", "attention"})
_KV_DTYPES: Final = (_AUTO, "float16", "bfloat16", "float32")
# vLLM's names, and what it takes them for.
_DTYPES: Final = {
    "half": "float16",
    "float": "float32",
    **{one: one for one in _KV_DTYPES},
}
# A tokenizer that is not the directory's tokenizer.json.
_OTHER_TOKENIZER: Final = ("tokenizer", "tokenizer-mode", "tokenizer-revision")


class UnreadableModelError(SettingsError):
    """A model that cannot be read here; vLLM may be able to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """A model as vLLM gets it, by its options of the same names.

    Attributes:
        model: A directory, or a name in the hub's cache.
        dtype: Of weights and activations.
        kv_cache_dtype: Of KV.
        revision: Of a name.
        download_dir: Of the hub's cache.
        load_format: How weights are loaded.
        template_arguments: What the server gives to the chat template; None: what the command line
            of this process has.
        quantization: Which vLLM does itself.
    """

    model: str
    dtype: str = _AUTO
    kv_cache_dtype: str = _AUTO
    revision: str | None = None
    download_dir: str | None = None
    load_format: str = _AUTO
    template_arguments: Mapping[str, Any] | None = None
    quantization: str | None = None


def is_float(dtype: str) -> bool:
    """Whether KV of this ``--kv-cache-dtype`` is floats, and not quantised."""
    return dtype in _KV_DTYPES


def check_kv_dtype(dtype: str, *, has_modes: bool = True) -> None:
    """Refuse KV that is not stored in the type that its keys are rotated in.

    ``has_modes``: whether the connector could do without moving.

    Raises:
        UnsupportedError: It is not.
    """
    if not is_float(dtype):
        refuse(
            f"keys are rotated in the type they are stored in, and --kv-cache-dtype {dtype} is "
            f"not one of {', '.join(_KV_DTYPES)}"
            + (': set "mode": "exact", which copies nothing of it' if has_modes else "")
        )


def check_stored_dtype(dtype: str) -> None:
    """Refuse to store KV that is not floats.

    Raises:
        UnsupportedError: It is not.
    """
    if not is_float(dtype):
        refuse(f'a store keeps floats, and --kv-cache-dtype is {dtype}: remove "store"')


def check(settings: Settings, options: ModelOptions) -> list[str]:
    """Check what depends on the model.

    Returns:
        What vLLM will do, a sentence each.

    Raises:
        SettingsError: Chat format or template arguments do not fit, or there is no such model.
        GateError: The gate file is of another model, template or element type.
        UnsupportedError: KV is stored in another type than keys are rotated in.
    """
    if not settings.is_exact:
        check_kv_dtype(options.kv_cache_dtype)
    elif settings.stored() is not None:
        check_stored_dtype(options.kv_cache_dtype)
    if options.dtype not in _DTYPES:
        near = hint(options.dtype, _DTYPES)
        msg = f"--dtype must be one of {', '.join(_DTYPES)}, not {options.dtype!r}{near}"
        raise SettingsError(msg)
    served = _served_model(settings, options)
    directory = _directory(served)
    config = _config(directory)
    said = [_chat(settings, directory, options.template_arguments)]
    kv_dtype = _kv_dtype(options) or _found(config)
    if settings.gate is not None and kv_dtype is None:
        said.append("KV's element type is not compared: config.json has none; give --dtype")
    said += _gate(settings, served, kv_dtype)
    listed = config.get("layer_types")
    kinds = sorted(set(map(str, listed))) if isinstance(listed, list) else []
    if len(kinds) > 1 and not _FULL.isdisjoint(kinds) and not settings.is_exact:
        said.append(
            f"its layers are of the kinds {', '.join(kinds)}: where vLLM keeps their KV in several "
            'groups of blocks, it starts with "mode": "exact" alone'
        )
    return said


def check_command(settings: Settings) -> None:
    """Check what depends on the model that vLLM's server was started with, as far as it shows.

    Raises:
        SettingsError: As `check`.
        GateError: As `check`.
    """
    options = _of_command()
    if options is None:
        return
    served = _served_model(settings, options)
    with contextlib.suppress(UnreadableModelError):
        directory = _directory(served)
        if not any(_command.option(one) for one in _OTHER_TOKENIZER):
            with contextlib.suppress(UnreadableModelError):
                _chat(settings, directory)
        # What vLLM makes of "auto" depends on the device.
        _gate(settings, served, _kv_dtype(options))


def _of_command() -> ModelOptions | None:
    """The model by the command line; None if that does not have it, or another process has it."""
    model = _command.model()
    if model is None or multiprocessing.parent_process() is not None:
        return None
    option = _command.option
    return ModelOptions(
        model=model,
        dtype=option("dtype") or _AUTO,
        kv_cache_dtype=option("kv-cache-dtype") or _AUTO,
        revision=option("revision"),
        download_dir=option("download-dir"),
        load_format=option("load-format") or _AUTO,
        quantization=option("quantization"),
    )


def _served_model(settings: Settings, options: ModelOptions) -> EngineModel:
    from kvtrie.integrations import _served  # noqa: PLC0415 - not for every check

    return _served.EngineModel(
        engine="vLLM",
        where=_CONNECTOR,
        model=options.model,
        load_format=options.load_format,
        quantization=options.quantization,
        kv_dtype=options.kv_cache_dtype,
        template=_template.served(settings).text,
        revision=options.revision,
        cache_dir=options.download_dir,
    )


def _directory(served: EngineModel) -> Path:
    from kvtrie.integrations import _served  # noqa: PLC0415 - likewise

    try:
        return _served.directory_of(served)
    except CheckpointError as error:
        _unreadable(f"{error}: it can be checked when it is there")


def _config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        _unreadable(f"{path}: {error.strerror or error}")
    except (ValueError, RecursionError) as error:
        _unreadable(f"{path} is no JSON: {error}")
    if not isinstance(found, dict):
        _unreadable(f"{path} must be a mapping, not {type(found).__name__}")
    text = found.get("text_config")
    return {**found, **text} if isinstance(text, dict) else found


def _kv_dtype(options: ModelOptions) -> str | None:
    """The element type of KV; None where the model decides."""
    for given in (options.kv_cache_dtype, options.dtype):
        if given != _AUTO:
            return _DTYPES.get(given, given)
    return None


def _found(config: dict[str, Any]) -> str | None:
    """What vLLM makes of the model's own type on a device with bfloat16; None without one."""
    given = config.get("dtype") or config.get("torch_dtype")
    dtype = str(given).removeprefix("torch.") if given else None
    return "bfloat16" if dtype == "float32" else dtype


def _gate(settings: Settings, served: EngineModel, kv_dtype: str | None) -> list[str]:
    """Compare gate and model; without a type of KV, all but that."""
    from kvtrie.integrations import _served  # noqa: PLC0415 - likewise

    gate = _served.read(settings.gate, _CONNECTOR)
    if gate is None:
        return []
    wanted = None if settings.policy is None else settings.wanted()
    served = replace(served, kv_dtype=kv_dtype or gate.kv_dtype)
    decision = _served.decide(settings.gate, wanted, served)
    reuse = "" if decision.is_cleared else "exact reuse only: "
    return [f"the gate is of this model; {reuse}{decision.reason}"]


def _chat(settings: Settings, directory: Path, defaults: Mapping[str, Any] | None = None) -> str:
    """Read the chat format as vLLM will, and say which it is."""
    tokenizer = None
    if isinstance(settings.chat_format, str):
        if not (directory / "tokenizer.json").is_file():
            return "chat format: not checked, for the model has no tokenizer.json"
        tokenizer = _tokenizer(directory, settings.template_arguments or {})
    reasons: list[str] = []
    tagger = _formats.tagger_of(settings, tokenizer, otherwise=reasons.append, defaults=defaults)
    said = _formats.form_of(tagger)
    if reasons:
        # They list what each preset lacks.
        why = ": ".join(reasons)
        why = why if len(why) <= _LONGEST else f"{why[:_LONGEST]}..."
        if tagger is None:
            known = ", ".join(PRESETS)
            said += f'; dropped reasoning is not evicted first: set "chat_format" ({known})'
        said += f": {why}"
    forbidden = settings.wanted().forbid_kinds
    if tagger is None and forbidden:
        said += f"; policy forbids {', '.join(forbidden)}: only --reasoning-parser can find them"
    return said


def _tokenizer(directory: Path, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - transformers has no types
    try:
        found = None
        if _tokenizer_json.OWN_ARGUMENTS.isdisjoint(arguments):
            found = _tokenizer_json.read(directory)
        return _by_transformers(directory) if found is None else found
    except ImportError:
        _unreadable("its chat format is read with transformers, which is not installed")
    except Exception as error:
        lines = str(error).strip().splitlines() or [repr(error)]
        _unreadable(f"{directory}: its tokenizer cannot be loaded: {lines[0]}")


def _by_transformers(directory: Path) -> Any:  # noqa: ANN401 - likewise
    # Without torch, transformers says on import that it finds none.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # The class that needs no torch: ids and templates are the same.
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - seconds

    return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)


def _unreadable(why: str) -> NoReturn:
    msg = f"--model: {why}"
    raise UnreadableModelError(msg)
