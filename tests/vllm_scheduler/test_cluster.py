"""An index of workers that is fed with vLLM's bytes has what its cache manager finds."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.vllm_scheduler.test_events import (
    NUM_PROBES,
    UNCHECKED,
    enabled,
    finds,
    in_flight,
    listen,
    probes,
)
from tests.vllm_scheduler.test_exact import (
    ASSISTANT,
    END,
    EXACT,
    HEAD,
    STOP,
    THINK,
    USER,
    end,
    message,
    words,
)
from tests.vllm_scheduler.test_traffic import SMALL, Run
from tests.vllm_scheduler.worker import BLOCK

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.vllm_scheduler.core import Core

NUM_TALKS = 40
SHARED = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)


class Fed:
    """An index with one worker, which both streams of an engine feed."""

    def __init__(self, vllm: Core) -> None:
        listen(vllm)
        self.index = kvtrie.KvIndexer(BLOCK, b"the key of tests")
        self.worker = self.index.add_worker("vllm", SHARED)
        self.encode = msgspec.msgpack.Encoder().encode
        vllm.scheduler.kv_event_publisher.publish = self.take
        events = vllm.connector.planner._events
        assert events is not None
        events._publisher.publish = self.take_others
        self.num_others = 0

    def take(self, batch: Any) -> None:
        self.index.apply(self.worker, self.encode(batch))

    def take_others(self, batch: Any) -> None:
        self.num_others += 1
        self.index.apply(self.worker, self.encode(batch), approximate=True)

    def claims(self, tokens: Sequence[int]) -> tuple[int, int]:
        seq = kvtrie.TokenSequence(tokens, SHARED)
        scores = self.index.find_matches(seq, kvtrie.ReusePolicy(), keep_last=1)
        assert not scores.uncertain[0]
        return int(scores.exact[0]), int(scores.possible[0])


@in_flight
def test_an_index_of_workers_answers_what_vllm_finds(
    core: Callable[..., Core], in_flight: bool
) -> None:
    options = SMALL | {"kv_events_config": enabled()}
    vllm = core(connector=UNCHECKED, gaps=True, in_flight=in_flight, **options)
    fed = Fed(vllm)
    run = Run(vllm, seed=91 + in_flight)
    run.go(300)
    # What is left to find does not hang on when the last reset was.
    run.resets = False
    run.go(360)
    num_over = num_under = num_found = num_moved = 0
    for probe in probes(vllm, run):
        (claimed, moved), found = fed.claims(probe), finds(vllm, probe)
        num_over += claimed > found
        num_under += claimed < found
        num_found += found > 0
        num_moved += moved > 0
    assert (num_over, num_under) == (0, 0)
    assert num_found > NUM_PROBES // 20
    # Approximate blocks are there, as hints.
    assert fed.num_others > 0
    assert num_moved > 0
    fed.index.check()
    assert vllm.counts["errors"] == 0


@pytest.mark.parametrize("scope", ["conversation", "namespace"])
def test_connector_plans_to_move_what_the_index_promises(
    core: Callable[..., Core], scope: str
) -> None:
    """Conversations by vLLM's session id, which its events and the connector's plans have."""
    given: dict[str, Any] = {"min_run": 2 * BLOCK, "scope": scope, "shared_prefix": 2}
    options = SMALL | {"kv_events_config": enabled(), "blocks": 600}
    vllm = core(connector={"gate": "unchecked", "policy": given}, gaps=True, **options)
    fed, policy = Fed(vllm), kvtrie.ReusePolicy(**given)
    fed.index.set_policy(fed.worker, policy)
    sources = vllm.connector.planner.half.sources
    plan, seen = sources.plan, list[kvtrie.TokenSequence]()

    def planning(seq: kvtrie.TokenSequence, *arguments: Any) -> Any:
        seen.append(seq)
        return plan(seq, *arguments)

    sources.plan = planning
    rng = Random(8)
    sessions, talks = [f"chat-{one}" for one in range(4)], dict[str, list[int]]()
    for number in range(24):
        session = sessions[number % 4]
        history = talks.get(session, words(80, number))
        cut = rng.randrange(len(history))
        history = history[:cut] + history[cut + rng.randrange(60) :]
        talks[session] = [*history[-400:], *words(rng.randrange(20, 90), 100 + number), END]
        # What is computed after moved runs is approximate, and never promised.
        mode = {"kvtrie": "exact"} if number % 3 else None
        end(vllm, talks[session], mode, session_id=session)
    space = seen[-1].namespace
    num_promised = num_possible = 0
    for _ in range(400):
        history = talks[rng.choice(sessions)]
        first = rng.randrange(len(history) - 40)
        prompt = history[:first] + history[first + rng.randrange(40) :] + words(5, 1)
        asked = rng.choice([*sessions, None])
        moved_end = rng.choice([None, rng.randrange(len(prompt))])
        found = fed.index.find_matches(
            kvtrie.TokenSequence(prompt, SHARED),
            policy,
            keep_last=1,
            session=asked,
            moved_end=moved_end,
        )
        exact, moved, possible = (
            int(column[0]) for column in (found.exact, found.moved, found.possible)
        )
        with plan(kvtrie.TokenSequence(prompt, space), policy, asked, moved_end) as own:
            assert own.candidates_dropped == 0
            assert exact + moved <= own.num_exact + own.num_approximate
        assert moved <= possible
        num_promised += moved
        num_possible += possible
    assert fed.num_others > 0
    assert 400 < num_promised < num_possible
    assert vllm.counts["errors"] == 0


@in_flight
def test_an_index_has_what_vllm_finds_after_dead_reasoning_and_twins(
    core: Callable[..., Core], in_flight: bool
) -> None:
    """Blocks that are evicted out of the middle, and prompts that are computed twice at once."""
    options = SMALL | {"kv_events_config": enabled()}
    vllm = core(connector=EXACT, in_flight=in_flight, **options)
    index = kvtrie.KvIndexer(BLOCK, b"the key of tests")
    worker = index.add_worker("vllm", SHARED)
    encode = msgspec.msgpack.Encoder().encode
    copies: Counter[Any] = Counter()
    num_twins = num_removed = 0

    def take(batch: Any) -> None:
        nonlocal num_twins, num_removed
        index.apply(worker, encode(batch))
        for event in batch.events:
            hashes = getattr(event, "block_hashes", ())
            if type(event).__name__ == "BlockStored":
                num_twins += sum(copies[one] > 0 for one in hashes)
                copies.update(hashes)
            else:
                num_removed += len(hashes)
                copies.subtract(hashes)

    vllm.scheduler.kv_event_publisher.publish = take
    rng, seen = Random(7), list[list[int]]()
    num_holes = num_over = num_under = num_found = 0
    for talk in range(NUM_TALKS):
        question = [*HEAD, *message(USER, rng.randrange(10, 60), 2 * talk), ASSISTANT]
        reasoning = [THINK, *words(rng.randrange(40, 160), 2 * talk + 1), STOP]
        seen.append([*question, *reasoning, *words(rng.randrange(10, 90), talk), END])
        end(vllm, seen[-1])
        # Both write the same answer at once, each into blocks of its own.
        twin = [*HEAD, *message(USER, rng.randrange(40, 90), -1 - talk), ASSISTANT]
        names = [vllm.add(twin, max_tokens=2 * BLOCK) for _ in range(2)]
        vllm.drain()
        seen.append(twin + vllm.answers[names[0]].tokens)
        # What comes next evicts a few blocks at a time.
        for turn in range(4):
            vllm.ask(words(2 * BLOCK + 1, 1_000 + 4 * talk + turn), max_tokens=1)
            for _ in range(NUM_PROBES // NUM_TALKS // 4):
                # Of those that are being evicted.
                history = rng.choice(seen[-8:])
                probe = history[: rng.randrange(1, len(history) + 1)] + words(rng.randrange(3), 1)
                scores = index.find_matches(kvtrie.TokenSequence(probe, SHARED), keep_last=1)
                assert not scores.uncertain[0]
                claimed, found = int(scores.exact[0]), finds(vllm, probe)
                num_over += claimed > found
                num_under += claimed < found
                num_found += found > 0
            stats = index.stats()
            num_holes = max(num_holes, stats["blocks"] - stats["entries"])
    assert (num_over, num_under) == (0, 0)
    assert num_found > NUM_PROBES // 20
    assert vllm.counts["blocks_dead"] > NUM_TALKS
    assert min(num_twins, num_removed) > NUM_TALKS
    assert num_holes > 0
    # Each copy was counted.
    assert index.worker_stats(worker)["unknown_removals"] == 0
    index.check()
    assert vllm.counts["errors"] == 0


class DynamoTree:
    """Dynamo's index of workers, which its publisher feeds with an engine's events."""

    def __init__(self, vllm: Core) -> None:
        self._core = pytest.importorskip("dynamo._core", reason="ai-dynamo-runtime is missing")
        listen(vllm)
        self.tree = self._core.RadixTree()
        vllm.scheduler.kv_event_publisher.publish = self.take
        self.num_events = self.num_removed = 0
        self._copies: Counter[int] = Counter()
        # Blocks of tenants, which Dynamo's hashes do not tell apart.
        self._salted: set[int] = set()

    def take(self, batch: Any) -> None:
        for event in batch.events:
            hashes = [self._named(one) for one in getattr(event, "block_hashes", ())]
            kind = type(event).__name__
            if kind == "BlockStored":
                self._store(event, hashes)
            elif kind == "BlockRemoved":
                self._remove(hashes)
            else:
                assert kind == "AllBlocksCleared"
                self.tree.clear_all_blocks(0)
                self._copies.clear()

    def _store(self, event: Any, hashes: list[int]) -> None:
        parent = event.parent_block_hash
        above = None if parent is None else self._named(parent)
        if any(event.extra_keys or ()) or above in self._salted:
            self._salted.update(hashes)
            return
        self._copies.update(hashes)
        contents = self._core.compute_block_hash_for_seq(list(event.token_ids), BLOCK)
        blocks = [
            {"block_hash": name, "tokens_hash": tokens}
            for name, tokens in zip(hashes, contents, strict=True)
        ]
        self._apply({"stored": {"parent_hash": above, "blocks": blocks}})

    def _remove(self, hashes: list[int]) -> None:
        gone = []
        for name in hashes:
            if name not in self._salted:
                self._copies[name] -= 1
                gone += [name] if not self._copies[name] else []
        if gone:
            self.num_removed += len(gone)
            self._apply({"removed": {"block_hashes": gone}})

    def _apply(self, data: dict[str, Any]) -> None:
        self.num_events += 1
        said = json.dumps({"event_id": self.num_events, "data": data}).encode()
        # It forgets what follows a block that is removed, and refuses what is said of that later.
        with suppress(RuntimeError):
            self.tree.apply_event(0, said)

    @staticmethod
    def _named(one: int | bytes) -> int:
        return int.from_bytes(one[-8:], "big") if isinstance(one, bytes) else one & (1 << 64) - 1

    def claims(self, tokens: Sequence[int]) -> int:
        whole = list(tokens[: (len(tokens) - 1) // BLOCK * BLOCK])
        if not whole:
            return 0
        hashes = self._core.compute_block_hash_for_seq(whole, BLOCK)
        return BLOCK * max(self.tree.find_matches(hashes).scores.values(), default=0)


@in_flight
def test_an_index_of_dynamo_claims_no_more_than_vllm_finds(
    core: Callable[..., Core], in_flight: bool
) -> None:
    """While approximate blocks were published as plain ones it claimed 352 tokens of 128."""
    options = SMALL | {"kv_events_config": enabled()}
    vllm = core(connector=UNCHECKED, gaps=True, in_flight=in_flight, **options)
    fed = DynamoTree(vllm)
    run = Run(vllm, seed=91 + in_flight)
    run.go(360)
    num_over = num_found = 0
    for probe in probes(vllm, run):
        claimed = fed.claims(probe)
        num_over += claimed > finds(vllm, probe)
        num_found += claimed > 0
    assert num_over == 0
    assert min(num_found, fed.num_removed, vllm.counts["tokens_moved"]) > NUM_PROBES // 100
