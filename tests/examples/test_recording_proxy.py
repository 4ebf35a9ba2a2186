"""The recording proxy, between a client and an engine that says what a test tells it to."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from http.client import HTTPConnection, HTTPException, IncompleteRead
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from examples import recording_proxy
from kvtrie import demo
from kvtrie.record import Log, Recorder, RecordOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SYSTEM = {"role": "system", "content": "You keep the harbour's books. " * 12}
QUESTION = {"role": "user", "content": "Which ships came in on Monday, and what did they bring?"}
ANSWER = "Two ships came, the Swan with timber and the Otter with salt. " * 3
THINKING = "The books say that two ships came on Monday."
WORD = "harbour"


class Engine(ThreadingHTTPServer):
    """Answers with what `reply` writes, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), EngineHandler)
        self.reply: Callable[[EngineHandler], None] = lambda asked: asked.say(completion())
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        self.lost = threading.Event()

    def handle_error(self, *_: object) -> None:
        self.lost.set()


class EngineHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Engine

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, self.path, dict(self.headers), body))
        self.server.reply(self)

    do_GET = do_POST  # noqa: N815 - the name is that of the library

    def log_message(self, *_: object) -> None:
        pass

    def say(self, body: bytes, status: int = 200, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Engine", "fake")
        self.end_headers()
        self.wfile.write(body)

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def piece(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


def completion(**usage: Any) -> bytes:
    message = {"role": "assistant", "content": ANSWER, "reasoning_content": THINKING}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps({"choices": [choice], "usage": usage}).encode()


def event(finish: str | None = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def streamed() -> list[bytes]:
    words = [event(content=f"{word} ") for word in ANSWER.split(" ")[:-1]]
    return [event(reasoning_content=THINKING), *words, event("stop"), b"data: [DONE]\n\n"]


class Running:
    """A proxy with its engine, its log and a client."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.path = folder / "kvtrie.log"
        self.engine = Engine()
        options = RecordOptions(path=str(self.path))
        self.recorder = Recorder(options, block_size=16, engine="proxy")
        prompts = recording_proxy.Prompts(tokenizer)
        url = f"http://127.0.0.1:{self.engine.server_port}/api"
        self.proxy = recording_proxy.Proxy(url, prompts, self.recorder, timeout=20)
        self.tokenizer = tokenizer
        for server in (self.engine, self.proxy):
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def client(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.proxy.server_port, timeout=20)

    def post(self, path: str = recording_proxy.CHAT, **body: Any) -> tuple[int, bytes]:
        client = self.client()
        with contextlib.closing(client):
            client.request("POST", path, json.dumps(body))
            reply = client.getresponse()
            return reply.status, reply.read()

    def counted(self, what: str, number: int = 1) -> None:
        """A request is recorded after its reply has been sent."""
        end = time.monotonic() + 20
        while self.proxy.counts[what] < number:
            assert time.monotonic() < end, self.proxy.counts
            time.sleep(0.01)

    def records(self) -> list[Any]:
        assert self.recorder.flush()
        return list(Log(self.path)) if self.path.exists() else []

    def close(self) -> None:
        for server in (self.proxy, self.engine):
            server.shutdown()
            server.server_close()
        self.recorder.close()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.model_path(), local_files_only=True)


@pytest.fixture
def running(tmp_path: Path, tokenizer: Any) -> Iterator[Running]:
    found = Running(tmp_path, tokenizer)
    yield found
    found.close()


def test_a_request_passes_as_it_is_and_is_recorded_without_text(running: Running) -> None:
    body = {"messages": [SYSTEM, QUESTION], "kv_transfer_params": {"session": "chat-7"}}
    client = running.client()
    headers = {"Authorization": "Bearer key", "Content-Type": "application/json"}
    client.request("POST", f"{recording_proxy.CHAT}?a=1", json.dumps(body), headers)
    reply = client.getresponse()
    assert (reply.status, reply.getheader("X-Engine")) == (200, "fake")
    assert reply.read() == completion()
    client.close()
    (_, path, sent, raw) = running.engine.asked[0]
    assert path == f"/api{recording_proxy.CHAT}?a=1"
    assert sent["Authorization"] == "Bearer key"
    assert json.loads(raw) == body
    running.counted("recorded")
    (one,) = running.records()
    prompt = running.tokenizer.apply_chat_template(
        [SYSTEM, QUESTION], add_generation_prompt=True, return_dict=False
    )
    assert one.num_prompt == len(prompt)
    assert one.num_tokens > one.num_prompt + 40
    assert (one.ended, one.tokens, one.session is not None) == ("stopped", None, True)
    assert {"system", "user", "reasoning", "answer"} <= {span.kind for span in one.spans}
    text = running.path.read_text(encoding="utf-8")
    assert WORD not in text
    assert "chat-7" not in text


def test_a_stream_passes_event_by_event_and_is_recorded_like_a_whole_reply(
    running: Running,
) -> None:
    has_read = threading.Event()

    def reply(asked: EngineHandler) -> None:
        asked.begin_stream()
        first, *others = streamed()
        asked.piece(first)
        assert has_read.wait(20)
        for one in others:
            asked.piece(one)
        asked.piece(b"")

    running.engine.reply = reply
    client = running.client()
    body = {"messages": [SYSTEM, QUESTION], "stream": True}
    client.request("POST", recording_proxy.CHAT, json.dumps(body))
    answer = client.getresponse()
    assert answer.getheader("Content-Type") == "text/event-stream; charset=utf-8"
    # The engine has not sent the second event yet.
    assert answer.read1() == streamed()[0]
    has_read.set()
    assert answer.read() == b"".join(streamed()[1:])
    client.close()
    running.counted("recorded")
    running.engine.reply = lambda asked: asked.say(completion())
    running.post(messages=[SYSTEM, QUESTION])
    running.counted("recorded", 2)
    first, second = running.records()
    assert first.blocks.tolist() == second.blocks.tolist()
    assert first.num_tokens == second.num_tokens
    assert first.first_token is not None
    assert second.first_token is None


def test_the_next_turn_has_blocks_in_common(running: Running) -> None:
    reply = {"role": "assistant", "content": ANSWER, "reasoning_content": THINKING}
    running.post(messages=[SYSTEM, QUESTION])
    running.counted("recorded")
    running.post(messages=[SYSTEM, QUESTION, reply, {"role": "user", "content": "And Tuesday?"}])
    running.counted("recorded", 2)
    first, second = running.records()
    # The template keeps reasoning by default, so the next prompt only appends.
    shared = len(first.blocks)
    assert shared > 5
    assert second.blocks[:shared].tolist() == first.blocks.tolist()


def test_tool_calls_and_template_arguments(running: Running) -> None:
    calls = [
        event(tool_calls=[{"index": 0, "function": {"name": "find", "arguments": ""}}]),
        event(tool_calls=[{"index": 0, "function": {"arguments": '{"box": '}}]),
        event(tool_calls=[{"index": 0, "function": {"arguments": '"otter"}'}}]),
        event("tool_calls"),
    ]

    def reply(asked: EngineHandler) -> None:
        asked.begin_stream()
        for one in [*calls, b""]:
            asked.piece(one)

    running.engine.reply = reply
    old = {"role": "assistant", "content": ANSWER, "reasoning_content": THINKING}
    messages = [SYSTEM, QUESTION, old, QUESTION]
    running.post(messages=messages, chat_template_kwargs={"preserve_thinking": False})
    running.counted("recorded")
    (one,) = running.records()
    prompt = running.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, preserve_thinking=False, return_dict=False
    )
    assert one.num_prompt == len(prompt)
    assert [span.kind for span in one.spans].count("tool_call") == 1
    assert one.ended == "stopped"


def test_completions_of_text_and_of_ids(running: Running) -> None:
    choice = {"index": 0, "text": ANSWER, "finish_reason": "length"}
    running.engine.reply = lambda asked: asked.say(json.dumps({"choices": [choice]}).encode())
    text = "The ships came in. " * 10
    ids = running.tokenizer.encode(text)
    for number, prompt in enumerate((text, ids), start=1):
        running.post(recording_proxy.TEXT, prompt=prompt)
        running.counted("recorded", number)
    first, second = running.records()
    assert first.num_prompt == len(ids)
    assert first.ended == "length"
    assert first.blocks.tolist() == second.blocks.tolist()
    running.post(recording_proxy.TEXT, prompt=[text, text])
    running.counted("not recorded: several prompts")


@pytest.mark.parametrize("status", [400, 429, 500])
def test_an_error_of_the_engine_passes_and_is_not_recorded(running: Running, status: int) -> None:
    said = json.dumps({"error": {"message": "the engine's own words"}}).encode()
    running.engine.reply = lambda asked: asked.say(said, status)
    assert running.post(messages=[QUESTION]) == (status, said)
    assert running.proxy.counts == {}
    assert running.records() == []


def test_an_engine_that_is_not_there(running: Running) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        running.proxy.upstream = running.proxy.upstream._replace(
            netloc=f"127.0.0.1:{closed.getsockname()[1]}"
        )
        status, said = running.post(messages=[QUESTION])
    assert status == 502
    assert "no reply of the engine" in json.loads(said)["error"]["message"]
    assert running.records() == []


def test_an_engine_that_breaks_off_breaks_off_for_the_client(running: Running) -> None:
    def reply(asked: EngineHandler) -> None:
        asked.begin_stream()
        for one in streamed()[:6]:
            asked.piece(one)
        asked.connection.shutdown(socket.SHUT_RDWR)
        asked.close_connection = True

    running.engine.reply = reply
    client = running.client()
    client.request("POST", recording_proxy.CHAT, json.dumps({"messages": [QUESTION]}))
    with pytest.raises((IncompleteRead, HTTPException)):
        client.getresponse().read()
    client.close()
    running.counted("recorded")
    (one,) = running.records()
    assert one.ended == "other"
    assert one.num_tokens > one.num_prompt


def test_a_whole_reply_that_is_cut_is_cut_for_the_client(running: Running) -> None:
    def reply(asked: EngineHandler) -> None:
        asked.send_response(200)
        asked.send_header("Content-Type", "application/json")
        asked.send_header("Content-Length", str(len(completion())))
        asked.end_headers()
        asked.wfile.write(completion()[:50])
        asked.close_connection = True

    running.engine.reply = reply
    client = running.client()
    client.request("POST", recording_proxy.CHAT, json.dumps({"messages": [QUESTION]}))
    with pytest.raises(IncompleteRead):
        client.getresponse().read()
    client.close()
    running.counted("recorded")
    (one,) = running.records()
    assert (one.ended, one.num_tokens) == ("other", one.num_prompt)


def test_a_client_that_hangs_up_ends_the_request_at_the_engine(running: Running) -> None:
    def reply(asked: EngineHandler) -> None:
        asked.begin_stream()
        while True:
            asked.piece(event(content="more "))
            time.sleep(0.005)

    running.engine.reply = reply
    client = running.client()
    client.request("POST", recording_proxy.CHAT, json.dumps({"messages": [QUESTION]}))
    answer = client.getresponse()
    assert answer.read1()
    answer.close()
    client.close()
    assert running.engine.lost.wait(20)
    running.counted("recorded")
    (one,) = running.records()
    assert one.ended == "aborted"
    assert one.num_tokens > one.num_prompt


def test_a_long_body_passes_whole_and_is_not_recorded(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_proxy, "MOST_BYTES", 3000)
    long = {"role": "user", "content": "salt " * 40_000}
    assert running.post(messages=[long]) == (200, completion())
    assert json.loads(running.engine.asked[0][3]) == {"messages": [long]}
    running.counted("not recorded: a long request")
    running.engine.reply = lambda asked: asked.say(completion(padding="x" * 4000))
    status, said = running.post(messages=[QUESTION])
    assert (status, said) == (200, completion(padding="x" * 4000))
    running.counted("not recorded: a long reply")
    assert running.records() == []


def test_a_body_that_the_engine_refuses_unread(running: Running) -> None:
    """Its own 413 comes through, though it has read none of the body."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listening.accept()
        connection.recv(2000)
        connection.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 5\r\n\r\nlarge")
        connection.shutdown(socket.SHUT_WR)
        time.sleep(0.5)
        connection.close()

    threading.Thread(target=answer, daemon=True).start()
    running.proxy.upstream = running.proxy.upstream._replace(
        netloc=f"127.0.0.1:{listening.getsockname()[1]}"
    )
    status, said = running.post(messages=[{"role": "user", "content": "x" * 50_000}])
    listening.close()
    assert (status, said) == (413, b"large")


def test_bodies_that_are_not_recorded(running: Running) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    for body, why in (
        ({"messages": [{"role": "user", "content": [picture]}]}, "a message has more than text"),
        ({"messages": [{"role": "stranger", "content": "x"}]}, "refused by the chat template"),
        ({"messages": 7}, "not of the API's form"),
        ({"messages": ["x"]}, "not of the API's form"),
    ):
        before = running.proxy.counts[f"not recorded: {why}"]
        assert running.post(**body)[0] == 200
        running.counted(f"not recorded: {why}", before + 1)
    assert running.records() == []


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [("Transfer-Encoding", "chunked", 411), ("Content-Length", "many", 400)],
)
def test_a_request_without_a_length(running: Running, header: str, value: str, status: int) -> None:
    with contextlib.closing(running.client()) as client:
        client.putrequest("POST", recording_proxy.CHAT)
        client.putheader(header, value)
        client.endheaders()
        assert client.getresponse().status == status
    assert running.engine.asked == []


def test_other_paths_pass_unrecorded(running: Running) -> None:
    client = running.client()
    client.request("GET", "/v1/models")
    assert client.getresponse().read() == completion()
    client.close()
    assert running.engine.asked[0][:2] == ("GET", "/api/v1/models")
    assert running.proxy.counts == {}


def test_a_prompt_of_another_length_than_the_engine_says(running: Running) -> None:
    running.engine.reply = lambda asked: asked.say(completion(prompt_tokens=3))
    running.post(messages=[QUESTION])
    running.counted("prompt of another length")
    length = len(
        running.tokenizer.apply_chat_template(
            [QUESTION], add_generation_prompt=True, return_dict=False
        )
    )
    cached = {"cached_tokens": 7}
    said = completion(prompt_tokens=length, prompt_tokens_details=cached)
    running.engine.reply = lambda asked: asked.say(said)
    running.post(messages=[QUESTION])
    running.counted("recorded", 2)
    assert running.proxy.counts["prompt of another length"] == 1
    assert list(running.records()[1].reused) == [(0, 7, "exact")]


def test_an_url_that_is_none(tokenizer: Any, tmp_path: Path) -> None:
    recorder = Recorder(RecordOptions(path=str(tmp_path / "log")), block_size=16)
    with pytest.raises(ValueError, match=r"must be like http://127\.0\.0\.1:8000, not 'localhost'"):
        recording_proxy.Proxy("localhost", recording_proxy.Prompts(tokenizer), recorder)


@pytest.mark.parametrize(
    ("url", "model", "port", "said"),
    [
        ("http://127.0.0.1:9", "nowhere", "0", "--tokenizer nowhere is not a directory"),
        ("localhost", None, "0", "must be like http://127.0.0.1:8000, not 'localhost'"),
        ("http://127.0.0.1:9", None, "70000", "port 70000: "),
    ],
)
def test_bad_arguments_are_one_sentence(
    url: str,
    model: str | None,
    port: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--tokenizer", model or str(demo.model_path()), "--log", str(tmp_path / "log")]
    with pytest.raises(SystemExit) as ended:
        recording_proxy.main([url, *given, "--port", port])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_main_serves_until_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(proxy: recording_proxy.Proxy) -> None:
        proxy.count("recorded")
        raise KeyboardInterrupt

    monkeypatch.setattr(recording_proxy.Proxy, "serve_forever", interrupted)
    recording_proxy.main(
        [
            "http://127.0.0.1:9",
            "--tokenizer",
            str(demo.model_path()),
            "--log",
            str(tmp_path / "log"),
            "--port",
            "0",
        ]
    )
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("http://127.0.0.1:")
    assert first.endswith(" -> http://127.0.0.1:9")
    assert second == "recorded: 1"
