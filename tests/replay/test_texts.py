"""Traces of text: LMCache's agent traces, a file per session, often in one archive."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from typing import TYPE_CHECKING, Any

import pytest
from tests.replay.traffic import mooncake

from kvtrie.replay import TraceError, read_trace, replay

if TYPE_CHECKING:
    from pathlib import Path

GOOD = {"timestamp": 5, "input": "what is it", "output": "a note", "session_id": "s"}
WORDS = "note harbour blue seven where answer place rooms built early there late".split()


def packed(path: Path, files: dict[str, str], *, is_plain: bool = False) -> Path:
    """An archive as LMCache publishes it."""
    with tarfile.open(path, "w:" if is_plain else "w:gz") as archive:
        for name, text in files.items():
            data = text.encode()
            one = tarfile.TarInfo(f"traces/{name}")
            one.size = len(data)
            archive.addfile(one, io.BytesIO(data))
    return path


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def agents(seed: int, sessions: int = 3, requests: int = 6) -> dict[str, list[dict[str, Any]]]:
    """Sessions whose times are interleaved; each prompt has what came before, and a new head."""
    source = random.Random(seed)
    found: dict[str, list[dict[str, Any]]] = {}
    for session in range(sessions):
        history = ""
        rows = []
        for turn in range(requests):
            history += " ".join(source.choices(WORDS, k=60)) + ". "
            head = f"Step {turn}. " if session else ""
            output = " ".join(source.choices(WORDS, k=20))
            at = 10 * turn + session
            rows.append(
                {
                    "timestamp": at,
                    "input": head + history,
                    "output": output,
                    "session_id": f"{session}",
                }
            )
        # The lines of a file are not always in the order of their times.
        source.shuffle(rows)
        found[f"{session}.jsonl"] = rows
    return found


@pytest.mark.parametrize("is_plain", [True, False])
def test_an_archive_is_read_in_the_order_of_its_times(tmp_path: Path, is_plain: bool) -> None:
    sessions = agents(1)
    others = {"README.md": "no trace", "._0.jsonl": "\x00", "empty.jsonl": ""}
    files = {name: lines(rows) for name, rows in sessions.items()} | others
    path = packed(tmp_path / "t.tar.gz", files, is_plain=is_plain)
    trace = read_trace(path)
    assert (trace.format, trace.block_size) == ("LMCache agent", 16)
    every = [
        (row["timestamp"], name, at)
        for name, rows in sessions.items()
        for at, row in enumerate(rows, 1)
    ]
    places = [(f"{path}/traces/{name}", at) for _, name, at in sorted(every)]
    assert [(one.file, one.line) for one in trace.requests] == places
    assert [one.session for one in trace.requests[:4]] == ["0", "1", "2", "0"]
    microseconds = [time for time, _, _ in sorted(every)]
    assert [one.arrived for one in trace.requests] == [time * 1e-6 for time in microseconds]


def test_a_prompt_is_found_where_its_text_is(tmp_path: Path) -> None:
    """A session that appends is found from the front; one with a new head each time only moves."""
    path = packed(tmp_path / "t.tgz", {name: lines(rows) for name, rows in agents(2).items()})
    trace = read_trace(path)
    report = replay(trace, [trace.num_ids + 200])
    expected = 0
    rows = sorted(
        (row for rows in agents(2).values() for row in rows), key=lambda row: row["timestamp"]
    )
    for earlier, later in zip(rows, rows[3:], strict=False):
        if later["session_id"] == "0":
            # Words and full stops are one token each, with the space before them.
            count = len(earlier["input"].replace(".", " .").split())
            assert later["input"].startswith(earlier["input"])
            expected += count // 16 * 16
    assert report.unlimited.exact == expected > 0
    moved = report.rows[0].kvtrie.approximate
    assert moved is not None
    assert moved > expected


def test_tokens_are_those_of_a_tokenizer_if_there_is_one(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(lines([GOOD]), encoding="utf-8")
    by_words = read_trace(path).requests[0]
    assert by_words.num_tokens == 3
    by_bytes = read_trace(path, 4, lambda text: list(text.encode()))
    assert by_bytes.tokens_are == "those of the tokenizer"
    assert by_bytes.requests[0].num_tokens == 10
    assert by_bytes.requests[0].tokens is not None
    _, whole = by_bytes.requests[0].tokens()
    # The last token of the reply has no KV.
    assert bytes(whole.tolist()) == b"what is ita not"
    with pytest.raises(TraceError, match=r"t\.jsonl, line 1: the tokenizer returns an id outside"):
        read_trace(path, encode=lambda _text: [1 << 32])
    with pytest.raises(TraceError, match=r"t\.jsonl, line 1: the tokenizer makes no token of"):
        read_trace(path, encode=lambda _text: [])


def test_every_letter_of_a_text_is_in_a_token(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    text = "Zwölf  Häuser_12345:\n\t'x' = 数字 €3.50"
    rows = [GOOD | {"input": text}, GOOD | {"input": text.replace("€", "$"), "timestamp": 6}]
    path.write_text(lines(rows), encoding="utf-8")
    one, other = (request.tokens for request in read_trace(path, 1).requests)
    assert one is not None
    assert other is not None
    differs = [a != b for a, b in zip(one()[0].tolist(), other()[0].tolist(), strict=True)]
    assert sum(differs) == 1


def test_sessions_of_any_name_are_told_apart(tmp_path: Path) -> None:
    names = ["", "s" * 256, "s" * 257, "s" * 258]
    rows = [GOOD | {"session_id": name, "timestamp": at} for at, name in enumerate(names)]
    path = tmp_path / "t.jsonl"
    path.write_text(lines(rows), encoding="utf-8")
    trace = read_trace(path)
    found = [one.session for one in trace.requests]
    assert found[:2] == [None, "s" * 256]
    assert len(set(found)) == len(names)
    assert len(replay(trace).rows) >= 1


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"a.jsonl": lines([GOOD]), "b.jsonl": lines([GOOD, without("output")])},
            "t/traces/b.jsonl, line 2: there is no output",
        ),
        (
            {"a.jsonl": lines([GOOD, GOOD | {"timestamp": True}])},
            "t/traces/a.jsonl, line 2: timestamp is 'True', not a number",
        ),
        (
            {"a.jsonl": lines([GOOD, GOOD | {"output": "a\ud800"}])},
            "t/traces/a.jsonl, line 2: output has half a character (a lone surrogate)",
        ),
        (
            {"a.jsonl": lines([GOOD, GOOD | {"timestamp": float("nan")}])},
            "t/traces/a.jsonl, line 2: timestamp is 'nan', not a number",
        ),
        (
            {"a.jsonl": lines([GOOD, GOOD | {"input": 3}])},
            "t/traces/a.jsonl, line 2: input is '3', not a text",
        ),
        (
            {"a.jsonl": lines([GOOD]) + lines([GOOD])[:-9]},
            "t/traces/a.jsonl, line 2: not JSON: the line is cut off, or not one object",
        ),
        (
            {"a.jsonl": lines([GOOD]) + '{"timestamp": ' + "[" * 100_000 + "\n"},
            "t/traces/a.jsonl, line 2: not JSON: the line is cut off, or not one object, or nested",
        ),
        ({"a.jsonl": lines([GOOD]) + "[]\n"}, "t/traces/a.jsonl, line 2: not a JSON object"),
        ({"a.jsonl": lines([GOOD | {"input": ""}])}, "t: no request has an input"),
        (
            {"a.jsonl": lines(mooncake(1, 3))},
            "t/traces/a.jsonl, line 1: an archive of files of the format Mooncake: unpack it",
        ),
        ({"a.jsonl": "\n\nwhat\n"}, "t/traces/a.jsonl, line 3: unknown format (known: "),
        ({"a.csv": "1,2"}, "t: the archive has no line in a file whose name ends in .jsonl"),
    ],
)
def test_bad_archives_are_one_sentence(
    files: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError) as caught:
        read_trace(packed(tmp_path / "t", files).name)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_an_archive_that_is_cut_is_one_sentence(tmp_path: Path) -> None:
    files = {name: lines(rows) for name, rows in agents(3).items()}
    whole = gzip.decompress(packed(tmp_path / "t.tar.gz", files).read_bytes())
    for data in (whole[: len(whole) // 2], gzip.compress(whole)[:-900]):
        path = tmp_path / "cut"
        path.write_bytes(data)
        with pytest.raises(TraceError, match=rf"^{path}.*: the compressed data is cut off or dam"):
            read_trace(path)
