"""The scripts next to the benchmarks run, and make rows that can be recorded."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
from typing import TYPE_CHECKING

import fan
import figures
import flood
import generate
import hostile
import limits
import moved
import paths
import pytest
import replicas
import reuse
import splice
import traces
import turns
from forest import BLOCK_SIZE, QUICK
from tests.tags.templates import CHATML, tokenizer_of
from workloads.registry import WORKLOADS

import fleet
import record

if TYPE_CHECKING:
    from pathlib import Path

# 6 of 14 blocks were cached before: 1 of the second request, 2 of the third, 3 of the last. With 4
# blocks in all, the fourth request evicts 2, 4 and 1, so that the last one finds block 0 only.
REQUESTS = ([0, 1], [0, 2, 3], [0, 1, 4], [5, 6, 7], [0, 1, 4])


@pytest.mark.skipif(not QUICK, reason="KVTRIE_BENCH_SCALE is not quick: limits.py takes longer")
def test_limits(capsys: pytest.CaptureFixture[str]) -> None:
    limits.main(["--dry-run"])
    printed = capsys.readouterr().out
    assert "an empty call into an extension" in printed
    assert "lookup of 102,400 tokens in one edge, cold" in printed


def test_fan(capsys: pytest.CaptureFixture[str]) -> None:
    fan.main(["--places", "5", "--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == [f"{length:,}" for length in fan.LENGTHS]
    assert [line.split()[0] for line in lines[7:]] == ["nothing", "random", "the"]


def test_flood(capsys: pytest.CaptureFixture[str]) -> None:
    # What the Rust tests of the hash compute from foldhash's own words.
    assert flood.constant() == 9_770_251_217_246_409_141
    flood.main(["--siblings", "50", "--repeats", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["0", name] for name in flood.OPERATIONS]
    assert len(lines) == 1 + 3 * len(flood.OPERATIONS)


def test_splice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tokenizer_of("qwen3", CHATML)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.save_pretrained(tmp_path)
    found = splice.measured(tmp_path, 6)
    assert found.prompts == found.equal_texts == 6 * (splice.TURNS - 1)
    assert found.respelled
    assert found.plain_hits < found.spliced_hits < found.tokens
    splice.main([str(tmp_path), "--conversations", "1"])
    assert capsys.readouterr().out.splitlines()[2].split(" | ")[1:3] == ["3", "100.0%"]


@pytest.mark.skipif(not shutil.which("nats-server"), reason="nats-server is not installed")
def test_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    replicas.main(["--batches", "20", "--slow", "3", "--kills", "1"])
    rate, latency, recovery = capsys.readouterr().out.splitlines()
    assert rate.endswith("reach all 3 replicas")
    assert latency.startswith("one every 20 ms: ")
    assert ", of 1, from its start until all replicas are live" in recovery


@pytest.mark.parametrize("shape", paths.SHAPES, ids=str)
def test_paths(shape: paths.Shape) -> None:
    small = shape._replace(blocks=shape.blocks // 50, branches=min(shape.branches, 2))
    small = small._replace(workers=shape.workers // 8, holes=shape.holes // 8)
    _, found = paths.measured(small, 1)
    index, _ = paths.filled(small)
    index.check()
    stats = index.stats()
    assert stats["blocks"] == small.blocks + small.branches
    assert stats["edges"] >= 1 + 2 * small.branches - 1
    assert stats["entries"] == small.workers * small.blocks + small.branches - small.holes
    assert found <= BLOCK_SIZE * small.workers * small.blocks
    assert (found < BLOCK_SIZE * small.workers * small.blocks) == bool(small.holes)


def test_fleet() -> None:
    found = fleet.measured(fleet.WORKERS + 1, 0.2)
    assert found.right == found.right_plans == found.prompts == fleet.WORKERS + 1
    # The hint counts whole blocks only.
    assert 0.9 * found.planned < found.hinted <= found.planned < found.tokens
    assert len(found.find) == len(found.plans) == found.prompts


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


@pytest.mark.skipif(not QUICK, reason="KVTRIE_BENCH_SCALE is not quick: moved.py takes longer")
def test_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = {"input": "One word of 2 and 345,\n\tsixteenletterword " * 40, "output": "words"}
    with tarfile.open(tmp_path / "text.tar.gz", "w:gz") as archive:
        for number, count in enumerate((1, 3)):
            text = json.dumps(request | {"output": f"{number} ends " * 30 * count}) + "\n"
            member = tarfile.TarInfo(f"runs/{number}.jsonl")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    moved.main(["--dry-run", "--text", str(tmp_path / "text.tar.gz")])
    printed = capsys.readouterr().out
    assert "tokens of W11 agent.close with" in printed
    assert "tokens of recorded text with nothing to find" in printed
    assert "a period of 17 tokens" in printed


@pytest.mark.skipif(not QUICK, reason="KVTRIE_BENCH_SCALE is not quick: hostile.py takes longer")
def test_hostile(capsys: pytest.CaptureFixture[str]) -> None:
    hostile.main(["--dry-run"])
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(hostile.CASES)
    assert all("ms of CPU" in line for line in printed)


def test_moved_without_text_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for group in ("agent_runs", "strangers", "near_misses", "repetitive"):
        monkeypatch.setattr(moved, group, lambda: iter(()))
    moved.main(["--dry-run", "--text", str(tmp_path / "text.tar.gz")])
    assert "skipped recorded text: there is no text.tar.gz" in capsys.readouterr().out


@pytest.mark.skipif(not QUICK, reason="KVTRIE_BENCH_SCALE is not quick: reuse.py takes longer")
def test_reuse(capsys: pytest.CaptureFixture[str]) -> None:
    reuse.main(["--workloads", "W01", "W19"])
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3 * len(reuse.VARIANTS) + 1
    assert printed[0].startswith("W01 strip.r1, own texts")
    assert printed[-1].startswith("all workloads: 0 of ")


def turns_by_row(scale: float) -> dict[tuple[str, str, bool], turns.Left]:
    return {
        (left.workload, left.policy, left.needed > 0): left for left in turns.measured(scale=scale)
    }


@pytest.mark.parametrize("scale", [0.1, 0.37, 1.0])
def test_turns(scale: float) -> None:
    found = turns_by_row(scale)
    assert len(found) == len(turns.NAMES) * len(turns.POLICIES) * 2
    for (name, policy, pressed), left in found.items():
        keep = found[name, "keep", pressed]
        # Every block is in one place, and there are as many as are needed.
        assert left.kept + left.freed + left.evicted == left.cached == keep.cached
        assert left.evicted == max(0, left.needed - left.freed)
        assert left.exact + left.exact_compute == left.prompt
        assert left.approximate_exact >= left.exact
        assert left.reused + left.approximate_compute == left.prompt
        if policy == turns.PROMPT_ALONE:
            continue
        stripped = found[name, turns.PROMPT_ALONE, pressed]
        assert left.exact >= stripped.exact
        assert left.reused >= stripped.reused
        assert left.reused >= keep.reused
        if name == "W10" or policy.startswith("keep"):
            assert (left.freed, left.dead) == (0, 0)
            assert left.reused == keep.reused
            continue
        # As many blocks are needed as the reasoning fills: it costs the next prompt nothing.
        free = found[name, policy, False]
        assert (left.exact, left.reused) == (free.exact, free.reused)
        assert left.freed + left.dead == found[name, policy, True].needed
        assert left.evicted_dead == left.evicted


def test_turns_in_a_loop_free_and_mark_no_reasoning() -> None:
    left = turns.Finished.of("W10", 0.2).left("drop", pressed=True)
    assert left.needed > 0
    assert (left.freed, left.dead, left.evicted) == (0, 0, left.needed)


def test_turns_keep_prompt_and_answer() -> None:
    for name in ("W01", "W03", "W11"):
        turn = turns.Finished.of(name)
        left = turn.left("evict_first", pressed=True)
        # All but the new question, the cut block after the answer, and edges of pieces.
        tokens = sum(run.length for run in turn.case.kept)
        edges = 2 * 16 * len(turn.case.kept)
        assert left.reused >= tokens - edges


def test_turns_are_recorded_as_they_are() -> None:
    rows = [left.row() for left in turns.measured()]
    assert rows == figures.load()["sections"]["turns"]


def test_turns_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    turns.main(["--dry-run"])
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("#")] == [
        f"### {name} {WORKLOADS[name].name}" for name in turns.NAMES
    ]
    assert printed.count("| evict_first |") == 2 * len(turns.NAMES)


def test_generate_computes_little_of_what_moved() -> None:
    (row,) = generate.measured(["W11"], scale=0.05, rounds=1)
    assert row["exact"] + row["moved"] + row["computed"] == row["prompt"]
    assert row["moved"] > 0
    assert row["computed"] < row["computed_after_exact_prefix"]
    assert row["ratio"] > 0
