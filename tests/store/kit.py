"""What tests of the store share: small stores, rows of known bytes, backends and their servers."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest
from tests.s3_server import S3Bucket

import kvtrie
from kvtrie.store import (
    HostBackend,
    MooncakeBackend,
    ObjectBackend,
    SpanRows,
    SpanShape,
    SpanStore,
    StoreKey,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtrie.store import Backend, SpanRun

SECRET = b"a secret of the store's owner"
SPACE = kvtrie.Namespace(model="m@1", kv_dtype="float32", salt="tenant-a")
SHAPE = SpanShape(num_layers=2, num_kv_heads=1, k_bytes=8, v_bytes=4, kv_dtype="float32")
SECONDS = 60.0


def make_store(backend: Backend | None = None, **options: Any) -> SpanStore:
    options.setdefault("max_bytes", 1 << 24)
    key = options.pop("key", None) or StoreKey(SECRET)
    space = options.pop("space", SPACE)
    shape = options.pop("shape", SHAPE)
    return SpanStore(backend or HostBackend(1 << 24), key, space, shape, **options)


def rows(num_tokens: int, seed: int = 0, shape: SpanShape = SHAPE) -> SpanRows:
    draw = np.random.default_rng(seed)
    return SpanRows(
        draw.integers(0, 256, (shape.num_layers, num_tokens, shape.k_bytes), np.uint8),
        draw.integers(0, 256, (shape.num_layers, num_tokens, shape.v_bytes), np.uint8),
    )


def run_of(store: SpanStore, ids: list[int], space: kvtrie.Namespace = SPACE) -> SpanRun:
    (run,) = store.runs(kvtrie.TokenSequence(ids, space), [])
    return run


def read(store: SpanStore, run: SpanRun, at: tuple[int, int]) -> SpanRows | None:
    into = store.shape.empty(at[1] - at[0])
    found = store.get_ranges(run, [at], [into])
    return into if found is not None and found[1] == [True] else None


def same(one: SpanRows, other: SpanRows) -> bool:
    return np.array_equal(one.k, other.k) and np.array_equal(one.v, other.v)


def _master() -> str | None:
    found = shutil.which("mooncake_master")
    if found is None:
        sibling = Path(sys.executable).with_name("mooncake_master")
        found = str(sibling) if sibling.exists() else None
    return found


def _client() -> str:
    """Why Mooncake's client cannot be imported; empty if it can."""
    try:
        import mooncake.store  # noqa: F401, PLC0415 - optional
    except ImportError as error:
        return str(error)
    return ""


MASTER = _master()
WHY = _client() or ("" if MASTER else "mooncake_master is not installed")
needs_mooncake = pytest.mark.skipif(bool(WHY), reason=f"Mooncake Store: {WHY}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


class MooncakeMaster:
    """A mooncake_master of the test's own, on 127.0.0.1."""

    def __init__(self) -> None:
        assert MASTER is not None
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [
                MASTER,
                "-rpc_address=127.0.0.1",
                f"-rpc_port={self.port}",
                "-metrics_host=127.0.0.1",
                f"-metrics_port={free_port()}",
                "-minloglevel=3",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                assert self.process.poll() is None, "mooncake_master has ended"
                assert time.monotonic() < end, "mooncake_master does not listen"
                time.sleep(0.02)
            else:
                return

    def kill(self) -> None:
        """As kill -9 does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


# Object stores, which outlive the process.
OBJECTS = ["folder", "s3"]
KINDS = ["host", *OBJECTS, pytest.param("mooncake", marks=needs_mooncake)]
# Those that a server keeps.
SERVERS = ["s3", pytest.param("mooncake", marks=needs_mooncake)]


@contextmanager
def url_of(kind: str, folder: Path) -> Iterator[str]:
    """The URL of an empty object store."""
    pytest.importorskip("obstore", reason="obstore is not installed")
    if kind == "folder":
        yield f"file://{folder / 'objects'}"
    else:
        with S3Bucket() as bucket:
            yield bucket.url


@contextmanager
def opened(kind: str, folder: Path, prefix: str = "model-a/") -> Iterator[Backend]:
    """An empty backend."""
    if kind == "host":
        yield HostBackend(1 << 22)
    elif kind in OBJECTS:
        with url_of(kind, folder) as url:
            yield ObjectBackend.from_url(url, prefix=prefix)
    else:
        with served(kind) as (backend, _):
            yield backend


@contextmanager
def served(kind: str) -> Iterator[tuple[Backend, Callable[[], None]]]:
    """An empty backend that a server keeps, and what kills it."""
    if kind == "s3":
        pytest.importorskip("obstore", reason="obstore is not installed")
        with S3Bucket() as bucket:
            yield ObjectBackend.from_url(bucket.url), bucket.kill
        return
    with MooncakeMaster() as master:
        client = MooncakeBackend(master.address, segment_bytes=16 << 20, buffer_bytes=4 << 20)
        try:
            yield client, master.kill
        finally:
            client.close()
