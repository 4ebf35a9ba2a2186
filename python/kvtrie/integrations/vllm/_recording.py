"""Finished requests for the log of ``kvtrie.record``: setting ``record``.

A request is handed over when it ends, if its prompt was computed and is of token ids alone. The
scheduler copies its tokens; digests and the disk are the business of a thread. In a decode step it
costs a look at the requests whose prompts are being computed.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtrie.integrations.vllm import _version
from kvtrie.integrations.vllm._requests import adapter_of
from kvtrie.record import Finished, RecordCounts, Recorder

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from kvtrie.integrations.vllm._account import Account
    from kvtrie.integrations.vllm._requests import LiveRequest
    from kvtrie.integrations.vllm._stats import Counts
    from kvtrie.record import RecordOptions

_ENDS: Final = {
    "FINISHED_STOPPED": "stopped",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_ABORTED": "aborted",
}


class Recording:
    """Hands finished requests to a recorder."""

    def __init__(
        self, options: RecordOptions, vllm_config: VllmConfig, block_size: int, counts: Counts
    ) -> None:
        rank = vllm_config.parallel_config.data_parallel_index
        self._recorder = Recorder(
            options if not rank else replace(options, path=_of_rank(options.path, rank)),
            block_size=block_size,
            engine=f"vllm {_version.running()}",
            model=str(vllm_config.model_config.model),
        )
        self._counts = counts
        self._counted = RecordCounts()
        self._first: dict[str, float] = {}

    def look(self, prefilling: Iterable[Request]) -> None:
        """After a step, note which requests have their first token, and count what was written."""
        for request in prefilling:
            if request.num_output_tokens and request.request_id not in self._first:
                self._first[request.request_id] = time.time()
        found, before = self._recorder.counts, self._counted
        if found is not before:
            self._counted = found
            dropped = found.dropped - before.dropped
            for name, count in (
                ("records_written", found.written - before.written),
                ("records_dropped", dropped.queue + dropped.disk + dropped.size),
            ):
                if count:
                    self._counts.add(name, count)

    def forget(self, request_id: str) -> None:
        self._first.pop(request_id, None)

    def ended(self, request: Request, live: LiveRequest) -> None:
        """Hand a request over, if its prompt was computed and it is in the sample."""
        now = time.time()
        first = self._first.pop(request.request_id, None)
        if first is None and request.num_output_tokens:
            first = now
        is_wanted = self._recorder.wants(request.request_id, live.session)
        # A log has tokens alone, and those of different images are equal.
        if not live.is_counted or not is_wanted or request.mm_features:
            return
        began = request.arrival_time
        self._recorder.put(
            Finished(
                tokens=live.seq[:],
                num_prompt=request.num_prompt_tokens,
                request_id=request.request_id,
                session=live.session,
                salt=request.cache_salt,
                adapter=adapter_of(request),
                arrived=began,
                first_token=None if first is None else first - began,
                took=now - began,
                ended=_ENDS.get(request.status.name, "other"),
                spans=() if live.reading is None else live.reading.spans(),
                reused=_reused(live.account, request.num_prompt_tokens),
                computed=live.computed,
                would=live.would,
            )
        )

    def close(self) -> None:
        self._recorder.close()


def _reused(account: Account, num_prompt: int) -> list[tuple[int, int, str]]:
    """What of a prompt was not computed, as few ranges as possible."""
    found: list[tuple[int, int, str]] = []
    for one in account.reused:
        start, end = one.start, min(one.end, num_prompt)
        kind = "moved" if one.is_approximate else "exact"
        if start >= end:
            continue
        if found and found[-1][1:] == (start, kind):
            start = found.pop()[0]
        found.append((start, end, kind))
    return found


def _of_rank(path: str, rank: int) -> str:
    """Each rank of data parallelism has a scheduler, and a log."""
    one = Path(path)
    return str(one.with_name(f"{one.stem}-rank{rank}{one.suffix}"))
