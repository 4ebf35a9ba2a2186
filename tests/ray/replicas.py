"""A replica that publishes what it is sent as cached, and returns its name."""

from __future__ import annotations

from typing import Any

import msgpack
import zmq
from ray import serve

SIZE = 4


def tokens(request: object) -> list[int] | None:
    """The ids of a request."""
    return request.get("ids") if isinstance(request, dict) else None


class Engine:
    """Caches each prompt, and never evicts."""

    def __init__(self) -> None:
        self.socket: Any = zmq.Context.instance().socket(zmq.PUB)
        self.socket.bind("tcp://127.0.0.1:0")
        self.endpoint: str = self.socket.get_string(zmq.LAST_ENDPOINT)
        self.name: str = serve.get_replica_context().replica_id.unique_id
        self.number = 0
        self.hashes: dict[tuple[int, ...], int] = {}

    async def record_routing_stats(self) -> dict[str, Any]:
        return {"kvtrie": {"events": self.endpoint}}

    async def __call__(self, request: dict[str, Any]) -> str:
        ids = request["ids"]
        if request.get("cache", True):
            paths = [tuple(ids[: end + SIZE]) for end in range(0, len(ids) // SIZE * SIZE, SIZE)]
            names = [self.hashes.setdefault(path, len(self.hashes)) for path in paths]
            event = {
                "type": "BlockStored",
                "block_hashes": names,
                "parent_block_hash": None,
                "token_ids": ids[: len(names) * SIZE],
                "block_size": SIZE,
                "medium": "GPU",
            }
            payload = msgpack.packb([0.0, [event], 0])
            self.socket.send_multipart([b"", self.number.to_bytes(8, "big"), payload])
            self.number += 1
        return self.name
