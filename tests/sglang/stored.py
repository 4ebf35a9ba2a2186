"""SGLang's scheduler with a store next to its pool: what comes back from it, and what goes wrong.

``python -m tests.sglang.stored WHAT JOB`` prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from random import Random
from typing import TYPE_CHECKING, Any

from tests.sglang.edited import Client, apart
from tests.sglang.engine import Job, words

if TYPE_CHECKING:
    import torch


class Stored(Client):
    """Sends requests one after the other, and lets the pool forget them."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.cache = self.server.cache

    def settle(self) -> None:
        """All that has ended is written."""
        assert self.cache._store.wait(60)

    def flush(self) -> None:
        """The pool loses everything; the store does not."""
        self.settle()
        self.server.step()
        assert self.server.scheduler.flush_cache()

    def tell(
        self, ids: list[int], new: int = 8, **more: Any
    ) -> tuple[dict[str, Any], list[tuple[torch.Tensor, torch.Tensor]]]:
        found = self.send(ids, new, **more)
        self.settle()
        return found

    def report(self) -> dict[str, Any]:
        store = self.cache._store
        if store is None:
            return self.balance()
        return self.balance() | {"requests": dict(store.counts), "events": store.store.counts()}


def same(job: Job) -> dict[str, Any]:
    """A prompt, the same after a flush, and the same after others have overwritten the pool."""
    rng = Random(job.seed)
    client = Stored(job)
    ids = words(rng, 203)
    found: dict[str, Any] = {}
    found["first"], first = client.tell(ids, 12)
    client.flush()
    found["flushed"], again = client.tell(ids, 12)
    found["apart"] = apart(first, again)
    evicted = client.server.evicted
    while client.server.evicted - evicted < 2 * client.pool.size:
        client.tell(words(rng, 200), 1)
    found["overwritten"], again = client.tell(ids, 12)
    found["apart overwritten"] = apart(first, again)
    found["with its reply"], _ = client.tell([*ids, *found["first"]["reply"], *words(rng, 30)])
    client.flush()
    longer = [*ids, *found["first"]["reply"], *words(rng, 30)]
    found["next"], _ = client.tell(longer)
    client.flush()
    found["other salt"], _ = client.tell(ids, 12, salt="b")
    client.flush()
    found["other salt again"], _ = client.tell(ids, 12, salt="b")
    return found | client.report()


if __name__ == "__main__":
    jobs = {"same": same}
    done = jobs[sys.argv[1]](Job(**json.loads(sys.argv[2])))
    sys.stdout.write(json.dumps(done) + "\n")
    sys.stdout.flush()
    os._exit(0)
