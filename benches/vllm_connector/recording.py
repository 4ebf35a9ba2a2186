"""What recording costs: processor time of vLLM's scheduler and worker.

    make bench-vllm-recording

``--model`` measures the request of 2,000 tokens with a real model.

The engine is that of ``overhead.py``, with the connector. A round has three members in random
order, each with a new prompt: *off* and *control* record nothing, *record* writes a log of digests
with every request in it. Its time ends when its lines are in the file, so that the work of the
thread in the background is in it. Differences from *off* in the same round are paired: their mean,
their median, and the upper end of the mean's one-sided 95 % interval (Student's t).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benches")]

from tests.vllm import models
from vllm_connector.overhead import ANSWER, BATCH, PROMPT, SHORT, T95, Bench, Work, collected

MEMBERS: Final = ("off", "control", "record")


def took(bench: Bench, member: str, work: Work, rng: random.Random) -> float:
    """Seconds from the arrival of requests to their end and, if they are recorded, to the disk."""
    planner = bench.kvtrie[0].planner
    recording = planner._recording
    if member != "record":
        planner._recording = None
    try:
        run = bench.run("kvtrie", work, rng)[f"to the end, {ANSWER} answered"]
    finally:
        planner._recording = recording
    if member != "record":
        return run
    began = time.process_time()
    if not recording._recorder.flush():
        raise RuntimeError("the log is not written")  # noqa: EM101 - read by a developer
    return run + time.process_time() - began


def measure(bench: Bench, work: Work, num_pairs: int, rng: random.Random) -> None:
    rounds = []
    bench.fill(rng)
    with collected():
        for _ in range(num_pairs + 3):
            order = list(MEMBERS)
            rng.shuffle(order)
            rounds.append({member: took(bench, member, work, rng) for member in order})
    # The first ones warm up.
    del rounds[:3]
    base = statistics.fmean(one["off"] for one in rounds)
    cells = [work.name, str(len(rounds)), f"{base * 1e3:.2f}"]
    for member in MEMBERS[1:]:
        apart = [one[member] - one["off"] for one in rounds]
        mean, middle = statistics.fmean(apart), statistics.median(apart)
        bound = mean + T95 * statistics.stdev(apart) / len(apart) ** 0.5
        cells.append(
            f"{mean * 1e6:+.0f} us, {100 * mean / base:+.2f} % (median {100 * middle / base:+.2f} %"
            f"), below **{100 * bound / base:+.2f} %**"
        )
    print("| " + " | ".join(cells) + " |", flush=True)


def report_calls(bench: Bench, work: Work, rng: random.Random, num_rounds: int = 20) -> None:
    recording = bench.kvtrie[0].planner._recording
    recorder = recording._recorder
    spent: dict[str, float] = defaultdict(float)

    def watch(owner: Any, name: str, where: str) -> None:  # noqa: ANN401 - whose call is timed
        call = getattr(owner, name)

        def timed(*args: object) -> object:
            began = time.thread_time()
            try:
                return call(*args)
            finally:
                spent[where] += time.thread_time() - began

        setattr(owner, name, timed)

    watch(recording, "ended", "scheduler")
    watch(recording, "look", "scheduler")
    watch(recorder, "_write", "background")
    bench.fill(rng)
    recorder.flush()
    spent.clear()
    for _ in range(num_rounds):
        bench.run("kvtrie", work, rng)
        recorder.flush()
    for owner, name in ((recording, "ended"), (recording, "look"), (recorder, "_write")):
        delattr(owner, name)
    each = 1e6 / num_rounds / work.num_requests
    parts = ", ".join(f"{where} {each * seconds:.0f} us" for where, seconds in spent.items())
    print(f"{work.name}, per request, clocks included: {parts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=2_048, help="of the pool")
    parser.add_argument("--calls", action="store_true", help="time by thread, no pairs")
    parser.add_argument("--model", type=Path, help="a model, else a tiny one; its prompts alone")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or models.llama(Path(folder) / "llama")
        bench = Bench(model, options.blocks, record=str(Path(folder) / "kvtrie.log"))
        if options.calls:
            for work in (PROMPT, SHORT, BATCH):
                report_calls(bench, work, rng)
            return
        print("| processor time, full pool | pairs | off (ms) | control | record |")
        print("| --- | --- | --- | --- | --- |")
        for work in (PROMPT,) if options.model else (PROMPT, SHORT, BATCH):
            measure(bench, work, options.pairs, rng)
        counts = bench.kvtrie[0].planner._recording._recorder.counts
        print(f"\n{counts.written:,} requests recorded, {counts.bytes_written:,} bytes.")


if __name__ == "__main__":
    main()
