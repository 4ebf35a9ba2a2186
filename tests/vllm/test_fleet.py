"""The proxy in front of SMG in front of two real engines: what is claimed, and what they report.

Each chat is claimed to have some tokens cached at the engine that it goes to, and that engine says
how many it had. Pools are so small that both engines evict.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import tempfile
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from tests.vllm import chat
from tests.vllm.engine import BLOCK
from tests.vllm.server import Server, free_port
from transformers import AutoTokenizer

import kvtrie
from kvtrie.cluster import Subscription, subscribe
from kvtrie.fleet import Dispatcher, ServedModel
from kvtrie.fleet.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from kvtrie.fleet import Sent

# Where `make test-routers` installs SMG.
ENV = Path(os.environ.get("KVTRIE_ROUTERS", Path(__file__).resolve().parents[2] / ".venv-routers"))
SMG = ENV / "bin/smg"
CHAT = "/v1/chat/completions"
NS = kvtrie.Namespace(model="tiny", salt=kvtrie.SHARED)
# A conversation of five turns takes 17 blocks.
POOL = 28
# Seconds for two servers that start at once, on a busy machine.
LIMIT = 1800
WORDS = ("question", "answer", "tool", "is", "the", "it", "and", "user")


class Worker(Server):
    """An engine that publishes events, and what the index knows of it."""

    def __init__(self, model: Path, folder: Path) -> None:
        folder.mkdir()
        # vLLM binds to a path, or to all addresses.
        self.events, self.replay = f"ipc://{folder}/e", f"ipc://{folder}/r"
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.events}
        events |= {"replay_endpoint": self.replay}
        more = ["--served-model-name", "tiny", "--kv-events-config", json.dumps(events)]
        more += ["--num-gpu-blocks-override", str(POOL), "--max-model-len", "768"]
        super().__init__(model, folder, *more)
        self.number = -1
        self.subscription: Subscription | None = None


class Fleet:
    """Two engines, SMG, the index and the proxy."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.workers = [Worker(model, folder / name) for name in ("a", "b")]
        self.index = kvtrie.KvIndexer(BLOCK, b"the key of tests")
        self.dispatcher = Dispatcher(self.index)
        self.served = ServedModel(NS, AutoTokenizer.from_pretrained(model))
        self.tracker = kvtrie.TurnTracker()
        self.log = folder / "smg.log"
        self.port = free_port()
        self.sent: list[tuple[kvtrie.TokenSequence, Sent]] = []
        choose = self.dispatcher.choose

        def recorded(
            seq: kvtrie.TokenSequence, among: Iterable[str] | None = None, **options: Any
        ) -> Sent:
            sent = choose(seq, among, **options)
            self.sent.append((seq, sent))
            return sent

        self.dispatcher.choose = recorded  # type: ignore[method-assign] # to see what it chooses

    @property
    def smg(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def of(self, url: str) -> Worker:
        return next(worker for worker in self.workers if worker.url == url)

    def claimed(self, tokens: Any) -> dict[str, int]:
        scores = self.index.find_matches(kvtrie.TokenSequence(tokens, NS), keep_last=1)
        return dict(zip(scores.workers, scores.exact.tolist(), strict=True))

    async def until(self, what: Callable[[], bool], why: Callable[[], object]) -> None:
        for _ in range(1200):
            if what():
                return
            await asyncio.sleep(0.05)
        pytest.fail(str(why()))

    async def has(self, worker: Worker, tokens: list[int]) -> None:
        """Wait until the index has what an engine computed last."""
        # The last token that was sampled has no KV.
        whole = (len(tokens) - 1) // BLOCK * BLOCK
        await self.until(
            lambda: self.claimed([*tokens, 0])[worker.url] == whole,
            lambda: (whole, self.claimed([*tokens, 0]), worker.subscription),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        with ExitStack() as stack:
            for worker in self.workers:
                stack.callback(worker.stop)
                worker.start()
            for worker in self.workers:
                await asyncio.to_thread(worker.wait, LIMIT)
                worker.number = self.index.add_worker(worker.url, NS)
                worker.subscription = stack.enter_context(
                    subscribe(
                        self.index, worker.number, worker.events, worker.replay, check_every=0.5
                    )
                )
            command = [str(SMG), "launch", "--host", "127.0.0.1", "--port", str(self.port)]
            command += ["--policy", "consistent_hashing", "--backend", "vllm"]
            command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
            command += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
            command += ["--health-success-threshold", "1", "--log-level", "warn"]
            command += ["--worker-urls", *(worker.url for worker in self.workers)]
            with self.log.open("w") as out:
                gateway = subprocess.Popen(command, stdout=out, stderr=out)  # noqa: ASYNC220 - ended below
            stack.callback(gateway.wait, 30)
            stack.callback(gateway.terminate)
            self.proxy = Proxy(
                self.smg,
                self.dispatcher,
                {"tiny": self.served},
                tracker=self.tracker,
                keep_timeout=20.0,
            )
            async with aiohttp.ClientSession() as self.client:
                try:
                    self.front = f"http://127.0.0.1:{await self.proxy.start()}"
                    await self.ready(2)
                    for worker in self.workers:
                        await self.live(worker)
                    yield
                finally:
                    await self.proxy.close()

    async def live(self, worker: Worker) -> None:
        subscription = worker.subscription
        assert subscription is not None
        await self.until(lambda: subscription.state == "live", lambda: subscription)

    async def ready(self, count: int) -> None:
        """Until SMG has so many workers."""
        for _ in range(600):
            try:
                async with self.client.get(self.smg + "/workers") as reply:
                    found = (await reply.json())["workers"]
                if [one["status"] for one in found].count("ready") == count:
                    await asyncio.sleep(1.1)  # what the proxy knows is a second old at most
                    return
            except (aiohttp.ClientError, KeyError, ValueError):
                pass
            await asyncio.sleep(0.2)
        pytest.fail(self.log.read_text()[-3000:])

    async def post(self, base: str, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
        """Who replied, and the reply's documents."""
        timeout = aiohttp.ClientTimeout(total=120)
        async with self.client.post(base + CHAT, json=body, timeout=timeout) as reply:
            text = await reply.text()
            assert reply.status == 200, text
            url = reply.headers.get("x-smg-routed-worker-id", base).rstrip("/")
        if not body.get("stream"):
            return url, [json.loads(text)]
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert lines.pop() == "[DONE]"
        return url, [json.loads(line) for line in lines]


class Talk:
    """A conversation. The model says single letters, which the tokenizer would join."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet = fleet
        self.rng = random.Random(seed)
        self.messages: list[dict[str, str]] = []
        encode = fleet.served.tokenizer.encode
        self.letters = [encode(one, add_special_tokens=False)[0] for one in "the "]
        self.at = ""
        self.history: list[int] = []
        # Turns that must be sent as ids: after a reply that an encoder would spell otherwise.
        self.is_respelled = False
        self.num_spliced = 0

    def ask(self, **more: Any) -> dict[str, Any]:
        words = " ".join(self.rng.choices(WORDS, k=70))
        self.messages.append({"role": "user", "content": words})
        sampling = {"allowed_token_ids": self.letters, "max_tokens": 24, "ignore_eos": True}
        seed = self.rng.randrange(1 << 30)
        return {"model": "tiny", "messages": self.messages, "seed": seed, **sampling, **more}

    async def turn(self, *, stream: bool = False) -> None:
        """One turn through the proxy: it went where most is cached, and the claim was right."""
        fleet = self.fleet
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        body = self.ask(**more)
        fleet.sent.clear()
        self.num_spliced += self.is_respelled
        self.at, reply = await fleet.post(fleet.front, body)
        ((prompt, sent),) = fleet.sent
        usage = next(one["usage"] for one in reply if one.get("usage"))
        claimed = usage["prompt_tokens_details"]["cached_tokens"]
        assert usage["prompt_tokens"] == len(prompt)
        assert sent.exact == claimed, (self.at, sent, usage)
        assert sent.worker == self.at
        said = "".join(
            (choice.get("message") or choice["delta"]).get("content") or ""
            for one in reply
            for choice in one["choices"]
        )
        assert len(said) == 24
        self.messages.append({"role": "assistant", "content": said})
        ids = [fleet.served.tokenizer.encode(one, add_special_tokens=False)[0] for one in said]
        self.history = prompt[:].tolist() + ids
        self.is_respelled |= ids != fleet.served.tokenizer.encode(said, add_special_tokens=False)
        await fleet.has(fleet.of(self.at), self.history)

    def plain(self) -> int:
        """Tokens of the next prompt that are cached where it would go, if it were text."""
        body = {"messages": [*self.messages, {"role": "user", "content": "x"}]}
        return self.fleet.claimed(self.fleet.served.prompt(CHAT, body)[:])[self.at]


async def scenario(fleet: Fleet) -> None:
    talks = [Talk(fleet, seed) for seed in range(4)]
    spliced = plain = 0
    homes: dict[int, str] = {}
    for turn in range(5):
        for at, talk in enumerate(talks):
            held = fleet.claimed([*talk.history, 0]) if talk.history else {}
            if turn:
                plain += talk.plain()
            await talk.turn(stream=turn % 2 == 1)
            ((_, sent),) = fleet.sent
            assert sent.exact == max(held.values(), default=0)
            if turn:
                spliced += sent.exact
            # Not evicted yet: it went back to where it was.
            if turn < 3:
                assert homes.setdefault(at, talk.at) == talk.at
    counts = fleet.proxy.counts
    assert set(homes.values()) == {worker.url for worker in fleet.workers}
    # The engines rendered each prompt as the proxy did, and the index followed what was sampled.
    assert counts["kept"] == counts["routed"] == 20
    assert counts["spliced"] == sum(talk.num_spliced for talk in talks) > 8, counts
    assert spliced > plain
    stats = [fleet.index.worker_stats(worker.number) for worker in fleet.workers]
    assert sum(one["removed"] for one in stats) > 0
    await one_dies(fleet, talks)


async def one_dies(fleet: Fleet, talks: list[Talk]) -> None:
    talk = talks[-1]
    dead = fleet.of(talk.at)
    (other,) = (worker for worker in fleet.workers if worker is not dead)
    mine = [one for one in talks if one.at == dead.url]
    assert fleet.claimed([*talk.history, 0])[dead.url] > 0
    dead.kill()
    at, _ = await fleet.post(fleet.front, talk.ask())
    assert at == other.url
    talk.messages.pop()
    assert dead.subscription is not None
    await fleet.until(lambda: dead.subscription.state == "stale", lambda: dead.subscription)  # type: ignore[union-attr] # is not None
    for one in mine:
        assert fleet.claimed([*one.history, 0])[dead.url] == 0
    # It starts again with nothing, and nothing of before is promised.
    dead.start()
    await asyncio.to_thread(dead.wait, LIMIT)
    await fleet.live(dead)
    await fleet.ready(2)
    for one in mine:
        assert fleet.claimed([*one.history, 0])[dead.url] == 0
    body = talk.ask(return_token_ids=True)
    _, (reply,) = await fleet.post(dead.url, body)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    await fleet.has(dead, reply["prompt_token_ids"] + reply["choices"][0]["token_ids"])
    # What it computes from here on is claimed again.
    held = fleet.claimed(reply["prompt_token_ids"])[dead.url]
    assert held > 0
    _, (reply,) = await fleet.post(dead.url, body)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == held
    fresh = Talk(fleet, 99)
    for _ in range(2):
        await fresh.turn()


@pytest.mark.minutes
@pytest.mark.timeout(2 * LIMIT)
def test_what_is_claimed_of_two_engines_is_what_they_report(tmp_path: Path) -> None:
    if not SMG.exists():
        pytest.skip(f"{SMG} is missing: make test-routers builds it")
    model = chat.model(tmp_path / "model")
    # The paths of sockets must be short.
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(model, Path(folder))

        async def run() -> None:
            async with fleet.running():
                await scenario(fleet)

        try:
            asyncio.run(run())
        except BaseException:
            for log in (fleet.log, *(worker.log for worker in fleet.workers)):
                if log.exists():
                    print(log, log.read_text()[-3000:])  # noqa: T201 - pytest shows it
            raise
