"""What recording costs: processor time of vLLM's scheduler and worker.

    make bench-vllm-recording    # a tiny model
    make bench-vllm-cost         # the request of 2,000 tokens with a real one: --model

The engine is that of ``overhead.py``, with the connector and a full pool. A round has three members
in random order, each with a new prompt: *off* and *control* record nothing, *record* writes a log
of digests with every request in it. Its time ends when its lines are in the file, so that the work
of the thread in the background is in it. ``pairs.py`` says how the differences from *off* are
estimated, and ``--calls`` has the processor time of the scheduler's part and of the thread alone.

``--rounds FILE`` keeps the rounds as they end; the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benches")]

from tests.vllm import models
from vllm_connector.overhead import ANSWER, BATCH, PROMPT, SHORT, Bench, Work, collected, settings
from vllm_connector.pairs import Kept, header, measure, report

MEMBERS: Final = ("off", "control", "record")


def took(bench: Bench, member: str, work: Work, rng: random.Random) -> float:
    """Seconds from the arrival of requests to their end and, if they are recorded, to the disk."""
    planner = bench.kvtrie[0].planner
    recording = planner.half.recording
    if member != "record":
        planner.half.recording = None
    try:
        run = bench.run("kvtrie", work, rng)[f"to the end, {ANSWER} answered"]
    finally:
        planner.half.recording = recording
    if member != "record":
        return run
    began = time.process_time()
    if not recording._recorder.flush():
        raise RuntimeError("the log is not written")  # noqa: EM101 - read by a developer
    return run + time.process_time() - began


def report_pairs(
    bench: Bench, work: Work, num_rounds: int, rng: random.Random, kept: Kept, *, warm_up: int
) -> None:
    bench.fill(rng)

    def take(member: str) -> dict[str, float]:
        return {"": took(bench, member, work, rng)}

    with collected():
        rounds = measure(work.name, MEMBERS, take, num_rounds, rng, warm_up=warm_up, kept=kept)
    report(work.name, rounds, MEMBERS)


def report_calls(bench: Bench, work: Work, rng: random.Random, num_rounds: int = 20) -> None:
    recording = bench.kvtrie[0].planner.half.recording
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
    parser.add_argument("--pairs", type=int, help="rounds of each row: 200, with a model 40")
    parser.add_argument("--blocks", type=int, help="of the pool: 2,048, with a model 200")
    parser.add_argument("--calls", action="store_true", help="time by thread, no pairs")
    parser.add_argument("--model", type=Path, help="a model, else a tiny one; its prompts alone")
    parser.add_argument("--rounds", type=Path, help="a file that keeps the rounds")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    num_rounds = options.pairs or (40 if options.model else 200)
    num_blocks = options.blocks or (200 if options.model else 2_048)
    kept = Kept(options.rounds, settings(options, num_blocks))
    rng = random.Random(options.seed)
    works = (PROMPT,) if options.model else (PROMPT, SHORT, BATCH)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or models.llama(Path(folder) / "llama")
        dtype = "auto" if options.model else "float32"
        bench = Bench(model, num_blocks, dtype=dtype, record=str(Path(folder) / "kvtrie.log"))
        if options.calls:
            for work in works:
                report_calls(bench, work, rng)
            return
        print(f"{bench.described()}.\n")
        header("processor time, full pool", MEMBERS)
        for work in works:
            report_pairs(bench, work, num_rounds, rng, kept, warm_up=1 if options.model else 3)
        counts = bench.kvtrie[0].planner.half.recording._recorder.counts
        print(f"\n{counts.written:,} requests recorded, {counts.bytes_written:,} bytes.")


if __name__ == "__main__":
    main()
