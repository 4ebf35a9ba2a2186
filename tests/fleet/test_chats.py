"""Chats with sampled ids: what a made-up vLLM is asked, what clients see, what is kept and why."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from aiohttp import web
from tests.cluster.publisher import packed, stored
from tests.fleet.test_proxy import CHAT, NS, Running, run
from tests.metrics.scraped import scrape, total
from tests.tags.templates import CHATML, tokenizer_of

import kvtrie
from kvtrie.fleet import ServedModel, chats
from kvtrie.fleet.chats import ReplyIds
from kvtrie.router import PromptSplicer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

QUESTION = {"role": "user", "content": "what is the question?"}
ANSWER = "the answer is in the question"
NEXT = {"role": "user", "content": "and then?"}


class Vllm:
    """Answers chats as vLLM does, one token per character of the reply."""

    def __init__(self, running: Running, template: str = CHATML) -> None:
        self.tokenizer = tokenizer_of("qwen3", template)
        self.splicer = PromptSplicer(self.tokenizer)
        self.prompts: list[list[int]] = []
        self.bodies: list[dict[str, Any]] = []
        self.status = 200
        self.router = running.router
        running.router.reply = self.reply

    @property
    def sampled(self) -> list[int]:
        parts = [*ANSWER, "<|im_end|>"]
        return [int(one) for part in parts for one in self.splicer.encode(part)]

    def rendered(self, messages: list[dict[str, Any]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self.splicer.encode(str(text)).tolist()
        return ids

    def text(self, ids: list[int]) -> str:
        return self.splicer.decode(np.array(ids, np.uint32))

    async def reply(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(self.router.asked[-1][3])
        self.bodies.append(body)
        given = (body.get("kv_transfer_params") or {}).pop("prompt_token_ids", None)
        if body.get("return_token_ids") and self.status != 200:
            return web.json_response({"error": "no"}, status=self.status)
        prompt = given or self.rendered(body["messages"])
        self.prompts.append(prompt)
        has_ids = body.get("return_token_ids")
        if not body.get("stream"):
            message = {"role": "assistant", "content": ANSWER}
            choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop"}
            document: dict[str, Any] = {"object": "chat.completion", "choices": [choice]}
            document |= {"prompt_token_ids": prompt if has_ids else None}
            choice |= {"token_ids": self.sampled if has_ids else None}
            return web.json_response(document)
        return await self.stream(request, prompt if has_ids else None)

    async def stream(self, request: web.Request, prompt: list[int] | None) -> web.StreamResponse:
        first: dict[str, Any] = {"choices": [{"index": 0, "delta": {"role": "assistant"}}]}
        if prompt is not None:
            first["prompt_token_ids"] = prompt
        events = [first]
        for at, token in enumerate(self.sampled):
            is_last = at == len(self.sampled) - 1
            delta = {"content": "" if is_last else ANSWER[at]}
            choice: dict[str, Any] = {"index": 0, "delta": delta}
            choice["finish_reason"] = "stop" if is_last else None
            if prompt is not None:
                choice["token_ids"] = [token]
            events.append({"choices": [choice]})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for at in range(0, len(text), 37):
            await reply.write(text[at : at + 37].encode())
        return reply


def fleet(
    test: Callable[[Running, Vllm, kvtrie.TurnTracker], Awaitable[None]],
    template: str = CHATML,
    **options: Any,
) -> None:
    tracker = kvtrie.TurnTracker()

    async def inner(running: Running) -> None:
        await test(running, Vllm(running, template), tracker)

    tokenizer = tokenizer_of("qwen3", CHATML)
    run(inner, tokenizer=tokenizer, tracker=tracker, **options)


def body(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": list(messages), **more}


def said(text: str = ANSWER, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def events(raw: bytes) -> list[Any]:
    lines = [line.removeprefix(b"data: ") for line in raw.splitlines() if line]
    return [line if line == b"[DONE]" else json.loads(line) for line in lines]


def test_the_next_turn_is_sent_with_the_ids_that_were_sampled() -> None:
    async def test(running: Running, vllm: Vllm, tracker: kvtrie.TurnTracker) -> None:
        status, _, first = await running.post(body(QUESTION))
        message = json.loads(first)["choices"][0]["message"]
        assert (status, message["content"]) == (200, ANSWER)
        history = vllm.prompts[0] + vllm.sampled
        turn = body(QUESTION, said(tool_calls=[], refusal=None), NEXT, temperature=0.5)
        plain = vllm.rendered([QUESTION, said(), NEXT])
        # The first worker has what was sampled, the second what the text is encoded to.
        blocks = [history[: len(history) // 2 * 2], plain[: len(vllm.prompts[0]) // 2 * 2 + 2]]
        for worker, ids in enumerate(blocks):
            running.index.apply(
                worker, packed(stored(range(1000, 1000 + len(ids) // 2), None, ids))
            )
        assert running.served.prompt(CHAT, turn)[:].tolist() == plain
        await running.post(turn)
        sent = vllm.prompts[1]
        assert sent[: len(history)] == history
        assert sent != plain
        assert vllm.text(sent) == vllm.text(plain)
        assert running.router.target() == "at-a"
        # All else is the client's.
        assert vllm.bodies[1] == turn | {"return_token_ids": True, "kv_transfer_params": {}}
        assert running.proxy.counts == {
            "requests": 2,
            "routed": 2,
            "unspliced: no history": 1,
            "spliced": 1,
            "kept": 2,
        }
        assert tracker.stats().splices["spliced"] == 1

    fleet(test)


def test_a_client_sees_its_reply_as_without_splicing() -> None:
    replies: dict[bool, list[Any]] = {True: [], False: []}
    turns = [body(QUESTION), body(QUESTION, said(), NEXT)]

    def ask(*, splices: bool) -> None:
        async def test(running: Running) -> None:
            vllm = Vllm(running)
            for turn in turns:
                for more in ({}, {"stream": True}):
                    accept = {"Accept-Encoding": "gzip"}
                    _, headers, raw = await running.post(turn | more, **accept)
                    kind = headers["Content-Type"].split(";")[0]
                    replies[splices].append((kind, events(raw) if more else json.loads(raw)))
            sent = [asked[2] for asked in running.router.asked]
            assert all(("accept-encoding" in one) is not splices for one in sent)
            if splices:
                assert vllm.prompts[-1][: len(vllm.prompts[0])] == vllm.prompts[0]
                assert running.proxy.counts["kept"] == 4
                assert running.proxy.counts["spliced"] == 2

        options: dict[str, Any] = {"tracker": kvtrie.TurnTracker()} if splices else {}
        run(test, tokenizer=tokenizer_of("qwen3", CHATML), **options)

    ask(splices=True)
    ask(splices=False)
    for _, reply in replies[False]:
        if isinstance(reply, dict):
            assert reply.pop("prompt_token_ids") is None
            assert reply["choices"][0].pop("token_ids") is None
    assert replies[True] == replies[False]


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_asks_for_ids_gets_them(streams: bool) -> None:
    async def test(running: Running, vllm: Vllm, _: kvtrie.TurnTracker) -> None:
        asked = body(QUESTION, stream=streams, return_token_ids=True)
        raw = (await running.post(asked))[2]
        found = [one for one in events(raw) if one != b"[DONE]"] if streams else [json.loads(raw)]
        assert found[0]["prompt_token_ids"] == vllm.prompts[0]
        ids = [one for event in found for one in event["choices"][0].get("token_ids", ())]
        assert ids == vllm.sampled
        assert running.proxy.counts["kept"] == 1

    fleet(test)


@pytest.mark.parametrize(
    ("turn", "why"),
    [
        (body(QUESTION, tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),
        (body(QUESTION, n=2), "several replies"),
        (body(QUESTION, reasoning_effort="low"), "other fields"),
        (body(QUESTION, response_format={"type": "json_object"}), "other fields"),
        (body(QUESTION, kv_transfer_params={"prompt_token_ids": [1]}), "ids of the client's own"),
        (body(QUESTION, kv_transfer_params=5), "ids of the client's own"),
        (body(QUESTION, said(reasoning_content="x"), NEXT), "messages of more than text"),
        (body(QUESTION, said(tool_calls=[{"id": "1"}])), "messages of more than text"),
        (body({"role": "tool", "content": "x"}), "messages of more than text"),
        (body({"role": ["user"], "content": "x"}), "messages of more than text"),
        (body({"role": "user", "content": [{"type": "text", "text": "x"}]}), "messages of more"),
    ],
)
def test_what_an_engine_may_render_otherwise_passes_as_it_came(
    turn: dict[str, Any], why: str
) -> None:
    async def test(running: Running, _: Vllm, __: kvtrie.TurnTracker) -> None:
        running.router.reply = None
        raw = json.dumps(turn, indent=1).encode()
        assert (await running.post(raw))[0] == 200
        assert running.router.asked[0][3] == raw
        counts = running.proxy.counts
        assert counts["spliced"] == counts["kept"] == 0
        assert counts["routed"] == 0 or sum(why in name for name in counts) == 1, counts
        assert counts["routed"] == 1 or sum("unrouted" in name for name in counts) == 1, counts

    fleet(test)


def test_an_engine_that_renders_otherwise_teaches_nothing() -> None:
    async def test(running: Running, vllm: Vllm, _: kvtrie.TurnTracker) -> None:
        await running.post(body(QUESTION))
        await running.post(body(QUESTION, said(), NEXT))
        assert vllm.prompts[1] == vllm.rendered([QUESTION, said(), NEXT])
        assert running.proxy.counts["not kept: another prompt"] == 2
        assert running.proxy.counts["unspliced: no history"] == 2

    fleet(test, template="Hello. " + CHATML)


@pytest.mark.parametrize("status", [400, 422])
def test_an_engine_that_refuses_ids_gets_the_chat_as_it_came(status: int) -> None:
    async def test(running: Running, vllm: Vllm, _: kvtrie.TurnTracker) -> None:
        await running.post(body(QUESTION))
        vllm.status = status
        # The first is sent with ids; of the second the reply's are asked for.
        for turn in (body(QUESTION, said(), NEXT), body(NEXT, stream=True)):
            raw = json.dumps(turn, indent=1).encode()
            assert (await running.post(raw))[0] == 200
            assert running.router.asked[-1][3] == raw
        assert running.proxy.counts["spliced"] == 1
        assert running.proxy.counts["unspliced: refused by the engine"] == 2
        assert running.dispatcher.outstanding("a") == running.dispatcher.outstanding("b") == (0, 0)

    fleet(test)


def test_ids_of_one_salt_are_not_used_under_another() -> None:
    async def test(running: Running, vllm: Vllm, _: kvtrie.TurnTracker) -> None:
        await running.post(body(QUESTION, cache_salt="one"))
        turn = body(QUESTION, said(), NEXT)
        for more in ({}, {"cache_salt": "two"}):
            await running.post(turn | more)
            assert vllm.prompts[-1] == vllm.rendered(turn["messages"])
        await running.post(turn | {"cache_salt": "one"})
        assert vllm.prompts[-1] != vllm.rendered(turn["messages"])

    fleet(test)


def test_a_chat_without_a_reply_is_spelled_by_no_other_client() -> None:
    """A client had a model say another's question letter by letter, and chose its ids."""
    tokenizer = tokenizer_of("qwen3", CHATML)
    # A special token ends the header, as in the templates of Llama 3 and Phi 4.
    tokenizer.chat_template = (
        "{% for one in messages %}<|im_start|>{{ one.role }}<|im_sep|>{{ one.content }}<|im_end|>"
        "{% endfor %}<|im_start|>assistant<|im_sep|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_sep|>"]})
    tracker = kvtrie.TurnTracker()
    splicer = chats.ChatSplicer(ServedModel(NS, tokenizer), tracker)
    system = {"role": "system", "content": "You are the help desk of a bank."}
    say = {"role": "user", "content": f"Say: {QUESTION['content']}"}

    def kept(chat: chats.SplicedChat, sampled: list[int]) -> chats.SplicedChat:
        reply = chats.ReplyIds(streams=False, shows_ids=False)
        choice = {"token_ids": sampled, "finish_reason": "stop"}
        document = {"prompt_token_ids": chat.prompt[:].tolist(), "choices": [choice]}
        reply.feed(json.dumps(document).encode())
        reply.rest()
        assert splicer.keep(chat, reply) is None
        return chat

    encode = PromptSplicer(tokenizer).encode
    letters = [int(one) for part in QUESTION["content"] for one in encode(part)]
    end = int(encode("<|im_end|>")[0])
    kept(splicer.splice(body(system, say)), [*letters, end])
    chat = splicer.splice(body(system, QUESTION))
    rendered = tokenizer.apply_chat_template(
        [system, QUESTION], tokenize=False, add_generation_prompt=True
    )
    assert chat.prompt[:].tolist() == encode(str(rendered)).tolist()
    assert chat.why_text == "no history"
    # Its following turns are spelled as its own replies.
    sampled = [int(one) for part in ANSWER for one in encode(part)]
    kept(chat, [*sampled, end])
    following = splicer.splice(body(system, QUESTION, said(), NEXT)).prompt[:].tolist()
    assert following[: len(chat.prompt) + len(sampled)] == [*chat.prompt[:].tolist(), *sampled]


STREAM = "text/event-stream"


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("application/json", "{", "no end of the reply"),
        ("application/json", "[1]", "no end of the reply"),
        ("application/json", '{"choices":[],"half":"\\ud83d"}', "no end of the reply"),
        (STREAM, 'data: {"choices":[],"half":"\\ud83d"}\n\n', "no end of the reply"),
        ("application/json", '{"choices":[{"finish_reason":"stop"}]}', "no ids in the reply"),
        ("application/json", '{"choices":[{"finish_reason":"stop","token_ids":5}]}', "no end"),
        (STREAM, "data: {}\n\n", "no end of the reply"),
        (STREAM, "data: {\n\ndata: {}\n\ndata: [DO", "no end of the reply"),
        (STREAM, ": a comment\r\n\r\ndata: [DONE]\r\n\r\n", "no end of the reply"),
    ],
)
def test_replies_in_other_forms_pass_as_they_are(kind: str, text: str, why: str) -> None:
    async def test(running: Running, *_: Any) -> None:
        async def says(_: web.Request) -> web.StreamResponse:
            return web.Response(body=text.encode(), headers={"Content-Type": kind})

        running.router.reply = says
        assert (await running.post(body(QUESTION)))[2].decode() == text
        found = [name for name in running.proxy.counts if name.startswith("not kept")]
        assert len(found) == 1
        assert why in found[0]

    fleet(test)


@pytest.mark.parametrize("streams", [False, True])
def test_a_reply_that_is_too_long_passes_as_it_is(
    streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chats, "_MOST_REPLY", 20)

    async def test(running: Running, vllm: Vllm, _: kvtrie.TurnTracker) -> None:
        raw = (await running.post(body(QUESTION, stream=streams)))[2]
        whole = "".join(
            choice.get("message", choice.get("delta"))["content"]
            for event in (events(raw)[1:-1] if streams else [json.loads(raw)])
            for choice in event["choices"]
        )
        assert whole == ANSWER
        assert str(vllm.sampled[-1]) in raw.decode()
        assert running.proxy.counts["not kept: no end of the reply"] == 1

    fleet(test)


HEAVY = b"[" + b"[]," * 150_000 + b"0]"


@pytest.mark.parametrize("streams", [False, True])
def test_a_reply_that_is_too_heavy_passes_as_it_is(
    streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("it was read"))
    reading = ReplyIds(streams, shows_ids=False)
    raw = b"data: " + HEAVY + b"\n\n" if streams else HEAVY
    passed = b"".join(reading.feed(raw[at : at + 65_536]) for at in range(0, len(raw), 65_536))
    assert passed + reading.rest() == raw
    assert not reading.ended


def test_a_reply_of_too_many_ids_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "_MOST_SAMPLED", 100)
    for number, is_kept in ((99, True), (100, True), (101, False)):
        reading = ReplyIds(streams=True, shows_ids=False)
        for token in range(number):
            event = json.dumps({"choices": [{"token_ids": [token]}]})
            assert b"token_ids" not in reading.feed(f"data: {event}\n\n".encode())
        reading.feed(b'data: {"choices":[{"finish_reason":"stop"}]}\n\n')
        assert reading.ended is is_kept


def test_a_line_that_comes_in_pieces_is_looked_through_once() -> None:
    """Each piece had all that was held looked through: time in the square of a line's length."""

    class Counting(bytearray):
        looked = 0

        def rfind(self, what: Any, start: Any = 0, end: Any = None) -> int:
            Counting.looked += len(self) - start
            return super().rfind(what, start, len(self) if end is None else end)

    reading = ReplyIds(streams=True, shows_ids=False, _held=Counting())
    for _ in range(1_000):
        assert reading.feed(b"x" * 1_000) == b""
    assert reading.feed(b"\n") == b"x" * 1_000_000 + b"\n"
    assert Counting.looked <= 1_000_001


def test_ids_that_are_none_are_not_kept() -> None:
    async def test(running: Running, vllm: Vllm, tracker: kvtrie.TurnTracker) -> None:
        for token in (-1, 1 << 40, "x"):

            async def says(_: web.Request, token: object = token) -> web.StreamResponse:
                prompt = vllm.rendered([QUESTION])
                choice = {"index": 0, "finish_reason": "stop", "token_ids": [token]}
                return web.json_response({"prompt_token_ids": prompt, "choices": [choice]})

            running.router.reply = says
            assert (await running.post(body(QUESTION)))[0] == 200
        why = "not kept: a token id is out of range, or too many"
        assert running.proxy.counts[why] == 3
        assert len(tracker) == 0

    fleet(test)


def test_errors_of_the_engine_pass_and_teach_nothing() -> None:
    async def test(running: Running, _: Vllm, tracker: kvtrie.TurnTracker) -> None:
        async def says(_: web.Request) -> web.StreamResponse:
            return web.Response(status=429, text="later", headers={"Retry-After": "7"})

        running.router.reply = says
        status, headers, raw = await running.post(body(QUESTION))
        assert (status, headers["Retry-After"], raw) == (429, "7", b"later")
        assert len(tracker) == 0

    fleet(test)


def test_a_scrape_has_what_was_spliced() -> None:
    pytest.importorskip("prometheus_client")
    from kvtrie.metrics import Collector  # noqa: PLC0415 - needs prometheus_client

    async def test(running: Running, vllm: Vllm, tracker: kvtrie.TurnTracker) -> None:
        collector = Collector(proxy=running.proxy, tracker=tracker)
        for turn in (body(QUESTION), body(QUESTION, said(), NEXT)):
            await running.post(turn)
        await running.post(body(QUESTION, n=2))
        series = scrape(collector)
        want = {"spliced": 1, "kept": 2, "unspliced: no history": 1}
        want |= {"unspliced: several replies": 1}
        for name, number in want.items():
            assert total(series, "kvtrie_proxy_requests_total", outcome=name) == number
        splices = "kvtrie_tracker_splices_total"
        assert total(series, splices, outcome="spliced") == 1
        kept = total(series, "kvtrie_tracker_spliced_tokens_total")
        assert kept >= len(vllm.sampled)

    fleet(test)


def test_the_end_of_a_reply_does_not_wait_for_prompts_of_others() -> None:
    """It waited in the threads that tokenize: two chats of 4 MB held all replies for 40 s."""

    async def test(running: Running, vllm: Vllm, _: kvtrie.TurnTracker) -> None:
        asked, may_reply = asyncio.Event(), asyncio.Event()
        went, go = threading.Event(), threading.Event()
        reply, choose = vllm.reply, running.dispatcher.choose

        async def replies(request: web.Request) -> web.StreamResponse:
            asked.set()
            await may_reply.wait()
            return await reply(request)

        def waits(*arguments: Any, **options: Any) -> Any:
            went.set()
            go.wait(60)
            return choose(*arguments, **options)

        running.router.reply = replies
        asking = asyncio.ensure_future(running.post(body(QUESTION, stream=True)))
        await asked.wait()
        running.dispatcher.choose = waits  # type: ignore[method-assign] # a stub
        other = asyncio.ensure_future(running.post(body(NEXT)))
        try:
            assert await asyncio.to_thread(went.wait, 20)
            may_reply.set()
            async with asyncio.timeout(10):
                assert (await asking)[0] == 200
            assert running.proxy.counts["kept"] == 1
        finally:
            go.set()
            await other

    fleet(test, tokenizers=1, prompt_timeout=60.0)


@pytest.mark.parametrize("streams", [False, True])
def test_the_end_of_a_reply_waits_a_moment_until_it_is_kept(
    streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(running: Running, _: Vllm, tracker: kvtrie.TurnTracker) -> None:
        go, keep = threading.Event(), kvtrie.TurnTracker.keep
        begun = 0

        def waits(*arguments: Any, **options: Any) -> None:
            nonlocal begun
            begun += 1
            go.wait(60)
            keep(*arguments, **options)

        monkeypatch.setattr(kvtrie.TurnTracker, "keep", waits)
        try:
            for question in (QUESTION, NEXT):
                async with asyncio.timeout(10):
                    reply = await running.post(body(question, stream=streams))
                assert reply[0] == 200
                assert not streams or events(reply[2])[-1] == b"[DONE]"
        finally:
            go.set()
        assert running.proxy.counts["not kept: late"] == 2
        assert running.proxy.counts["kept"] == 0
        async with asyncio.timeout(20):
            while tracker.stats().kept < 1:  # noqa: ASYNC110 - a thread
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        # The first was kept in the end; the second had not begun, and was dropped.
        assert (begun, tracker.stats().kept) == (1, 1)

    fleet(test, keep_timeout=0.1)


def test_what_is_sent_in_place_of_a_chat_counts_until_its_reply_begins() -> None:
    """The ids of a prompt may be many times as long as its text, and a reply takes minutes."""

    async def test(running: Running, _: Vllm, __: kvtrie.TurnTracker) -> None:
        asked, may_reply, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        copied: list[Any] = []
        copy = running.proxy._copy

        async def copies(*arguments: Any) -> None:
            copied.append(arguments[-1])
            await copy(*arguments)

        async def replies(request: web.Request) -> web.StreamResponse:
            asked.set()
            await may_reply.wait()
            reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await reply.prepare(request)
            await reply.write(b": begins\n\n")
            await may_end.wait()
            return reply

        running.proxy._copy = copies  # type: ignore[method-assign, assignment] # a stub
        running.router.reply = replies
        turn = json.dumps(body(QUESTION, stream=True)).encode()
        asking = asyncio.ensure_future(running.post(turn))
        async with asyncio.timeout(20):
            await asked.wait()
            sent = running.router.asked[0][3]
            assert sent != turn
            assert running.proxy._num_bytes == len(turn) + len(sent)
            may_reply.set()
            while not copied:  # noqa: ASYNC110 - of another task
                await asyncio.sleep(0.001)
            assert (running.proxy._num_bytes, copied[0].body) == (0, b"")
            may_end.set()
            assert (await asking)[0] == 200
        assert running.proxy._num_bytes == 0

    fleet(test)


def test_a_chat_without_room_for_its_ids_is_sent_as_it_came() -> None:
    turn = json.dumps(body(QUESTION)).encode()

    async def test(running: Running, _: Vllm, __: kvtrie.TurnTracker) -> None:
        assert (await running.post(turn))[0] == 200
        assert running.router.asked[0][3] == turn
        assert running.proxy.counts == {"requests": 1, "routed": 1, "unspliced: no room": 1}
        assert running.proxy._num_bytes == 0

    fleet(test, max_bytes=2 * len(turn))
