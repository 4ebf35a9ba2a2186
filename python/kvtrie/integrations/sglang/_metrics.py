"""Counters of the cache in SGLang's metrics, with SGLang's labels."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtrie.record import Would

_STORE: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "store_requests": ("Requests that were looked up in the store.", ()),
    "store_found": ("Requests of which the store had something.", ()),
    "store_late": ("Requests for which the store took too long.", ()),
    "store_busy": ("Requests that were not looked up because too many waited.", ()),
    "store_stopped": ("Whether the store is neither read nor written any more.", ()),
    "store_tokens_exact": ("Prompt tokens whose KV came from the store, exact.", ()),
    "store_tokens_moved": ("Prompt tokens whose KV came from the store, approximate.", ()),
    "store_repair": (
        "Requests that loaded no moved run, as a part of each is computed, and gaps are not.",
        (),
    ),
    "store": ("Runs, ranges, bytes and tokens of the store, by event.", ("event",)),
}


class Metrics:
    """Counters of one scheduler.

    Args:
        labels: SGLang's labels and their values.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        # SGLang says where its processes keep their metrics before this is imported.
        from prometheus_client import Counter  # noqa: PLC0415

        self._labels = labels
        self._make = Counter
        self._lock = threading.Lock()
        self._store: dict[str, Any] = {}
        self._failures = Counter(
            "sglang:kvtrie_failures",
            "Calls of kvtrie's cache that failed, each answered as a miss, and keys it cannot "
            "cache.",
            [*labels, "call"],
        )
        self._approximate = Counter(
            "sglang:kvtrie_approximate_tokens",
            "Prompt tokens whose KV was approximate and not computed; they are among the cached "
            "tokens.",
            list(labels),
        ).labels(**labels)
        self._would = Counter(
            "sglang:kvtrie_would_tokens",
            "In shadow mode: prompt tokens by what their KV would have been.",
            [*labels, "source"],
        )
        self._computed = Counter(
            "sglang:kvtrie_computed_tokens",
            "Prompt tokens of finished requests that were computed, by reason and kind.",
            [*labels, "reason", "kind"],
        )
        self._records = Counter(
            "sglang:kvtrie_records",
            "Finished requests, by whether they are in the log.",
            [*labels, "outcome"],
        )

    def stored(self, name: str, event: str | None, count: int) -> None:
        """Count news of the store; its counters are there from the first on. In any thread."""
        with self._lock:
            if not self._store:
                self._store = {
                    one: self._make(f"sglang:kvtrie_{one}", what, [*self._labels, *more])
                    for one, (what, more) in _STORE.items()
                }
        more = {} if event is None else {"event": event}
        self._store[name].labels(**self._labels, **more).inc(count)

    def failed(self, name: str) -> None:
        self._failures.labels(**self._labels, call=name).inc()

    def approximate(self, count: int) -> None:
        self._approximate.inc(count)

    def would(self, one: Would) -> None:
        for source in ("exact", "moved", "computed"):
            self._would.labels(**self._labels, source=source).inc(getattr(one, source))

    def computed(self, counts: Mapping[tuple[str, str], int]) -> None:
        for (reason, kind), count in counts.items():
            self._computed.labels(**self._labels, reason=reason, kind=kind).inc(count)

    def recorded(self, written: int, dropped: int) -> None:
        for outcome, count in (("written", written), ("dropped", dropped)):
            self._records.labels(**self._labels, outcome=outcome).inc(count)
