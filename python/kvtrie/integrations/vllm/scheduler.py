"""vLLM's scheduler with reuse after gaps, which share a step as far as there is room."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvtrie.integrations.vllm import _others
from kvtrie.integrations.vllm._planner import Planner
from kvtrie.integrations.vllm._rows import GapRows, why_not
from kvtrie.integrations.vllm._version import UnsupportedError
from kvtrie.integrations.vllm._vllm import AsyncScheduler, MultiConnector, probe_scheduler
from kvtrie.integrations.vllm.connector import KvtrieConnector

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_LOG = logging.getLogger("vllm.kvtrie")


class KvtrieScheduler(AsyncScheduler):
    """vLLM's own scheduler with seven changes.

    * A chunk of a prompt ends where copyable KV begins.
    * No encoder is run for images after the chunk, which may be copied.
    * There the request's computed tokens skip the copied range. The copies are part of the step
      that computes the tokens after it.
    * Gaps that fit into a step are computed in it as rows of the batch, and skipped with the ranges
      after them.
    * A preempted request releases its planned copies, and the blocks that its step was to write
      cannot be found.
    * What is copied after gaps counts as cached, in usage and metrics.
    * Blocks are freed at once, unless other connectors may write to them. vLLM keeps them while
      steps are in flight.

    Raises:
        UnsupportedError: The connector is not `KvtrieConnector`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's own
        super().__init__(*args, **kwargs)
        connector: object = self.connector
        is_among_others = isinstance(connector, MultiConnector)
        if isinstance(connector, MultiConnector):
            connector = _others.check_children(connector.sub_connectors)
        if not isinstance(connector, KvtrieConnector):
            msg = "KvtrieScheduler: the KV connector is not KvtrieConnector: configure it, or "
            msg += "omit --scheduler-cls"
            raise UnsupportedError(msg)
        probe_scheduler(self)
        planner: object = connector.planner
        if not isinstance(planner, Planner):
            msg = 'KvtrieScheduler: "mode": "exact" has no gaps to continue after: omit '
            raise UnsupportedError(msg + "--scheduler-cls")
        if planner.has_groups:
            msg = (
                "KvtrieScheduler: reuse after gaps needs one group of KV blocks, and the model has "
            )
            raise UnsupportedError(msg + "several: omit --scheduler-cls")
        self._planner = planner
        self._guarded = planner.half.guard.call
        self._gaps = planner.gaps
        self._gaps.resumes = True
        # vLLM replaces the record with every report.
        self._gaps.hit_stats = lambda: self.connector_prefix_cache_stats
        if is_among_others:
            # They write to blocks at once: not after the steps in flight.
            self._planner.run_with_others()
        else:
            # Copies come after a step in flight that writes them.
            self.defer_block_free = False
        self._rows: GapRows | None = None
        reason = "other connectors" if is_among_others else why_not(self.vllm_config)
        if reason is None:
            self._rows = self._gaps.rows = GapRows(self)
        how = "and gaps share a step" if reason is None else f"each gap in its own step: {reason}"
        _LOG.info("kvtrie: reuse continues after gaps, %s", how)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:  # noqa: ANN401 - vLLM's own
        """Skip the ranges that this step copies, then schedule, and add the rows of gaps."""
        self._guarded(self._gaps.jump, self.running)
        if self._rows is None:
            return super().schedule(*args, **kwargs)
        self._rows.begin()
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self._rows.end()
        self._rows.send(output)
        return output

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Preempt, and unpin the sources of copies after the request's next gaps."""
        self._guarded(self._planner.forget_unwritten, request)
        super()._preempt_request(request, *args, **kwargs)
        self._guarded(self._planner.half.requests.preempted, request.request_id)

    def _try_schedule_encoder_inputs(
        self,
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
        *args: Any,  # noqa: ANN401 - vLLM's own
        **kwargs: Any,  # noqa: ANN401 - likewise
    ) -> Any:  # noqa: ANN401 - likewise
        """Schedule the images of a chunk, which ends as below."""
        if not self._gaps.is_idle:
            end = self._guarded(self._gaps.end, request, num_computed_tokens)
            if end is not None:
                num_new_tokens = min(num_new_tokens, end - num_computed_tokens)
        return super()._try_schedule_encoder_inputs(
            request, num_computed_tokens, num_new_tokens, *args, **kwargs
        )

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """End a chunk of a prompt where a cached segment begins; vLLM asks here for its length."""
        count: int = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        if not self._gaps.is_idle:
            before = request.num_computed_tokens
            self._guarded(self._gaps.skip, request)
            if request.num_computed_tokens != before:
                num_computed_tokens = request.num_computed_tokens
                count = min(count, request.num_tokens - num_computed_tokens)
            end = self._guarded(self._gaps.end, request, num_computed_tokens)
            if end is not None:
                count = min(count, end - num_computed_tokens)
        return count if self._rows is None else self._rows.schedule(count)
