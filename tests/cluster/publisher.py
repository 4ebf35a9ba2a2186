"""A publisher of KV events as vLLM's and SGLang's: PUB, ROUTER, numbers from 0, a replay buffer.

And a source of snapshots as kvtrie's connector: a snapshot repeats everything from the start.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Self

import msgpack
import zmq

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZE = 2


def stored(hashes: Sequence[int], parent: int | None, tokens: Sequence[int]) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def removed(*hashes: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


CLEARED = {"type": "AllBlocksCleared"}


def packed(*events: dict[str, Any], rank: int = 0) -> bytes:
    packed: bytes = msgpack.packb([0.5, list(events), rank])
    return packed


class Publisher:
    """Runs in a thread of its own, because sockets belong to one."""

    def __init__(
        self,
        *,
        endpoint: str = "tcp://127.0.0.1:0",
        replay: str = "tcp://127.0.0.1:0",
        snapshot: str = "tcp://127.0.0.1:0",
        kernel_buffer: int = -1,
    ) -> None:
        self.context = zmq.Context()
        self.pub = self.context.socket(zmq.PUB)
        # Bytes that wait there for who does not read; -1: as the system has it.
        self.pub.set(zmq.SNDBUF, kernel_buffer)
        self.router = self.context.socket(zmq.ROUTER)
        self.source = self.context.socket(zmq.ROUTER)
        for socket, at in ((self.pub, endpoint), (self.router, replay), (self.source, snapshot)):
            # A restart takes the port of the life before.
            socket.bind(at)
        self.endpoint = self.pub.get_string(zmq.LAST_ENDPOINT)
        self.replay = self.router.get_string(zmq.LAST_ENDPOINT)
        self.snapshot = self.source.get_string(zmq.LAST_ENDPOINT)
        self.incarnation = "a life"
        self.history: list[dict[str, Any]] = []
        self.num_states = self.num_snapshots = 0
        # What is answered in place of a header and a batch; an empty list: nothing.
        self.spoil: Callable[[list[bytes]], list[bytes]] = list
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=50)
        self.number = 0
        self.asked: list[int] = []
        self.mangle: Callable[[list[list[bytes]]], list[list[bytes]]] = list
        self.topic = b""
        self.has_topic = True
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def send(self, *events: dict[str, Any], number: int | None = None, lost: bool = False) -> None:
        with self.lock:
            self.history += events
        self.send_raw(packed(*events), number=number, lost=lost)

    def send_raw(self, payload: bytes, *, number: int | None = None, lost: bool = False) -> None:
        with self.lock:
            if number is None:
                number, self.number = self.number, self.number + 1
                self.buffer.append((number, payload))
            if not lost:
                self.pub.send_multipart([self.topic, number.to_bytes(8, "big"), payload])

    def serve(self) -> None:
        while not self.stop.is_set():
            if self.source.poll(5):
                self.give(*self.source.recv_multipart())
            if not self.router.poll(5):
                continue
            client, empty, first = self.router.recv_multipart()
            assert empty == b""
            with self.lock:
                self.asked.append(int.from_bytes(first, "big"))
                topic = [self.topic] if self.has_topic else []
                frames = [
                    [client, b"", *topic, number.to_bytes(8, "big"), payload]
                    for number, payload in self.buffer
                    if number >= self.asked[-1]
                ]
            for message in self.mangle(frames):
                self.router.send_multipart(message)
            end = (-1).to_bytes(8, "big", signed=True)
            self.router.send_multipart([client, b"", *topic, end, b""])

    def header(self, **changes: Any) -> bytes:
        said = {"version": 1, "incarnation": self.incarnation, "number": self.number - 1}
        return json.dumps(said | changes).encode()

    def give(self, client: bytes, empty: bytes, asked: bytes) -> None:
        assert empty == b""
        with self.lock:
            answer = [self.header()]
            if asked == b"state":
                self.num_states += 1
            else:
                assert asked == b"snapshot"
                answer = self.spoil([*answer, packed(CLEARED, *self.history)])
                self.num_snapshots += 1
        if answer:
            self.source.send_multipart([client, b"", *answer])

    def close(self) -> None:
        self.stop.set()
        self.thread.join()
        self.context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
