"""Which value of `X-SMG-Target-Worker` names a worker of SMG.

Under the policy `consistent_hashing` SMG 1.13.0 reads the header as a position among a model's
workers that are available, in the order of their ids; other policies ignore it. `GET /workers` has
the ids. A reply has `x-smg-routed-worker-id`, the URL of the worker that it is of.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from kvtrie.fleet.documents import read_json

if TYPE_CHECKING:
    import aiohttp

TARGET: Final = "X-SMG-Target-Worker"
ROUTED: Final = "x-smg-routed-worker-id"
REFUSED: Final = "x-smg-error-code"
# The worker is none of its own, or has just died: nobody has begun, and SMG chooses no other for a
# request with the header.
NOT_BEGUN: Final = frozenset(("no_available_workers", "call_upstream_connection_failed"))
_MOST_BYTES: Final = 4 << 20


class SmgTargets:
    """The workers of an SMG, as it numbers them.

    Args:
        url: The gateway's URL.
        headers: For `GET /workers`, for instance an API key.
        max_age: Seconds after which it is asked again.
        timeout: Seconds to wait for it.
    """

    def __init__(
        self,
        url: str,
        headers: dict[str, str] | None = None,
        *,
        max_age: float = 1.0,
        timeout: float = 2.0,
    ) -> None:
        self._url = url.rstrip("/") + "/workers"
        self._headers = dict(headers or {})
        self._max_age = max_age
        self._timeout = timeout
        self._known: list[tuple[str, frozenset[str]]] = []
        self._asked = float("-inf")
        self._asking = asyncio.Lock()

    def expire(self) -> None:
        """What is known is wrong: ask before the next choice."""
        self._asked = float("-inf")

    async def of(self, session: aiohttp.ClientSession, model: str) -> dict[str, str]:
        """The header's value for each worker of a model, by the worker's URL.

        Empty if the gateway does not answer, or in another form.

        Args:
            session: A session.
            model: The model's name in requests.
        """
        # One request asks, and all that come meanwhile wait for the answer.
        async with self._asking:
            asked = time.monotonic()
            if asked - self._asked > self._max_age:
                self._asked = asked
                try:
                    self._known = await self._read(session)
                except asyncio.CancelledError:
                    self.expire()
                    raise
        urls = [url for url, models in self._known if model in models]
        return {url: str(at) for at, url in enumerate(urls)}

    async def _read(self, session: aiohttp.ClientSession) -> list[tuple[str, frozenset[str]]]:
        import aiohttp  # noqa: PLC0415 - the extra is asked for by the proxy

        timeout = aiohttp.ClientTimeout(total=self._timeout)
        try:
            async with session.get(self._url, headers=self._headers, timeout=timeout) as reply:
                raw = bytearray()
                async for piece in reply.content.iter_any():
                    raw += piece
                    if len(raw) > _MOST_BYTES:
                        return []
                return _available(read_json(bytes(raw))) if reply.status == 200 else []
        except (aiohttp.ClientError, TimeoutError):
            return []
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            # In another form.
            return []


def _available(document: Any) -> list[tuple[str, frozenset[str]]]:  # noqa: ANN401 - any JSON
    """The URLs of the workers that may be chosen, in SMG's order, with the models of each."""
    workers = sorted(document["workers"], key=lambda worker: str(worker["id"]))
    return [
        (
            str(worker["url"]).rstrip("/"),
            frozenset([worker.get("model_id"), *(one["id"] for one in worker.get("models") or ())]),
        )
        for worker in workers
        if worker.get("is_healthy") and worker.get("status", "ready") == "ready"
    ]
