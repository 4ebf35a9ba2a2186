"""Two ranks with the same seed, fed the same calls, agree: in one process and in several."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import kvtrie
from kvtrie import COMPUTED

NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)

RANK = """
import random
import kvtrie

rng = random.Random(5)
index = kvtrie.RadixIndex(40, 2, seed=11)
spaces = [kvtrie.Namespace(model="m", salt=salt) for salt in ("a", "b", kvtrie.SHARED)]
evicted, held = [], list(range(40))
for _ in range(300):
    ids = [rng.randrange(3) for _ in range(rng.randrange(20))]
    seq = kvtrie.TokenSequence(ids, rng.choice(spaces))
    index.lookup(seq)
    with index.plan(seq) as plan:
        need = plan.num_new_blocks
        while len(held) < need:
            got = index.evict(need - len(held)).tolist()
            evicted += got
            held += got
        table = [*plan.blocks.tolist(), *held[:need]]
        del held[:need]
        done = index.insert(seq, table, num_computed=len(seq), source=plan)
        held += [*done.duplicates.tolist(), *done.surplus.tolist(), *done.freed.tolist()]
    index.tag(seq, [kvtrie.Span(0, len(seq), "user")])
print(index.digest(), evicted)
"""


def rank(hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", RANK], check=True, capture_output=True, text=True, env=environment
    )
    return done.stdout


def test_digest_and_evictions_agree_between_processes() -> None:
    first = rank("1")
    assert len(first) > 100
    assert rank("2") == first


def make(seed: int = 0) -> kvtrie.RadixIndex:
    index = kvtrie.RadixIndex(8, 2, seed=seed)
    index.insert(kvtrie.TokenSequence([1, 2, 3, 4], NS), [0, 1], num_computed=4, source=COMPUTED)
    index.insert(kvtrie.TokenSequence([5, 6], NS), [2], num_computed=2, source=COMPUTED)
    return index


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_digest_is_the_same_after_the_same_calls(seed: int) -> None:
    one, two = make(seed), make(seed)
    assert one.digest() == two.digest()
    # Reading without touching does not count as a use.
    one.lookup(kvtrie.TokenSequence([1, 2], NS), touch=False)
    one.tags(kvtrie.TokenSequence([1, 2], NS))
    assert one.digest() == two.digest()


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.lookup(kvtrie.TokenSequence([1, 2], NS)),
        lambda index: index.lookup(kvtrie.TokenSequence([7, 7], NS)),
        lambda index: index.tag(kvtrie.TokenSequence([1, 2], NS), [kvtrie.Span(0, 1, "user")]),
        lambda index: index.evict(1),
        lambda index: index.discard([0]),
        lambda index: index.drop(NS),
        lambda index: index.reset(),
        lambda index: index.plan(kvtrie.TokenSequence([1, 2, 3], NS)).release(),
        lambda index: index.insert(
            kvtrie.TokenSequence([5, 6], NS), [2], num_computed=2, source=COMPUTED
        ),
    ],
    ids=["touch", "miss", "tag", "evict", "discard", "drop", "reset", "plan", "insert"],
)
def test_digest_distinguishes_states(change: object) -> None:
    assert callable(change)
    one, two = make(), make()
    change(one)
    assert one.digest() != two.digest()
    change(two)
    assert one.digest() == two.digest()
