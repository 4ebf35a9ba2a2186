"""vLLM's OpenAI-compatible server, in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class Server:
    """A server at a port; `kill` and `start` again as a test wants."""

    def __init__(self, model: Path, folder: Path, *more: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "log"
        self._command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        self._command += ["--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
        self._command += ["--dtype", "float32", "--block-size", "32", "--enforce-eager"]
        self._command += ["--max-model-len", "4096", "--num-gpu-blocks-override", "200"]
        self._command += ["--enable-prompt-tokens-details", *more]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
        }
        with self.log.open("w") as out:
            # A group of its own: the engine is another process than the server.
            self._process = subprocess.Popen(
                self._command, stdout=out, stderr=out, env=environment, start_new_session=True
            )

    def wait(self, seconds: int = 780) -> None:
        """Until it answers."""
        # Minutes on a busy machine; the limit of the suite ends what hangs.
        for _ in range(seconds):
            if self._process is None or self._process.poll() is not None:
                pytest.fail(f"the server ended:\n{self.log.read_text()[-3000:]}")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2)  # noqa: S310 - our own
            except OSError:
                time.sleep(1)
            else:
                return
        pytest.fail(f"the server does not answer:\n{self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        """With its engine, at once."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(60)
            self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None


@contextmanager
def serving(model: Path, folder: Path, *more: str) -> Iterator[str]:
    """The address of a server; its log is in ``folder``."""
    server = Server(model, folder, *more)
    server.start()
    try:
        server.wait()
        yield server.url
    finally:
        server.stop()
