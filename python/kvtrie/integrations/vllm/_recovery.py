"""What happens after a copy has failed: what it has touched is computed again, and forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.integrations.vllm._failures import first_of
from kvtrie.integrations.vllm._vllm import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from kvtrie.integrations.vllm._failures import Failures
    from kvtrie.integrations.vllm._guard import Guard
    from kvtrie.integrations.vllm._live import LiveRequests
    from kvtrie.integrations.vllm._runners import MovedRequests
    from kvtrie.integrations.vllm._sources import Sources


class Recovery:
    """Sets requests back before the blocks whose copy has failed."""

    def __init__(
        self,
        manager: KVCacheManager,
        block_size: int,
        requests: LiveRequests,
        sources: Sources,
        failures: Failures,
        moved: MovedRequests,
        guard: Guard,
    ) -> None:
        self._manager = manager
        self._block_size = block_size
        self._requests = requests
        self._sources = sources
        self._failures = failures
        self._moved = moved
        self._guard = guard

    def failed(self, block_ids: Collection[int]) -> None:
        """Compute everything that was to be copied into failed blocks, and all tokens after it.

        vLLM has reset the requests that it knows to read these blocks, and dropped this step's
        output for them. But it keeps the output of steps in flight, counts the tokens that these
        were to sample, lets other requests hit the blocks, and does not notify model runner V2.
        Only what these blocks have touched is forgotten.
        """
        requests = self._requests
        tables = {
            request_id: self._manager.get_block_ids(request_id)[0]
            for request_id, request in requests.known.items()
            if request.status == RequestStatus.RUNNING
        }
        touched = self._failures.touched(block_ids, tables.values())
        for request_id, table in tables.items():
            first = first_of(table, touched)
            if first is not None:
                self._set_back(requests.known[request_id], first * self._block_size)
        for request_id in list(requests.pending):
            live = requests.live.get(request_id)
            if live is not None and live.pending is not None and live.pending.reads(touched):
                requests.drop(request_id, live)
        self._sources.forget(touched)
        cached = {block.block_id for block in self._sources.blocks(touched) if block.block_hash}
        self._manager.evict_blocks(cached)

    def _set_back(self, request: Request, position: int) -> None:
        """Compute a request again from a position on."""
        request_id = request.request_id
        position = min(request.num_computed_tokens, position)
        request.num_computed_tokens = position
        request.num_output_placeholders = 0
        request.spec_token_ids = []
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.drop_stale_output = True
        self._moved.back(request)
        live = self._requests.live.get(request_id)
        if live is not None:
            self._requests.drop(request_id, live)
            live.account.fail(position)
            self._guard.call(live.account.tell, request)
