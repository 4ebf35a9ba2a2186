"""Makes a worker's model runner continue a request at another position."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvtrie.integrations.vllm._vllm import NewRequestData

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
