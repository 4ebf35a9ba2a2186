"""Checks that a path is a model directory before anything heavy is imported or read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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
