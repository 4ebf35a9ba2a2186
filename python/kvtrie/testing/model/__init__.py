"""A naive model of the index, to test engines and the index itself against.

`ModelIndex` has the calls of `kvtrie.RadixIndex`, with the same arguments, results and exceptions.
Its only data structure is a dictionary from a namespace and a whole token prefix to what is cached
there; everything else is computed from all entries at every call. That makes it slow, and short
enough to read next to the rules (``docs/design.md``).

Sequences are `ModelSequence` (only ids and items) or `kvtrie.TokenSequence`; plans are `ModelPlan`
and belong to the model that made them. ``docs/testing.md`` has an example.
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
