"""The directories of the small models that are trained on the recall task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtrie import demo

if TYPE_CHECKING:
    from pathlib import Path

KINDS: Final = ("gqa", "partial", "mla")
"""Kinds of attention with a small model."""


def model_path(kind: str) -> Path:
    """The directory of a small model, for transformers.

    Args:
        kind: One of ``KINDS``.

    Returns:
        A directory with config, weights, tokenizer, chat template and model card.

    Raises:
        ValueError: There is no such model.
        FileNotFoundError: The package ``kvtrie-demo-models`` is not installed.

    Example:
        >>> from kvtrie.calibrate import shipped
        >>> (shipped.model_path("gqa") / "config.json").is_file()
        True
    """
    if kind not in KINDS:
        msg = f"model_path: no model is shipped for {kind!r}, only for {', '.join(KINDS)}"
        raise ValueError(msg)
    return demo.model_path(kind)
