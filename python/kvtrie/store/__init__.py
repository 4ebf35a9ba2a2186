"""A store of KV outside the pool, by the content of runs of tokens.

A prompt is cut into runs at the borders of its messages. A run's name is a keyed digest of its
tokens, so a prompt names its runs without asking what is stored, wherever they were computed.
`SpanStore` verifies every byte that it returns, `SpanWriter` stores in a thread of its own,
`SpanLoader` loads for the gaps of a plan while the engine goes on, and places what has arrived in a
`kvtrie.KVPool`, rotated to its position. ``docs/store.md`` has the design and an example.

Names are imported when first used. `SpanLoader` and `rows_of` need torch, the others numpy; each
backend needs its own package.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtrie.store.backends.host import HostBackend
    from kvtrie.store.backends.mooncake import MooncakeBackend
    from kvtrie.store.backends.objects import ObjectBackend
    from kvtrie.store.backends.protocol import Backend, StoredValue
    from kvtrie.store.budget import TenantLimits
    from kvtrie.store.contexts import PrefixMarks, PromptContexts, SpanContext
    from kvtrie.store.errors import BackendError, StoreRefused
    from kvtrie.store.estimate import Estimate, LoadChoice
    from kvtrie.store.keys import StoreKey
    from kvtrie.store.loading import PlacedSpans, SpanLoad, SpanLoader, TakenSpans
    from kvtrie.store.placing import rows_of
    from kvtrie.store.runs import SpanRun, borders_of, pieces, worth_keeping
    from kvtrie.store.shape import SpanRows, SpanShape
    from kvtrie.store.store import SpanStore
    from kvtrie.store.usable import PlacedSpan
    from kvtrie.store.value import SpanHeader
    from kvtrie.store.writing import SpanWriter

__all__ = [
    "Backend",
    "BackendError",
    "Estimate",
    "HostBackend",
    "LoadChoice",
    "MooncakeBackend",
    "ObjectBackend",
    "PlacedSpan",
    "PlacedSpans",
    "PrefixMarks",
    "PromptContexts",
    "SpanContext",
    "SpanHeader",
    "SpanLoad",
    "SpanLoader",
    "SpanRows",
    "SpanRun",
    "SpanShape",
    "SpanStore",
    "SpanWriter",
    "StoreKey",
    "StoreRefused",
    "StoredValue",
    "TakenSpans",
    "TenantLimits",
    "borders_of",
    "pieces",
    "rows_of",
    "worth_keeping",
]

_OWN = {
    "Backend": "backends",
    "BackendError": "errors",
    "Estimate": "estimate",
    "HostBackend": "backends",
    "LoadChoice": "estimate",
    "MooncakeBackend": "backends",
    "ObjectBackend": "backends",
    "PlacedSpan": "usable",
    "PlacedSpans": "loading",
    "PrefixMarks": "contexts",
    "PromptContexts": "contexts",
    "SpanContext": "contexts",
    "SpanHeader": "value",
    "SpanLoad": "loading",
    "SpanLoader": "loading",
    "SpanRows": "shape",
    "SpanRun": "runs",
    "SpanShape": "shape",
    "SpanStore": "store",
    "SpanWriter": "writing",
    "StoreKey": "keys",
    "StoreRefused": "errors",
    "StoredValue": "backends",
    "TakenSpans": "loading",
    "TenantLimits": "budget",
    "borders_of": "runs",
    "pieces": "runs",
    "rows_of": "placing",
    "worth_keeping": "runs",
}


def __getattr__(name: str) -> object:
    """Import a name on first use."""
    if name not in _OWN:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    found: object = getattr(import_module(f"kvtrie.store.{_OWN[name]}"), name)
    return found
