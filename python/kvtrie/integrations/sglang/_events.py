"""KV events of the cache's pages: SGLang's own recorder makes them, with its hashes.

The recorder reads nodes of a radix tree, so each cached page is a node with one page of tokens. All
pages are exact. Without ``--kv-events-config`` nothing is kept; with it, each page has its tokens
and two digests of SHA-256.

SGLang's events have no field for a request's ``extra_key``: who reads them takes such pages for
anybody's. Where a subscriber is to have exactly what a plain request finds, they are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams


# The id of a LoRA adapter, which SGLang appends to ``extra_key``.
_ADAPTER_ID: Final = 32


class PageNode:
    """What the recorder reads of a page; it fills in the digests."""

    __slots__ = ("event_hash_value", "hash_value", "key", "parent")

    def __init__(self, key: RadixKey, parent: PageNode | None) -> None:
        self.key = key
        self.parent = parent
        self.hash_value: list[str] | None = None
        self.event_hash_value: list[str] | None = None


class PageEvents:
    """The events of one cache, until SGLang takes them.

    Args:
        params: SGLang's settings of events.
        num_pages: Pages that the pool has.
        tells_all: Whether pages are left out whose events would not tell whose they are.
    """

    def __init__(self, params: CacheInitParams, num_pages: int, *, tells_all: bool = False) -> None:
        self.recorder = KVCacheEventRecorder(
            enabled=params.enable_kv_cache_events,
            page_size=params.page_size,
            dynamo_format=params.dynamo_kv_event_format,
            lora_names=params.kv_event_lora_names,
        )
        self._tells_all = tells_all
        self._page_size: int = params.page_size
        self._root = PageNode(RadixKey([]), None)
        self._root.hash_value = []
        self._is_cleared = True
        self._nodes: list[PageNode | None] = []
        if self.recorder.enabled:
            self._nodes = [None] * num_pages
        self.cleared()  # a router may know pages of a server that was here before

    def stored(self, path: NDArray[np.int32], num_known: int, key: RadixKey) -> None:
        """Pages of a path are cached from now on, all but the first ``num_known``.

        Those before are published too if they were not, as each page names the one before it.
        """
        if not self.recorder.enabled or (self._tells_all and not self._is_told(key)):
            return
        blocks: Sequence[int] = path.tolist()
        self._clear()
        first = num_known
        while first and self._nodes[blocks[first - 1]] is None:
            first -= 1
        node = (self._nodes[blocks[first - 1]] if first else None) or self._root
        ids, size = key.raw_token_ids(), self._page_size
        for page in range(first, len(blocks)):
            if (cached := self._nodes[blocks[page]]) is not None:
                node = cached
                continue
            tokens = ids[page * size : (page + 1) * size]
            node = PageNode(RadixKey(tokens, key.extra_key, cache_salt=key.cache_salt), parent=node)
            self.recorder.record_store(node)
            self._nodes[blocks[page]] = node

    def _is_told(self, key: RadixKey) -> bool:
        """Whether events have all of a key: no ``extra_key`` but the id of a named adapter."""
        extra: str | None = key.extra_key
        if extra is None:
            return True
        names = self.recorder.lora_names
        name = names.resolve(extra) if self.recorder.dynamo_format else names.get(extra)
        return len(extra) == _ADAPTER_ID and name is not None

    def removed(self, blocks: NDArray[np.int32]) -> None:
        """Pages are not cached any more; of a path, the index evicts the last first."""
        if not self.recorder.enabled:
            return
        self._clear()
        # SGLang says of a node that it removes the first page first.
        for block in reversed(blocks.tolist()):
            node = self._nodes[block]
            self._nodes[block] = None
            if node is not None:
                self.recorder.record_remove(node)

    def cleared(self) -> None:
        """No page is cached any more; if that cannot be published, it is before what follows."""
        self._nodes = [None] * len(self._nodes)
        self._is_cleared = False
        self._clear()

    def take(self) -> list[Any]:
        """What SGLang publishes next."""
        self._clear()
        taken: list[Any] = self.recorder.take()
        return taken

    def _clear(self) -> None:
        if not self._is_cleared:
            self.recorder.record_all_cleared()
            self._is_cleared = True
