"""Where values are kept: host memory, an object store, Mooncake Store.

A backend keeps bytes under names and promises nothing about them: `kvtrie.store.SpanStore` verifies
every byte. A value is written whole, and read in ranges.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtrie.store.backends.host import HostBackend
    from kvtrie.store.backends.mooncake import MooncakeBackend
    from kvtrie.store.backends.objects import ObjectBackend
    from kvtrie.store.backends.protocol import Backend, StoredValue

__all__ = ["Backend", "HostBackend", "MooncakeBackend", "ObjectBackend", "StoredValue"]

_OWN = {
    "Backend": "protocol",
    "HostBackend": "host",
    "MooncakeBackend": "mooncake",
    "ObjectBackend": "objects",
    "StoredValue": "protocol",
}


def __getattr__(name: str) -> object:
    """Import a name on first use."""
    if name not in _OWN:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    found: object = getattr(import_module(f"kvtrie.store.backends.{_OWN[name]}"), name)
    return found
