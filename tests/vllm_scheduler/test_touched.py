"""The start-up probe compares everything that the modules touch of vLLM, and nothing more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.vllm_scheduler.touched import Many, Reader, Touch
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.kv_hints import KvHintsEnvelope

import kvtrie.integrations.vllm
from kvtrie.integrations.vllm import _vllm

# Set by methods of vLLM, without a type.
KNOWN: dict[str, Any] = {
    "AsyncScheduler.vllm_config": VllmConfig,
    "KVCacheManager.block_pool": BlockPool,
    "KVCacheManager.coordinator": KVCacheCoordinator,
    "Request.kv_hints": KvHintsEnvelope,
    "Request.lora_request": LoRARequest,
    "Request.mm_features": Many(MultiModalFeatureSpec),
}
# Compared, and touched where types are not followed.
UNTYPED = {
    "AsyncScheduler.defer_block_free": "only set",
    "AttentionLayerBase.get_attn_backend": "of a dictionary that a type variable describes",
    "AttentionBackend.get_name": "likewise",
    "BlockRemoved.group_idx": "its name is in `EVENTS`, whose engine the reader does not know",
    "BlockRemoved.medium": "likewise",
    "BlockStored.lora_id": "likewise",
    "NewRequestData.prefill_token_ids": "an argument by its position, which workers read",
    "ParallelConfig.decode_context_parallel_size": "its name is in a loop",
    "ParallelConfig.prefill_context_parallel_size": "likewise",
    "Platform.is_cpu": "of an object that vLLM makes when it is imported",
}


@pytest.fixture(scope="module")
def touched() -> set[Touch]:
    made = {
        thing if isinstance(thing, type) else type(thing): thing
        for thing in _vllm.things().values()
    }
    reader = Reader(made, KNOWN)
    folder = Path(kvtrie.integrations.vllm.__file__).parent
    reader.read(sorted(path for path in folder.glob("*.py") if path.name != "_vllm.py"))
    return set(reader.touched)


def compared() -> dict[str, set[str]]:
    """Names that the probe looks for, by class."""
    tables: list[Any] = [_vllm.FIELDS, _vllm.CALLS, _vllm.OVERRIDDEN, *_vllm.ADDED.values()]
    own = {"AsyncScheduler": _vllm.SCHEDULER, "KVConnectorBase_V1": _vllm.CONNECTOR}
    found: dict[str, set[str]] = {}
    for table in (*tables, own):
        for owner, names in table.items():
            found.setdefault(owner, set()).update(names)
    return found


def related(owner: type) -> set[str]:
    """Names of its compared bases, itself and its compared subclasses."""
    things = _vllm.things().values()
    classes = [one if isinstance(one, type) else type(one) for one in things]
    return {owner.__name__} | {
        one.__name__ for one in classes if issubclass(one, owner) or issubclass(owner, one)
    }


def test_everything_that_is_touched_is_compared(touched: set[Touch]) -> None:
    """`KVCacheManager.block_pool` and 23 others were not."""
    names = compared()
    missing = [
        str(one)
        for one in touched
        if not one.is_optional
        and not one.keyword
        and not any(one.name in names.get(owner, ()) for owner in related(one.owner))
    ]
    assert sorted(missing) == []


def test_arguments_that_are_passed_by_name_are_compared(touched: set[Touch]) -> None:
    calls = _vllm.CALLS
    missing = [
        str(one)
        for one in touched
        if one.keyword and one.keyword not in calls.get(one.owner.__name__, {}).get(one.name, ())
    ]
    assert any(one.keyword for one in touched)
    assert sorted(missing) == []


def test_everything_that_is_compared_is_touched(touched: set[Touch]) -> None:
    """Or the reader of the source does not see it, which would hide what is missing."""
    found = {f"{owner}.{one.name}" for one in touched for owner in related(one.owner)}
    read = [_vllm.FIELDS, _vllm.CALLS, {"AsyncScheduler": _vllm.SCHEDULER}]
    read.append({"KVConnectorBase_V1": _vllm.CONNECTOR})
    names = {f"{owner}.{name}" for table in read for owner, them in table.items() for name in them}
    assert names - found == set(UNTYPED)


SOURCE = """
from __future__ import annotations
from typing import TYPE_CHECKING
from dataclasses import replace
from kvtrie.integrations.vllm._vllm import NewRequestData, RequestStatus
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class Mine:
    def __init__(self, pool: BlockPool, config: VllmConfig) -> None:
        self._pool = pool
        self._seen: dict[str, Request] = {}
        cache, self._size = config.cache_config, 3
        self._on = cache.in_assignment

    def blocks(self) -> list[KVCacheBlock]:
        return [one for one in self._pool.blocks if one.in_comprehension]

    def use(self, given: Mapping[str, Sequence[Request]]) -> None:
        for at, (name, requests) in enumerate(given.items()):
            for request in sorted(requests, key=len):
                request.is_set = RequestStatus.A_MEMBER
                self._seen[name] = request
        self._seen.get("a").through_get
        next(iter(self.blocks())).of_a_result
        self._pool.a_call(of_no_method=1)
        getattr(self._pool, "by_name")
        getattr(self._pool, "perhaps", None)
        replace(NewRequestData.from_request(by_keyword=1), replaced=2)


class Heir(Mine):
    def more(self) -> None:
        self._pool.in_a_subclass
"""
WANTED = {
    *("VllmConfig.cache_config", "CacheConfig.in_assignment", "BlockPool.blocks"),
    *("KVCacheBlock.in_comprehension", "Request.is_set", "RequestStatus.A_MEMBER"),
    *("Request.through_get", "KVCacheBlock.of_a_result", "BlockPool.a_call"),
    *("BlockPool.by_name", "BlockPool.perhaps", "NewRequestData.from_request"),
    *("NewRequestData.from_request(by_keyword=)", "NewRequestData.replaced"),
    "BlockPool.in_a_subclass",
}


def test_what_the_reader_sees(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    made = {type(thing): thing for thing in _vllm.things().values() if not isinstance(thing, type)}
    reader = Reader(made, {})
    reader.read([path])
    assert {str(one) for one in reader.touched} == WANTED
    assert [str(one) for one in reader.touched if one.is_optional] == ["BlockPool.perhaps"]
