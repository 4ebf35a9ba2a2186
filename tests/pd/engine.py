"""An engine that computes prompts and holds their labelled KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.truth.labels import LabelledPool, chain

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Computed:
    engine: Engine
    ids: list[int]
    blocks: list[int]
    num_computed: int
    lookahead: int


class Engine:
    """One side of a pair: a pool of labelled slots and the owners of its blocks.

    Example:
        >>> from tests import pd
        >>> prefill = pd.Engine("P")
        >>> held = prefill.compute(range(40), lookahead=1)
        >>> len(held.blocks), held.num_computed
        (3, 40)
    """

    def __init__(
        self,
        name: str = "P",
        *,
        block_size: int = 16,
        num_blocks: int = 4096,
        namespace: kvtrie.Namespace | None = None,
    ) -> None:
        self.name = name
        self.block_size = block_size
        self.namespace = namespace or kvtrie.Namespace(
            model="model@1", kv_dtype="bfloat16", rope="none", salt=kvtrie.SHARED
        )
        self.root = hash(self.namespace)
        self.pool = LabelledPool(num_blocks, block_size)
        self.allocator = kvtrie.BlockAllocator(num_blocks)

    def __repr__(self) -> str:
        return f"Engine({self.name!r})"

    def chain(self, ids: Sequence[int]) -> list[int]:
        return chain(ids, self.root)

    def allocate(self, num_tokens: int) -> list[int]:
        blocks: list[int] = self.allocator.allocate(-(-num_tokens // self.block_size)).tolist()
        self.pool.clear(blocks)
        return blocks

    def compute(
        self,
        ids: Sequence[int],
        *,
        num_computed: int | None = None,
        lookahead: int = 0,
        drafts: Sequence[int] = (),
    ) -> Computed:
        ids = list(ids)
        computed = len(ids) if num_computed is None else num_computed
        if computed > len(ids):
            message = f"Engine.compute: num_computed is {computed}, of {len(ids)} tokens"
            raise ValueError(message)
        if len(drafts) > lookahead:
            message = f"Engine.compute: {len(drafts)} drafts for {lookahead} reserved slots"
            raise ValueError(message)
        blocks = self.allocate(len(ids) + lookahead)
        written = [*ids, *drafts] if drafts else ids[:computed]
        canon = self.chain(written)
        slots = self.pool.slots(blocks)
        self.pool.compute(slots, written, canon, 0, len(written), root=self.root)
        return Computed(self, ids, blocks, computed, lookahead)
