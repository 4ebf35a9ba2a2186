"""The proxy in front of SMG itself, with two fake engines that publish events over ZMQ."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web
from tests.byte_tokenizer import byte_tokenizer
from tests.cluster.publisher import Publisher, stored

import kvtrie
from kvtrie.cluster import subscribe
from kvtrie.fleet import Dispatcher, ServedModel
from kvtrie.fleet.proxy import Proxy

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

NS = kvtrie.Namespace(model="tiny", salt=kvtrie.SHARED)
CHAT = "/v1/chat/completions"


class Engine:
    """What SMG asks an engine for, and chat completions that say whose they are."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: dict[str, Any] = {}

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/health", self.healthy)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/version", self.version)
        app.router.add_post(CHAT, self.chat)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def healthy(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def models(self, _: web.Request) -> web.Response:
        model = {"id": "tiny", "object": "model", "owned_by": "vllm", "root": "tiny"}
        return web.json_response({"object": "list", "data": [model]})

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.asked = await request.json()
        if self.asked.get("stream"):
            reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await reply.prepare(request)
            for number in range(3):
                piece = {"choices": [{"index": 0, "delta": {"content": f"{self.name}{number}"}}]}
                await reply.write(f"data: {json.dumps(piece)}\n\n".encode())
            await reply.write(b"data: [DONE]\n\n")
            return reply
        message = {"role": "assistant", "content": self.name}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": [1]}
        document = {"object": "chat.completion", "choices": [choice], "prompt_token_ids": [2, 3]}
        return web.json_response(document)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def until_ready(session: aiohttp.ClientSession, url: str, count: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                async with session.get(url + "/workers") as reply:
                    workers = (await reply.json())["workers"]
                if [one["status"] for one in workers] == ["ready"] * count:
                    return
            except (aiohttp.ClientError, KeyError, ValueError):
                pass
            await asyncio.sleep(0.1)


def ask(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}


async def served(session: aiohttp.ClientSession, url: str, text: str) -> str:
    async with session.post(url + CHAT, json=ask(text)) as reply:
        assert reply.status == 200, await reply.text()
        name: str = (await reply.json())["choices"][0]["message"]["content"]
        return name


async def scenario(smg: Path, log: Path) -> None:  # noqa: PLR0915 - one story
    engines = [Engine(name) for name in "abc"]
    for engine in engines:
        await engine.start()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command: list[str] = [str(smg), "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", "consistent_hashing", "--backend", "vllm", "--log-level", "warn"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    command += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
    command += ["--worker-urls", *(engine.url for engine in engines)]
    index = kvtrie.KvIndexer(2, b"the key of tests")
    model = ServedModel(NS, byte_tokenizer())
    publishers = [Publisher() for _ in engines]
    with log.open("w") as out:
        gateway = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)  # noqa: ASYNC220 - ended below
    subscriptions = []
    proxy = Proxy(url, Dispatcher(index), {"tiny": model})
    session = aiohttp.ClientSession()
    try:
        for engine, publisher in zip(engines, publishers, strict=True):
            number = index.add_worker(engine.url, NS)
            subscriptions.append(
                subscribe(index, number, publisher.endpoint, publisher.replay, check_every=0.2)
            )
        await until_ready(session, url, 3)
        front = f"http://127.0.0.1:{await proxy.start()}"
        # Each engine caches the prompt of one conversation.
        texts = {name: f"the conversation of {name}: " + name * 40 for name in "abc"}
        for publisher, subscription, name in zip(publishers, subscriptions, "abc", strict=True):
            body = ask(texts[name])
            tokens = model.prompt(CHAT, body)[:].tolist()
            whole = len(tokens) // 2
            publisher.send(stored(range(whole), None, tokens[: 2 * whole]))
            assert await asyncio.to_thread(subscription.wait, "live", 20)
        for _ in range(5):
            for name in "cab":
                assert await served(session, front, texts[name]) == name
        assert (proxy.counts["routed"], proxy.counts["elsewhere"]) == (15, 0)
        # A stream comes through both.
        async with session.post(front + CHAT, json=ask(texts["b"], stream=True)) as reply:
            raw = await reply.text()
        assert [f"b{number}" in raw for number in range(3)] == [True] * 3
        assert raw.rstrip().endswith("data: [DONE]")
        # What a spliced chat has besides passes SMG both ways.
        ids = {"kv_transfer_params": {"prompt_token_ids": [2, 3]}, "return_token_ids": True}
        async with session.post(front + CHAT, json=ask(texts["b"], **ids)) as reply:
            found = await reply.json()
        assert ids.items() <= engines[1].asked.items()
        assert (found["prompt_token_ids"], found["choices"][0]["token_ids"]) == ([2, 3], [1])
        # One engine dies: the positions of the others change, and no request is lost.
        await engines[0].runner.cleanup()
        # SMG does not know it yet, and chooses no other by itself.
        assert await served(session, front, texts["a"]) in {"b", "c"}
        assert proxy.counts["retried"] == 1
        async with asyncio.timeout(30):
            while (await workers(session, url)).get(engines[0].url) == "ready":  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.2)
        await asyncio.sleep(1.1)  # what the proxy knows is a second old at most
        before = proxy.counts["elsewhere"]
        for _ in range(3):
            for name in "bc":
                assert await served(session, front, texts[name]) == name
        assert proxy.counts["elsewhere"] == before
        assert await served(session, front, texts["a"]) in {"b", "c"}
    finally:
        for subscription in subscriptions:
            subscription.close()
        await session.close()
        await proxy.close()
        gateway.terminate()
        gateway.wait(20)
        for publisher in publishers:
            publisher.close()
        for engine in engines:
            await engine.runner.cleanup()


async def workers(session: aiohttp.ClientSession, url: str) -> dict[str, str]:
    async with session.get(url + "/workers") as reply:
        return {one["url"]: one["status"] for one in (await reply.json())["workers"]}


def test_requests_go_to_the_engine_that_cached_them(
    routers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "smg.log"
    try:
        asyncio.run(scenario(routers / "smg", log))
    except BaseException:
        with capsys.disabled():
            sys.stderr.write(log.read_text()[-3000:])
        raise
