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
        keys: For each of them K of the probed layer, ``[tokens, heads, dim]``.
    """

    reader: Reader
    plan: Assembled
    gaps: Kept
    truth: Kept
    received: torch.Tensor
    moved_end: int
    seed: int
    contexts: tuple[tuple[int, ...], ...] = ()
    keys: tuple[torch.Tensor, ...] = ()

    @property
    def num_moved(self) -> int:
        return int(self.plan.is_moved.sum())

    def context(self, start: int, end: int, old: int) -> int:
        """The number of the cached sequence that a run is copied from."""
        ids = tuple(self.plan.ids[start:end].tolist())
        length = end - start
        return next(n for n, one in enumerate(self.contexts) if one[old : old + length] == ids)

    def kept(self, context: int, before: int) -> torch.Tensor:
        """Which tokens of a cached sequence are in the prompt too, ahead of a position."""
        found = torch.zeros(len(self.contexts[context]), dtype=torch.bool)
        ids = self.contexts[context]
        exact = self.plan.ids[: int((self.plan.source == 0).sum())].tolist()
        same = next((n for n, (a, b) in enumerate(zip(exact, ids, strict=False)) if a != b), None)
        found[: min(len(exact), len(ids)) if same is None else same] = True
        for start, end, old in self.plan.runs:
            if start < before and self.context(start, end, old) == context:
                found[old : old + end - start] = True
        return found

    def budget(self, share: float) -> int:
        return round(share * self.num_moved)


@dataclass(frozen=True, slots=True)
class Choice:
    """Tokens to compute in addition to the gaps.

    Attributes:
        chosen: bool, per token of the prompt.
        extra: What it cost to find them, in tokens.
        kv: What is used instead of the plan's K and V, if anything is.
        rebuilt: bool, per token of the prompt: windows are not carried with what moves, and these
            tokens are computed for layers with a window. None: windows are carried.
    """

    chosen: torch.Tensor
    extra: float = 0.0
    kv: tuple[torch.Tensor, torch.Tensor] | None = None
    rebuilt: torch.Tensor | None = None


def top(scores: torch.Tensor, allowed: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` allowed tokens with the highest scores."""
    chosen = torch.zeros_like(allowed)
    count = min(count, int(allowed.sum()))
    chosen[scores.float().masked_fill(~allowed, float("-inf")).topk(count).indices] = True
    return chosen


def to_probed(view: View, end: int) -> float:
    """What it costs to know the probed layer's keys of gaps before ``end``, in tokens."""
    return int(view.plan.is_computed[:end].sum()) * view.reader.probed / view.reader.num_layers
