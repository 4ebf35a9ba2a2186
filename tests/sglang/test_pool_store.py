"""The store next to SGLang's pool, without an engine."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import kvtrie
from kvtrie.integrations._store_settings import StoreSettings
from kvtrie.integrations.sglang import _stored
from kvtrie.integrations.sglang._stored import PoolStore
from kvtrie.store import HostBackend, SpanShape, SpanStore, StoreKey
from kvtrie.store.runs import Gone

if TYPE_CHECKING:
    from collections.abc import Iterator

SPACE = kvtrie.Namespace(model="m@1", kv_dtype="float32", salt="a")
LAYOUT = kvtrie.KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", block_size=1)


class Held(HostBackend):
    """Looks a run up when it is allowed to."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.goes = threading.Event()
        self.goes.set()

    def exists(self, names: Any) -> Any:
        assert self.goes.wait(30)
        return super().exists(names)


class Request:
    """What the store reads of a request of SGLang's."""

    retraction_count = 0
    lora_id = input_embeds = positional_embed_overrides = multimodal_inputs = None

    def __init__(self, count: int) -> None:
        self.rid = "one"
        self.full_untruncated_fill_ids = range(count)


@pytest.fixture
def pooled() -> Iterator[PoolStore]:
    store = SpanStore(
        Held(1 << 24),
        StoreKey(b"a secret of 16 bytes or more"),
        SPACE,
        SpanShape.of(LAYOUT),
        max_bytes=1 << 24,
    )
    pool = kvtrie.KVPool(LAYOUT, num_blocks=1100)
    settings = StoreSettings(backend="host", min_tokens=1, wait=0.0)
    one = PoolStore(store, settings, SPACE, pool, pool, page_size=1)
    yield one
    one.close()


@pytest.mark.parametrize(("device", "is_pinned"), [("cpu", False), ("cuda", True)])
def test_rows_for_a_pool_on_cuda_arrive_in_pinned_memory(
    pooled: PoolStore, device: str, is_pinned: bool
) -> None:
    pool: Any = SimpleNamespace(device=torch.device(device))
    one = PoolStore(pooled.store, pooled._settings, SPACE, pool, pool, page_size=1)
    assert one._loader._pinned is is_pinned
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


def test_that_it_stopped_is_told_at_once(pooled: PoolStore) -> None:
    told: list[Any] = []
    pooled.tell = lambda *news: told.append(news)
    pooled.stop("weights")
    assert told == [("store_stopped", None, 1)]
    pooled.stop("weights")
    assert len(told) == 1


@pytest.mark.parametrize("name", ["store_late", "store_busy"])
def test_requests_that_are_not_loaded_are_told_at_once(
    pooled: PoolStore, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    pooled.tell = lambda *news: told.append(news)
    backend: Any = pooled.store._backend
    backend.goes.clear()
    # Somebody else may write there.
    monkeypatch.setattr(PoolStore, "is_in_host", False)
    if name == "store_busy":
        monkeypatch.setattr(pooled._places, "take", lambda _: False)
    request: Any = Request(40)
    seq = kvtrie.TokenSequence(list(range(40)), SPACE)
    pooled.seek(request, seq, 0, 0, None)
    assert pooled.promised(request, seq, 0) == 0
    assert not pooled.waits(request, object(), is_idle=False)
    assert (name, None, 1) in told
    backend.goes.set()


@pytest.mark.parametrize("count", [1024, 1100])
def test_no_more_runs_of_a_turn_are_written_than_are_looked_up(
    pooled: PoolStore, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each token is a message.
    monkeypatch.setattr(pooled, "_borders", lambda _: tuple(range(1, count)))
    monkeypatch.setattr(_stored, "gone_of", lambda *_: Gone(()))
    stream: Any = SimpleNamespace()
    request: Any = Request(count)
    blocks = np.arange(count, dtype=np.int32)
    slots = torch.arange(count)
    space = SPACE.replace(salt="one")
    pooled.ended(request, blocks, slots, slots[:0], space, stream=stream, keeps=True, session=None)
    assert pooled.wait(30)
    counts = pooled.store.counts()
    assert pooled.store.num_runs == 1024
    assert counts.get("too_many", 0) == count - 1024


def test_a_request_that_ends_reads_its_slots_before_it_is_on_the_stream_of_the_steps(
    pooled: PoolStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    class Slots:
        """Slots on a device: to have them on the host is to wait for the current stream."""

        def __len__(self) -> int:
            return 3

        def numpy(self, *, force: bool) -> Any:
            assert force
            order.append("slots")
            return np.array([7, 8, 9])

    @contextmanager
    def on_stream() -> Iterator[None]:
        order.append("stream")
        yield

    monkeypatch.setattr(pooled, "_on_stream", on_stream)
    request: Any = Request(19)
    after: Any = Slots()
    blocks, slots = np.arange(16, dtype=np.int32), torch.arange(16)
    pooled.ended(request, blocks, slots, after, SPACE, stream=None, keeps=False, session=None)
    assert pooled.wait(30)
    assert order == ["slots", "stream"]
    assert pooled.store.num_runs == 1
