"""Commands in processes of their own that are forked from one which has imported torch.

An interpreter takes eight seconds of processor time to import torch and transformers. A forked
process has streams, signals and an exit code of its own, and runs the command from its first line.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Sequence

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["pytest", "kvtrie.calibrate.measure", "kvtrie.cli.app", "kvtrie.engines.transformers"]
)
_STREAMS = ("out", "error")


def full_disk() -> int:
    """A file that takes nothing."""
    return os.open("/dev/full", os.O_WRONLY)


def closed_pipe() -> int:
    """A pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def _new_file(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def _run(args: Sequence[str], *streams: Callable[[], int]) -> None:
    for number, opened in enumerate(streams, start=1):
        given = opened()
        os.dup2(given, number)
        os.close(given)
    sys.argv = ["kvtrie", *args]
    runpy.run_module("kvtrie.cli", run_name="__main__")


class ForkedCommand:
    """A command of ``kvtrie`` that runs; used like a ``subprocess.Popen`` with pipes."""

    def __init__(self, args: Sequence[str], stdout: Callable[[], int] | None = None) -> None:
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
            forkserver.ensure_running()
        self.args = ["kvtrie", *args]
        self._folder = Path(tempfile.mkdtemp())
        out, error = (functools.partial(_new_file, self._folder / name) for name in _STREAMS)
        self._process = _CONTEXT.Process(target=_run, args=(args, stdout or out, error))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """The exit code; the number of a signal that ended it is negative."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end; what it wrote to stdout and stderr."""
        self._process.join(timeout)
        if self.returncode is None:
            self._process.kill()
            raise subprocess.TimeoutExpired(self.args, timeout)
        files = [self._folder / name for name in _STREAMS]
        out, error = (one.read_text(encoding="utf-8") if one.exists() else "" for one in files)
        shutil.rmtree(self._folder)
        return out, error
