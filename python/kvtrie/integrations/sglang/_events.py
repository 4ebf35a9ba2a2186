"""KV events of the cache's pages: SGLang's own recorder makes them, with its hashes.

The recorder reads nodes of a radix tree, so each cached page is a node with one page of tokens.
Without ``--kv-events-config`` nothing is kept; with it, each page has its tokens and two digests of
SHA-256.

Consumers may index pages by their tokens, and would take approximate KV for exact. So SGLang
publishes exact pages alone. Where the operator says so, approximate ones are published on a socket
and topic of their own (`ApproximateEvents`), under random names: a hash of tokens would be that of
an exact page too.

SGLang's events have no field for a request's ``extra_key``: who reads them takes such pages for
anybody's. Where a subscriber is to have exactly what a plain request finds, they are left out, and
of approximate pages always.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, Final

import zmq
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockStored,
    EventBatch,
    KVCacheEvent,
    KVEventsConfig,
    ZmqEventPublisher,
)
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvtrie.integrations._asked import AFTER_MOVED, MOVED, TOPIC, SettingsError
from kvtrie.integrations.sglang._settings import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from sglang.srt.disaggregation.kv_events import EventPublisher
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.server_args import ServerArgs


# The id of a LoRA adapter, which SGLang appends to ``extra_key``.
_ADAPTER_ID: Final = 32
# Of a random name, as SGLang's digests have; it publishes 8 of them.
_NAME_BYTES: Final = 32


class ApproximatePageStored(
    KVCacheEvent,
    tag="ApproximateBlockStored",  # type: ignore[call-arg] # untyped here
):
    """Consecutive approximate pages; fields of the same name are those of SGLang's `BlockStored`.

    It is published under the name that it has in vLLM's connector.

    Attributes:
        position: The position of the first token.
        classes: ``"moved"``, or ``"after_moved"`` where KV was computed after such KV, for each
            page.
        hops: How often the KV of each page has been moved since it was computed, at most.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    position: int
    classes: list[str]
    hops: list[int]
    medium: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None


class PageNode:
    """What the recorder reads of a page; it fills in the digests of those without a name.

    ``hops`` of an approximate page: how often its KV has been moved; None of an exact one.
    """

    __slots__ = ("event_hash_value", "hash_value", "hops", "key", "parent")

    def __init__(
        self,
        key: RadixKey,
        parent: PageNode | None,
        *,
        name: str | None = None,
        hops: int | None = None,
    ) -> None:
        self.key = key
        self.parent = parent
        self.hops = hops
        self.hash_value: list[str] | None = None if name is None else [name]
        self.event_hash_value: list[str] | None = None if name is None else [name]


class ApproximateEvents:
    """The events of approximate pages, until they are published.

    Args:
        params: SGLang's settings of events.
        publisher: Takes them, in the thread that made them.
    """

    def __init__(self, params: CacheInitParams, publisher: EventPublisher) -> None:
        self._recorder = _recorder(params, enabled=params.enable_kv_cache_events)
        self._publisher = publisher
        # What `ApproximatePageStored` says besides, of each page of the recorder, in order.
        self._about: list[tuple[int, int]] = []
        self._has_lost_some = False

    def stored(self, node: PageNode, position: int) -> None:
        """A page is cached; ``position``: of its first token."""
        self._recorder.record_store(node)
        self._about.append((position, node.hops or 0))

    def removed(self, node: PageNode) -> None:
        self._recorder.record_remove(node)

    def cleared(self) -> None:
        self._recorder.record_all_cleared()

    def publish(self) -> None:
        """Publish what has happened, as one batch if that is anything.

        If that fails, the next batch says first that all pages are gone: no subscriber counts more.

        Raises:
            Exception: What the publisher raises. Pages of before have no name any more.
        """
        about, self._about = self._about, []
        taken, first = self._recorder.take(), 0
        events: list[Any] = [AllBlocksCleared()] if self._has_lost_some else []
        if not taken and not events:
            return
        self._has_lost_some = True
        for event in taken:
            if isinstance(event, BlockStored):
                last = first + len(event.block_hashes)
                events.append(_approximate(event, about[first:last]))
                first = last
            else:
                events.append(event)
        self._publisher.publish(EventBatch(ts=time.time(), events=events))
        self._has_lost_some = False


def _approximate(event: BlockStored, about: Sequence[tuple[int, int]]) -> ApproximatePageStored:
    return ApproximatePageStored(
        block_hashes=event.block_hashes,
        parent_block_hash=event.parent_block_hash,
        token_ids=event.token_ids,
        block_size=event.block_size,
        position=about[0][0],
        classes=[MOVED if hops else AFTER_MOVED for _, hops in about],
        hops=[hops for _, hops in about],
        medium=event.medium,
        cache_salt=event.cache_salt,
        lora_name=event.lora_name,
    )


def check(given: Mapping[str, Any], args: ServerArgs) -> None:
    """Check the setting ``events`` next to SGLang's own.

    Raises:
        SettingsError: SGLang publishes no events over ZeroMQ, or to the same endpoint.
    """
    theirs = KVEventsConfig.from_cli(args.kv_events_config) if args.kv_events_config else None
    if theirs is None or theirs.publisher != "zmq":
        msg = f"{VARIABLE}: events needs SGLang's own: start it with --kv-events-config "
        msg += """'{"publisher": "zmq"}', or remove the setting"""
        raise SettingsError(msg)
    for name in ("endpoint", "replay_endpoint"):
        said = given.get(name)
        if said is not None and said in (theirs.endpoint, theirs.replay_endpoint):
            msg = (
                f"{VARIABLE}: events: {name} {said!r} is in --kv-events-config too: choose another"
            )
            raise SettingsError(msg)


def publisher(given: Mapping[str, Any]) -> EventPublisher:
    """Where the events of approximate pages go.

    Raises:
        SettingsError: The endpoint cannot be used.
    """
    try:
        return ZmqEventPublisher(0, **{"topic": TOPIC, **given}, bind=True)
    except (zmq.ZMQError, ValueError) as error:
        msg = f"{VARIABLE}: events: endpoint {given['endpoint']!r}: {error}"
        raise SettingsError(msg) from error


def _recorder(params: CacheInitParams, *, enabled: bool) -> KVCacheEventRecorder:
    return KVCacheEventRecorder(
        enabled=enabled,
        page_size=params.page_size,
        dynamo_format=params.dynamo_kv_event_format,
        lora_names=params.kv_event_lora_names,
    )


class PageEvents:
    """The events of one cache, until SGLang takes them.

    Args:
        params: SGLang's settings of events.
        num_pages: Pages that the pool has.
        others: What publishes approximate pages; None: nobody does.
        tells_all: Whether pages are left out whose events would not tell whose they are.
    """

    def __init__(
        self,
        params: CacheInitParams,
        num_pages: int,
        others: ApproximateEvents | None = None,
        *,
        tells_all: bool = False,
    ) -> None:
        self.recorder = _recorder(params, enabled=params.enable_kv_cache_events)
        self._others = others
        self._tells_all = tells_all
        self._page_size: int = params.page_size
        self._root = PageNode(RadixKey([]), None)
        self._root.hash_value = []
        self._is_cleared = True
        self._nodes: list[PageNode | None] = []
        if self.recorder.enabled:
            self._nodes = [None] * num_pages
        self.cleared()  # a router may know pages of a server that was here before

    def stored(
        self, path: NDArray[np.int32], num_known: int, key: RadixKey, session: str | None = None
    ) -> None:
        """Pages of a path are cached from now on, all but the first ``num_known``.

        Those before are published too if they were not, as each page names the one before it.
        ``session``: the conversation that the index has the new pages of.
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
            if (cached := self._nodes[blocks[page]]) is not None and cached.hops is None:
                node = cached
                continue
            if cached is not None:
                # It was approximate, and has been computed since.
                self._remove(blocks[page])
            tokens = ids[page * size : (page + 1) * size]
            node = PageNode(RadixKey(tokens, key.extra_key, cache_salt=key.cache_salt), parent=node)
            self.recorder.record_store(node, session_id=session if page >= num_known else None)
            self._nodes[blocks[page]] = node

    def stored_approximate(
        self, path: NDArray[np.int32], num_exact: int, hops: Sequence[int], key: RadixKey
    ) -> None:
        """Pages of a path after the first ``num_exact`` are approximate, with these hops."""
        others = self._others
        if others is None or not self.recorder.enabled or not self._is_told(key):
            return
        # The one before them is published too, if it was not.
        self.stored(path[:num_exact], num_exact, key)
        blocks: Sequence[int] = path.tolist()
        node = (self._nodes[blocks[num_exact - 1]] if num_exact else None) or self._root
        ids, size = key.raw_token_ids(), self._page_size
        for page in range(num_exact, len(blocks)):
            if (cached := self._nodes[blocks[page]]) is not None:
                node = cached
                continue
            node = PageNode(
                RadixKey(
                    ids[page * size : (page + 1) * size], key.extra_key, cache_salt=key.cache_salt
                ),
                parent=node,
                name=secrets.token_hex(_NAME_BYTES),
                hops=hops[page - num_exact],
            )
            others.stored(node, page * size)
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
            self._remove(block)

    def _remove(self, block: int) -> None:
        node, self._nodes[block] = self._nodes[block], None
        if node is None:
            return
        if node.hops is None:
            self.recorder.record_remove(node)
        elif self._others is not None:
            self._others.removed(node)

    def cleared(self) -> None:
        """No page is cached any more; if that cannot be published, it is before what follows."""
        self._nodes = [None] * len(self._nodes)
        self._is_cleared = False
        self._clear()

    def publish_approximate(self) -> None:
        """Publish what has happened to approximate pages."""
        if self._others is None:
            return
        self._clear()
        try:
            self._others.publish()
        except BaseException:
            # What is still cached is published again when a request continues it.
            self._nodes = [
                None if node is not None and node.hops is not None else node for node in self._nodes
            ]
            raise

    def take(self) -> list[Any]:
        """What SGLang publishes next."""
        self._clear()
        taken: list[Any] = self.recorder.take()
        return taken

    def _clear(self) -> None:
        if not self._is_cleared:
            self.recorder.record_all_cleared()
            if self._others is not None:
                self._others.cleared()
            self._is_cleared = True
