"""An index that follows a real engine over ZMQ has what the engine finds, in both of its lives."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm import chat
from tests.vllm.conftest import APPROXIMATE
from tests.vllm.engine import BLOCK
from tests.vllm.prompts import words
from tests.vllm.traffic import Traffic
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.v1.request import Request

import kvtrie
from kvtrie.cluster import subscribe

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.vllm.engine import Engine
    from tests.vllm.kept import Kept

SECONDS = 60.0
# Of each of an engine's two lives.
NUM_REQUESTS = 150
NUM_PROBES = 5_000
SHARED = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
REASONING = "<think>\n" + "answers " * 120 + "\n</think>\n\n"


class Router:
    """An index of one worker that follows both topics of an engine."""

    def __init__(self, folder: Path) -> None:
        self.index = kvtrie.KvIndexer(BLOCK, b"the key of tests")
        self.worker = self.index.add_worker("vllm", SHARED)
        events, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self.plain = subscribe(self.index, self.worker, events, replay, check_every=0.2)
        self.moved = subscribe(
            self.index,
            self.worker,
            f"ipc://{folder}/moved",
            topic="kvtrie",
            approximate=True,
            check_every=0.2,
        )

    def follows(self, vllm: Engine) -> None:
        """Wait until it has what vLLM has published."""
        publisher = vllm.scheduler.kv_event_publisher
        end = time.monotonic() + SECONDS
        while True:
            numbers = [number for number, _ in list(publisher._buffer)[-1:]]
            is_sent = not publisher._event_queue.unfinished_tasks
            if is_sent and self.plain.state == "live" and [self.plain._applied] == numbers:
                return
            assert time.monotonic() < end, (self.plain, self.plain.error, numbers)
            time.sleep(0.01)

    def claims(self, tokens: Sequence[int]) -> tuple[int, int]:
        seq = kvtrie.TokenSequence(tokens, SHARED)
        scores = self.index.find_matches(seq, kvtrie.ReusePolicy(), keep_last=1)
        assert not scores.uncertain[0]
        return int(scores.exact[0]), int(scores.possible[0])

    def close(self) -> None:
        self.plain.close()
        self.moved.close()


class Life:
    """An engine from its start to its end, and what it was asked."""

    def __init__(self, vllm: Engine, seed: int) -> None:
        self.vllm = vllm
        self.traffic = Traffic(seed)
        self.rng = self.traffic.random
        self.talk = chat.Chat(vllm.llm.get_tokenizer())
        self.seen: list[list[int]] = []
        self.num_aborted = self.num_preempted = self.num_reset = 0
        self.resets = True
        preempt = vllm.scheduler._preempt_request

        def counting(*args: Any, **kwargs: Any) -> None:
            self.num_preempted += 1
            preempt(*args, **kwargs)

        vllm.scheduler._preempt_request = counting

    def go(self) -> None:
        """Mixed requests that share, edit and repeat histories; some are aborted."""
        asked, open_names = dict[str, Any](), list[str]()
        while len(asked) < NUM_REQUESTS or self.vllm.is_busy:
            while len(asked) < NUM_REQUESTS and len(open_names) < 8 and self.rng.random() < 0.6:
                ask = self.traffic.next()
                # Some are asked twice at once.
                for _ in range(1 + (self.rng.random() < 0.2)):
                    name = self.vllm.add(
                        ask.prompt, max_tokens=ask.max_tokens, mode=ask.mode, salt=ask.salt
                    )
                    asked[name] = ask
                    open_names.append(name)
            self.vllm.step()
            if open_names and self.rng.random() < 0.03:
                self.vllm.abort([open_names.pop()])
                self.num_aborted += 1
            if self.resets and self.rng.random() < 0.02:
                self.reset()
            for name in [name for name in open_names if self.vllm.answers[name].finished]:
                open_names.remove(name)
                self.traffic.said(asked[name], self.vllm.answers[name].tokens)
        self.vllm.drain()
        self.seen += [[*ask.prompt, *self.vllm.answers[name].tokens] for name, ask in asked.items()]

    def think(self) -> None:
        """Turns whose reasoning dies, and later requests that take its blocks."""
        end = {"allowed_token_ids": [self.talk.end], "stop_token_ids": [self.talk.end]}
        for turn in range(8):
            question = chat.user("question", 20 + turn)
            ids = self.talk.prompt([question], reply=REASONING + "it " * 40)
            self.vllm.ask(ids, max_tokens=4, **end)
            self.seen.append(ids)
            self.vllm.ask(words(3 * BLOCK, self.rng.randrange(10**6)), max_tokens=1)

    def reset(self) -> None:
        """Preempt what runs, and forget everything."""
        assert self.vllm.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self.num_reset += 1

    def finds(self, tokens: Sequence[int]) -> int:
        """What a plain request of these tokens would find now."""
        params = SamplingParams(max_tokens=1)
        hasher = self.vllm.core.request_block_hasher
        request = Request("probe", list(tokens), params, None, block_hasher=hasher)
        return int(self.vllm.scheduler.kv_cache_manager.get_computed_blocks(request)[1])

    def compare(self, router: Router, count: int) -> tuple[int, int]:
        """How many of so many probes are found, and have more that may be moved."""
        num_over = num_under = num_found = num_possible = 0
        for _ in range(count):
            # The pool is small, and has the latest.
            history = self.rng.choice(self.seen[-NUM_REQUESTS // 4 :])
            probe = history[: self.rng.randrange(1, len(history) + 1)]
            probe += words(self.rng.randrange(3), 1)
            (claimed, possible), found = router.claims(probe), self.finds(probe)
            num_over += claimed > found
            num_under += claimed < found
            num_found += found > 0
            num_possible += possible > 0
        assert (num_over, num_under) == (0, 0)
        return num_found, num_possible


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat.model(tmp_path_factory.mktemp("models") / "chat")


def test_an_index_follows_an_engine_through_a_restart(
    engines: Kept, chatting: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "connector": APPROXIMATE | {"events": {"endpoint": f"ipc://{tmp_path}/moved"}},
        "gaps": True,
        "shadow": False,
        "skip_tokenizer_init": False,
        "blocks": 60,
        "max_model_len": 1024,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 200,
        "kv_events_config": KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=f"ipc://{tmp_path}/events",
            replay_endpoint=f"ipc://{tmp_path}/replay",
        ),
    }
    router = Router(tmp_path)
    before: list[list[int]] = []
    try:
        for seed in (1, 2):
            engines.close()
            life = Life(engines.get(chatting, **options), seed)
            life.go()
            # What is left to find does not hang on when the last reset was.
            life.resets = False
            life.think()
            life.go()
            router.follows(life.vllm)
            num_found, num_possible = life.compare(router, NUM_PROBES)
            assert num_found > NUM_PROBES // 20
            assert num_possible > 0
            assert min(life.num_aborted, life.num_preempted, life.num_reset) > 0
            counts = life.vllm.counts
            assert min(counts["tokens_moved"], counts["blocks_dead"]) > 0, counts
            assert counts["errors"] == 0
            # Nothing of the life before is claimed of this one.
            life.seen = before or life.seen
            life.compare(router, NUM_PROBES // 10)
            before = life.seen
            router.index.check()
        assert router.plain.counts["resyncs"] > 0
    finally:
        router.close()
        engines.close()
