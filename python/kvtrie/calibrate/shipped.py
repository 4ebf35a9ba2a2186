"""The directories of the small models that are trained on the recall task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtrie import demo

if TYPE_CHECKING:
    from pathlib import Path

KINDS: Final = ("gqa", "partial", "mla")
"""Kinds of attention with a small model."""


def model_path(kind: str) -> Path:
    """The directory of a small model, with config, weights, tokenizer, template and model card.

    Args:
        kind: One of ``KINDS``.

    Raises:
        ValueError: There is no such model.
        FileNotFoundError: The package ``kvtrie-demo-models`` is not installed.
    """
    if kind not in KINDS:
        msg = f"model_path: no model is shipped for {kind!r}, only for {', '.join(KINDS)}"
        raise ValueError(msg)
    return demo.model_path(kind)
