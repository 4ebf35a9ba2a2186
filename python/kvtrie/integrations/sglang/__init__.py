"""kvtrie inside SGLang: its prefix cache, chosen with ``--radix-cache-backend kvtrie``.

SGLang finds `register` by an entry point (``sglang.srt.plugins``) in each of its processes, and the
scheduler makes a `KvtrieCache` if the flag says so (``docs/sglang.md``). It finds, locks and evicts
pages as SGLang's own cache does. With a gate file it also reuses KV after an edit, up to the first
gap of a prompt, or, with hooks that the operator asks for, after gaps too.

Importing this package imports nothing of SGLang; the cache does.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations.sglang._settings import SGLangSettings
from kvtrie.integrations.sglang._version import (
    BACKEND,
    SGLangUnsupportedError,
    installed,
    is_tested,
)

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from kvtrie.integrations.sglang.cache import KvtrieCache

__all__ = ["SGLangUnsupportedError", "register"]

_LOG = logging.getLogger("sglang.kvtrie")


def register() -> None:
    """Make the cache known to SGLang by its name; a second call does nothing.

    A server that does not ask for it is left as it was, whatever its version.
    """
    try:
        from sglang.srt.mem_cache.registry import (  # noqa: PLC0415 - only inside SGLang
            get_radix_cache_factory,
            register_radix_cache_backend,
        )
    except ImportError as error:
        _LOG.warning("kvtrie: SGLang %s takes no other cache: %s", installed(), error)
        return
    if get_radix_cache_factory(BACKEND) is not None:
        return
    register_radix_cache_backend(BACKEND, _make)
    try:
        settings = SGLangSettings.read()
    except SettingsError:
        return  # the cache says so, if the server has it
    if settings.store is not None and is_tested():
        from kvtrie.integrations.sglang import _waiting  # noqa: PLC0415 - imports torch

        _waiting.install()
    if settings.computes_gaps and is_tested():
        from kvtrie.integrations.sglang import _gaps  # noqa: PLC0415 - imports torch

        _gaps.install()


def _make(context: TreeCacheBuildContext) -> KvtrieCache:
    """Check what SGLang was started with, and make its cache.

    Raises:
        SGLangUnsupportedError: Something is not supported; the message names it.
    """
    from kvtrie.integrations.sglang import _support  # noqa: PLC0415 - imports SGLang

    return _support.make(context)
