"""What tests see of a scheduler and its pool, with a model or without one."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.engine.core import EngineCore

    from kvtrie.integrations.vllm import KvtrieConnector

SCHEDULER = "kvtrie.integrations.vllm.KvtrieScheduler"


def connector_config(role: str = "kv_both", **extra: object) -> dict[str, object]:
    return {
        "kv_connector": "KvtrieConnector",
        "kv_connector_module_path": "kvtrie.integrations.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


class Inside:
    """Scheduler, pool and connector of an engine core in this process."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.scheduler = core.scheduler
        self.pool: BlockPool = core.scheduler.kv_cache_manager.block_pool
        self.counts: Counter[str] = Counter()
        self.shadow: Any = None
        if self.scheduler.connector is not None:
            self.watch_counts(self.connector)

    @property
    def connector(self) -> KvtrieConnector:
        # Under vLLM's `MultiConnector` it is one of several.
        among: list[Any] = getattr(
            self.scheduler.connector, "sub_connectors", [self.scheduler.connector]
        )
        mine: KvtrieConnector = next(one for one in among if hasattr(one, "planner"))
        return mine

    @property
    def transfers(self) -> list[Any]:
        """What a storing connector next to kvtrie's has under way."""
        found: list[Any] = []
        for child in getattr(self.scheduler.connector, "sub_connectors", ()):
            theirs = getattr(child, "scheduler_manager", None)
            if theirs is None:
                continue
            found += theirs._store_event_to_blocks.values()
            found += theirs._pending_finished_stores
            found += [one.transfer_meta for one in theirs._reqs_to_load.values()]
        return found

    def watch_counts(self, half: KvtrieConnector) -> None:
        add = half._counts.add

        def counting(name: str, count: int = 1) -> None:
            self.counts[name] += count
            add(name, count)

        half._counts.add = counting  # type: ignore[method-assign]

    def request(self, name: str) -> Request:
        """vLLM's record of a live request, which it may have given a longer id."""
        (found,) = (
            one
            for full, one in self.scheduler.requests.items()
            if full == name or full.startswith(f"{name}-")
        )
        return found

    def plain_hashes(
        self,
        tokens: Sequence[int],
        adapter: LoRARequest | None = None,
        features: Sequence[MultiModalFeatureSpec] = (),
    ) -> list[bytes]:
        params = SamplingParams(max_tokens=1)
        hasher = self.core.request_block_hasher
        request = Request(
            "hashed",
            list(tokens),
            params,
            None,
            block_hasher=hasher,
            lora_request=adapter,
            mm_features=list(features),
        )
        return [bytes(one) for one in request.block_hashes]

    def evict(self, tokens: Sequence[int]) -> None:
        hashes = self.plain_hashes(tokens)
        gone = {
            block.block_id
            for block in self.pool.blocks
            if block.block_hash is not None and get_block_hash(block.block_hash) in hashes
        }
        assert gone
        self.pool.evict_blocks(gone)

    def preempt(self, name: str) -> None:
        request = self.request(name)
        assert request.status == RequestStatus.RUNNING
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)

    @property
    def num_rows(self) -> int:
        """Rows that were ever sent."""
        rows = self.connector.planner.gaps.rows
        return 0 if rows is None else rows._number

    @contextmanager
    def gap_by_gap(self) -> Iterator[None]:
        """Compute each gap in a step of its own."""
        gaps = self.connector.planner.gaps
        rows, gaps.rows = gaps.rows, None
        try:
            yield
        finally:
            gaps.rows = rows

    def check(self) -> None:
        """Every block is free or owned, its count of owners is right, and the index agrees."""
        owners: Counter[int] = Counter()
        for manager in self.scheduler.kv_cache_manager.coordinator.single_type_managers:
            for blocks in manager.req_to_blocks.values():
                owners.update(block.block_id for block in blocks if not block.is_null)
        # With steps in flight, vLLM frees the blocks that they may still write when they are done.
        for _, blocks in self.scheduler.deferred_frees:
            owners.update(block.block_id for block in blocks)
        has_connector = self.scheduler.connector is not None
        if has_connector:
            for live in self.connector.planner.half.requests.live.values():
                if live.pending is not None:
                    owners.update(block.block_id for block in live.pending.pinned)
            for held in self.connector.planner.half.held._steps:
                owners.update(block.block_id for block in held)
        for transfer in self.transfers:
            owners.update(transfer.gpu_block_ids)
        free = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        are_free = set(free)
        assert len(are_free) == len(free), "a block is twice in the free queue"
        assert len(free) == self.pool.get_num_free_blocks()
        for block in self.pool.blocks[1:]:
            number = block.block_id
            assert block.ref_cnt == owners[number], (number, block.ref_cnt, owners[number])
            assert (number in are_free) == (block.ref_cnt == 0), number
        if has_connector:
            sources = self.connector.planner.half.sources
            sources.index.check()
            assert sources.index.stats().indexed == len(sources)
            if self.shadow is not None:
                self.shadow.check_index()

    def check_idle(self) -> None:
        self.check()
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        if self.scheduler.connector is not None:
            planner = self.connector.planner
            assert not planner.half.requests.live
            assert not planner.half.requests.pending
            assert not planner.half.offers
            assert not planner.half.loads
            assert not planner.half.moved
            assert not (planner.gaps.rows if hasattr(planner, "gaps") else None)
            assert not planner.half.requests.known
