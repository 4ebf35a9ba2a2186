"""The scheduler's half of the store alone: who may wait, and whose a result is."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

import kvtrie
from kvtrie.integrations._store_settings import StoreSettings
from kvtrie.integrations.vllm._metadata import FoundSpans, StoreReport, StoreStep
from kvtrie.integrations.vllm._requests import LiveRequest
from kvtrie.integrations.vllm._stats import Counts
from kvtrie.integrations.vllm._stored import StoreRequests
from kvtrie.integrations.vllm._vllm import RequestStatus
from kvtrie.store import PlacedSpan

SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
TOKENS = 100
SPANS = (PlacedSpan(0, 64, is_exact=True, hops=0, delta=0),)


class Half:
    """Requests of a scheduler that is not there."""

    def __init__(self, backend: str = "/a/folder", run_tokens: int = 256) -> None:
        self.counts = Counts()
        settings = StoreSettings(backend=backend, run_tokens=run_tokens)
        self.store = StoreRequests(settings, 16, self.counts, judges=False)
        self.index = kvtrie.RadixIndex(num_blocks=64, block_size=16)
        self.lives: dict[str, LiveRequest] = {}
        self.requests: dict[str, Any] = {}

    def begin(self, name: str, tenant: str | None = None) -> bool:
        """A request arrives, and is looked up; whether it waits."""
        space = SPACE if tenant is None else SPACE.replace(salt=tenant)
        live = LiveRequest(kvtrie.TokenSequence(range(TOKENS), space), kvtrie.EXACT_ONLY)
        request: Any = SimpleNamespace(
            request_id=name,
            num_preemptions=0,
            cache_salt=tenant,
            lora_request=None,
            mm_features=[],
            num_prompt_tokens=TOKENS,
            status=RequestStatus.WAITING,
        )
        self.lives[name], self.requests[name] = live, request
        with self.index.plan(live.seq, kvtrie.EXACT_ONLY) as plan:
            return self.store.seeks(request, live, plan, 0, resumes=False)

    def found(self, name: str) -> FoundSpans | None:
        return self.lives[name].stored

    def counted(self) -> dict[str, int]:
        found = self.counts.take()
        assert found is not None
        return found.data

    def end(self, name: str) -> None:
        self.store.forget(name)
        del self.lives[name], self.requests[name]

    def step(self) -> StoreStep:
        output: Any = SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                resumed_req_ids=set(), req_ids=[], new_block_ids=[], num_computed_tokens=[]
            ),
            total_num_scheduled_tokens=1,
        )
        found = self.store.step(output, [], self.requests, self.lives)
        return StoreStep() if found is None else found

    def report(self, *tickets: int) -> None:
        found = dict.fromkeys(tickets, FoundSpans(SPANS))
        self.store.arrived(StoreReport(found), self.lives)


def test_a_tenant_cannot_take_all_places_to_wait() -> None:
    half = Half()
    hostile = [half.begin(f"a{number}", "hostile") for number in range(200)]
    assert sum(hostile) == 32
    assert half.counted()["store_busy"] == 168
    assert half.begin("b0", "another")
    assert half.begin("c0")
    # Places come back however a request ends.
    tickets = [seek.ticket for seek in half.step().seeks]
    half.report(*tickets[:10])
    for number in range(10, 32):
        half.end(f"a{number}")
    again = [half.begin(f"d{number}", "hostile") for number in range(100)]
    assert sum(again) == 31


def test_a_request_with_an_id_that_was_used_before_takes_no_result_of_another() -> None:
    half = Half()
    assert half.begin("chosen by a client", "one")
    (first,) = half.step().seeks
    half.end("chosen by a client")
    assert half.begin("chosen by a client", "two")
    # What the worker has said of the first arrives now.
    half.report(first.ticket)
    assert half.found("chosen by a client") is None
    assert half.store.waits(half.requests["chosen by a client"])
    step = half.step()
    assert step.drops == [first.ticket]
    assert step.seeks[0].ticket != first.ticket
    half.report(step.seeks[0].ticket)
    assert half.found("chosen by a client") is not None
    assert half.lives["chosen by a client"].ticket == step.seeks[0].ticket


def test_a_request_takes_no_result_of_one_that_lives_under_its_id() -> None:
    half = Half()
    assert half.begin("twice", "one")
    (first,) = half.step().seeks
    # vLLM may be told to take ids as clients give them.
    half.begin("twice", "two")
    half.report(first.ticket)
    assert half.found("twice") is None


def test_a_step_looks_at_no_request_that_neither_waits_nor_has_found_anything() -> None:
    half = Half()
    for number in range(50):
        assert half.begin(f"r{number}", f"tenant {number}")
        for seek in half.step().seeks:
            half.store.arrived(StoreReport({seek.ticket: FoundSpans(())}), half.lives)
    looked: list[str] = []

    class Seen(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            looked.append(key)
            return super().get(key, default)

    assert half.begin("waits")
    (seek,) = half.step().seeks
    half.requests = Seen(half.requests)
    half.step()
    assert looked == []
    half.report(seek.ticket)
    half.step()
    assert looked == ["waits"]
    half.requests["waits"].status = RequestStatus.RUNNING
    assert half.step().drops == [seek.ticket]
    assert len(half.store) == 51
    half.step()
    assert looked == ["waits", "waits"]


def test_a_reset_drops_all_that_was_looked_up_before() -> None:
    half = Half()
    for name in ("sent", "found", "not sent"):
        if name == "not sent":
            tickets = [seek.ticket for seek in half.step().seeks]
            half.report(tickets[1])
        assert half.begin(name)
    assert half.found("found") is not None
    half.store.reset(half.lives.values())
    assert all(live.stored is None and live.is_before_reset for live in half.lives.values())
    assert not any(half.store.waits(one) for one in half.requests.values())
    step = half.step()
    # The worker's half would keep what is sought and dropped in one step.
    assert step.seeks == []
    assert sorted(step.drops) == tickets
    assert step.generation is not None
    half.report(*tickets)
    assert all(live.stored is None for live in half.lives.values())
    assert half.step().generation is None
    half.store.reset([])
    assert half.step().generation not in (None, step.generation)


def test_memory_of_the_process_is_asked_only_for_what_was_written_to_it() -> None:
    half = Half("host")
    assert not half.begin("first")
    assert half.counted()["store/absent"] == 1
    request, live = half.requests["first"], half.lives["first"]
    request.status, request.num_computed_tokens = RequestStatus.FINISHED_STOPPED, TOKENS
    request.num_in_flight_tokens = 0
    half.store.ended(request, live, list(range(7)))
    assert len(half.step().turns) == 1
    assert not half.begin("another tenant's", "other")
    assert half.begin("the same tokens")
    assert len(half.step().seeks) == 1
    # Others write to other stores.
    assert Half().begin("first")


def turn_of(
    moved: list[Any], exact_until: int, num_tokens: int, half: Half | None = None
) -> list[Any]:
    """The pieces of 16 tokens of a turn that has ended."""
    half = half or Half(run_tokens=16)
    live = LiveRequest(kvtrie.TokenSequence(range(num_tokens), SPACE), kvtrie.EXACT_ONLY)
    live.exact_until, live.moved = exact_until, moved
    request: Any = SimpleNamespace(
        request_id="r",
        cache_salt=None,
        lora_request=None,
        mm_features=[],
        num_computed_tokens=num_tokens,
        num_in_flight_tokens=0,
        status=RequestStatus.FINISHED_STOPPED,
    )
    half.store.ended(request, live, range(-(-num_tokens // 16)))
    (turn,) = half.step().turns
    return list(turn.pieces)


def test_no_more_pieces_of_a_turn_are_written_than_are_looked_up() -> None:
    half = Half(run_tokens=16)
    assert len(turn_of([], 16_384, 16_384, half)) == 1024
    found = half.counts.take()
    assert found is None or "store/too_many" not in found.data
    turn = turn_of([], 16_400, 16_400, half)
    assert (len(turn), turn[-1][:2]) == (1024, (16_368, 16_384))
    assert half.counted()["store/too_many"] == 1


@pytest.mark.parametrize("seed", range(40))
def test_a_piece_of_a_turn_has_the_most_hops_of_what_was_moved_into_it(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.randrange(1, 300)
    at, moved = 0, []
    while at < size:
        start = at + chance.randrange(20)
        at = start + chance.randrange(1, 60)
        moved.append((start, at, chance.randrange(5)))
    if seed % 2:
        # As when ranges overlap, and come in no order.
        moved += [(low, low + chance.randrange(1, 90), 3) for low in range(0, size, 37)]
        chance.shuffle(moved)
    exact_until = chance.randrange(size + 1)
    expected = []
    for start in range(0, size, 16):
        end = min(start + 16, size)
        low = max(start, min(end, exact_until))
        hops = max((n for s, e, n in moved if s < end and e > low), default=0)
        expected.append((start, end, low - start, hops if low < end else None))
    assert turn_of(moved, exact_until, size) == expected


def test_a_turn_that_ends_looks_at_each_moved_range_a_few_times() -> None:
    """Each piece looked at all of them, in the scheduler: 10,000 x 1,000 took 0.3 s."""
    looks = 0

    class Watched(int):
        def __lt__(self, other: int) -> bool:
            nonlocal looks
            looks += 1
            return int(self) < int(other)

        def __le__(self, other: int) -> bool:
            nonlocal looks
            looks += 1
            return int(self) <= int(other)

        def __gt__(self, other: int) -> bool:
            nonlocal looks
            looks += 1
            return int(self) > int(other)

    num = 2000
    moved = [(Watched(at * 16), Watched(at * 16 + 16), at % 7) for at in range(num)]
    # More are not written, and were looked at all the same.
    assert len(turn_of(moved, 0, num * 16)) == 1024
    assert looks <= 10 * num
