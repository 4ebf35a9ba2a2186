"""The KV of a prompt as kvtrie plans it from contexts that are cached, token by token.

`Shelf` is an index with a pool: contexts go in with their KV, and `Shelf.assemble` returns for a
prompt what a plan gives (in place, copied, moved and rotated by the pool) and what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from kvtrie import COMPUTED, BlockAllocator, Namespace, RadixIndex, ReusePolicy, TokenSequence
from kvtrie.engines._probe import checked_rope  # the rotation that the engine would use
from kvtrie.pool.kv_pool import KVPool
from kvtrie.pool.layout import KVLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvtrie import Imported, ReusePlan
    from kvtrie._core import ComputedSource
    from real.reader import Kept, Reader

BLOCK: Final = 16
MIN_RUN: Final = 16
EXACT, MOVED, COMPUTE = 0, 1, 2

MANY_HOPS: Final = 100
"""More than any row of edits has."""

REUSE: Final = ReusePolicy(max_hops=MANY_HOPS)
"""What every approximate policy of the suite starts from: moved runs of the own conversation."""

REUSE_OTHERS: Final = ReusePolicy(max_hops=MANY_HOPS, scope="namespace")
"""The same for kinds whose text is cached by other conversations."""

SESSION: Final = "own"
"""The id of the conversation that a prompt belongs to."""


_ROPES: dict[int, Any] = {}


def _rope(reader: Reader, layout: KVLayout) -> Any:  # noqa: ANN401 - kvtrie's own type
    """The model's rotation, found by running it, once for each reader."""
    if id(reader) not in _ROPES:
        _ROPES[id(reader)] = checked_rope(reader.model, layout)
    return _ROPES[id(reader)]


@dataclass(frozen=True, slots=True)
class Assembled:
    """A prompt's KV before anything is computed; arrays have an entry per token of the prompt.

    `k`, `v`, `inputs` and `outputs` are on the model's device, the rest on the CPU.

    Attributes:
        ids: The prompt.
        source: The class of each token: exact, moved or to be computed.
        runs: Moved runs as (start, end, position of the source's first token).
        contexts: For each token the slot it came from, or -1.
        k: As in `Kept`; rows of tokens to compute are not meaningful.
        v: Likewise.
        segments: The plan's.
        num_in_place: Tokens in whole blocks that are used where they are.
        inputs: Records of the probed layer, as in `Kept`.
        outputs: Likewise.
    """

    ids: torch.Tensor
    source: torch.Tensor
    runs: tuple[tuple[int, int, int], ...]
    slots: torch.Tensor
    segments: NDArray[Any]
    num_in_place: int
    k: torch.Tensor
    v: torch.Tensor
    inputs: torch.Tensor
    outputs: torch.Tensor

    @property
    def is_moved(self) -> torch.Tensor:
        return self.source == MOVED

    @property
    def is_computed(self) -> torch.Tensor:
        return self.source == COMPUTE


class Shelf:
    """An index, a pool and the records of its tokens."""

    def __init__(self, reader: Reader, num_tokens: int, *, records: bool = True) -> None:
        config = reader.model.config
        dtype = reader.model.dtype
        self.num_blocks = -(-num_tokens // BLOCK) if records else num_tokens // BLOCK + 64
        layout = KVLayout.from_config(config, block_size=BLOCK, dtype=dtype)
        self.index = RadixIndex(self.num_blocks, BLOCK, min_run=MIN_RUN, moved_runs=True, seed=0)
        self.allocator = BlockAllocator(self.num_blocks)
        self._space = Namespace(model="fidelity", salt="fidelity")
        if not records:
            return
        rope = _rope(reader, layout)
        self.pool = KVPool(layout, rope, num_blocks=self.num_blocks, device=reader.device)
        slots = self.num_blocks * BLOCK
        self.received = torch.zeros(slots)
        self.inputs = torch.zeros(slots, config.hidden_size, dtype=dtype, device=reader.device)
        self.outputs = torch.zeros_like(self.inputs)

    def add(
        self,
        ids: Sequence[int],
        kept: Kept,
        source: ComputedSource | Imported = COMPUTED,
        session: str = SESSION,
    ) -> None:
        """Cache the whole blocks of a conversation's sequence."""
        table = self.allocator.allocate(len(ids) // BLOCK)
        self._write(table, ids[: len(table) * BLOCK], kept)
        self._insert(ids, table, source, session)

    def name(self, ids: Sequence[int], session: str = SESSION) -> None:
        """Cache the whole blocks of a sequence without KV, to see what is planned."""
        self._insert(ids, self.allocator.allocate(len(ids) // BLOCK), COMPUTED, session)

    def plan(
        self,
        ids: Sequence[int],
        policy: ReusePolicy,
        moved_end: int,
        session: str | None = SESSION,
    ) -> ReusePlan:
        """The plan of a prompt; without a session, of a request that names no conversation."""
        seq = self.sequence(ids)
        return self.index.plan(seq, policy, session=session, moved_end=moved_end)

    def receive(self, ids: Sequence[int], received: torch.Tensor) -> None:
        """Record what attention each token of a cached sequence drew."""
        with self.index.plan(self.sequence(ids), keep_last=0) as plan:
            end = len(plan.blocks) * BLOCK
            self.received[self.pool.slots(plan.blocks, 0, end).cpu()] = received[:end]

    def park(self, ids: Sequence[int], kept: Kept) -> NDArray[np.int64]:
        """Store KV in slots that the index does not know; returns the slots."""
        table = self.allocator.allocate(-(-len(ids) // BLOCK))
        self._write(table, ids, kept)
        return np.asarray(self.pool.slots(table, 0, len(ids)).cpu().numpy())

    def assemble(
        self,
        ids: Sequence[int],
        policy: ReusePolicy,
        *,
        moved_end: int,
        rotates: bool = True,
        foreign: NDArray[np.int64] | None = None,
    ) -> Assembled:
        """What a plan gives of the prompt's KV.

        Args:
            ids: The prompt.
            policy: What may be reused.
            moved_end: Moved runs supply no token from here on.
            rotates: False keeps K as it was rotated before: a control.
            foreign: Slots of another text, whose KV replaces what is moved: a control.
        """
        with self.plan(ids, policy, moved_end) as plan:
            fresh = self.allocator.allocate(plan.num_new_blocks)
            table = np.concatenate([plan.blocks, fresh])
            moves = plan.moves(table)
            segments, in_place = plan.segments, len(plan.blocks) * BLOCK
            try:
                return self._assembled(
                    ids,
                    table,
                    moves,
                    segments,
                    in_place,
                    rotates=rotates,
                    foreign=foreign,
                )
            finally:
                self.allocator.free(fresh)

    def _assembled(
        self,
        ids: Sequence[int],
        table: NDArray[np.int32],
        moves: NDArray[Any],
        segments: NDArray[Any],
        in_place: int,
        *,
        rotates: bool,
        foreign: NDArray[np.int64] | None,
    ) -> Assembled:
        source = np.full(len(ids), COMPUTE, dtype=np.int64)
        runs = []
        for one in segments:
            start, end = int(one["start"]), int(one["end"])
            kind = int(one["class"])
            if kind == MOVED:
                runs.append((start, end, int(one["old_start"])))
            source[start:end] = kind
        slots = np.asarray(self.pool.slots(table, 0, len(ids)).cpu().numpy()).copy()
        position = np.full(self.num_blocks * BLOCK, -1, dtype=np.int64)
        position[slots] = np.arange(len(ids))
        came_from = slots.copy()
        if not rotates:
            moves = moves.copy()
            moves["delta"] = 0
        for one in moves:
            at = int(position[one["dest_slot"]])
            some = slice(at, at + int(one["num_tokens"]))
            came_from[some] = np.arange(one["source_slot"], one["source_slot"] + one["num_tokens"])
        self.pool.apply(moves)
        if foreign is not None:
            moved = np.flatnonzero(source == MOVED)
            others = np.resize(np.arange(len(foreign)), len(moved))
            wrong = np.zeros(len(moved), dtype=moves.dtype)
            wrong["source_slot"], wrong["dest_slot"] = foreign[others], slots[moved]
            wrong["num_tokens"], wrong["delta"] = 1, moved - others
            self.pool.apply(wrong)
        k, v = self.pool.gather(table, 0, len(ids))
        came_from[source == COMPUTE] = -1
        return Assembled(
            ids=torch.tensor(list(ids)),
            source=torch.from_numpy(source),
            runs=tuple(runs),
            slots=torch.from_numpy(came_from),
            segments=segments,
            num_in_place=in_place,
            k=k,
            v=k if v is None else v,
            inputs=self.inputs[came_from],
            outputs=self.outputs[came_from],
        )

    def _insert(
        self,
        ids: Sequence[int],
        table: NDArray[np.int32],
        source: ComputedSource | Imported,
        session: str,
    ) -> None:
        seq, end = self.sequence(ids), len(table) * BLOCK
        done = self.index.insert(seq, table, num_computed=end, source=source, session=session)
        self.allocator.free(done.duplicates)

    def _write(self, table: NDArray[np.int32], ids: Sequence[int], kept: Kept) -> None:
        num = len(ids)
        self.pool.scatter(kept.k[:, :num], kept.v[:, :num], table, 0)
        slots = self.pool.slots(table, 0, num)
        self.inputs[slots], self.outputs[slots] = kept.inputs[:num], kept.outputs[:num]

    def sequence(self, ids: Sequence[int]) -> TokenSequence:
        return TokenSequence(np.array(ids, dtype=np.uint32), self._space)
