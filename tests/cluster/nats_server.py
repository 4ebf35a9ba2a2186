"""A nats-server of the test's own, on 127.0.0.1, which can be killed and started again."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Self

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = shutil.which("nats-server")
needs_nats = pytest.mark.skipif(PROGRAM is None, reason="nats-server is not installed")
SECONDS = 60.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


class NatsServer:
    """JetStream with a file store under one folder."""

    def __init__(self, folder: Path, *, max_payload: int = 1 << 20) -> None:
        assert PROGRAM is not None
        self.folder = folder
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self.config = folder / "nats.conf"
        self.config.write_text(
            f'listen: "127.0.0.1:{self.port}"\nmax_payload: {max_payload}\n'
            f'jetstream {{ store_dir: "{folder / "store"}" }}\n'
        )
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [str(PROGRAM), "--config", str(self.config), "--log", str(self.folder / "nats.log")]
        )
        end = time.monotonic() + SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                assert self.process.poll() is None, "nats-server has ended"
                assert time.monotonic() < end, "nats-server does not listen"
                time.sleep(0.02)
            else:
                return

    def kill(self) -> None:
        """As kill -9 does."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
