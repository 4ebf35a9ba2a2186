"""A proxy that tells a router which worker has most of a prompt.

    python -m kvtrie.fleet.proxy fleet.toml

It stands in front of SMG, or of another router that takes the worker's name in a header. Chat
completions and completions are tokenized and looked up in the index; the request passes on with
the header of the chosen worker, and the reply as it comes. Whatever is not known here passes
without the header and is counted, and the router decides alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import sys
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from urllib.parse import urlsplit

from kvtrie._core import SHARED, KvIndexer, Namespace
from kvtrie.cluster import subscribe
from kvtrie.fleet.chats import ChatSplicer, ReplyIds, SplicedChat, UnsplicedError
from kvtrie.fleet.dispatcher import Dispatcher, NoWorkerError, Sent
from kvtrie.fleet.documents import HeavyError, read_json
from kvtrie.fleet.prompts import CHAT, TEXT, PromptError, ServedModel, session_of
from kvtrie.fleet.smg import NOT_BEGUN, REFUSED, ROUTED, TARGET, SmgTargets
from kvtrie.router import TurnTracker
from kvtrie.router.arguments import instance, whole

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from concurrent.futures import Future

    from multidict import CIMultiDictProxy

try:
    import aiohttp
    from aiohttp import web
    from yarl import URL
except ModuleNotFoundError as missing:
    _msg = "kvtrie.fleet.proxy needs aiohttp: pip install 'kvtrie[proxy]'"
    raise ImportError(_msg, name="aiohttp") from missing

_Made = TypeVar("_Made")

# Of one connection, not of the message.
_OWN: Final = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection trailer "
    "transfer-encoding te upgrade host content-length "  # codespell:ignore te: a header
    "expect".split()
)

# Prompts of longer bodies have threads of their own: 8 MB can take seconds, these 0.3 s.
_LONG: Final = 256 << 10


class _GoneError(Exception):
    """The client does not take its reply."""


@dataclass
class _Body:
    """What a request says, until it is dropped, and how many bytes of it count as in flight.

    ``chat``: what is sent in its place, which counts too.
    """

    text: bytes = b""
    counted: int = 0
    chat: SplicedChat | None = None


class _RefusedError(Exception):
    """A request is not taken."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True)
class _Choice:
    """Where a request goes, and what is sent in place of it.

    Attributes:
        sent: What the dispatcher counts; None if nobody was chosen.
        target: The header's value; None without.
        chat: The request with ids; None if it goes as it came.
    """

    sent: Sent | None = None
    target: str | None = None
    chat: SplicedChat | None = None


class Targets(Protocol):
    """Says which value of the header names a worker."""

    async def of(self, session: aiohttp.ClientSession, model: str) -> Mapping[str, str]:
        """The header's value for each worker of a model that may be chosen, by its name."""

    def expire(self) -> None:
        """What is known is wrong."""


class FixedTargets:
    """The same values at all times, for routers that know workers by names.

    Args:
        values: The header's value for each worker, by its name.
    """

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)

    async def of(self, session: aiohttp.ClientSession, model: str) -> Mapping[str, str]:  # noqa: ARG002 - as the protocol says
        """The header's value for each worker."""
        return self._values

    def expire(self) -> None:
        """They are fixed."""


class Proxy:
    """Passes requests on to a router, with the header of the worker that has most of the prompt.

    A client's own header is not passed on. Errors of the proxy's own are in OpenAI's form with the
    type `proxy_error`: 413 for a body over `max_body`, 415 for a compressed one, 408 for one that
    does not come in `body_timeout`, 503 for a request over `max_requests` or `max_bytes`, 502 and
    504 for a router that does not answer. A reply that breaks off breaks off for the client, and a
    client that hangs up ends the request at the router.

    Args:
        upstream: The router's URL.
        dispatcher: Chooses among the workers of its index.
        models: By the model's name in requests.
        targets: The header's values; None asks `upstream` as an SMG.
        header: The header.
        tracker: Keeps the ids of replies, and chats are sent with them in place of those that their
            text is encoded to; only for vLLM. None: all requests pass byte for byte.
        max_body: Most bytes of a request.
        max_bytes: Most bytes of the bodies of all requests whose replies have not begun, with the
            chats that are made of them.
        max_requests: Most requests at a time.
        tokenizers: Threads that tokenize, and as many for bodies over 256 KiB, so that prompts of
            usual lengths do not wait for long ones.
        body_timeout: Seconds for a request's body.
        prompt_timeout: Seconds for tokenizing and choosing; then the request passes without.
        keep_timeout: Seconds that the end of a reply waits until its ids are kept; they are kept
            one reply at a time.
        timeout: Seconds to wait for the router's next bytes, and for the client to take them.

    Attributes:
        counts: `requests`; `routed`, of which `retried` without the header, because the router did
            not reach the worker, and `elsewhere`, where the router says that another served it;
            `passed`, for paths without prompts; `unrouted: ` with the reason; `refused: ` with the
            status; `gone` clients, and `broken` replies. With a tracker each routed chat is
            `spliced`, sent as ids, or `unspliced: ` with the reason, and one that the engine
            refuses as ids is both; its reply is `kept`, or `not kept: ` with the reason.

    Raises:
        TypeError: A number has the wrong type. With a tracker, a tokenizer lacks what
            `PromptSplicer` needs.
        ValueError: The URL is not one of http, or a number is outside its limits.
    """

    def __init__(
        self,
        upstream: str,
        dispatcher: Dispatcher,
        models: Mapping[str, ServedModel],
        *,
        targets: Targets | None = None,
        header: str = TARGET,
        tracker: TurnTracker | None = None,
        max_body: int = 8 << 20,
        max_bytes: int = 1 << 30,
        max_requests: int = 1024,
        tokenizers: int = 2,
        body_timeout: float = 30.0,
        prompt_timeout: float = 5.0,
        keep_timeout: float = 0.1,
        timeout: float = 600.0,
    ) -> None:
        if not _is_base(upstream):
            msg = f"Proxy: upstream is {upstream!r}; it must be like http://127.0.0.1:30000"
            raise ValueError(msg)
        for name, number, most in (
            ("max_body", max_body, 1 << 30),
            ("max_bytes", max_bytes, 1 << 40),
            ("max_requests", max_requests, 1 << 20),
            ("tokenizers", tokenizers, 64),
        ):
            whole("Proxy", name, number, 1, most)
        for name, seconds in (
            ("body_timeout", body_timeout),
            ("prompt_timeout", prompt_timeout),
            ("keep_timeout", keep_timeout),
            ("timeout", timeout),
        ):
            instance("Proxy", name, seconds, (int, float), "a number of seconds")
            if not 0.001 <= seconds <= 1e6:
                msg = f"Proxy: {name} is {seconds}; it must be in [0.001, 1000000.0]"
                raise ValueError(msg)
        self.counts: Counter[str] = Counter()
        self._upstream = upstream.rstrip("/")
        self._dispatcher = dispatcher
        self._models = dict(models)
        self._splicers: dict[str, ChatSplicer] = {}
        if tracker is not None:
            self._splicers = {name: ChatSplicer(one, tracker) for name, one in models.items()}
        self._targets = SmgTargets(upstream) if targets is None else targets
        self._header = header
        self._max_body = max_body
        self._max_bytes = max_bytes
        self._max_requests = max_requests
        self._body_timeout = body_timeout
        self._prompt_timeout = prompt_timeout
        self._keep_timeout = keep_timeout
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=timeout)
        self._threads = ThreadPoolExecutor(tokenizers, "kvtrie-prompts")
        self._long = ThreadPoolExecutor(tokenizers, "kvtrie-long-prompts")
        self._lanes = tuple(asyncio.Semaphore(2 * tokenizers) for _ in range(2))
        # The end of a reply must not wait for prompts of others.
        self._keeper = ThreadPoolExecutor(1, "kvtrie-replies")
        self._in_flight = 0
        self._num_bytes = 0
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen.

        Args:
            host: The address.
            port: The port; 0: any free one.

        Returns:
            The port.
        """
        self._session = aiohttp.ClientSession(
            timeout=self._timeout,
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding", "User-Agent", "Content-Type", "Accept"),
        )
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        found: int = self._runner.addresses[0][1]
        return found

    async def close(self) -> None:
        """Stop listening, and end what is in flight after a second."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()
        for threads in (self._threads, self._long, self._keeper):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.counts["requests"] += 1
        if self._in_flight >= self._max_requests:
            return self._refuse(503, f"{self._in_flight} requests are in flight, the most allowed")
        self._in_flight += 1
        body, choice = _Body(), _Choice()
        try:
            await self._take(request, body)
            choice = await self._choose(request, body.text)
            self._note(body, choice.chat)
            return await self._pass_on(request, body, choice)
        except _RefusedError as error:
            return self._refuse(error.status, str(error))
        finally:
            self._in_flight -= 1
            self._drop(body)
            if choice.sent is not None:
                choice.sent.end()

    def _note(self, body: _Body, chat: SplicedChat | None) -> None:
        if chat is not None:
            body.chat = chat
            body.counted += len(chat.body)
            self._num_bytes += len(chat.body)

    def _drop(self, body: _Body) -> None:
        self._num_bytes -= body.counted
        body.text, body.counted = b"", 0
        if body.chat is not None:
            body.chat.body = b""

    async def _take(self, request: web.Request, body: _Body) -> None:
        """Read a request's body. What has been read counts until it is dropped."""
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise _RefusedError(415, "the request is compressed")
        too_large = _RefusedError(413, f"the request has more than {self._max_body} bytes")
        if (request.content_length or 0) > self._max_body:
            raise too_large
        pieces = bytearray()
        try:
            async with asyncio.timeout(self._body_timeout):
                async for piece in request.content.iter_any():
                    pieces += piece
                    body.counted += len(piece)
                    self._num_bytes += len(piece)
                    if body.counted > self._max_body:
                        raise too_large
                    if self._num_bytes > self._max_bytes:
                        why = f"requests in flight have more than {self._max_bytes} bytes"
                        raise _RefusedError(503, why)
                body.text = bytes(pieces)
        except TimeoutError as error:
            why = f"the request has not come in {self._body_timeout} s"
            raise _RefusedError(408, why) from error

    async def _choose(self, request: web.Request, body: bytes) -> _Choice:
        if request.method != "POST" or request.path not in (CHAT, TEXT):
            self.counts["passed"] += 1
            return _Choice()
        try:
            async with asyncio.timeout(self._prompt_timeout):
                return await self._route(request, body)
        except PromptError as error:
            reason = str(error)
        except NoWorkerError:
            reason = "no worker"
        except TimeoutError:
            reason = "tokenizing took too long"
        self.counts[f"unrouted: {reason}"] += 1
        return _Choice()

    async def _route(self, request: web.Request, body: bytes) -> _Choice:
        is_long = len(body) > _LONG
        threads = self._long if is_long else self._threads
        # Else all documents would be read before the first prompt is tokenized, and held till then.
        async with self._lanes[is_long]:
            return await self._in_lane(threads, request, body)

    async def _in_lane(
        self, threads: ThreadPoolExecutor, request: web.Request, body: bytes
    ) -> _Choice:
        loop = asyncio.get_running_loop()
        if self._session is None:
            msg = "the proxy is closed"
            raise PromptError(msg)
        document = await loop.run_in_executor(threads, _document, body)
        name = document.get("model")
        model = self._models.get(name) if isinstance(name, str) else None
        if model is None or not isinstance(name, str):
            msg = "unknown model"
            raise PromptError(msg)
        targets = await self._targets.of(self._session, name)
        path = request.path
        splicer = self._splicers.get(name) if path == CHAT else None
        session = session_of(document, request.headers)
        choosing = threads.submit(self._send, model, splicer, path, document, targets, session)
        try:
            sent, chat, why_text = await asyncio.wrap_future(choosing)
        except asyncio.CancelledError:
            # What has been counted as sent, or will be in a moment, is not sent.
            choosing.add_done_callback(_take_back)
            raise
        # From here on nothing waits: what is counted as sent is sent, and what has room is noted.
        if chat is not None and self._num_bytes + len(chat.body) > self._max_bytes:
            chat, why_text = None, "no room"
        self.counts["routed"] += 1
        if splicer is not None:
            self.counts["spliced" if why_text is None else f"unspliced: {why_text}"] += 1
        return _Choice(sent, targets[sent.worker], chat)

    def _send(
        self,
        model: ServedModel,
        splicer: ChatSplicer | None,
        path: str,
        document: dict[str, Any],
        targets: Mapping[str, str],
        session: str | None,
    ) -> tuple[Sent, SplicedChat | None, str | None]:
        """Choose for a prompt; the request with ids, or None, and why its prompt goes as text."""
        chat, why_text = None, None
        if splicer is not None:
            try:
                chat = _known(splicer.splice, document)
                why_text = chat.why_text
            except UnsplicedError as error:
                why_text = str(error)
        prompt = _known(model.prompt, path, document) if chat is None else chat.prompt
        moved_end = model.moved_end(prompt) if self._dispatcher.moves else None
        sent = self._dispatcher.choose(prompt, targets, session=session, moved_end=moved_end)
        return sent, chat, why_text

    async def _pass_on(
        self, request: web.Request, body: _Body, choice: _Choice
    ) -> web.StreamResponse:
        """Ask the router.

        It is asked again without the header if it does not reach the worker, and with the client's
        own request if the engine refuses what was made of it.
        """
        reply: web.StreamResponse | None = None
        sent, value, chat = choice.sent, choice.target, choice.chat
        while True:
            try:
                async with self._ask(request, body.text, value, chat) as upstream:
                    not_begun = upstream.headers.get(REFUSED) in NOT_BEGUN
                    if value is not None and upstream.status in (500, 503) and not_begun:
                        self.counts["retried"] += 1
                        self._targets.expire()
                        if sent is not None:
                            sent.end()
                        value = None
                        continue
                    if chat is not None and upstream.status in (400, 422):
                        self.counts["unspliced: refused by the engine"] += 1
                        chat = None
                        continue
                    routed = upstream.headers.get(ROUTED, "").rstrip("/")
                    if value is not None and sent is not None and routed not in ("", sent.worker):
                        self.counts["elsewhere"] += 1
                        self._targets.expire()
                        sent.end()
                    reply = web.StreamResponse(
                        status=upstream.status,
                        reason=upstream.reason,
                        headers=_kept(upstream.headers),
                    )
                    # Nothing is asked again. A reply may take minutes.
                    self._drop(body)
                    await self._copy(request, upstream, reply, sent, chat)
                    return reply
            except (aiohttp.ClientError, TimeoutError) as error:
                return self._broken(request, reply, error)

    def _ask(
        self, request: web.Request, body: bytes, value: str | None, chat: SplicedChat | None
    ) -> Any:  # noqa: ANN401 - a context manager of aiohttp
        if self._session is None:
            msg = "the proxy is closed"
            raise aiohttp.ClientConnectionError(msg)
        # The ids are read in the reply, so it must not be compressed.
        left_out = {self._header.lower(), *(("accept-encoding",) if chat is not None else ())}
        headers = [
            (name, text) for name, text in _kept(request.headers) if name.lower() not in left_out
        ]
        if value is not None:
            headers.append((self._header, value))
        return self._session.request(
            request.method,
            # As it came: a path that is made into another may be one that was not allowed.
            URL(self._upstream + request.rel_url.raw_path_qs, encoded=True),
            data=(body if chat is None else chat.body) or None,
            headers=headers,
            allow_redirects=False,
        )

    async def _copy(
        self,
        request: web.Request,
        upstream: aiohttp.ClientResponse,
        reply: web.StreamResponse,
        sent: Sent | None,
        chat: SplicedChat | None,
    ) -> None:
        """Send a reply on as it comes; that of a chat without the ids in it, which are kept."""
        reading: ReplyIds | None = None
        if chat is not None and upstream.status == 200:
            streams = upstream.content_type == "text/event-stream"
            reading = ReplyIds(streams, chat.shows_ids)
        length = upstream.headers.get("Content-Length")
        if length is not None and reading is None:
            reply.headers["Content-Length"] = length
        try:
            await self._taken(reply.prepare(request))
            async for piece in upstream.content.iter_any():
                if sent is not None:
                    sent.computed()
                passes = piece if reading is None else reading.feed(piece)
                if chat is not None and reading is not None and reading.ended:
                    # Before the client has the end, and may send its next turn.
                    await self._keep(chat, reading)
                    chat = None
                if passes:
                    await self._taken(reply.write(passes))
            if reading is not None:
                passes = reading.rest()
                if chat is not None:
                    await self._keep(chat, reading)
                await self._taken(reply.write(passes))
            await self._taken(reply.write_eof())
        except _GoneError:
            # With the response the router's connection ends.
            self.counts["gone"] += 1
            _abort(request)

    async def _keep(self, chat: SplicedChat, reading: ReplyIds) -> None:
        """Keep the ids of a reply, for which its end waits a moment."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._keep_timeout):
                # If it is too late, what has not begun is dropped; what has is kept in a while.
                why = await loop.run_in_executor(self._keeper, chat.splicer.keep, chat, reading)
        except TimeoutError:
            why = "late"
        self.counts["kept" if why is None else f"not kept: {why}"] += 1

    async def _taken(self, writing: Awaitable[Any]) -> None:
        """Wait until a client has taken what was written, but not for ever."""
        try:
            async with asyncio.timeout(self._timeout.sock_read):
                await writing
        except (ConnectionError, TimeoutError) as error:
            raise _GoneError from error

    def _broken(
        self, request: web.Request, reply: web.StreamResponse | None, error: Exception
    ) -> web.StreamResponse:
        if reply is None or not reply.prepared:
            status = 504 if isinstance(error, TimeoutError) else 502
            return self._refuse(status, f"no reply of the router: {str(error) or repr(error)}")
        self.counts["broken"] += 1
        # Not the end of a reply: the client must not take what it has for the whole.
        _abort(request)
        return reply

    def _refuse(self, status: int, why: str) -> web.Response:
        self.counts[f"refused: {status}"] += 1
        error = {"message": why, "type": "proxy_error", "param": None, "code": status}
        return web.json_response({"error": error}, status=status)


def _is_base(url: str) -> bool:
    """Whether paths can be appended to a URL."""
    try:
        split = urlsplit(url)
        # A port that is none raises where it is read.
        has_port = split.port is None or split.port > 0
    except ValueError:
        return False
    is_http = split.scheme in ("http", "https") and bool(split.hostname)
    return is_http and has_port and not split.query and not split.fragment


def _take_back(choosing: Future[tuple[Sent, SplicedChat | None, str | None]]) -> None:
    if not choosing.cancelled() and choosing.exception() is None:
        choosing.result()[0].end()


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _document(body: bytes) -> dict[str, Any]:
    try:
        found = read_json(body)
    except HeavyError as error:
        raise PromptError(str(error)) from error
    except (ValueError, RecursionError) as error:
        msg = "not JSON"
        raise PromptError(msg) from error
    if not isinstance(found, dict):
        msg = "not JSON"
        raise PromptError(msg)
    return found


def _known(making: Callable[..., _Made], *arguments: object) -> _Made:
    """What is made of a request by a template and a tokenizer."""
    try:
        return making(*arguments)
    except (PromptError, UnsplicedError):
        raise
    except Exception as error:
        # A tokenizer may raise anything; the request passes, and the router decides alone.
        msg = f"tokenizing failed: {type(error).__name__}"
        raise PromptError(msg) from error


def _kept(headers: CIMultiDictProxy[str]) -> list[tuple[str, str]]:
    """The headers of the message, without those of the connection."""
    named = ",".join(headers.getall("Connection", [])).lower().split(",")
    own = _OWN.union(name.strip() for name in named)
    return [(name, text) for name, text in headers.items() if name.lower() not in own]


# Seconds that the command keeps the ids of a reply.
_KEPT_FOR: Final = 3600.0
# Of each table: what it must have, and what it may have.
_TABLES: Final = {
    "settings": ({"upstream", "key_file", "block_size", "model", "workers"}, {"host", "port"}),
    "model": ({"name", "tokenizer"}, {"salt", "shared", "splice", "template_arguments"}),
    "workers": ({"url", "events"}, {"replay", "snapshot"}),
}


def _check_settings(settings: dict[str, Any]) -> None:
    _check_table("settings", settings)
    _check_table("model", settings["model"])
    if not settings["model"].get("shared") and "salt" not in settings["model"]:
        msg = "model: a salt is missing, or shared = true"
        raise ValueError(msg)
    splice = settings["model"].get("splice", False)
    if not isinstance(splice, bool):
        msg = f"model: splice is {splice!r}; it must be true or false"
        raise ValueError(msg)  # noqa: TRY004 - as all that is wrong in the file
    if not isinstance(settings["workers"], list):
        msg = f"workers: a list of tables is needed, not {settings['workers']!r}"
        raise ValueError(msg)  # noqa: TRY004 - as all that is wrong in the file
    for worker in settings["workers"]:
        _check_table("workers", worker)


def _check_table(where: str, table: object) -> None:
    if not isinstance(table, dict):
        msg = f"{where}: a table is needed, not {table!r}"
        raise ValueError(msg)  # noqa: TRY004 - as all that is wrong in the file
    needed, possible = _TABLES[where]
    missing, unknown = needed - table.keys(), table.keys() - needed - possible
    if missing or unknown:
        msg = f"{where}: missing {sorted(missing)}, unknown {sorted(unknown)}"
        raise ValueError(msg)


async def serve(settings: dict[str, Any]) -> None:
    """Run a proxy by the settings of a file, until it is cancelled.

    Args:
        settings: As `docs/cluster.md` describes them.

    Raises:
        ValueError: A setting is missing, unknown or no table.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - it is slow to import

    _check_settings(settings)
    model = settings["model"]
    space = Namespace(model=model["name"], salt=SHARED if model.get("shared") else model["salt"])
    key = await asyncio.to_thread(Path(settings["key_file"]).read_bytes)
    # As it is: secret bytes may be a space or the end of a line.
    index = KvIndexer(settings["block_size"], key)
    tokenizer = AutoTokenizer.from_pretrained(model["tokenizer"], local_files_only=True)
    served = ServedModel(space, tokenizer, model.get("template_arguments", {}))
    with ExitStack() as stack:
        for worker in settings["workers"]:
            number = index.add_worker(worker["url"].rstrip("/"), space)
            stack.enter_context(
                subscribe(
                    index,
                    number,
                    worker["events"],
                    worker.get("replay"),
                    snapshot=worker.get("snapshot"),
                )
            )
        tracker = TurnTracker(ttl=_KEPT_FOR) if model.get("splice") else None
        proxy = Proxy(
            settings["upstream"], Dispatcher(index), {model["name"]: served}, tracker=tracker
        )
        # A collection that goes through all modules takes longer than to read any request.
        gc.collect()
        gc.freeze()
        try:
            port = await proxy.start(settings.get("host", "127.0.0.1"), settings.get("port", 8001))
            sys.stdout.write(f"port {port} -> {settings['upstream']}\n")
            sys.stdout.flush()
            await asyncio.Event().wait()
        finally:
            await proxy.close()
            for what, number in sorted(proxy.counts.items()):
                sys.stdout.write(f"{what}: {number}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until Ctrl-C, then print the counts."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("settings", help="TOML file")
    given = parser.parse_args(arguments)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(tomllib.loads(Path(given.settings).read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
