"""The directories of the shipped small models, trained on the recall task."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Final

KINDS: Final = ("gqa", "partial", "mla")
"""Kinds of attention with a shipped model."""


def model_path(kind: str) -> Path:
    """The directory of a shipped model, with config, weights, tokenizer, template and model card.

    Args:
        kind: One of ``KINDS``.

    Raises:
        ValueError: There is no such model.
    """
    if kind not in KINDS:
        msg = f"model_path: no model is shipped for {kind!r}, only for {', '.join(KINDS)}"
        raise ValueError(msg)
    return Path(str(files("kvtrie.calibrate").joinpath("models", kind)))
