"""Which KV blocks do I already have for this prompt, where do they lie, and what must be computed?

Everything here is implemented in the extension `kvtrie._core` and needs numpy alone. The pool of
paged KV (`kvtrie.pool`) and the embedded engine (`kvtrie.engines.transformers`) are imported by
their own names, because they need torch.
"""

from kvtrie._core import (
    COMPUTED,
    EXACT_ONLY,
    SHARED,
    BlockAllocator,
    BlockInUseError,
    ComputedSource,
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
    OutOfBlocksError,
    PlanBatch,
    RadixIndex,
    ReusePlan,
    ReusePolicy,
    SharedSalt,
    Span,
    StaleHandleError,
    TokenSequence,
    __version__,
)

__all__ = [
    "COMPUTED",
    "EXACT_ONLY",
    "SHARED",
    "BlockAllocator",
    "BlockInUseError",
    "ComputedSource",
    "Imported",
    "IndexStats",
    "InsertBatch",
    "InsertResult",
    "Item",
    "KvTrieError",
    "LayoutError",
    "Match",
    "MatchBatch",
    "Namespace",
    "OutOfBlocksError",
    "PlanBatch",
    "RadixIndex",
    "ReusePlan",
    "ReusePolicy",
    "SharedSalt",
    "Span",
    "StaleHandleError",
    "TokenSequence",
    "__version__",
]
