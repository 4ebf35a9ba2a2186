"""Moved tokens of an index of workers are possible, next to what the workers' own plans reuse."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from tests.cluster.publisher import packed, stored
from tests.cluster.test_subscription import KEY, NS

import kvtrie

SIZE, WORKERS, TALKS = 4, 3, 12
ANYWHERE = kvtrie.ReusePolicy(scope="namespace", min_run=2 * SIZE)
# A plan takes tokens, a hint whole blocks: not a part of the block after the exact prefix, not the
# ends of a run, and nothing of a run that has fewer than two whole blocks.
MOST_MISSED = (SIZE - 1) + (3 * SIZE - 2)


class Cached:
    """Workers with an index each, and one index of all of them that gets their events."""

    def __init__(self) -> None:
        self.of_all = kvtrie.KvIndexer(SIZE, KEY)
        self.workers = [self.of_all.add_worker(str(one), NS) for one in range(WORKERS)]
        self.own = [
            kvtrie.RadixIndex(4_096, SIZE, min_run=2 * SIZE, seed=one) for one in range(WORKERS)
        ]
        self.free = [kvtrie.BlockAllocator(4_096) for _ in range(WORKERS)]

    def keep(self, number: int, tokens: list[int], session: str | None = None) -> None:
        at, count = number % WORKERS, len(tokens) // SIZE
        table = self.free[at].allocate(count)
        seq = kvtrie.TokenSequence(tokens, NS)
        self.own[at].insert(
            seq, table, num_computed=count * SIZE, source=kvtrie.COMPUTED, session=session
        )
        hashes = list(range(1_000 * number, 1_000 * number + count))
        event = {**stored(hashes, None, tokens[: count * SIZE]), "block_size": SIZE}
        self.of_all.apply(self.workers[at], packed(event))

    def planned(
        self, prompt: list[int], policy: kvtrie.ReusePolicy, session: str | None = None
    ) -> list[tuple[int, int]]:
        """Exact and moved tokens of each worker's own plan."""
        found = []
        for index in self.own:
            plan = index.plan(kvtrie.TokenSequence(prompt, NS), policy, session=session)
            found.append((plan.num_exact, plan.num_approximate))
            plan.release()
        return found

    def hinted(self, prompt: list[int], policy: kvtrie.ReusePolicy) -> list[tuple[int, int]]:
        seq = kvtrie.TokenSequence(prompt, NS)
        scores = self.of_all.find_matches(seq, policy, keep_last=1)
        return list(zip(scores.exact.tolist(), scores.moved.tolist(), strict=True))


def words(rng: Random, count: int) -> list[int]:
    return rng.choices(range(1 << 20), k=count)


@pytest.mark.parametrize("seed", range(5))
def test_hint_is_what_the_workers_own_plan_reuses_but_for_ends_of_runs(seed: int) -> None:
    rng, cached = Random(seed), Cached()
    talks = [words(rng, rng.randrange(40, 200)) for _ in range(TALKS)]
    for number, tokens in enumerate(talks):
        cached.keep(number, tokens)
    num_moved = 0
    for _ in range(60):
        # A history that lost a part, and something new.
        number = rng.randrange(TALKS)
        history = talks[number][: rng.randrange(20, len(talks[number]))]
        start = rng.randrange(len(history))
        end = min(len(history), start + rng.randrange(1, 30))
        prompt = history[:start] + history[end:] + words(rng, 5)
        for (exact, moved), (own_exact, own_moved) in zip(
            cached.hinted(prompt, ANYWHERE), cached.planned(prompt, ANYWHERE), strict=True
        ):
            assert exact == own_exact // SIZE * SIZE
            hint, own = exact + moved, own_exact + own_moved
            assert hint <= own <= hint + MOST_MISSED, (prompt, hint, own)
            num_moved += moved > 0
    assert num_moved > 20


def test_hint_is_no_promise_where_the_workers_scope_or_policy_forbids() -> None:
    rng, cached = Random(0), Cached()
    history = words(rng, 80)
    cached.keep(0, history, session="chat")
    prompt = history[20:] + words(rng, 5)
    possible = cached.hinted(prompt, ANYWHERE)[0]
    assert possible == (0, 60)
    own = kvtrie.ReusePolicy(min_run=2 * SIZE)
    # The index knows no sessions, and says the same for all of these.
    assert cached.hinted(prompt, own)[0] == possible
    assert cached.planned(prompt, own, session="chat")[0] == possible
    assert cached.planned(prompt, own, session="another")[0] == (0, 0)
    strict = kvtrie.ReusePolicy(scope="namespace", min_run=2 * SIZE, max_lost_context=0.0)
    assert cached.hinted(prompt, strict)[0] == possible
    assert cached.planned(prompt, strict)[0] == (0, 0)
    # Exact reuse promises nothing of it.
    exact = cached.of_all.find_matches(kvtrie.TokenSequence(prompt, NS))
    assert np.array_equal(exact.moved, [0] * WORKERS)
