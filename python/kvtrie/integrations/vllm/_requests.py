"""The connector's state of one live request."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from kvtrie._core import COMPUTED, Imported
from kvtrie.integrations.vllm._account import Account
from kvtrie.integrations.vllm._events import AFTER_MOVED, MOVED

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from kvtrie._core import ComputedSource, ReusePlan, ReusePolicy, Span, TokenSequence
    from kvtrie.integrations.vllm._events import Contents
    from kvtrie.integrations.vllm._tags import Reading

Range = tuple[int, int]
# A number of blocks, and the source of their KV.
Stretch = tuple[int, "ComputedSource | Imported"]


@dataclass(slots=True, eq=False)
class Pending:
    """A plan with copies that are not all issued.

    Attributes:
        pinned: Its blocks, which the pool may not hand out meanwhile.
        promised: The tokens after vLLM's own hit that need no computing.
        after_gaps: Ranges that may be copied when the gap before is computed, ascending.
        jumped: The range after a gap that this step skips, if the step includes the request.
    """

    plan: ReusePlan
    pinned: list[KVCacheBlock]
    promised: Range
    after_gaps: list[Range]
    allocated: bool = False
    jumped: Range | None = None

    def reads(self, block_ids: Collection[int]) -> bool:
        return any(block.block_id in block_ids for block in self.pinned)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request from arrival to finish.

    Attributes:
        seq: Its tokens that were final at the last update.
        exact_until: Its first approximate token; None while all is exact.
        moved: Ranges of approximate KV that it did not compute, and their hops.
        num_refused: How often vLLM found no blocks while this request's sources were pinned.
        last_free: Free blocks when that last happened.
        is_without_room: Whether it was admitted without reuse for that reason.
        is_offered: Whether the index knows the prompt's blocks.
        session: The id of its conversation.
        num_local: Tokens of vLLM's own hit when it began.
        moved_end: Where the prompt's last message of a user or a tool begins, if tags say so.
        account: Where the KV of its prompt came from.
        is_counted: Whether `account` is in the stats.
    """

    seq: TokenSequence
    policy: ReusePolicy
    exact_until: int | None = None
    moved: list[tuple[int, int, int]] = field(default_factory=list)
    pending: Pending | None = None
    num_refused: int = 0
    last_free: int = -1
    is_without_room: bool = False
    is_offered: bool = False
    reading: Reading | None = None
    account: Account = field(default_factory=Account)
    is_counted: bool = False
    session: str | None = None
    moved_end: int | None = None
    num_local: int = 0

    def stretches(self, num_blocks: int, block_size: int) -> list[Stretch]:
        """The exactness of its blocks, in order.

        A block has the most hops of any KV moved into it. KV that the request computed after moved
        KV is approximate with 0 hops.
        """
        if self.exact_until is None:
            return [(num_blocks, COMPUTED)]
        hops = np.zeros(num_blocks, np.int64)
        for start, end, count in self.moved:
            inside = slice(start // block_size, -(-end // block_size))
            hops[inside] = np.maximum(hops[inside], count)
        return [
            (len(list(same)), Imported(self.exact_until, hops=count, policy=self.policy))
            for count, same in groupby(hops.tolist())
        ]

    def contents(self, block: int, block_size: int) -> Contents:
        """What one of its approximate blocks holds."""
        first, last = block * block_size, (block + 1) * block_size
        hops = [count for start, end, count in self.moved if start < last and end > first]
        return (MOVED, max(hops)) if hops else (AFTER_MOVED, 0)

    def follow(self, request: Request) -> None:
        if len(self.seq) < request.num_tokens:
            self.seq.extend(request.all_token_ids[len(self.seq) :])

    def begins_with(self, num_local: int) -> None:
        """Record vLLM's own hit, at every admission."""
        if not self.account.reached:
            self.num_local = num_local
        exact = num_local if self.exact_until is None else min(num_local, self.exact_until)
        self.account.admit(num_local, exact)
        # Blocks that vLLM found may have left the index since, with their hops: assume the most.
        self.moved = [(exact, num_local, self.policy.max_hops)] if exact < num_local else []

    def new_spans(self) -> list[Span]:
        """The spans that have ended since the last call."""
        return [] if self.reading is None else self.reading.new_spans(self.seq)

    def becomes_approximate(self, position: int) -> None:
        self.exact_until = position if self.exact_until is None else min(self.exact_until, position)


def adapter_of(request: Request) -> str | None:
    """The identity of a request's LoRA adapter; None without one.

    It includes the path, as in vLLM's hashes: a name may be reused while the engine runs.
    """
    lora = request.lora_request
    return None if lora is None else json.dumps([lora.lora_name, lora.lora_path])
