"""The source of snapshots, fed with the batches that SGLang publishes.

SGLang publishes each list of events that it takes from the cache as one batch, in the thread that
took it, unless the list is empty; another thread numbers the batches from 0, in their order. So the
cache hands over each list as it is taken (`KvtrieCache.take_events`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventsConfig,
    parse_tcp_port,
    resolve_load_pub_range,
)

from kvtrie.integrations._asked import SNAPSHOTS, SettingsError
from kvtrie.integrations._snapshots import EventForm, SnapshotSource
from kvtrie.integrations.sglang._settings import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from sglang.srt.server_args import ServerArgs

_LOG = logging.getLogger("sglang.kvtrie")

EVENTS: Final = EventForm(
    "SGLang",
    BlockStored,
    BlockRemoved,
    AllBlocksCleared,
    shared=("block_size", "lora_id", "medium", "cache_salt", "lora_name"),
    place=("medium",),
)
# A server with more replicas is refused.
_RANK: Final = 0


def check(given: Mapping[str, Any] | None, args: ServerArgs) -> str | None:
    """Where snapshots are given; None without the setting ``snapshot``.

    Raises:
        SettingsError: SGLang publishes no events over ZeroMQ, or needs the endpoint itself.
    """
    if given is None:
        return None
    theirs = KVEventsConfig.from_cli(args.kv_events_config) if args.kv_events_config else None
    if theirs is None or theirs.publisher != "zmq":
        msg = f"{VARIABLE}: snapshot needs SGLang's events: start it with --kv-events-config "
        msg += """'{"publisher": "zmq"}', or remove the setting"""
        raise SettingsError(msg)
    endpoint: str = given.get("endpoint", SNAPSHOTS)
    load, _ = resolve_load_pub_range(
        kv_endpoint=theirs.endpoint,
        replay_endpoint=theirs.replay_endpoint,
        dp_size=1,
        load_publish_endpoint=args.load_publish_endpoint,
    )
    taken = [theirs.endpoint, theirs.replay_endpoint]
    ports = {parse_tcp_port(one) for one in taken} | ({load[1]} if load else set())
    # SGLang binds its own sockets later, and would fail at them.
    port = parse_tcp_port(endpoint)
    if endpoint in taken or (port is not None and port in ports):
        msg = f"{VARIABLE}: snapshot: endpoint {endpoint!r} is another one's too: choose another"
        raise SettingsError(msg)
    return endpoint


def source(endpoint: str, num_pages: int) -> SnapshotSource:
    """The source of snapshots of a pool with so many pages.

    Raises:
        SettingsError: The endpoint cannot be used.
    """
    return SnapshotSource(endpoint, EVENTS, rank=_RANK, most=num_pages, where=VARIABLE, log=_LOG)
