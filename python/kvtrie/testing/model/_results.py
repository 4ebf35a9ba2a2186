"""The results of the calls, with the attributes of kvtrie's own results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtrie.testing.model._arguments import Int32, Int64, int32

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.testing.model._plans import ModelPlan


@dataclass(frozen=True)
class ModelMatch:
    """What `lookup` found: tokens from 0, and the blocks from `start` on."""

    num_tokens: int
    blocks: Int32


@dataclass(frozen=True)
class ModelInsertResult:
    """What `insert` did; attributes as those of `kvtrie.InsertResult`."""

    blocks: Int32
    num_exact: int
    duplicates: Int32
    surplus: Int32
    freed: Int32


@dataclass(frozen=True)
class ModelRemoveResult:
    """What `remove_spans` did; attributes as those of `kvtrie.RemoveResult`."""

    freed: Int32
    kept: Int32
    condemned: Int32


@dataclass(frozen=True)
class ModelStats:
    """The counts of `kvtrie.IndexStats` that do not depend on how the index is built."""

    indexed: int
    condemned: int
    waiting: int
    quarantined: int
    pinned: int
    evictable: int
    approximate: int
    dead: int
    holes: int
    live_plans: int
    clock: int
    unknown_discards: int


@dataclass(frozen=True)
class ModelMatchBatch:
    """What `lookup_many` found, flat, with offsets."""

    num_tokens: Int64
    blocks: Int32
    offsets: Int64
    errors: dict[int, Exception]


@dataclass(frozen=True)
class ModelPlanBatch:
    """What `plan_many` made; a plan that failed is None."""

    plans: list[ModelPlan | None]
    blocks: Int32
    offsets: Int64
    num_new_blocks: Int64
    errors: dict[int, Exception]


@dataclass(frozen=True)
class ModelInsertBatch:
    """What `insert_many` did, flat, with offsets."""

    blocks: Int32
    offsets: Int64
    num_exact: Int64
    duplicates: Int32
    duplicate_offsets: Int64
    surplus: Int32
    surplus_offsets: Int64
    freed: Int32
    freed_offsets: Int64
    errors: dict[int, Exception]


def flat(parts: Sequence[Int32]) -> tuple[Int32, Int64]:
    """The arrays in sequence, and the start of each."""
    offsets = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
    return (np.concatenate(parts) if parts else int32([])), offsets
