"""Chooses tokens of a plan to compute, as its policy says, and keeps records for the probe."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from kvtrie._core import LayoutError
from kvtrie.kernels import reference
from kvtrie.models.vision import TEXT_OF_VISION
from kvtrie.repair.choice import Adaptive, Moved, Probed, as_ranges
from kvtrie.repair.ngrams import Ngrams
from kvtrie.repair.probe import LayerProbe
from kvtrie.repair.records import Records

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from kvtrie._core import RadixIndex, ReusePlan, ReusePolicy, TokenSequence
    from kvtrie.engines._runner import Runner
    from kvtrie.pool.kv_pool import KVPool
    from kvtrie.repair.choice import Chooser

# The last tokens to compute are those of a question, at most these.
_QUESTION: Final = 64

# Tokens to compute before the last moved one that the probe runs through the layers up to its own.
_MOST_SEEN: Final = 1024

BY_RECORDS: Final = ("probe", "question", "adaptive")
"""Ways to choose tokens that need records of them."""


@dataclass(slots=True)
class RepairCounts:
    """How tokens of moved runs were chosen.

    Attributes:
        chosen: Plans whose policy leaves the choice to the engine, and got what it asks for.
        without_records: Plans that were made again without a choice by records, because a token has
            none, they are of another layer, size or element type, or too much before the last moved
            token is to compute anyway.
    """

    chosen: int = 0
    without_records: int = 0


class Repair:
    """Repairs the plans of one engine."""

    def __init__(
        self,
        index: RadixIndex,
        pool: KVPool,
        runner: Runner,
        probe: LayerProbe | None = None,
        records: Records | None = None,
    ) -> None:
        self._index = index
        self._pool = pool
        self._runner = runner
        self._probe = probe
        self._records = records
        self.counts = RepairCounts()

    @contextlib.contextmanager
    def recording(self, slots: torch.Tensor) -> Iterator[None]:
        """Keep the records of what a pass writes to these slots."""
        if self._probe is None or self._records is None:
            yield
            return
        with self._probe.seeing() as seen:
            yield
        if seen.h is not None and seen.out is not None and self._fits(self._probe, self._records):
            self._records.write(slots, seen.h, seen.out)

    def forget(self, blocks: NDArray[np.int32]) -> None:
        """Forget the records of blocks that have a new owner."""
        if self._records is not None:
            self._records.forget(blocks)

    def lacks_records(self, plan: ReusePlan, policy: ReusePolicy) -> bool:
        """Whether the policy chooses by records, and the plan moves what it cannot choose from.

        Such a plan is to be made again, under a policy that needs no records: what another choice
        computes must not pass for KV of this policy.

        Args:
            plan: A plan without copies.
            policy: Its policy.
        """
        if policy.repair not in BY_RECORDS or not policy.recompute_share:
            return False
        moved = Moved.of(plan, np.empty(0, dtype=np.int64), self._pool.layout.block_size)
        if not len(moved.numbers):
            return False
        probe, records = self._probe, self._records
        if probe is None or records is None or not self._fits(probe, records):
            return True
        if not self._runner.is_sparse or not records.has(plan.source_blocks):
            return True
        # The probe attends to what is before the last moved token; a question is after it.
        end = None if policy.repair == "question" else int(moved.runs[-1][1])
        return sum(last - first for first, last in _gaps(moved, end)) > _MOST_SEEN

    def apply(
        self,
        plan: ReusePlan,
        policy: ReusePolicy,
        seq: TokenSequence,
        table: NDArray[np.int32],
        moves: NDArray[np.void],
    ) -> None:
        """Move records with KV that was copied; have the plan compute what the policy asks for.

        The plan does not lack records.
        """
        if self._records is not None:
            self._records.move(moves)
        if policy.repair == "fronts" or policy.recompute_share == 0:
            return
        tokens = seq[0 : len(seq)].astype(np.int64)
        moved = Moved.of(plan, tokens, self._pool.layout.block_size)
        moved = Moved(
            moved.tokens, moved.segments, moved.num_in_place, self._contexts(moved, moves)
        )
        if not len(moved.runs):
            return
        chooser = self._chooser(policy, moved, table)
        self.counts.chosen += 1
        plan.recompute(chooser.choose(moved, policy.recompute_share))

    def _contexts(self, moved: Moved, moves: NDArray[np.void]) -> _Contexts:
        return _Contexts(self._index, moved, moves, self._pool.layout.block_size)

    def _chooser(self, policy: ReusePolicy, moved: Moved, table: NDArray[np.int32]) -> Chooser:
        if policy.repair == "ngrams":
            return Ngrams()
        probe, records, positions = self._probe, self._records, moved.positions
        kept = None if records is None else records.read(_slots(self._pool, table, positions))
        if probe is None or kept is None:
            msg = f"repair={policy.repair!r}: a moved token has no record"
            raise LayoutError(msg)
        end = len(moved.tokens) if policy.repair == "question" else int(positions[-1]) + 1
        gaps = _gaps(moved, end)
        with probe.seeing(stop=True) as seen:
            if gaps:
                self._runner.begin(moved.tokens, table, gaps)
        rows = [
            self._rows(layer[probe.layer], table, end) for layer in (self._pool.k, self._pool.v)
        ]
        device = self._pool.device
        at = torch.from_numpy(positions).to(device)
        scores = probe.scores(*kept, at, rows[0], rows[1])
        if policy.repair == "question" and seen.h is not None:
            asked = np.concatenate([np.arange(*gap) for gap in gaps])[-_QUESTION:]
            paid = probe.attention(
                seen.h[-len(asked) :], torch.from_numpy(asked).to(device), rows[0], rows[1]
            )[at]
            # Half of the budget each: the better of the two ranks counts.
            scores = torch.maximum(_ranks(scores), _ranks(paid))
            return _Best(scores.cpu().numpy())
        chooser = Adaptive if policy.repair == "adaptive" else Probed
        return chooser(scores.cpu().numpy())

    def _fits(self, probe: LayerProbe, records: Records) -> bool:
        return (records.layer, records.hidden, records.dtype) == (
            probe.layer,
            probe.hidden,
            self._pool.dtype,
        )

    def _rows(
        self, blocks: torch.Tensor | None, table: NDArray[np.int32], end: int
    ) -> torch.Tensor:
        if blocks is None:
            msg = "a layer without V cannot be probed"
            raise TypeError(msg)
        return reference.gather_blocks(blocks, self._pool.block_ids(table, end))[:end]


class _Best:
    """The tokens of highest score, without fronts."""

    def __init__(self, scores: NDArray[np.float32]) -> None:
        self._scores = scores

    def choose(self, moved: Moved, share: float) -> NDArray[np.int64]:
        positions = moved.positions
        wanted = int(np.ceil(share * len(positions)))
        best = np.argsort(-self._scores, kind="stable")[:wanted]
        return as_ranges(np.sort(positions[best]))


class _Contexts:
    """The path that each moved segment is copied from."""

    def __init__(
        self, index: RadixIndex, moved: Moved, moves: NDArray[np.void], block_size: int
    ) -> None:
        self._index = index
        self._blocks: dict[int, int] = {}
        # Copies are in the order of the segments that are copied.
        ends = np.cumsum(moves["num_tokens"])
        done = 0
        for number, segment in enumerate(moved.segments):
            if segment["class"] != 2 and segment["start"] >= moved.num_in_place:
                done += int(segment["end"] - segment["start"])
                last = moves[int(np.searchsorted(ends, done))]
                slot = int(last["source_slot"] + last["num_tokens"] - 1)
                self._blocks[number] = slot // block_size

    def __call__(self, number: int) -> NDArray[np.uint32] | None:
        return self._index.path_tokens(self._blocks[number])


def _gaps(moved: Moved, end: int | None) -> list[tuple[int, int]]:
    """What a plan computes anyway, as far as it begins before ``end``; None: all of it."""
    return [(first, last) for first, last in moved.gaps.tolist() if end is None or first < end]


def _ranks(scores: torch.Tensor) -> torch.Tensor:
    """0 for the lowest score, up to the number of scores less one."""
    ranks = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
    order = scores.argsort(stable=True)
    ranks[order] = torch.arange(len(scores), dtype=torch.float32, device=scores.device)
    return ranks


def _slots(pool: KVPool, table: NDArray[np.int32], positions: NDArray[np.int64]) -> torch.Tensor:
    slots = pool.slots(table, 0, int(positions[-1]) + 1)
    return slots[torch.from_numpy(positions).to(slots.device)]


def records_of(
    model: PreTrainedModel, pool: KVPool, kind: str | None
) -> tuple[LayerProbe | None, Records | None]:
    """The probe and the records of a `Generator`; see its argument ``records``."""
    if kind is None:
        return None, None
    if model.config.model_type in TEXT_OF_VISION:
        msg = "Generator: records: a layer of a vision model is not probed"
        raise LayoutError(msg)
    if kind not in ("model", "fp8"):
        msg = f"Generator: records must be 'model', 'fp8' or None, not {kind!r}"
        raise ValueError(msg)
    if pool.layout.v_head_dim == 0:
        msg = "Generator: records are of heads with K and V; this model caches latent rows"
        raise LayoutError(msg)
    try:
        probe = LayerProbe(model)
    except LayoutError as error:
        msg = f"Generator: records: {error}"
        raise LayoutError(msg) from error
    return probe, Records(
        pool.num_blocks,
        pool.layout.block_size,
        probe.hidden,
        layer=probe.layer,
        dtype=pool.dtype,
        fp8=kind == "fp8",
        device=pool.device,
    )
