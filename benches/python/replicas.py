"""Events of one engine on their way to three replicas, over a nats-server that is killed.

    python benches/python/replicas.py [--batches 5000] [--slow 300] [--kills 5]

A made-up engine publishes batches of 8 blocks of 16 tokens, as vLLM does, with a replay socket. A
bridge passes them on over JetStream, and three replicas in processes of their own follow it. The
engine and the bridge are threads of this process. nats-server has its default file store. All are
on 127.0.0.1.

Printed:

* how many batches a second reach all three replicas, if the engine sends them at once;
* how long one takes from the engine's send until a replica has applied it, if they come one every
  20 ms: the median and the 99th percentile. Replicas look every millisecond;
* how long it takes from the start of nats-server until all replicas are live with everything that
  the engine sent, after `kill -9`, with 100 batches sent meanwhile. Their digests must be equal.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import zmq

import kvtrie
from kvtrie.cluster import bridge, follow

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

Answer = tuple[list[float], float, int]

REPLICAS = 3
BLOCKS, BLOCK_SIZE = 8, 16
KEY = b"the key of a bench"
NAME = "decode-0"
NAMESPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
PAUSE = 0.02
KILLED_FOR = 100
PATIENCE = 600.0


class Engine:
    """Publishes batches that store blocks after those before, and repeats what is asked for."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.pub, self.router = (self.context.socket(kind) for kind in (zmq.PUB, zmq.ROUTER))
        # As vLLM's by default.
        self.pub.set_hwm(100_000)
        for one in (self.pub, self.router):
            one.bind("tcp://127.0.0.1:0")
        self.endpoint = self.pub.get_string(zmq.LAST_ENDPOINT)
        self.replay = self.router.get_string(zmq.LAST_ENDPOINT)
        self.sent: list[bytes] = []
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.answer, daemon=True)
        self.thread.start()

    def made(self, number: int) -> bytes:
        first = number * BLOCKS
        stored = {
            "type": "BlockStored",
            "block_hashes": list(range(first, first + BLOCKS)),
            "parent_block_hash": first - 1 if first else None,
            "token_ids": [(first * BLOCK_SIZE + at) % 128_000 for at in range(BLOCKS * BLOCK_SIZE)],
            "block_size": BLOCK_SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
        packed: bytes = msgpack.packb([0.0, [stored], 0])
        return packed

    def send(self, count: int, pause: float = 0.0) -> list[float]:
        """When each batch was sent, in seconds of the machine's clock."""
        first = len(self.sent)
        batches = [self.made(number) for number in range(first, first + count)]
        found = []
        for number, batch in enumerate(batches, first):
            self.sent.append(batch)
            found.append(time.monotonic())
            self.pub.send_multipart([b"", number.to_bytes(8, "big"), batch])
            if pause:
                time.sleep(pause)
        return found

    def answer(self) -> None:
        while not self.stopped.is_set():
            if not self.router.poll(50):
                continue
            client, empty, first = self.router.recv_multipart()
            for number in range(int.from_bytes(first, "big"), len(self.sent)):
                frames = [b"", number.to_bytes(8, "big"), self.sent[number]]
                self.router.send_multipart([client, empty, *frames])
            end = (-1).to_bytes(8, "big", signed=True)
            self.router.send_multipart([client, empty, b"", end, b""])

    def close(self) -> None:
        self.stopped.set()
        self.thread.join()
        self.context.destroy(linger=0)


class Nats:
    """A nats-server on 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("nats-server")
        if program is None:
            sys.exit("replicas: nats-server is missing (on Debian and Ubuntu: nats-server)")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.url = f"nats://127.0.0.1:{self.port}"
        config = folder / "nats.conf"
        config.write_text(
            f'listen: "127.0.0.1:{self.port}"\njetstream {{ store_dir: "{folder / "store"}" }}\n'
        )
        self.command = [program, "--config", str(config), "--log", str(folder / "nats.log")]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command)  # noqa: S603 - what `which` found
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                if self.process.poll() is not None:
                    sys.exit("replicas: nats-server has ended")
                time.sleep(0.005)
            else:
                return

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Follower:
    """A replica in a process of its own."""

    def __init__(self, url: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=followed, args=(url, theirs), daemon=True)
        self.process.start()

    def ask(self, count: int) -> None:
        """Ask for the moments of all batches up to a number, and then for a live state."""
        self.pipe.send(count)

    def answer(self) -> Answer:
        """When each batch was applied, when the worker was live after that, and its digest."""
        if not self.pipe.poll(PATIENCE):
            sys.exit("replicas: a replica has not got everything in ten minutes")
        found: Answer = self.pipe.recv()
        return found

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join(30)


def followed(url: str, pipe: Connection[Any, Any]) -> None:
    """What a replica's process does."""
    index = kvtrie.KvIndexer(BLOCK_SIZE, KEY)
    worker = index.add_worker(NAME, NAMESPACE)
    with follow(index, {NAME: worker}, servers=url, timeout=60) as replica:
        seen = 0
        while (count := pipe.recv()) is not None:
            moments: list[float] = []
            while seen < count:
                now = replica.counts["batches"]
                if now == seen:
                    time.sleep(0.001)
                    continue
                moments += [time.monotonic()] * (now - seen)
                seen = now
            replica.wait(NAME, "live", PATIENCE)
            pipe.send((moments, time.monotonic(), index.digest(worker)))


@dataclass(frozen=True)
class Measured:
    """Batches a second, seconds of each batch to each replica, and seconds of each recovery."""

    rate: float
    latencies: list[float]
    recoveries: list[float]

    def __str__(self) -> str:
        late = sorted(self.latencies)
        healed = sorted(self.recoveries)
        return (
            f"at once: {self.rate:,.0f} batches/s ({self.rate * BLOCKS:,.0f} blocks/s) "
            f"reach all {REPLICAS} replicas\n"
            f"one every {PAUSE * 1000:.0f} ms: {1000 * statistics.median(late):.1f} ms in the "
            f"median, {1000 * late[int(0.99 * len(late))]:.1f} ms at the 99th percentile\n"
            f"after kill -9 of nats-server: {statistics.median(healed):.2f} s in the median, "
            f"{healed[-1]:.2f} s at most, of {len(healed)}, from its start until all replicas are "
            "live and equal"
        )


def measured(batches: int, slow: int, kills: int) -> Measured:
    """Run it.

    Args:
        batches: Batches sent at once.
        slow: Batches sent one every 20 ms.
        kills: How often nats-server is killed.

    Raises:
        RuntimeError: Replicas differ from the bridge, which must not be.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nats = Nats(folder)
        stack.callback(nats.kill)
        engine = Engine()
        stack.callback(engine.close)
        index = kvtrie.KvIndexer(BLOCK_SIZE, KEY)
        worker = index.add_worker(NAME, NAMESPACE)
        source = stack.enter_context(
            bridge(index, worker, NAME, engine.endpoint, engine.replay, servers=nats.url)
        )
        followers = [Follower(nats.url) for _ in range(REPLICAS)]
        for one in followers:
            stack.callback(one.close)

        def all_of(count: int) -> list[Answer]:
            found = [one.answer() for one in followers]
            source.wait("live", PATIENCE)
            if {digest for _, _, digest in found} != {index.digest(worker)}:
                msg = f"after {count} batches the digests differ"
                raise RuntimeError(msg)
            return found

        def ask(more: int) -> int:
            count = len(engine.sent) + more
            for one in followers:
                one.ask(count)
            return count

        # Everything is connected.
        count = ask(1)
        engine.send(1)
        all_of(count)

        count = ask(batches)
        sent = engine.send(batches)
        last = max(moments[-1] for moments, *_ in all_of(count))
        rate = batches / (last - sent[0])

        count = ask(slow)
        sent = engine.send(slow, PAUSE)
        arrived = [moments for moments, *_ in all_of(count)]
        latencies = [at - start for one in arrived for at, start in zip(one, sent, strict=True)]

        recoveries = []
        for _ in range(kills):
            nats.kill()
            engine.send(KILLED_FOR)
            started = time.monotonic()
            nats.start()
            count = ask(0)
            recoveries.append(max(live for _, live, *_ in all_of(count)) - started)
        return Measured(rate, latencies, recoveries)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--batches", type=int, default=5000, help="sent at once")
    parser.add_argument("--slow", type=int, default=300, help="sent one every 20 ms")
    parser.add_argument("--kills", type=int, default=5, help="kills of nats-server")
    given = parser.parse_args(arguments)
    print(measured(given.batches, given.slow, given.kills))


if __name__ == "__main__":
    main()
