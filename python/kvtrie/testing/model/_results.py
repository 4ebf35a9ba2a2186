"""The results of the calls, with the attributes of kvtrie's own results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtrie.testing.model._arguments import Int32


@dataclass(frozen=True)
class ModelMatch:
    """As `kvtrie.Match`."""

    num_tokens: int
    blocks: Int32


@dataclass(frozen=True)
class ModelWouldSave:
    """As `kvtrie.WouldSave`."""

    exact: int
    approximate: int
    compute: int
    out_of_scope: int


@dataclass(frozen=True)
class ModelExplanation:
    """What `kvtrie.Explanation` has, except the reason and what is shown with it."""

    num_exact: int
    num_tokens: int
    block_size: int
    would_save: ModelWouldSave
    cut_by: tuple[str, int] | None


@dataclass(frozen=True)
class ModelGroupInsertResult:
    """As `kvtrie.GroupInsertResult`."""

    blocks: list[int | None]
    duplicates: Int32
    surplus: Int32


@dataclass(frozen=True)
class ModelGroupStats:
    """As `kvtrie.GroupStats`."""

    indexed: int
    pinned: int
    evictable: int
    condemned: int
    waiting: int


@dataclass(frozen=True)
class ModelInsertResult:
    """As `kvtrie.InsertResult`."""

    blocks: Int32
    num_exact: int
    duplicates: Int32
    surplus: Int32
    freed: Int32
    groups: dict[str, ModelGroupInsertResult] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelRemoveResult:
    """As `kvtrie.Removed`."""

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
    plans_without_scope: int
