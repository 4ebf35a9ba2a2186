"""What a model computes of an edited prompt, and the time to its first token.

`python benches/python/generate.py` runs the embedded engine with the shipped demo model on the
workloads' histories: the cached turn, then the next prompt, alternately with the exact prefix alone
and with moved runs. The claim is the ratio of times; the generated text means nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import figures
from forest import BLOCK_SIZE
from workloads.registry import WORKLOADS

import kvtrie
from kvtrie.demo import model_path
from kvtrie.engines.transformers import Generator

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvtrie.engines.transformers import Usage

NAMES = ("W01", "W03", "W11")
SCALE = 0.5  # of the workload's lengths: what the model's context of 8,192 tokens holds
ROUNDS = 7
APPROXIMATE = kvtrie.ReusePolicy(scope="namespace")


def measured(
    names: Iterable[str] = NAMES, scale: float = SCALE, rounds: int = ROUNDS
) -> Iterator[figures.Row]:
    """One row per workload."""
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    for name in names:
        case = WORKLOADS[name].build(seed=1, scale=scale)
        cached = (case.cached[: case.num_computed] % model.config.vocab_size).astype(np.int64)
        prompt = (case.prompt % model.config.vocab_size).astype(np.int64)
        generator = Generator(
            model,
            num_blocks=2 * (len(cached) + len(prompt)) // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            gate="unchecked",
            index_seed=0,
        )
        times: dict[kvtrie.ReusePolicy, list[float]] = {kvtrie.EXACT_ONLY: [], APPROXIMATE: []}
        usage: dict[kvtrie.ReusePolicy, Usage] = {}
        # The first round allocates and is not counted.
        for number in range(rounds + 1):
            for policy, seconds in times.items():
                generator.forget()
                generator.generate(cached, max_new_tokens=1)
                began = time.perf_counter()
                usage[policy] = generator.generate(prompt, max_new_tokens=1, policy=policy).usage
                if number:
                    seconds.append(time.perf_counter() - began)
        exact, approximate = usage[kvtrie.EXACT_ONLY], usage[APPROXIMATE]
        slow, fast = (statistics.median(seconds) for seconds in times.values())
        yield {
            "work": f"{name} {WORKLOADS[name].name}, first token of {len(prompt):,} tokens",
            "unit": "us",
            "kvtrie": round(fast * 1e6, 1),
            "exact_prefix": round(slow * 1e6, 1),
            "ratio": round(
                statistics.median(a / b for a, b in zip(*times.values(), strict=True)), 2
            ),
            "prompt": exact.prompt,
            "exact": approximate.exact,
            "moved": approximate.moved,
            "computed": approximate.computed,
            "computed_share": round(approximate.computed / exact.prompt, 4),
            "computed_after_exact_prefix": exact.computed,
        }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="First tokens of edited prompts.")
    parser.add_argument("--dry-run", action="store_true", help="print the figures only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for row in measured():
        rows.append(row)
        print(
            f"{row['work']:<52}{row['kvtrie'] / 1e3:>9,.1f} ms, exact prefix "
            f"{row['exact_prefix'] / 1e3:>9,.1f} ms, {row['ratio']:>5.1f}x; computed "
            f"{row['computed']:>5,} ({row['computed_share']:.1%}) of {row['prompt']:,}, else "
            f"{row['computed_after_exact_prefix']:,}"
        )
    if not options.dry_run:
        names = ("kvtrie", "numpy", "torch", "transformers")
        figures.record("generate", rows, {name: version(name) for name in names})


if __name__ == "__main__":
    main()
