"""All gaps of a prompt in one engine step, next to one step for each: time to the first token.

    make bench-vllm-steps

A history is computed, then a prompt that has pieces of new tokens before each of its runs: in turns
with `KvtrieScheduler` as it is, with one step for each gap, and with exact reuse only.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

if TYPE_CHECKING:
    from tests.vllm.engine import Engine

# Gaps, their tokens, and the tokens of each run between them.
SHAPES = ((32, 16, 64), (128, 4, 32), (12, 16, 300))
HOW = ("one step", "gap by gap", "exact prefix")


def first_token(
    engine: Engine, shape: tuple[int, int, int], how: str, seed: int
) -> tuple[float, int]:
    """Milliseconds and steps to the first token."""
    from tests.vllm.prompts import joined, words  # noqa: PLC0415 - after the path above

    count, length, run = shape
    runs = [words(run, 1000 * seed + at) for at in range(count)]
    gaps = [words(length, 1000 * seed + 500 + at) for at in range(count)]
    engine.reset()
    engine.ask(joined(*runs), max_tokens=1)
    prompt = joined(*(part for pair in zip(gaps, runs, strict=True) for part in pair), words(9, 1))
    schedule, steps = engine.scheduler.schedule, 0

    def counting(*args: object) -> object:
        nonlocal steps
        output = schedule(*args)
        steps += output.total_num_scheduled_tokens > 0
        return output

    engine.scheduler.schedule = counting
    mode = "exact" if how == "exact prefix" else None
    with engine.gap_by_gap() if how == "gap by gap" else nullcontext():
        began = time.perf_counter()
        engine.ask(prompt, max_tokens=1, mode=mode)
        seconds = time.perf_counter() - began
    engine.scheduler.schedule = schedule
    return seconds * 1e3, steps


def main() -> None:
    from tests.vllm import models  # noqa: PLC0415 - after the path above
    from tests.vllm.engine import Engine  # noqa: PLC0415 - as above

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", help="a model in place of a random one of three layers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(
            Path(options.model) if options.model else models.llama(Path(folder) / "llama"),
            connector={"gate": "unchecked", "policy": {"scope": "namespace"}},
            gaps=True,
            blocks=600,
            shadow=False,
            max_model_len=8192,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
        )
        print(
            "| gaps x tokens | prompt | steps | "
            + " | ".join(f"{one}, ms" for one in HOW)
            + " | ratio |"
        )
        print("| --- " * (4 + len(HOW)) + "|")
        for shape in SHAPES:
            times: dict[str, list[float]] = {how: [] for how in HOW}
            steps = {}
            for number in range(options.rounds + 1):
                for how in HOW:
                    taken, steps[how] = first_token(engine, shape, how, number)
                    if number:
                        times[how].append(taken)
            count, length, run = shape
            middle = {how: statistics.median(times[how]) for how in HOW}
            ratios = [many / one for one, many in zip(times[HOW[0]], times[HOW[1]], strict=True)]
            print(
                f"| {count} x {length} | {count * (length + run) + 9:,} | "
                f"{' / '.join(str(steps[how]) for how in HOW)} | "
                + " | ".join(f"{middle[how]:.1f}" for how in HOW)
                + f" | {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
