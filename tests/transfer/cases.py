"""Senders and receivers for property tests, and what the extension returns for them."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from tests.transfer import naive, naive_plans

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

KEY = b"the deployment's key"
SPACES = (naive.Space(), naive.Space(salt="a"), naive.Space(salt="b", adapter="lora"))
DIGESTS = (b"x", b"y" * 40)


@dataclass(frozen=True)
class Case:
    theirs: naive.Prompt
    labels: list[tuple[int, int] | None]
    num_lookahead: int
    their_tables: naive.Tables
    mine: naive.Prompt
    my_tables: dict[int, tuple[int | None, list[Any]]]
    cached: tuple[int, int] = (0, 0)
    keep_last: int = 0
    policy: naive.Policy = field(default_factory=naive.Policy)
    built: naive.Policy | None = None
    """The policy that approximate KV was built under, if the sender knows it."""
    windows: dict[int, int] = field(default_factory=dict)
    """By group, 0 for states: such groups have tables of pairs (position, id)."""

    def sent(self) -> naive.Manifest:
        tables, ahead = self.their_tables, self.num_lookahead
        return naive.manifest_of(
            self.theirs, tables, self.labels, ahead, KEY, self.built, self.windows
        )

    def continues_at(self, plan: naive_plans.Plan) -> int:
        return plan.compute[0][0] if plan.compute else len(self.mine.ids)

    def groups(self, sizes: dict[int, int]) -> dict[int, kvtrie.Group]:
        """The groups with windows or states; `sizes`: tokens per block."""
        return {
            group: kvtrie.Group.window(
                "w", window=window, num_blocks=1 << 31, block_size=sizes[group]
            )
            if window
            else kvtrie.Group.state("s", num_slots=8)
            for group, window in self.windows.items()
            if group in sizes
        }

    def planned(self, manifest: naive.Manifest, key: bytes = KEY) -> naive_plans.Plan:
        return naive_plans.plan(
            manifest,
            self.mine,
            self.my_tables,
            key,
            cached=self.cached,
            keep_last=self.keep_last,
            policy=self.policy,
            windows=self.windows,
        )

    def asked(self, manifest: kvtrie.TransferManifest, key: bytes = KEY) -> kvtrie.TransferPlan:
        sizes = {
            group: size or dict(manifest.block_sizes).get(group, 16)
            for group, (size, _) in self.my_tables.items()
        }
        return kvtrie.plan_transfer(
            manifest,
            sequence(self.mine),
            {group: table for group, (_, table) in self.my_tables.items()},
            self.cached,
            key=key,
            policy=policy(self.policy),
            block_size=sizes,
            keep_last=self.keep_last,
            groups=self.groups(sizes),
        )


def replaced(case: Case, **changes: Any) -> Case:
    return replace(case, **changes)


def space(of: naive.Space) -> kvtrie.Namespace:
    salt = kvtrie.SHARED if of.salt is None else of.salt
    return kvtrie.Namespace(
        model=of.model, kv_dtype=of.kv_dtype, rope=of.rope, adapter=of.adapter, salt=salt
    )


def sequence(prompt: naive.Prompt) -> kvtrie.TokenSequence:
    items = [kvtrie.Item(*item) for item in prompt.items]
    return kvtrie.TokenSequence(list(prompt.ids), space(prompt.space), items=items)


def policy(of: naive.Policy) -> kvtrie.ReusePolicy:
    return kvtrie.ReusePolicy(**vars(of))


def as_plan(plan: kvtrie.TransferPlan) -> naive_plans.Plan:
    return naive_plans.Plan(
        plan.pairs.tolist(),
        [(start, end) for start, end in plan.compute.tolist()],
        plan.exact_until,
        plan.hops,
        plan.num_exact,
        plan.num_approximate,
        as_policy(plan.source),
    )


def as_policy(source: kvtrie.ComputedSource | kvtrie.Imported) -> naive.Policy | None:
    if not isinstance(source, kvtrie.Imported) or source.policy is None:
        return None
    names = (one.name for one in fields(naive.Policy))
    found = naive.Policy(**{name: getattr(source.policy, name) for name in names})
    return replace(found, forbid_kinds=tuple(found.forbid_kinds))


def refusal(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except (kvtrie.TransferRefused, naive.Refused) as refused:
        return refused.reason
    return None


def check_loads(case: Case, plan: naive_plans.Plan) -> None:
    """Check that every loaded slot has what its label says, by the sender's own tokens."""
    theirs, mine = values(case.theirs), values(case.mine)
    loaded: dict[int, set[int]] = {}
    if case.windows:
        check_continued(case, plan)
        return
    for group, remote, local, start, end, delta, class_, hops in plan.pairs:
        size, table = case.their_tables[group]
        my_size, my_table = case.my_tables[group]
        my_size = my_size or size
        assert start < end
        for at in range(start, end):
            source = at - delta
            assert table[source // size] == remote
            assert my_table[at // my_size] == local
            assert theirs[source] == mine[at]
            # A block has the label of the worst of its tokens.
            block = case.labels[source // size * size : (source // size + 1) * size]
            known = [label for label in block if label is not None]
            assert len(known) == len(block)
            exact = all(label[0] == naive.EXACT for label in known)
            most = max((h for c, h in known if c == naive.APPROXIMATE), default=0)
            same_prefix = delta == 0 and theirs[:at] == mine[:at]
            if class_ == naive.EXACT:
                assert exact
                assert same_prefix
                assert hops == 0
            else:
                assert hops in ({most, most + 1} if same_prefix else {most + 1})
                assert hops <= case.policy.max_hops
                assert case.policy.approximate
            assert at not in loaded.setdefault(group, set())
            loaded[group].add(at)
    everything = set(range(len(mine)))
    common = set.intersection(*loaded.values()) if loaded else set()
    assert all(positions == common for positions in loaded.values())
    assert not loaded or set(loaded) == set(case.my_tables)
    computed = {at for start, end in plan.compute for at in range(start, end)}
    until = max(0, len(mine) - case.keep_last)
    cached = {at for at in range(*case.cached) if at < until}
    assert computed | common | cached == everything
    assert len(computed) + len(common) + len(cached) == len(everything)


def check_continued(case: Case, plan: naive_plans.Plan) -> None:
    """Check a plan next to windows and states: what it loads is exact, and all groups continue."""
    theirs, mine = values(case.theirs), values(case.mine)
    end = plan.compute[0][0] if plan.compute else len(mine)
    cached = case.cached[1]
    assert plan.num_approximate == 0
    for group, (size, table) in case.their_tables.items():
        my_size = case.my_tables[group][0] or size
        window, pairs = case.windows.get(group), [pair for pair in plan.pairs if pair[0] == group]
        loaded: dict[int, int] = {}
        for _, remote, _, start, stop, delta, class_, hops in pairs:
            assert (delta, class_, hops) == (0, naive.EXACT, 0)
            loaded.update(dict.fromkeys(range(start, stop), remote))
        assert theirs[: max(loaded, default=-1) + 1] == mine[: max(loaded, default=-1) + 1]
        assert all(
            label and label[0] == naive.EXACT for label in map(case.labels.__getitem__, loaded)
        )
        if window == naive.STATE:
            if end not in (0, cached):
                assert [(pair[1], pair[3]) for pair in pairs] == [(dict(table)[end], end)]
                assert theirs[:end] == mine[:end]
                assert all(label and label[0] == naive.EXACT for label in case.labels[:end])
                assert end % my_size == 0
            else:
                assert not pairs
            continue
        ids = dict(table) if window else dict(zip(range(0, 1000, size), table, strict=False))
        assert all(ids[at - at % size] == remote for at, remote in loaded.items())
        first = max(0, end - window + 1) if window else 0
        here = max(0, cached - window + 1) if window else 0
        there = set(range(here - here % my_size, cached)) | set(loaded)
        assert set(range(first - first % my_size, end)) <= there


def values(prompt: naive.Prompt) -> list[tuple[int, bytes, int]]:
    """What each token compares as: its id, its item's digest and its offset in that."""
    found = [(token, b"", 0) for token in prompt.ids]
    for start, end, digest in prompt.items:
        for at in range(start, end):
            found[at] = (prompt.ids[at], digest, at - start)
    return found


# Strategies.


def tables(sizes: list[int], length: int) -> st.SearchStrategy[list[list[int]]]:
    needed = [-(-length // size) + 1 for size in sizes]
    most = max(needed, default=0)
    lists = [
        st.permutations(range(most + 3)).map(operator.itemgetter(slice(count))) for count in needed
    ]
    return st.tuples(*lists).map(list)


@st.composite
def prompts(draw: st.DrawFn, most: int = 60) -> naive.Prompt:
    ids = draw(st.lists(st.integers(0, 2), max_size=most))
    return naive.Prompt(tuple(ids), draw(items(len(ids))), draw(st.sampled_from(SPACES)))


@st.composite
def items(draw: st.DrawFn, length: int) -> tuple[tuple[int, int, bytes], ...]:
    edges = draw(st.sets(st.integers(0, length), max_size=6).map(sorted))
    pairs = zip(edges[::2], edges[1::2], strict=False)
    return tuple((start, end, draw(st.sampled_from(DIGESTS))) for start, end in pairs)


@st.composite
def related(draw: st.DrawFn, prompt: naive.Prompt) -> naive.Prompt:
    ids = list(prompt.ids)
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(ids)))
        end = draw(st.integers(start, len(ids)))
        new = draw(st.sampled_from([[], [1] * 3, [2] * 7, ids[start:end] * 2, ids[:9]]))
        ids[start:end] = new
    keeps = draw(st.booleans())
    inside = tuple(item for item in prompt.items if item[1] <= len(ids)) if keeps else ()
    shared = draw(st.integers(0, 9))
    where = draw(st.sampled_from(SPACES)) if shared == 0 else prompt.space
    return naive.Prompt(tuple(ids), inside, where)


def policies() -> st.SearchStrategy[naive.Policy]:
    return st.one_of(
        st.just(naive.Policy()),
        st.builds(
            naive.Policy,
            approximate=st.just(True),
            min_run=st.sampled_from([8, 9, 12, None]),
            max_hops=st.sampled_from([0, 1, 1, 2, 3]),
            max_approximate_share=st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.0]),
            recompute_first=st.sampled_from([0, 0, 1, 3]),
            recompute_last=st.sampled_from([0, 0, 2, 30]),
            recompute_share=st.sampled_from([0.0, 0.0, 0.3]),
            repair=st.sampled_from(["fronts", "fronts", "probe"]),
            forbid_kinds=st.sampled_from([(), (), (), ("reasoning",)]),
            max_cuts=st.sampled_from([None, None, None, None, 0, 1]),
            max_lost_context=st.sampled_from([1.0, 1.0, 1.0, 1.0, 0.5]),
            max_new_context=st.sampled_from([1.0, 1.0, 1.0, 1.0, 0.4]),
        ),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    theirs = draw(prompts())
    mine = draw(related(theirs))
    numbers = draw(st.sampled_from([[0], [0], [0, 1], [3, 7, 2**31 - 1]]))
    sizes = [draw(st.sampled_from([1, 2, 3, 4, 8])) for _ in numbers]
    my_sizes = [draw(st.sampled_from([None, 1, 2, 3, 4, 5, 16])) for _ in numbers]
    labels = draw(labelled(len(theirs.ids)))
    num_lookahead = draw(st.sampled_from([0, 0, 1, 7]))
    their_tables: list[list[Any]] = draw(tables(sizes, len(labels) + num_lookahead))
    concrete = [mine_ or size for mine_, size in zip(my_sizes, sizes, strict=True)]
    my_tables: list[list[Any]] = draw(tables(concrete, len(mine.ids)))
    start = draw(st.integers(0, len(mine.ids)))
    windows = draw(st.just({}) | kinds(numbers))
    for place, number in enumerate(numbers):
        if number in windows:
            is_state = windows[number] == naive.STATE
            their_tables[place] = draw(at_positions(their_tables[place], sizes[place], is_state))
            my_tables[place] = draw(at_positions(my_tables[place], concrete[place], is_state))
    if windows:
        start = 0
    cached = draw(st.integers(start, len(mine.ids)))
    named = zip(numbers, concrete, strict=True)
    states = [size for number, size in named if windows.get(number) == naive.STATE]
    if states:
        cached -= cached % math.lcm(*states)
    return Case(
        theirs,
        labels,
        num_lookahead,
        {g: (s, t) for g, s, t in zip(numbers, sizes, their_tables, strict=True)},
        mine,
        {g: (s, t) for g, s, t in zip(numbers, my_sizes, my_tables, strict=True)},
        draw(st.sampled_from([(0, 0), (start, cached)])),
        draw(st.sampled_from([0, 0, 1, 5, 1000])),
        policy := draw(policies()),
        draw(st.sampled_from(built_under(policy))),
        windows,
    )


def kinds(numbers: list[int]) -> st.SearchStrategy[dict[int, int]]:
    windows = st.sampled_from([naive.STATE, 2, 3, 5, 9, 40])
    return st.dictionaries(st.sampled_from(numbers[-2:]), windows)


@st.composite
def at_positions(
    draw: st.DrawFn, ids: list[int], size: int, is_state: bool
) -> list[tuple[int, int]]:
    """Some of a table's ids, with their positions."""
    keeps = draw(st.sampled_from([1, 1, 2, 5]))
    pairs = [((at + is_state) * size, id_) for at, id_ in enumerate(ids)]
    return [pair for pair in pairs if keeps == 1 or draw(st.integers(0, keeps)) > 0]


def without_limits(policy: naive.Policy) -> naive.Policy:
    """The policy without limits on the context of moved runs."""
    return replace(policy, max_cuts=None, max_lost_context=1.0, max_new_context=1.0)


def built_under(policy: naive.Policy) -> list[naive.Policy | None]:
    """Policies that a sender's approximate KV may be of: unknown, equal, stricter, and laxer."""
    same = replace(policy, approximate=True)
    return [
        None,
        same,
        same,
        replace(same, max_cuts=3, max_hops=1, recompute_first=same.recompute_first + 1),
        replace(same, scope="namespace", recompute_last=40),
    ]


@st.composite
def labelled(draw: st.DrawFn, length: int) -> list[tuple[int, int] | None]:
    """Labels as `from_blocks` gives them: exact up to a position, then approximate."""
    num_computed = draw(st.sampled_from([length, length, draw(st.integers(0, length))]))
    edge = draw(st.sampled_from([num_computed, num_computed, draw(st.integers(0, num_computed))]))
    hops = draw(st.integers(0, 2))
    labels: list[tuple[int, int] | None] = [(0, 0)] * edge
    return labels + [(1, hops)] * (num_computed - edge)


def edited(rng: Random) -> Case:
    """A case whose prompts share long pieces at odd places: what moved runs are found in."""
    alphabet = rng.choice([2, 3, 50])
    length = rng.randrange(120)
    ids = [rng.randrange(alphabet) for _ in range(length)]
    if rng.random() < 0.2 and length:
        period = rng.randrange(1, 12)
        ids = [ids[at % period] for at in range(length)]
    mine: list[int] = []
    for _ in range(rng.randrange(1, 6)):
        kind = rng.random()
        if kind < 0.2:
            mine += [rng.randrange(alphabet) for _ in range(rng.randrange(12))]
        else:
            start = 0 if not mine and kind < 0.6 else rng.randrange(length + 1)
            mine += ids[start : start + rng.randrange(60)]
    where = rng.choice(SPACES)
    spots = sorted(rng.sample(range(length + 1), 2)) if length and rng.random() < 0.3 else []
    inside = ((spots[0], spots[1], DIGESTS[0]),) if spots else ()
    numbers = rng.choice([[0], [0], [0], [0, 1], [3, 7]])
    sizes = [rng.choice([1, 2, 3, 4, 5, 8, 16]) for _ in numbers]
    mine_sizes = [rng.choice([None, 1, 3, 4, 5, 16]) for _ in numbers]
    labels: list[tuple[int, int] | None] = []
    usual = [(0, 0), (0, 0), (0, 0), (1, 0), (1, 1), None]
    while len(labels) < length and rng.random() < 0.9:
        labels += [rng.choice(usual)] * rng.randrange(1, 70)
    del labels[length:]
    while labels and labels[-1] is None:
        labels.pop()
    num_lookahead = rng.choice([0, 0, 1, 9])

    def table(size: int, tokens: int) -> list[int]:
        count = -(-tokens // size) + rng.randrange(2)
        return rng.sample(range(count + 2), count)

    start = rng.randrange(len(mine) + 1)
    cached = (start, rng.randrange(start, len(mine) + 1)) if rng.random() < 0.4 else (0, 0)
    policy = naive.Policy(
        approximate=rng.random() < 0.9,
        min_run=rng.choice([8, 8, 9, 12, None]),
        max_hops=rng.choice([1, 1, 1, 2, 3]),
        max_approximate_share=rng.choice([1.0, 1.0, 1.0, 0.7, 0.3]),
        recompute_first=rng.choice([0, 0, 1, 3]),
        recompute_last=rng.choice([0, 0, 2, 30]),
        recompute_share=rng.choice([0.0, 0.0, 0.3]),
        repair=rng.choice(["fronts", "question"]),
    )
    if rng.random() < 0.3:
        limits = [
            replace(policy, max_cuts=1),
            replace(policy, max_lost_context=0.5),
            replace(policy, max_new_context=0.5),
        ]
        policy = rng.choice(limits)
    return Case(
        naive.Prompt(tuple(ids), inside, where),
        labels,
        num_lookahead,
        {
            g: (s, table(s, len(labels) + num_lookahead))
            for g, s in zip(numbers, sizes, strict=True)
        },
        naive.Prompt(tuple(mine), inside if spots and spots[1] <= len(mine) else (), where),
        {
            g: (s, table(s or size, len(mine)))
            for g, s, size in zip(numbers, mine_sizes, sizes, strict=True)
        },
        cached,
        rng.choice([0, 0, 1, 4]),
        policy,
        rng.choice(built_under(policy)),
    )


def kinded(rng: Random) -> Case:
    """A case next to windows and states, whose prompts begin alike."""
    length = rng.randrange(1, 80)
    ids = tuple(rng.randrange(3) for _ in range(length))
    own = tuple(rng.randrange(3) for _ in range(rng.randrange(12)))
    mine = ids[: rng.choice([length, rng.randrange(length + 1)])] + own
    labels: list[tuple[int, int] | None] = [(0, 0)] * rng.choice([length, rng.randrange(length)])
    if rng.random() < 0.1:
        labels += [(1, 1)] * rng.randrange(length - len(labels) + 1)
    sizes = dict.fromkeys(range(4), rng.choice([1, 2, 4, 8]))
    my_sizes = dict(sizes)
    if rng.random() < 0.3:
        my_sizes = dict.fromkeys(range(4), rng.choice([1, 2, 3, 4]))
        sizes[rng.randrange(4)] = 3
    numbers = sorted(rng.sample(range(1, 4), rng.randint(1, 3)))
    windows = {number: rng.choice([naive.STATE, 2, 5, 5, 9, 30]) for number in numbers}
    theirs: naive.Tables = {0: (sizes[0], rng.sample(range(200), length + 1))}
    my_tables: dict[int, tuple[int | None, list[Any]]] = {
        0: (my_sizes[0], rng.sample(range(200), len(mine) + 1))
    }
    for number, window in windows.items():
        size = sizes[number]
        first = 0 if window else size
        places = range(first, length + 1, size)
        kind = rng.random()
        if kind < 0.6 and window:
            # What a live request has: the blocks of the last windows.
            back = window + rng.randrange(40)
            places = range(max(0, length - back) // size * size, length + 1, size)
        chosen = [at for at in places if rng.random() < (0.9 if window else 0.4)]
        theirs[number] = (size, list(zip(chosen, rng.sample(range(200), len(chosen)), strict=True)))
        size = my_sizes[number]
        places = range(size, len(mine) + 1, size)
        chosen = [at for at in places if rng.random() < 0.5]
        ids_ = rng.sample(range(200), len(chosen))
        my_tables[number] = (size, list(zip(chosen, ids_, strict=True)))
    cached = rng.choice([0, 0, rng.randrange(len(mine) + 1)])
    states = [my_sizes[number] for number, window in windows.items() if window == naive.STATE]
    cached -= cached % math.lcm(*states)
    return Case(
        naive.Prompt(ids),
        labels,
        rng.choice([0, 0, 3]),
        theirs,
        naive.Prompt(mine),
        my_tables,
        (0, cached),
        rng.choice([0, 1, 1, 9]),
        naive.Policy(approximate=rng.random() < 0.3),
        windows=windows,
    )
