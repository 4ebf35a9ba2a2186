"""Runs replies through a model: in full, or over a pool that a policy fills."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import torch

from kvtrie._core import (
    BlockAllocator,
    Namespace,
    RadixIndex,
    SequenceLedger,
    TokenSequence,
)
from kvtrie.calibrate.policies import LEAST_RUN
from kvtrie.engines._lease import Lease
from kvtrie.engines._paged_cache import PagedCache
from kvtrie.engines._probe import check_model, checked_rope, forward_inputs
from kvtrie.engines._store import Store
from kvtrie.pool.kv_pool import KVPool
from kvtrie.pool.layout import KVLayout

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from kvtrie.calibrate._steps import Step
    from kvtrie.calibrate.policies import Policy

_SESSION: Final = "calibrate"


@dataclass(frozen=True, slots=True)
class TokenSources:
    """The sources of a prompt's KV, in tokens."""

    exact: int = 0
    moved: int = 0
    computed: int = 0


class Model:
    """A loaded model, with the layout and rotation of its KV."""

    def __init__(self, model: PreTrainedModel, block_size: int) -> None:
        self.model = model
        self.layout = KVLayout.from_config(model.config, block_size=block_size, dtype=model.dtype)
        check_model(model, self.layout)
        self.inputs = forward_inputs(model)
        self.rope = checked_rope(model, self.layout)

    def pool(self, num_tokens: int) -> KVPool:
        num_blocks = -(-num_tokens // self.layout.block_size)
        return KVPool(self.layout, self.rope, num_blocks=num_blocks, device=self.model.device)

    def whole(self, step: Step) -> torch.Tensor:
        """Logits that predict each token of a reply, by one pass without a cache.

        ``[len(step.reply), vocabulary]``, in the model's dtype, on its device.
        """
        ids = torch.tensor([step.prompt + step.reply[:-1]], device=self.model.device)
        with torch.inference_mode():
            out = self.model(input_ids=ids, use_cache=False, **self._keep(len(step.reply)))
        rows: torch.Tensor = out.logits[0, -len(step.reply) :]
        return rows

    def paged(
        self,
        pool: KVPool,
        seq: TokenSequence,
        table: NDArray[np.int32],
        start: int,
        end: int,
        num_logits: int = 1,
    ) -> torch.Tensor:
        """Compute ``[start, end)`` into a table; returns the last ``num_logits`` rows of logits."""
        device = self.model.device
        cache = PagedCache(pool, table, [(start, end)])
        ids = torch.from_numpy(seq[start:end].astype(np.int64)).to(device).unsqueeze(0)
        options = self._keep(num_logits)
        if "position_ids" in self.inputs:
            options["position_ids"] = torch.arange(start, end, device=device).unsqueeze(0)
        if "cache_position" in self.inputs:
            options["cache_position"] = torch.arange(start, end, device=device)
        with torch.inference_mode():
            out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, **options)
        cache.check_written()
        rows: torch.Tensor = out.logits[0, -num_logits:]
        return rows

    def _keep(self, num_logits: int) -> dict[str, Any]:
        return {"logits_to_keep": num_logits} if "logits_to_keep" in self.inputs else {}


class _Copier:
    """A pool that rotates K in moves only if the policy says so."""

    def __init__(self, pool: KVPool, *, rotates: bool) -> None:
        self._pool = pool
        self._rotates = rotates

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - everything else is the pool's
        return getattr(self._pool, name)

    def apply(self, moves: NDArray[Any]) -> None:
        if not self._rotates:
            moves = moves.copy()
            moves["delta"] = 0
        self._pool.apply(moves)


class Replay:
    """One conversation under one policy, reply by reply, over its own index and pool.

    Nothing else may use the pool meanwhile; its contents do not matter.
    """

    def __init__(self, model: Model, pool: KVPool, policy: Policy) -> None:
        self._model = model
        self._policy = policy
        num_blocks = pool.num_blocks
        copier = _Copier(pool, rotates=policy.mode != "unrotated")
        self._store = Store(
            index=RadixIndex(
                num_blocks,
                model.layout.block_size,
                min_run=policy.reuse.min_run or LEAST_RUN,
                moved_runs=policy.reuse.approximate,
                # Makes two runs of one calibration equal.
                seed=0,
            ),
            allocator=BlockAllocator(num_blocks),
            pool=cast("KVPool", copier),
            ledger=SequenceLedger(model.layout.block_size),
        )
        self._space = Namespace(model="calibrate", salt="calibrate")

    def step(self, step: Step) -> tuple[torch.Tensor, TokenSources]:
        """Build the prompt's KV, write the given reply, and keep both.

        Returns logits that predict each token of the reply, and the sources of the prompt's KV.
        """
        prompt = step.dropped if self._policy.mode == "drop" else step.prompt
        seq = TokenSequence(np.array(prompt, dtype=np.uint32), self._space)
        # The index has one conversation.
        lease = Lease(self._store, seq, self._policy.reuse, session=_SESSION)
        with contextlib.closing(lease):
            plan = lease.plan
            usage = TokenSources(plan.num_exact, plan.num_approximate, plan.num_compute)
            start, end = lease.next_range(len(seq))
            while end < len(seq):
                lease.issue(end)
                self._model.paged(self._store.pool, seq, lease.table, start, end)
                lease.advance(end)
                start, end = lease.next_range(len(seq))
            # The reply is known: one pass computes the end of the prompt and the whole reply.
            lease.append(np.array(step.reply[:-1], dtype=np.uint32))
            lease.issue(len(seq))
            pool, table = self._store.pool, lease.table
            rows = self._model.paged(pool, seq, table, start, len(seq), len(step.reply))
            lease.advance(len(seq))
        return rows, usage


def tokens_needed(steps: list[Step], block_size: int) -> int:
    return sum(len(step.prompt) + len(step.reply) + block_size for step in steps)


def divergence(full: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """KL divergence of next-token distributions from those of full recomputation, in nats.

    Logits are ``[positions, vocabulary]``. Returns ``[positions]``, float64, on the CPU.
    """
    reference, own = (part.double().log_softmax(-1) for part in (full, rows))
    return (reference.exp() * (reference - own)).sum(-1).clamp_min(0).cpu()
