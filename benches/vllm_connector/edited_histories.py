"""Edited histories in a real engine: prompt tokens computed and time to the first token.

    make bench-vllm

Each workload's history is computed, then its next prompt is sent: by vLLM alone, with the
connector, and with the connector and its scheduler, each in a process of its own. History and
prompt name the same session, as a conversation's requests do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benches")]

CONFIGURATIONS = ("vLLM", "connector", "connector + scheduler")
FAMILIES = ("W01", "W03", "W10", "W11", "W13", "W15", "W17")
VOCAB = 512


def workloads() -> list[str]:
    from workloads.registry import WORKLOADS  # noqa: PLC0415 - after the path above

    return [name for name in WORKLOADS if name.startswith(FAMILIES)]


def conversation(name: str, number: int, scale: float) -> tuple[list[int], list[int], int]:
    from workloads.registry import WORKLOADS  # noqa: PLC0415 - as above

    case = WORKLOADS[name].build(number, scale=scale)
    kept = sum(len(range(run.old_start, run.old_end)) for run in case.kept)
    history = [int(token) for token in case.cached[: case.num_computed]]
    prompt = [int(token) for token in case.prompt]
    return history, prompt, len(prompt) - kept


def measure(configuration: str, rounds: int, scale: float) -> None:
    from tests.vllm import models  # noqa: PLC0415 - as above
    from tests.vllm.engine import Engine  # noqa: PLC0415 - as above

    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(
            models.llama(Path(folder) / "llama"),
            connector=None if configuration == "vLLM" else {"gate": "unchecked"},
            gaps=configuration.endswith("scheduler"),
            blocks=1400,
            shadow=False,
            max_model_len=32_768,
            max_num_batched_tokens=16_384,
            load_format="dummy",
            hf_overrides={"vocab_size": 140_000},
        )
        engine.ask(list(range(5_000, 5_100)))
        for name in workloads():
            computed, seconds = [], []
            for number in range(rounds):
                history, prompt, num_new = conversation(name, number, scale)
                session = {"kv_transfer_params": {"session": f"{name}-{number}"}}
                engine.reset()
                engine.ask(history, max_tokens=1, extra_args=session)
                began = time.perf_counter()
                computed.append(engine.computed_for(prompt, extra_args=session))
                seconds.append(time.perf_counter() - began)
            row = {
                "workload": name,
                "prompt": len(prompt),
                "new": num_new,
                "computed": statistics.median(computed),
                "milliseconds": statistics.median(seconds) * 1e3,
            }
            print("ROW", json.dumps(row), flush=True)


def main() -> None:
    from workloads.registry import named  # noqa: PLC0415 - as above

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=CONFIGURATIONS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    if options.only:
        measure(options.only, options.rounds, options.scale)
        return
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for configuration in CONFIGURATIONS:
        command = [sys.executable, __file__, "--only", configuration]
        command += ["--rounds", str(options.rounds), "--scale", str(options.scale)]
        done = subprocess.run(  # noqa: S603 - this file
            command, check=False, capture_output=True, text=True, env=dict(os.environ)
        )
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        for line in done.stdout.splitlines():
            if line.startswith("ROW "):
                row = json.loads(line[4:])
                rows.setdefault(row["workload"], {})[configuration] = row
    print(
        "| workload | prompt | new | "
        + " | ".join(f"{one}: computed, ms" for one in CONFIGURATIONS)
        + " | computed beyond new |"
    )
    print("| --- " * (4 + len(CONFIGURATIONS)) + "|")
    for name, of in rows.items():
        first = of[CONFIGURATIONS[0]]
        cells = [
            f"{of[one]['computed']:,.0f}, {of[one]['milliseconds']:,.0f}" for one in CONFIGURATIONS
        ]
        beyond = " / ".join(
            f"{100 * (of[one]['computed'] - first['new']) / first['prompt']:.1f} %"
            for one in CONFIGURATIONS
        )
        print(
            f"| {named(name)} | {first['prompt']:,} | {first['new']:,} | "
            + " | ".join(cells)
            + f" | {beyond} |"
        )


if __name__ == "__main__":
    main()
