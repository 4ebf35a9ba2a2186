"""An engine's events from a process of their own, which can be killed.

``python -m tests.cluster.killed ENDPOINT REPLAY OTHERS BLOCKS``: publishes so many batches of
another prompt, then so many blocks of the tests' one. It prints both endpoints as JSON, and goes on
until its standard input ends.
"""

from __future__ import annotations

import json
import sys

from tests.cluster.publisher import Publisher, stored
from tests.cluster.test_subscription import block


def main() -> None:
    endpoint, replay, others, blocks = sys.argv[1:]
    with Publisher(endpoint=endpoint, replay=replay) as publisher:
        for number in range(int(others)):
            publisher.send(stored([100 + number], None, [1_000 + number, 1]))
        for number in range(int(blocks)):
            publisher.send(block(number))
        sys.stdout.write(json.dumps([publisher.endpoint, publisher.replay]) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
