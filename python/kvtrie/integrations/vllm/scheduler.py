"""vLLM's scheduler, resuming reuse behind gaps: each gap is computed by a step of its own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from kvtrie.integrations.vllm._support import UnsupportedError
from kvtrie.integrations.vllm.connector import KvtrieConnector

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvtrie.integrations.vllm._planner import Planner

_LOG = logging.getLogger("vllm.kvtrie")


class KvtrieScheduler(AsyncScheduler):
    """vLLM's own scheduler, but for four things.

    A chunk of a prompt ends where KV that can be copied begins; and where it begins, the request's
    computed tokens go on behind it, the copies being part of the step that computes what follows.
    A request that is preempted lets go of what it was going to copy, and nobody finds the blocks
    that its step was to write. Blocks are freed at once: vLLM keeps them, while steps are in
    flight, for connectors that write in an order of their own.

    Raises:
        UnsupportedError: If the connector is not `KvtrieConnector`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's own
        super().__init__(*args, **kwargs)
        if not isinstance(self.connector, KvtrieConnector):
            msg = "KvtrieScheduler: the KV connector is not KvtrieConnector: configure it, or "
            msg += "leave --scheduler-cls out"
            raise UnsupportedError(msg)
        self._planner: Planner = self.connector.planner
        self._planner.resumes_behind_gaps = True
        # Blocks may be freed while a step that writes them is in flight: copies come in its order.
        self.defer_block_free = False
        _LOG.info("kvtrie: reuse goes on behind gaps")

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:  # noqa: ANN401 - vLLM's own
        """Skip what the copies of this step bring, then schedule."""
        self._planner.guarded(self._planner.jump, self.running)
        return super().schedule(*args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Preempt, and unpin what was to be copied behind the request's next gaps."""
        self._planner.guarded(self._planner.forget_unwritten, request)
        super()._preempt_request(request, *args, **kwargs)
        self._planner.guarded(self._planner.preempted, request.request_id)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """End a chunk of a prompt where an island begins; vLLM asks here how long it may be."""
        count: int = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        end = self._planner.guarded(self._planner.gap_end, request, num_computed_tokens)
        return count if end is None else min(count, end - num_computed_tokens)
