"""A run's figures survive an interrupt, a kill and a full disk, and only that run resumes them."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.forked import ForkedCommand
from typer.testing import CliRunner, Result

from kvtrie import gates
from kvtrie.calibrate import _partial, recall
from kvtrie.calibrate._partial import Partial, PartialError, PartialWriteError
from kvtrie.cli.app import app

RUN = {"model": "m@1", "seed": 0, "policies": ["unrotated", "rotated"]}
ROWS = [{"policies": [{"divergences": "AAAA" * n}]} for n in range(1, 5)]
PATIENCE = 600  # seconds; only a test that fails waits so long


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gate.json.partial"


def fill(path: Path) -> bytes:
    with Partial(path) as partial:
        assert partial.begin(RUN) == []
        for row in ROWS:
            partial.add(row)
    return path.read_bytes()


def test_begin_returns_the_rows_that_are_there(path: Path) -> None:
    fill(path)
    with Partial(path) as partial:
        assert partial.begin(RUN) == ROWS
        partial.add(ROWS[0])
        assert partial.num_rows() == len(ROWS) + 1
    with Partial(path) as partial:
        assert partial.begin(RUN) == [*ROWS, ROWS[0]]


def test_file_cut_anywhere_keeps_every_whole_row(path: Path) -> None:
    whole = fill(path)
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = sum(end <= size for end in ends)
        with Partial(path) as partial:
            rows = partial.begin(RUN)
            assert rows == ROWS[: max(0, kept - 1)]
            partial.add(ROWS[-1])
        with Partial(path) as partial:
            assert partial.begin(RUN) == [*rows, ROWS[-1]]


def test_file_with_a_changed_byte_is_refused(path: Path) -> None:
    whole = fill(path)
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with (
            Partial(path) as partial,
            pytest.raises(PartialError, match=r"gate\.json\.partial: line"),
        ):
            partial.begin(RUN)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"model": "m@2"}, "model is 'm@1' there and 'm@2' here"),
        ({"policies": ["rotated"]}, r"policies is \['unrotated', 'rotated'\] there"),
        ({"questions": 4}, "questions is None there and 4 here"),
    ],
)
def test_file_of_another_run_is_refused_by_name(
    path: Path, changes: dict[str, Any], said: str
) -> None:
    whole = fill(path)
    with Partial(path) as partial, pytest.raises(PartialError, match=said) as caught:
        partial.begin({**RUN, **changes})
    assert str(path) in str(caught.value)
    assert path.read_bytes() == whole


def test_file_of_another_format_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(path)
    monkeypatch.setattr(_partial, "VERSION", 3)
    with Partial(path) as partial, pytest.raises(PartialError, match="of this version"):
        partial.begin(RUN)


def test_file_that_another_process_has_is_refused(path: Path) -> None:
    with Partial(path), pytest.raises(PartialError, match="another run is writing it"):
        Partial(path)
    # A lock ends with its process, so no file is left to remove.
    Partial(path).close()


def test_file_without_a_row_is_removed_when_it_is_closed(path: Path) -> None:
    with Partial(path):
        assert path.exists()
    assert not path.exists()


def test_full_disk_is_a_typed_error(path: Path) -> None:
    with Partial(path) as partial, Path("/dev/full").open("ab", buffering=0) as full:
        partial.begin(RUN)
        own, partial._file = partial._file, full
        with pytest.raises(PartialWriteError, match=r"gate\.json\.partial: No space left"):
            partial.add(ROWS[0])
        partial._file = own
    with Partial(path) as partial:
        assert partial.begin(RUN) == []


OPTIONS = ("--policies", "rotated", "--json")


def options(out: Path) -> list[str]:
    """Conversations of the recall task, so that the run ends after them."""
    talks = out.with_name("talks.jsonl")
    if not talks.exists():
        rows = [json.dumps({"messages": recall.conversation(seed, 4)}) for seed in range(12)]
        talks.write_text("\n".join(rows), encoding="utf-8")
    return [*OPTIONS, "--conversations", str(talks)]


def start(out: Path) -> ForkedCommand:
    return ForkedCommand(["calibrate", "gqa", *options(out), "--out", str(out)])


def end(process: ForkedCommand) -> tuple[int | None, str, str]:
    out, error = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in error, error
    return process.returncode, out, error


def stop_in_the_middle(out: Path, number: signal.Signals) -> tuple[int | None, str, str]:
    kept = out.with_name(f"{out.name}.partial")
    lines = kept.read_bytes().count(b"\n") if kept.exists() else 0
    process = start(out)
    until = time.monotonic() + PATIENCE
    while not (kept.exists() and kept.read_bytes().count(b"\n") > lines + 1):
        assert process.poll() is None, end(process)
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(number)
    return end(process)


def run(out: Path, *args: str) -> Result:
    """The same command in this process, which has loaded torch already."""
    return CliRunner().invoke(app, ["calibrate", "gqa", *options(out), *args, "--out", str(out)])


@pytest.mark.timeout(900)
def test_interrupted_and_killed_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    out, other = tmp_path / "gate.json", tmp_path / "other.json"
    kept = tmp_path / "gate.json.partial"
    out.write_text("old", encoding="utf-8")
    code, printed, error = stop_in_the_middle(out, signal.SIGINT)
    rows = kept.read_bytes().count(b"\n") - 1
    assert (code, printed) == (130, "")
    assert error.splitlines()[-1] == (
        f"kvtrie: interrupted; {rows} conversations are kept in {kept}: the same command continues "
        "from there"
    )
    before = kept.read_bytes()
    code, *_ = stop_in_the_middle(out, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert kept.read_bytes().startswith(before)
    assert len(kept.read_bytes()) > len(before)
    assert out.read_text(encoding="utf-8") == "old"

    # Another run is refused by name, and the file is unchanged.
    before = kept.read_bytes()
    refused = run(out, "--min-run", "24")
    assert (refused.exit_code, refused.stdout) == (2, "")
    said = f"kvtrie: {kept}: it is of another run: min_run is 16 there and 24 here"
    assert refused.stderr.splitlines()[-1].startswith(said)
    assert kept.read_bytes() == before

    resumed, whole = run(out), run(other)
    assert (resumed.exit_code, whole.exit_code) == (0, 0)
    assert "resumed" in resumed.stderr
    assert resumed.stdout == whole.stdout
    assert out.read_bytes() == other.read_bytes()
    assert gates.read(out).measured[0].kinds
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        *("gate.json", "other.json", "talks.jsonl")
    ]


@pytest.mark.timeout(900)
def test_run_whose_time_is_over_goes_on_next_time(tmp_path: Path) -> None:
    """Regression: it removed what it had measured, undecided verdicts or not."""
    out, other = tmp_path / "gate.json", tmp_path / "other.json"
    kept = tmp_path / "gate.json.partial"
    # A fifth of a second: over after the first conversations of twelve.
    first = run(out, "--minutes", "0.003")
    assert first.exit_code == 0
    assert gates.read(out).measured
    rows = kept.read_bytes().count(b"\n") - 1
    assert 0 < rows < 12
    assert f"the time is over: {rows} conversations are kept in {kept}" in first.stderr
    resumed, whole = run(out), run(other)
    assert "resumed" in resumed.stderr
    assert resumed.stdout == whole.stdout
    assert out.read_bytes() == other.read_bytes()
    assert not kept.exists()


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda path: path.mkdir(), "not a regular file"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.symlink_to("/dev/full"), "not a regular file"),
        (lambda path: path.symlink_to(path), "[Ll]oop|Too many"),
        (lambda path: path.with_name("gate.json.partial").mkdir(), "Is a directory"),
    ],
    ids=["directory", "pipe", "device", "loop", "partial file a directory"],
)
def test_out_that_cannot_be_written_is_found_before_anything_is_loaded(
    tmp_path: Path, made: Any, said: str
) -> None:
    out = tmp_path / "gate.json"
    made(out)
    process = start(out)
    code, printed, error = end(process)
    assert (code, printed) == (2, "")
    (line,) = error.splitlines()
    assert line.startswith("kvtrie: ")
    assert out.name in line
    assert re.search(said, line)
