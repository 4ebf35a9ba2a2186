"""The index of many workers inside other routers.

`Dispatcher` chooses a worker by a `KvIndexer`'s scores and by what it has sent; `ServedModel` makes
the tokens of a request. With the extra ``proxy``, ``kvtrie.fleet.proxy`` is a proxy in front of SMG
or another router; with ``llmd``, ``kvtrie.fleet.llmd`` answers llm-d over gRPC.
``kvtrie.fleet.ray_serve`` is a request router for Ray Serve, which has no extra.
"""

from kvtrie.fleet.dispatcher import Dispatcher, NoWorkerError, Sent

try:
    from kvtrie.fleet.prompts import PromptError, ServedModel
except ImportError as error:
    if error.name != "jinja2":
        raise
    _MISSING = "kvtrie.fleet needs jinja2: pip install 'kvtrie[proxy]', or 'kvtrie[llmd]'"
    raise ImportError(_MISSING, name="jinja2") from error

__all__ = ["Dispatcher", "NoWorkerError", "PromptError", "Sent", "ServedModel"]
