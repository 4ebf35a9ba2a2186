"""An index that follows SGLang over ZMQ has what its cache finds, in both of a server's lives."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tests.sglang.engine import Job, scheduled
from tests.sglang.lives import COMPARED, NUM_PROBES, PROBES
from tests.vllm import models

import kvtrie
from kvtrie.cluster import Subscription, subscribe

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = 300.0
SHARED = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)


def until_live(one: Subscription, number: int) -> None:
    end = time.monotonic() + SECONDS
    while one.state != "live" or one._applied != number:
        assert time.monotonic() < end, (one, one.error, number)
        time.sleep(0.01)


def test_an_index_follows_a_server_through_a_restart(tmp_path: Path) -> None:
    model = models.llama(tmp_path / "llama")
    events, moved = (
        {
            "endpoint": f"ipc://{tmp_path}/{name}",
            "replay_endpoint": f"ipc://{tmp_path}/{name}-replay",
        }
        for name in ("events", "moved")
    )
    settings = {
        "gate": "unchecked",
        "gaps": True,
        "policy": {"scope": "namespace"},
        "events": moved,
        # Pages of keys that no event tells are left out.
        "snapshot": {"endpoint": f"ipc://{tmp_path}/snapshot"},
    }
    index = kvtrie.KvIndexer(4, b"the key of tests")
    worker = index.add_worker("sglang", SHARED)
    followed = [
        subscribe(index, worker, *events.values()),
        subscribe(index, worker, *moved.values(), topic="kvtrie", approximate=True),
    ]
    before: list[Any] = []
    try:
        for life in range(2):
            folder = tmp_path / str(life)
            folder.mkdir()
            job = Job(
                str(model),
                page_size=4,
                num_slots=2600,
                turns=4,
                seed=30 + life,
                retract=True,
                settings=json.dumps(settings),
                overrides={"kv_events_config": json.dumps({"publisher": "zmq", **events})},
            )
            with ThreadPoolExecutor() as pool:
                running = pool.submit(scheduled, job, "tests.sglang.lives", str(folder))
                while not (folder / PROBES).exists() and not running.done():
                    time.sleep(0.05)
                if running.done():
                    running.result()
                found = json.loads((folder / PROBES).read_text())
                for one, number in zip(followed, found["last"], strict=True):
                    until_live(one, number)
                num_over = num_under = num_found = 0
                for ids, salt, known in found["probes"]:
                    space = SHARED if salt is None else SHARED.replace(salt=salt)
                    seq = kvtrie.TokenSequence(ids, space)
                    scores = index.find_matches(seq, kvtrie.ReusePolicy(), keep_last=1)
                    assert not scores.uncertain[0]
                    num_over += int(scores.exact[0]) > known
                    num_under += int(scores.exact[0]) < known
                    num_found += known > 0
                assert (num_over, num_under) == (0, 0)
                assert len(found["probes"]) == NUM_PROBES
                assert num_found > NUM_PROBES // 20
                # Nothing of the life before is claimed of this one.
                for ids in before:
                    assert index.find_matches(kvtrie.TokenSequence(ids, SHARED)).exact[0] == 0
                before = [ids for ids, _, known in found["probes"][:500] if known > 200]
                index.check()
                (folder / COMPARED).touch()
                done = running.result(timeout=SECONDS)
            assert done["counts"] == {}
            assert min(done[name] for name in ("flushed", "aborted", "retracted", "evicted")) > 0
            assert done["approximate"] > 0
        assert before
        assert followed[0].counts["resyncs"] > 0
    finally:
        for one in followed:
            one.close()
