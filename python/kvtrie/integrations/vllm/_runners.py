"""Makes workers' model runners continue requests at another position."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvtrie.integrations.vllm._vllm import NewRequestData

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


def send_whole(
    output: SchedulerOutput,
    requests: Mapping[str, Request],
    manager: KVCacheManager,
    *,
    counts_itself: bool,
    uses_mrope: bool = False,
) -> None:
    """Make a step send some of its requests as if the workers did not know them yet.

    vLLM sends only the changes of a running request. Model runner V2 (``counts_itself``) ignores
    the scheduler's count of computed tokens. V1 uses it, but with steps in flight it puts the last
    sampled token after what it gets. Both replace their state of a request that arrives as after a
    preemption: as a new one for V2, as a resumed one for V1. ``output`` is changed in place.
    """
    cached = output.scheduled_cached_reqs
    if not counts_itself:
        for at, request_id in enumerate(cached.req_ids):
            if request_id in requests:
                cached.resumed_req_ids.add(request_id)
                cached.new_block_ids[at] = manager.get_block_ids(request_id)
                cached.all_token_ids[request_id] = list(requests[request_id].all_token_ids)
        return
    kept = [at for at, one in enumerate(cached.req_ids) if one not in requests]
    tokens = cached.new_token_ids
    output.scheduled_cached_reqs = replace(
        cached,
        req_ids=[cached.req_ids[at] for at in kept],
        # Only pipeline ranks get new tokens.
        new_token_ids=[tokens[at] for at in kept] if tokens else tokens,
        new_block_ids=[cached.new_block_ids[at] for at in kept],
        num_computed_tokens=[cached.num_computed_tokens[at] for at in kept],
        num_output_tokens=[cached.num_output_tokens[at] for at in kept],
    )
    output.scheduled_new_reqs.extend(
        NewRequestData.from_request(
            request,
            manager.get_block_ids(request_id),
            list(request.all_token_ids),
            uses_mrope=uses_mrope,
        )
        for request_id, request in requests.items()
    )


class MovedRequests:
    """Requests that continue at another position than their workers have, until they continue."""

    def __init__(self, vllm_config: VllmConfig, manager: KVCacheManager) -> None:
        self._manager = manager
        self._counts_itself = vllm_config.use_v2_model_runner
        self._has_steps_in_flight = vllm_config.scheduler_config.async_scheduling
        self._uses_mrope = vllm_config.model_config.uses_mrope
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def forward(self, request: Request) -> None:
        """A request skips tokens of its prompt."""
        if self._counts_itself:
            self._requests[request.request_id] = request

    def back(self, request: Request) -> None:
        """A request computes tokens again."""
        if self._counts_itself or self._has_steps_in_flight:
            self._requests[request.request_id] = request

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def send_images(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Send images of new requests that vLLM leaves out, because their tokens have KV.

        Runner V1 gets them once, and computes such tokens after a preemption or a copy that failed.
        V2 gets the request again.
        """
        if self._counts_itself:
            return
        for new in output.scheduled_new_reqs:
            if new.mm_features and new.req_id in requests:
                new.mm_features = requests[new.req_id].mm_features

    def tell(self, output: SchedulerOutput) -> None:
        """Send requests that continue at another position in full, once they continue."""
        if not self._requests:
            return
        for new in output.scheduled_new_reqs:
            self._requests.pop(new.req_id, None)
        for request_id in output.scheduled_cached_reqs.resumed_req_ids:
            self._requests.pop(request_id, None)
        going_on = self._requests.keys() & set(output.scheduled_cached_reqs.req_ids)
        if going_on:
            # In the order of the moves, which is the same on every run.
            sent = {one: request for one, request in self._requests.items() if one in going_on}
            send_whole(
                output,
                sent,
                self._manager,
                counts_itself=self._counts_itself,
                uses_mrope=self._uses_mrope,
            )
            for one in going_on:
                del self._requests[one]
