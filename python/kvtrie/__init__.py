"""KV-cache reuse: which blocks a prompt has, where they are stored, and what must be computed.

The extension `kvtrie._core` imports neither numpy nor torch. `RopeSpec`, `TurnAnswer` and
`TurnTracker` need numpy, `KVPool` needs torch: each is imported when first used. The embedded
engine is ``kvtrie.engines.transformers``.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kvtrie._core import (
    COMPUTED,
    EXACT_ONLY,
    SHARED,
    BlockAllocator,
    BlockInUseError,
    BlockRun,
    ComputedSource,
    EventError,
    Explanation,
    ExplanationContext,
    Group,
    GroupInsertResult,
    GroupStats,
    Imported,
    IndexStats,
    InsertResult,
    Item,
    KvIndexer,
    KvTrieError,
    LayoutError,
    Match,
    MovedRun,
    Namespace,
    NamespaceDifference,
    OutOfBlocksError,
    OverlapScores,
    Pin,
    PromptDigests,
    RadixIndex,
    Removed,
    ReusePlan,
    ReusePolicy,
    RolledBack,
    SequenceLedger,
    SharedSalt,
    SlotTable,
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

if TYPE_CHECKING:
    from kvtrie.pool.kv_pool import KVPool as KVPool
    from kvtrie.pool.layout import KVLayout
    from kvtrie.rope import RopeSpec
    from kvtrie.router import TurnAnswer, TurnTracker

__all__ = [
    "COMPUTED",
    "EXACT_ONLY",
    "SHARED",
    "BlockAllocator",
    "BlockInUseError",
    "BlockRun",
    "ComputedSource",
    "EventError",
    "Explanation",
    "ExplanationContext",
    "Group",
    "GroupInsertResult",
    "GroupStats",
    "Imported",
    "IndexStats",
    "InsertResult",
    "Item",
    "KVLayout",
    "KvIndexer",
    "KvTrieError",
    "LayoutError",
    "Match",
    "MovedRun",
    "Namespace",
    "NamespaceDifference",
    "OutOfBlocksError",
    "OverlapScores",
    "Pin",
    "PromptDigests",
    "RadixIndex",
    "Removed",
    "ReusePlan",
    "ReusePolicy",
    "RolledBack",
    "RopeSpec",
    "SequenceLedger",
    "SharedSalt",
    "SlotTable",
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


# Their imports take half a second and more, and Ctrl-C during an import of kvtrie would show a
# traceback that the command line cannot catch yet.
_ELSEWHERE = {
    "KVLayout": "kvtrie.pool.layout",
    "KVPool": "kvtrie.pool.kv_pool",
    "RopeSpec": "kvtrie.rope",
    "TurnAnswer": "kvtrie.router",
    "TurnTracker": "kvtrie.router",
}


def __getattr__(name: str) -> object:
    """Import a name that needs numpy or torch on first use."""
    if name not in _ELSEWHERE:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    try:
        module = import_module(_ELSEWHERE[name])
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        msg = f"kvtrie.{name} needs numpy: pip install numpy"
        raise ImportError(msg, name="numpy") from error
    found: object = getattr(module, name)
    return found
