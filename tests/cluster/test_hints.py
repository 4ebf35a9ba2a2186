"""Promised and possible moved tokens of an index of workers, next to their own plans.

A plan never reuses less than what is promised, nor more than what is possible, but for parts of
blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from tests.cluster.publisher import packed, removed, stored
from tests.cluster.test_subscription import KEY, NS

import kvtrie

SIZE, WORKERS, TALKS = 4, 3, 12
MIN_RUN = 2 * SIZE
SHARED = 3  # blocks
ANYWHERE = kvtrie.ReusePolicy(scope="namespace", min_run=MIN_RUN)
OWN = kvtrie.ReusePolicy(min_run=MIN_RUN, shared_prefix=SHARED)
# A plan takes tokens, an index whole blocks: not a part of the block after the exact prefix, not
# the ends of a run, and nothing of a run that has fewer than two whole blocks.
MOST_MISSED = (SIZE - 1) + (3 * SIZE - 2)


@dataclass
class Told:
    """Tokens of one worker."""

    exact: int
    moved: int
    possible: int


class Cached:
    """Workers with an index each, and one index of all of them that gets their events."""

    def __init__(self, policy: kvtrie.ReusePolicy | None) -> None:
        self.of_all = kvtrie.KvIndexer(SIZE, KEY)
        self.workers = [self.of_all.add_worker(str(one), NS) for one in range(WORKERS)]
        self.own = [
            kvtrie.RadixIndex(4_096, SIZE, min_run=MIN_RUN, seed=one) for one in range(WORKERS)
        ]
        self.free = [kvtrie.BlockAllocator(4_096) for _ in range(WORKERS)]
        # The hash of each block of a worker, by what is before it.
        self.hashes = [dict[tuple[int, ...], int]() for _ in range(WORKERS)]
        self.last = 0
        for worker in self.workers:
            self.of_all.set_policy(worker, policy)

    def keep(
        self, number: int, tokens: list[int], session: str | None = None, *, tells: bool = True
    ) -> None:
        at, count = number % WORKERS, len(tokens) // SIZE
        seq = kvtrie.TokenSequence(tokens, NS)
        table = self.free[at].allocate(count)
        done = self.own[at].insert(
            seq, table, num_computed=count * SIZE, source=kvtrie.COMPUTED, session=session
        )
        self.free[at].free([*done.duplicates, *done.surplus])
        # As an engine: what is cached already is not stored again.
        known = self.hashes[at]
        for block in range(count):
            path = tuple(tokens[: SIZE * (block + 1)])
            if path in known:
                continue
            known[path] = self.last = self.last + 1
            before = known[path[:-SIZE]] if block else None
            event = stored([known[path]], before, path[-SIZE:]) | {"block_size": SIZE}
            if tells:
                event["session_id"] = session
            self.of_all.apply(self.workers[at], packed(event))

    def lose(self, number: int, tokens: list[int], block: int) -> None:
        """Remove a block in the middle."""
        at, path = number % WORKERS, tuple(tokens[: SIZE * (block + 1)])
        one = self.hashes[at].get(path)
        if one is None:
            return
        gone = self.own[at].remove_spans(
            kvtrie.TokenSequence(path, NS), [(SIZE * block, SIZE * (block + 1))], force=True
        )
        self.free[at].free(gone.freed)
        del self.hashes[at][path]
        self.of_all.apply(self.workers[at], packed(removed(one)))

    def planned(
        self,
        prompt: list[int],
        policy: kvtrie.ReusePolicy,
        session: str | None = None,
        moved_end: int | None = None,
    ) -> list[tuple[int, int]]:
        """Exact and moved tokens of each worker's own plan."""
        found = []
        for index in self.own:
            seq = kvtrie.TokenSequence(prompt, NS)
            with index.plan(seq, policy, session=session, moved_end=moved_end) as plan:
                assert plan.candidates_dropped == 0
                found.append((plan.num_exact, plan.num_approximate))
        return found

    def told(
        self, prompt: list[int], session: str | None = None, moved_end: int | None = None
    ) -> list[Told]:
        found = self.of_all.find_matches(
            kvtrie.TokenSequence(prompt, NS),
            kvtrie.ReusePolicy(),
            keep_last=1,
            session=session,
            moved_end=moved_end,
        )
        columns = (found.exact.tolist(), found.moved.tolist(), found.possible.tolist())
        return [Told(*one) for one in zip(*columns, strict=True)]


def words(rng: Random, count: int, most: int = 1 << 20) -> list[int]:
    return rng.choices(range(most), k=count)


def edited(rng: Random, history: list[int], end: list[int]) -> list[int]:
    """A history that lost a part, and something new."""
    history = history[: rng.randrange(20, len(history))]
    start = rng.randrange(len(history))
    return history[:start] + history[min(len(history), start + rng.randrange(1, 30)) :] + end


@pytest.mark.parametrize("seed", range(5))
def test_plan_reuses_what_is_promised_and_no_more_than_possible(seed: int) -> None:
    rng, cached = Random(seed), Cached(ANYWHERE)
    talks = [words(rng, rng.randrange(40, 200)) for _ in range(TALKS)]
    for number, tokens in enumerate(talks):
        cached.keep(number, tokens)
    num_moved = 0
    for _ in range(60):
        prompt = edited(rng, talks[rng.randrange(TALKS)], words(rng, 5))
        for told, (own_exact, own_moved) in zip(
            cached.told(prompt), cached.planned(prompt, ANYWHERE), strict=True
        ):
            assert told.exact == own_exact // SIZE * SIZE
            own, most = own_exact + own_moved, told.exact + told.possible
            assert most <= own <= most + MOST_MISSED, (prompt, told, own)
            # The end of the one run is not promised, because another might have left it.
            ends = MIN_RUN - 1 if told.possible else 0
            assert told.moved == max(0, told.possible - ends), (prompt, told)
            num_moved += told.moved > 0
    assert num_moved > 20


@pytest.mark.parametrize("policy", [ANYWHERE, OWN], ids=["namespace", "conversation"])
@pytest.mark.parametrize("letters", [6, 300], ids=["repetitive", "plain"])
@pytest.mark.parametrize("seed", range(6))
def test_no_promise_is_more_than_the_workers_own_plan(
    policy: kvtrie.ReusePolicy, letters: int, seed: int
) -> None:
    rng, cached = Random(seed), Cached(policy)
    sessions = ["a", "b", "c", None]
    begins = [words(rng, SIZE * SHARED, letters) for _ in range(3)]
    talks: list[tuple[list[int], str | None]] = []
    num_promised = num_kept_back = 0
    for _ in range(60):
        long = [talk for talk in talks if len(talk[0]) > 30]
        if long and rng.random() < 0.6:
            # Another turn after an edit, maybe of another conversation.
            tokens, session = rng.choice(long)
            tokens = edited(rng, tokens, words(rng, rng.randrange(4, 40), letters))
            if rng.random() < 0.3:
                session = rng.choice(sessions)
        else:
            tokens = rng.choice(begins) + words(rng, rng.randrange(30, 120), letters)
            session = rng.choice(sessions)
        asked = rng.choice([session, session, rng.choice(sessions)])
        moved_end = rng.choice([None, rng.randrange(len(tokens) + 1)])
        for told, own in zip(
            cached.told(tokens, asked, moved_end),
            cached.planned(tokens, policy, asked, moved_end),
            strict=True,
        ):
            assert told.exact + told.moved <= sum(own), (tokens, asked, told, own)
            assert told.moved <= told.possible
            num_promised += told.moved
            num_kept_back += told.possible - told.moved
        cached.keep(rng.randrange(WORKERS), tokens, session, tells=rng.random() < 0.8)
        talks.append((tokens, session))
        for _ in range(3):
            lost, _ = rng.choice(talks)
            cached.lose(rng.randrange(WORKERS), lost, rng.randrange(len(lost) // SIZE))
    assert num_promised > 50
    assert num_kept_back > 50


def test_promise_obeys_the_workers_scope_and_limits() -> None:
    rng = Random(0)
    history = words(rng, 80)
    prompt = history[20:] + words(rng, 5)
    promised = 60 - (MIN_RUN - 1)

    def told(policy: kvtrie.ReusePolicy | None, session: str | None = "chat") -> tuple[Told, int]:
        cached = Cached(policy)
        cached.keep(0, history, session="chat")
        own = cached.planned(prompt, policy or kvtrie.EXACT_ONLY, session)[0]
        return cached.told(prompt, session)[0], own[1]

    assert told(ANYWHERE, None) == (Told(0, promised, 60), 60)
    assert told(OWN) == (Told(0, promised, 60), 60)
    # Another's run, one of nobody's prompt, and plans of which nothing is known.
    for policy, session in ((OWN, "another"), (OWN, None), (None, "chat")):
        assert told(policy, session) == (Told(0, 0, 60), 0)
    for limit in (
        {"max_hops": 0},
        {"max_lost_context": 0.0},
        {"max_approximate_share": 0.5},
        {"recompute_first": 60},
        {"recompute_last": 60},
        {"recompute_share": 1.0},
        {"approximate": False},
    ):
        assert told(OWN.replace(**limit)) == (Told(0, 0, 60), 0), limit
    # These allow it, which nobody knows here.
    for limit in ({"max_new_context": 0.0}, {"max_cuts": 0}):
        assert told(OWN.replace(**limit)) == (Told(0, 0, 60), 60), limit
    with pytest.warns(UserWarning, match="forbid_kinds"):
        assert told(OWN.replace(forbid_kinds=("a kind",)))[0] == Told(0, 0, 60)


def test_event_without_a_session_promises_nothing_of_a_conversation() -> None:
    rng, cached = Random(0), Cached(OWN)
    history, session = words(rng, 80), "chat"
    prompt = history[20:] + words(rng, 5)
    cached.keep(0, history, session, tells=False)
    assert cached.planned(prompt, OWN, session)[0] == (0, 60)
    assert cached.told(prompt, session)[0] == Told(0, 0, 60)
    # A path that begins as the prompt does is in scope without one.
    kept = history[: SHARED * SIZE] + prompt
    assert cached.planned(kept, OWN)[0] == (SHARED * SIZE, 60)
    assert cached.told(kept)[0] == Told(SHARED * SIZE, 60 - (MIN_RUN - 1), 60)


def test_last_message_is_not_promised() -> None:
    rng, cached = Random(0), Cached(ANYWHERE)
    history = words(rng, 80)
    cached.keep(0, history)
    prompt = words(rng, 4) + history[20:60] + words(rng, 5)
    assert cached.told(prompt)[0].moved == 40 - (MIN_RUN - 1)
    assert cached.planned(prompt, ANYWHERE, moved_end=30)[0] == (0, 26)
    assert cached.told(prompt, moved_end=30)[0] == Told(0, 26 - (MIN_RUN - 1), 40)
    assert cached.told(prompt, moved_end=0)[0] == Told(0, 0, 40)


def test_copy_that_is_left_is_nobodys() -> None:
    rng, cached = Random(0), Cached(OWN)
    history = words(rng, 40)
    prompt = history[8:] + words(rng, 5)
    event = stored(range(10), None, history) | {"block_size": SIZE}
    first, other = (packed(event | {"session_id": one}) for one in ("a", "b"))
    worker = cached.workers[0]
    cached.of_all.apply(worker, first)
    assert cached.told(prompt, "a")[0].moved == 32 - (MIN_RUN - 1)
    cached.of_all.apply(worker, other)
    assert [cached.told(prompt, one)[0].moved > 0 for one in ("a", "b")] == [False, True]
    cached.of_all.apply(worker, packed(removed(*range(10))))
    assert cached.told(prompt, "b")[0] == Told(0, 0, 32)
    # What is in the host's memory cannot be moved from.
    cached.of_all.apply(worker, packed(removed(*range(10)), event | {"medium": "CPU"}))
    cached.of_all.set_policy(worker, ANYWHERE)
    assert cached.told(prompt)[0] == Told(0, 0, 32)


def test_exact_search_promises_nothing_moved() -> None:
    rng, cached = Random(0), Cached(ANYWHERE)
    history = words(rng, 80)
    cached.keep(0, history)
    found = cached.of_all.find_matches(kvtrie.TokenSequence(history[20:], NS))
    for column in (found.moved, found.possible):
        assert np.array_equal(column, [0] * WORKERS)


def test_wrong_arguments_name_the_value() -> None:
    cached = Cached(None)
    index, prompt = cached.of_all, kvtrie.TokenSequence(range(8), NS)
    for session in ("", "x" * 257):
        with pytest.raises(
            ValueError, match=rf"session has {len(session)} bytes; it must have 1 to"
        ):
            index.find_matches(prompt, session=session)
    index.find_matches(prompt, session="x" * 256)
    with pytest.raises(ValueError, match=r"moved_end is 9; it must be in \[0, 8\]"):
        index.find_matches(prompt, moved_end=9)
    with pytest.raises(ValueError, match="min_run"):
        index.set_policy(cached.workers[0], kvtrie.ReusePolicy())
    index.remove_worker(cached.workers[0])
    with pytest.raises(kvtrie.StaleHandleError):
        index.set_policy(cached.workers[0], None)
