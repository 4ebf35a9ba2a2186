"""A router in a process of its own, which can be stopped: scores of one worker, when asked.

``python -m tests.cluster.sleeper ENDPOINT REPLAY SNAPSHOT``: for each line on standard input it
prints ``[exact, uncertain, state, digest]``.
"""

from __future__ import annotations

import json
import sys

from tests.cluster.publisher import SIZE
from tests.cluster.test_subscription import KEY, NS, PROMPT

import kvtrie
from kvtrie.cluster import subscribe


def main() -> None:
    index = kvtrie.KvIndexer(SIZE, KEY)
    worker = index.add_worker("w", NS)
    endpoint, replay, snapshot = (one or None for one in sys.argv[1:])
    assert endpoint is not None
    with subscribe(
        index, worker, endpoint, replay, snapshot=snapshot, check_every=0.2
    ) as subscription:
        for _ in sys.stdin:
            found = index.find_matches(PROMPT)
            said = [int(found.exact[0]), bool(found.uncertain[0]), subscription.state]
            sys.stdout.write(json.dumps([*said, index.digest(worker)]) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
