"""A proxy that records what prompts have in common, in front of any OpenAI-compatible engine.

    python examples/recording_proxy.py http://127.0.0.1:8000 --tokenizer MODEL --log kvtrie.log

It needs `kvtrie[cli]`, no torch. It listens on 127.0.0.1 and passes every request on. Chat
completions and completions, streamed or not, are tokenized after the reply has been sent, and
recorded by digests: no text, no token ids (`--content tokens` writes the ids). Then
`kvtrie replay kvtrie.log` says what a cache would find (`docs/record.md`, `docs/replay.md`).

**What passes.** Statuses, headers and bytes as they are, and errors of the engine too. A reply that
breaks off breaks off for the client; a client that hangs up ends the request at the engine, when
the next piece of its reply comes. The proxy's own errors are 502 (no reply of the engine), 411
and 400 (a body of unknown length).

**What is recorded.** Replies with status 200, with the first choice. Not requests with several
prompts, pictures or bodies over 8 MiB; those pass all the same. `counts` has how many and why. The
session is `kv_transfer_params.session` or `prompt_cache_key`, the salt `cache_salt`.

**Limits.** The tokenizer must be the engine's, and so must the chat template; `prompt of another
length` counts where the engine's `usage` shows that they are not. Ids of replies are those of their
text, where the engine may have sampled others. A request takes a thread and about 2 ms longer, and
tokenizing it 2 to 5 ms of a core per 1,000 tokens, one after the other: for a measurement, not for
a site's traffic.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
from transformers import AutoTokenizer

from kvtrie import lab
from kvtrie.record import Finished, Recorder, RecordOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_BYTES = 8 << 20
PIECE = 1 << 16
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# Of one connection, not of the message.
OWN = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization trailer transfer-encoding "
    "te upgrade host accept-encoding".split()  # codespell:ignore te: a header
)
ENDS = {"stop": "stopped", "tool_calls": "stopped", "length": "length"}


class SkippedError(ValueError):
    """A request is not recorded; the message says why."""


@dataclass
class Exchange:
    """A request and as much of its reply as has come, in bytes."""

    path: str
    arrived: float = field(default_factory=time.time)
    first_byte: float | None = None
    is_stream: bool = False
    ended: str = ""  # if it did not end by itself
    asked: list[bytes] = field(default_factory=list)
    replied: list[bytes] = field(default_factory=list)
    size: int = 0

    def add(self, piece: bytes) -> None:
        """A piece of the reply has come."""
        self.first_byte = self.first_byte or time.time()
        self.size += len(piece)
        if self.size <= MOST_BYTES:
            self.replied.append(piece)

    def body(self) -> dict[str, Any]:
        """The request."""
        return _document(self.asked)

    def reply(self) -> tuple[dict[str, Any], str, dict[str, Any]]:
        """The first choice as one message, how it ended, and the usage."""
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        calls: dict[int, dict[str, Any]] = {}
        finish = ""
        usage: dict[str, Any] = {}
        for event in self._events():
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                if choice.get("index", 0):
                    continue
                finish = choice.get("finish_reason") or finish
                part = choice.get("delta") or choice.get("message") or {}
                message["content"] += part.get("content") or choice.get("text") or ""
                reasoning = part.get("reasoning_content") or part.get("reasoning") or ""
                if reasoning:
                    before = message.get("reasoning_content", "")
                    message["reasoning_content"] = before + reasoning
                for number, call in enumerate(part.get("tool_calls") or ()):
                    known = calls.setdefault(
                        call.get("index", number), {"name": "", "arguments": ""}
                    )
                    for name, text in (call.get("function") or {}).items():
                        known[name] = known.get(name, "") + (text or "")
        if calls:
            message["tool_calls"] = [
                {"type": "function", "function": calls[at]} for at in sorted(calls)
            ]
        return message, finish, usage

    def _events(self) -> Iterator[dict[str, Any]]:
        if not self.is_stream:
            # Of a reply that broke off nothing can be read.
            yield from [] if self.ended else [_document(self.replied)]
            return
        for line in b"".join(self.replied).splitlines(keepends=True):
            # The last line of a stream that broke off may be cut.
            if line.startswith(b"data:") and line.endswith(b"\n") and b"[DONE]" not in line:
                yield _document([line[5:]])


class Prompts:
    """Tokenizes exchanges as the engine does."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - transformers has no types for them
        self._template = lab.Template(tokenizer)

    def finished(self, exchange: Exchange, name: str) -> tuple[Finished, int | None]:
        """What a recorder is given, and the length of the prompt where the engine says it.

        Raises:
            SkippedError: It cannot be recorded.
        """
        if exchange.size > MOST_BYTES:
            msg = "a long reply"
            raise SkippedError(msg)
        body = exchange.body()
        message, finish, usage = exchange.reply()
        read = self._chat if exchange.path == CHAT else self._text
        prompt, reply = read(body, message)
        given = body.get("kv_transfer_params") or {}
        session = given.get("session") or body.get("prompt_cache_key")
        found = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        first = exchange.first_byte if exchange.is_stream else None
        tokens = [*prompt, *reply]
        tagger = self._template.tagger if exchange.path == CHAT else None
        one = Finished(
            tokens=np.array(tokens, np.uint32),
            num_prompt=len(prompt),
            request_id=name,
            arrived=exchange.arrived,
            first_token=None if first is None else first - exchange.arrived,
            took=time.time() - exchange.arrived,
            ended=exchange.ended or ENDS.get(finish, "other"),
            session=None if session is None else str(session),
            salt=body.get("cache_salt"),
            adapter=body.get("model"),
            spans=() if tagger is None else tagger.spans(tokens),
            reused=[(0, found, "exact")] if 0 < found <= len(prompt) else (),
        )
        return one, usage.get("prompt_tokens")

    def _chat(self, body: dict[str, Any], reply: dict[str, Any]) -> tuple[list[int], list[int]]:
        messages = tuple(
            {**message, "content": _joined(message.get("content"))}
            for message in body.get("messages") or ()
        )
        template = copy.copy(self._template)
        template.arguments = dict(body.get("chat_template_kwargs") or {})
        chat = lab.Chat("request", (), tuple(body.get("tools") or ()))
        try:
            rendered = template.render(chat, lab.ClientRequest(messages, reply))
        except lab.TemplateError as error:
            msg = "refused by the chat template"
            raise SkippedError(msg) from error
        said = reply["content"] or reply.get("reasoning_content") or reply.get("tool_calls")
        return rendered.ids, rendered.sampled if said else []

    def _text(self, body: dict[str, Any], reply: dict[str, Any]) -> tuple[list[int], list[int]]:
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            ids = list(self._template.tokenizer.encode(prompt))
        elif isinstance(prompt, list) and all(isinstance(one, int) for one in prompt):
            ids = prompt
        else:
            msg = "several prompts"
            raise SkippedError(msg)
        return ids, self._template.encode(reply["content"])


class Proxy(ThreadingHTTPServer):
    """Passes requests on to an engine, and records them.

    Args:
        upstream: The engine's URL.
        prompts: Tokenizes as the engine does.
        recorder: Takes the requests; the caller closes it.
        port: On 127.0.0.1; 0: any free one.
        timeout: Seconds to wait for the engine's next bytes.
    """

    daemon_threads = True

    def __init__(
        self,
        upstream: str,
        prompts: Prompts,
        recorder: Recorder,
        *,
        port: int = 0,
        timeout: float = 600,
    ) -> None:
        self.upstream = urlsplit(upstream)
        if self.upstream.scheme not in ("http", "https") or not self.upstream.hostname:
            msg = f"the engine's URL must be like http://127.0.0.1:8000, not {upstream!r}"
            raise ValueError(msg)
        self.seconds = timeout
        self.counts: Counter[str] = Counter()
        self._prompts = prompts
        self._recorder = recorder
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", port), Handler)

    def connect(self) -> HTTPConnection:
        """A connection to the engine."""
        kind = HTTPSConnection if self.upstream.scheme == "https" else HTTPConnection
        return kind(str(self.upstream.hostname), self.upstream.port, timeout=self.seconds)

    def record(self, exchange: Exchange) -> None:
        """Record an exchange that is over; whatever it has in it, the proxy goes on."""
        with self._lock:
            self.counts["requests"] += 1
            name = f"proxy-{self.counts['requests']}"
        try:
            one, num_prompt = self._prompts.finished(exchange, name)
            noted = "recorded" if self._recorder.put(one) else "dropped"
            if num_prompt not in (None, one.num_prompt):
                self.count("prompt of another length")
        except SkippedError as error:
            noted = f"not recorded: {error}"
        except (AttributeError, KeyError, TypeError, ValueError):
            noted = "not recorded: not of the API's form"
        self.count(noted)

    def count(self, what: str) -> None:
        """Add one."""
        with self._lock:
            self.counts[what] += 1

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as the library's
        """A client that is lost between two requests is nobody's error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_GET(self) -> None:
        """Pass a request on."""
        try:
            length = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            length = -1
        if "Transfer-Encoding" in self.headers:
            self._refuse(411, "the proxy needs a Content-Length")
        elif length < 0:
            self._refuse(400, "the Content-Length is not a length")
        else:
            self._forward(length)

    do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815 - likewise

    def _forward(self, length: int) -> None:
        path = self.path.split("?")[0]
        exchange = Exchange(path) if path in (CHAT, TEXT) and self.command == "POST" else None
        if exchange is not None and length > MOST_BYTES:
            self.server.count("not recorded: a long request")
            exchange = None
        self._has_begun = False
        upstream = self.server.connect()
        try:
            reply = self._ask(upstream, length, exchange)
            if reply.status != 200:
                exchange = None
            self._pass_on(reply, exchange)
        except ClientGoneError:
            self.close_connection = True
            if exchange is not None:
                exchange.ended = "aborted"
        except (OSError, HTTPException) as error:
            if not self._has_begun:
                exchange = None
                self._refuse(502, f"no reply of the engine: {str(error) or repr(error)}")
            # Else the client's reply breaks off, as the engine's did.
            self.close_connection = True
            if exchange is not None:
                exchange.ended = "other"
        finally:
            upstream.close()
        if exchange is not None:
            self.server.record(exchange)

    def _ask(
        self, upstream: HTTPConnection, length: int, exchange: Exchange | None
    ) -> HTTPResponse:
        """Send the request on, and wait for the head of the reply."""
        path = self.server.upstream.path.rstrip("/") + self.path
        upstream.putrequest(self.command, path, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in OWN:
                upstream.putheader(name, value)
        upstream.endheaders()
        while length:
            with _client():
                piece = self.rfile.read(min(PIECE, length))
                if not piece:
                    raise ConnectionAbortedError
            length -= len(piece)
            if exchange is not None:
                exchange.asked.append(piece)
            try:
                upstream.send(piece)
            except (BrokenPipeError, ConnectionResetError):
                # It may have answered without reading all of a body that it refuses.
                self.close_connection = True
                break
        return upstream.getresponse()

    def _pass_on(self, reply: HTTPResponse, exchange: Exchange | None) -> None:
        """Send the reply on as it comes."""
        is_chunked = reply.getheader("Content-Length") is None and reply.status not in (204, 304)
        self._has_begun = True
        if exchange is not None:
            kind = reply.getheader("Content-Type") or ""
            exchange.is_stream = kind.startswith("text/event-stream")
        self.send_response_only(reply.status, reply.reason)
        for name, value in reply.getheaders():
            if name.lower() not in OWN:
                self.send_header(name, value)
        if is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        if self.close_connection:
            self.send_header("Connection", "close")
        with _client():
            self.end_headers()
        while piece := reply.read1(PIECE):
            if exchange is not None:
                exchange.add(piece)
            with _client():
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece)
        if reply.length:
            msg = f"the reply lacks {reply.length} bytes"
            raise HTTPException(msg)
        if is_chunked:
            with _client():
                self.wfile.write(b"0\r\n\r\n")

    def _refuse(self, status: int, why: str) -> None:
        """An error of the proxy's own, in the API's form."""
        body = json.dumps(
            {"error": {"message": why, "type": "proxy_error", "code": status}}
        ).encode()
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.send_response_only(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)


class ClientGoneError(Exception):
    """The client has hung up."""


@contextlib.contextmanager
def _client() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ClientGoneError from error


def _document(parts: list[bytes]) -> dict[str, Any]:
    found = json.loads(b"".join(parts))
    if not isinstance(found, dict):
        msg = "not a JSON object"
        raise TypeError(msg)
    return found


def _joined(content: object) -> object:
    """The text of a message; engines join text parts."""
    if not isinstance(content, list):
        return content or ""
    if any(part.get("type") != "text" for part in content):
        msg = "a message has more than text"
        raise SkippedError(msg)
    return "".join(part["text"] for part in content)


def main(arguments: list[str]) -> None:
    """Serve until Ctrl-C, then print what was recorded."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("upstream", help="URL of the engine")
    parser.add_argument("--tokenizer", required=True, help="directory of the engine's model")
    parser.add_argument("--log", required=True, help="file to write")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--block-size", type=int, default=16, help="the engine's")
    parser.add_argument("--content", choices=("digests", "tokens"), default="digests")
    parser.add_argument("--rate", type=float, default=1.0, help="share of the sessions")
    given = parser.parse_args(arguments)
    if not Path(given.tokenizer).is_dir():
        parser.error(f"--tokenizer {given.tokenizer} is not a directory")
    options = RecordOptions(path=given.log, content=given.content, rate=given.rate)
    options.check_files()
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer, local_files_only=True)
    recorder = Recorder(
        options, block_size=given.block_size, engine=given.upstream, model=given.tokenizer
    )
    try:
        proxy = Proxy(given.upstream, Prompts(tokenizer), recorder, port=given.port)
    except (ValueError, OSError, OverflowError) as error:  # no URL; a port that is taken, or none
        recorder.close()
        parser.error(f"{given.upstream}, port {given.port}: {error}")
    print(f"http://127.0.0.1:{proxy.server_port} -> {given.upstream}", flush=True)
    try:
        proxy.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        proxy.server_close()
        recorder.close()
    for what, number in sorted(proxy.counts.items()):
        print(f"{what}: {number}")


if __name__ == "__main__":
    main(sys.argv[1:])
