"""Runs in the environment of the routers: Dynamo's tree of blocks, asked in lines of JSON.

A line is `{"hash": {...}}`, the arguments of its `compute_block_hash_for_seq`; `{"apply": [worker,
event]}`; `{"find": [hashes]}`, answered by `[[worker, rank, blocks], ...]`; or `{"dump": null}`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any


def main() -> None:
    from dynamo._core import RadixTree, compute_block_hash_for_seq  # noqa: PLC0415 - of that environment

    tree = RadixTree()
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        said: Any = None
        if "hash" in asked:
            said = compute_block_hash_for_seq(**asked["hash"])
        elif "apply" in asked:
            worker, event = asked["apply"]
            # It loses what is below a block that it removes, and complains when that is removed.
            with contextlib.suppress(RuntimeError):
                tree.apply_event(worker, json.dumps(event).encode())
        elif "find" in asked:
            scores = tree.find_matches(asked["find"]).scores
            said = [[*worker, blocks] for worker, blocks in scores.items()]
        else:
            said = tree.dump_tree_as_events()
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
