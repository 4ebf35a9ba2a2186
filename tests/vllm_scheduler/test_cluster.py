"""An index of workers that is fed with vLLM's bytes has what its cache manager finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from tests.vllm.prompts import words
from tests.vllm.traffic import Traffic
from tests.vllm_scheduler.test_events import UNCHECKED, enabled, finds, in_flight, listen
from tests.vllm_scheduler.test_traffic import SMALL, Run
from tests.vllm_scheduler.worker import BLOCK

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.vllm_scheduler.core import Core

NUM_PROBES = 10_000
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
        return int(scores.exact[0]), int(scores.moved[0])


@in_flight
def test_an_index_of_workers_answers_what_vllm_finds(
    core: Callable[..., Core], in_flight: bool
) -> None:
    options = SMALL | {"kv_events_config": enabled()}
    vllm = core(connector=UNCHECKED, gaps=True, in_flight=in_flight, **options)
    fed = Fed(vllm)
    run = Run(vllm, seed=91 + in_flight)
    run.go(360)
    seen = [list(ask.prompt) + vllm.answers[name].tokens for name, (ask, _) in run.asked.items()]
    rng, num_over, num_under, num_found, num_moved = Traffic(seed=5).random, 0, 0, 0, 0
    for _ in range(NUM_PROBES):
        history = rng.choice(seen)
        probe = history[: rng.randrange(1, len(history) + 1)] + words(rng.randrange(3), 1)
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
