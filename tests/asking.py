"""What anybody may send to a source of snapshots, and what comes of it."""

from __future__ import annotations

import json
import time
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import zmq

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from kvtrie.integrations._snapshots import SnapshotSource

SECONDS = 30.0
MOST_WAITING = 64


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


class Client:
    """Asks a source as others may."""

    def __init__(self, endpoint: str) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.endpoint = endpoint
        self.sockets: list[Any] = []

    def ask(self, *frames: bytes, **options: int) -> Any:
        socket = self.context.socket(zmq.DEALER)
        for name, value in options.items():
            socket.set(getattr(zmq, name), value)
        socket.connect(self.endpoint)
        socket.send_multipart(list(frames))
        self.sockets.append(socket)
        return socket

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)


def answers(source: SnapshotSource, number: int) -> bytes:
    """Ask in every way; returns the batch of the snapshot that counts up to a number."""
    with Client(source.endpoint) as client:
        state = client.ask(b"", b"state")
        assert state.poll(10_000)
        empty, header = state.recv_multipart()
        said = json.loads(header)
        assert empty == b""
        assert said == {"version": 1, "incarnation": source.incarnation, "number": number}
        assert len(source.incarnation) == 32
        # Whatever else is asked is counted.
        for frames in ([b"snapshot"], [b"", b"snap"], [b"", b"state", b""], [b"", b""]):
            client.ask(*frames)
        until(lambda: source.counts["refused"] == 4)
        # One snapshot is made for all who wait.
        source._rests_until = float("inf")
        waiting = [client.ask(b"", b"snapshot") for _ in range(MOST_WAITING + 16)]
        until(lambda: source.counts["refused"] == 4 + 16)
        source._rests_until = 0.0
        until(lambda: source.counts["sent"] == MOST_WAITING)
        assert source.counts["made"] == 1
        until(lambda: sum(bool(one.poll(0)) for one in waiting) == MOST_WAITING)
        _, header, batch = next(one for one in waiting if one.poll(0)).recv_multipart()
        assert json.loads(header) == said
        # Too large to be read at all.
        client.ask(b"", b"x" * 65)
        again = client.ask(b"", b"state")
        assert again.poll(10_000)
    assert source.counts["refused"] == 20
    given: bytes = batch
    return given


def rests(source: SnapshotSource) -> None:
    """After each snapshot, others wait for the next."""
    with Client(source.endpoint) as client:
        began = time.monotonic()
        assert client.ask(b"", b"snapshot").poll(10_000)
        # The thread notes it when it has sent the answer.
        until(lambda: source._rests_until >= began + 0.5)
        source._rests_until = float("inf")
        second = client.ask(b"", b"snapshot")
        until(lambda: len(source._waiting) == 1)
        # Others are answered.
        assert client.ask(b"", b"state").poll(10_000)
        assert not second.poll(0)


def does_not_read(source: SnapshotSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not read gets no more."""

    def has_sent(number: int) -> bool:
        return source.counts["sent"] == number

    # More than the kernel keeps.
    monkeypatch.setattr(source._held, "encoded", lambda _: bytearray(4 << 20))
    with Client(source.endpoint) as client:
        socket = client.ask(b"", b"snapshot", RCVHWM=1)
        for number in range(1, 12):
            until(partial(has_sent, number))
            source._rests_until = 0.0
            socket.send_multipart([b"", b"snapshot"])
        count = 0
        while socket.poll(300):
            socket.recv_multipart()
            count += 1
        assert count <= 6


def floods(source: SnapshotSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of requests is read in parts."""
    waits: list[int] = []

    def wait(_: float) -> None:
        waits.append(source.counts["states"])

    monkeypatch.setattr(source._stop, "wait", wait)
    with Client(source.endpoint) as client:
        socket = client.ask(b"", b"state")
        for _ in range(499):
            socket.send_multipart([b"", b"state"])
        until(lambda: bool(waits) and waits[-1] == 500)
    parts = [after - before for before, after in pairwise([0, *waits])]
    assert 0 < max(parts) <= MOST_WAITING
