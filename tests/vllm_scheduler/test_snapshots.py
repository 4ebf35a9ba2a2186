"""Snapshots of vLLM's KV events: an index that subscribes late has what its cache manager finds."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests import asking
from tests.asking import until
from tests.vllm.prompts import ANSWER, QUESTION, REASONING, words
from tests.vllm.traffic import Traffic
from tests.vllm_scheduler import core as scheduler_core
from tests.vllm_scheduler.test_events import UNCHECKED, enabled, finds, in_flight
from tests.vllm_scheduler.test_traffic import SMALL, Run
from tests.vllm_scheduler.worker import BLOCK
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

import kvtrie
from kvtrie.cluster import Subscription, subscribe
from kvtrie.integrations import _asked
from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations._snapshots import StreamBlocks
from kvtrie.integrations.vllm import _settings, _snapshots
from kvtrie.integrations.vllm._version import UnsupportedError
from kvtrie.integrations.vllm.connector import KvtrieConnector

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.vllm_scheduler.core import Core

NUM_PROBES = 10_000
SECONDS = 30.0
SHARED = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)


def addresses(folder: Path) -> dict[str, Any]:
    """Options of a core that publishes, with a replay buffer that holds next to nothing."""
    return {
        "kv_events_config": KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=f"ipc://{folder}/events",
            replay_endpoint=f"ipc://{folder}/replay",
            buffer_steps=2,
        )
    }


def giving(folder: Path, **settings: Any) -> dict[str, Any]:
    return {**settings, "snapshot": {"endpoint": f"ipc://{folder}/snapshot"}}


class Late:
    """An index of one worker that subscribes when it is made."""

    def __init__(self, folder: Path, *, snapshot: bool = True, replay: bool = True) -> None:
        self.index = kvtrie.KvIndexer(BLOCK, b"the key of tests")
        self.worker = self.index.add_worker("vllm", SHARED)
        self.subscription: Subscription = subscribe(
            self.index,
            self.worker,
            f"ipc://{folder}/events",
            f"ipc://{folder}/replay" if replay else None,
            snapshot=f"ipc://{folder}/snapshot" if snapshot else None,
            check_every=0.2,
        )

    def follows(self, vllm: Core) -> None:
        """Wait until it has what vLLM has published."""
        published(vllm)
        number = source_of(vllm)._number
        end = time.monotonic() + SECONDS
        while self.subscription.state != "live" or self.subscription._applied < number:
            assert time.monotonic() < end, (self.subscription, self.subscription.error)
            time.sleep(0.01)
        assert self.subscription._applied == number

    def claims(self, tokens: Sequence[int]) -> int:
        seq = kvtrie.TokenSequence(tokens, SHARED)
        scores = self.index.find_matches(seq, kvtrie.ReusePolicy(), keep_last=1)
        assert not scores.uncertain[0]
        return int(scores.exact[0])


def source_of(vllm: Core) -> _snapshots.Snapshots:
    source = vllm.connector._snapshots
    assert source is not None
    return source


def published(vllm: Core) -> None:
    """Wait until vLLM has published everything, and the source has counted it."""
    publisher, source = vllm.scheduler.kv_event_publisher, source_of(vllm)

    def is_done() -> bool:
        # The last one that vLLM has numbered.
        numbers = [number for number, _ in list(publisher._buffer)[-1:]]
        return not publisher._event_queue.unfinished_tasks and [source._number] == (numbers or [-1])

    until(is_done)


def compare(vllm: Core, late: Late, run: Run, seed: int, count: int) -> None:
    """Ask both for so many prompts that begin as those of the run."""
    seen = [list(ask.prompt) + vllm.answers[name].tokens for name, (ask, _) in run.asked.items()]
    rng, num_over, num_under, num_found = Traffic(seed=seed).random, 0, 0, 0
    for _ in range(count):
        history = rng.choice(seen)
        probe = history[: rng.randrange(1, len(history) + 1)] + words(rng.randrange(3), 1)
        claimed, found = late.claims(probe), finds(vllm, probe)
        num_over += claimed > found
        num_under += claimed < found
        num_found += found > 0
    assert (num_over, num_under) == (0, 0)
    assert num_found > count // 40
    late.index.check()


def pool_copies(vllm: Core) -> Counter[Any]:
    """How many blocks of the pool have each hash that no approximate block has."""
    events = getattr(vllm.connector.planner, "_events", None)
    approximate = {} if events is None else events._approximate
    found = Counter(
        maybe_convert_block_hash(get_block_hash(block.block_hash))
        for block in vllm.pool.blocks
        if block.block_hash is not None
    )
    return Counter({one: count for one, count in found.items() if one not in approximate})


@in_flight
@pytest.mark.parametrize("exact", [False, True], ids=["approximate", "exact"])
def test_an_index_that_subscribes_late_has_what_vllm_finds(
    core: Callable[..., Core], in_flight: bool, exact: bool, tmp_path: Path
) -> None:
    mode = {"mode": "exact"} if exact else UNCHECKED
    vllm = core(
        connector=giving(tmp_path, **mode),
        gaps=not exact,
        in_flight=in_flight,
        shadow=not exact,
        **SMALL,
        **addresses(tmp_path),
    )
    run = Run(vllm, seed=91 + in_flight)
    run.go(300)
    published(vllm)
    source = source_of(vllm)
    # The record is the pool's own map.
    assert source._held.copies == pool_copies(vllm)
    assert source._number > 100
    late, second = Late(tmp_path), Late(tmp_path, replay=False)
    try:
        for one in (late, second):
            one.follows(vllm)
            assert one.subscription.counts["snapshots"] >= 1
            compare(vllm, one, run, 5, NUM_PROBES // 2)
        # What follows is applied on top: evictions, aborts, preemptions and resets.
        run.go(500)
        for one in (late, second):
            one.follows(vllm)
            compare(vllm, one, run, 6, NUM_PROBES // 2)
            # With a check every 0.2 s and so small a buffer, batches that are under way on a busy
            # machine count as lost, and there is another snapshot.
            assert one.subscription.counts["batches"] > 0
            assert one.subscription.counts["snapshots_refused"] == 0
    finally:
        late.subscription.close()
        second.subscription.close()
    assert vllm.counts["errors"] == 0


class Model:
    """Events of a pool whose blocks are stored and removed in any order, with copies and holes."""

    def __init__(self, seed: int) -> None:
        self.random = Traffic(seed=seed).random
        self.held: Counter[int] = Counter()
        # Which conversation stored a block last, while no copy of it was removed.
        self.sessions: dict[int, str] = {}
        # By number: parent, salt or image, and adapter.
        self.known: list[tuple[int | None, Any, str | None]] = []

    def tokens(self, number: int) -> list[int]:
        return [number * BLOCK + at for at in range(BLOCK)]

    def stored(self, numbers: Sequence[int]) -> BlockStored:
        parent, _, adapter = self.known[numbers[0]]
        extra = [self.known[number][1] for number in numbers]
        return BlockStored(
            block_hashes=list(numbers),
            parent_block_hash=parent,
            token_ids=[token for number in numbers for token in self.tokens(number)],
            block_size=BLOCK,
            lora_id=None,
            medium="GPU",
            lora_name=adapter,
            extra_keys=None if all(keys is None for keys in extra) else extra,
            group_idx=0,
            session_id=self.said(numbers),
        )

    def said(self, numbers: Sequence[int]) -> str | None:
        for number in numbers:
            self.sessions.pop(number, None)
        session = self.random.choice([None, "a", "b", "c" * 64])
        self.sessions |= dict.fromkeys(numbers, session) if session else {}
        return session

    def path(self, number: int | None) -> list[int]:
        found: list[int] = []
        while number is not None:
            found.append(number)
            number = self.known[number][0]
        return found[::-1]

    def event(self) -> Any:
        rng = self.random
        if rng.random() < 0.002:
            self.held.clear()
            self.sessions.clear()
            return AllBlocksCleared()
        if self.held and rng.random() < 0.45:
            gone = rng.sample(sorted(self.held), min(len(self.held), rng.randrange(1, 6)))
            self.held -= Counter(gone)
            for number in gone:
                self.sessions.pop(number, None)
            return BlockRemoved(block_hashes=gone, medium="GPU", group_idx=0)
        if self.known and rng.random() < 0.5:
            # Again, or one more copy, of the end of a path.
            path = self.path(rng.randrange(len(self.known)))
            numbers = path[rng.randrange(len(path)) :]
        else:
            parent = rng.randrange(len(self.known)) if self.known and rng.random() < 0.8 else None
            adapter = None if parent is None else self.known[parent][2]
            extra: Any = None
            if parent is None:
                adapter = rng.choice([None, "one"])
                extra = rng.choice([None, ("salt",)])
                if extra is not None and adapter is not None:
                    extra = (adapter, *extra)
            numbers = []
            for at in range(rng.randrange(1, 5)):
                above = parent if at == 0 else numbers[-1]
                self.known.append((above, extra if at == 0 else None, adapter))
                numbers.append(len(self.known) - 1)
        self.held.update(numbers)
        return self.stored(numbers)


def spaces() -> list[kvtrie.Namespace]:
    return [
        kvtrie.Namespace(model="m", salt=salt, adapter=adapter)
        for salt in (kvtrie.SHARED, "salt")
        for adapter in (None, "one")
    ]


def packed(events: list[Any]) -> bytes:
    done: bytes = msgspec.msgpack.Encoder().encode([0.0, events, 0])
    return done


@pytest.mark.parametrize("seed", range(6))
def test_a_snapshot_is_what_all_events_leave(seed: int) -> None:
    model, held = Model(seed), StreamBlocks(_snapshots.EVENTS, 100_000)
    one, other = (kvtrie.KvIndexer(BLOCK, b"the key of tests") for _ in range(2))
    ones, others = (index.add_worker("w", SHARED) for index in (one, other))
    policy, num_found, num_moved, promised = kvtrie.ReusePolicy(), 0, 0, Counter[str]()
    for index, worker in ((one, ones), (other, others)):
        index.set_policy(worker, kvtrie.ReusePolicy(min_run=8, shared_prefix=100))
    for round_ in range(30):
        for _ in range(60):
            events = [model.event() for _ in range(model.random.randrange(1, 4))]
            held.apply(events)
            one.apply(ones, packed(events))
            if round_ % 3:
                # Further batches on top of a snapshot.
                other.apply(others, packed(events))
        if round_ % 3 == 0:
            other.apply(others, bytes(held.encoded(0)))
        assert held.copies == +model.held
        assert held.num_copies == model.held.total()
        assert held._sessions == model.sessions
        for _ in range(40):
            path = model.path(model.random.randrange(len(model.known)))
            first = model.random.randrange(len(path))
            for cut in (path, path[first:]):
                tokens = [token for number in cut for token in model.tokens(number)]
                for space in spaces():
                    seq = kvtrie.TokenSequence(tokens, space)
                    session = model.random.choice(["a", "b", "c" * 64, None])
                    found, same = (
                        index.find_matches(seq, policy, session=session, keep_last=1)
                        for index in (one, other)
                    )
                    assert found.exact[0] == same.exact[0]
                    # A block that was stored after its parent left is in its place.
                    assert found.possible[0] <= same.possible[0]
                    assert found.uncertain[0] == same.uncertain[0] == False  # noqa: E712
                    num_found += int(found.exact[0])
                    num_moved += int(found.possible[0])
                    # Nothing of another one. Blocks that came before their parents have none.
                    own = [number for number in cut if model.sessions.get(number, "") == session]
                    assert same.moved[0] <= BLOCK * len(own)
                    is_less = same.moved[0] < found.moved[0]
                    promised["less" if is_less else "as much"] += bool(found.moved[0])
        known = one.worker_stats(ones), other.worker_stats(others)
        counts = [stats["entries"] + stats["parked"] for stats in known]
        assert counts == [len(held.copies)] * 2
        other.check()
    assert num_found > 0
    assert num_moved > 0
    assert promised["as much"] > 5 * promised["less"]


def test_a_session_of_any_length_takes_no_room() -> None:
    """Clients choose it, and a snapshot has it with each block."""
    model, sizes = Model(1), []
    for session in (None, "c" * 64, "c" * 65, "c" * 100_000):
        held = StreamBlocks(_snapshots.EVENTS, 100)
        model.known = [(None, None, None)] * 50
        for number in range(50):
            event = model.stored([number])
            event.session_id = session
            held.apply([event])
        sizes.append(len(held.encoded(0)))
    plain, longest, *longer = sizes
    assert longer == [plain, plain]
    assert longest < plain + 50 * 80


def test_holes_are_bounded_and_what_is_exact_stays_right() -> None:
    model, held = Model(9), StreamBlocks(_snapshots.EVENTS, 20)
    one, other = (kvtrie.KvIndexer(BLOCK, b"the key of tests") for _ in range(2))
    ones, others = (index.add_worker("w", SHARED) for index in (one, other))
    num_forgotten = num_parked = 0
    for round_ in range(900):
        events = [model.event()]
        before = len(held)
        held.apply(events)
        one.apply(ones, packed(events))
        num_forgotten += before - len(held) > 20
        assert len(held) - len(held.copies) <= 20
        if round_ % 30:
            other.apply(others, packed(events))
            continue
        other.apply(others, bytes(held.encoded(0)))
        num_parked += int(other.worker_stats(others)["parked"])
        for _ in range(40):
            path = model.path(model.random.randrange(len(model.known)))
            tokens = [token for number in path for token in model.tokens(number)]
            seq = kvtrie.TokenSequence(tokens, SHARED)
            assert one.find_matches(seq).exact[0] == other.find_matches(seq).exact[0]
        other.check()
    assert num_forgotten > 0
    assert num_parked > 0
    held.apply([BlockRemoved(block_hashes=list(model.held.elements()), medium="GPU")])
    assert len(held) == 0
    assert not held._children


def test_a_request_that_asks_for_reports_of_reuse_changes_nothing(
    core: Callable[..., Core], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may ask: a router was sure of blocks that had left, and the record only grew."""
    vllm = core(connector=giving(tmp_path, mode="exact"), shadow=False, **addresses(tmp_path))
    params = SamplingParams

    def reporting(**given: Any) -> Any:
        more = {"kv_cache_report_mode": "full"}
        return params(**{**given, "extra_args": {**(given.get("extra_args") or {}), **more}})

    monkeypatch.setattr(scheduler_core, "SamplingParams", reporting)
    for number in range(40):
        for _ in range(3):
            vllm.ask(words(200, 50 + number))
    published(vllm)
    held = source_of(vllm)._held
    assert sum(held.copies.values()) == sum(pool_copies(vllm).values())
    late = Late(tmp_path)
    try:
        late.follows(vllm)
        for number in range(40):
            prompt = words(200, 50 + number)
            assert late.claims(prompt) == finds(vllm, prompt)
    finally:
        late.subscription.close()


def test_a_source_that_holds_more_than_the_pool_ends(
    core: Callable[..., Core], tmp_path: Path
) -> None:
    vllm = core(connector=giving(tmp_path, mode="exact"), shadow=False, **addresses(tmp_path))
    model, source = Model(1), source_of(vllm)
    model.known = [(None, None, None)]
    source._batches.append([model.stored([0])] * (vllm.pool.num_gpu_blocks + 1))
    source._thread.join(30)
    assert not source._thread.is_alive()
    vllm.ask(words(200, 1))
    vllm.ask(words(200, 1))
    assert vllm.counts["errors"] == 1


def test_reports_of_reuse_do_not_make_a_snapshot_large() -> None:
    model, held = Model(1), StreamBlocks(_snapshots.EVENTS, 100)
    model.known = [(None, None, None)]
    held.apply([model.stored([0])])
    small = len(held.encoded(0))
    held.apply([model.stored([0])] * 10_000)
    assert held.copies == {0: 10_001}
    assert len(held.encoded(0)) < 102 * small


def test_blocks_whose_hash_covers_later_tokens_are_left_out() -> None:
    model, held = Model(1), StreamBlocks(_snapshots.EVENTS, 100)
    model.known = [(None, None, None)]
    event = model.stored([0])
    if not hasattr(event, "lookahead_token_ids"):
        pytest.skip("this vLLM has no such blocks")
    event.lookahead_token_ids = [[1]]
    held.apply([event])
    assert len(held) == 0


def test_answers(core: Callable[..., Core], tmp_path: Path) -> None:
    vllm = core(connector=giving(tmp_path, **UNCHECKED), **addresses(tmp_path))
    source = source_of(vllm)
    vllm.ask(QUESTION + REASONING + ANSWER)
    published(vllm)
    events = msgspec.msgpack.decode(asking.answers(source, source._number))[1]
    assert events[0] == {"type": "AllBlocksCleared"}


def test_rests_after_each_snapshot(core: Callable[..., Core], tmp_path: Path) -> None:
    vllm = core(connector=giving(tmp_path, **UNCHECKED), **addresses(tmp_path))
    asking.rests(source_of(vllm))


def test_who_does_not_read_gets_no_more(
    core: Callable[..., Core], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = core(connector=giving(tmp_path, **UNCHECKED), **addresses(tmp_path))
    asking.does_not_read(source_of(vllm), monkeypatch)


def test_a_flood_of_requests_is_read_in_parts(
    core: Callable[..., Core], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = core(connector=giving(tmp_path, **UNCHECKED), **addresses(tmp_path))
    asking.floods(source_of(vllm), monkeypatch)


def test_events_that_were_taken_unseen_end_it(core: Callable[..., Core], tmp_path: Path) -> None:
    vllm = core(connector=giving(tmp_path, **UNCHECKED), **addresses(tmp_path))
    source = source_of(vllm)
    vllm.ask(words(100, 1))
    published(vllm)
    # As if vLLM had asked for no stats in this step.
    look, source.look = source.look, lambda: None  # type: ignore[method-assign]
    try:
        vllm.ask(words(100, 2))
    finally:
        source.look = look  # type: ignore[method-assign]
    until(lambda: not source._thread.is_alive())
    vllm.ask(words(100, 3))
    assert vllm.counts["errors"] == 1
    assert not source._batches


def test_a_failure_ends_it_and_nothing_else(
    core: Callable[..., Core], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = core(connector=giving(tmp_path, **UNCHECKED), **addresses(tmp_path))
    source = source_of(vllm)

    def boom(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(source._held, "apply", boom)
    assert len(vllm.ask(words(100, 1))) == 8
    until(lambda: not source._thread.is_alive())
    assert len(vllm.ask(words(100, 2))) == 8
    assert vllm.counts["errors"] == 1
    assert not source._batches


def test_without_the_setting_nothing_runs(core: Callable[..., Core]) -> None:
    vllm = core(connector=UNCHECKED, kv_events_config=enabled())
    assert vllm.connector._snapshots is None
    assert vllm.connector.take_events() == ()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("tcp://*:5559", "snapshot must be a mapping such as"),
        (True, "snapshot must be a mapping such as"),
        ({"endpoint": 5}, "snapshot: endpoint must be an address of ZeroMQ .*, not 5"),
        ({"endpoint": ""}, "snapshot: endpoint must be an address of ZeroMQ .*, not ''"),
        ({"endpoint": "*:5559"}, r"snapshot: endpoint must be an address .*, not '\*:5559'"),
        ({"endpoint": None}, "snapshot: endpoint must be an address of ZeroMQ .*, not None"),
        ({"endpoints": "tcp://*:5559"}, "snapshot: unknown key 'endpoints'; did you mean 'endpoi"),
    ],
)
def test_a_bad_setting_is_refused(given: Any, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        _settings.Settings.read({"snapshot": given})


def test_an_endpoint_that_cannot_be_used_is_refused(
    core: Callable[..., Core], tmp_path: Path
) -> None:
    vllm = core(connector=UNCHECKED, **addresses(tmp_path))
    config, counts = vllm.core.vllm_config, vllm.connector._counts
    events = f"ipc://{tmp_path}/events"
    cases: list[tuple[Any, Any, str]] = [
        ({"endpoint": events}, None, f"endpoint '{events}' is another one's too"),
        ({"endpoint": f"ipc://{tmp_path}/replay"}, None, "is another one's too"),
        ({"endpoint": "tcp://*:1"}, {"endpoint": "tcp://*:1"}, "is another one's too"),
        ({"endpoint": "nowhere"}, None, "snapshot: endpoint 'nowhere': "),
    ]
    for given, others, why in cases:
        with pytest.raises(SettingsError, match=why):
            _snapshots.snapshots(given, others, config, vllm.pool, counts)
    for theirs in (enabled(), None, KVEventsConfig(enable_kv_cache_events=False)):
        before, config.kv_events_config = config.kv_events_config, theirs
        try:
            with pytest.raises(SettingsError, match="snapshot needs vLLM's events: start it with"):
                _snapshots.snapshots({}, None, config, vllm.pool, counts)
        finally:
            config.kv_events_config = before


def test_several_groups_are_refused(core: Callable[..., Core], tmp_path: Path) -> None:
    vllm = core(connector=giving(tmp_path, mode="exact"), shadow=False, **addresses(tmp_path))
    one = vllm.scheduler.kv_cache_config
    two = dataclasses.replace(one, kv_cache_groups=2 * list(one.kv_cache_groups))
    with pytest.raises(UnsupportedError, match=r"several groups of KV blocks: remove .snapshot"):
        KvtrieConnector(vllm.core.vllm_config, KVConnectorRole.SCHEDULER, two)


def test_an_address_is_of_this_machine_unless_said_otherwise(
    core: Callable[..., Core], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _asked.SNAPSHOTS == "tcp://127.0.0.1:5559"
    monkeypatch.setattr(_snapshots, "SNAPSHOTS", "tcp://127.0.0.1:0")
    vllm = core(connector=UNCHECKED, **addresses(tmp_path))
    source = _snapshots.snapshots(
        {}, None, vllm.core.vllm_config, vllm.pool, vllm.connector._counts
    )
    assert source is not None
    try:
        assert source.endpoint.startswith("tcp://127.0.0.1:")
    finally:
        source.shutdown()
