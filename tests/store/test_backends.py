"""The backends: same bytes, and no wrong byte and no hang when they fail."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING

import pytest
from tests.s3_server import S3Bucket
from tests.store.kit import (
    KINDS,
    OBJECTS,
    SERVERS,
    SHAPE,
    MooncakeMaster,
    make_store,
    needs_mooncake,
    opened,
    read,
    rows,
    run_of,
    same,
    served,
    url_of,
)

from kvtrie.store import (
    BackendError,
    HostBackend,
    MooncakeBackend,
    ObjectBackend,
    SpanShape,
    StoreRefused,
    TenantLimits,
)
from kvtrie.store.runs import LONGEST

if TYPE_CHECKING:
    from pathlib import Path

    from kvtrie.store import SpanStore


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


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_restarted_store_counts_what_is_there(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as backend:
        store = make_store(backend)
        for at in range(0, 160, 40):
            store.put(run_of(store, list(range(at, at + 40))), rows(40))
        limit = 2 * SHAPE.num_bytes(40)
        again = make_store(backend, max_bytes=limit)
        assert again.num_bytes == store.num_bytes == 2 * limit
        assert again.put(run_of(again, list(range(7, 47))), rows(40))
        assert again.num_bytes <= limit
        assert len(list(backend.values())) == 1 + 2


@pytest.mark.parametrize("kind", ["host", *OBJECTS])
def test_a_store_that_restarts_more_often_than_runs_live_deletes_them(
    kind: str, tmp_path: Path
) -> None:
    """What was found at the start counted as written then, so that nothing was ever deleted."""
    with opened(kind, tmp_path) as backend:
        limits = TenantLimits(lifetime=100)
        ahead = [0.0]

        def restarted() -> SpanStore:
            return make_store(backend, limits=limits, clock=lambda: time.time() + ahead[0])

        store = restarted()
        for at in range(0, 120, 40):
            assert store.put(run_of(store, list(range(at, at + 40))), rows(40))
        ahead[0] = 90
        store = restarted()
        assert (store.sweep(), store.num_runs) == (0, 3)
        ahead[0] = 180
        store = restarted()
        assert (store.sweep(), store.num_runs) == (3, 0)
        assert [one.name for one in backend.values()] == ["kvtrie/store"]


@pytest.mark.parametrize("kind", OBJECTS)
def test_what_another_process_has_written_again_outlives_its_old_time(
    kind: str, tmp_path: Path
) -> None:
    """It was deleted by the time at which this process had found it."""
    with opened(kind, tmp_path) as backend:
        ahead = [0.0]

        def store_of() -> SpanStore:
            limits = TenantLimits(lifetime=60)
            return make_store(backend, limits=limits, clock=lambda: time.time() + ahead[0])

        mine, theirs = store_of(), store_of()
        runs = [run_of(mine, list(range(at, at + 40))) for at in (0, 40)]
        for run in runs:
            assert mine.put(run, rows(40), exact_until=0, hops=1)
        known = time.time()
        # By the clock of the object store, which counts in seconds.
        time.sleep(4)
        # More exact, so it takes the place of what is there.
        assert theirs.put(runs[0], rows(40))
        ahead[0] = known + 62 - time.time()
        assert (mine.sweep(), mine.exists(runs)) == (1, [True, False])
        # That one for its own time.
        ahead[0] = 62
        assert (mine.sweep(), mine.exists(runs)) == (1, [False, False])


def test_of_runs_that_are_there_at_the_start_the_oldest_leaves_first() -> None:
    now = [1_000.0]
    backend = HostBackend(1 << 20, clock=lambda: now[0])
    store = make_store(backend)
    runs = [run_of(store, list(range(at, at + 40))) for at in range(4)]
    # A list is by name, as that of an object store: the last one there is the oldest.
    order = sorted(range(3), key=lambda at: runs[at].name, reverse=True)
    for at in order:
        now[0] += 1
        assert store.put(runs[at], rows(40))
    backend._values = dict(sorted(backend._values.items()))
    again = make_store(backend, max_bytes=3 * SHAPE.num_bytes(40), clock=lambda: now[0])
    assert again.put(runs[3], rows(40))
    assert again.exists(runs) == [at != order[0] for at in range(4)]


@pytest.mark.parametrize("prefix", ["", "model-a", "model-a/", "/model-a/b/"])
@pytest.mark.parametrize("kind", OBJECTS)
def test_what_else_is_under_the_prefix_stays(kind: str, prefix: str, tmp_path: Path) -> None:
    """What was in a folder before was counted as runs, and deleted to make room."""
    with opened(kind, tmp_path, prefix) as backend:
        backend.put("letter.txt", bytearray(5_000))
        limit = SHAPE.num_bytes(40)
        for at in range(3):
            store = make_store(backend, max_bytes=limit)
            assert store.num_bytes == (limit if at else 0)
            assert store.put(run_of(store, list(range(at, at + 40))), rows(40))
            assert store.num_bytes == limit
        assert ("letter.txt", 5_000) in {one[:2] for one in backend.values()}
    if kind == "folder":
        assert (tmp_path / "objects" / prefix.strip("/") / "letter.txt").exists()


@pytest.mark.parametrize("kind", OBJECTS)
def test_runs_are_looked_up_where_an_event_loop_runs(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as backend:
        store = make_store(backend)
        runs = [run_of(store, list(range(at, at + 40))) for at in range(600)]

        async def within() -> list[bool]:
            assert store.put(runs[500], rows(40))
            return store.exists(runs)

        found = asyncio.run(within())
    assert [at for at, is_there in enumerate(found) if is_there] == [500]


@pytest.mark.parametrize("kind", ["host", *OBJECTS])
def test_ranges_of_a_value_that_ends_early_are_short(kind: str, tmp_path: Path) -> None:
    """obstore panicked where a value ends between two ranges that it reads in one request."""
    with opened(kind, tmp_path) as backend:
        value = bytearray(range(256)) * 8
        backend.put("a", value)
        wanted = [(1_000, 3_000), (0, 1_024), (1_024, 2_000), (2_500, 2_600)]
        found = backend.read("a", wanted)
        assert found is not None
        for part, (start, end) in zip(found, wanted, strict=True):
            assert bytes(part) == value[start:end][: len(part)]
            assert len(part) < end - start or end <= len(value)
        # What is far apart is read by itself.
        backend.put("b", bytearray(3 << 20))
        found = backend.read("b", [(3 << 20, (3 << 20) + 1), (0, 8), (9, 1 << 20)])
        assert found is not None
        assert len(found[0]) == 0
        found = backend.read("b", [((3 << 20) - 1, 3 << 20), (0, 8), (9, 1 << 20)])
        assert found is not None
        assert [len(part) for part in found] == [1, 8, (1 << 20) - 9]


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_cut_value_ends_no_thread_and_is_stored_again(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as backend:
        store = make_store(backend)
        run = run_of(store, list(range(100)))
        for left in (0, 10, 1_023, 1_024, 1_100):
            assert store.put(run, rows(100))
            whole = backend.read(run.name, [(0, 2_000)])
            assert whole is not None
            backend.put(run.name, bytearray(whole[0][:left]))
            assert read(store, run, (50, 60)) is None
        assert store.put(run, rows(100))
        assert same(read(store, run, (0, 100)) or rows(100, 1), rows(100))


@pytest.mark.parametrize("kind", OBJECTS)
def test_another_process_finds_what_was_stored(kind: str, tmp_path: Path) -> None:
    with url_of(kind, tmp_path) as url:
        store = make_store(ObjectBackend.from_url(url))
        assert store.put(run_of(store, list(range(100))), rows(100))
        code = f"""
        import os
        from tests.store.kit import make_store, read, rows, run_of, same
        from kvtrie.store import ObjectBackend
        store = make_store(ObjectBackend.from_url({url!r}))
        assert store.num_runs == 1
        assert same(read(store, run_of(store, list(range(100))), (0, 100)), rows(100))
        assert store.put(run_of(store, list(range(7, 107))), rows(100, 1))
        # Threads of obstore may want the interpreter while it ends, and abort.
        os._exit(0)
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)
        found = read(store, run_of(store, list(range(7, 107))), (0, 100))
    assert found is not None
    assert same(found, rows(100, 1))


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


def test_a_file_system_that_is_full_has_room_again_after_a_run_was_deleted(tmp_path: Path) -> None:
    """One of 128 KiB, which no other process sees."""
    pytest.importorskip("obstore", reason="obstore is not installed")
    mount = 'mount -t tmpfs -o size=128k tmpfs "$0" && exec "$@"'
    inside = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, str(tmp_path)]
    try:
        subprocess.run([*inside, "true"], check=True, timeout=60, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not mount a file system of his own")
    code = f"""
    import os
    from pathlib import Path
    from tests.store.kit import make_store, read, rows, run_of, same
    from kvtrie.store import ObjectBackend
    store = make_store(ObjectBackend.from_url("file://{tmp_path}"))
    runs = [run_of(store, list(range(at, at + 250))) for at in range(0, 6_000, 250)]
    stored = [run for run in runs if store.put(run, rows(250))]
    assert 0 < len(stored) < len(runs), len(stored)
    assert store.counts()["put_full"] == len(runs) - len(stored), store.counts()
    assert [run in stored for run in runs] == store.exists(runs)
    for run in stored:
        assert same(read(store, run, (0, 250)), rows(250))
    # Nothing is left of what had no room.
    files = [one for one in Path("{tmp_path}").rglob("*") if one.is_file()]
    assert len(files) == len(stored) + 1, files
    store.delete(stored.pop())
    assert store.put(runs[-1], rows(250))
    for run in (*stored, runs[-1]):
        assert same(read(store, run, (0, 250)), rows(250))
    # Threads of obstore may want the interpreter while it ends, and abort.
    os._exit(0)
    """
    command = [*inside, sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)]
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


@pytest.mark.parametrize("kind", SERVERS)
def test_the_server_is_killed_while_runs_are_read_and_no_byte_is_wrong(kind: str) -> None:
    with served(kind) as (backend, kill):
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
        kill()
        while not store.counts().get("read_unreachable"):
            time.sleep(0.001)
        ends.set()
        thread.join(60)
        assert not thread.is_alive()
        assert wrong == []
        assert store.exists(runs) == [False] * len(runs)
        store.close()


def test_a_reply_of_s3_that_breaks_off_anywhere_is_a_miss() -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    with S3Bucket() as bucket:
        store = make_store(ObjectBackend.from_url(bucket.url))
        run = run_of(store, list(range(250)))
        assert store.put(run, rows(250))
        for passes in (0, 100, 700, 2_000, 3_500):
            bucket.relay.passes = passes
            assert read(store, run, (0, 250)) is None
            # Whether it has arrived is not known, so that it may be stored again.
            assert not store.put(run_of(store, list(range(passes + 1, passes + 251))), rows(250))
        bucket.relay.passes = None
        assert store.counts()["read_unreachable"] == store.counts()["put_unreachable"] == 5
        assert same(read(store, run, (0, 250)) or rows(250, 1), rows(250))


def test_s3_that_does_not_answer_is_asked_once() -> None:
    """A read took its timeout twice: the second time to ask whether the value is short."""
    pytest.importorskip("obstore", reason="obstore is not installed")
    with S3Bucket() as bucket:
        backend = ObjectBackend.from_url(bucket.url, timeout=0.2)
        bucket.relay.stall()
        before = bucket.relay.connections
        with pytest.raises(BackendError) as raised:
            backend.read("a", [(0, 10)])
        assert raised.value.reason == "unreachable"
        assert bucket.relay.connections == before + 1


def test_another_bucket_or_key_of_s3_is_refused_at_the_start_and_named() -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    with S3Bucket() as bucket:
        with pytest.raises(StoreRefused, match=r"404 Not Found: NoSuchBucket$") as refused:
            make_store(ObjectBackend.from_url(f"{bucket.url}-of-nobody"))
        assert refused.value.reason == "unreachable"
        backend = ObjectBackend.from_url(bucket.url)
        with bucket.checks_keys():
            with pytest.raises(StoreRefused, match=r"403 Forbidden: InvalidAccessKeyId$"):
                make_store(backend)
            with pytest.raises(BackendError, match="403 Forbidden"):
                backend.exists(["a"])
            with pytest.raises(BackendError, match=r"403 Forbidden: InvalidAccessKeyId$"):
                list(backend.values())
        assert make_store(backend).num_runs == 0


def test_s3_without_tls_needs_the_word_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable was not read, so that only servers with TLS could be used."""
    pytest.importorskip("obstore", reason="obstore is not installed")
    with S3Bucket() as bucket:
        for word, is_allowed in (("TRUE", True), ("1", True), ("false", False), ("", False)):
            monkeypatch.setenv("AWS_ALLOW_HTTP", word)
            backend = ObjectBackend.from_url(bucket.url)
            if is_allowed:
                assert backend.exists(["a"]) == [False]
                continue
            before = bucket.relay.connections
            with pytest.raises(BackendError):
                backend.exists(["a"])
            assert bucket.relay.connections == before


def test_a_store_counts_the_runs_of_all_pages_of_s3() -> None:
    """S3 lists 1,000 objects at a time."""
    pytest.importorskip("obstore", reason="obstore is not installed")
    with S3Bucket() as bucket:
        store = make_store(ObjectBackend.from_url(bucket.url))
        run = run_of(store, list(range(40)))
        names = [f"{run.name[:-8]}{number:08x}" for number in range(2_500)]
        bucket.fill(names, b"12345")
        again = make_store(ObjectBackend.from_url(bucket.url))
        assert (again.num_runs, again.num_bytes) == (2_500, 12_500)


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
