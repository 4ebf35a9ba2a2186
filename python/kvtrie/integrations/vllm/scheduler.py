"""vLLM's scheduler with reuse after gaps: each gap is computed in its own step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvtrie.integrations.vllm._planner import Planner
from kvtrie.integrations.vllm._version import UnsupportedError
from kvtrie.integrations.vllm._vllm import AsyncScheduler, probe_scheduler
from kvtrie.integrations.vllm.connector import KvtrieConnector

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_LOG = logging.getLogger("vllm.kvtrie")


class KvtrieScheduler(AsyncScheduler):
    """vLLM's own scheduler with five changes.

    * A chunk of a prompt ends where copyable KV begins.
    * There the request's computed tokens skip the copied range. The copies are part of the step
      that computes the tokens after it.
    * A preempted request releases its planned copies, and the blocks that its step was to write
      cannot be found.
    * What is copied after gaps counts as cached, in usage and metrics.
    * Blocks are freed at once. vLLM keeps them while steps are in flight.

    Raises:
        UnsupportedError: The connector is not `KvtrieConnector`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's own
        super().__init__(*args, **kwargs)
        if not isinstance(self.connector, KvtrieConnector):
            msg = "KvtrieScheduler: the KV connector is not KvtrieConnector: configure it, or "
            msg += "omit --scheduler-cls"
            raise UnsupportedError(msg)
        probe_scheduler(self)
        planner = self.connector.planner
        if not isinstance(planner, Planner):
            msg = 'KvtrieScheduler: "mode": "exact" has no gaps to continue after: '
            msg += "omit --scheduler-cls"
            raise UnsupportedError(msg)
        self._planner = planner
        self._planner.resumes_after_gaps = True
        # vLLM replaces the record with every report.
        self._planner.hit_stats = lambda: self.connector_prefix_cache_stats
        # Copies come after a step in flight that writes them.
        self.defer_block_free = False
        _LOG.info("kvtrie: reuse continues after gaps")

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:  # noqa: ANN401 - vLLM's own
        """Skip the ranges that this step copies, then schedule."""
        self._planner.guarded(self._planner.jump, self.running)
        return super().schedule(*args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Preempt, and unpin the sources of copies after the request's next gaps."""
        self._planner.guarded(self._planner.forget_unwritten, request)
        super()._preempt_request(request, *args, **kwargs)
        self._planner.guarded(self._planner.preempted, request.request_id)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """End a chunk of a prompt where a cached segment begins; vLLM asks here for its length."""
        count: int = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        end = self._planner.guarded(self._planner.gap_end, request, num_computed_tokens)
        return count if end is None else min(count, end - num_computed_tokens)
