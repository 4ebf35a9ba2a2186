"""Commands as processes: Ctrl-C and lost output end them with a sentence, and with no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.forked import ForkedCommand, closed_pipe, full_disk

if TYPE_CHECKING:
    from collections.abc import Callable

COMMAND = [sys.executable, "-m", "kvtrie.cli"]
ENOSPC = "No space left on device"
CALIBRATE = ["calibrate", "gqa", "--minutes", "0", "--policies", "rotated"]
PATIENCE = 250  # seconds; only a test that fails waits so long


@pytest.fixture
def prompts(tmp_path: Path) -> list[str]:
    paths = [tmp_path / "cached.json", tmp_path / "prompt.json"]
    paths[0].write_text("[1, 2, 3, 4]")
    paths[1].write_text("[1, 2, 3, 5]")
    return [str(path) for path in paths]


@pytest.fixture
def commands(prompts: list[str], talk: Path, model_dir: Path) -> dict[str, list[str]]:
    few = ["--repeats", "1", "--max-new-tokens", "2", "--model", str(model_dir)]
    return {
        "explain": ["explain", *prompts],
        "explain --json": ["explain", "--json", *prompts],
        "demo": ["demo", str(talk), *few],
        "calibrate": CALIBRATE,
        "calibrate --json": [*CALIBRATE, "--json"],
        "--help": ["--help"],
        "--version": ["--version"],
    }


WITH_TORCH = ("demo", "calibrate", "calibrate --json")
NAMES = ("explain", "explain --json", *WITH_TORCH, "--help", "--version")


def start(args: list[str], **options: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([*COMMAND, *args], text=True, env=env, **given)


def start_into(
    opened: Callable[[], int], commands: dict[str, list[str]], name: str
) -> ForkedCommand | subprocess.Popen[str]:
    """Start a command whose stdout is this."""
    if name in WITH_TORCH:
        return ForkedCommand(commands[name], stdout=opened)
    stdout = opened()
    try:
        return start(commands[name], stdout=stdout)
    finally:
        os.close(stdout)


def last_line(error: str) -> str:
    assert "Traceback" not in error, error
    assert "Exception ignored" not in error, error
    return error.splitlines()[-1]


@pytest.mark.parametrize("name", NAMES)
def test_full_disk_is_one_sentence(commands: dict[str, list[str]], name: str) -> None:
    process = start_into(full_disk, commands, name)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 3
    assert last_line(error) == f"kvtrie: cannot write to standard output: {ENOSPC}"


@pytest.mark.parametrize("name", NAMES)
def test_closed_pipe_is_one_sentence(commands: dict[str, list[str]], name: str) -> None:
    process = start_into(closed_pipe, commands, name)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 3
    assert last_line(error) == "kvtrie: cannot write to standard output: Broken pipe"


def test_closed_output_is_one_sentence(prompts: list[str]) -> None:
    process = start(["explain", *prompts], preexec_fn=lambda: os.close(1))
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 3
    assert last_line(error) == "kvtrie: standard output is closed"


def test_errors_that_cannot_be_written_are_an_exit_code(prompts: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        process = start(["explain", prompts[0]], stderr=full)
        out, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (3, "")


def test_closed_stderr_hides_progress_alone(commands: dict[str, list[str]]) -> None:
    process = start(commands["calibrate --json"], preexec_fn=lambda: os.close(2))
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert out.startswith("{")
    assert out.endswith("}\n")


def wait_for(found: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + PATIENCE
    while not found():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)


def interrupt_import_of(module: str, args: list[str], tmp_path: Path) -> tuple[int, str, str]:
    """Run a command in which the import of a module never ends, and interrupt it there."""
    stubs, mark = tmp_path / "stubs", tmp_path / "mark"
    stubs.mkdir()
    stub = f"open({str(mark)!r}, 'w').close()\nimport time\nwhile True: time.sleep(0.01)\n"
    (stubs / f"{module}.py").write_text(stub)
    process = start(args, env={"PYTHONPATH": str(stubs)})
    wait_for(mark.exists, process)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=PATIENCE)
    return process.returncode, out, error


def test_command_line_starts_without_imports_that_take_long() -> None:
    # An interrupt during imports before `main` ends with a traceback.
    code = "import kvtrie.cli, sys; print({'numpy', 'torch', 'typer', 'rich'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("name", ["explain", "demo", "calibrate"])
def test_interrupted_import_is_one_sentence(
    commands: dict[str, list[str]], tmp_path: Path, name: str
) -> None:
    code, out, error = interrupt_import_of("typer", commands[name], tmp_path)
    assert (code, out) == (130, "")
    assert last_line(error).startswith("kvtrie: interrupted")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("name", ["demo", "calibrate"])
def test_interrupted_import_of_torch_is_one_sentence(
    commands: dict[str, list[str]], tmp_path: Path, name: str
) -> None:
    code, out, error = interrupt_import_of("torch", commands[name], tmp_path)
    assert (code, out) == (130, "")
    assert last_line(error).startswith("kvtrie: interrupted")


def test_interrupted_while_it_reads_is_one_sentence(prompts: list[str], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = start(["explain", str(pipe), prompts[1]])
    writers: list[int] = []

    def is_read() -> bool:
        try:
            writers.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # no reader has opened it yet
            return False
        return True

    wait_for(is_read, process)
    process.send_signal(signal.SIGINT)
    os.close(writers[0])  # Python's handler waits for a read that began just after the signal
    out, error = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, error) == (130, "", "kvtrie: interrupted\n")


def run_guarded(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    head = "import os, signal\nfrom kvtrie.cli import _process\n_process.guard()\n"
    return subprocess.run(
        [sys.executable, "-c", head + code], capture_output=True, text=True, check=False, **options
    )


def test_interrupted_while_a_file_is_written_waits_until_it_is_whole() -> None:
    done = run_guarded(
        "with _process.add_to_interrupt(lambda: 'all is kept'), _process.held():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('whole', flush=True)\n"
        "print('never', flush=True)\n"
    )
    assert (done.returncode, done.stdout) == (130, "whole\n")
    assert done.stderr == "kvtrie: interrupted; all is kept\n"


def test_interrupts_that_are_ignored_stay_ignored() -> None:
    # nohup, and shells for background jobs, start commands with SIGINT ignored.
    done = run_guarded(
        "os.kill(os.getpid(), signal.SIGINT)\nprint('goes on')\n",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")
