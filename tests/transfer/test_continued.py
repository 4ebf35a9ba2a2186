"""Manifests and plans of requests with windows and states (rules G2 and L10), with real bytes."""

from __future__ import annotations

import hashlib
import random
from collections import ChainMap, Counter
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
from tests.transfer import cases, naive, naive_plans

import kvtrie
from kvtrie import Group, RadixIndex, SequenceLedger

KEY = cases.KEY
SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
SWA = Group.window("swa", window=5, num_blocks=16, block_size=4)
GDN = Group.state("gdn", num_slots=8)


@pytest.mark.parametrize("seed", range(4))
def test_plans_next_to_windows_and_states_equal_the_naive_ones(seed: int) -> None:
    rng = random.Random(seed)
    met: Counter[str] = Counter()
    for _ in range(250):
        case = cases.kinded(rng)
        sent = case.sent()
        raw = naive.to_bytes(sent)
        manifest = kvtrie.TransferManifest.from_bytes(raw)
        assert naive.from_bytes(raw) == sent
        assert manifest.windows == {number: w for number, w in case.windows.items() if w}
        found = cases.as_plan(case.asked(manifest))
        assert found == case.planned(sent), case
        cases.check_loads(case, found)
        end, cached = case.continues_at(found), case.cached[1]
        full = cases.replaced(
            case,
            windows={},
            their_tables={0: case.their_tables[0]},
            my_tables={0: case.my_tables[0]},
            policy=naive.Policy(),
        )
        met["nothing"] += end == 0
        met["deeper than cached"] += end > cached > 0
        met["at what is cached"] += end == cached > 0
        met["shallower than cached"] += 0 < end < cached
        met["cut by a group"] += end < full.continues_at(full.planned(full.sent()))
        met["inside a block"] += end % (case.my_tables[0][0] or case.their_tables[0][0]) > 0
        met["a window"] += any(case.windows.get(pair[0]) for pair in found.pairs)
        met["a state"] += any(pair[3] == pair[4] for pair in found.pairs)
        met["without a local id"] += any(pair[2] < 0 for pair in found.pairs)
    wanted = ["nothing", "deeper than cached", "at what is cached", "cut by a group"]
    wanted += ["inside a block", "a window", "a state", "without a local id"]
    assert all(met[what] > 5 for what in wanted), met


def value(group: str, tokens: list[int], end: int) -> bytes:
    """The KV of token `end - 1`, or the state after `end` tokens: it is of all tokens before."""
    return hashlib.blake2b(repr((group, tokens[:end])).encode(), digest_size=4).digest()


@dataclass
class Live:
    """A request, and the state that its engine computes on."""

    tokens: list[int]
    seq: kvtrie.TokenSequence
    computed: int
    states: dict[str, bytes]


@dataclass
class Engine:
    """An engine with pools of bytes, an index and a ledger."""

    groups: list[Group]
    size: int
    live: dict[str, Live] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index = RadixIndex(64, self.size, groups=self.groups, moved_runs=False)
        self.ledger = SequenceLedger(self.size, groups=self.groups)
        self.free = {"": list(range(64))}
        self.free |= {group.name: list(range(group.num_blocks)) for group in self.groups}
        # Bytes by group, block and slot; a state is in slot 0.
        self.pools: dict[str, dict[tuple[int, int], bytes]] = {name: {} for name in self.free}

    def cached(self, tokens: list[int]) -> int:
        with self.index.plan(kvtrie.TokenSequence(tokens, SPACE), keep_last=1) as plan:
            return plan.num_exact

    def begin(self, name: str, tokens: list[int], manifest: Any = None, peer: Any = None) -> Any:
        """Begin a request, with what is cached here and what the manifest of a peer has."""
        seq = kvtrie.TokenSequence(tokens, SPACE)
        plan = self.index.plan(seq, keep_last=1)
        table = plan.blocks.tolist()
        while len(table) * self.size < len(tokens) + self.size:
            table.append(self.free[""].pop())
        if manifest is None:
            self.ledger.begin(name, seq, table, source=plan)
            self.live[name] = Live(tokens, seq, plan.num_exact, {})
            self.copy_states(name)
            return None
        move = kvtrie.plan_transfer(
            manifest,
            seq,
            table,
            (0, plan.num_exact),
            key=KEY,
            groups=self.groups,
            block_size=self.size,
            keep_last=1,
        )
        missing = move.missing
        self.ledger.begin(name, seq, table, plan=plan, source=move.source, missing=missing)
        numbers = {0: "", **{at: group.name for at, group in enumerate(self.groups, 1)}}
        for number, group in numbers.items():
            pairs = move.pairs[move.pairs["group"] == number]
            is_state = number and self.groups[number - 1].kind == "state"
            if number:
                firsts = sorted({start - start % self.size for start in pairs["start"].tolist()})
                held = {at for at, _ in self.ledger.held(name, group).tolist()}
                fresh = [(at, self.free[group].pop()) for at in firsts if at not in held]
                self.ledger.hold(name, group, fresh)
            ids = dict(self.ledger.held(name, group).tolist()) if number else {}
            for remote, local, start, end in pairs[["remote", "local", "start", "end"]].tolist():
                if is_state:
                    assert start == end
                    self.pools[group][ids[start], 0] = peer.pools[group][remote, 0]
                    continue
                own = ids[start - start % self.size] if number else local
                for at in range(start, end):
                    slot = at % self.size
                    self.pools[group][own, slot] = peer.pools[group][remote, slot]
        self.live[name] = Live(tokens, seq, int(missing[0][0]), {})
        self.copy_states(name)
        return move

    def copy_states(self, name: str) -> None:
        """Copy the states that a request continues with, which the groups must have."""
        own = self.live[name]
        for group in self.groups:
            if group.kind == "state" and own.computed:
                slot = dict(self.ledger.held(name, group.name).tolist())[own.computed]
                own.states[group.name] = self.pools[group.name][slot, 0]

    def compute(self, name: str, end: int, keep: list[int]) -> None:
        """Compute tokens up to `end`, and keep states at some positions."""
        own, table = self.live[name], self.ledger.blocks(name).tolist()
        self.read(name)
        self.ledger.schedule(name, end - own.computed)
        for at in range(own.computed, end):
            block = at - at % self.size
            self.pools[""][table[at // self.size], at % self.size] = value("", own.tokens, at + 1)
            for group in self.groups:
                kv = value(group.name, own.tokens, at + 1)
                if group.kind == "state":
                    own.states[group.name] = kv
                    if at + 1 in keep and self.free[group.name]:
                        slot = self.free[group.name].pop()
                        self.pools[group.name][slot, 0] = kv
                        self.ledger.confirm(name, at + 1)
                        self.ledger.hold(name, group.name, [(at + 1, slot)])
                    continue
                held = dict(self.ledger.held(name, group.name).tolist())
                if block not in held:
                    held[block] = self.free[group.name].pop()
                    self.ledger.hold(name, group.name, [(block, held[block])])
                self.pools[group.name][held[block], at % self.size] = kv
        self.ledger.confirm(name, end)
        own.computed = end
        self.read(name)

    def read(self, name: str) -> None:
        """Check all bytes that the next token reads."""
        own, table = self.live[name], self.ledger.blocks(name).tolist()
        end = own.computed
        for at in range(end):
            kv = self.pools[""][table[at // self.size], at % self.size]
            assert kv == value("", own.tokens, at + 1)
        for group in self.groups:
            if group.num_window_tokens is None:
                if end:
                    assert own.states[group.name] == value(group.name, own.tokens, end)
                continue
            held = dict(self.ledger.held(name, group.name).tolist())
            for at in range(max(0, end - group.num_window_tokens + 1), end):
                kv = self.pools[group.name][held[at - at % self.size], at % self.size]
                assert kv == value(group.name, own.tokens, at + 1)

    def advance(self, name: str) -> None:
        for group, ids in self.ledger.advance(name, self.index).items():
            self.free[group] += ids.tolist()

    def finish(self, name: str, stops: list[int]) -> None:
        del self.live[name]
        done = self.ledger.finish(name, self.index, stops=stops)
        self.free[""] += [*done.duplicates.tolist(), *done.surplus.tolist(), *done.freed.tolist()]
        for group, ids in done.groups.items():
            self.free[group] += [*ids.duplicates.tolist(), *ids.surplus.tolist()]

    def evict(self, rng: random.Random) -> None:
        """Evict a few blocks of each group, and as many as another request may need."""
        for name, free in self.free.items():
            wanted = max(rng.randrange(5), 45 - len(free))
            free.extend(self.index.evict(wanted, group=name or None).tolist())
        for group in self.groups:
            self.free[group.name] += self.index.take_freed(group=group.name).tolist()

    def check(self) -> None:
        self.index.check()
        assert self.index.stats().indexed + len(self.free[""]) == 64
        for group in self.groups:
            indexed = self.index.group_stats(group.name).indexed
            assert indexed + len(self.free[group.name]) == group.num_blocks


def episode(rng: random.Random, met: Counter[str]) -> None:
    size = rng.choice([1, 2, 4])
    window = rng.choice([2, 3, 5, 8])
    groups = [
        Group.window("swa", window=window, num_blocks=64, block_size=size),
        Group.state("gdn", num_slots=64),
        Group.window("far", window=2 * window, num_blocks=64, block_size=size),
    ]
    groups = rng.sample(groups, rng.randint(1, 3))
    sender, receiver = Engine(groups, size), Engine(groups, size)
    texts = [[rng.randrange(3) for _ in range(40)] for _ in range(2)]

    def prompt() -> list[int]:
        text = rng.choice(texts)
        return text[: rng.randint(1, 30)] + [rng.randrange(3) for _ in range(rng.randrange(6))]

    for is_first in (True, *[False] * 5):
        tokens = prompt()
        sender.begin("a", tokens)
        start = sender.live["a"].computed
        stops = [at for at in range(size, len(tokens) + 1, size) if rng.random() < 0.4]
        for end in sorted({rng.randint(start, len(tokens)), len(tokens)}):
            sender.compute("a", end, stops)
            if rng.random() < 0.5:
                sender.advance("a")
        raw = kvtrie.TransferManifest.from_ledger(sender.ledger, "a", key=KEY).to_bytes()
        wanted = rng.choice([[*tokens, rng.randrange(3)], prompt()])
        local = receiver.cached(wanted)
        manifest = kvtrie.TransferManifest.from_bytes(raw)
        move = receiver.begin("b", wanted, manifest, sender)
        assert move.source is kvtrie.COMPUTED
        end = receiver.live["b"].computed
        receiver.read("b")
        check_naive(raw, wanted, groups, size, local, end)
        met["deeper"] += end > local
        met["deeper than cached"] += end > local > 0
        met["as cached"] += end == local > 0
        if rng.random() < 0.5:
            receiver.compute("b", len(wanted), [])
        else:
            met["unaligned"] += end % size > 0
        more = receiver.live["b"].computed
        receiver.finish("b", [])
        longer = kvtrie.TokenSequence([*wanted, 99], SPACE)
        with receiver.index.plan(longer) as plan:
            # The index has what the request has been given, if it ends with a block.
            # With blocks of other prompts it may have more.
            if more == end and end % size == 0:
                assert plan.num_exact == end if is_first else plan.num_exact >= end
                met["indexed"] += end > 0 and is_first
        sender.finish("a", stops)
        for engine in (sender, receiver):
            engine.evict(rng)
            engine.check()


def check_naive(
    raw: bytes, tokens: list[int], groups: list[Group], size: int, cached: int, end: int
) -> None:
    windows = {at: group.num_window_tokens or 0 for at, group in enumerate(groups, 1)}
    tables: dict[int, tuple[int | None, list[Any]]] = {number: (size, []) for number in windows}
    prompt = naive.Prompt(tuple(tokens), space=naive.Space("m", SPACE.kv_dtype, SPACE.rope))
    tables[0] = (size, list(range(64)))
    plan = naive_plans.plan(
        naive.from_bytes(raw),
        prompt,
        tables,
        KEY,
        cached=(0, cached),
        keep_last=1,
        windows=windows,
    )
    assert plan.compute[0][0] == end


def test_loaded_blocks_and_states_are_those_of_the_tokens() -> None:
    met: Counter[str] = Counter()
    for seed in range(60):
        episode(random.Random(seed), met)
    wanted = ("deeper", "deeper than cached", "as cached", "unaligned", "indexed")
    assert all(met[what] > 5 for what in wanted), met


def test_a_plan_without_the_groups_of_the_manifest_is_refused() -> None:
    manifest = sent()
    assert (manifest.kinds, manifest.windows) == ({0: "full", 1: "window", 2: "state"}, {1: 5})
    seq = kvtrie.TokenSequence(range(15), SPACE)
    others: list[Any] = [(), [SWA], [GDN, SWA], {1: SWA, 3: GDN}]
    others.append([Group.window("swa", window=6, num_blocks=16, block_size=4), GDN])
    for groups in others:
        with pytest.raises(kvtrie.TransferRefused, match="a window of 5") as caught:
            kvtrie.plan_transfer(manifest, seq, key=KEY, groups=groups)
        assert caught.value.reason == "groups"
    same = {2: GDN, 1: SWA}
    assert kvtrie.plan_transfer(manifest, seq, key=KEY, groups=same).num_exact == 12


def sent(**more: Any) -> kvtrie.TransferManifest:
    options: dict[str, Any] = {"key": KEY, "num_computed": 14, "block_size": 4}
    options["groups"] = [SWA, GDN]
    blocks = {0: [0, 1, 2, 3], 1: [(8, 5), (12, 6)], 2: [(12, 7)]}
    seq = kvtrie.TokenSequence(range(14), SPACE)
    return kvtrie.TransferManifest.from_blocks(seq, more.pop("blocks", blocks), **options | more)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"groups": [1]}, TypeError, r"groups\[0\] is of type 'int'; it must be a Group"),
        ({"groups": 5}, TypeError, "groups is of type 'int'; it must be a mapping from group"),
        ({"groups": {-1: SWA}}, ValueError, r"a group is -1; it must be in \[0, "),
        ({"block_size": 2}, ValueError, 'group "swa" has block_size 4; it must be .* 2'),
        ({"blocks": {0: [0, 1, 2, 3], 1: [5, 6]}}, TypeError, "must be a pair of positions"),
        ({"blocks": {0: [0, 1, 2, 3], 1: [(8, -1)]}}, ValueError, "the position -1"),
        ({"blocks": {0: [0, 1, 2, 3], 1: [(8, 2**31)]}}, ValueError, "2147483648; it must be in"),
        ({"blocks": {0: [0, 1, 2, 3], 1: [(9, 1)]}}, ValueError, "at position 9; it must be a"),
        ({"blocks": {0: [0, 1, 2, 3], 2: [(0, 1)]}}, ValueError, r"a multiple of 4 in \[4, "),
        ({"blocks": {0: [0, 1, 2, 3], 2: [(8, 1), (4, 2)]}}, ValueError, "must ascend"),
    ],
)
def test_wrong_groups_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=rf"^TransferManifest\.from_blocks: .*{message}"):
        sent(**options)


def test_what_is_cached_next_to_windows_is_from_the_start() -> None:
    seq = kvtrie.TokenSequence(range(15), SPACE)
    message = r"^plan_transfer: cached is \[4, 8\); next to groups with windows or states it must"
    with pytest.raises(ValueError, match=message):
        kvtrie.plan_transfer(sent(), seq, cached=(4, 8), key=KEY, groups=[SWA, GDN])
    move = kvtrie.plan_transfer(sent(), seq, cached=(0, 12), key=KEY, groups=[SWA, GDN])
    assert (move.num_exact, len(move.pairs), move.compute.tolist()) == (0, 0, [[12, 15]])


def test_nothing_is_cached_wherever_it_begins() -> None:
    """An empty range is no place at which a state or a window could be."""
    seq = kvtrie.TokenSequence(range(17), SPACE)
    without = sent(blocks={0: [0, 1, 2, 3]})
    for cached in ((0, 0), (8, 8), (5, 5)):
        move = kvtrie.plan_transfer(without, seq, cached=cached, key=KEY, groups=[SWA, GDN])
        assert (len(move.pairs), move.compute.tolist()) == (0, [[0, 17]])


def test_what_is_cached_next_to_states_ends_where_one_can_be() -> None:
    seq = kvtrie.TokenSequence(range(17), SPACE)
    message = r"cached is \[0, 6\); group 2 has states at multiples of 4 alone"
    with pytest.raises(ValueError, match=message):
        kvtrie.plan_transfer(sent(), seq, cached=(0, 6), key=KEY, groups=[SWA, GDN])


def test_a_plan_whose_windows_are_gone_is_no_beginning_next_to_a_transfer() -> None:
    """What an approximate plan has in place may lack the windows before it (rule G9)."""
    index = RadixIndex(num_blocks=64, block_size=4, groups=[SWA], min_run=8)
    ids = [(4 * at, at) for at in range(16)]
    first = kvtrie.TokenSequence(range(64), SPACE)
    index.insert(
        first, list(range(16)), num_computed=64, source=kvtrie.COMPUTED, groups={"swa": ids}
    )
    index.discard([6, 7], group="swa")
    edited = kvtrie.TokenSequence([*range(32), *range(40, 64), 99], SPACE)
    ledger = SequenceLedger(block_size=4, groups=[SWA])
    policy = kvtrie.ReusePolicy(scope="namespace")
    with index.plan(edited, policy) as plan:
        assert (plan.num_exact, len(plan.group("swa")[1])) == (32, 0)
        blocks = [*plan.blocks.tolist(), *range(40, 47)]
        with pytest.raises(ValueError, match='32 tokens in place and nothing of group "swa" at'):
            ledger.begin("a", edited, blocks, plan=plan, source=kvtrie.COMPUTED)
    with index.plan(edited) as plan:
        assert plan.num_exact == 24
        blocks = [*plan.blocks.tolist(), *range(40, 49)]
        ledger.begin("a", edited, blocks, plan=plan, source=kvtrie.COMPUTED)
        ledger.forget_groups("a")


def test_a_window_after_a_gap_is_not_sent() -> None:
    """That group 0 has KV after a gap says nothing of blocks that were only held there."""
    ledger = SequenceLedger(block_size=4, groups=[SWA])
    seq = kvtrie.TokenSequence(range(16), SPACE)
    ledger.begin("a", seq, [0, 1, 2, 3], source=kvtrie.COMPUTED, missing=[(4, 8)])
    ledger.hold("a", "swa", [(0, 3), (8, 5), (12, 6)])
    manifest = kvtrie.TransferManifest.from_ledger(ledger, "a", key=KEY)
    prompt = kvtrie.TokenSequence(range(16), SPACE)
    move = kvtrie.plan_transfer(manifest, prompt, cached=(0, 0), key=KEY, groups=[SWA])
    assert naive.from_bytes(manifest.to_bytes()).groups[1].runs[0].start == 0
    assert len(naive.from_bytes(manifest.to_bytes()).groups[1].runs) == 1
    assert move.compute.tolist() == [[4, 16]]


def test_local_ids_are_found_by_position() -> None:
    seq = kvtrie.TokenSequence(range(14), SPACE)
    tables: dict[int, Any] = {0: range(30, 34), 1: [(0, 3), (8, 9)], 2: [(12, 4)]}
    move = kvtrie.plan_transfer(sent(), seq, tables, key=KEY, groups=[SWA, GDN])
    found = move.pairs[["group", "remote", "local", "start", "end"]].tolist()
    assert found[3:] == [(1, 5, 9, 8, 12), (2, 7, 4, 12, 12)]
    move = kvtrie.plan_transfer(sent(), seq, range(30, 34), key=KEY, groups=[SWA, GDN])
    assert move.pairs["local"].tolist() == [30, 31, 32, -1, -1]


@pytest.mark.parametrize("mapping", [MappingProxyType, ChainMap])
def test_any_mapping_is_read_as_a_dict_is(mapping: Any) -> None:
    blocks = {0: [0, 1, 2, 3], 1: [(8, 5), (12, 6)], 2: [(12, 7)]}
    sizes = {0: 4, 1: 4, 2: 4}
    groups = {1: SWA, 2: GDN}
    manifest = sent(blocks=mapping(blocks), block_size=mapping(sizes), groups=mapping(groups))
    assert manifest == sent()
    seq = kvtrie.TokenSequence(range(14), SPACE)
    local: dict[int, Any] = {0: range(30, 34), 1: [(0, 3), (8, 9)], 2: [(12, 4)]}
    for table in (local, None):
        move = kvtrie.plan_transfer(
            manifest,
            seq,
            None if table is None else mapping(table),
            key=KEY,
            block_size=mapping(sizes),
            groups=mapping(groups),
        )
        same = kvtrie.plan_transfer(manifest, seq, table, key=KEY, groups=[SWA, GDN])
        assert move.pairs.tolist() == same.pairs.tolist()
        assert move.num_exact == 12
    with pytest.raises(ValueError, match=r"from_blocks: a group is -1; it must be in \[0, "):
        sent(blocks=mapping({-1: []}))
    with pytest.raises(TypeError, match=r"from_blocks: a group is of type 'str'"):
        sent(block_size=mapping({"0": 4}))
    with pytest.raises(ValueError, match=r"block_size is of the groups \[0\], local_blocks of"):
        kvtrie.plan_transfer(
            manifest, seq, local, key=KEY, block_size=mapping({0: 4}), groups=groups
        )


def test_from_ledger_leaves_out_windows_that_are_rebuilt() -> None:
    """Group 0 is exact there, but the window's KV is computed from what was moved (rule G9)."""
    swa = Group.window("swa", window=5, num_blocks=16, block_size=4)
    index = RadixIndex(num_blocks=32, block_size=4, groups=[swa], min_run=8)
    seq = kvtrie.TokenSequence(range(32), SPACE)
    index.insert(seq, range(8), num_computed=32, source=kvtrie.COMPUTED)
    prompt = kvtrie.TokenSequence([*range(16), *range(20, 32), 99], SPACE)
    plan = index.plan(prompt, kvtrie.ReusePolicy(scope="namespace", recompute_first=1))
    rebuilt = plan.rebuild("swa").tolist()
    assert rebuilt
    ledger = SequenceLedger(4, groups=[swa])
    table = [*plan.blocks.tolist(), *range(20, 28)][:8]
    ledger.begin("a", prompt, table, source=plan)
    ledger.hold("a", "swa", [(at, at // 4) for at in range(0, 24, 4)])
    manifest = kvtrie.TransferManifest.from_ledger(ledger, "a", key=KEY)
    ends = [run.start + run.num_tokens for run in manifest.runs if run.group == 1]
    # Group 0 is exact up to 16; the blocks before the first token that is rebuilt are sent.
    assert (max(ends), rebuilt[0][0] // 4 * 4) == (12, 12)
    ledger.forget_groups("a")
