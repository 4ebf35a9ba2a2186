"""What the events of approximate blocks say of them, and what it takes to say it."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm.prompts import ANSWER, EDITED, QUESTION, REASONING, words
from tests.vllm.traffic import Traffic
from tests.vllm_scheduler.executed import executed
from tests.vllm_scheduler.test_events import UNCHECKED, enabled, listen
from tests.vllm_scheduler.test_images import MOVING, ImageTraffic
from tests.vllm_scheduler.test_traffic import SMALL, Run
from tests.vllm_scheduler.worker import BLOCK
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvtrie.integrations._filled_plan import APPROXIMATE
from kvtrie.integrations.vllm import _events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.vllm_scheduler.core import Core
    from vllm.v1.request import Request

in_flight = pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])


def said(events: Iterable[Any]) -> dict[Any, tuple[str, int]]:
    """Class and hops of blocks by their hashes."""
    found: dict[Any, tuple[str, int]] = {}
    for event in events:
        if isinstance(event, _events.ApproximateBlockStored):
            contents = zip(event.classes, event.hops, strict=True)
            found |= zip(event.block_hashes, contents, strict=True)
    return found


class Truth:
    """Hops of the tokens that each request copies after its own hit, and who stores a block."""

    def __init__(self, vllm: Core, patch: pytest.MonkeyPatch) -> None:
        self._copied: dict[str, dict[int, int]] = defaultdict(dict)
        self._stored: list[Any] = []
        self.said: dict[Any, list[tuple[str, int]]] = defaultdict(list)
        self.num_moved = self.num_after = self.num_more = 0
        half = vllm.connector.planner.half
        add, look_up, cache = half.loads.add, half.requests.looked_up, vllm.pool.cache_full_blocks
        back = half.recovery._set_back

        def looked_up(request: Request, num_local: int) -> Any:
            # What is not found is copied or computed again.
            self._copied.pop(request.request_id, None)
            return look_up(request, num_local)

        def adding(request: Request, live: Any, plan: Any, ranges: Any, **given: Any) -> Any:
            for segment in plan.segments.tolist():
                if segment[4] != APPROXIMATE:
                    continue
                for low, high in ranges:
                    inside = range(max(segment[0], low), min(segment[1], high))
                    self._copied[request.request_id] |= dict.fromkeys(inside, segment[5])
            return add(request, live, plan, ranges, **given)

        def caching(**given: Any) -> None:
            names = ("request", "num_cached_blocks", "num_full_blocks")
            self._stored.append(tuple(given[name] for name in names))
            cache(**given)

        def publish(batch: Any) -> None:
            for event in batch.events:
                for one, it in said([event]).items():
                    self.said[one].append(it)

        def set_back(request: Request, position: int) -> None:
            back(request, position)
            copied = self._copied[request.request_id]
            for at in [at for at in copied if at >= request.num_computed_tokens]:
                del copied[at]

        patch.setattr(half.recovery, "_set_back", set_back)
        patch.setattr(half.requests, "looked_up", looked_up)
        patch.setattr(half.loads, "add", adding)
        patch.setattr(vllm.pool, "cache_full_blocks", caching)
        patch.setattr(vllm.connector.planner._events._publisher, "publish", publish)

    def compare(self) -> None:
        """Every block that was stored since, if it is approximate."""
        stored, self._stored = self._stored, []
        for request, first, last in stored:
            copied = self._copied[request.request_id]
            for number in range(first, last):
                one = maybe_convert_block_hash(request.block_hashes[number])
                inside = range(number * BLOCK, (number + 1) * BLOCK)
                found = [copied[at] for at in inside if at in copied]
                if one not in self.said:
                    # It was published as exact.
                    assert not found
                    continue
                kind, hops = self.said[one].pop(0)
                assert kind == "moved" or not found
                assert hops >= max(found, default=0)
                self.num_moved += bool(found)
                self.num_after += not found
                self.num_more += (kind, hops) != (
                    ("moved", max(found)) if found else ("after_moved", 0)
                )
        assert not any(self.said.values())
        self.said.clear()


@in_flight
@pytest.mark.parametrize("fails", [False, True], ids=["", "copies-fail"])
@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
def test_no_block_is_called_better_than_it_is(
    core: Callable[..., Core],
    monkeypatch: pytest.MonkeyPatch,
    in_flight: bool,
    fails: bool,
    images: bool,
) -> None:
    """Whoever stores it: with equal prefixes, preemptions, aborts and copies that fail."""
    vllm = core(
        connector=MOVING if images else UNCHECKED,
        gaps=True,
        in_flight=in_flight,
        shadow=not fails,
        kv_events_config=enabled(),
        **SMALL,
    )
    listen(vllm)
    truth = Truth(vllm, monkeypatch)
    sort = vllm.connector.planner.sort_events

    def sorting() -> None:
        sort()
        truth.compare()

    monkeypatch.setattr(vllm.connector.planner, "sort_events", sorting)
    seed = 61 + 4 * images + 2 * fails + in_flight
    run = Run(vllm, seed=seed, traffic=ImageTraffic(seed) if images else Traffic(seed))
    if fails:
        vllm.worker.fails = lambda _: run.rng.random() < 0.2
    run.go(200)
    assert vllm.counts["errors"] == 0
    assert vllm.num_preempted
    assert run.num_aborted
    assert truth.num_moved > 50
    assert truth.num_after > 50
    # A request may compute what another one has copied, or it itself before a preemption.
    assert truth.num_more < (truth.num_moved + truth.num_after) // 20


def test_what_is_reported_again_is_what_was_reported(core: Callable[..., Core]) -> None:
    """vLLM's events of reuse have blocks that no request copies into."""
    vllm = core(connector=UNCHECKED, kv_events_config=enabled())
    _, others = listen(vllm)
    vllm.ask(QUESTION + REASONING + ANSWER)
    vllm.ask(EDITED)
    before = said(others)
    assert set(before.values()) == {("moved", 1), ("after_moved", 0)}
    others.clear()
    vllm.request(vllm.add(EDITED + words(20, 9), max_tokens=1)).kv_cache_report_mode = "full"
    vllm.drain()
    again = {one: it for one, it in said(others).items() if one in before}
    assert again == before


HASHES = [maybe_convert_block_hash(BlockHash(one)) for one in (b"a", b"b", b"c", b"d")]


class Sorted:
    """Events without vLLM: blocks of 2 tokens of a request, whose second begins a lineage."""

    def __init__(self) -> None:
        pool: Any = SimpleNamespace(num_gpu_blocks=10, kv_event_queue=[])
        self._queue = pool.kv_event_queue
        self.request: Any = SimpleNamespace(block_hashes=[b"a", b"b", b"c", b"d"])
        self._published: list[Any] = []
        publisher: Any = SimpleNamespace(publish=lambda batch: self._published.extend(batch.events))
        self.events = _events.Events(pool, 2, lambda: [self.request], publisher)
        self.events.begin(BlockHash(b"b"), 1)

    def happens(self, event: Any) -> list[tuple[str, int]]:
        self._published.clear()
        self._queue.append(event)
        self.events.sort()
        return list(said(self._published).values())

    def stored(self, first: int = 1, end: int = 3) -> list[tuple[str, int]]:
        hashes, tokens = HASHES[first:end], [1, 2] * (end - first)
        contents = self.happens(BlockStored(hashes, HASHES[first - 1], tokens, 2, None, None, None))
        assert self._queue == []
        return contents

    def removed(self) -> None:
        self.happens(BlockRemoved(HASHES[1:3], None))
        assert self._queue == []


@pytest.mark.parametrize("cleared", [False, True], ids=["removed", "cleared"])
def test_a_hash_has_the_worst_of_its_blocks_until_the_last_one_is_gone(cleared: bool) -> None:
    blocks = Sorted()
    blocks.events.moved(blocks.request, 2, 4, 3)
    moved = [("moved", 3), ("after_moved", 0)]
    assert blocks.stored() == blocks.stored() == moved
    blocks.removed()
    assert blocks.stored() == moved
    if cleared:
        blocks.happens(AllBlocksCleared())
        blocks._queue.clear()
    else:
        blocks.removed()
        blocks.removed()
    assert blocks.stored() == [("after_moved", 0)] * 2


def test_a_lineage_that_begins_again_keeps_what_is_known_of_its_blocks() -> None:
    """Requests of one id and prompt have one lineage."""
    blocks = Sorted()
    blocks.events.moved(blocks.request, 2, 4, 3)
    assert blocks.stored(1, 2) == [("moved", 3)]
    blocks.events.begin(BlockHash(b"b"), 1)
    blocks.events.moved(blocks.request, 2, 4, 1)
    assert blocks.stored(1, 2) == [("moved", 3)]
    blocks.happens(BlockRemoved([HASHES[1]], None))
    assert blocks.stored(1, 2) == [("moved", 3)]


def test_what_is_known_of_blocks_outlives_an_event_that_cannot_be_sorted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = Sorted()
    blocks.events.moved(blocks.request, 2, 4, 3)

    def boom(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(_events.Events, "_sort_stored", boom)
    with pytest.raises(RuntimeError, match="injected"):
        blocks.stored()
    monkeypatch.undo()
    # A block after them is not published as exact.
    assert blocks.stored(3, 4) == [("after_moved", 0)]
    # vLLM reports them again.
    assert blocks.stored() == [("moved", 3), ("after_moved", 0)]


def test_hashes_of_waiting_requests_are_looked_at_in_proportion_to_what_is_stored() -> None:
    """With many of them, each few blocks had all looked at."""
    pool: Any = SimpleNamespace(num_gpu_blocks=10, blocks=[], kv_event_queue=[])
    waiting: Any = SimpleNamespace(block_hashes=[BlockHash(b"%d" % at) for at in range(1000)])
    num_looked = 0

    def requests() -> list[Any]:
        nonlocal num_looked
        num_looked += len(waiting.block_hashes)
        return [waiting]

    events = _events.Events(pool, 2, requests, None)
    count = 5000
    for at in range(count):
        parent = BlockHash(b"begins %d" % at)
        events.begin(parent, 1)
        parent = maybe_convert_block_hash(parent)
        pool.kv_event_queue.append(BlockStored([at], parent, [1, 2], 2, None, None, None))
        events.sort()
        assert len(events._approximate) <= 2 * 10 + 1000
    assert 5000 < num_looked <= 2 * count + 1000


def work_of_a_block(core: Callable[..., Core], count: int) -> float:
    """Instructions for each block stored by so many running requests, all approximate."""
    vllm = core(
        connector=UNCHECKED,
        shadow=False,
        blocks=16_000,
        max_model_len=512,
        max_num_seqs=1000,
        max_num_batched_tokens=100_000,
        kv_events_config=enabled(),
    )
    _, others = listen(vllm)
    text = words(80, 1)
    vllm.ask(words(40, 2) + text)
    for number in range(count):
        vllm.add(text + words(60, 100 + number), max_tokens=60)
    while len(vllm.scheduler.running) < count:
        vllm.step()
    assert vllm.worker.num_moved >= count * len(text) // 2
    others.clear()
    took = 0
    for _ in range(2 * BLOCK):
        with executed() as run:
            vllm.step()
        took += run[0]
    stored = [one for one in others if isinstance(one, _events.ApproximateBlockStored)]
    assert len(stored) == 2 * count
    assert vllm.counts["errors"] == 0
    vllm.abort(list(vllm.answers))
    vllm.drain()
    return took / len(stored)


def test_what_a_block_holds_takes_no_look_at_other_requests(core: Callable[..., Core]) -> None:
    """A tenant with many running requests would buy a search of all of them with each block."""
    few, many = work_of_a_block(core, 10), work_of_a_block(core, 1000)
    assert many < 1.5 * few
