"""The simulated fleet: figures worked by hand, those of a plain simulation, what always holds."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import simulate
from simulation.fleet import Fleet, Outcome, Setting, arrivals, simulated
from simulation.routers import ROUTERS, ByEvents
from simulation.workers import Texts
from tests.replay import traffic

from kvtrie.replay import OVERLAYS, Trace, TraceError, read_trace

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 16
KNOWING = [name for name, router in ROUTERS.items() if router is not None]
COUNTING = ["prefix only", "KvIndexer and sent", "oracle"]
# A token takes a millisecond.
SETTING = Setting(workers=2, num_blocks=100, speed=1000, overhead=0, load_weight=0)


def row(seconds: float, *ids: int) -> traffic.Row:
    """A prompt of full blocks, and one token after them, which is always computed."""
    length = len(ids) * SIZE + 1
    return {"timestamp": 1000 * seconds, "input_length": length, "hash_ids": [*ids, 10**6]}


def traced(folder: Path, *rows: traffic.Row, block_size: int = SIZE) -> Trace:
    return read_trace(traffic.write(folder / "t.jsonl", rows), block_size)


def two_chats(folder: Path) -> Trace:
    """The second turns come in the other order: in turn, none finds its own history."""
    turns = (1, 2, 3), (5, 6, 7), (5, 6, 7, 8), (1, 2, 3, 4)
    return traced(folder, *(row(10 * at, *ids) for at, ids in enumerate(turns)))


@pytest.mark.parametrize("router", KNOWING)
def test_routers_that_know_a_cache_send_a_chat_where_it_is(router: str, tmp_path: Path) -> None:
    found = simulated(two_chats(tmp_path), SETTING, router)
    assert (found.prompt, found.exact, found.moved) == (49 + 49 + 65 + 65, 48 + 48, 0)
    # Ties go to the worker that has computed less.
    assert found.by_worker == [49 + 17, 49 + 17]
    assert found.spread == 1
    assert found.waits == [0, 0, 0, 0]
    assert found.firsts == pytest.approx([0.049, 0.049, 0.017, 0.017])
    assert (found.over, found.under) == (0, 0)


def test_round_robin_by_hand(tmp_path: Path) -> None:
    found = simulated(two_chats(tmp_path), SETTING, "round robin")
    assert (found.exact, found.claims) == (0, 0)
    assert found.by_worker == [49 + 65, 49 + 65]
    assert found.hit_rate == 0


def test_a_prompt_that_has_not_ended_counts_where_it_was_sent(tmp_path: Path) -> None:
    trace = traced(tmp_path, row(0, 1, 2, 3), row(0.009, 1, 2, 3, 4))
    for router in KNOWING:
        found = simulated(trace, SETTING, router)
        if router in COUNTING:
            assert (found.exact, found.by_worker) == (48, [49 + 17, 0])
            assert found.waits == pytest.approx([0, 0.040])
            assert found.firsts == pytest.approx([0.049, 0.057])
        else:
            # Nothing is cached yet, so the idle worker computes it again.
            assert (found.exact, found.by_worker) == (0, [49, 65])
            assert found.waits == [0, 0]
        assert found.under == 0
        # Only a router without events takes what it has sent for cached.
        assert (found.over, found.over_tokens) == ((1, 48) if router == "prefix only" else (0, 0))


@pytest.mark.parametrize(("weight", "by_worker"), [(1, [49 + 17 + 17, 0]), (3, [49 + 17, 65])])
def test_load_weight_by_hand(weight: float, by_worker: list[int], tmp_path: Path) -> None:
    # The third would compute 17 tokens after 17 others, or 65: 17 + 17 weight, or 65.
    trace = traced(tmp_path, row(0, 1, 2, 3), row(10, 1, 2, 3, 4), row(10.001, 1, 2, 3, 5))
    for router in KNOWING:
        found = simulated(trace, replace(SETTING, load_weight=weight), router)
        assert found.by_worker == by_worker


def test_a_restart_empties_the_pool_and_routers_hear_of_it(tmp_path: Path) -> None:
    trace = traced(tmp_path, row(0, 1, 2, 3), row(100, 1, 2, 3))
    alone = replace(SETTING, workers=1)
    for router in ROUTERS:
        assert simulated(trace, alone, router).exact == 48
        found = simulated(trace, replace(alone, restarts=1), router)
        assert (found.exact, found.restarts) == (0, 1)
        assert (found.over, found.under) == (0, 0)


def test_a_prompt_begins_again_after_a_restart(tmp_path: Path) -> None:
    at = random.Random(0).uniform(0, 100)
    trace = traced(tmp_path, row(0, 1, 2, 3), row(100, 1, 2, 3))
    # The first takes 490 s, and the second waits for it in the queue.
    slow = replace(SETTING, workers=1, restarts=1, speed=0.1)
    found = simulated(trace, slow, "KvIndexer")
    assert found.firsts == pytest.approx([at + 490, at + 490 + 10 - 100])
    assert found.waits == pytest.approx([at, at + 490 - 100])
    assert (found.exact, found.computed) == (48, 49 + 1)


def test_round_robin_finds_what_a_plain_simulation_of_each_pool_finds(tmp_path: Path) -> None:
    rows = traffic.mooncake(5, 600)
    trace = traced(tmp_path, *rows, block_size=64)
    # So far apart that nothing waits.
    apart = Setting(workers=3, num_blocks=24, speedup=1e-6)
    found = simulated(trace, apart, "round robin")
    each = [traffic.simulated(rows[at::3], 64, 24, "lru") for at in range(3)]
    assert found.exact == sum(each) > 0
    assert max(found.waits) == 0


def crowded(trace: Trace) -> Setting:
    """A fleet that has queues, evicts and restarts."""
    blocks = len(trace.longest.cached) + 8
    return Setting(workers=5, num_blocks=blocks, speed=4000, speedup=0.04, restarts=9, seed=3)


def check(found: Outcome, trace: Trace) -> None:
    assert found.prompt == sum(one.num_tokens for one in trace.requests)
    assert found.exact + found.moved + found.computed == found.prompt
    assert sum(found.by_worker) == found.computed
    assert len(found.waits) == len(found.firsts) == len(trace.requests)
    assert min(found.waits) >= 0
    assert found.spread >= 1
    assert found.restarts == 9
    if found.router.startswith("KvIndexer"):
        assert found.claims == len(trace.requests) * len(found.by_worker)
        assert (found.over, found.under) == (0, 0)


@pytest.mark.parametrize("router", ROUTERS)
def test_tokens_are_conserved_and_the_index_claims_what_workers_have(
    router: str, tmp_path: Path
) -> None:
    trace = traced(tmp_path, *traffic.mooncake(8, 400), block_size=64)
    found = simulated(trace, crowded(trace), router)
    check(found, trace)
    assert found.exact > 0
    assert found.moved == found.holes == 0
    assert max(found.waits) > 0
    assert found == simulated(trace, crowded(trace), router)
    assert found != simulated(trace, replace(crowded(trace), seed=4), router)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_holes_and_moved_runs_of_synthetic_reasoning(overlay: str, tmp_path: Path) -> None:
    chats = [[*range(1000 * chat, 1000 * chat + 100)] for chat in range(4)]
    rows = [row(at, *chat[: 3 * at]) for at in range(2, 32) for chat in chats]
    plain = traced(tmp_path, *rows)
    trace = OVERLAYS[overlay].over(plain)
    for router in ROUTERS:
        fleet = Fleet(Texts(trace), crowded(trace), router)
        found = fleet.run()
        check(found, trace)
        if isinstance(fleet.router, ByEvents):
            assert min(found.moved, found.holes) > 0
            fleet.router.index.check()


def test_lost_events_are_wrong_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, count = ByEvents.heard, iter(range(10**6))

    def lossy(self: ByEvents, worker: int, payload: bytes, *, is_approximate: bool) -> None:
        if next(count) % 3:
            heard(self, worker, payload, is_approximate=is_approximate)

    monkeypatch.setattr(ByEvents, "heard", lossy)
    trace = traced(tmp_path, *traffic.mooncake(8, 400), block_size=64)
    found = simulated(trace, crowded(trace), "KvIndexer")
    assert min(found.over, found.over_tokens, found.under, found.under_tokens) > 0


def test_requests_of_one_time_are_taken_in_the_order_of_the_trace(tmp_path: Path) -> None:
    trace = traced(tmp_path, row(7, 1), row(5, 2), row(7, 3))
    assert arrivals(trace, 2) == [1, 0, 1]
    found = simulated(trace, replace(SETTING, workers=1, speed=17), "round robin")
    # The second is first, and the third waits for the first.
    assert found.waits == [0, 0, 1]


def test_main_says_that_moved_runs_are_not_visible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = traffic.write(tmp_path / "t.jsonl", traffic.mooncake(8, 50))
    simulate.main([str(path), "--pool", "4096", "--first", "40"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("t.jsonl: 40 requests of ")
    table = [line.split(" | ") for line in printed if line.startswith("| ")][2:]
    assert [one[0].removeprefix("| ") for one in table] == list(ROUTERS)
    assert all(one[3] == "not visible" for one in table)
    assert printed[-1].startswith("moved runs not visible")
    simulate.main([str(path), "--pool", "40960", "--overlay", "W01", "--routers", "oracle"])
    printed = capsys.readouterr().out.splitlines()
    assert "synthetic (W01)" in printed[0]
    assert "not visible" not in "".join(printed)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workers", "0"], "'0' is not an integer from 1 to 1,024"),
        (["--speed", "nan"], "'nan' is not a finite number of at least 0.001"),
        (["--load-weight", "-1"], "'-1' is not a finite number of at least 0"),
        (
            ["--pool", "40"],
            "t.jsonl, line 2: the request has 3 blocks of 16 tokens, and a pool of 2",
        ),
        (["--block-size", "4"], "t.jsonl, line 1: 3 hash_ids for 33 tokens do not fit blocks of 4"),
    ],
)
def test_main_bad_input_is_one_sentence(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = traffic.write(tmp_path / "t.jsonl", [row(0, 1, 2), row(1, 1, 2, 3)])
    with pytest.raises(SystemExit) as ended:
        simulate.main([str(path), *options])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert said in printed.err.splitlines()[-1]
    assert not printed.out


def test_main_without_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        simulate.main([str(tmp_path / "none.jsonl")])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_trace_without_times_is_refused(tmp_path: Path) -> None:
    trace = traced(tmp_path, row(0, 1), row(0, 2) | {"timestamp": "noon"})
    with pytest.raises(TraceError, match="line 2: there is no time of arrival that is a number"):
        simulated(trace, SETTING, "oracle")
