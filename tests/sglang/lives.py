"""A life of SGLang's scheduler that publishes events: ``python -m tests.sglang.lives FOLDER JOB``.

After its requests it writes probes into the folder, with what the cache finds of each, and ends
when a file there says that they were compared.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from tests.sglang.engine import VOCAB, Job, Server, Talk, drawn_heads, serve, words
from tests.sglang.late import finds, probe

NUM_PROBES = 5_000
SECONDS = 120.0
USER, ASSISTANT, OPEN, CLOSE = 1, 2, 3, 4
COMPARED, PROBES = "compared", "probes.json"


def think(server: Server, rng: Random) -> list[list[int]]:
    """Turns whose reasoning is dead when they end, and later prompts that take its pages."""
    from kvtrie.tags import Tagger  # noqa: PLC0415 - the fork has it already

    server.cache._tagger = Tagger.from_ids(user=USER, assistant=ASSISTANT, reasoning=(OPEN, CLOSE))
    seen = []
    for turn in range(8):
        ids = [USER, *words(rng, 30), ASSISTANT, OPEN, *words(rng, 60), CLOSE, *words(rng, 20)]
        for name, prompt in ((f"turn-{turn}", ids), (f"other-{turn}", words(rng, 100))):
            request = server.add(name, prompt, 2)
            # Its first token ends it.
            request.sampling_params.ignore_eos = False
            request.sampling_params.stop_token_ids = set(range(VOCAB))
            while not request.finished():
                server.step()
            server.step()
            seen.append([*prompt, *request.output_ids])
    return seen


def main(folder: Path, job: Job) -> dict[str, Any]:
    server = Server(job)
    rng = Random(job.seed)
    heads = drawn_heads(rng)
    first = [Talk(job, number, heads) for number in range(job.talks)]
    happened = serve(server, first, rng, 1000 * job.turns)
    num_pages = server.cache._index.stats().indexed
    assert server.scheduler.flush_cache()
    dead = think(server, rng)
    # Of each conversation two, which ask the same at once.
    twins = [Talk(job, 100 + number // 2, heads) for number in range(job.talks)]
    happened_again = serve(server, twins, rng, 1000 * job.turns)
    server.step()
    seen = [ids for talk in twins for ids in talk.seen] + dead
    probes = []
    for _ in range(NUM_PROBES):
        ids, salt = probe(rng, seen)
        probes.append([ids, salt, finds(server, ids, salt)])
    publishers = [server.scheduler.kv_events_publisher.kv_event_publisher]
    if (others := server.cache._events._others) is not None:
        publishers.append(others._publisher)
    while any(one._event_queue.unfinished_tasks for one in publishers):
        time.sleep(0.01)
    written = folder / "writing"
    last = [one._buffer[-1][0] for one in publishers]
    written.write_text(json.dumps({"probes": probes, "last": last}))
    written.rename(folder / PROBES)
    end = time.monotonic() + SECONDS
    while not (folder / COMPARED).exists():
        assert time.monotonic() < end, "nobody has compared"
        time.sleep(0.05)
    return {
        "flushed": num_pages,
        "aborted": happened["aborted"] + happened_again["aborted"],
        "retracted": happened["retracted"] + happened_again["retracted"],
        "evicted": server.evicted,
        "approximate": server.cache._index.stats().approximate,
        "counts": dict(server.cache.counts),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), Job(**json.loads(sys.argv[2])))) + "\n")
    sys.stdout.flush()
    os._exit(0)
