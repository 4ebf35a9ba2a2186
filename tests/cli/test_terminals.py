"""What commands print where the terminal is narrow, or has not all characters."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from typing import TYPE_CHECKING

from tests.tags.templates import QWEN3, tokenizer_of

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = [sys.executable, "-m", "kvtrie.cli"]
ROWS = [{"input_length": 1_024 * n, "hash_ids": list(range(2 * n))} for n in (1, 20, 300)]


def traffic(path: Path) -> str:
    path.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    return str(path)


def run(args: list[str], encoding: str) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    return subprocess.run([*COMMAND, *args], env=env, capture_output=True, check=False)


def on_terminal(args: list[str], columns: int) -> str:
    """The standard output of a command on a terminal of this width."""
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    env |= {"TERM": "xterm", "NO_COLOR": "1"}
    with subprocess.Popen(
        [*COMMAND, *args], env=env, stdin=terminal, stdout=terminal, stderr=subprocess.DEVNULL
    ) as process:
        os.close(terminal)
        parts = []
        while True:
            try:
                part = os.read(reader, 65_536)
            except OSError:  # the command has ended
                break
            if not part:
                break
            parts.append(part)
    os.close(reader)
    assert process.returncode == 0
    return b"".join(parts).decode()


def test_no_figure_is_cut_on_a_narrow_terminal(tmp_path: Path) -> None:
    """Regression: a column that was too narrow ended in three dots, numbers too."""
    log = traffic(tmp_path / "traffic.jsonl")
    shown = on_terminal(["replay", log, "--bytes-per-token", "131072"], 30)
    assert "…" not in shown
    assert "307,200" in shown
    model = tmp_path / "model"
    tokenizer_of("qwen3", QWEN3).save_pretrained(model)
    shown = on_terminal(["lab", str(model)], 30)
    assert "…" not in shown
    computed = json.loads(run(["lab", str(model), "--json"], "utf-8").stdout)["rows"][0]
    turns = computed["measured"]["turns"]
    assert f" {sum(one['computed'] for one in turns)} " in shown


def test_characters_that_an_encoding_has_not_are_escaped(tmp_path: Path) -> None:
    """Regression: the command ended in a traceback, with half of its output."""
    log = traffic(tmp_path / "日記 ü \U0001f4d3.jsonl")
    done = run(["replay", log], "latin-1")
    assert done.returncode == 0, done.stderr.decode()
    assert "\\u65e5\\u8a18 ü \\ud83d\\udcd3.jsonl" in done.stdout.decode("latin-1")
    done = run(["replay", log, "--json"], "latin-1")
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout.decode("latin-1"))["path"] == log


def test_a_name_that_is_no_text_is_escaped(tmp_path: Path) -> None:
    """Regression: as above, for bytes that UTF-8 has not either."""
    log = traffic(tmp_path / os.fsdecode(b"\xff.jsonl"))
    page, picture = tmp_path / "page.html", tmp_path / "picture.svg"
    more = ["--pool", "400000", "--html", str(page), "--svg", str(picture)]
    done = run(["replay", log, "--json", *more], "utf-8")
    assert done.returncode == 0, done.stderr.decode()
    assert os.fsencode(json.loads(done.stdout)["path"]) == os.fsencode(log)
    for one in (page, picture):
        assert "\\udcff.jsonl" in one.read_text(encoding="utf-8")
