"""vLLM's transfer between prefill and decode engines, with every block checked by its tokens.

``docs/vllm.md`` has the configuration. Importing this module does not import vLLM: its classes do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.integrations.vllm import _command, _version
from kvtrie.integrations.vllm._others import TRANSFER
from kvtrie.integrations.vllm._transfer_settings import KEY_FILE, MODEL, check_transfer

if TYPE_CHECKING:
    from kvtrie.integrations.vllm._transfer import MANIFEST, CheckedTransfer, KvtrieNixlConnector

__all__ = ["KEY_FILE", "MANIFEST", "MODEL", "CheckedTransfer", "KvtrieNixlConnector"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    if name == TRANSFER:
        # Before vLLM loads weights, as for `KvtrieConnector`.
        for extra in _command.settings(TRANSFER, __name__):
            check_transfer(extra)
    try:
        from kvtrie.integrations.vllm import _transfer  # noqa: PLC0415 - imports vLLM
    except ImportError as error:
        if not (error.name or "").startswith("vllm"):
            raise
        _version.lacks(error)
    return getattr(_transfer, name)
