"""A log reads up to its last whole record wherever it is cut, and refuses what is no log."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.record.kit import finished, words, written

from kvtrie.record import (
    VERSION,
    Log,
    LogError,
    LogFormatError,
    LogLineError,
    LogVersionError,
    Recorded,
    Would,
)

if TYPE_CHECKING:
    from pathlib import Path

WOULD = Would(exact=10, moved=20, after_gaps=0, computed=30, cleared=True)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    talks = [finished(words(68, seed), str(seed), session="s", would=WOULD) for seed in range(3)]
    written(path, talks, content="digests")
    return path


@pytest.mark.parametrize("content", ["digests", "tokens"])
def test_a_log_that_is_cut_at_every_byte(tmp_path: Path, content: str) -> None:
    path = tmp_path / "log"
    written(path, [finished(words(40, seed), str(seed)) for seed in range(2)], content=content)
    data = path.read_bytes()
    whole = [one.request for one in Log(path)]
    ends = [at + 1 for at, byte in enumerate(data) if byte == ord("\n")]
    assert len(ends) == 3
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        cut = Log(path)
        # The last line needs no line feed to be whole.
        lines = sum(size >= end - 1 for end in ends)
        assert [one.request for one in cut] == whole[: max(0, lines - 1)], size
        assert cut.num_cut == (size not in {*ends, *(end - 1 for end in ends)}), size
        assert (cut.header is None) == (lines == 0)


def test_a_file_that_was_cut_before_the_next_was_begun(log: Path) -> None:
    log.with_name("log.1").write_bytes(log.read_bytes()[:-9])
    log.with_name("log.2").write_bytes(log.read_bytes()[:9])
    both = Log(log)
    assert len(list(both)) == 5
    assert both.num_cut == 2
    assert len(both.headers) == 2
    # A renamed file can be read alone.
    assert len(list(Log(log.with_name("log.1")))) == 2


def rewritten(path: Path, line: int, change: Any) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    row = json.loads(lines[line - 1])
    lines[line - 1] = json.dumps({**row, **change}).encode() + b"\n"
    path.write_bytes(b"".join(lines))


def test_another_version(log: Path) -> None:
    for version in (VERSION + 1, 0, "1", True, None):
        rewritten(log, 1, {"kvtrie_log": version})
        with pytest.raises(LogVersionError) as caught:
            Log(log)
        assert str(caught.value).startswith(f"{log}, line 1: the log is of version {version!r}, ")
        assert str(caught.value).endswith(f"and this kvtrie reads version {VERSION}")
        assert (caught.value.path, caught.value.line) == (log, 1)


@pytest.mark.parametrize(
    "data",
    [b"hello\n", b'{"kvtrie": 1}\n', b'{"messages": []}\n', b"\0" * 100, b"{}\n", b"\n", b"[1, 2"],
    ids=str,
)
def test_a_file_that_is_no_log(log: Path, data: bytes) -> None:
    log.write_bytes(data)
    with pytest.raises(LogFormatError, match="line 1: it is not a log of kvtrie"):
        Log(log)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{broken\n", r"line 3: the line is not JSON \(Expecting property name"),
        (b'{"request": \xff\n', "line 3: the line is not JSON"),
        (b"[" * 100_000 + b"\n", r"line 3: the line is not JSON \(it is nested too deeply"),
        (b"[]\n", r"line 3: the line is not a record: '\[\]"),
        (b"{}\n", "line 3: the line is not a record"),
        (b"\n", "line 3: the line is not JSON"),
        (b'{"dropped": 3}\n', "line 3: dropped must be an object, not 3"),
        (b'{"dropped": {"queue": -1}}\n', "line 3: queue must be a whole number from 0, not -1"),
    ],
    ids=lambda one: repr(one)[:30],
)
def test_a_broken_line_in_the_middle(log: Path, line: bytes, why: str) -> None:
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:2], line, *lines[2:]]))
    read, broken = [], Log(log)
    with pytest.raises(LogLineError, match=why) as caught:
        read += list(broken)
    assert (caught.value.path, caught.value.line) == (log, 3)
    assert isinstance(caught.value, LogError)


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"num_prompt": 69}, "num_prompt must be at most num_tokens, 68, not 69"),
    ({"num_prompt": -1}, "num_prompt must be a whole number from 0, not -1"),
    ({"num_tokens": True}, "num_tokens must be a whole number from 0, not True"),
    ({"request": 3}, "request must be a text, not 3"),
    ({"session": None}, "session must be a text, not None"),
    ({"space": None}, "space must be a text, not None"),
    ({"session": "\ud800"}, "session must be a text without half a character"),
    ({"session": "s" * 65}, "session must be at most 64, not '65 characters'"),
    ({"space": "s" * 10_000}, "space must be at most 64, not '10000 characters'"),
    ({"spans": [[0, 1, "\ud800"]]}, "spans: Span: kind: "),
    ({"arrived": "now"}, "arrived must be a number, not 'now'"),
    ({"arrived": 10**400}, "arrived must be a number"),
    ({"took": float("nan")}, "took must be a number, not nan"),
    ({"ended": "exploded"}, "ended must be one of stopped, length, aborted, other, not 'exploded'"),
    ({"blocks": "AAAA"}, "blocks must be 8 bytes for each whole block, not '3 bytes'"),
    ({"blocks": "*"}, "blocks must be base64, not '*'"),
    ({"gaps": "AAAA" * 30}, "windows must be 8 bytes for each of gaps"),
    ({"gaps": "", "windows": ""}, "windows must be at least 3 in 68 tokens, not 0"),
    ({"gaps": "/w==", "windows": "AAAAAAAAAAA="}, "gaps must be inside 68 tokens, not 255"),
    ({"spans": 3}, "spans must be an array, not 3"),
    ({"spans": [[0, 1]]}, r"spans must be arrays of a start, an end and a name, not \[0, 1\]"),
    ({"spans": [["a", 1, "b"]]}, "spans must be arrays of a start, an end and a name"),
    ({"spans": [[0, 69, "user"]]}, r"spans must be ranges inside 68 tokens, not \[0, 69, 'user'\]"),
    ({"spans": [[3, 2, "user"]]}, "spans must be ranges inside 68 tokens"),
    ({"reused": [[0, 1, "stolen"]]}, "reused must be one of exact, moved, not 'stolen'"),
    ({"computed": []}, r"computed must be an object, not \[\]"),
    ({"computed": {"new": 61}}, "computed must be at most num_prompt, 60, not 61"),
    ({"computed": {"new": "x"}}, "new must be a whole number from 0, not 'x'"),
    ({"would": 3}, "would must be an object, not 3"),
    ({"would": {}}, "cleared must be true or false, not None"),
    ({"would": {"cleared": True}}, "exact must be a whole number from 0, not None"),
]


@pytest.mark.parametrize(("change", "why"), CHANGES, ids=lambda one: str(one)[:30])
def test_a_field_that_is_wrong(log: Path, change: dict[str, Any], why: str) -> None:
    rewritten(log, 3, change)
    found: list[Recorded] = []
    with pytest.raises(LogLineError, match=f"line 3: {why}"):
        found.extend(Log(log))


@pytest.mark.parametrize(
    ("tokens", "why"),
    [(None, "an array of num_tokens, 68"), ([1], "an array of"), ([-1] * 68, "token ids from 0")],
    ids=str,
)
def test_token_ids_that_are_wrong(tmp_path: Path, tokens: Any, why: str) -> None:
    path = tmp_path / "log"
    written(path, [finished(words(68, 1))], content="tokens")
    rewritten(path, 2, {"tokens": tokens})
    found: list[Recorded] = []
    with pytest.raises(LogLineError, match=f"line 2: tokens must be {why}"):
        found.extend(Log(path))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"content": "text"}, "content must be one of digests, tokens, not 'text'"),
        ({"min_run": 3}, "min_run must be from 16 to 256, not 3"),
        ({"block_size": 0}, "block_size must be from 1 to 4096, not 0"),
        ({"block_size": 10**18}, "block_size must be from 1 to 4096, not 1000000000000000000"),
        ({"window": 0}, "window must be from 1 to min_run, 32, not 0"),
        ({"window": 10**20}, "window must be from 1 to min_run, 32, not 100000000000000000000"),
        ({"rate": -5}, "rate must be from 0 to 1, not -5"),
        ({"rate": 1e300}, "rate must be from 0 to 1, not 1e\\+300"),
        ({"engine": "\ud800"}, "engine must be a text without half a character"),
        ({"key": 3}, "key must be a text, not 3"),
        ({"rate": None}, "rate must be a number, not None"),
    ],
    ids=str,
)
def test_a_header_that_is_wrong(log: Path, change: dict[str, Any], why: str) -> None:
    rewritten(log, 1, change)
    with pytest.raises(LogLineError, match=f"line 1: {why}"):
        Log(log)


def test_a_broken_header(log: Path) -> None:
    log.write_bytes(b'{"kvtrie_log":x\n' + log.read_bytes())
    with pytest.raises(LogLineError, match="line 1: the header is not JSON"):
        Log(log)


def test_files_that_differ(log: Path) -> None:
    log.with_name("log.1").write_bytes(log.read_bytes())
    rewritten(log.with_name("log.1"), 1, {})
    lines = log.with_name("log.1").read_bytes().replace(b" ", b"")
    log.with_name("log.1").write_bytes(lines.replace(b'"block_size":16', b'"block_size":32'))
    with pytest.raises(LogError, match="line 1: block_size is 16, and of the log's first file 32"):
        Log(log)


def test_files_whose_windows_differ(log: Path) -> None:
    """Both have numbers of their own: a replay ended in a traceback."""
    log.with_name("log.1").write_bytes(log.read_bytes())
    lines = log.with_name("log.1").read_bytes().replace(b" ", b"")
    log.with_name("log.1").write_bytes(lines.replace(b'"window":17', b'"window":16'))
    with pytest.raises(LogError, match="line 1: window is 17, and of the log's first file 16"):
        Log(log)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Log(tmp_path / "log")
