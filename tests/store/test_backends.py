"""The backends: same bytes, and no wrong byte and no hang when they fail."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from tests.store.kit import (
    SHAPE,
    MooncakeMaster,
    make_store,
    needs_mooncake,
    read,
    rows,
    run_of,
    same,
)

from kvtrie.store import (
    Backend,
    BackendError,
    HostBackend,
    MooncakeBackend,
    ObjectBackend,
    SpanShape,
    StoreRefused,
)
from kvtrie.store.runs import LONGEST

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KINDS = ["host", "folder", pytest.param("mooncake", marks=needs_mooncake)]


@contextmanager
def opened(kind: str, folder: Path) -> Iterator[Backend]:
    if kind == "host":
        yield HostBackend(1 << 22)
    elif kind == "folder":
        pytest.importorskip("obstore", reason="obstore is not installed")
        yield ObjectBackend.from_url(f"file://{folder / 'objects'}", prefix="model-a/")
    else:
        with MooncakeMaster() as master:
            client = MooncakeBackend(master.address, segment_bytes=16 << 20, buffer_bytes=4 << 20)
            try:
                yield client
            finally:
                client.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_backend_keeps_bytes_and_reads_ranges(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as backend:
        value = bytearray(range(256)) * 20
        backend.put("a/b", value)
        found = backend.read("a/b", [(0, 10), (300, 700), (5119, 5120)])
        assert found is not None
        assert [bytes(one) for one in found] == [value[:10], value[300:700], value[5119:]]
        assert backend.read("a/c", [(0, 10)]) is None
        assert backend.exists(["a/b", "a/c"]) == [True, False]
        assert backend.exists([]) == []
        backend.put("a/b", bytearray(b"shorter"))
        found = backend.read("a/b", [(0, 7), (0, 100)])
        assert found is not None
        assert len(found[1]) < 100
        backend.delete("a/b")
        backend.delete("a/b")
        assert backend.read("a/b", [(0, 1)]) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_on_each_backend_returns_what_was_stored(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as backend:
        store = make_store(backend)
        run, kept = run_of(store, list(range(100))), rows(100)
        assert store.put(run, kept)
        for at in ((0, 100), (3, 5), (15, 17), (96, 100)):
            found = read(store, run, at)
            assert found is not None
            assert same(found, kept.part(*at))
        # A second process has the key, and no more.
        other = make_store(backend)
        again = read(other, run_of(other, list(range(100))), (0, 100))
        assert again is not None
        assert same(again, kept)
        value = backend.read(run.name, [(0, SHAPE.num_bytes(100) - 40)])
        assert value is not None
        backend.put(run.name, bytearray(value[0]))
        assert read(store, run, (0, 100)) is None
        assert read(store, run, (0, 16)) is not None or kind != "host"
        store.delete(run)
        assert store.exists([run]) == [False]


def test_a_restarted_store_counts_what_is_in_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    with opened("folder", tmp_path) as backend:
        store = make_store(backend)
        for at in range(0, 160, 40):
            store.put(run_of(store, list(range(at, at + 40))), rows(40))
        limit = 2 * SHAPE.num_bytes(40)
        again = make_store(backend, max_bytes=limit)
        assert again.num_bytes == store.num_bytes == 2 * limit
        assert again.put(run_of(again, list(range(7, 47))), rows(40))
        assert again.num_bytes <= limit
        assert len(list(backend.sizes())) == 1 + 2


@pytest.mark.parametrize("prefix", ["", "model-a", "model-a/", "/model-a/b/"])
def test_a_folder_with_other_files_keeps_them(prefix: str, tmp_path: Path) -> None:
    """What was in the folder before was counted as runs, and deleted to make room."""
    pytest.importorskip("obstore", reason="obstore is not installed")
    letter = tmp_path / prefix.strip("/") / "letter.txt"
    letter.parent.mkdir(parents=True, exist_ok=True)
    letter.write_text("x" * 5_000)
    limit = SHAPE.num_bytes(40)
    for at in range(3):
        backend = ObjectBackend.from_url(f"file://{tmp_path}", prefix=prefix)
        store = make_store(backend, max_bytes=limit)
        assert store.num_bytes == (limit if at else 0)
        assert store.put(run_of(store, list(range(at, at + 40))), rows(40))
        assert store.num_bytes == limit
    assert letter.exists()


def test_runs_are_looked_up_where_an_event_loop_runs(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    store = make_store(ObjectBackend.from_url(f"file://{tmp_path}"))
    runs = [run_of(store, list(range(at, at + 40))) for at in range(600)]

    async def within() -> list[bool]:
        assert store.put(runs[500], rows(40))
        return store.exists(runs)

    found = asyncio.run(within())
    assert [at for at, is_there in enumerate(found) if is_there] == [500]


def test_a_buffer_of_mooncake_holds_a_run_of_a_model_of_8b() -> None:
    """32 layers of 8 heads of 128 channels: 256 tokens take 32 MiB, and their seals."""
    rows_of_8b = 8 * 128 * 2
    shape = SpanShape(
        num_layers=32, num_kv_heads=8, k_bytes=rows_of_8b, v_bytes=rows_of_8b, kv_dtype="bfloat16"
    )
    default = inspect.signature(MooncakeBackend).parameters["buffer_bytes"].default
    assert shape.num_bytes(LONGEST) <= default


def test_a_full_disk_stores_nothing_and_breaks_nothing(tmp_path: Path) -> None:
    """In a process that may write files of 4 KiB at most."""
    pytest.importorskip("obstore", reason="obstore is not installed")
    code = f"""
    import os, resource
    from tests.store.kit import make_store, read, rows, run_of, same
    from kvtrie.store import ObjectBackend
    store = make_store(ObjectBackend.from_url("file://{tmp_path / "objects"}"))
    small, large = run_of(store, list(range(60))), run_of(store, list(range(7, 257)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 10, 4 << 10))
    assert store.put(small, rows(60))
    assert not store.put(large, rows(250))
    assert store.counts()["put_full"] == 1, store.counts()
    assert read(store, large, (0, 250)) is None
    assert same(read(store, small, (0, 60)), rows(60))
    # Threads of obstore may want the interpreter while it ends, and abort.
    os._exit(0)
    """
    command = [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)]
    ended = subprocess.run(command, check=False, timeout=120, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendError, match="cannot be opened"):
        ObjectBackend.from_url(f"file://{tmp_path / 'file' / 'folder'}")


def test_a_path_without_scheme_says_what_to_write(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    with pytest.raises(BackendError) as raised:
        ObjectBackend.from_url(str(tmp_path))
    assert str(raised.value) == (
        f"ObjectBackend: '{tmp_path}' has no scheme: write file://{tmp_path}"
    )


def test_obstore_fails_in_one_line() -> None:
    """It adds many lines of its own structures."""
    pytest.importorskip("obstore", reason="obstore is not installed")
    with pytest.raises(BackendError, match=r"^ObjectBackend: 's4://bucket' cannot be .*$"):
        ObjectBackend.from_url("s4://bucket")


def test_a_backend_that_does_not_work_is_refused_at_the_start() -> None:
    class Broken(HostBackend):
        def read(self, name: str, ranges: object) -> None:
            msg = f"{name} and {ranges}"
            raise BackendError(msg, reason="unreachable")

    with pytest.raises(StoreRefused) as refused:
        make_store(Broken(100))
    assert refused.value.reason == "unreachable"


@needs_mooncake
def test_the_master_is_killed_while_runs_are_read_and_no_byte_is_wrong() -> None:
    with MooncakeMaster() as master:
        backend = MooncakeBackend(master.address, segment_bytes=16 << 20, buffer_bytes=4 << 20)
        store = make_store(backend)
        runs = [run_of(store, list(range(at, at + 64))) for at in range(0, 640, 64)]
        for number, run in enumerate(runs):
            assert store.put(run, rows(64, number))
        wrong: list[int] = []
        reads = [0]
        ends = threading.Event()

        def reader() -> None:
            while not ends.is_set():
                number = reads[0] % len(runs)
                found = read(store, runs[number], (0, 64))
                reads[0] += 1
                if found is not None and not same(found, rows(64, number)):
                    wrong.append(number)

        thread = threading.Thread(target=reader, daemon=True)
        thread.start()
        while reads[0] < 20:
            time.sleep(0.001)
        master.kill()
        while not store.counts().get("read_unreachable"):
            time.sleep(0.001)
        ends.set()
        thread.join(60)
        assert not thread.is_alive()
        assert wrong == []
        assert store.exists(runs) == [False] * len(runs)
        store.close()


@needs_mooncake
def test_a_master_that_is_not_there_is_refused() -> None:
    with MooncakeMaster() as master:
        address = master.address
    with pytest.raises(BackendError, match="does not answer"):
        MooncakeBackend(address, segment_bytes=1 << 20, buffer_bytes=1 << 20)


@needs_mooncake
def test_a_store_that_was_closed_has_nothing_and_the_process_lives() -> None:
    """Mooncake's client ends the process if it is called after its end."""
    code = """
    from tests.store.kit import MooncakeMaster, make_store, read, rows, run_of
    from kvtrie.store import MooncakeBackend
    with MooncakeMaster() as master:
        client = MooncakeBackend(master.address, segment_bytes=16 << 20, buffer_bytes=4 << 20)
        store = make_store(client)
        run = run_of(store, list(range(40)))
        assert store.put(run, rows(40))
        store.close()
        store.close()
        assert store.exists([run]) == [False]
        assert read(store, run, (0, 40)) is None
        assert not store.put(run_of(store, list(range(9))), rows(9))
        store.delete(run)
        assert store.counts()["delete_unreachable"] == 1, store.counts()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)
