"""Runs replies through a model: in full, or over a pool that a policy fills."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import torch

from kvtrie._core import (
    BlockAllocator,
    LayoutError,
    Namespace,
    RadixIndex,
    SequenceLedger,
    TokenSequence,
)
from kvtrie.engines._coding import KVCoding, coded
from kvtrie.engines._lease import Lease, most_hops
from kvtrie.engines._paged_cache import PagedCache
from kvtrie.engines._probe import check_model, checked_rope, context_of, forward_inputs
from kvtrie.engines._repair import Repair
from kvtrie.engines._runner import Runner
from kvtrie.engines._store import Store
from kvtrie.gates import terms
from kvtrie.kernels import reference
from kvtrie.pool.kv_pool import KVPool
from kvtrie.pool.layout import KVLayout
from kvtrie.repair.probe import LayerProbe
from kvtrie.repair.records import Records

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from kvtrie._core import Item, ReusePlan
    from kvtrie.calibrate._steps import Step
    from kvtrie.calibrate.policies import Policy
    from kvtrie.gates import Terms

MOST_TOKENS: Final = 16
"""Tokens of the model's own reply that are compared, at most."""
_APPROXIMATE: Final = 1


@dataclass(frozen=True, slots=True)
class TokenSources:
    """The sources of a prompt's KV, in tokens."""

    exact: int = 0
    moved: int = 0
    computed: int = 0


class Model:
    """A loaded model, with the layout and rotation of its KV.

    With ``kv_dtype``, K and V are codes of this type in every pass, those of the reference
    included: it is what the same engine computes without reuse.

    Attributes:
        coding: How K and V become codes; None for floats.
        most_tokens: Of a prompt with its reply, as the generator takes them; None: no limit.
    """

    def __init__(
        self, model: PreTrainedModel, block_size: int, kv_dtype: str | None = None
    ) -> None:
        self.model = model
        # As the generator: under LongRoPE and dynamic NTK, prompts of the short regime alone.
        self.layout = KVLayout.from_config(
            model.config, block_size=block_size, dtype=model.dtype, regime="short"
        )
        check_model(model, self.layout)
        self.most_tokens = context_of(model)
        self.inputs = forward_inputs(model)
        self.rope = checked_rope(model, self.layout)
        self.coding: KVCoding | None = None
        if kv_dtype is not None:
            self.layout, self.coding = coded(model, self.layout, kv_dtype, "calibrate")

    @cached_property
    def probe(self) -> LayerProbe:
        """The probe that an engine with records has; LayoutError if the model has none."""
        if self.layout.v_head_dim == 0:
            msg = "records are of heads with K and V; this model caches latent rows"
            raise LayoutError(msg)
        if self.coding is not None:
            msg = (
                f"a policy that chooses by records needs KV in floats, not {self.layout.kv_dtype}: "
                "measure fronts"
            )
            raise LayoutError(msg)
        if not self.is_sparse:
            msg = "this model computes gap by gap, so no engine chooses by records: measure fronts"
            raise LayoutError(msg)
        return LayerProbe(self.model)

    @cached_property
    def is_sparse(self) -> bool:
        """Whether one pass may compute several ranges."""
        pool = self.pool(self.layout.block_size)
        return Runner(self.model, pool, coding=self.coding).is_sparse

    def pool(self, num_tokens: int) -> KVPool:
        num_blocks = -(-num_tokens // self.layout.block_size)
        return KVPool(self.layout, self.rope, num_blocks=num_blocks, device=self.model.device)

    def records(self, pool: KVPool) -> Records:
        """Records of a pool, for the probe."""
        return Records(
            pool.num_blocks,
            self.layout.block_size,
            self.probe.hidden,
            layer=self.probe.layer,
            dtype=pool.dtype,
            device=pool.device,
        )

    def whole(self, prompt: list[int], reply: list[int]) -> torch.Tensor:
        """Logits that predict each token of a reply, by one pass without reuse.

        ``[len(reply), vocabulary]``, in the model's dtype, on its device.
        """
        if self.coding is not None:
            whole = np.array(prompt + reply[:-1], dtype=np.int64)
            pool = self.pool(len(whole))
            return self.paged(pool, whole, _table(pool), 0, len(whole), len(reply))
        ids = torch.tensor([prompt + reply[:-1]], device=self.model.device)
        with torch.inference_mode():
            out = self.model(input_ids=ids, use_cache=False, **self._keep(len(reply)))
        rows: torch.Tensor = out.logits[0, -len(reply) :]
        return rows

    def paged(
        self,
        pool: KVPool,
        seq: TokenSequence | NDArray[np.int64],
        table: NDArray[np.int32],
        start: int,
        end: int,
        num_logits: int = 1,
    ) -> torch.Tensor:
        """Compute ``[start, end)`` into a table; returns the last ``num_logits`` rows of logits."""
        device = self.model.device
        cache = PagedCache(pool, table, [(start, end)], coding=self.coding)
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

    def greedy(self, prompt: list[int], most: int, eos: frozenset[int]) -> Reference:
        """The model's own reply under full recomputation, of at most ``most`` tokens."""
        if self.coding is not None:
            return self._greedy_of_codes(prompt, most, eos)
        device = self.model.device
        ids = torch.tensor([prompt], device=device)
        cache: Any = None
        rows: list[torch.Tensor] = []
        reply: list[int] = []
        with torch.inference_mode():
            while len(reply) < most and not (reply and reply[-1] in eos):
                out = self.model(
                    input_ids=ids, past_key_values=cache, use_cache=True, **self._keep(1)
                )
                cache = out.past_key_values
                rows.append(out.logits[0, -1])
                reply.append(int(rows[-1].argmax()))
                ids = torch.tensor([[reply[-1]]], device=device)
        return Reference(reply, torch.stack(rows))

    def _greedy_of_codes(self, prompt: list[int], most: int, eos: frozenset[int]) -> Reference:
        ids = np.array(prompt, dtype=np.int64)
        pool = self.pool(len(ids) + most)
        rows: list[torch.Tensor] = []
        reply: list[int] = []
        start = 0
        while len(reply) < most and not (reply and reply[-1] in eos):
            rows.append(self.paged(pool, ids, _table(pool), start, len(ids))[-1])
            reply.append(int(rows[-1].argmax()))
            start, ids = len(ids), np.append(ids, reply[-1])
        return Reference(reply, torch.stack(rows))


def _table(pool: KVPool) -> NDArray[np.int32]:
    """All blocks of a pool, in order."""
    return np.arange(pool.num_blocks, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Reference:
    """A reply, and the logits of full recomputation that predict each of its tokens."""

    reply: list[int]
    rows: torch.Tensor

    def sure(self, margin: float) -> int:
        """The number of tokens before the first near tie.

        At a near tie, the two likeliest tokens are within ``margin`` nats.
        """
        best = self.rows.float().topk(2).values
        near = (best[:, 0] - best[:, 1] < margin).nonzero()
        return int(near[0]) if len(near) else len(self.reply)


class _Copier:
    """A pool that rotates K in moves only while ``rotates``."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.rotates = True

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - everything else is the pool's
        return getattr(self.pool, name)

    def apply(self, moves: NDArray[Any], *, hops: int, items: Iterable[Item]) -> None:
        if not self.rotates:
            moves = moves.copy()
            moves["delta"] = 0
        self.pool.apply(moves, hops=hops, items=items)


@dataclass(frozen=True, slots=True)
class Trial:
    """What a policy does to one reply: logits, the sources of the prompt's KV, and its plan."""

    rows: torch.Tensor
    usage: TokenSources
    terms: Terms | None


class Workspace:
    """An index and a pool, in which prompts are tried under policies and kept.

    Nothing else may use the pool meanwhile; its contents do not matter. ``has_records``: it keeps
    what the probe needs.
    """

    def __init__(
        self, model: Model, pool: KVPool, min_run: int, *, has_records: bool = False
    ) -> None:
        self._model = model
        num_blocks = pool.num_blocks
        self._copier = _Copier(pool)
        # The seed makes two runs of one calibration equal.
        index = RadixIndex(num_blocks, model.layout.block_size, min_run=min_run, seed=0)
        self._runner = Runner(model.model, pool, coding=model.coding, is_sparse=model.is_sparse)
        self._records = model.records(pool) if has_records else None
        probe = model.probe if has_records else None
        self._repair = Repair(index, pool, self._runner, probe, self._records)
        self._runner.repair = self._repair
        self._store = Store(
            index=index,
            allocator=BlockAllocator(num_blocks),
            pool=cast("KVPool", self._copier),
            ledger=SequenceLedger(model.layout.block_size),
            repair=self._repair,
        )
        self._space = Namespace(model="calibrate", salt="calibrate")

    def looked_at(self, step: Step, policy: Policy) -> tuple[Terms | None, list[int]]:
        """The terms of a prompt's plan, and the prompt without its approximate tokens."""
        with self._plan(step, policy) as plan:
            segments = plan.segments
            moved = segments[segments["class"] == _APPROXIMATE]
            gone = np.zeros(len(step.prompt), dtype=bool)
            for start, end in moved[["start", "end"]].tolist():
                gone[start:end] = True
            left = np.array(step.prompt)[~gone].tolist()
            return terms(plan), left

    def try_(self, step: Step, reply: list[int], policy: Policy) -> Trial:
        """Build a prompt's KV under a policy and predict each token of a reply; keep nothing.

        A plan that lacks records is not of this policy: it is made again with fronts, as engines
        do, and has no terms.
        """
        store, size = self._store, self._model.layout.block_size
        self._copier.rotates = policy.rotates
        seq = TokenSequence(np.array(step.prompt + reply[:-1], dtype=np.uint32), self._space)
        with contextlib.ExitStack() as stack:
            plan = stack.enter_context(self._plan(step, policy))
            found = terms(plan)
            if self._repair.lacks_records(plan, policy.reuse):
                plan.release()
                policy = replace(policy, reuse=policy.reuse.replace(repair="fronts"))
                plan, found = stack.enter_context(self._plan(step, policy)), None
            needed = -(-len(seq) // size) - len(plan.blocks)
            fresh = store.allocator.allocate(needed, evict_from=store.index)
            self._repair.forget(fresh)
            try:
                table = np.concatenate([plan.blocks, fresh])
                prompt = table[: len(plan.blocks) + plan.num_new_blocks]
                moves = plan.moves(prompt)
                store.pool.apply(moves, hops=most_hops(plan), items=plan.items)
                asked = TokenSequence(seq[: len(step.prompt)], self._space)
                self._repair.apply(plan, policy.reuse, asked, prompt, moves)
                usage = TokenSources(plan.num_exact, plan.num_approximate, plan.num_compute)
                *gaps, (start, _) = plan.gaps.tolist()
                self._compute(seq, table, gaps)
                # The last token of a prompt is always computed: the reply follows in one pass.
                rows = self._model.paged(store.pool, seq, table, start, len(seq), len(reply))
            finally:
                store.allocator.free(fresh)
        return Trial(rows, usage, found)

    def keep(self, step: Step, policy: Policy, like: Workspace | None = None) -> None:
        """Build the KV of a prompt and its given reply under a policy, and cache both.

        ``like`` is a workspace that has cached the same without reuse. Into an empty workspace, its
        KV is copied.
        """
        self._copier.rotates = policy.rotates
        seq = TokenSequence(np.array(step.prompt, dtype=np.uint32), self._space)
        lease = Lease(self._store, seq, policy.reuse, **_scope(step))
        with contextlib.closing(lease):
            lease.append(np.array(step.reply[:-1], dtype=np.uint32))
            if like is not None:
                self._copy(seq, lease, like)
            while not lease.is_computed:
                ranges = lease.next_ranges(len(seq))[: None if self._runner.is_sparse else 1]
                for _, end in ranges:
                    lease.issue(end)
                self._runner.run(seq, lease.table, ranges)
                lease.advance(ranges[-1][1])

    def _copy(self, seq: TokenSequence, lease: Lease, like: Workspace) -> None:
        """Copy whole blocks of a sequence instead of computing them."""
        blocks = like._store.index.lookup(seq, touch=False).blocks
        end = len(blocks) * self._model.layout.block_size
        lease.issue(end)
        ours, theirs = self._copier.pool, like._copier.pool
        at, to = theirs.slots(blocks, 0, end), ours.slots(lease.table, 0, end, unique=True)
        for new, old in zip((*ours.k, *ours.v), (*theirs.k, *theirs.v), strict=True):
            if new is not None and old is not None:
                reference.scatter_rows(new, to, reference.gather_rows(old, at))
        if self._records is not None and like._records is not None:
            rows = like._records.read(theirs.slots(blocks, 0, end))
            if rows is not None:
                self._records.write(ours.slots(lease.table, 0, end), *rows)
        lease.advance(end)

    def _compute(
        self, seq: TokenSequence, table: NDArray[np.int32], gaps: list[tuple[int, int]]
    ) -> None:
        """Compute gaps into a table: in one pass, where the model can."""
        for some in [gaps] if self._runner.is_sparse else [[one] for one in gaps]:
            if some:
                self._runner.run(seq, table, some)

    def _plan(self, step: Step, policy: Policy) -> ReusePlan:
        seq = TokenSequence(np.array(step.prompt, dtype=np.uint32), self._space)
        return self._store.index.plan(seq, policy.reuse, keep_last=1, **_scope(step))


def _scope(step: Step) -> dict[str, Any]:
    """The conversation of a step, and where its last message begins, as engines give them."""
    return {"session": f"conversation {step.conversation}", "moved_end": step.moved_end}


def tokens_needed(steps: list[Step], block_size: int) -> int:
    longest = max(len(step.prompt) + len(step.reply) for step in steps) + MOST_TOKENS
    return longest + sum(len(step.prompt) + len(step.reply) + block_size for step in steps)


def divergence(full: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """KL divergence of next-token distributions from those of full recomputation, in nats.

    Logits are ``[positions, vocabulary]``. Returns ``[positions]``, float64, on the CPU.
    """
    reference, own = (part.double().log_softmax(-1) for part in (full, rows))
    return (reference.exp() * (reference - own)).sum(-1).clamp_min(0).cpu()
