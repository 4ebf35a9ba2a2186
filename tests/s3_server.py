"""An S3 server of the test's own, moto's, on 127.0.0.1; it can die, stall and break off."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import socket
import threading
from typing import TYPE_CHECKING, Any, Self
from unittest import mock
from urllib.request import Request, urlopen

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_NUMBERS = itertools.count()


class Relay:
    """Passes bytes on between clients and a server.

    Attributes:
        passes: Bytes of replies after which every connection breaks off, and none is taken; None
            for no end.
        drops: Connections that break off in place of their next reply.
        connections: How many clients have connected.
    """

    def __init__(self, port: int) -> None:
        self.passes: int | None = None
        self.drops = 0
        self.connections = 0
        self._to = port
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._lock = threading.Lock()
        self._clients: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self) -> None:
        """Pass no more replies on."""
        self._goes_on.clear()

    def close(self) -> None:
        self._goes_on.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for client in self._clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                self._clients.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            client,
            socket.create_connection(("127.0.0.1", self._to)) as server,
        ):
            asking = threading.Thread(target=self._ask, args=(client, server), daemon=True)
            asking.start()
            while piece := server.recv(1 << 16):
                self._goes_on.wait()
                if not self._reply(client, piece):
                    break
            # The other thread waits for it.
            client.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _ask(client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := client.recv(1 << 16):
                server.sendall(piece)
            server.shutdown(socket.SHUT_WR)

    def _reply(self, client: socket.socket, piece: bytes) -> bool:
        with self._lock:
            if self.drops:
                self.drops -= 1
                return False
            if self.passes is not None:
                piece = piece[: self.passes]
                self.passes -= len(piece)
            client.sendall(piece)
            return self.passes != 0


class S3Bucket:
    """An empty bucket, and the variables by which obstore finds it while it is entered."""

    def __init__(self) -> None:
        server: Any = pytest.importorskip("moto.server", reason="moto is not installed")
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        _, port = self._server.get_host_and_port()
        self.relay = Relay(port)
        self.name = f"bucket-{next(_NUMBERS)}"
        self.url = f"s3://{self.name}"
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.relay.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "owner",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
        self._patched = mock.patch.dict(os.environ, self.environment)
        made = Request(f"http://127.0.0.1:{port}/{self.name}", method="PUT")
        with urlopen(made) as reply:  # noqa: S310 - likewise
            assert reply.status == 200

    def fill(self, names: list[str], value: bytes) -> None:
        """Store many objects without a request for each."""
        models = importlib.import_module("moto.s3.models")
        backend = models.s3_backends["123456789012"]["aws"]
        for name in names:
            backend.put_object(self.name, name, value)

    @contextlib.contextmanager
    def checks_keys(self, *, enabled: bool = True) -> Iterator[None]:
        """Refuse requests that are not signed with a key that it knows; it knows none."""
        settings = importlib.import_module("moto.settings")
        least = 0.0 if enabled else float("inf")
        with mock.patch.object(settings, "INITIAL_NO_AUTH_ACTION_COUNT", least):
            yield

    def kill(self) -> None:
        """Take no more connections, and answer none."""
        self.relay.passes = 0
        self.relay.close()
        self._server.stop()

    def __enter__(self) -> Self:
        self._patched.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patched.stop()
        self.kill()
