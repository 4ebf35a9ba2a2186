"""Which KV blocks do I already have for this prompt, where do they lie, and what must be computed?

What comes from the extension `kvtrie._core`, `KVLayout` and `RopeSpec` need numpy alone
(`RopeSpec.from_config` computes frequencies with torch, which it imports). `KVPool` needs
torch, which is imported when the name is first used. The embedded engine,
`kvtrie.engines.transformers`, is imported by its own name.
"""

from typing import TYPE_CHECKING

from kvtrie._core import (
    COMPUTED,
    EXACT_ONLY,
    SHARED,
    BlockAllocator,
    BlockInUseError,
    BlockRun,
    ComputedSource,
    Explanation,
    ExplanationContext,
    Imported,
    IndexStats,
    InsertBatch,
    InsertResult,
    Item,
    KvTrieError,
    LayoutError,
    Match,
    MatchBatch,
    Namespace,
    NamespaceDifference,
    OutOfBlocksError,
    PlanBatch,
    RadixIndex,
    Removed,
    ReusePlan,
    ReusePolicy,
    RolledBack,
    SequenceLedger,
    SharedSalt,
    SnapshotError,
    Span,
    StaleHandleError,
    TokenSequence,
    TransferLimits,
    TransferManifest,
    TransferPlan,
    TransferRefused,
    UnsupportedRopeError,
    WouldSave,
    __version__,
    plan_transfer,
)
from kvtrie.layout import KVLayout
from kvtrie.rope import RopeSpec
from kvtrie.router import TurnAnswer, TurnTracker

if TYPE_CHECKING:
    from kvtrie.pool import KVPool as KVPool

__all__ = [
    "COMPUTED",
    "EXACT_ONLY",
    "SHARED",
    "BlockAllocator",
    "BlockInUseError",
    "BlockRun",
    "ComputedSource",
    "Explanation",
    "ExplanationContext",
    "Imported",
    "IndexStats",
    "InsertBatch",
    "InsertResult",
    "Item",
    "KVLayout",
    "KvTrieError",
    "LayoutError",
    "Match",
    "MatchBatch",
    "Namespace",
    "NamespaceDifference",
    "OutOfBlocksError",
    "PlanBatch",
    "RadixIndex",
    "Removed",
    "ReusePlan",
    "ReusePolicy",
    "RolledBack",
    "RopeSpec",
    "SequenceLedger",
    "SharedSalt",
    "SnapshotError",
    "Span",
    "StaleHandleError",
    "TokenSequence",
    "TransferLimits",
    "TransferManifest",
    "TransferPlan",
    "TransferRefused",
    "TurnAnswer",
    "TurnTracker",
    "UnsupportedRopeError",
    "WouldSave",
    "__version__",
    "plan_transfer",
]


def __getattr__(name: str) -> object:
    """Import `KVPool`, and torch with it, when somebody asks for it."""
    if name == "KVPool":
        from kvtrie.pool import KVPool  # noqa: PLC0415 - torch is imported on demand

        return KVPool
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
