"""One of two ranks of tensor parallelism: the same calls to its cache, over a group of gloo.

``python -m tests.sglang.ranks WHAT RANK FILE`` prints one JSON object. WHAT is ``calls``, or what
keeps rank 0 from sending its seed: ``absent``, ``unequal``, ``alone``.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from tests.sglang.caches import Side
from torch import distributed

from kvtrie.integrations.sglang import _support
from kvtrie.integrations.sglang._version import SGLangUnsupportedError

if TYPE_CHECKING:
    from tests.sglang.caches import Pool

NUM_PAGES = 40


def calls(side: Side) -> list[Any]:
    """Matches, locks and evictions; prompts are short, so that equal hashes are met often."""
    rng = Random(1)
    answers: list[Any] = []
    locks: list[Any] = []
    for _ in range(400):
        ids = [rng.randrange(3) for _ in range(rng.randrange(24))]
        act = rng.random()
        if act < 0.4:
            missing = -(-len(ids) // side.pool.page_size) - len(side.pool.free)
            if missing > 0:
                answers.append(side.evict(missing * side.pool.page_size))
            if missing <= len(side.pool.free):
                answers.append(side.insert(ids, None, rng.choice((None, "salt"))))
        elif act < 0.7:
            found = side.match(ids)
            path = side.cache.path_device_indices(found.last_device_node)
            answers.append([found.device_prefix_len, path.tolist()])
            if len(locks) < 3:
                locks.append(side.cache.lock(found.last_device_node))
        elif act < 0.85 and locks:
            side.cache.unlock(locks.pop(rng.randrange(len(locks))))
        else:
            answers.append([side.evict(rng.randrange(16)), sorted(side.pool.free)])
    return answers


def main(what: str, rank: int, file: str) -> dict[str, Any]:
    from tests.sglang.test_parts import context  # noqa: PLC0415 - it imports pytest

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=20),
    )
    torch.set_num_threads(1)
    group: Any = distributed.new_group([0, 1])
    if what == "alone":
        groups = [distributed.new_group([one]) for one in (0, 1)]
        group = groups[rank]
    if what == "absent":
        # A rank that leaves while the other connects ends that one.
        distributed.barrier(group)
        if rank == 0:
            return {}
    pages = NUM_PAGES + (rank if what == "unequal" else 0)
    made = context(tp_size=2, tp_rank=rank, num_pages=pages)
    pool: Pool = made.params.token_to_kv_pool_allocator
    made.params.tp_cache_group = group
    try:
        cache = _support.make(made)
    except SGLangUnsupportedError as error:
        return {"refused": str(error)}
    answers = calls(Side(cache, pool))
    index = cache._index
    return {"answers": answers, "digest": index.digest(), "seed": index.seed}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], int(sys.argv[2]), sys.argv[3])) + "\n")
    sys.stdout.flush()
    os._exit(0)
