"""Paged KV pools: their layout, where rows are stored in tensors, copies, and the pool itself.

Names are imported when first used: the package needs neither numpy nor torch; `KVGroup` and
`KVLayout` need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtrie.pool.groups import KVGroup
    from kvtrie.pool.kv_pool import ChainedRotationError, CopyEvent, KVPool, NonFiniteError
    from kvtrie.pool.layout import KVLayout

__all__ = ["ChainedRotationError", "CopyEvent", "KVGroup", "KVLayout", "KVPool", "NonFiniteError"]


def __getattr__(name: str) -> object:
    """Import a name on first use."""
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    own = {"KVGroup": "groups", "KVLayout": "layout"}
    found: object = getattr(import_module(f"kvtrie.pool.{own.get(name, 'kv_pool')}"), name)
    return found
