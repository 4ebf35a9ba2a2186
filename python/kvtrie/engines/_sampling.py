"""Picks the next token from one row of logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are picked: greedy at temperature 0, else from the truncated distribution.

    See `Options` for the fields. A value out of range is a ``ValueError``.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            msg = f"temperature must be a finite number >= 0, not {self.temperature}"
            raise ValueError(msg)
        if self.top_k is not None and self.top_k < 1:
            msg = f"top_k must be at least 1 (or None), not {self.top_k}"
            raise ValueError(msg)
        if not 0 < self.top_p <= 1:
            msg = f"top_p must be in (0, 1], not {self.top_p}"
            raise ValueError(msg)


def pick(logits: torch.Tensor, sampling: Sampling, rng: torch.Generator) -> int:
    """Pick one token from a float32 row, on the CPU, so that a seed gives the same on every device.

    Greedy picking does not advance ``rng``, a CPU generator.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k is not None:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    # The warpers read no ids.
    ids: Any = None
    scores: Any = logits[None]
    scores = warpers(ids, scores)
    return int(torch.multinomial(scores[0].softmax(dim=-1), 1, generator=rng))
