"""The source of snapshots, fed with the batches that vLLM publishes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from kvtrie.integrations._asked import SNAPSHOTS, SettingsError
from kvtrie.integrations._snapshots import EventForm, SnapshotSource
from kvtrie.integrations.vllm._settings import WHERE
from kvtrie.integrations.vllm._vllm import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ZmqEventPublisher,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool

    from kvtrie.integrations.vllm._stats import Counts

_LOG = logging.getLogger("vllm.kvtrie")

EVENTS: Final = EventForm(
    "vLLM",
    BlockStored,
    BlockRemoved,
    AllBlocksCleared,
    shared=("block_size", "lora_id", "lora_name", "medium", "group_idx"),
    place=("medium", "group_idx"),
)


class Snapshots(SnapshotSource):
    """The source of snapshots of vLLM's pool.

    Args:
        endpoint: Where.
        rank: The data-parallel rank that vLLM's batches have.
        pool: vLLM's pool.
        counts: Where an error is counted.

    Raises:
        SettingsError: The endpoint cannot be used.
    """

    def __init__(self, endpoint: str, rank: int, pool: BlockPool, counts: Counts) -> None:
        super().__init__(
            endpoint, EVENTS, rank=rank, most=pool.num_gpu_blocks, where=WHERE, log=_LOG
        )
        self._pool = pool
        self._errors = counts
        # What vLLM takes next.
        self._next: list[Any] | None = None

    def look(self) -> None:
        """Note the events that wait in the pool, just before vLLM takes them."""
        self._next = self._pool.kv_event_queue

    def published(self) -> None:
        """Take over the batch that vLLM has just taken, and publishes next if it is not empty."""
        taken, self._next = self._next, None
        if taken is None or taken is self._pool.kv_event_queue:
            self.fail("vLLM took KV events unseen")
        if self.hand_over(taken or []):
            self._errors.add("errors")


def snapshots(
    given: Mapping[str, Any] | None,
    others: Mapping[str, Any] | None,
    vllm_config: VllmConfig,
    pool: BlockPool,
    counts: Counts,
) -> Snapshots | None:
    """The source of snapshots; None without the setting ``snapshot``.

    Args:
        given: The setting.
        others: The setting ``events``.
        vllm_config: vLLM's configuration.
        pool: vLLM's pool.
        counts: Where an error is counted.

    Raises:
        SettingsError: vLLM publishes no events over ZeroMQ, or the endpoint cannot be used.
    """
    if given is None:
        return None
    theirs = vllm_config.kv_events_config
    if theirs is None or not theirs.enable_kv_cache_events or theirs.publisher != "zmq":
        msg = f"{WHERE}: snapshot needs vLLM's events: start it with --kv-events-config "
        msg += """'{"enable_kv_cache_events": true, "publisher": "zmq"}', or remove the setting"""
        raise SettingsError(msg)
    endpoint: str = given.get("endpoint", SNAPSHOTS)
    taken = [theirs.endpoint, theirs.replay_endpoint]
    taken += [(others or {}).get(name) for name in ("endpoint", "replay_endpoint")]
    if endpoint in taken:
        msg = f"{WHERE}: snapshot: endpoint {endpoint!r} is another one's too: choose another"
        raise SettingsError(msg)
    rank = vllm_config.parallel_config.data_parallel_index
    try:
        offset = ZmqEventPublisher.offset_endpoint_port(endpoint, rank)
    except ValueError as error:
        msg = f"{WHERE}: snapshot: endpoint {endpoint!r}: {error}"
        raise SettingsError(msg) from error
    return Snapshots(offset, rank, pool, counts)
