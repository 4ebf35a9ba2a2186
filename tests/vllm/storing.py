"""vLLM's own storing connector in an engine without a GPU: its copies are plain ones, made at once.

Only what it copies with is replaced: which blocks it stores and loads, under which keys, and when,
is vLLM's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tests.vllm.inside import SCHEDULER, connector_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.simple_kv_offload import worker

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest
    from tests.vllm.engine import Engine

NAME = "SimpleCPUOffloadConnector"


class _Stream:
    def __init__(self, **_: Any) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class _Event:
    """What has been recorded is done."""

    def record(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class _Cuda:
    Stream = _Stream

    @staticmethod
    def current_stream() -> None: ...


class _Torch:
    cuda = _Cuda
    Event = _Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class PlainCopies:
    """In the place of copies by a GPU's DMA."""

    def init(self, device: Any, host: Any, *_: Any) -> None:
        self.device, self.host = device, host
        self.num_loaded = self.num_stored = 0

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: Any = None,
    ) -> None:
        del wait_event
        sources, dests = (self.device, self.host) if is_store else (self.host, self.device)
        self.num_stored += len(src_blocks) * is_store
        self.num_loaded += len(src_blocks) * (not is_store)
        for name, source in sources.items():
            dests[name][dst_blocks] = source[src_blocks]
        events_list.append((event_idx, _Event()))

    def shutdown(self) -> None: ...


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "torch", _Torch())
    monkeypatch.setattr(worker, "DmaCopyBackend", PlainCopies)
    monkeypatch.setattr(worker, "PIN_MEMORY", False)


def options(mine: Mapping[str, Any], *, is_exact: bool, size: int = 64 << 20) -> dict[str, Any]:
    """Options of an engine with kvtrie's connector first; last in exact mode."""
    children: list[dict[str, Any]] = [connector_config(**mine)]
    more = {"cpu_bytes_to_use": size, "lazy_offload": False}
    other = {"kv_connector": NAME, "kv_role": "kv_both", "kv_connector_extra_config": more}
    children = [other, *children] if is_exact else [*children, other]
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }
    scheduler = {} if is_exact else {"scheduler_cls": SCHEDULER}
    return {"kv_transfer_config": config, "shadow": False, **scheduler}


def halves(engine: Engine) -> tuple[Any, PlainCopies]:
    """The storing connector's manager in the scheduler, and the copies of its worker."""
    (manager,) = (
        one.scheduler_manager
        for one in engine.scheduler.connector.sub_connectors
        if hasattr(one, "scheduler_manager")
    )
    group: Any = kv_transfer_state.get_kv_transfer_group()
    (copies,) = (
        one.worker_handler._backend for one in group.sub_connectors if type(one).__name__ == NAME
    )
    return manager, copies
