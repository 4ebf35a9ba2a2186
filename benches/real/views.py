"""What a policy sees of a case, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from real.plans import Assembled
    from real.reader import Kept, Reader


@dataclass(frozen=True, slots=True)
class View:
    """What a policy may look at.

    Attributes:
        reader: The model.
        plan: The prompt's KV, with moved runs rotated.
        gaps: KV of all tokens after the gaps were computed over ``plan``, and nothing else.
        truth: KV of the prompt under full recomputation: only what knows it may choose by it.
        received: For each token, the share of attention it drew in the context it comes from.
        moved_end: Where the last message starts.
        seed: Of random choices.
        contexts: The cached sequences.
    """

    reader: Reader
    plan: Assembled
    gaps: Kept
    truth: Kept
    received: torch.Tensor
    moved_end: int
    seed: int
    contexts: tuple[tuple[int, ...], ...] = ()

    @property
    def num_moved(self) -> int:
        return int(self.plan.is_moved.sum())

    def budget(self, share: float) -> int:
        return round(share * self.num_moved)


@dataclass(frozen=True, slots=True)
class Choice:
    """Tokens to compute in addition to the gaps, and what it cost to find them, in tokens."""

    chosen: torch.Tensor
    extra: float = 0.0


def top(scores: torch.Tensor, allowed: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` allowed tokens with the highest scores."""
    chosen = torch.zeros_like(allowed)
    count = min(count, int(allowed.sum()))
    chosen[scores.float().masked_fill(~allowed, float("-inf")).topk(count).indices] = True
    return chosen


def to_middle(view: View) -> float:
    """What it costs to know the middle layer's keys of the gaps, in tokens: half of their pass."""
    return int(view.plan.is_computed.sum()) * view.reader.middle / view.reader.num_layers
