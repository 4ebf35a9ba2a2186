"""KV events: those of approximate blocks leave vLLM's queue, and have a topic of their own.

Consumers may index blocks by their tokens, and would take approximate KV for exact.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import zmq

from kvtrie.integrations._asked import AFTER_MOVED, MOVED, TOPIC, SettingsError
from kvtrie.integrations.vllm._settings import WHERE
from kvtrie.integrations.vllm._vllm import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisherFactory,
    KVCacheEvent,
    KVEventsConfig,
    get_block_hash,
    maybe_convert_block_hash,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import EventPublisher
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request

# Fields of `BlockStored` with one entry per block.
_PER_BLOCK: Final = ("block_hashes", "extra_keys", "lookahead_token_ids")


class ApproximateBlockStored(KVCacheEvent):
    """Consecutive blocks with approximate KV; fields of the same name are those of `BlockStored`.

    Attributes:
        position: The position of the first token.
        classes: `MOVED` or `AFTER_MOVED`, for each block.
        hops: How often the KV of each block has been moved since it was computed, at most.
    """

    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[int]
    block_size: int
    position: int
    classes: list[str]
    hops: list[int]
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


@dataclass(slots=True)
class _Blocks:
    """Approximate blocks with the same hash.

    Attributes:
        number: Their number in their requests.
        count: Events that stored them less those that removed them. Those of reuse count, so this
            is as many as vLLM has cached, or more.
        hops: The most hops of approximate KV that was copied into one since there was none of them;
            None: none was.
    """

    number: int
    count: int = 0
    hops: int | None = None


class Events:
    """Sorts the events that wait in vLLM's pool.

    A block is approximate if a separate lineage begins at it (`begin`), or if its parent is. What
    it holds is known by its hash, and not by its request, for which all would be searched. Hashes
    are in the form that vLLM publishes.

    Args:
        pool: vLLM's pool.
        block_size: Tokens of a block.
        requests: The live requests.
        publisher: Takes the events of approximate blocks; None: nobody does.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        requests: Callable[[], Iterable[Request]],
        publisher: EventPublisher | None,
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._requests = requests
        self._publisher = publisher
        self._approximate: dict[Any, _Blocks] = {}
        # The most hops of what is copied: up to the end of blocks, whose events wait; and of blocks
        # of which a part is left to compute, by their hash, or by that of the block before if
        # their tokens are not known.
        self._moved: dict[Any, int] = {}
        self._begun: dict[Any, int] = {}
        self._begun_after: dict[Any, int] = {}
        self._limit = 2 * int(pool.num_gpu_blocks)

    def begin(self, block_hash: BlockHash, block: int) -> None:
        self._approximate.setdefault(maybe_convert_block_hash(block_hash), _Blocks(block))

    def moved(self, request: Request, start: int, end: int, hops: int) -> None:
        """Take note of approximate KV that is copied to positions of a request, before `sort`."""
        hashes, size = request.block_hashes, self._block_size
        for number in range(start // size, -(-end // size)):
            known = self._moved if (number + 1) * size <= end else self._begun
            at = number
            if number == len(hashes):
                known, at = self._begun_after, number - 1
            one = maybe_convert_block_hash(hashes[at])
            known[one] = max(known.get(one, 0), hops)

    def sort(self) -> None:
        """Leave only events of exact blocks in vLLM's queue, and publish the others."""
        try:
            self._sort()
        except Exception:
            # vLLM may report blocks again whose events are lost.
            for one, hops in self._moved.items():
                self._begun[one] = max(self._begun.get(one, 0), hops)
            raise
        finally:
            # vLLM has cached all that is full.
            self._moved.clear()

    def _sort(self) -> None:
        queue = self._pool.kv_event_queue
        if not queue or not self._approximate:
            return
        given, others = list(queue), list[Any]()
        # If this fails, an index that misses blocks is better than one with approximate ones.
        queue[:] = [event for event in given if not isinstance(event, BlockStored)]
        firsts = [self._mark(event) if isinstance(event, BlockStored) else 0 for event in given]
        exact: list[Any] = []
        for event, first in zip(given, firsts, strict=True):
            if isinstance(event, BlockStored):
                self._sort_stored(event, first, exact, others)
            elif isinstance(event, BlockRemoved):
                self._sort_removed(event, exact, others)
            else:
                exact.append(event)
                if isinstance(event, AllBlocksCleared):
                    others.append(event)
                    for blocks in self._approximate.values():
                        blocks.count, blocks.hops = 0, None
        queue[:] = exact
        if others and self._publisher is not None:
            self._publisher.publish(EventBatch(ts=time.time(), events=others))
        if self._num_known() > self._limit:
            self._prune()

    def shutdown(self) -> None:
        if self._publisher is not None:
            self._publisher.shutdown()

    def _mark(self, event: BlockStored) -> int:
        """Mark the approximate blocks of an event, and return the place of the first of them."""
        known, hashes = self._approximate, event.block_hashes
        before, first = known.get(event.parent_block_hash), 0
        if before is None:
            first = next((at for at, one in enumerate(hashes) if one in known), len(hashes))
            number = known[hashes[first]].number if first < len(hashes) else 0
        else:
            number = before.number + 1
        for at, one in enumerate(hashes[first:]):
            known.setdefault(one, _Blocks(number + at))
        return first

    def _sort_stored(
        self, event: BlockStored, first: int, exact: list[Any], others: list[Any]
    ) -> None:
        known, hashes = self._approximate, event.block_hashes
        if first == len(hashes):
            exact.append(event)
            return
        number = known[hashes[first]].number
        parent = hashes[first - 1] if first else event.parent_block_hash
        size = event.block_size
        if first:
            exact.append(_part(event, slice(first)))
        rest = _part(event, slice(first, None))
        found, last = [], parent
        for one in rest.block_hashes:
            blocks = known[one]
            blocks.count += 1
            copied = (self._moved.get(one), self._begun.get(one), self._begun_after.get(last))
            known_hops = [hops for hops in (blocks.hops, *copied) if hops is not None]
            blocks.hops = max(known_hops, default=None)
            found.append(blocks.hops)
            last = one
        others.append(
            ApproximateBlockStored(
                block_hashes=rest.block_hashes,
                parent_block_hash=parent,
                token_ids=rest.token_ids,
                block_size=size,
                position=number * size,
                classes=[AFTER_MOVED if hops is None else MOVED for hops in found],
                hops=[hops or 0 for hops in found],
                medium=event.medium,
                lora_name=event.lora_name,
                extra_keys=rest.extra_keys,
                group_idx=event.group_idx,
            )
        )

    def _sort_removed(self, event: BlockRemoved, exact: list[Any], others: list[Any]) -> None:
        known, hashes = self._approximate, event.block_hashes
        for blocks in (known[one] for one in hashes if one in known):
            blocks.count = max(0, blocks.count - 1)
            if not blocks.count:
                blocks.hops = None
        for into, wanted in ((exact, False), (others, True)):
            mine = [one for one in hashes if (one in known) is wanted]
            if mine:
                into.append(msgspec.structs.replace(event, block_hashes=mine))

    def _prune(self) -> None:
        """Forget hashes that no block has and no request can continue from.

        It looks at all of them, so as many blocks are stored before it does so again.
        """
        kept = {
            maybe_convert_block_hash(get_block_hash(block.block_hash))
            for block in self._pool.blocks
            if block.block_hash is not None
        }
        num_looked = 0
        for request in self._requests():
            num_looked += len(request.block_hashes)
            kept.update(maybe_convert_block_hash(one) for one in request.block_hashes)
        for known in (self._approximate, self._begun, self._begun_after):
            for one in known.keys() - kept:
                del known[one]
        num_known = self._num_known()
        more = max(int(self._pool.num_gpu_blocks), num_known)
        self._limit = max(2 * more, num_known + num_looked)

    def _num_known(self) -> int:
        return max(len(self._approximate), len(self._begun), len(self._begun_after))


def publisher(given: Mapping[str, Any] | None, vllm_config: VllmConfig) -> EventPublisher | None:
    """Where the events of approximate blocks go; None without the setting ``events``.

    Raises:
        SettingsError: vLLM publishes no events, or the endpoint cannot be used.
    """
    if given is None:
        return None
    theirs = vllm_config.kv_events_config
    if theirs is None or not theirs.enable_kv_cache_events:
        msg = f"{WHERE}: events needs vLLM's own: start it with --kv-events-config "
        msg += """'{"enable_kv_cache_events": true}', or remove the setting"""
        raise SettingsError(msg)
    config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", **{"topic": TOPIC, **given}
    )
    for name in ("endpoint", "replay_endpoint"):
        said = getattr(config, name)
        if said is not None and said in (theirs.endpoint, theirs.replay_endpoint):
            msg = f"{WHERE}: events: {name} {said!r} is in --kv-events-config too: choose another"
            raise SettingsError(msg)
    try:
        return EventPublisherFactory.create(config, vllm_config.parallel_config.data_parallel_index)
    except (zmq.ZMQError, ValueError) as error:
        msg = f"{WHERE}: events: endpoint {config.endpoint!r}: {error}"
        raise SettingsError(msg) from error


def _part(event: BlockStored, blocks: slice) -> BlockStored:
    size = event.block_size
    start, stop, _ = blocks.indices(len(event.block_hashes))
    changed: dict[str, Any] = {"token_ids": event.token_ids[start * size : stop * size]}
    for name in _PER_BLOCK:
        per_block = getattr(event, name, None)
        if per_block is not None:
            changed[name] = per_block[blocks]
    return msgspec.structs.replace(event, **changed)
