"""What the connector remembers is bounded, whatever a server sees in its life.

vLLM's real scheduler, and no model: a step is as short as vLLM's own bookkeeping.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvtrie.calibrate import shipped

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 16
BLOCKS = 64
THINK, STOP, USER, ASSISTANT = 1, 2, 3, 4
FORMAT = {"user": USER, "assistant": ASSISTANT, "reasoning": [THINK, STOP]}


@pytest.fixture
def scheduler() -> Any:
    init_none_hash(sha256)
    config = EngineArgs(
        model=str(shipped.model_path("gqa")),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=SIZE,
        max_model_len=256,
        max_num_seqs=4,
        async_scheduling=False,
    ).create_engine_config()
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="KvtrieConnector",
        kv_connector_module_path="kvtrie.integrations.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"gate": "unchecked", "chat_format": FORMAT},
    )
    config.cache_config.num_gpu_blocks = BLOCKS
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["l"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=SIZE,
        hash_block_size=SIZE,
    )


class Crowd:
    """Short requests, each of a tenant of its own."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self._rng = random.Random(5)
        self._hasher = get_request_block_hasher(SIZE, sha256)
        self._number = 0

    def _new(self) -> Request:
        self._number += 1
        rng, number = self._rng, self._number
        said = rng.choice((None, "exact", "approximate", "neither"))
        params = SamplingParams(
            max_tokens=rng.choice((1, 1, 2)),
            ignore_eos=True,
            extra_args=None if said is None else {"kv_transfer_params": {"kvtrie": said}},
        )
        words = rng.choices(range(5, 500), k=rng.choice((3, 20, 40)))
        prompt = [USER, *words, ASSISTANT, THINK, *words[:20], STOP, *words[-9:]]
        return Request(
            f"request-{number}",
            prompt,
            params,
            None,
            block_hasher=self._hasher,
            cache_salt=f"tenant-{number}",
        )

    def serve(self, count: int) -> None:
        """So many requests, some of which are aborted."""
        scheduler = self.scheduler
        for _ in range(count // 4):
            asked = [self._new() for _ in range(4)]
            for request in asked:
                scheduler.add_request(request)
            if self._rng.random() < 0.1:
                aborted = asked[0].request_id
                scheduler.finish_requests([aborted], RequestStatus.FINISHED_ABORTED)
            while scheduler.has_requests():
                output = scheduler.schedule()
                ids = list(output.num_scheduled_tokens)
                result = ModelRunnerOutput(
                    req_ids=ids,
                    req_id_to_index={name: at for at, name in enumerate(ids)},
                    sampled_token_ids=[[7] for _ in ids],
                )
                scheduler.update_from_output(output, result)


def sizes(thing: object, where: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    """All containers that kvtrie's objects hold, and their lengths."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if hasattr(thing, "cache_info"):
        yield where, thing.cache_info().currsize
    elif isinstance(thing, dict):
        yield where, len(thing)
        for value in thing.values():
            yield from sizes(value, f"{where}[]", seen)
    elif isinstance(thing, (list, set, tuple)):
        yield where, len(thing)
        for value in thing:
            yield from sizes(value, f"{where}[]", seen)
    elif type(thing).__module__.startswith("kvtrie."):
        names = [*getattr(thing, "__dict__", ()), *getattr(type(thing), "__slots__", ())]
        for name in names:
            yield from sizes(getattr(thing, name, None), f"{where}.{name}", seen)


def held(scheduler: Any) -> dict[str, int]:
    """Items that are held, by where."""
    connector = scheduler.connector
    total: dict[str, int] = {}
    for where, count in sizes(connector, "connector", set()):
        total[where] = total.get(where, 0) + count
    stats = connector.planner.sources.index.stats()
    total["namespaces"], total["nodes"] = stats.namespaces, stats.nodes
    total["kilobytes"] = stats.bytes >> 10
    return total


def test_ten_thousand_tenants(scheduler: Any) -> None:
    crowd = Crowd(scheduler)
    crowd.serve(2_000)
    # What the settings and the chat format hold is what it is.
    before = held(scheduler)
    crowd.serve(8_000)
    after = held(scheduler)
    assert len(scheduler.connector.planner.sources) > BLOCKS // 2
    grown = {
        name: (before.get(name, 0), count)
        for name, count in after.items()
        if count > before.get(name, 0) + BLOCKS
    }
    assert not grown
    assert not scheduler.connector.planner._live
    assert len(scheduler.kv_cache_manager.block_pool._reuse_watchers) <= BLOCKS
    # Tenants whose namespace is ready, and no more.
    assert after["connector._planner._space_of"] <= 1024
