"""The proxy in front of a router made here: headers, bytes, limits, and what passes unrouted."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict
from tests.byte_tokenizer import byte_tokenizer
from tests.cluster.publisher import Publisher, packed, stored
from tests.metrics.scraped import scrape, total

import kvtrie
from kvtrie.fleet import Dispatcher, PromptError, ServedModel
from kvtrie.fleet import proxy as proxy_module
from kvtrie.fleet.prompts import session_of
from kvtrie.fleet.proxy import FixedTargets, Proxy, serve
from kvtrie.fleet.smg import SmgTargets

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from kvtrie.fleet import Sent

NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
CHAT = "/v1/chat/completions"
HEADER = "X-SMG-Target-Worker"
MESSAGES = [{"role": "user", "content": "where is it?"}]


class Router:
    """Returns what it was asked, or what a test says."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        self.came = asyncio.Event()
        self.gone = asyncio.Event()
        self.go = asyncio.Event()
        self.reply: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): text for name, text in request.headers.items()}
        path = request.rel_url.raw_path_qs
        self.asked.append((request.method, path, headers, await request.read()))
        self.came.set()
        if self.reply is not None:
            try:
                return await self.reply(request)
            except asyncio.CancelledError:
                self.gone.set()
                raise
        return web.json_response({"ok": True}, headers={"X-Of": "the router"})

    def target(self, at: int = -1) -> str | None:
        return self.asked[at][2].get(HEADER.lower())


class Running:
    def __init__(
        self,
        *,
        tokenizer: Any = None,
        policy: kvtrie.ReusePolicy | None = None,
        **options: Any,
    ) -> None:
        self.options = options
        self.router = Router()
        self.index = kvtrie.KvIndexer(2, b"the key of tests")
        for name in ("a", "b"):
            self.index.add_worker(name, NS)
        self.dispatcher = Dispatcher(self.index, policy=policy)
        self.served = ServedModel(NS, tokenizer or byte_tokenizer())
        # The second worker has all but the end of the prompt.
        tokens = self.served.prompt(CHAT, {"messages": MESSAGES})[:]
        whole = len(tokens) // 2 - 1
        self.index.apply(1, packed(stored(range(whole), None, tokens[: 2 * whole].tolist())))

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.router.handle)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        upstream = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        targets = FixedTargets({"a": "at-a", "b": "at-b"})
        options = {"targets": targets, "keep_timeout": 20.0, **self.options}
        self.proxy = Proxy(upstream, self.dispatcher, {"tiny": self.served}, **options)
        self.url = f"http://127.0.0.1:{await self.proxy.start()}"
        self.client = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self.proxy.close()
        await self.runner.cleanup()

    async def post(
        self, body: object, path: str = CHAT, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(self.url + path, data=data, headers=headers) as reply:
            return reply.status, dict(reply.headers), await reply.read()


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": MESSAGES, **more}


def run(test: Callable[[Running], Awaitable[None]], **options: Any) -> None:
    async def inner() -> None:
        async with Running(**options) as running:
            await test(running)

    asyncio.run(inner())


def test_a_request_goes_to_the_worker_that_has_most_of_it_byte_for_byte() -> None:
    async def test(running: Running) -> None:
        body = json.dumps(chat(), indent=3).encode()
        status, headers, reply = await running.post(body, CHAT + "?x=1", Authorization="Bearer k")
        assert (status, headers["X-Of"], json.loads(reply)) == (200, "the router", {"ok": True})
        method, path, asked, sent = running.router.asked[0]
        assert (method, path, sent) == ("POST", CHAT + "?x=1", body)
        assert asked["authorization"] == "Bearer k"
        assert running.router.target() == "at-b"
        assert running.dispatcher.outstanding("b") == (0, 0)
        assert running.proxy.counts == {"requests": 1, "routed": 1}

    run(test)


def test_a_scrape_has_what_became_of_requests() -> None:
    pytest.importorskip("prometheus_client")
    from kvtrie.metrics import Collector  # noqa: PLC0415 - needs prometheus_client

    async def test(running: Running) -> None:
        collector = Collector(proxy=running.proxy)
        outcomes = "kvtrie_proxy_requests_total"
        assert total(scrape(collector), outcomes) == 0
        await running.post(chat())
        await running.post(b"{")
        await running.post({"model": "tiny", "input": "a"}, "/v1/embeddings")
        series = scrape(collector)
        want = {"requests": 3, "routed": 1, "unrouted: not JSON": 1, "passed": 1}
        assert {name: total(series, outcomes, outcome=name) for name in want} == want
        assert total(series, outcomes) == 6

    run(test)


def test_a_clients_own_header_is_not_passed_on() -> None:
    async def test(running: Running) -> None:
        await running.post({"model": "other"}, **{HEADER: "at-a"})
        assert running.router.target() is None
        await running.post(chat(), **{HEADER: "at-a"})
        assert running.router.target() == "at-b"

    run(test)


@pytest.mark.parametrize(
    ("body", "path", "why"),
    [
        (b"{", CHAT, "unrouted: not JSON"),
        (b"[" * 100_000, CHAT, "unrouted: not JSON"),
        ([], CHAT, "unrouted: not JSON"),
        (b"[" + b"[]," * 150_000 + b"0]", CHAT, "unrouted: JSON of a weight above 524288"),
        (json.dumps(chat()).encode("utf-16"), CHAT, "unrouted: not JSON"),
        ({"messages": MESSAGES}, CHAT, "unrouted: unknown model"),
        (chat(model="other"), CHAT, "unrouted: unknown model"),
        (chat(messages=5), CHAT, "unrouted: messages in another form"),
        (chat(messages=[5]), CHAT, "unrouted: messages in another form"),
        (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), CHAT, "several"),
        (chat(continue_final_message=True), CHAT, "unrouted: a prompt that goes on"),
        (chat(chat_template="x"), CHAT, "unrouted: a request with chat_template"),
        # A template of the client's own could run for ever.
        (chat(chat_template_kwargs={"chat_template": "x"}), CHAT, "an argument of the tokenizer"),
        (chat(chat_template_kwargs={"documents": []}), CHAT, "an argument of the tokenizer"),
        (chat(cache_salt=5), CHAT, "unrouted: cache_salt is no text"),
        (chat(cache_salt="x" * 1025), CHAT, "unrouted: a cache_salt of more than 1024 characters"),
        (chat(add_special_tokens=True), CHAT, "unrouted: a request with add_special_tokens"),
        (chat(truncate_prompt_tokens=5), CHAT, "unrouted: a prompt that is cut"),
        ({"model": "tiny", "prompt": ["a", "b"]}, "/v1/completions", "unrouted: several prompts"),
        ({"model": "tiny", "prompt": [-1]}, "/v1/completions", "unrouted: a token id is out"),
        ({"model": "tiny", "input": "a"}, "/v1/embeddings", "passed"),
    ],
)
def test_what_is_not_known_passes_without_the_header_and_is_counted(
    body: object, path: str, why: str
) -> None:
    async def test(running: Running) -> None:
        status, _, _ = await running.post(body, path)
        assert (status, running.router.target()) == (200, None)
        counts = running.proxy.counts
        assert sum(why in name for name in counts) == 1, counts
        assert counts["routed"] == 0

    run(test)


def test_a_tokenizer_that_fails_or_takes_too_long_passes_the_request() -> None:
    async def test(running: Running) -> None:
        def fails(*_: object, **__: object) -> None:
            message = "no"
            raise RuntimeError(message)

        running.proxy._models["tiny"] = type("Fails", (), {"prompt": fails})()
        assert (await running.post(chat()))[0] == 200
        assert running.proxy.counts["unrouted: tokenizing failed: RuntimeError"] == 1

        def sleeps(*_: object) -> None:
            time.sleep(0.5)

        running.proxy._models["tiny"] = type("Sleeps", (), {"prompt": sleeps})()
        assert (await running.post(chat()))[0] == 200
        assert running.proxy.counts["unrouted: tokenizing took too long"] == 1
        assert running.router.target() is None

    run(test, prompt_timeout=0.1)


def test_a_salt_is_the_requests_own() -> None:
    async def test(running: Running) -> None:
        await running.post(chat(cache_salt="tenant"))
        # Nothing is cached under that salt, so it is the first of two equal workers.
        assert running.router.target() == "at-a"

    run(test)


def test_completions_take_text_and_ids() -> None:
    async def test(running: Running) -> None:
        ids = running.served.prompt(CHAT, {"messages": MESSAGES})[:].tolist()
        await running.post({"model": "tiny", "prompt": ids}, "/v1/completions")
        assert running.router.target() == "at-b"
        await running.post({"model": "tiny", "prompt": "unknown"}, "/v1/completions")
        assert running.router.target() == "at-a"

    run(test)


def test_a_stream_comes_piece_by_piece_and_the_load_ends_with_its_first() -> None:
    async def test(running: Running) -> None:
        async def streams(request: web.Request) -> web.StreamResponse:
            reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await reply.prepare(request)
            await running.router.go.wait()
            await reply.write(b"data: 1\n\n")
            running.router.go.clear()
            await running.router.go.wait()
            await reply.write(b"data: [DONE]\n\n")
            return reply

        running.router.reply = streams
        async with running.client.post(running.url + CHAT, json=chat(stream=True)) as reply:
            assert reply.headers["Content-Type"] == "text/event-stream"
            outstanding, requests = running.dispatcher.outstanding("b")
            assert outstanding > 0
            assert requests == 1
            running.router.go.set()
            assert await reply.content.readany() == b"data: 1\n\n"
            assert running.dispatcher.outstanding("b") == (0, 1)
            running.router.go.set()
            assert await reply.content.readany() == b"data: [DONE]\n\n"
        assert running.dispatcher.outstanding("b") == (0, 0)

    run(test)


def test_a_client_that_hangs_up_ends_the_request_at_the_router() -> None:
    async def test(running: Running) -> None:
        async def waits(_: web.Request) -> web.StreamResponse:
            await asyncio.Event().wait()
            raise AssertionError

        running.router.reply = waits
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(running.post(chat()), 0.3)
        await asyncio.wait_for(running.router.gone.wait(), 10)
        assert running.dispatcher.outstanding("b") == (0, 0)

    run(test)


def test_a_reply_that_breaks_off_breaks_off_for_the_client() -> None:
    async def test(running: Running) -> None:
        async def breaks(request: web.Request) -> web.StreamResponse:
            reply = web.StreamResponse()
            await reply.prepare(request)
            await reply.write(b"half")
            assert request.transport is not None
            request.transport.abort()
            return reply

        running.router.reply = breaks
        with pytest.raises(aiohttp.ClientError):
            await running.post(chat())
        assert running.proxy.counts["broken"] == 1

    run(test)


@pytest.mark.parametrize(
    ("status", "code"), [(503, "no_available_workers"), (500, "call_upstream_connection_failed")]
)
def test_a_worker_that_the_router_cannot_reach_is_asked_for_once(status: int, code: str) -> None:
    async def test(running: Running) -> None:
        async def refuses(request: web.Request) -> web.StreamResponse:
            if HEADER in request.headers:
                return web.json_response({}, status=status, headers={"X-SMG-Error-Code": code})
            return web.json_response({"ok": True})

        running.router.reply = refuses
        assert (await running.post(chat()))[0] == 200
        assert [running.router.target(at) for at in (0, 1)] == ["at-b", None]
        assert running.proxy.counts["retried"] == 1

    run(test)


def test_a_client_that_does_not_read_its_reply_is_let_go() -> None:
    async def test(running: Running) -> None:
        async def floods(request: web.Request) -> web.StreamResponse:
            reply = web.StreamResponse()
            await reply.prepare(request)
            for _ in range(1000):
                await reply.write(b"x" * (1 << 16))
            return reply

        running.router.reply = floods
        body = json.dumps(chat()).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", int(running.url.split(":")[-1]))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        async with asyncio.timeout(20):
            await running.router.gone.wait()
            while running.proxy._in_flight:  # noqa: ASYNC110 - until the handler has ended
                await asyncio.sleep(0.01)
        assert running.proxy.counts["gone"] == 1
        assert running.dispatcher.outstanding("b") == (0, 0)
        writer.close()

    run(test, timeout=0.3)


def test_closing_does_not_wait_for_a_stream_to_end() -> None:
    async def test(running: Running) -> None:
        async def waits(_: web.Request) -> web.StreamResponse:
            await asyncio.Event().wait()
            raise AssertionError

        running.router.reply = waits
        asking = asyncio.ensure_future(running.post(chat()))
        await running.router.came.wait()
        await asyncio.wait_for(running.proxy.close(), 20)
        with pytest.raises(aiohttp.ClientError):
            await asking
        assert running.dispatcher.outstanding("b") == (0, 0)

    run(test)


def test_choosing_does_not_hold_up_other_requests() -> None:
    async def test(running: Running) -> None:
        went, go = threading.Event(), threading.Event()
        choose = running.dispatcher.choose

        def waits(*arguments: Any, **options: Any) -> Sent:
            went.set()
            go.wait(20)
            return choose(*arguments, **options)

        running.dispatcher.choose = waits  # type: ignore[method-assign] # a stub
        asking = asyncio.ensure_future(running.post(chat()))
        assert await asyncio.to_thread(went.wait, 20)
        assert (await running.post(b"", "/health"))[0] == 200
        go.set()
        assert (await asking)[0] == 200
        assert running.router.target() == "at-b"

    run(test)


def test_long_prompts_have_threads_of_their_own() -> None:
    """Two of 8 MB held all threads for seconds, and nobody else's prompt was looked up."""

    async def test(running: Running) -> None:
        go, prompt = threading.Event(), ServedModel.prompt
        begun: list[bool] = []

        def waits(path: str, body: dict[str, Any]) -> kvtrie.TokenSequence:
            if "user" in body:
                begun.append(True)
                go.wait(20)
            return prompt(running.served, path, body)

        running.proxy._models["tiny"] = type("Waits", (), {"prompt": staticmethod(waits)})()
        long = [asyncio.ensure_future(running.post(chat(user="x" * 300_000))) for _ in range(8)]
        try:
            while len(begun) < 2:  # noqa: ASYNC110 - of a thread
                await asyncio.sleep(0.001)
            assert (await running.post(chat()))[0] == 200
            assert running.router.target() == "at-b"
            assert len(running.router.asked) == 1
        finally:
            go.set()
        assert [status for status, _, _ in await asyncio.gather(*long)] == [200] * 8
        assert running.proxy.counts["routed"] == 9

    run(test, prompt_timeout=20.0)


def test_bodies_in_flight_have_bounded_bytes_together() -> None:
    """1,024 of 8 MB are more memory than most machines have."""

    async def test(running: Running) -> None:
        async def waits(_: web.Request) -> web.StreamResponse:
            await running.router.go.wait()
            return web.json_response({"ok": True})

        running.router.reply = waits
        first = [asyncio.ensure_future(running.post(b"x" * 400, "/v1/x")) for _ in range(2)]
        while len(running.router.asked) < 2:  # noqa: ASYNC110 - of another task
            await asyncio.sleep(0.001)
        status, _, said = await running.post(b"x" * 400, "/v1/x")
        assert status == 503
        why = json.loads(said)["error"]["message"]
        assert why == "requests in flight have more than 1000 bytes"
        running.router.go.set()
        assert [status for status, _, _ in await asyncio.gather(*first)] == [200, 200]
        # Those of requests that have ended do not count, however they did.
        assert (await running.post(b"x" * 2000, "/v1/x"))[0] == 413
        assert (await running.post(b"x" * 800, "/v1/x"))[0] == 200
        assert running.proxy._num_bytes == 0

    run(test, max_bytes=1000, max_body=1000)


def test_a_body_counts_until_its_reply_begins() -> None:
    """A reply may take minutes, and nothing is asked again."""

    async def test(running: Running) -> None:
        async def streams(request: web.Request) -> web.StreamResponse:
            reply = web.StreamResponse()
            await reply.prepare(request)
            await reply.write(b"begins")
            await running.router.go.wait()
            await reply.write_eof(b" and ends")
            return reply

        running.router.reply = streams
        url = running.url + "/v1/x"
        async with running.client.post(url, data=b"x" * 800) as first:
            assert await first.content.readany() == b"begins"
            assert running.proxy._num_bytes == 0
            second = asyncio.ensure_future(running.post(b"x" * 800, "/v1/x"))
            while len(running.router.asked) < 2:  # noqa: ASYNC110 - of another task
                await asyncio.sleep(0.001)
            running.router.go.set()
            assert await first.read() == b" and ends"
        assert (await second)[0] == 200
        assert running.proxy._num_bytes == 0

    run(test, max_bytes=1000, max_body=1000)


def test_documents_are_not_read_long_before_their_prompts_are_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes several times the memory of its bytes."""
    read: list[bytes] = []
    document = proxy_module._document

    def reads(body: bytes) -> dict[str, Any]:
        read.append(body)
        return document(body)

    monkeypatch.setattr(proxy_module, "_document", reads)

    async def test(running: Running) -> None:
        go, choose = threading.Event(), running.dispatcher.choose

        def waits(*arguments: Any, **options: Any) -> Sent:
            go.wait(20)
            return choose(*arguments, **options)

        running.dispatcher.choose = waits  # type: ignore[method-assign] # a stub
        asking = [asyncio.ensure_future(running.post(chat())) for _ in range(12)]
        try:
            while running.proxy._in_flight < 12:  # noqa: ASYNC110 - of other tasks
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.1)
            assert 1 <= len(read) <= 4
        finally:
            go.set()
        assert [status for status, _, _ in await asyncio.gather(*asking)] == [200] * 12
        assert len(read) == 12

    run(test, prompt_timeout=20.0)


def test_a_body_that_says_that_it_is_too_large_is_not_waited_for() -> None:
    async def test(running: Running) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url[-5:]))
        writer.write(b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert b" 413 " in await asyncio.wait_for(reader.readline(), 20)
        writer.close()

    run(test)


def test_conversation_of_a_request_is_asked_for() -> None:
    async def test(running: Running) -> None:
        asked, choose = [], running.dispatcher.choose

        def notes(*arguments: Any, **options: Any) -> Sent:
            asked.append(options)
            return choose(*arguments, **options)

        running.dispatcher.choose = notes  # type: ignore[method-assign] # a stub
        await running.post(chat(session_id="one"), **{"x-session-id": "another"})
        await running.post(chat(), **{"X-Session-Id": "two"})
        # What no worker would take is no reason not to route.
        await running.post(chat(session_id="x" * 257))
        assert [one["session"] for one in asked] == ["one", "two", None]
        assert {one["moved_end"] for one in asked} == {None}
        assert running.proxy.counts["routed"] == 3

    run(test)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_nothing_of_the_last_message_is_promised(path: str) -> None:
    """As the workers' plans move nothing into it."""
    template = (
        "{% for m in messages %}<bos>{{ m.role }}\n{{ m.content }}<eos>{% endfor %}<bos>assistant\n"
    )

    async def test(running: Running) -> None:
        asked, choose = [], running.dispatcher.choose

        def notes(seq: kvtrie.TokenSequence, *arguments: Any, **options: Any) -> Sent:
            asked.append((seq, options["moved_end"]))
            return choose(seq, *arguments, **options)

        running.dispatcher.choose = notes  # type: ignore[method-assign] # a stub
        said = "hello " * 4
        messages = [{"role": role, "content": said} for role in ("user", "assistant", "user")]
        body: dict[str, Any] = {"messages": messages}
        if path != CHAT:
            ids = running.served.prompt(CHAT, body)[:]
            body = {"prompt": ids.tolist()}
        await running.post({"model": "tiny", **body}, path)
        ((seq, moved_end),) = asked
        ids = seq[:].tolist()
        last = [at for at, token in enumerate(ids) if token == 1][-2]
        assert moved_end == last
        assert running.proxy.counts["routed"] == 1

    run(test, tokenizer=byte_tokenizer(template), policy=kvtrie.ReusePolicy())


@pytest.mark.parametrize(
    ("body", "session"),
    [
        ({}, None),
        ({"vllm_xargs": {"session_id": "chat"}}, "chat"),
        ({"vllm_xargs": "chat", "kv_transfer_params": 7}, None),
        ({"session_id": "chat", "kv_transfer_params": {"session": "chat"}}, "chat"),
        # The worker plans by another one than its events say.
        ({"session_id": "chat", "kv_transfer_params": {"session": "other"}}, None),
        ({"kv_transfer_params": {"session": "other"}}, None),
        ({"session_id": 7}, None),
        ({"session_id": ["chat"]}, None),
        ({"session_id": "\u00e9" * 128}, "\u00e9" * 128),
        ({"session_id": "\u00e9" * 129}, None),
        ({"session_id": "\ud800"}, None),
    ],
)
def test_conversation_is_the_one_of_the_workers_events(
    body: dict[str, Any], session: str | None
) -> None:
    assert session_of(body, {}) == session


def test_a_choice_that_comes_too_late_is_taken_back() -> None:
    async def test(running: Running) -> None:
        go, came = threading.Event(), threading.Event()
        choose = running.dispatcher.choose

        def waits(*arguments: Any, **options: Any) -> Sent:
            go.wait(20)
            sent = choose(*arguments, **options)
            assert running.dispatcher.outstanding("b")[1] == 1
            came.set()
            return sent

        running.dispatcher.choose = waits  # type: ignore[method-assign] # a stub
        assert (await running.post(chat()))[0] == 200
        assert running.router.target() is None
        assert running.proxy.counts == {"requests": 1, "unrouted: tokenizing took too long": 1}
        go.set()
        assert await asyncio.to_thread(came.wait, 20)
        async with asyncio.timeout(20):
            while running.dispatcher.outstanding("b") != (0, 0):  # noqa: ASYNC110 - a thread
                await asyncio.sleep(0.01)

    run(test, prompt_timeout=0.1)


async def raw(running: Running, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.split(":")[-1]))
    writer.write(request)
    reply = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return reply


@pytest.mark.parametrize("path", ["/v1/%2e%2e/workers?a=%2F%7e", "/v1/../workers", "//x/y", "/%ff"])
def test_a_path_passes_as_it_came(path: str) -> None:
    async def test(running: Running) -> None:
        await raw(running, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert [asked[1] for asked in running.router.asked] == [path]

    run(test)


def test_headers_of_a_connection_do_not_pass() -> None:
    async def test(running: Running) -> None:
        async def says(_: web.Request) -> web.StreamResponse:
            headers = [("Connection", "x-one"), ("X-One", "1"), ("X-Two", "2"), ("X-Three", "3")]
            headers += [("Proxy-Connection", "close"), ("Connection", "X-Two, close")]
            return web.Response(headers=CIMultiDict(headers))

        running.router.reply = says
        reply = await raw(
            running,
            b"GET /a HTTP/1.1\r\nHost: x\r\nX-One: 1\r\nX-Two: 2\r\nX-Three: 3\r\n"
            b"Proxy-Connection: close\r\nConnection: X-One\r\nConnection: close, x-two\r\n\r\n",
        )
        asked = running.router.asked[0][2]
        assert {name for name in asked if name.startswith(("x-", "proxy"))} == {"x-three"}
        assert b"X-Three: 3" in reply
        assert not any(name in reply for name in (b"X-One", b"X-Two", b"Proxy-Connection"))

    run(test)


def test_one_request_asks_for_the_workers_and_reads_all_of_them() -> None:
    async def test(running: Running) -> None:
        worker = {"id": "1", "url": "http://a/", "is_healthy": True, "model_id": "tiny"}
        document = json.dumps({"workers": [worker]}).encode()

        async def in_pieces(request: web.Request) -> web.StreamResponse:
            reply = web.StreamResponse()
            await reply.prepare(request)
            await reply.write(document[:20])
            await asyncio.sleep(0.1)
            await reply.write(document[20:])
            return reply

        running.router.reply = in_pieces
        targets = SmgTargets(running.proxy._upstream)
        found = await asyncio.gather(*(targets.of(running.client, "tiny") for _ in range(5)))
        assert found == [{"http://a": "0"}] * 5
        assert len(running.router.asked) == 1
        # One that gives up leaves the question to the next.
        targets.expire()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(targets.of(running.client, "tiny"), 0.01)
        worker["url"] = "http://b"
        document = json.dumps({"workers": [worker]}).encode()
        assert await targets.of(running.client, "tiny") == {"http://b": "0"}

    run(test)


@pytest.mark.parametrize(
    "said",
    [b"{", b"[" * 100_000, b"[" + b"[]," * 150_000 + b"0]", b"[]", b'{"workers":[5]}', b"\xff"],
)
def test_a_list_of_workers_that_cannot_be_read_is_none(said: bytes) -> None:
    """One that was nested too deeply was an error of each request."""

    async def test(running: Running) -> None:
        async def says(_: web.Request) -> web.Response:
            return web.Response(body=said)

        running.router.reply = says
        assert await SmgTargets(running.proxy._upstream).of(running.client, "tiny") == {}

    run(test)


def test_errors_of_the_router_pass_as_they_are() -> None:
    async def test(running: Running) -> None:
        async def refuses(_: web.Request) -> web.StreamResponse:
            return web.Response(status=429, text="later", headers={"Retry-After": "7"})

        running.router.reply = refuses
        status, headers, body = await running.post(chat())
        assert (status, headers["Retry-After"], body) == (429, "7", b"later")

    run(test)


def test_the_proxys_own_errors_have_a_type() -> None:
    async def test(running: Running) -> None:
        async def error(body: object, **headers: str) -> tuple[int, str]:
            status, _, raw = await running.post(body, **headers)
            found = json.loads(raw)["error"]
            assert found["type"] == "proxy_error"
            return status, found["message"]

        assert await error(b"x" * 2001) == (413, "the request has more than 2000 bytes")
        assert await error(b"", **{"Content-Encoding": "gzip"}) == (
            415,
            "the request is compressed",
        )

        async def waits(_: web.Request) -> web.StreamResponse:
            await asyncio.Event().wait()
            raise AssertionError

        running.router.reply = waits
        first = asyncio.ensure_future(error(chat()))
        await running.router.came.wait()
        assert await error(chat()) == (503, "1 requests are in flight, the most allowed")
        assert (await first)[0] == 504
        await running.runner.cleanup()
        assert (await error(chat()))[0] == 502
        assert running.dispatcher.outstanding("b") == (0, 0)

    run(test, max_body=2000, max_requests=1, timeout=1.0)


def test_a_body_that_does_not_come_is_refused() -> None:
    async def test(running: Running) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url[-5:]))
        writer.write(b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf")
        assert b"408" in await reader.readline()
        writer.close()

    run(test, body_timeout=0.1)


@pytest.mark.parametrize(
    "options",
    [{"max_body": 0}, {"max_bytes": 0}, {"max_requests": 0}, {"tokenizers": 0}, {"timeout": 0}],
)
def test_bad_arguments_are_named(options: dict[str, Any]) -> None:
    index = kvtrie.KvIndexer(2, b"the key of tests")
    text: Any = "1"
    with pytest.raises(ValueError, match=next(iter(options))):
        Proxy("http://127.0.0.1:1", Dispatcher(index), {}, **options)
    with pytest.raises(TypeError, match=f"Proxy: {next(iter(options))} "):
        Proxy("http://127.0.0.1:1", Dispatcher(index), {}, **dict.fromkeys(options, text))
    for url in ("here", "http://127.0.0.1:99999", "http://127.0.0.1/v1?x=1", "http://[::1"):
        with pytest.raises(ValueError, match=f"upstream is '{re.escape(url)}'; it must be like"):
            Proxy(url, Dispatcher(index), {})
    with pytest.raises(PromptError, match="messages in another form"):
        ServedModel(NS, byte_tokenizer()).prompt(CHAT, {})


def test_a_text_prompt_has_special_tokens_as_the_request_says() -> None:
    def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(one) for one in text]

    tokenizer: Any = byte_tokenizer()
    tokenizer.encode = encode
    model = ServedModel(NS, tokenizer)
    for more, ids in (({}, [1, 97, 98]), ({"add_special_tokens": False}, [97, 98])):
        assert list(model.prompt("/v1/completions", {"prompt": "ab", **more})) == ids


def test_the_command_reads_settings_and_prints_what_it_counted(tmp_path: Path) -> None:
    async def test(running: Running) -> None:
        byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
        (tmp_path / "key").write_bytes(b"the key of tests")
        publisher = Publisher()
        (tmp_path / "fleet.toml").write_text(
            f"""
            upstream = "{running.proxy._upstream}"
            port = 0
            key_file = "{tmp_path}/key"
            block_size = 2
            [model]
            name = "tiny"
            tokenizer = "{tmp_path}/tokenizer"
            shared = true
            [[workers]]
            url = "http://127.0.0.1:1"
            events = "{publisher.endpoint}"
            replay = "{publisher.replay}"
            """
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvtrie.fleet.proxy", str(tmp_path / "fleet.toml")),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
            port = int(line.split()[1])
            url = f"http://127.0.0.1:{port}{CHAT}"
            async with running.client.post(url, json=chat()) as reply:
                assert reply.status == 200
            # The router is no SMG: it does not say which workers it has.
            assert running.router.target() is None
            process.send_signal(signal.SIGINT)
            rest = (await asyncio.wait_for(process.stdout.read(), 30)).decode()
            assert rest.splitlines() == ["requests: 1", "unrouted: no worker: 1"]
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
            publisher.close()

    run(test)


def test_the_command_keeps_what_it_has_loaded_out_of_collections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of many lists had all of it gone through, several times, while everybody waited."""
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "key").write_bytes(b"the key of tests")
    done: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))

    async def starts(*_: object) -> int:
        done.append("start")
        raise asyncio.CancelledError

    monkeypatch.setattr(Proxy, "start", starts)
    model = {"name": "m", "tokenizer": str(tmp_path / "tokenizer"), "shared": True}
    given = {"key_file": str(tmp_path / "key"), "model": model, "workers": []}
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(serve(SETTINGS | given))
    assert done == ["freeze", "start"]


@pytest.mark.parametrize("key", [b" fifteen bytes.\n", b"\t" * 16, b"the key of tests\n"])
def test_the_command_takes_a_key_of_any_bytes_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: bytes
) -> None:
    """White space at its ends was cut off: another key than its file's, or one too short."""
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "key").write_bytes(key)
    found: list[int] = []

    async def starts(proxy: Proxy, *_: object) -> int:
        found.append(proxy._dispatcher._index.key_check)
        raise asyncio.CancelledError

    monkeypatch.setattr(Proxy, "start", starts)
    model = {"name": "m", "tokenizer": str(tmp_path / "tokenizer"), "shared": True}
    given = {"key_file": str(tmp_path / "key"), "model": model, "workers": []}
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(serve(SETTINGS | given))
    assert found == [kvtrie.KvIndexer(16, key).key_check]


SETTINGS: dict[str, Any] = {
    "upstream": "http://127.0.0.1:1",
    "key_file": "absent",
    "block_size": 16,
    "model": {"name": "m", "tokenizer": "absent", "salt": "s"},
    "workers": [{"url": "http://127.0.0.1:2", "events": "tcp://127.0.0.1:3"}],
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"upstream": None, "block_size": None, "another": {}},
            r"settings: missing \['block_size', 'upstream'\], unknown \['another'\]",
        ),
        ({"model": "m"}, "model: a table is needed, not 'm'"),
        ({"model": {"name": "m", "salt": "s"}}, r"model: missing \['tokenizer'\]"),
        ({"model": {"name": "m", "tokenizer": "t"}}, "model: a salt is missing"),
        ({"workers": {"url": "u"}}, "workers: a list of tables"),
        ({"workers": ["u"]}, "workers: a table is needed, not 'u'"),
        (
            {"model": {"name": "m", "tokenizer": "t", "shared": True, "splice": "yes"}},
            "model: splice is 'yes'; it must be true or false",
        ),
        (
            {"workers": [{"url": "u", "port": 1}]},
            r"workers: missing \['events'\], unknown \['port'\]",
        ),
    ],
)
def test_settings_that_are_missing_or_unknown_are_named(changes: dict[str, Any], said: str) -> None:
    given = {name: value for name, value in (SETTINGS | changes).items() if value is not None}
    with pytest.raises(ValueError, match=said):
        asyncio.run(serve(given))
