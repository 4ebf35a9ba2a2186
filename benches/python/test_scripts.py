"""The scripts beside the benchmarks run, and make rows that can be recorded."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import limits
import pytest
import record
import traces
from forest import QUICK

if TYPE_CHECKING:
    from pathlib import Path

# Of 14 blocks 6 were there before: 1 of the second request, 2 of the third, 3 of the last. With 4
# blocks in all, the fourth request evicts 2, 4 and 1, so that the last one finds block 0 alone.
REQUESTS = ([0, 1], [0, 2, 3], [0, 1, 4], [5, 6, 7], [0, 1, 4])


@pytest.mark.skipif(not QUICK, reason="KVTRIE_BENCH_SCALE is not quick: limits.py takes longer")
def test_limits(capsys: pytest.CaptureFixture[str]) -> None:
    limits.main(["--dry-run"])
    printed = capsys.readouterr().out
    assert "an empty call into an extension" in printed
    assert "lookup of 102,400 tokens in one edge, cold" in printed


def written(folder: Path, name: str) -> Path:
    path = folder / f"{name}.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"hash_ids": ids}) + "\n" for ids in REQUESTS)
    return path


def test_traces_finds_what_the_trace_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "POOLS", (None, 0.5))
    trace = traces.Trace("small", 64, ideal=6 / 14)
    shares = [row for row in traces.measured(trace, written(tmp_path, "small")) if "ideal" in row]
    assert [row["kvtrie"] for row in shares] == [round(6 / 14, 4), round(4 / 14, 4)]
    assert [row["evicted"] > 0 for row in shares] == [False, True]


def test_traces_wrong_share_is_an_error(tmp_path: Path) -> None:
    trace = traces.Trace("small", 64, ideal=0.5)
    with pytest.raises(RuntimeError, match=r"known 0\.5"):
        traces.measured(trace, written(tmp_path, "small"))


def test_traces_without_files_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces.main(["--dry-run", "--traces", str(tmp_path)])
    assert capsys.readouterr().out.count("skipped") == len(traces.TRACES)


def test_record_gives_the_time_of_one_call() -> None:
    info = {"work": "lookup", "calls": 4, "tokens": 500, "p10": 0.9, "p90": 1.1}
    benchmark = {
        "fullname": "test_lookup.py::test_lookup",
        "stats": {"median": 4e-6, "rounds": 7},
        "extra_info": info,
    }
    (row,) = record.rows_of({"benchmarks": [benchmark]})
    assert row == {
        "work": "lookup",
        "unit": "us",
        "kvtrie": 1.0,
        "kvtrie_p10": 0.9,
        "kvtrie_p90": 1.1,
        "rounds": 7,
        "calls_a_round": 4,
        "tokens": 500,
        "ns_per_token": 2.0,
    }
