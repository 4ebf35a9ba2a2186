"""``kvtrie inspect``: what it writes and says, bad input, and what may not be in a page."""

from __future__ import annotations

import fcntl
import json
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.browser.kit import log, small, words
from tests.cli.test_lab import Page
from tests.cli.test_without_torch import run as run_without_torch
from typer.testing import CliRunner

import kvtrie
from kvtrie.cli.app import app

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    index, prompt = small()
    blob = index.snapshot()
    (tmp_path / "snapshot").write_bytes(blob)
    (tmp_path / "newer").write_bytes(blob[:8] + (11).to_bytes(4, "little") + blob[12:])
    (tmp_path / "damaged").write_bytes(blob[:-1] + b"\x07")
    (tmp_path / "cut").write_bytes(blob[: len(blob) // 2])
    (tmp_path / "prompt").write_text(json.dumps(prompt), encoding="utf-8")
    (tmp_path / "a").write_text(json.dumps(words(100, 1)), encoding="utf-8")
    (tmp_path / "b").write_text(json.dumps(words(100, 1)[20:]), encoding="utf-8")
    (tmp_path / "text").write_text("hello", encoding="utf-8")
    log(tmp_path / "log", 20)
    lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines(keepends=True)
    broken = [*lines[:4], lines[4][:50] + "\n", *lines[5:]]
    (tmp_path / "log-broken").write_text("".join(broken), encoding="utf-8")
    newer = lines[0].replace('"kvtrie_log":1', '"kvtrie_log":2')
    (tmp_path / "log-newer").write_text(newer, encoding="utf-8")
    (tmp_path / "log-empty").write_text(lines[0], encoding="utf-8")
    (tmp_path / "log-cut").write_text("".join(lines)[:-9], encoding="utf-8")
    return tmp_path


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, args)])


def test_a_snapshot(folder: Path) -> None:
    done = run(folder / "snapshot", "--html", folder / "page.html")
    assert done.exit_code == 0, done.output
    counts = "241 of 512 blocks of 8 tokens cached: 226 exact, 15 approximate"
    page = f"the page is {folder / 'page.html'}"
    assert done.stdout == f"{counts}; 3 holes, 5 dead; 31 edges\n{page}\n"
    text = (folder / "page.html").read_text(encoding="utf-8")
    shown = Page(text.replace('<link rel="icon" href="data:,">', ""))
    assert not shown.open
    assert not shown.references
    assert counts in shown.text


def test_no_salt_seed_or_session_is_in_a_page(folder: Path) -> None:
    seed = 0x1234_5678_9ABC_DEF0
    index = kvtrie.RadixIndex(8, 2, seed=seed)
    seq = kvtrie.TokenSequence([1, 2], kvtrie.Namespace(model="m", salt="saltsalt"))
    index.insert(seq, [1], num_computed=2, source=kvtrie.COMPUTED, session="sessionsession")
    (folder / "secret").write_bytes(index.snapshot())
    (folder / "one").write_text("1 2 3", encoding="utf-8")
    for more in ((), (folder / "one", "--salt", "saltsalt")):
        done = run(folder / "secret", *more, "--html", folder / "page.html")
        assert done.exit_code == 0, done.output
        text = (folder / "page.html").read_text(encoding="utf-8")
        assert '"tenant":"tenant 1"' in text
        for secret in ("saltsalt", str(seed), f"{seed:x}", "sessionsession"):
            assert secret not in text


def test_a_plan_and_a_plan_in_a_snapshot(folder: Path) -> None:
    done = run(folder / "a", folder / "b", "--html", folder / "page.html", "--block-size", "4")
    assert done.exit_code == 0, done.output
    assert "80 tokens: 0 exact, 79 approximate, 1 computed; diverged at 0" in done.stdout
    made = ("--salt", "the tenant's secret", "--session", "chat-1")
    done = run(folder / "snapshot", folder / "prompt", *made, "--html", folder / "page.html")
    assert done.exit_code == 0, done.output
    assert "204 tokens: 104 exact, 76 approximate, 24 computed; approximate_only at 104" in (
        done.stdout
    )


def test_prompts_may_come_from_pipes(folder: Path) -> None:
    """Regression: the look at the first bytes emptied a pipe, which was then called empty."""
    readers = []
    for name in ("a", "b"):
        reader, writer = os.pipe()
        os.write(writer, (folder / name).read_bytes())
        os.close(writer)
        readers.append(reader)
    names = [f"/dev/fd/{reader}" for reader in readers]
    done = run(*names, "--html", folder / "page.html", "--block-size", "4")
    for reader in readers:
        os.close(reader)
    assert done.exit_code == 0, done.output
    assert "80 tokens: 0 exact, 79 approximate, 1 computed; diverged at 0" in done.stdout


def test_a_log_and_a_cut_one(folder: Path) -> None:
    done = run(folder / "log", "--html", folder / "page.html")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("20 requests of test 1; model model\n")
    done = run(folder / "log-cut", "--html", folder / "page.html")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("19 requests of test 1; model model; a cut last line is left out")


def test_no_torch_is_needed(folder: Path) -> None:
    for inputs in (["snapshot"], ["a", "b"], ["log"]):
        paths = [str(folder / one) for one in inputs]
        done = run_without_torch("inspect", *paths, "--html", str(folder / "page.html"))
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["none"], "none: No such file or directory"),
        (["."], ".: Is a directory"),
        (["a"], "a: neither a snapshot nor a log of kvtrie; to compare prompts, give two"),
        (["text"], "text: neither a snapshot nor a log"),
        (
            ["newer"],
            "newer: RadixIndex.pool_of_snapshot: version 11; this build reads versions 3 to 10",
        ),
        (["damaged"], "damaged: RadixIndex.pool_of_snapshot: the checksum does not fit"),
        (["cut"], "cut: RadixIndex.pool_of_snapshot: "),
        (["log-broken"], "log-broken, line 5: the line is not JSON"),
        (["log-newer"], "log-newer, line 1: the log is of version 2, and this kvtrie reads"),
        (["log-empty"], "log-empty, line 1: the log has no whole request"),
        (["log", "a"], "log: a log is shown alone"),
        (["a", "text"], "text: this is text, not token ids; give --tokenizer DIR"),
        (["a", "b", "a"], "3 files given; give a snapshot"),
        (["-", "-"], "the standard input can be read once"),
        (["a", "b", "--salt", "x"], "--salt names a prompt's namespace in a snapshot; give both"),
        (["snapshot", "--model", "x"], "--model names a prompt's namespace in a snapshot"),
        (["a", "b", "--session", "x"], "--session names sessions of a snapshot; give one"),
        (["snapshot", "--block-size", "4"], "--block-size is for two prompts"),
        (["log", "--tokenizer", "."], "--tokenizer has nothing to decode"),
        (["a", "b", "--tokenizer", "."], ".: it has no tokenizer.json"),
        (["snapshot", "prompt"], "snapshot: 2 namespaces match, of the models example@1"),
        (["snapshot", "prompt", "--salt", "x"], "snapshot: it has no such namespace"),
        (["snapshot", "none"], "none: No such file or directory"),
    ],
)
def test_bad_input_is_one_sentence(
    args: list[str], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = set(folder.iterdir())
    done = run(*args)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert done.stderr.startswith(f"kvtrie: {said}")
    assert done.stderr.count("\n") == 1
    assert set(folder.iterdir()) == before


def test_a_page_that_cannot_be_written_leaves_nothing(folder: Path) -> None:
    before = set(folder.iterdir())
    done = run(folder / "a", folder / "b", "--html", folder / "no" / "page.html")
    assert done.exit_code == 3
    assert "cannot write" in done.stderr
    assert set(folder.iterdir()) == before


def test_a_page_does_not_take_the_place_of_a_pipe_or_a_link(folder: Path, tmp_path: Path) -> None:
    """Regression: as root, ``--html /dev/null`` put a file where the device was."""
    pipe, link = tmp_path / "pipe", tmp_path / "link.html"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "page.html")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)
    done = run(folder / "a", folder / "b", "--html", pipe)
    assert done.exit_code == 0, done.output
    assert pipe.is_fifo()
    assert os.read(reader, 15) == b"<!doctype html>"
    os.close(reader)
    done = run(folder / "a", folder / "b", "--html", link)
    assert done.exit_code == 0, done.output
    assert link.is_symlink()
    assert (tmp_path / "page.html").read_bytes().startswith(b"<!doctype html>")


def test_prompts_are_numbers_of_any_spelling(folder: Path) -> None:
    (folder / "c").write_text(" ".join(map(str, np.arange(40))), encoding="utf-8")
    done = run(folder / "c", folder / "c", "--html", folder / "page.html")
    assert done.exit_code == 0, done.output
    assert "40 tokens: 32 exact, 0 approximate, 8 computed; complete at 32" in done.stdout


def test_names_in_a_log_do_not_reach_the_terminal(folder: Path) -> None:
    text = (folder / "log").read_text(encoding="utf-8")
    header, rest = text.split("\n", 1)
    header = json.dumps(json.loads(header) | {"engine": "\x1b[31mred"}, separators=(",", ":"))
    (folder / "log").write_text(f"{header}\n{rest}", encoding="utf-8")
    done = run(folder / "log", "--html", folder / "page.html")
    assert done.exit_code == 0, done.output
    assert "requests of \\x1b[31mred" in done.stdout
