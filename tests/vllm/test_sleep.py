"""Sleep mode unmaps KV: nothing is copied meanwhile, and everything works again after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm.conftest import APPROXIMATE
from tests.vllm.prompts import ANSWER, EDITED, NEXT, QUESTION, REASONING
from vllm.config import KVTransferConfig

from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations.vllm import KvtrieConnector, _vllm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.vllm.engine import Engine


@pytest.fixture
def awake(engine: Callable[..., Engine]) -> Iterator[Engine]:
    vllm = engine(connector=APPROXIMATE)
    yield vllm
    vllm.worker.restore_kv_caches()


def test_copies_work_after_sleep(awake: Engine) -> None:
    half = awake.worker
    pool, tensors = awake.kv_pool, half._kv_caches
    # vLLM may call both twice.
    half.unregister_kv_caches()
    half.unregister_kv_caches()
    assert half._copies is None
    assert awake.llm.reset_prefix_cache(reset_connector=True)
    half.restore_kv_caches()
    made = half._copies
    half.restore_kv_caches()
    assert half._copies is made
    assert awake.kv_pool is not pool
    assert half._kv_caches is tensors
    awake.ask(QUESTION + REASONING + ANSWER)
    assert awake.computed_for(QUESTION + ANSWER + NEXT) <= len(NEXT) + 1
    assert awake.counts["tokens_moved"] == len(ANSWER)


def test_a_copy_during_sleep_fails_and_is_computed(awake: Engine) -> None:
    alone = awake.ask(EDITED, mode="exact").tokens
    assert awake.llm.reset_prefix_cache(reset_connector=True)
    awake.ask(QUESTION + REASONING + ANSWER)
    awake.shadow.expect_failures()
    try:
        awake.worker.unregister_kv_caches()
        # Computed from unwritten blocks it would be another answer.
        assert awake.ask(EDITED).tokens == alone
    finally:
        awake.shadow.expect_failures(expected=False)
    assert awake.counts["copies_failed"] > 0
    assert awake.counts["errors"] == 0


def test_without_tensors_there_is_nothing_to_restore(awake: Engine) -> None:
    half = awake.connector
    half.unregister_kv_caches()
    half.restore_kv_caches()
    assert half._copies is None


def test_settings_are_refused_where_sleep_mode_is_on() -> None:
    def asked(**extra: Any) -> bool:
        config = KVTransferConfig(
            kv_connector="KvtrieConnector", kv_role="kv_both", kv_connector_extra_config=extra
        )
        return KvtrieConnector.supports_sleep_mode(config)

    assert asked()
    with pytest.raises(SettingsError, match="did you mean 'gate'"):
        asked(gates="unchecked")


def test_vllm_calls_these_hooks() -> None:
    added = _vllm.ADDED[0, 33]["KVConnectorBase_V1"]
    assert set(added) == {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}
    assert all(name in vars(KvtrieConnector) for name in added)
