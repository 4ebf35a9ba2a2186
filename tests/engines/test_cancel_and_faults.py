"""No block is lost: requests cancelled at every step, and a failure at every call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvtrie._core import LayoutError
from kvtrie.engines import _paged_cache, _scheduler
from kvtrie.engines._store import Store
from kvtrie.engines._text import TextStream
from kvtrie.pool import KVPool

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from kvtrie.engines.transformers import Generator, Request

    Make = Callable[..., Generator]
    Ids = Callable[..., np.ndarray]
    Check = Callable[[Generator], None]

OPTIONS: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True}


def submit_three(generator: Generator, ids: Ids) -> list[Request]:
    head = ids(10).tolist()
    return [
        generator.submit([*head, *ids(6, seed=1).tolist()], **OPTIONS),
        generator.submit([*head, *ids(3, seed=2).tolist()], **OPTIONS),
        generator.submit(ids(13, seed=3), **OPTIONS),
    ]


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("num_blocks", [64, 9])
def test_cancel_at_every_step(
    victim: int, num_blocks: int, make: Make, ids: Ids, drain: Check, check_drained: Check
) -> None:
    plain = make()
    expected = submit_three(plain, ids)
    drain(plain)
    for steps in range(40):
        generator = make(num_blocks=num_blocks, prefill_chunk=5)
        requests = submit_three(generator, ids)
        for _ in range(steps):
            generator.step()
        was_finished = requests[victim].status == "finished"
        generator.cancel(requests[victim])
        drain(generator)
        check_drained(generator)
        for number, (request, want) in enumerate(zip(requests, expected, strict=True)):
            if number != victim or was_finished:
                assert request.tokens == want.tokens
            else:
                assert request.finish_reason == "cancelled"
                assert request.tokens == want.tokens[: len(request.tokens)]
        if was_finished:
            return
    pytest.fail("40 steps were not enough")


def test_cancelled_work_is_reusable(make: Make, ids: Ids) -> None:
    generator = make(prefill_chunk=10)
    request = generator.submit(ids(30), **OPTIONS)
    generator.step()
    generator.step()
    generator.cancel(request)
    # 20 of 30 tokens were computed: five blocks of four.
    assert generator.generate(ids(30), max_new_tokens=1).usage.exact == 20


def test_cancel_twice_or_after_the_end_does_nothing(
    make: Make, ids: Ids, check_drained: Check
) -> None:
    generator = make()
    request = generator.submit(ids(9), max_new_tokens=2, ignore_eos=True)
    generator.step()
    generator.step()
    assert request.finish_reason == "length"
    generator.cancel(request)
    assert request.finish_reason == "length"
    other = generator.submit(ids(9), **OPTIONS)
    generator.cancel(other)
    generator.cancel(other)
    assert other.finish_reason == "cancelled"
    check_drained(generator)


def test_leaving_a_stream_early_cancels_it(make: Make, ids: Ids, check_drained: Check) -> None:
    generator = make()
    events = generator.stream(ids(9), **OPTIONS)
    next(events)
    next(events)
    assert generator.num_running == 1
    events.close()
    check_drained(generator)


class Fuse:
    def __init__(self, at: int) -> None:
        self.left = at
        self.error: type[BaseException] = RuntimeError

    def burn(self, name: str) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error(f"injected into {name}")


class Faulty:
    """Passes all calls on; the fuse counts the guarded ones, and one of them fails."""

    def __init__(self, real: Any, fuse: Fuse, *guarded: str) -> None:
        self.real = real
        self._fuse = fuse
        self._guarded = guarded

    def __contains__(self, item: object) -> bool:
        return item in self.real

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.real, name)
        if name not in self._guarded:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._fuse.burn(name)
            plain = [arg.real if isinstance(arg, Faulty) else arg for arg in args]
            if "evict_from" in kwargs:
                kwargs["evict_from"] = kwargs["evict_from"].real
            return found(*plain, **kwargs)

        return call


def faulty(generator: Generator, fuse: Fuse, monkeypatch: pytest.MonkeyPatch) -> None:
    store = generator._store
    generator._store = Store(
        index=Faulty(store.index, fuse, "plan"),  # type: ignore[arg-type] # a stand-in
        allocator=Faulty(store.allocator, fuse, "allocate"),  # type: ignore[arg-type] # a stand-in
        pool=store.pool,
        ledger=Faulty(  # type: ignore[arg-type] # a stand-in
            store.ledger,
            fuse,
            *("begin", "schedule", "confirm", "append", "add_blocks"),
            *("commit", "finish"),
        ),
    )
    generator._scheduler._store = generator._store
    for owner, name in (
        (KVPool, "apply"),
        (_paged_cache._PagedLayer, "update"),
        (TextStream, "push"),
        (_scheduler, "pick"),
    ):
        real = getattr(owner, name)

        def guarded(*args: Any, _real: Any = real, _name: str = name, **kwargs: Any) -> Any:
            fuse.burn(_name)
            return _real(*args, **kwargs)

        monkeypatch.setattr(owner, name, guarded)


@pytest.mark.parametrize("num_blocks", [64, 9])
def test_failure_at_every_call_loses_no_block(
    num_blocks: int, make: Make, ids: Ids, drain: Check, check_drained: Check
) -> None:
    plain = make()
    expected = [request.tokens for request in submit_three(plain, ids)]
    drain(plain)
    failures = 0
    at = 0
    while True:
        # Every call at first, then fewer and fewer: later calls repeat earlier ones.
        at += 1 + at // 24
        generator = make(num_blocks=num_blocks, prefill_chunk=8)
        fuse = Fuse(at)
        with pytest.MonkeyPatch.context() as patch:
            faulty(generator, fuse, patch)
            requests = submit_three(generator, ids)
            drain(generator)
        check_drained(generator)
        failed = [request for request in requests if request.finish_reason == "error"]
        failures += len(failed)
        for request, want in zip(requests, expected, strict=True):
            assert request.tokens == want[: len(request.tokens)]
            if request not in failed:
                assert request.tokens == want
        if fuse.left > 0:
            assert not failed
            break
        # One call failed: one request ends with it.
        assert [str(request.error)[:13] for request in failed] == ["injected into"]
        assert generator.generate(ids(30), max_new_tokens=1).usage.prompt == 30
        check_drained(generator)
    assert failures > 50


@pytest.mark.parametrize("at", [1, 2, 3, 5, 8, 13, 30])
def test_interrupt_ends_the_request_and_is_raised(
    at: int, make: Make, ids: Ids, monkeypatch: pytest.MonkeyPatch, check_drained: Check
) -> None:
    generator = make(prefill_chunk=8)
    fuse = Fuse(at)
    fuse.error = KeyboardInterrupt
    faulty(generator, fuse, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        list(generator.stream(ids(20), **OPTIONS))
    check_drained(generator)


def test_stream_raises_what_ended_its_request(
    make: Make, ids: Ids, monkeypatch: pytest.MonkeyPatch, check_drained: Check
) -> None:
    generator = make()
    other = generator.submit(ids(9, seed=1), **OPTIONS)
    tokens = []

    def fail_at_four(*args: Any) -> int:
        tokens.append(args)
        if len(tokens) == 4:
            raise RuntimeError("injected")
        return 5

    monkeypatch.setattr(_scheduler, "pick", fail_at_four)
    seen: list[int | None] = []
    with pytest.raises(RuntimeError, match="injected"):
        seen.extend(event.token for event in generator.stream(ids(9), **OPTIONS))
    monkeypatch.undo()
    while other.status != "finished":
        generator.step()
    assert other.finish_reason == "length"
    check_drained(generator)


def test_model_that_skips_the_cache_is_found_out(
    make: Make, ids: Ids, monkeypatch: pytest.MonkeyPatch, check_drained: Check
) -> None:
    generator = make()
    layer = generator._model.model.layers[1].self_attn
    real = layer.forward
    monkeypatch.setattr(
        layer, "forward", lambda *a, **kw: real(*a, **{**kw, "past_key_values": None})
    )
    with pytest.raises(LayoutError, match="no K and V for layer 1"):
        generator.generate(ids(9), **OPTIONS)
    check_drained(generator)
