"""``kvtrie replay``: what it prints and writes, sizes in bytes, and bad input."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
from tests.browser.kit import log as recorded
from tests.byte_tokenizer import byte_tokenizer
from tests.cli.test_lab import Page
from tests.cli.test_without_torch import run as run_without_torch
from tests.replay.test_logged import record, spans_of, traffic, with_users
from tests.replay.test_texts import agents, lines, packed
from tests.replay.traffic import mooncake, simulated, write
from typer.testing import CliRunner

from kvtrie.cli.app import app

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

# 2 layers, 2 heads of 32, K and V, 4 bytes: 1,024 bytes per token.
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size": 128,
    "torch_dtype": "float32",
}
ROWS = mooncake(seed=4, num=300)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return write(tmp_path / "traffic.jsonl.gz", ROWS)


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["replay", *map(str, args)])


def test_tables_over_ten_sizes(log: Path) -> None:
    done = run(log)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert f"(Mooncake): {len(ROWS)} requests, " in lines[0]
    assert lines[1] == "moved runs not visible: the trace names blocks and shows no tokens"
    assert re.search(r"^hit rate +\n", done.stdout, re.MULTILINE)
    rows = re.findall(r"^ *[\d,]+ +[\d.]+ % .*", done.stdout, re.MULTILINE)
    assert len(rows) == 10
    for row in rows:
        assert re.search(r"% +reasoning not marked +at least [\d.]+ %, moved runs not visible", row)
    assert re.search(r"^ +no limit +[\d.]+ %", done.stdout, re.MULTILINE)
    assert re.search(r"^prompt tokens computed +\n", done.stdout, re.MULTILINE)
    assert done.stderr.startswith(f"reading {log}\n1/10 ")


def test_a_size_in_bytes_is_answered_in_bytes_and_tokens(log: Path, tmp_path: Path) -> None:
    # 4 MiB are 4,096 tokens of 1,024 bytes, 64 blocks of 64 tokens.
    done = run(log, "--pool", "4MiB", "--pool", "0.008G", "--model", tmp_path / "config.json")
    assert done.exit_code == 0, done.output
    prompts = sum(row["input_length"] for row in ROWS)
    found = simulated(ROWS, 64, 64, "lru")
    size = re.escape(f"a pool of {4096 * 1024 / 1e9:.1f} GB (4,096 tokens): prefix, LRU finds ")
    rate = re.escape(f"{100 * found / prompts:.1f} % and computes ")
    assert re.search(f"^{size}{rate}", done.stdout, re.MULTILINE)
    assert f"({prompts - found:,} tokens)" in done.stdout
    assert "kvtrie finds " in done.stdout
    assert "as exact KV (moved runs not visible)" in done.stdout
    assert "(7,808 tokens): prefix, LRU" in done.stdout
    assert "prefix reuse without limits finds " in done.stdout
    assert "KV computed, in GB" in done.stdout


def test_json(log: Path, tmp_path: Path) -> None:
    done = run(log, "--json", "--pool", "4096", "--model", tmp_path)
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    assert (document["block_size"], document["bytes_per_token"]) == (64, 1024)
    assert not document["shows_moved_runs"]
    (row,) = document["rows"]
    assert (row["num_blocks"], row["num_tokens"]) == (64, 4096)
    assert row["prefix"]["exact"] == row["kvtrie"]["exact"] == simulated(ROWS, 64, 64, "lru")
    assert (row["kvtrie"]["approximate"], row["dead_first"]) == (None, None)
    assert row["optimum"]["exact"] == simulated(ROWS, 64, 64, "optimum")


def test_an_overlay_is_called_synthetic_everywhere(log: Path, tmp_path: Path) -> None:
    args = ("--overlay", "W01", "--svg", tmp_path / "a.svg", "--html", tmp_path / "a.html")
    done = run(log, *args)
    assert done.exit_code == 0, done.output
    said = "replies and reasoning are synthetic (overlay W01): the trace marks none"
    assert said in done.stdout
    assert "not visible" not in done.stdout
    assert "not marked" not in done.stdout
    assert said in Page((tmp_path / "a.html").read_text(encoding="utf-8")).text
    assert "with synthetic reasoning (W01)" in (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert json.loads(run(log, "--overlay", "W11", "--json").stdout)["synthetic"] == "W11"


def test_approximate_reuse_is_called_so_next_to_exact_hits(tmp_path: Path) -> None:
    """Regression: the column had one rate, in which moved runs were like the hits of the others."""
    svg, html = tmp_path / "a.svg", tmp_path / "a.html"
    traffic = tmp_path / "kvtrie.log"
    recorded(traffic, 20)
    done = run(traffic, "--pool", "100000", "--svg", svg, "--html", html)
    assert done.exit_code == 0, done.output
    found = json.loads(run(traffic, "--pool", "100000", "--json").stdout)
    row = found["rows"][0]["kvtrie"]
    assert row["approximate"] > 0
    said = (
        f"{100 * row['hit_rate']:.1f} % ({100 * row['approximate'] / found['prompt_tokens']:.1f} % "
    )
    # In the table, and in the sentence of the size.
    assert done.stdout.count(f"{said}approximate)") == 2
    assert f"{said}approximate)" in Page(html.read_text(encoding="utf-8")).text
    assert "kvtrie, with approximate KV" in svg.read_text(encoding="utf-8")
    # Nothing else is approximate.
    assert done.stdout.count("% approximate") == 2


def test_the_plot_has_a_mark_for_each_size_and_policy(log: Path, tmp_path: Path) -> None:
    done = run(log, "--svg", tmp_path / "plot.svg")
    assert done.exit_code == 0, done.output
    picture = ET.fromstring((tmp_path / "plot.svg").read_text())  # noqa: S314 - our own
    assert picture.tag.endswith("svg")
    lines = [one.get("points", "").split() for one in picture.iter() if "polyline" in one.tag]
    drawn = [one for one in lines if len(one) == 10]
    assert len(drawn) == 3  # prefix, kvtrie, optimum
    assert drawn[0] == drawn[1] != drawn[2]
    words = [one.text for one in picture.iter() if one.tag.endswith("text")]
    assert "kvtrie, exact part (moved runs not visible)" in words
    assert "offline optimum" in words
    assert "size of the pool in tokens" in words
    heights = [float(point.split(",")[1]) for point in drawn[0]]
    assert heights == sorted(heights, reverse=True)


def test_the_plot_of_one_size(log: Path, tmp_path: Path) -> None:
    done = run(log, "--svg", tmp_path / "plot.svg", "--pool", "4096", "--bytes-per-token", "7")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    assert ET.fromstring(text) is not None  # noqa: S314 - our own
    assert "size of the pool in GB" in text
    assert "nan" not in text


def test_the_page_is_complete_in_one_file(log: Path, tmp_path: Path) -> None:
    done = run(log, "--html", tmp_path / "page.html", "--pool", "4096")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not page.open
    assert not page.references
    assert "<script" not in text
    assert "<svg " in text
    assert "moved runs not visible" in page.text
    assert "a pool of 4,096 tokens: prefix, LRU finds" in page.text
    names = {one.name for one in tmp_path.iterdir()}
    assert names == {"config.json", "traffic.jsonl.gz", "page.html"}


def test_no_torch_is_needed(log: Path, tmp_path: Path) -> None:
    out = ("--html", str(tmp_path / "a.html"), "--model", str(tmp_path), "--pool", "4MB")
    done = run_without_torch("replay", str(log), *out)
    assert done.returncode == 0, done.stderr
    assert "prefix, LRU" in done.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["none"], "kvtrie: none: No such file or directory"),
        (["empty"], "kvtrie: empty: the file is empty"),
        (
            ["cut"],
            f"kvtrie: cut, line {len(ROWS)}: not JSON: the line is cut off, or not one object",
        ),
        (["other"], "kvtrie: other, line 1: unknown format (known: "),
        (["version"], "kvtrie: version, line 1: unknown format or version '9' (known: "),
        (["azure.csv"], "kvtrie: azure.csv, line 1: the file has lengths only: "),
        (["traffic.jsonl.gz", "--pool", "64G"], "kvtrie: --pool 64G is in bytes, so it needs --mo"),
        (["traffic.jsonl.gz", "--pool", "much"], "kvtrie: --pool 'much' is not a number of tokens"),
        (
            ["traffic.jsonl.gz", "--pool", "3"],
            "kvtrie: --pool 3 is 3 tokens: 0 blocks of 64 tokens, not",
        ),
        (["traffic.jsonl.gz", "--pool", "128"], "kvtrie: traffic.jsonl.gz, line "),
        (["traffic.jsonl.gz", "--overlay", "W99"], "kvtrie: --overlay 'W99' is not one of W01, "),
        (["traffic.jsonl.gz", "--model", "nowhere"], "kvtrie: nowhere: No such file or directory"),
        (["traffic.jsonl.gz", "--model", "cut"], "kvtrie: cut: not JSON: "),
        (["traffic.jsonl.gz", "--model", "list"], "kvtrie: list: not a model's config: not a JSON"),
        (
            ["traffic.jsonl.gz", "--model", "nameless"],
            "kvtrie: nameless: KVLayout.from_config: cannot hold the KV of a model without ",
        ),
        (["traffic.jsonl.gz", "--model", "mamba"], "kvtrie: mamba: KVLayout.from_config: cannot "),
        (
            ["traffic.jsonl.gz", "--model", "config.json", "--bytes-per-token", "9"],
            "kvtrie: give --model or --bytes-per-token, not both",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
    args: list[str], said: str, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert log.parent == tmp_path
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    for name, content in {
        "empty": "",
        "cut": text[:-9],
        "other": '{"messages": []}\n',
        "version": '{"version": 9}\n',
        "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,4808,10\n",
        "list": "[1]",
        "nameless": '{"a": 1}',
        "mamba": json.dumps(CONFIG | {"state_size": 16}),
    }.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    before = set(tmp_path.iterdir())
    done = run(*args, "--html", "out.html", "--svg", "out.svg")
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("kvtrie: ")]
    assert len(errors) == 1
    assert errors[0].startswith(said)
    assert set(tmp_path.iterdir()) == before


def test_a_picture_that_cannot_be_written(log: Path, tmp_path: Path) -> None:
    done = run(log, "--svg", tmp_path / "none" / "out.svg")
    assert done.exit_code == 3
    (line,) = done.stderr.splitlines()  # before the log is read
    assert line.startswith("kvtrie: cannot write ")


@pytest.mark.parametrize("size", ["'much'", "64G"])
def test_a_bad_size_ends_before_the_log_is_read(size: str) -> None:
    done = run("not-there", "--pool", size.strip("'"))
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"kvtrie: --pool {size} is ")


# --- logs of the recorder ---------------------------------------------------------------------


def test_a_log_shows_what_dead_reasoning_first_finds(tmp_path: Path) -> None:
    turns = traffic(1)
    record(tmp_path / "log", turns, spans=with_users(turns))
    done = run(tmp_path / "log", "--pool", "2400", "--html", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    said = "reasoning is dropped when its turn is finished: 24 of 24 prompts that continue"
    assert said in done.stdout
    assert said in Page((tmp_path / "page.html").read_text(encoding="utf-8")).text
    assert "dead reasoning first finds" in done.stdout
    assert "not marked" not in done.stdout


def test_a_log_that_does_not_show_what_becomes_of_reasoning(tmp_path: Path) -> None:
    turns = traffic(1, turns=1)
    record(tmp_path / "log", turns, spans=spans_of(turns))
    done = run(tmp_path / "log", "--pool", "2000")
    assert done.exit_code == 0, done.output
    assert "the log marks reasoning, but no prompt in it continues a finished turn" in done.stdout
    assert "% not known" in " ".join(done.stdout.split())
    assert "not marked" not in done.stdout


def test_what_a_log_lacks_is_said_in_text_and_json(tmp_path: Path) -> None:
    path = tmp_path / "log"
    turns = traffic(1, conversations=2)
    record(path, turns, rate=1.0, names=False)
    header, *lines = path.read_bytes().splitlines(keepends=True)
    dropped = b'{"dropped":{"queue":5,"disk":2,"size":1}}\n'
    sampled = header.replace(b'"rate":1.0', b'"rate":0.25')
    path.write_bytes(b"".join([sampled, *lines[:-1], dropped, lines[-1][:-30]]))
    gaps = json.loads(run(path, "--json", "--pool", "4000").stdout)["gaps"]
    assert gaps == {
        "rate": 0.25,
        "without_session": len(turns) - 1,
        "num_cut": 1,
        "dropped": 8,
        "recorders": 1,
    }
    text = run(path, "--pool", "4000").stdout
    assert "sampled: 25 % of the sessions are in the log: what sessions share is found too " in text
    assert "as much of this traffic as one 4 times as large has of all" in text
    assert f"{len(turns) - 1} requests name no session and were sampled one by one" in text
    assert "8 requests were not recorded: hit rates are too low" in text
    assert "1 cut last line of the log: not read" in text


def test_a_whole_log_lacks_nothing(tmp_path: Path) -> None:
    turns = traffic(1, conversations=2)
    record(tmp_path / "log", turns)
    text = run(tmp_path / "log", "--pool", "4000").stdout
    assert not re.search("sampled|too low|cut|processes", text)


# --- traces of text ---------------------------------------------------------------------------


def test_an_archive_of_texts_is_read_with_a_tokenizer_and_without(
    log: Path, tmp_path: Path
) -> None:
    texts = {name: lines(rows) for name, rows in agents(1).items()}
    path = packed(tmp_path / "agents.tar.gz", texts)
    by_words = run(path, "--pool", "4000")
    assert by_words.exit_code == 0, by_words.output
    assert "(LMCache agent): 18 requests, " in by_words.stdout
    assert "tokens are words and marks of the text, not a model's" in by_words.stdout
    assert "not visible" not in by_words.stdout
    byte_tokenizer().save_pretrained(tmp_path / "model")
    arguments = ("--pool", "40000", "--tokenizer", tmp_path / "model", "--json")
    by_bytes = run(path, *arguments)
    assert by_bytes.exit_code == 0, by_bytes.output
    document = json.loads(by_bytes.stdout)
    assert document["tokens_are"] == "those of the tokenizer"
    inputs = [row["input"] for rows in agents(1).values() for row in rows]
    assert document["prompt_tokens"] == sum(map(len, inputs))
    refused = run(log, *arguments)
    assert refused.exit_code == 2
    assert refused.stderr.endswith(
        f"--tokenizer is for traces of text, and {log} (Mooncake) has none\n"
    )


@pytest.mark.parametrize("name", ["none", "model"])
def test_a_tokenizer_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(lines(agents(1)["0.jsonl"]), encoding="utf-8")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}", encoding="utf-8")
    done = run(path, "--tokenizer", tmp_path / name)
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert str(tmp_path / name) in done.stderr


def test_a_config_that_is_nested_too_deeply_is_one_sentence(tmp_path: Path) -> None:
    trace, config = tmp_path / "trace.jsonl", tmp_path / "config.json"
    write(trace, mooncake(seed=4, num=3))
    config.write_text('{"model_type": ' + "[" * 100_000 + "}")
    done = run(trace, "--model", config)
    assert done.exit_code == 2, done.output
    assert done.stderr == f"kvtrie: {config}: not JSON that can be read: it is nested too deeply\n"
