"""What the connector knows of one live request."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from kvtrie._core import COMPUTED, Imported

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from kvtrie._core import ComputedSource, ReusePlan, ReusePolicy, Span, TokenSequence
    from kvtrie.integrations.vllm._tags import Reading

Range = tuple[int, int]
# So many blocks, and where their KV came from.
Stretch = tuple[int, "ComputedSource | Imported"]


@dataclass(slots=True, eq=False)
class Pending:
    """A plan whose copies are not all under way.

    Attributes:
        plan: The plan.
        pinned: Its blocks, which the pool may not hand out meanwhile.
        promised: What vLLM was told of: the tokens behind its own hit that need no computing.
        islands: Ranges behind a gap that may be copied when the gap is computed, ascending.
        allocated: Whether vLLM has given the request its blocks.
        jumped: The island that this step skips, if the step takes the request.
    """

    plan: ReusePlan
    pinned: list[KVCacheBlock]
    promised: Range
    islands: list[Range]
    allocated: bool = False
    jumped: Range | None = None


@dataclass(slots=True, eq=False)
class Live:
    """One request from arrival to finish.

    Attributes:
        seq: Its tokens, as far as they were final when last asked.
        policy: What may be reused for it.
        exact_until: Its first approximate token; None while all is exact.
        moved: Ranges of approximate KV that it did not compute, and their hops.
        pending: The plan under way.
        num_refused: Times that vLLM found no blocks while this request's sources were pinned.
        last_free: Free blocks when that happened last.
        is_offered: Whether the index knows the prompt's blocks.
        reading: What its tokens are; None where the chat format is not known.
        used: Ranges of the prompt whose KV was not computed, and whether it is approximate.
        is_counted: Whether `used` is in the stats.
    """

    seq: TokenSequence
    policy: ReusePolicy
    exact_until: int | None = None
    moved: list[tuple[int, int, int]] = field(default_factory=list)
    pending: Pending | None = None
    num_refused: int = 0
    last_free: int = -1
    is_offered: bool = False
    reading: Reading | None = None
    used: list[tuple[int, int, bool]] = field(default_factory=list)
    is_counted: bool = False

    def stretches(self, num_blocks: int, block_size: int) -> list[Stretch]:
        """How exact its blocks are, the first one first.

        A block has the most hops of what was moved into it. What the request computed on moved KV
        is approximate, and has moved nowhere yet.

        Args:
            num_blocks: Blocks to speak of.
            block_size: Tokens of a block.
        """
        if self.exact_until is None:
            return [(num_blocks, COMPUTED)]
        hops = np.zeros(num_blocks, np.int64)
        for start, end, count in self.moved:
            inside = slice(start // block_size, -(-end // block_size))
            hops[inside] = np.maximum(hops[inside], count)
        return [
            (len(list(same)), Imported(exact_until=self.exact_until, hops=count))
            for count, same in groupby(hops.tolist())
        ]

    def follow(self, request: Request) -> None:
        """Take over the ids that have become final."""
        if len(self.seq) < request.num_tokens:
            self.seq.extend(request.all_token_ids[len(self.seq) :])

    def begins_with(self, num_local: int) -> None:
        """Note vLLM's own hit, when a request is admitted or admitted again."""
        exact = num_local if self.exact_until is None else min(num_local, self.exact_until)
        self.used = [(0, exact, False), (exact, num_local, True)]
        # Blocks that vLLM found may have left the index meanwhile, and their hops with it: the
        # policy allows no more than so many.
        self.moved = [(exact, num_local, self.policy.max_hops)] if exact < num_local else []

    def new_spans(self) -> list[Span]:
        """What has ended among its tokens since the last call."""
        return [] if self.reading is None else self.reading.new_spans(self.seq)

    def becomes_approximate(self, position: int) -> None:
        """Note that tokens from ``position`` on are approximate."""
        self.exact_until = position if self.exact_until is None else min(self.exact_until, position)


def adapter_of(request: Request) -> str | None:
    """What tells a request's LoRA adapter from others; None without one.

    A name may be given to another adapter while the engine runs: vLLM hashes the path with it.
    """
    lora = request.lora_request
    return None if lora is None else json.dumps([lora.lora_name, lora.lora_path])
