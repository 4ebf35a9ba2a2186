"""Processes that have imported SGLang already: each job gets a fork of one that did it once.

SGLang keeps state in its modules, so each engine has a process of its own. To import them takes
longer than most jobs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]


@cache
def _forks() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.sglang.preload"])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in paths().items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    return context


def _child(module: str, arguments: list[str], environment: dict[str, str], folder: str) -> None:
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder) / name, os.O_CREAT | os.O_WRONLY), stream)
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def forked(module: str, *arguments: str, timeout: float = 600, **environment: str) -> Any:
    """The object that a module printed last, in a fork of a process that imported SGLang.

    Raises:
        RuntimeError: It ended with an error; the message has the end of what it printed.
    """
    (found,) = forked_together(module, [arguments], timeout=timeout, **environment)
    return found


def forked_together(
    module: str, arguments: Sequence[Sequence[str]], timeout: float = 600, **environment: str
) -> list[Any]:
    """As `forked`, of several forks at once: one for each list of arguments.

    Raises:
        RuntimeError: One ended with an error; the message has the end of what it printed. The
            others are ended then.
    """
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / str(number) for number in range(len(arguments))]
        running = []
        for folder, given in zip(folders, arguments, strict=True):
            folder.mkdir()
            one = _forks().Process(
                target=_child, args=(module, list(given), environment, str(folder))
            )
            one.start()
            running.append(one)
        end = time.monotonic() + timeout
        # The others may wait for one that has failed.
        while time.monotonic() < end and not any(one.exitcode for one in running):
            if not any(one.is_alive() for one in running):
                break
            time.sleep(0.02)
        codes: list[object] = ["not ended" if one.is_alive() else one.exitcode for one in running]
        for one in running:
            one.kill()
            one.join()
        printed = [
            [
                path.read_text() if (path := folder / name).exists() else ""
                for name in ("out", "err")
            ]
            for folder in folders
        ]
    ended = list(zip(codes, printed, strict=True))
    for code, texts in sorted(ended, key=lambda one: one[0] == "not ended"):
        if code:
            _printed(code, *texts)
    return [_printed(code, *texts) for code, texts in ended]


def process(module: str, *arguments: str, timeout: float = 600, **environment: str) -> Any:
    """The object that a module printed last, in a process of its own.

    Raises:
        RuntimeError: It ended with an error; the message has the end of what it printed.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=dict(os.environ) | paths() | environment,
        check=False,
    )
    return _printed(done.returncode, done.stdout, done.stderr)


def paths() -> dict[str, str]:
    """What a process needs in its environment to import SGLang and these tests."""
    folders = [str(ROOT), str(ROOT / "tests" / "sglang" / "off_cuda")]
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]),
    }


def _printed(code: object, out: str, err: str) -> Any:
    lines = out.splitlines()
    if code or not lines:
        msg = f"rc {code}\n{out[-2000:]}\n{err[-6000:]}"
        raise RuntimeError(msg)
    return json.loads(lines[-1])
