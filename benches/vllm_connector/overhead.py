"""What the connector costs where nothing is reused: processor time of vLLM's scheduler and worker.

    make bench-vllm

Two engines in two processes, with and without the connector, take turns: the same new prompt, then
the same decode steps, never at the same time. Of the paired differences the mean and its upper 95 %
bound are printed, a request (prompt and first token) and a decode step. Two processes that do the
same differ by some percent for as long as they live (memory, code placement), which pairs do not
remove; so the time inside the connector's own calls is printed too, against the same base.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benches")]

DECODE_STEPS = 16
CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished_all_groups",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
)
# Student's t, one-sided 95 %, for 200 pairs and more.
T95 = 1.653


def serve(*, connected: bool, prompt_tokens: int) -> None:
    """Answer seeds on stdin with seconds of processor time on stdout."""
    from tests.vllm import models  # noqa: PLC0415 - behind the path above
    from tests.vllm.engine import Engine as _Engine  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        engine = _Engine(
            models.llama(Path(folder) / "llama"),
            connector={"gate": "unchecked"} if connected else None,
            blocks=600,
            shadow=False,
        )
        spent = _watch(engine) if connected else [0.0]
        print("READY", flush=True)
        for line in sys.stdin:
            prompt = random.Random(int(line)).choices(range(3, 500), k=prompt_tokens)
            engine.add(prompt, max_tokens=DECODE_STEPS + 1)
            # The arrival of the request is its connector's business too.
            began, inside = time.process_time(), 0.0
            engine.step()
            first, inside = time.process_time() - began, spent[0]
            began, spent[0] = time.process_time(), 0.0
            engine.drain()
            rest = (time.process_time() - began) / DECODE_STEPS
            took = [first, rest, inside, spent[0] / DECODE_STEPS]
            spent[0] = 0.0
            print("TOOK", json.dumps(took), flush=True)


def _watch(engine: Engine) -> list[float]:
    """Seconds inside the connector's calls, of both halves, since somebody set them to 0."""
    spent = [0.0]

    def timed(call: Callable[..., object]) -> Callable[..., object]:
        def inner(*args: object, **kwargs: object) -> object:
            began = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                spent[0] += time.thread_time() - began

        return inner

    for half in (engine.connector, engine.worker):
        for name in CALLS:
            setattr(half, name, timed(getattr(half, name)))
    return spent


class Child:
    """An engine in a process of its own."""

    def __init__(self, *, connected: bool, prompt_tokens: int) -> None:
        command = [sys.executable, __file__, "--serve", "connector" if connected else "vLLM"]
        command += ["--prompt-tokens", str(prompt_tokens)]
        self._process = subprocess.Popen(  # noqa: S603 - this file
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._read("READY")

    def _read(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise RuntimeError(f"an engine ended with {self._process.wait()}")  # noqa: EM102

    def take(self, seed: int) -> list[float]:
        """Processor time of the prompt's step, and of a decode step."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        took: list[float] = json.loads(self._read("TOOK"))
        return took

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def main() -> None:
    """Print the overhead."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", choices=("connector", "vLLM"))
    parser.add_argument("--pairs", type=int, default=240)
    parser.add_argument("--prompt-tokens", type=int, default=2_000)
    options = parser.parse_args()
    if options.serve:
        serve(connected=options.serve == "connector", prompt_tokens=options.prompt_tokens)
        return
    engines = [
        Child(connected=connected, prompt_tokens=options.prompt_tokens)
        for connected in (False, True)
    ]
    pairs: list[tuple[list[float], list[float]]] = []
    for seed in range(-10, options.pairs):
        took: dict[int, list[float]] = {}
        # The first of a pair alternates; ten pairs warm up.
        for which in (0, 1) if seed % 2 else (1, 0):
            took[which] = engines[which].take(seed + 10)
        if seed >= 0:
            pairs.append((took[0], took[1]))
    for engine in engines:
        engine.close()
    for number, name in enumerate(("a request's first step", "a decode step")):
        plain = [without[number] for without, _ in pairs]
        apart = [mine[number] - without[number] for without, mine in pairs]
        mean, base = statistics.fmean(apart), statistics.fmean(plain)
        bound = mean + T95 * statistics.stdev(apart) / len(apart) ** 0.5
        middle = statistics.median(apart)
        inside = statistics.fmean(mine[2 + number] for _, mine in pairs)
        print(
            f"{name}: {base * 1e3:.3f} ms without; "
            f"{mean * 1e6:+.0f} us with ({100 * mean / base:+.2f} %, "
            f"median {100 * middle / base:+.2f} %), upper 95 % bound {100 * bound / base:+.2f} %, "
            f"{len(pairs)} pairs; in the connector's calls {1e6 * inside:.0f} us "
            f"({100 * inside / base:.2f} %)"
        )


if __name__ == "__main__":
    main()
