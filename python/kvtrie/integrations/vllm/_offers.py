"""What requests leave in the index: their blocks, as soon as the KV is written."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvtrie.integrations._asked import named
from kvtrie.integrations.vllm import _shadow
from kvtrie.integrations.vllm._answered import Answered
from kvtrie.integrations.vllm._tags import count_by_kind, kinds_of
from kvtrie.integrations.vllm._vllm import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvtrie.integrations.vllm._reasons import Reasons
    from kvtrie.integrations.vllm._requests import LiveRequest
    from kvtrie.integrations.vllm._sources import Sources
    from kvtrie.integrations.vllm._stats import Counts
    from kvtrie.integrations.vllm._tags import Reading

_LOG = logging.getLogger("vllm.kvtrie")


class Offers:
    """Indexes prompts when they are computed, and whole requests when they end.

    ``forbids`` says whether tokens of some kinds may not move. What is left by a request that is
    not tagged is not indexed then.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        sources: Sources,
        block_size: int,
        counts: Counts,
        surprise: Callable[[str], None],
        reasons: Reasons | None,
        *,
        group: int = 0,
        forbids: bool = False,
    ) -> None:
        self._forbids = forbids
        self._manager = manager
        self._sources = sources
        self._block_size = block_size
        self._counts = counts
        self._surprise = surprise
        self._reasons = reasons
        self._group = group
        self._prefilling: dict[str, Request] = {}
        self._has_warned = False
        self._answered = Answered()

    def __len__(self) -> int:
        """The number of admitted requests whose prompts are not computed."""
        return len(self._prefilling)

    @property
    def prefilling(self) -> Iterable[Request]:
        """Those requests."""
        return self._prefilling.values()

    def admitted(self, request: Request, live: LiveRequest) -> None:
        if not live.is_offered:
            self._prefilling[request.request_id] = request

    def forget(self, request_id: str) -> None:
        self._prefilling.pop(request_id, None)

    def step(self, output: SchedulerOutput, lives: Mapping[str, LiveRequest]) -> None:
        """Index prompts whose KV is written, so that other requests can use them at once."""
        scheduled = output.num_scheduled_tokens
        for request_id, request in list(self._prefilling.items()):
            live = lives.get(request_id)
            if live is None:
                del self._prefilling[request_id]
                continue
            if request_id in scheduled:
                live.account.reach(request.num_computed_tokens + scheduled[request_id])
            done = request.num_computed_tokens - request.num_in_flight_tokens
            if done >= request.num_prompt_tokens:
                del self._prefilling[request_id]
                live.is_offered = True
                try:
                    self.offer(request, live, self._manager.get_block_ids(request_id))
                except Exception:
                    self._surprise(request_id)

    def offer(
        self,
        request: Request,
        live: LiveRequest,
        tables: Sequence[Sequence[int]],
        *,
        has_ended: bool = False,
    ) -> None:
        """Index the written blocks of a request; ``tables``: its blocks in each group."""
        # Tokens in flight are not written yet; the last sampled token never is.
        done = request.num_computed_tokens - request.num_in_flight_tokens
        if has_ended or done > len(live.seq):
            # Else what is written has been read.
            live.follow(request)
        done = max(0, min(done, len(live.seq)))
        # A request may end while it is preempted, by a token of the step in flight.
        if done >= request.num_prompt_tokens or request.num_output_tokens:
            self._count_prompt(request, live)
        reading = live.read() if has_ended else None
        if reading is not None:
            is_complete = request.status == RequestStatus.FINISHED_STOPPED
            spans = reading.finish(complete=is_complete)
            if reading.keeps_all and is_complete:
                self._answered.note(live.seq, reading, request.cache_salt)
        else:
            spans = live.new_spans()
        if live.is_untagged and self._forbids:
            # What nothing identifies may be of a kind that is not to move.
            return
        stretches = live.stretches(done // self._block_size, self._block_size)
        ids = tables[self._group]
        self._sources.offer(live.seq, ids, stretches, spans=spans, session=live.session)

    def _count_prompt(self, request: Request, live: LiveRequest) -> None:
        if live.is_counted:
            return
        live.is_counted = True
        count, reading = request.num_prompt_tokens, live.read()
        if reading is not None:
            self._compare_template(request, live, reading)
        kinds = kinds_of(count, () if reading is None else reading.spans())
        counted = count_by_kind(count, live.account.reused, kinds)
        for (how, kind), number in counted.items():
            self._counts.add_prompt(how, kind, number)
        if live.would is not None:
            _shadow.count(live.would, self._counts)
        if self._reasons is not None:
            self._reasons.count(request, live, kinds, counted)

    def _compare_template(self, request: Request, live: LiveRequest, reading: Reading) -> None:
        count = request.num_prompt_tokens
        why = reading.disagreement(count)
        if why is None and reading.keeps_all:
            why = self._answered.lacks(live.seq, reading, count, request.cache_salt)
        if why is None:
            return
        live.has_other_template = True
        self._counts.add("requests_other_template")
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "kvtrie: the served chat template did not render the prompt of request %s: %s; "
                "its reasoning stays, and metrics count further ones (set chat_template or "
                "template_arguments if all requests are like this one)",
                named(request.request_id),
                why,
            )
