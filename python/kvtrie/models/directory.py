"""Finds model directories, before anything heavy is imported or read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvtrie.models.fingerprint import CheckpointError

if TYPE_CHECKING:
    from os import PathLike


def checked_model_dir(path: str | PathLike[str]) -> Path:
    """The path as a directory with a ``config.json``, or a FileNotFoundError."""
    directory = Path(path)
    if not directory.is_dir():
        msg = f"{directory} is not a model directory (models are not downloaded)"
        raise FileNotFoundError(msg)
    if not (directory / "config.json").is_file():
        msg = f"{directory} is not a model directory: it has no config.json"
        raise FileNotFoundError(msg)
    return directory


def directory_of(name: str, revision: str | None = None, cache_dir: str | None = None) -> Path:
    """The directory of a model that is named by it, or by its name on the hub; nothing is fetched.

    Args:
        name: A directory, or a name in the hub's cache.
        revision: Of a name.
        cache_dir: Of the hub; None for its own choice.

    Raises:
        CheckpointError: It is neither.
    """
    directory = Path(name)
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - its import takes half a second

    try:
        found = snapshot_download(
            name,
            revision=revision,
            cache_dir=cache_dir,
            local_files_only=True,
            allow_patterns=[
                *("config.json", "*.safetensors", "*.safetensors.index.json"),
                *("tokenizer_config.json", "chat_template.jinja"),
            ],
        )
    except Exception as error:
        msg = f"{name!r} is not a directory, and not in the hub's cache"
        raise CheckpointError(msg) from error
    return Path(found)
