"""The store next to SGLang's pool, without an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import kvtrie
from kvtrie.integrations._store_settings import StoreSettings
from kvtrie.integrations.sglang._stored import PoolStore
from kvtrie.store import HostBackend, SpanShape, SpanStore, StoreKey

if TYPE_CHECKING:
    from collections.abc import Iterator

SPACE = kvtrie.Namespace(model="m@1", kv_dtype="float32", salt="a")
LAYOUT = kvtrie.KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", block_size=1)


@pytest.fixture
def pooled() -> Iterator[PoolStore]:
    store = SpanStore(
        HostBackend(1 << 24),
        StoreKey(b"a secret of 16 bytes or more"),
        SPACE,
        SpanShape.of(LAYOUT),
        max_bytes=1 << 24,
    )
    pool = kvtrie.KVPool(LAYOUT, num_blocks=64)
    one = PoolStore(store, StoreSettings(backend="host"), SPACE, pool, pool, page_size=1)
    yield one
    one.close()


def test_nothing_is_read_after_a_flush_that_failed(
    pooled: PoolStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing() -> None:
        raise MemoryError

    monkeypatch.setattr(pooled._turns, "give_up", failing)
    with pytest.raises(MemoryError):
        pooled.give_up()
    assert pooled._turns.pool is None
