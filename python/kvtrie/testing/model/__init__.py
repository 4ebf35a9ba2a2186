"""A naive model of the index, to test engines and the index itself against.

`ModelIndex` has the calls of `kvtrie.RadixIndex`, with the same arguments, results and exceptions.
It is one dictionary from a namespace and a whole token prefix to what is cached there: slow, and
short enough to read next to the rules (``docs/design.md``). ``docs/testing.md`` has an example.

Sequences are `ModelSequence` or `kvtrie.TokenSequence`; plans belong to the model that made them.

Example:
    >>> import kvtrie
    >>> from kvtrie.testing.model import ModelIndex, ModelSequence
    >>> ns = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    >>> index = ModelIndex(num_blocks=8, block_size=2)
    >>> seq = ModelSequence([1, 2, 3, 4, 5], ns)
    >>> done = index.insert(seq, [7, 3, 5], num_computed=5, source=kvtrie.COMPUTED)
    >>> done.blocks.tolist(), done.surplus.tolist()
    ([7, 3], [5])
"""

from kvtrie.testing.model._allocator import ModelAllocator
from kvtrie.testing.model._index import ModelIndex
from kvtrie.testing.model._plans import ModelPlan
from kvtrie.testing.model._results import (
    ModelExplanation,
    ModelGroupInsertResult,
    ModelGroupStats,
    ModelInsertResult,
    ModelMatch,
    ModelRemoveResult,
    ModelStats,
    ModelWouldSave,
)
from kvtrie.testing.model._sequences import ModelSequence

__all__ = [
    "ModelAllocator",
    "ModelExplanation",
    "ModelGroupInsertResult",
    "ModelGroupStats",
    "ModelIndex",
    "ModelInsertResult",
    "ModelMatch",
    "ModelPlan",
    "ModelRemoveResult",
    "ModelSequence",
    "ModelStats",
    "ModelWouldSave",
]
