"""A recorder writes what it is given, within its limits, and never stops its engine."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.record.kit import finished, numbers_in, spans, words, written

from kvtrie.record import (
    Dropped,
    Log,
    RecordCounts,
    Recorder,
    RecordOptions,
    RecordOptionsError,
    Would,
    files_of,
)
from kvtrie.record import writer as writing

if TYPE_CHECKING:
    from pathlib import Path

TALK = words(300, 1)
FULL = finished(
    TALK,
    "request-of-somebody",
    session="session-of-somebody",
    salt="salt-of-somebody",
    adapter="adapter-of-somebody",
    spans=spans((0, 100, "system"), (100, 280, "user")),
    reused=((0, 128, "exact"), (128, 200, "moved")),
    computed={"diverged": 60, "new": 32},
    would=Would(exact=128, moved=100, after_gaps=40, computed=64, cleared=True),
)


def test_a_log_of_digests_has_no_token_and_no_name(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path, [FULL, finished(words(1000, 2))])
    data = path.read_bytes()
    assert not numbers_in(data) & {*TALK, *words(1000, 2)}
    assert b"somebody" not in data
    assert sorted(json.loads(data.splitlines()[1])) == sorted(
        "request session space arrived first_token took ended num_prompt num_tokens "
        "blocks gaps windows spans reused computed would".split()
    )


def test_token_ids_are_written_only_if_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path, [FULL], content="tokens")
    (one,) = Log(path)
    assert one.tokens is not None
    assert one.tokens.tolist() == TALK
    assert b"somebody" not in path.read_bytes()
    with pytest.raises(RecordOptionsError, match='content must be "digests" or "tokens", not'):
        RecordOptions(path="log", content="text")


@pytest.mark.parametrize("content", ["digests", "tokens"])
def test_what_is_read_is_what_was_written(tmp_path: Path, content: str) -> None:
    path = tmp_path / "log"
    written(path, [FULL, replace(FULL, request_id="2"), finished([])], content=content)
    log = Log(path)
    first, second, empty = log
    assert log.header is not None
    assert (log.header.engine, log.header.model) == ("test 1", "a model")
    assert (log.header.block_size, log.header.min_run, log.header.window) == (16, 32, 17)
    assert (log.num_cut, log.dropped) == (0, Dropped())
    for name in "num_prompt arrived first_token took ended spans reused computed would".split():
        assert getattr(first, name) == getattr(FULL, name), name
    assert first.num_tokens == 300
    assert len(first.blocks) == 18
    assert first.request != second.request
    assert (first.session, first.space) == (second.session, second.space)
    for name in ("blocks", "starts", "windows"):
        assert (getattr(first, name) == getattr(second, name)).all()
    assert len(first.windows) == len(first.starts) >= 300 // 16 - 2
    assert empty.num_tokens == len(empty.blocks) == len(empty.windows) == 0
    assert (empty.session, empty.would) == (None, None)


def test_a_moved_run_is_found_in_the_log(tmp_path: Path) -> None:
    edited = [*TALK[:50], *words(7, 3), *TALK[120:260]]
    path = tmp_path / "log"
    written(path, [finished(TALK), finished(edited, "2")])
    first, second = Log(path)
    place = dict(zip(first.windows.tolist(), first.starts.tolist(), strict=True))
    found = [
        (start, place[what])
        for start, what in zip(second.starts.tolist(), second.windows.tolist(), strict=True)
        if what in place and start >= 57
    ]
    assert {old - new for new, old in found} == {63}
    assert found[0][0] < 57 + 16
    assert found[-1][0] + 17 > len(edited) - 16


@pytest.mark.parametrize("content", ["digests", "tokens"])
def test_a_log_never_exceeds_its_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "log"
    options: dict[str, Any] = {"max_bytes": 1 << 16, "files": 3, "content": content}
    recorder = Recorder(RecordOptions(path=str(path), **options), block_size=16)
    for number in range(300):
        recorder.put(finished(words(1000, number), f"request-{number}"))
        if number % 5:
            continue
        assert recorder.flush()
        sizes = [one.stat().st_size for one in tmp_path.iterdir()]
        assert len(sizes) <= 3
        assert max(sizes, default=0) <= 1 << 16
    recorder.close()
    assert recorder.counts.written == 300
    assert [one.name for one in files_of(path)] == ["log.2", "log.1", "log"]
    log = Log(path)
    found = [one.request for one in log]
    assert 10 < len(found) < 300
    assert log.num_cut == 0
    # The latest ones, in their order.
    name = recorder._digester.name
    assert found == [name("request", f"request-{at}") for at in range(300 - len(found), 300)]


def test_fewer_files_than_before_remove_the_others(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for number in range(5):
        written(path, [finished(TALK)], files=5 if number < 4 else 2)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["log", "log.1"]
    written(path, [finished(TALK)], files=1)
    assert [one.name for one in tmp_path.iterdir()] == ["log"]


def test_a_record_that_no_file_can_hold_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    recorder = written(path, [finished(words(100_000, 1)), finished(TALK, "2")], max_bytes=1 << 16)
    assert (recorder.counts.written, recorder.counts.dropped) == (1, Dropped(size=1))
    log = Log(path)
    assert len(list(log)) == 1
    assert log.dropped == Dropped(size=1)


def test_a_recorder_that_writes_nothing_leaves_the_log_before(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path, [finished(TALK)])
    before = path.read_bytes()
    for _ in range(9):
        written(path, [])
    assert [path.read_bytes()] == [one.read_bytes() for one in tmp_path.iterdir()] == [before]


def test_only_the_owner_may_read_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path, [finished(TALK)])
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_sample_has_whole_sessions() -> None:
    recorder = Recorder(RecordOptions(path="log", rate=0.25), block_size=16)
    wanted = [recorder.wants(f"request-{number}") for number in range(1000)]
    assert 180 < sum(wanted) < 320
    for session in ("a", "b", "c", "d", "e"):
        assert len({recorder.wants(f"request-{number}", session) for number in range(50)}) == 1
    assert not any(
        Recorder(RecordOptions(path="log", rate=0), block_size=16).wants(str(number))
        for number in range(100)
    )


def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writing waits for this."""
    gate, make = threading.Event(), vars(writing)["request_line"]

    def waiting(*given: Any) -> bytes:
        assert gate.wait(60)
        line: bytes = make(*given)
        return line

    monkeypatch.setattr(writing, "request_line", waiting)
    return gate


def test_a_slow_disk_drops_and_never_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, path = slow(monkeypatch), tmp_path / "log"
    recorder = Recorder(RecordOptions(path=str(path)), block_size=16)
    begun = time.monotonic()
    taken = sum(recorder.put(finished(TALK, f"request-{at}")) for at in range(3000))
    assert time.monotonic() - begun < 30
    assert 1024 <= taken <= 1025
    assert recorder.counts.dropped == Dropped(queue=3000 - taken)
    gate.set()
    recorder.close(60)
    log = Log(path)
    assert len(list(log)) == recorder.counts.written == taken
    assert log.dropped == Dropped(queue=3000 - taken)


def test_the_tokens_that_wait_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_MAX_WAITING_TOKENS", 1000)
    gate = slow(monkeypatch)
    recorder = Recorder(RecordOptions(path=str(tmp_path / "log")), block_size=16)
    assert [recorder.put(finished(TALK, str(at))) for at in range(5)] == [True] * 3 + [False] * 2
    gate.set()
    assert recorder.flush(60)
    assert recorder.put(finished(TALK))
    recorder.close()
    assert recorder.counts.written == 4


class Disk:
    """Writes `room` bytes more, then refuses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room, self._write = room, os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, file: int, data: bytes) -> int:
        if self.room <= 0:
            raise OSError(28, "No space left on device")
        done = self._write(file, data[: self.room])
        self.room -= done
        return done


@pytest.mark.parametrize("room", [0, 1, 100, 300, 600, 1000, 1500])
def test_a_full_disk_is_counted_and_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    path = tmp_path / "log"
    written(path, [finished(TALK, "before")])
    disk = Disk(monkeypatch, room)
    recorder = Recorder(RecordOptions(path=str(path)), block_size=16)
    with caplog.at_level(logging.WARNING, "kvtrie.record"):
        for number in range(6):
            recorder.put(finished(TALK, f"full-{number}"))
            assert recorder.flush()
        lost = recorder.counts.dropped.disk
        assert recorder.counts.written + lost == 6
        assert lost
        disk.room = 1 << 20
        recorder.put(finished(TALK, "after"))
        recorder.close()
    assert len(caplog.records) == 1
    assert f"{path}: requests are not recorded" in caplog.text
    assert "No space left on device" in caplog.text
    log = Log(path)
    assert len(list(log)) == 1 + recorder.counts.written == 8 - lost
    assert (log.num_cut, log.dropped) == (0, Dropped(disk=lost))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_directory_that_left_is_counted(tmp_path: Path) -> None:
    recorder = Recorder(RecordOptions(path=str(tmp_path / "gone" / "log")), block_size=16)
    assert recorder.put(finished(TALK))
    recorder.close()
    assert recorder.counts == RecordCounts(dropped=Dropped(disk=1))


def test_what_cannot_be_written_as_a_line_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    recorder = written(path, [finished(TALK, took=float("nan")), finished(TALK)])
    assert (recorder.counts.written, recorder.counts.dropped) == (1, Dropped(disk=1))
    assert len(list(Log(path))) == 1


def test_nothing_is_taken_after_the_end(tmp_path: Path) -> None:
    recorder = written(tmp_path / "log", [finished(TALK)])
    assert not recorder.put(finished(TALK))
    assert recorder.flush()
    recorder.close()
    assert recorder.counts.written == 1
    assert recorder.counts.dropped == Dropped(queue=1)


def test_no_more_threads_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    recorder = Recorder(RecordOptions(path=str(tmp_path / "log")), block_size=16)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert not recorder.put(finished(TALK))
    assert recorder.put(finished(TALK))
    recorder.close()
    assert recorder.counts.written == 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    recorder = Recorder(RecordOptions(path=str(path)), block_size=16)
    assert recorder.put(finished(TALK))
    assert recorder.flush()
    child = os.fork()
    if child == 0:
        os._exit(int(recorder.put(finished(TALK))))
    assert os.waitpid(child, 0)[1] == 0
    recorder.close()
    assert len(list(Log(path))) == 1


def test_a_key_file_makes_logs_comparable(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    keys, blocks = [], []
    for number, options in enumerate(({"key_file": str(key)}, {"key_file": str(key)}, {}, {})):
        path = tmp_path / f"log-{number}"
        written(path, [FULL], **options)
        log = Log(path)
        assert log.header is not None
        keys.append(log.header.key)
        blocks.append(next(iter(log)).blocks.tolist())
    assert keys[0] == keys[1]
    assert blocks[0] == blocks[1]
    assert len(set(keys)) == 3
    assert not {*blocks[0]} & {*blocks[2]}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (7, 'must be a path, or a mapping such as {"path": "kvtrie.log"}, not 7'),
        ({"path": "log", "rat": 1}, "unknown key 'rat'; did you mean 'rate'?"),
        ({}, "path must be the path of a file, not None"),
        ("", "path must be the path of a file, not ''"),
        ({"path": "a\0b"}, "path must be the path of a file"),
        ({"path": "log", "rate": 1.5}, "rate must be a number from 0 to 1, not 1.5"),
        ({"path": "log", "rate": True}, "rate must be a number from 0 to 1, not True"),
        ({"path": "log", "rate": float("nan")}, "rate must be a number from 0 to 1, not nan"),
        ({"path": "log", "max_bytes": 1000}, "max_bytes must be an integer from 65536, not 1000"),
        ({"path": "log", "files": 0}, "files must be an integer from 1 to 1000, not 0"),
        ({"path": "log", "min_run": 8}, "min_run must be an integer from 16 to 256, not 8"),
        ({"path": "log", "key_file": 3}, "key_file must be the path of a file, not 3"),
    ],
    ids=str,
)
def test_options_that_are_refused(given: Any, why: str) -> None:
    with pytest.raises(RecordOptionsError) as caught:
        RecordOptions.read(given)
    assert why in str(caught.value)


def test_files_that_are_refused(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"abc")
    for given, why in (
        ({"path": str(tmp_path)}, "it is a directory"),
        ({"path": str(tmp_path / "no" / "log")}, f"there is no directory {tmp_path / 'no'}"),
        ({"path": str(tmp_path / "log"), "key_file": str(tmp_path / "no")}, "No such file"),
        ({"path": str(tmp_path / "log"), "key_file": str(short)}, "16 to 64 bytes, not 3"),
    ):
        with pytest.raises(RecordOptionsError, match=why):
            RecordOptions.read(given).check_files()
    RecordOptions.read({"path": str(tmp_path / "log")}).check_files()
    assert list(tmp_path.iterdir()) == [short]
