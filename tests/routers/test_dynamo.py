"""`DynamoIndexer` next to the runtime of Dynamo itself: hashes, events and dumps."""

from __future__ import annotations

import json
import random
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

import kvtrie
from kvtrie.cluster import DynamoIndexer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
SCRIPT = "dynamo_tree.py"


@pytest.fixture
def tree(routers: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    command = [routers / "python", request.path.parent / SCRIPT]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(what: str, value: object = None) -> object:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps({what: value}) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()
        process.wait(30)


def hashes(tree: Callable[..., Any], tokens: list[int], size: int, **more: str) -> list[int]:
    asked = {"tokens": tokens, "kv_block_size": size, **more}
    found: list[int] = tree("hash", asked)
    return found


def exact(index: DynamoIndexer, tokens: list[int], space: kvtrie.Namespace) -> dict[Any, int]:
    found = index.find_matches(kvtrie.TokenSequence(tokens, space))
    return dict(zip(found.workers, found.exact.tolist(), strict=True))


def test_prompts_are_hashed_as_the_runtime_does(tree: Callable[..., Any]) -> None:
    rng = random.Random(1)
    for size in (1, 4, 16, 64):
        tokens = [rng.randrange(1 << 32) for _ in range(3 * size + 1)]
        for adapter, salt in ((None, None), ("a", None), (None, "s"), ("a", "s"), ("é", "日本")):
            more = {"lora_name": adapter, "cache_namespace": salt}
            given = {name: value for name, value in more.items() if value is not None}
            found = hashes(tree, tokens, size, **given)
            index = DynamoIndexer(size, b"the key of tests", NS)
            blocks = [{"block_hash": at, "tokens_hash": one} for at, one in enumerate(found)]
            data = {"stored": {"parent_hash": None, "blocks": blocks}}
            event = {"worker_id": 1, "event": {"event_id": 1, "data": data, "dp_rank": 0}}
            index.apply(json.dumps(event))
            space = NS.replace(adapter=adapter, salt=salt or kvtrie.SHARED)
            assert exact(index, tokens, space) == {(1, 0): len(found) * size}


def test_random_events_leave_what_the_sets_say_and_at_least_what_the_tree_finds(
    tree: Callable[..., Any],
) -> None:
    rng = random.Random(7)
    size, workers = 4, [(1, 0), (1, 1), (2, 0)]
    index = DynamoIndexer(size, b"the key of tests", NS)
    # Prompts with common beginnings, blocks named by their path.
    prompts = [[rng.randrange(3) for _ in range(8)] for _ in range(12)]
    ids = [[one + 10 * at for one in path for at in range(size)] for path in prompts]
    local = [hashes(tree, tokens, size) for tokens in ids]
    names: dict[tuple[int, ...], int] = {}
    held: dict[tuple[int, int], set[int]] = {worker: set() for worker in workers}
    numbers = dict.fromkeys(workers, 0)
    probes = more = 0
    for _ in range(600):
        worker = rng.choice(workers)
        at = rng.randrange(len(prompts))
        path = [names.setdefault(tuple(prompts[at][: end + 1]), len(names)) for end in range(8)]
        data: Any
        kind = rng.random()
        if kind < 0.55:
            # As a publisher does: from some block on, whose parent the worker has.
            begin = rng.choice([0, *(end + 1 for end in range(7) if path[end] in held[worker])])
            end = rng.randint(begin + 1, 8)
            blocks = [
                {"block_hash": path[one], "tokens_hash": local[at][one]}
                for one in range(begin, end)
            ]
            data = {"stored": {"parent_hash": path[begin - 1] if begin else None, "blocks": blocks}}
            held[worker].update(path[begin:end])
        elif kind < 0.99:
            gone = rng.sample(sorted(held[worker]), min(2, len(held[worker])))
            data = {"removed": {"block_hashes": gone}}
            held[worker].difference_update(gone)
        else:
            data = "cleared"
            held[worker].clear()
        numbers[worker] += 1
        event = {"event_id": numbers[worker], "data": data, "dp_rank": worker[1]}
        tree("apply", [worker[0], event])
        index.apply(json.dumps({"worker_id": worker[0], "event": event}))
        for asked in rng.sample(range(len(prompts)), 3):
            path = [names.get(tuple(prompts[asked][: end + 1]), -1) for end in range(8)]
            found = exact(index, ids[asked], NS)
            theirs = {(one, rank): blocks for one, rank, blocks in tree("find", local[asked])}
            for one in found:
                expected = next((at for at, name in enumerate(path) if name not in held[one]), 8)
                assert found[one] == expected * size
                assert theirs.get(one, 0) <= expected
                probes += 1
                more += theirs.get(one, 0) < expected
    index.check()
    assert not any(index.find_matches(kvtrie.TokenSequence(ids[0], NS)).uncertain)
    # A block that is removed and stored again: the tree has lost what was below it.
    assert 0 < more < probes


def test_a_dump_of_the_tree_is_restored(tree: Callable[..., Any]) -> None:
    tokens = list(range(32))
    local = hashes(tree, tokens, 4)
    blocks = [{"block_hash": 50 + at, "tokens_hash": one} for at, one in enumerate(local)]
    for worker, end in ((1, 8), (2, 3)):
        data = {"stored": {"parent_hash": None, "blocks": blocks[:end]}}
        tree("apply", [worker, {"event_id": 1, "data": data, "dp_rank": 0}])
    index = DynamoIndexer(4, b"the key of tests", NS)
    assert sorted(index.restore(tree("dump"))) == [(1, 0), (2, 0)]
    assert exact(index, tokens, NS) == {(1, 0): 32, (2, 0): 12}
    assert index.find_matches(kvtrie.TokenSequence(tokens, NS)).uncertain.all()
