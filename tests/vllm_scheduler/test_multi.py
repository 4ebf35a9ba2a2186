"""The connector among others, under vLLM's `MultiConnector`, is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.vllm.inside import connector_config
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvtrie.integrations.vllm._support import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm_scheduler.core import Core


@pytest.mark.parametrize("gate", [None, "unchecked"])
def test_other_connectors_around_it_are_refused(
    core: Callable[..., Core], gate: str | None
) -> None:
    vllm = core(connector={"gate": None}, shadow=False)
    config, before = vllm.core.vllm_config, vllm.core.vllm_config.kv_transfer_config
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [connector_config(gate=gate)]},
    )
    try:
        with (
            set_current_vllm_config(config),
            pytest.raises(UnsupportedError, match="MultiConnector holds connectors that may"),
        ):
            KVConnectorFactory.create_connector(
                config, KVConnectorRole.WORKER, vllm.scheduler.kv_cache_config
            )
    finally:
        config.kv_transfer_config = before
