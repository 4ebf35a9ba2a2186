"""Paged KV pools: their layout, where rows are stored in tensors, copies, and the pool itself.

Names are imported when first used: the package needs neither numpy nor torch; all but `KVLayout`
need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtrie.pool.kv_pool import CopyEvent, KVPool, NonFiniteError
    from kvtrie.pool.layout import KVLayout

__all__ = ["CopyEvent", "KVLayout", "KVPool", "NonFiniteError"]


def __getattr__(name: str) -> object:
    """Import a name on first use."""
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    module = "kvtrie.pool.layout" if name == "KVLayout" else "kvtrie.pool.kv_pool"
    found: object = getattr(import_module(module), name)
    return found
