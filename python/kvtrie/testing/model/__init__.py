"""A naive model of the index, to test engines and the index itself against.

`ModelIndex` has the calls of `kvtrie.RadixIndex`, with the same arguments, results and exceptions.
Its only data structure is a dictionary from a namespace and a whole token prefix to what is cached
there. Everything else (evictable blocks, holes, pins) is computed from all entries at every call.
That makes it slow, and short enough to read next to the rules that it follows:

* a block is shared only whole, and only below `num_computed`;
* one block id backs at most one entry, and one prefix has at most one entry;
* a match is the longest run of present exact blocks from position 0;
* exact replaces approximate, fewer hops replace more, and otherwise the first writer stays;
* a pinned block is condemned when it leaves, and `take_freed` returns it after its last release;
* dead blocks leave first, then blocks leave by last use, deepest, lowest id, and only from the
  ends;
* a plan uses whole blocks of the same prefix in place and covers the rest from left to right, each
  time by the match that reaches furthest; what it copies under another prefix is approximate.

To test an engine, run it on `RadixIndex` and on `ModelIndex` with the same seed, and compare.
Sequences are `ModelSequence` (only ids and items) or `kvtrie.TokenSequence`; plans are `ModelPlan`
and belong to the model that made them.

Example:
    >>> import kvtrie
    >>> from kvtrie.testing.model import ModelIndex, ModelSequence
    >>> ns = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    >>> index = ModelIndex(num_blocks=8, block_size=2)
    >>> seq = ModelSequence([1, 2, 3, 4, 5], ns)
    >>> done = index.insert(seq, [7, 3, 5], num_computed=5, source=kvtrie.COMPUTED)
    >>> done.blocks.tolist(), done.surplus.tolist()
    ([7, 3], [5])
    >>> index.lookup(ModelSequence([1, 2, 3, 9], ns)).num_tokens
    2
"""

from kvtrie.testing.model._allocator import ModelAllocator
from kvtrie.testing.model._index import ModelIndex
from kvtrie.testing.model._plans import ModelPlan
from kvtrie.testing.model._results import (
    ModelInsertResult,
    ModelMatch,
    ModelRemoveResult,
    ModelStats,
)
from kvtrie.testing.model._sequences import ModelSequence

__all__ = [
    "ModelAllocator",
    "ModelIndex",
    "ModelInsertResult",
    "ModelMatch",
    "ModelPlan",
    "ModelRemoveResult",
    "ModelSequence",
    "ModelStats",
]
