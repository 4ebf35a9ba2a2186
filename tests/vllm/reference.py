"""What the model itself computes, without any engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Reference:
    def __init__(self, model: Path) -> None:
        kind = transformers.AutoModelForCausalLM
        self._model = kind.from_pretrained(model, dtype=torch.float32).eval()

    def gap(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """How far the answer's tokens are from the most likely ones, in logits: 0 for greedy."""
        if not answer:
            return 0.0
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            logits = self._model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        said = logits[torch.arange(len(answer)), torch.tensor(list(answer))]
        return float((logits.amax(-1) - said).max())

    def logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Log probabilities by which each answer token was chosen: ``[answer, vocabulary]``."""
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            logits = self._model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        rows: torch.Tensor = logits.log_softmax(-1)
        return rows

    def kv(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all tokens: ``[layers, tokens, heads, channels]``."""
        with torch.no_grad():
            cache = self._model(torch.tensor([list(tokens)]), use_cache=True).past_key_values
        k = torch.stack([layer.keys[0].transpose(0, 1) for layer in cache.layers])
        return k, torch.stack([layer.values[0].transpose(0, 1) for layer in cache.layers])
