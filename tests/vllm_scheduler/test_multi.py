"""The connector among others, under vLLM's `MultiConnector`: exact reuse works, more is refused."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm_scheduler.core import connector_config, multi_config
from tests.vllm_scheduler.worker import BLOCK, continuation
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvtrie.integrations.vllm._support import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm_scheduler.core import Core

RNG = random.Random(1)
QUESTION, THOUGHT, ANSWER, NEXT = (RNG.choices(range(3, 500), k=n) for n in (200, 160, 150, 40))


class Store(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # untyped here
    """A connector that has nothing, and watches."""

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:  # noqa: ARG002
        return 0, False

    def update_state_after_alloc(self, *args: Any) -> None: ...
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ARG002
        return KVConnectorMetadata()

    def request_finished_all_groups(self, *args: Any) -> Any:  # noqa: ARG002
        return False, {"stored": True}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


STORE = {"kv_connector": "Store", "kv_connector_module_path": __name__, "kv_role": "kv_both"}


@pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
def test_exact_reuse_beside_another_connector(core: Callable[..., Core], in_flight: bool) -> None:
    vllm = core(connector={"gate": None}, beside=STORE, in_flight=in_flight, shadow=False)
    assert type(vllm.scheduler.connector).__name__ == "MultiConnector"
    vllm.ask(QUESTION + THOUGHT + ANSWER)
    edited = QUESTION + ANSWER + NEXT
    # vLLM's own hit ends with a block; the tail of what is the same is copied.
    assert len(QUESTION) % BLOCK
    assert vllm.computed_for(edited) == len(edited) - len(QUESTION)
    assert vllm.ask(edited) == continuation(edited, 8)
    assert vllm.counts["tokens_exact"] > 0
    vllm.connector._counts.add("plans_stale", 3)
    stats = vllm.scheduler.connector.get_kv_connector_stats()
    assert stats["KvtrieConnector"].data == {"plans_stale": 3}
    assert vllm.reset_cache()
    assert len(vllm.connector.planner.sources) == 0


def test_what_cannot_stand_beside_another_connector(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = core(connector={"gate": None}, beside=STORE, shadow=False)
    config = vllm.core.vllm_config
    caches = vllm.scheduler.kv_cache_config

    def make(*connectors: Any) -> None:
        config.kv_transfer_config = KVTransferConfig(**multi_config(*connectors))
        with set_current_vllm_config(config):
            KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)

    before = config.kv_transfer_config
    try:
        make(connector_config(gate=None), STORE)
        with pytest.raises(UnsupportedError, match="approximate KV as if it were exact"):
            make(connector_config(gate="unchecked"), STORE)
        monkeypatch.setattr(config.scheduler_config, "async_scheduling", True)
        with pytest.raises(UnsupportedError, match='kv_load_failure_policy to "fail"'):
            make(connector_config(gate=None), STORE)
    finally:
        config.kv_transfer_config = before
