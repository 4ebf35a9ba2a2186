"""How a worker's model runner is told where a request goes on, if not where it stopped."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import NewRequestData

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    """Have a step carry some of its requests as if the workers did not know them yet.

    vLLM sends a running request as what has changed. Model runner V2 adds up the computed tokens
    itself, and does not look at the scheduler's count of a request that it knows; V1 does, but with
    steps in flight it puts the last sampled token behind what it sends. Both drop what they know of
    a request that comes as it would after a preemption: for V2 that is a new one, for V1 a resumed
    one.

    Args:
        output: What the scheduler sends, not yet sent; changed in place.
        requests: Which of the requests that go on in this step, by their ids.
        manager: Knows their blocks.
        counts_itself: Whether the workers run V2.
        uses_mrope: Whether the model has M-RoPE, for which vLLM sends more of a request.
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
        # Only a pipeline's ranks get new tokens; otherwise the list is empty.
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
