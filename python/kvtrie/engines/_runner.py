"""Runs a model over positions of a sequence with a block table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvtrie.engines._paged_cache import PagedCache
from kvtrie.engines._probe import forward_inputs

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from kvtrie._core import TokenSequence
    from kvtrie.pool.kv_pool import KVPool


class Runner:
    """A model and the pool of its KV."""

    def __init__(self, model: PreTrainedModel, pool: KVPool) -> None:
        self._model = model
        self._pool = pool
        self._inputs = forward_inputs(model)

    def run(
        self, seq: TokenSequence, table: NDArray[np.int32], start: int, end: int
    ) -> torch.Tensor:
        """Compute the KV of ``[start, end)`` into a table that has all KV before ``start``.

        Returns the last position's logits, float32, on the CPU.
        """
        device = self._pool.device
        cache = PagedCache(self._pool, table, start, end)
        ids = torch.from_numpy(seq[start:end].astype(np.int64)).to(device).unsqueeze(0)
        options: dict[str, Any] = {}
        if "position_ids" in self._inputs:
            options["position_ids"] = torch.arange(start, end, device=device).unsqueeze(0)
        if "cache_position" in self._inputs:
            options["cache_position"] = torch.arange(start, end, device=device)
        if "logits_to_keep" in self._inputs:
            options["logits_to_keep"] = 1
        with torch.inference_mode():
            out = self._model(input_ids=ids, past_key_values=cache, use_cache=True, **options)
        cache.check_written()
        row: torch.Tensor = out.logits[0, -1].float().cpu()
        return row
