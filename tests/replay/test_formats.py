"""Reading traces: formats, compression, block sizes, and each way in which a file can be bad."""

from __future__ import annotations

import gzip
import json
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.replay.traffic import Row, bailian, full_blocks, mooncake, prefixes, write

from kvtrie.replay import FORMATS, Trace, TraceError, TraceFile, TraceFormat, formats, read_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GOOD = {"timestamp": 0, "input_length": 130, "output_length": 4, "hash_ids": [5, 6, 7]}


@pytest.mark.parametrize(("make", "size"), [(mooncake, 64), (bailian, 16)])
def test_ids_are_equal_iff_prefixes_are(
    make: Callable[[int, int], list[Row]], size: int, tmp_path: Path
) -> None:
    rows = make(7, 200)
    trace = read_trace(write(tmp_path / "t.jsonl", rows))
    assert trace.block_size == size
    named: dict[int, tuple[int, ...]] = {}
    for row, one in zip(rows, trace.requests, strict=True):
        blocks = prefixes(full_blocks(row, size))
        assert one.num_tokens == row["input_length"]
        assert len(one.prompt) == len(blocks)
        assert np.array_equal(one.prompt, one.cached)
        for number, block in zip(one.prompt.tolist(), blocks, strict=True):
            assert named.setdefault(number, block) == block
    assert len(set(named.values())) == len(named) == trace.num_ids
    assert not trace.shows_tokens
    assert not trace.marks_reasoning


@pytest.mark.parametrize("size", [512, 64, 16])
def test_block_size_follows_from_lengths(size: int, tmp_path: Path) -> None:
    rows = [
        {"input_length": 40 * size + 3, "hash_ids": list(range(41))},
        {"input_length": 30 * size + 3, "hash_ids": list(range(30))},
    ]
    trace = read_trace(write(tmp_path / "t.jsonl.gz", rows))
    assert trace.block_size == size
    assert [len(one.prompt) for one in trace.requests] == [40, 30]


def test_block_size_may_be_given(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"input_length": 100, "hash_ids": [1, 2, 3, 4]}])
    assert read_trace(path, 32).requests[0].prompt.size == 3
    with pytest.raises(
        TraceError, match="line 1: 4 hash_ids for 100 tokens do not fit blocks of 16"
    ):
        read_trace(path, 16)


def test_times_of_arrival_are_seconds(tmp_path: Path) -> None:
    rows = [GOOD | {"timestamp": 1500}, GOOD | {"timestamp": 1500.5}]
    rows += [GOOD | {"timestamp": time} for time in ("noon", None, True, [1], 10**400)]
    rows.append({"input_length": 130, "hash_ids": [5, 6, 7]})
    path = write(tmp_path / "t.jsonl", rows)
    found = [one.arrived for one in read_trace(path).requests]
    assert found == [1.5, pytest.approx(1.5005), *[None] * 6]
    path.write_text(json.dumps(GOOD).replace('"timestamp": 0', '"timestamp": Infinity') + "\n")
    assert read_trace(path).requests[0].arrived is None


def test_times_of_bailian_are_in_seconds(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", bailian(7, 20)))
    assert trace.format == "Qwen-Bailian"
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [one.arrived for one in trace.requests] == [line["timestamp"] for line in lines]


def test_the_fields_that_bailian_describes_are_read(tmp_path: Path) -> None:
    # Of its README, which shows the first four ids and the last one of 33.
    ids = [1089, 1090, 1091, 6326, *range(7000, 7028), 13148]
    row = {
        "chat_id": 159,
        "parent_chat_id": 55,
        "timestamp": 61.114,
        "input_length": 521,
        "output_length": 132,
        "type": "text",
        "turn": 2,
        "hash_ids": ids,
    }
    # A root request of the other traces; its first block is known, and the second follows another.
    root = row | {"chat_id": 160, "parent_chat_id": -1, "type": "search", "turn": 1}
    root |= {"timestamp": 62.0, "input_length": 40, "hash_ids": [1089, 1091, 9]}
    trace = read_trace(write(tmp_path / "t.jsonl", [row, root]))
    assert (trace.format, trace.block_size) == ("Qwen-Bailian", 16)
    first, second = trace.requests
    assert (first.num_tokens, first.arrived, len(first.prompt)) == (521, 61.114, 32)
    # The last block, of 9 and of 8 tokens, is not full.
    assert (second.num_tokens, len(second.prompt)) == (40, 2)
    assert second.prompt[0] == first.prompt[0]
    assert second.prompt[1] not in first.prompt


def test_blank_lines_are_no_requests_and_count(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n" + json.dumps(GOOD) + "\n\n" + json.dumps(GOOD) + "\n", encoding="utf-8")
    assert [one.line for one in read_trace(path).requests] == [2, 4]


def bad(**changes: object) -> bytes:
    """A good line, and one with changes; None removes a field."""
    row = {key: value for key, value in (GOOD | changes).items() if value is not None}
    return (json.dumps(GOOD) + "\n" + json.dumps(row) + "\n").encode()


PACKED = gzip.compress(bad(), mtime=0)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "t: the file is empty"),
        (b"\n \n", "t: the file is empty"),
        (gzip.compress(b"", mtime=0), "t: the file is empty"),
        (bad()[:-20], "t, line 2: not JSON: the line is cut off, or not one object"),
        (bad()[:30], "t, line 1: not JSON: the line is cut off, or not one object"),
        (PACKED[:-20], "t, line 1: the compressed data is cut off or damaged"),
        (PACKED[:-8], "t, line 3: the compressed data is cut off or damaged"),
        (PACKED[:-8] + bytes(8), "t, line 3: the compressed data is cut off or damaged"),
        (b"\x1f\x8bnothing", "t, line 1: the compressed data is cut off or damaged"),
        (bytes(range(128, 256)), "t, line 1: not text in UTF-8, so of no known format"),
        (bad(hash_ids=None), "t, line 2: there is no hash_ids"),
        (bad(hash_ids="5"), "t, line 2: hash_ids is not a list of integers"),
        (bad(hash_ids=[5, True, 7]), "t, line 2: hash_ids is not a list of integers"),
        (bad(hash_ids=[5, -1, 7]), "t, line 2: hash_ids has a number outside 0 to 2**64 - 1"),
        (bad(hash_ids=[5, 2**64, 7]), "t, line 2: hash_ids has a number outside 0 to 2**64 - 1"),
        (bad(hash_ids=[5]), "t, line 2: 1 hash_ids for 130 tokens do not fit blocks of 64 tokens"),
        (bad(input_length=0), "t, line 2: input_length is '0', not a positive integer"),
        (bad(input_length=1.5), "t, line 2: input_length is '1.5', not a positive integer"),
        (bad(input_length=None), "t, line 2: there is no input_length"),
        (json.dumps(GOOD).encode() + b"\n[1]\n", "t, line 2: not a JSON object"),
        (
            b'{"input_length": 9, "hash_ids": [1]}',
            "t: all lines fit blocks of 512 and of 64",
        ),
        (b'{"input_length": 9, "output_length": 3}', "t, line 1: the file has lengths only: "),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n", "t, line 1: the file has lengths on"),
        (b'{"version": 9}', "t, line 1: unknown format or version '9' (known: "),
        (b'{"messages": []}', "t, line 1: unknown format (known: kvtrie log, Qwen-Bailian,"),
        (b"[" * 100_000, "t, line 1: unknown format (known: "),
        (b'{"a": ' * 100_000, "t, line 1: not JSON: the line is cut off"),
        (
            json.dumps(GOOD).encode() + b'\n{"input_length": ' + b"[" * 100_000 + b"\n",
            "t, line 2: not JSON: the line is cut off, or not one object, or nested too deeply",
        ),
        (b"[1, 2]", "t, line 1: unknown format (known: "),
        (b"what is this\n", "t, line 1: unknown format (known: "),
    ],
)
def test_bad_files_are_one_sentence(
    data: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(TraceError) as caught:
        read_trace("t")
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="none: No such file or directory"):
        read_trace(tmp_path / "none")
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(tmp_path)


def test_a_pipe_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """Regression: it said that a stream is not seekable, or waited for a writer for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(held, json.dumps(GOOD).encode())
        with pytest.raises(TraceError, match="pipe: not a regular file"):
            read_trace(pipe)
        assert os.read(held, 1) == b"{"
    finally:
        os.close(held)


def test_one_more_format_can_be_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(source: TraceFile, block_size: int | None) -> Trace:
        lines = list(source.lines())
        if len(lines) < 2:
            raise source.error(1, "there is a header alone")
        return Trace(str(source.path), "ours", block_size or 8, (), 0)

    ours = TraceFormat("ours", lambda first: first.startswith("ours "), read)
    monkeypatch.setattr(formats, "FORMATS", (*FORMATS, ours))
    path = tmp_path / "t"
    path.write_text("ours 1\nx\n", encoding="utf-8")
    assert read_trace(path, 4) == Trace(str(path), "ours", 4, (), 0)
    path.write_text("ours 1\n", encoding="utf-8")
    with pytest.raises(TraceError, match="t, line 1: there is a header alone"):
        read_trace(path)
