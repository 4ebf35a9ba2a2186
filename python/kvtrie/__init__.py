"""KV-cache reuse: which blocks a prompt has, where they are stored, and what must be computed.

What comes from the extension `kvtrie._core` imports neither numpy nor torch. `KVLayout`,
`RopeSpec`, `TurnAnswer` and `TurnTracker` need numpy (`RopeSpec.from_config` also torch), and
`KVPool` needs torch: each is imported when its name is first used. `kvtrie.engines.transformers`,
the embedded engine, is imported by its own name.
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

if TYPE_CHECKING:
    from kvtrie.layout import KVLayout
    from kvtrie.pool import KVPool as KVPool
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


# Names that need numpy or torch. Their imports take half a second and more, and Ctrl-C during an
# import of kvtrie would show a traceback that the command line cannot catch yet.
_ELSEWHERE = {
    "KVLayout": "kvtrie.layout",
    "KVPool": "kvtrie.pool",
    "RopeSpec": "kvtrie.rope",
    "TurnAnswer": "kvtrie.router",
    "TurnTracker": "kvtrie.router",
}


def __getattr__(name: str) -> object:
    """Import a name that needs numpy or torch on first use."""
    if name in _ELSEWHERE:
        try:
            found: object = getattr(import_module(_ELSEWHERE[name]), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            msg = f"{__name__}.{name} needs torch: pip install 'kvtrie[torch]'"
            raise ImportError(msg, name="torch") from error
        return found
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
