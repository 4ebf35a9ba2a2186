"""Finished requests for the log of ``kvtrie.record``: setting ``record``.

A request is handed over when it ends, if it was admitted and has no image or sound. Its tokens
are copied, and read once more for their kinds; digests and the disk are the business of a thread.
"""

from __future__ import annotations

import atexit
import time
from typing import TYPE_CHECKING, Final

from kvtrie.integrations.sglang._ids import only_text
from kvtrie.integrations.sglang._version import installed
from kvtrie.record import Finished, RecordCounts, Recorder

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from kvtrie.integrations.sglang._moving import Built
    from kvtrie.record import RecordOptions, Would
    from kvtrie.tags import Tagger

_ENDS: Final = {
    "FINISH_MATCHED_TOKEN": "stopped",
    "FINISH_MATCHED_STR": "stopped",
    "FINISH_LENGTH": "length",
    "FINISH_ABORT": "aborted",
}


class RequestLog:
    """Hands finished requests to a recorder.

    Args:
        options: What to write, and where.
        page_size: Tokens of a page, a block of the log.
        model: The model's name.
        tagger: The model's chat format; None: kinds of tokens are not recorded.
    """

    def __init__(
        self, options: RecordOptions, page_size: int, model: str, tagger: Tagger | None
    ) -> None:
        engine = f"sglang {installed()}"
        self._recorder = Recorder(options, block_size=page_size, engine=engine, model=model)
        self._tagger = tagger
        self._counted = RecordCounts()
        atexit.register(self._recorder.close)

    def ended(
        self,
        request: Req,
        session: str | None,
        reused: list[tuple[int, int, str]],
        computed: dict[str, int],
        would: Would | None,
    ) -> None:
        """Hand a request over, if it is in the sample and all its tokens are of text."""
        if not self._recorder.wants(request.rid, session):
            return
        ids = only_text(request.origin_input_ids + request.output_ids)
        if ids is None:
            return
        # SGLang's clock of durations.
        times, now = request.time_stats, time.perf_counter()
        began = times.scheduler_recv_time
        first = times.prefill_finished_time
        self._recorder.put(
            Finished(
                tokens=ids,
                num_prompt=len(request.origin_input_ids),
                request_id=request.rid,
                session=session,
                salt=_space(request),
                adapter=request.lora_id,
                arrived=time.time() - (now - began),
                first_token=first - began if first else None,
                took=now - began,
                ended=_ENDS.get(type(request.finished_reason).__name__, "other"),
                spans=() if self._tagger is None else self._tagger.spans(ids),
                reused=reused,
                computed=computed,
                would=would,
            )
        )

    def news(self) -> tuple[int, int]:
        """Requests that were written, and that were dropped, since the last call."""
        found, before = self._recorder.counts, self._counted
        self._counted = found
        dropped = found.dropped - before.dropped
        return found.written - before.written, dropped.queue + dropped.disk + dropped.size


def _space(request: Req) -> str | None:
    """What separates requests besides the model and the adapter, which SGLang adds to the key."""
    key, salt = request.extra_key, request.cache_salt
    return salt if key is None else repr((key, salt))


def reused_of(request: Req, built: Built | None) -> list[tuple[int, int, str]]:
    """What of a prompt was not computed."""
    if built is None:
        return [(0, request.cached_tokens, "exact")] if request.cached_tokens else []
    found: list[tuple[int, int, str]] = []
    at = 0
    for start, end in (*built.gaps, (built.end, built.end)):
        border = min(max(at, built.exact_until), start)
        parts = (at, border, "exact"), (border, start, "moved")
        found += [one for one in parts if one[0] < one[1]]
        at = end
    return found
