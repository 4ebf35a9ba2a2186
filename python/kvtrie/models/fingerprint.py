"""Identifies a model: by the files of its directory, and as it is loaded.

A gate has both: an engine in another process knows the directory alone, and may load it
differently; the embedded engine has a model whose weights may have changed since it was loaded.
Both read the config, and the name, type, shape and some values of every weight. That distinguishes
revisions and fine-tunes; it does not resist an adversary who knows which values are read.

This module needs neither torch nor numpy nor safetensors; `model_id` imports torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from kvtrie._core import KvTrieError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

    from transformers import PretrainedConfig, PreTrainedModel

# Fields of a config file about its loading, which do not change KV.
_INCIDENTAL: Final = ("_name_or_path", "transformers_version")
_ROPE_FIELDS: Final = (
    *("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq"),
    *("no_rope_layers", "layer_rope_theta", "position_embedding_type"),
)
_PERSON: Final = b"kvtrie.ckpt.1"
_INDEX: Final = "model.safetensors.index.json"
_MAX_HEADER: Final = 100_000_000  # the format's own limit
_MAX_JSON: Final = 64 << 20
_SAMPLE: Final = 16  # bytes
_MAX_SAMPLES: Final = 16  # per tensor; of a loaded model, values
# Of models with 100,000 tensors, which may be on a network.
_MAX_READS: Final = 1 << 16


class CheckpointError(KvTrieError, ValueError):
    """A model directory whose weights cannot be identified."""


class _Tensor(NamedTuple):
    """One tensor of a safetensors file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def model_id(model: PreTrainedModel) -> str:
    """Name and fingerprint of a loaded model, for its namespace: ``name@`` and 16 hex digits."""
    import torch  # noqa: PLC0415 - a loaded model has imported it

    config = model.config.to_dict()
    # The path that it was loaded from does not change its KV.
    config.pop("_name_or_path", None)
    total = hashlib.blake2b(digest_size=8)
    total.update(json.dumps(config, sort_keys=True, default=str).encode())
    with torch.inference_mode():
        for name, weight in sorted(model.state_dict().items()):
            total.update(f"{name}:{tuple(weight.shape)}:{weight.dtype}".encode())
            flat = weight.detach().reshape(-1)
            if len(flat) and flat.is_floating_point():
                at = torch.linspace(0, len(flat) - 1, _MAX_SAMPLES, dtype=torch.float64)
                sample = flat[at.round().long().to(flat.device)].double().cpu()
                total.update(sample.numpy().tobytes())
    name = Path(str(model.config._name_or_path)).name  # noqa: SLF001 - the only name a config has
    return f"{name or model.config.model_type}@{total.hexdigest()}"


def rope_id(config: PretrainedConfig) -> str:
    """The RoPE settings of a config as text, for a namespace; ``default`` if there are none.

    Those of every group of layers are in it; and where windows are next to other layers, which
    layers have one, and how long. It does not depend on who computes frequencies.
    """
    settings: dict[str, Any] = {}
    for name in _ROPE_FIELDS:
        value = getattr(config, name, None)
        if value is not None:
            settings[name] = value
    if len(set(getattr(config, "layer_types", None) or ())) > 1:
        settings["layer_types"] = config.layer_types
        settings["sliding_window"] = getattr(config, "sliding_window", None)
    if not settings:
        return "default"
    return json.dumps(settings, sort_keys=True, default=str, separators=(",", ":"))


def template_id(template: object) -> str | None:
    """The digest of a chat template, 32 hex digits; None if there is none.

    Args:
        template: A tokenizer's ``chat_template``: text, or texts by name.
    """
    if not template:
        return None
    total = hashlib.blake2b(digest_size=16, person=b"kvtrie.chat.1")
    total.update(_canonical(template))
    return total.hexdigest()


def directory_template_id(directory: str | PathLike[str]) -> str | None:
    """The digest of the chat template in a model directory, as `template_id` has it when loaded.

    Raises:
        CheckpointError: The tokenizer's settings are broken.
    """
    root = Path(directory)
    file = root / "chat_template.jinja"
    if file.is_file():
        return template_id(file.read_text(encoding="utf-8", errors="replace"))
    if not (root / "tokenizer_config.json").is_file():
        return None
    config = _json(root / "tokenizer_config.json")
    found = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(found, list):
        found = {one["name"]: one["template"] for one in found if isinstance(one, dict)}
    return template_id(found)


def checkpoint_digest(directory: str | PathLike[str]) -> str:
    """The digest of a model directory, 32 hex digits; its split into safetensors files is ignored.

    Raises:
        CheckpointError: There is no config, there are no safetensors files, or one is broken.
    """
    root = Path(directory)
    config = _json(root / "config.json")
    if not isinstance(config, dict):
        _refuse(root / "config.json", "it is not a JSON object")
    total = hashlib.blake2b(digest_size=16, person=_PERSON)
    kept = {name: value for name, value in config.items() if name not in _INCIDENTAL}
    total.update(_canonical(kept))
    tensors = _tensors(root)
    count = max(1, min(_MAX_SAMPLES, _MAX_READS // len(tensors)))
    try:
        for name, tensor in sorted(tensors.items()):
            total.update(_canonical([name, tensor.dtype, tensor.shape]))
            for piece in _samples(tensor, count):
                total.update(piece)
    except OSError as error:
        _refuse(root, error.strerror or str(error))
    return total.hexdigest()


def weights_digest(directory: str | PathLike[str]) -> str:
    """The digest of all bytes of a model directory's config, weights and code, 32 hex digits.

    For KV that outlives the process: `checkpoint_digest` does not see some rows that were trained.
    It reads all weights.

    Raises:
        CheckpointError: As for `checkpoint_digest`.
    """
    root = Path(directory)
    total = hashlib.blake2b(digest_size=16, person=b"kvtrie.whole.1")
    total.update(checkpoint_digest(root).encode())
    try:
        for file in (*weight_files(root), *sorted(root.glob("*.py"))):
            with file.open("rb") as stream:
                total.update(hashlib.file_digest(stream, "blake2b").digest())
    except OSError as error:
        _refuse(root, error.strerror or str(error))
    return total.hexdigest()


def settings_digest(config: PretrainedConfig) -> str:
    """The digest of a config as it is used, 32 hex digits: whatever file or override it is of."""
    kept = {name: value for name, value in config.to_dict().items() if name not in _INCIDENTAL}
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"kvtrie.conf.1").hexdigest()


def _tensors(root: Path) -> dict[str, _Tensor]:
    found: dict[str, _Tensor] = {}
    for file in weight_files(root):
        for name, tensor in _header(file):
            if name in found:
                _refuse(file, f"tensor {name!r} is in {found[name].file.name} as well")
            found[name] = tensor
    if not found:
        _refuse(root, "its safetensors files have no tensors")
    return found


def weight_files(root: Path) -> list[Path]:
    """The safetensors files of a model directory that hold its weights.

    Raises:
        CheckpointError: There are none, or their index is broken.
    """
    # Some directories have a second copy of the weights, under other names.
    if (root / _INDEX).is_file():
        index = _json(root / _INDEX)
        names = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(names, dict):
            _refuse(root / _INDEX, "it has no weight_map")
        parts = {str(name) for name in names.values()}
        outside = sorted(name for name in parts if Path(name).name != name)
        if outside:
            _refuse(root / _INDEX, f"it names {outside[0]!r}, which is outside of the directory")
        return [root / name for name in sorted(parts)]
    if (root / "model.safetensors").is_file():
        return [root / "model.safetensors"]
    files = sorted(root.glob("*.safetensors"))
    if not files:
        _refuse(root, "there are no safetensors files")
    return files


def _header(file: Path) -> Iterator[tuple[str, _Tensor]]:
    try:
        total = file.stat().st_size
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if total < 8 or size > min(_MAX_HEADER, total - 8):
                _refuse(file, f"it has {total} bytes, but its header should have {size}")
            raw = stream.read(size)
    except OSError as error:
        _refuse(file, error.strerror or str(error))
    entries = _parsed(raw, file)
    if not isinstance(entries, dict):
        _refuse(file, "its header is not a JSON object")
    room = total - 8 - size
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        try:
            start, end = (int(at) for at in entry["data_offsets"])
            dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        except (KeyError, TypeError, ValueError):
            _refuse(file, f"its header has no offsets of {name!r}")
        if not 0 <= start <= end <= room:
            _refuse(file, f"{name!r} should be at [{start}, {end}) of {room} bytes")
        yield name, _Tensor(file, dtype, shape, 8 + size + start, end - start)


def _samples(tensor: _Tensor, count: int) -> Iterator[bytes]:
    """Pieces at even distances, including the first and the last bytes."""
    last = max(0, tensor.size - _SAMPLE)
    places = sorted({last * number // max(1, count - 1) for number in range(count)})
    descriptor = os.open(tensor.file, os.O_RDONLY)
    try:
        for place in places:
            yield os.pread(descriptor, min(_SAMPLE, tensor.size), tensor.start + place)
    finally:
        os.close(descriptor)


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _json(file: Path) -> Any:  # noqa: ANN401 - any JSON
    try:
        with file.open("rb") as stream:
            raw = stream.read(_MAX_JSON + 1)
    except OSError as error:
        _refuse(file, error.strerror or str(error))
    if len(raw) > _MAX_JSON:
        _refuse(file, f"it has more than {_MAX_JSON} bytes")
    return _parsed(raw, file)


def _parsed(raw: bytes, file: Path) -> Any:  # noqa: ANN401 - any JSON
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        _refuse(file, f"it is not JSON ({type(error).__name__})")


def _refuse(where: Path, why: str) -> NoReturn:
    msg = f"{where}: cannot identify the checkpoint: {why}"
    raise CheckpointError(msg)
