"""vLLM's own storing connector next to kvtrie's: its scheduler's half; the worker has no model.

The worker stores and loads numbers (`worker`) where vLLM's would copy tensors on streams of its
own. Loads come at once, before the copies of the step.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from tests.vllm.inside import SCHEDULER, connector_config
from tests.vllm_scheduler.worker import Worker
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

from kvtrie.integrations.vllm._metadata import StepMetadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from tests.vllm_scheduler.core import Core
    from vllm.v1.outputs import ModelRunnerOutput

    Stored = tuple[NDArray[np.uint64], NDArray[np.int64]]

NAME = "SimpleCPUOffloadConnector"
# Of the worker's spec: 16 tokens, 2 heads, 32 numbers, K and V, float32.
BLOCK_BYTES = 16 * 2 * 32 * 2 * 4


def with_others(
    *names: str,
    lazy: bool = False,
    cpu_blocks: int = 60,
    is_exact: bool = False,
    is_last: bool = False,
    images: bool = False,
) -> KVTransferConfig:
    """kvtrie's connector first, and others of vLLM after it, or the other way round."""
    more = {"cpu_bytes_to_use": cpu_blocks * BLOCK_BYTES, "lazy_offload": lazy}
    mine: dict[str, Any] = {"gate": "unchecked", "policy": {"scope": "namespace"}}
    mine = {"chat_format": None, "images": images} | ({"mode": "exact"} if is_exact else mine)
    children: list[dict[str, Any]] = [connector_config("kv_both", **mine)]
    others: list[dict[str, Any]] = [
        {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": more}
        for name in names
    ]
    children = [*others, *children] if is_last else [*children, *others]
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": children},
    )


def options(*names: str, is_exact: bool = False, **given: Any) -> dict[str, Any]:
    config = with_others(*(names or (NAME,)), is_exact=is_exact, **given)
    more = {} if is_exact else {"scheduler_cls": SCHEDULER}
    return {"kv_transfer_config": config, "worker": StoringWorker, **more}


class StoringWorker(Worker):
    def _init_executor(self) -> None:
        super()._init_executor()
        self.stored: dict[int, Stored] = {}
        self.num_loaded = self.num_stored = 0
        # Blocks that steps whose output the scheduler does not know read and write as copies.
        self.copied: deque[set[int]] = deque()

    def get_simple_cpu_offload_num_blocks(self) -> int:
        """What vLLM's workers of 0.33 report."""
        children = self.vllm_config.kv_transfer_config.kv_connector_extra_config["connectors"]
        (theirs,) = (one for one in children if one["kv_connector"] == NAME)
        size: int = theirs["kv_connector_extra_config"]["cpu_bytes_to_use"]
        return size // BLOCK_BYTES

    def follow(self, core: Core) -> None:
        """Forget a step when the scheduler has its output."""
        update = core.scheduler.update_from_output

        def updating(*args: Any, **kwargs: Any) -> Any:
            self.copied.popleft()
            return update(*args, **kwargs)

        core.scheduler.update_from_output = updating

    def _run(self, output: Any) -> ModelRunnerOutput:
        both = output.kv_connector_metadata.metadata
        (at,) = (at for at, one in enumerate(both) if isinstance(one, StepMetadata))
        mine, theirs = both[at], both[1 - at]
        received = self._load_stored(theirs)
        self.copied.append(self._touched(mine.loads))
        output.kv_connector_metadata = mine
        done = super()._run(output)
        assert done.kv_connector_output is None
        events = {}
        if theirs.store_event >= 0:
            self._store(theirs.store_gpu_blocks, theirs.store_cpu_blocks)
            events[theirs.store_event] = 1
        said = SimpleCPUOffloadWorkerMetadata(events) if events else None
        done.kv_connector_output = KVConnectorOutput(
            finished_recving=received or None,
            kv_connector_worker_meta=MultiKVConnectorWorkerMetadata(
                (said, None) if at else (None, said)
            )
            if said
            else None,
        )
        return done

    def _slots_of(self, block: int) -> slice:
        return slice(block * self._size, (block + 1) * self._size)

    def _load_stored(self, theirs: Any) -> set[str]:
        if theirs.load_event < 0:
            return set()
        in_use = set().union(*self.copied)
        assert not in_use.intersection(theirs.load_gpu_blocks), "a source is written too early"
        for block, number in zip(theirs.load_gpu_blocks, theirs.load_cpu_blocks, strict=True):
            inside = self._slots_of(block)
            self._kv[inside], self._position[inside] = self.stored[number]
            self.num_loaded += 1
        return set(theirs.load_event_to_reqs[theirs.load_event])

    def _store(self, blocks: Sequence[int], numbers: Sequence[int]) -> None:
        for block, number in zip(blocks, numbers, strict=True):
            inside = self._slots_of(block)
            self.stored[number] = (self._kv[inside].copy(), self._position[inside].copy())
            self.num_stored += 1

    def _touched(self, loads: Any) -> set[int]:
        found: set[int] = set()
        for load in loads:
            for source, dest, count, _ in load.moves.tolist():
                for at in (source, dest):
                    found.update(range(at // self._size, (at + count - 1) // self._size + 1))
        return found
