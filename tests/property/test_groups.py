"""Groups of layers (rules G1 to G9): the index against its model, and examples for either."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from tests.property.group_twin import GroupTwin
from tests.property.kit import Kit, put
from tests.property.soak import describe, run
from tests.property.test_state_machine import RANDOMS, IndexMachine
from tests.property.twin import MANY_CANDIDATES, PLAN, pick

import kvtrie
from kvtrie import Group
from kvtrie.testing import strategies as kv
from kvtrie.testing.model import ModelIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

# Some policies forbid kinds that nothing is tagged with.
pytestmark = pytest.mark.filterwarnings("ignore:.* forbids nothing:UserWarning")

NUM_BLOCKS = 256
ANY_SOURCE = kvtrie.ReusePolicy(scope="namespace")


class GroupMachine(IndexMachine):
    """As `IndexMachine`, with groups of layers."""

    @initialize(
        data=st.data(),
        rng=RANDOMS,
        num_blocks=kv.pool_sizes(),
        block_size=st.integers(1, 8),
        seed=st.integers(0, 2**64 - 1),
    )
    def make(
        self, data: st.DataObject, rng: Random, num_blocks: int, block_size: int, seed: int
    ) -> None:
        self.twin = GroupTwin(
            rng,
            num_blocks=num_blocks,
            block_size=block_size,
            hash_bits=self.hash_bits,
            seed=seed,
            max_tokens=48,
            groups=data.draw(kv.groups(block_size)),
        )

    @rule(
        rng=RANDOMS,
        call=st.sampled_from(["advance", "evict_group", "discard_group", "take_group"]),
    )
    def of_group(self, rng: Random, call: str) -> None:
        self.go(rng, call)


def test_index_with_groups_agrees_with_model() -> None:
    profile = settings()
    run_state_machine_as_test(
        GroupMachine,
        settings=settings(
            profile,
            max_examples=profile.max_examples,
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_index_with_groups_agrees_with_model_at_random() -> None:
    report = run(10_000, first=2_000_000, groups=True)
    assert not report.mismatches, describe(report, 0.0)
    counts = report.counts
    ended = counts["episodes ended by dropped candidates"]
    assert counts["episodes drained, no block lost"] + ended == counts["episodes"]
    for met in (
        "plans, cut by a group",
        "plans, in place in groups",
        "plans, windows rebuilt",
        "plans, windows carried",
        "taken in groups",
        "duplicates in groups",
        "evicted from groups",
        "discarded from groups",
        "taken freed of groups",
        "advanced",
        "explained, cut by a group",
    ):
        assert counts[met] > 20, met


def parts(plan: Any, groups: list[Group]) -> list[Any]:
    """What a plan says of each group."""
    found: list[Any] = []
    for group in groups:
        if group.kind == "state":
            found.append(plan.state(group.name))
        else:
            start, blocks = plan.group(group.name)
            found.append((start, blocks.tolist(), plan.rebuild(group.name).tolist()))
    return found


@given(
    data=st.data(),
    block_size=st.integers(1, 8),
    family=kv.families(max_prompts=6, max_tokens=48, alphabet=2),
    hash_bits=st.sampled_from([0, 4, 64]),
)
def test_plans_next_to_groups_agree_with_model(
    data: st.DataObject, block_size: int, family: list[kv.Prompt], hash_bits: int
) -> None:
    groups = data.draw(kv.groups(block_size, largest=64))
    shape: dict[str, Any] = {
        "min_run": 8,
        "max_candidates": MANY_CANDIDATES,
        "hash_bits": hash_bits,
        "groups": groups,
    }
    both: list[Any] = [
        kvtrie.RadixIndex(NUM_BLOCKS, block_size, **shape),
        ModelIndex(NUM_BLOCKS, block_size, **shape),
    ]
    free = list(range(NUM_BLOCKS))
    for prompt in family[:-1]:
        seq, count = prompt.sequence(), len(prompt.ids) // block_size
        if count > len(free):
            break
        source = data.draw(kv.sources(48))
        offers = {own.name: data.draw(kv.offers(own, len(seq), block_size)) for own in groups}
        stops = data.draw(kv.stops(len(seq), block_size))
        results: list[dict[str, Any] | None] = []
        for index in both:
            try:
                done = index.insert(
                    seq,
                    free[:count],
                    num_computed=len(seq),
                    source=source,
                    groups=offers,
                    stops=stops,
                )
            except kvtrie.BlockInUseError:
                results.append(None)
                continue
            results.append({name: own.blocks for name, own in done.groups.items()})
            used = done.blocks
        assert results[0] == results[1]
        if results[0] is not None:
            free = [block for block in free if block not in used]
        # What is evicted depends on what calls needed.
        for own in groups:
            few = data.draw(st.integers(0, 2))
            first, second = (index.evict(few, group=own.name).tolist() for index in both)
            assert first == second
    has_states = any(own.kind == "state" for own in groups)
    for prompt in reversed(family):
        seq = prompt.sequence()
        policy = kvtrie.EXACT_ONLY if has_states else data.draw(kv.policies())
        keep_last = data.draw(st.integers(0, 2))
        plans = [index.plan(seq, policy, keep_last=keep_last) for index in both]
        real, model = ((pick(plan, PLAN), parts(plan, groups)) for plan in plans)
        for plan in plans:
            plan.release()
        assert real == model


# --- examples -------------------------------------------------------------------------------------

TEXT = list(range(100, 132))
SWA = Group.window("swa", window=9, num_blocks=16, block_size=4)
GDN = Group.state("gdn", num_slots=8)


def made(kit: Kit, *groups: Group) -> Any:
    return kit.index(32, 4, min_run=8, groups=groups or [SWA, GDN])


def filled(kit: Kit, index: Any, windows: Sequence[int], states: list[int], **more: Any) -> Any:
    """`TEXT` with blocks 0 to 7, the same numbers of a window, and states."""
    seq = kit.seq(TEXT)
    offers = {
        "swa": [(4 * block, block) for block in windows],
        "gdn": [(position, position // 4 - 1) for position in states],
    }
    known = {group.name for group in index.groups}
    offers = {name: own for name, own in offers.items() if name in known}
    put(index, seq, list(range(8)), groups=offers, **more)
    return seq


@pytest.mark.parametrize(
    ("windows", "states", "end"),
    [
        (range(8), [32], 32),
        (range(8), [20, 28], 28),
        (range(6), [20, 32], 20),
        (range(1, 8), [8, 12], 12),
        (range(8), [], 0),
        (range(6, 8), [32], 32),
        (range(7, 8), [32], 0),
    ],
)
def test_a_prompt_continues_where_every_group_can(
    kit: Kit, windows: range, states: list[int], end: int
) -> None:
    index = made(kit)
    filled(kit, index, windows, states)
    prompt = kit.seq(TEXT, [7])
    assert index.lookup(prompt, touch=False).num_tokens == end
    with index.plan(prompt) as plan:
        assert plan.num_exact == end
        start = max(0, end - 8)
        expected: Any = (start, list(range(start // 4, end // 4)), [])
        assert parts(plan, [SWA, GDN]) == [expected, end // 4 - 1 if end else None]


@pytest.mark.parametrize(("window", "least"), [(2, 7), (5, 7), (6, 6), (9, 6), (10, 5)])
def test_a_window_needs_the_blocks_that_reach_into_it(kit: Kit, window: int, least: int) -> None:
    # Before 32, a window of 5 tokens reaches back to 28, one of 6 to 27, in the block before.
    swa = Group.window("swa", window=window, num_blocks=16, block_size=4)
    for first, end in ((least, 32), (least + 1, 0)):
        index = made(kit, swa)
        filled(kit, index, range(first, 8), [])
        assert index.lookup(kit.seq(TEXT, [7])).num_tokens == end


@pytest.mark.parametrize(("position", "pinned"), [(16, [2, 3]), (17, [3]), (20, [3]), (21, [])])
def test_advancing_unpins_what_no_later_token_reads(
    kit: Kit, position: int, pinned: list[int]
) -> None:
    index = made(kit, Group.window("swa", window=6, num_blocks=16, block_size=4))
    seq = kit.seq(TEXT[:16])
    put(index, seq, [0, 1, 2, 3], groups={"swa": [(4 * block, block) for block in range(4)]})
    with index.plan(kit.seq(TEXT[:16], [7])) as plan:
        plan.advance(position)
        gone = index.evict(16, group="swa").tolist()
        assert sorted({0, 1, 2, 3} - set(gone)) == pinned


@pytest.mark.parametrize(("position", "pinned"), [(0, 1), (12, 1), (13, 0)])
def test_a_state_is_read_up_to_its_position(kit: Kit, position: int, pinned: int) -> None:
    index = made(kit, GDN)
    filled(kit, index, range(0), [12])
    with index.plan(kit.seq(TEXT, [7])) as plan:
        assert plan.state("gdn") == 2
        plan.advance(position)
        assert index.group_stats("gdn").pinned == pinned


def test_what_no_call_needed_is_evicted_first(kit: Kit) -> None:
    index = made(kit, SWA)
    filled(kit, index, range(8), [], stops=[12])
    assert index.evict(16, group="swa").tolist() == [5, 4, 3, 0, 7, 6, 2, 1]


def test_ids_of_groups_leave_with_their_block(kit: Kit) -> None:
    index = made(kit)
    filled(kit, index, range(8), [32])
    with index.plan(kit.seq(TEXT, [7])) as plan:
        assert plan.num_exact == 32
        # The plan pins all blocks, and of the window the last two.
        assert index.discard([0, 7]).tolist() == []
        assert index.take_freed(group="swa").tolist() == [0]
        assert index.group_stats("swa").condemned == 1
    assert index.take_freed(group="swa").tolist() == [7]
    assert index.take_freed(group="gdn").tolist() == [7]
    assert index.discard([2, 1, 2, 9], group="swa").tolist() == [2, 1]
    assert index.group_stats("swa").indexed == 4


def test_only_exact_ids_are_taken(kit: Kit) -> None:
    index = made(kit)
    offers = {"swa": [(0, 3), (4, 4), (8, 5), (20, 6)], "gdn": [(8, 1), (16, 2)]}
    source = kvtrie.Imported(exact_until=8)
    done = index.insert(kit.seq(TEXT), range(4), num_computed=16, source=source, groups=offers)
    assert done.groups["swa"].blocks == [3, 4, None, None]
    assert done.groups["swa"].surplus.tolist() == [5, 6]
    assert done.groups["gdn"].blocks == [1, None]
    again = put(index, kit.seq(TEXT[:8]), [0, 1], groups={"swa": [(0, 3), (4, 9)]})
    assert again.groups["swa"].blocks == [3, 4]
    assert again.groups["swa"].duplicates.tolist() == [9]


def test_a_moved_run_has_its_windows_rebuilt(kit: Kit) -> None:
    index = made(kit, SWA)
    # None of what the run would take along.
    filled(kit, index, range(5), [])
    prompt = kit.seq(TEXT[:8], [1, 2], TEXT[12:30], [3])
    with index.plan(prompt, ANY_SOURCE) as plan:
        assert parts(plan, [SWA]) == [(0, [0, 1], [[20, 28]])]
        done = index.insert(
            prompt,
            [0, 1, *range(20, 25)],
            num_computed=28,
            source=plan,
            groups={"swa": [(8, 8), (20, 9)]},
        )
        assert done.num_exact == 8
        assert done.groups["swa"].surplus.tolist() == [8, 9]


@pytest.mark.parametrize(
    ("has", "moves", "rebuilt"),
    [
        # Tokens 20 to 28 of the prompt are 22 to 30 of the source, whose blocks 5 to 7 have them.
        (range(8), [(22, 40, 2, -2), (24, 42, 2, -2), (26, 44, 2, -2), (28, 46, 2, -2)], []),
        ([0, 1, 5, 7], [(22, 40, 2, -2), (28, 46, 2, -2)], [[22, 26]]),
        ([0, 1, 6], [(24, 42, 2, -2), (26, 44, 2, -2)], [[20, 22], [26, 28]]),
    ],
)
def test_a_moved_run_takes_its_windows_along(
    kit: Kit, has: Sequence[int], moves: list[Any], rebuilt: list[Any]
) -> None:
    index = made(kit, SWA)
    filled(kit, index, has, [])
    prompt = kit.seq(TEXT[:8], [1, 2], TEXT[12:30], [3])
    before = index.group_stats("swa").evictable
    with index.plan(prompt, ANY_SOURCE) as plan:
        assert parts(plan, [SWA]) == [(0, [0, 1], rebuilt)]
        # Where nothing is copied to, entries of the table are not read.
        table = [0, 0, 0, 0, 0, 10, 11, 0]
        assert plan.moves(table, group="swa").tolist() == moves
        assert plan.moves(table, 24, group="swa").tolist() == [m for m in moves if m[1] >= 44]
        assert plan.moves(table, 0, 24, group="swa").tolist() == [m for m in moves if m[1] < 44]
        pinned = {0, 1, *(move[0] // 4 for move in moves)}
        assert index.group_stats("swa").pinned == len(pinned)
        plan.release_sources()
        plan.advance(2**40)
        # No position passes a source: it stays until the release.
        assert index.group_stats("swa").pinned == len(pinned) - 2
        # A source, a block in place, and a block for two.
        for bad in ([*table[:5], moves[0][0] // 4, 11, 0], [*table[:5], 10, 10, 0], [0] * 8):
            with pytest.raises(ValueError):  # noqa: PT011 - the messages differ
                plan.moves(bad, group="swa")
        with pytest.raises(ValueError):  # noqa: PT011 - the messages differ
            plan.moves(table[:7], group="swa")
        with pytest.raises(ValueError):  # noqa: PT011 - the messages differ
            plan.moves(table, group="mla")
        done = index.insert(
            prompt,
            [0, 1, *range(20, 25)],
            num_computed=28,
            source=plan,
            groups={"swa": [(8, 8), (20, 9)]},
        )
        # What was carried is as approximate as what was rebuilt.
        assert done.num_exact == 8
        assert done.groups["swa"].surplus.tolist() == [8, 9]
    assert index.group_stats("swa").evictable == before
    with pytest.raises(kvtrie.StaleHandleError):
        plan.moves(table, group="swa")


@pytest.mark.parametrize("pins", [True, False])
def test_windows_of_sources_that_may_have_left_are_rebuilt(kit: Kit, pins: bool) -> None:
    """Windows of the prompt that had got the ids of the sources were copied in their place."""
    index = made(kit, SWA)
    filled(kit, index, range(8), [])
    prompt = kit.seq(TEXT[:8], [1, 2], TEXT[12:30], [3])
    with index.plan(prompt, ANY_SOURCE, pin=pins) as plan:
        assert len(plan.moves([0, 0, 0, 0, 0, 10, 11, 0], group="swa"))
        if pins:
            plan.release_sources()
        plan.recompute([(18, 20)])
        assert plan.moves([0, 0, 9, 10, 11, 12, 13, 0], group="swa").tolist() == []
        assert parts(plan, [SWA]) == [(0, [0, 1], [[10, 18], [20, 28]])]


def test_tokens_that_are_recomputed_take_other_windows_along(kit: Kit) -> None:
    index = made(kit, SWA)
    filled(kit, index, range(8), [])
    prompt = kit.seq(TEXT[:8], [1, 2], TEXT[12:30], [3])
    with index.plan(prompt, ANY_SOURCE) as plan:
        plan.recompute([(18, 20), (27, 28)])
        # Before 18 and before 27; 18 to 20 are computed.
        table = [0, 0, 9, 10, 11, 12, 13, 0]
        copied = plan.moves(table, group="swa")
        tokens = [t for m in copied.tolist() for t in range(m[1], m[1] + m[2])]
        slots = [at for block in (9, 10) for at in range(4 * block, 4 * block + 4)]
        assert tokens[:8] == [*slots[2:], 44, 45]
        assert len(tokens) == 8 + 7
        assert parts(plan, [SWA]) == [(0, [0, 1], [])]


def test_what_follows_a_rebuilt_window_is_approximate(kit: Kit) -> None:
    index = made(kit, SWA)
    filled(kit, index, range(1), [])
    prompt = kit.seq(TEXT[:8], [1, 2], TEXT[12:30], [3, 4, 5, 6])
    with index.plan(prompt, ANY_SOURCE) as plan:
        # All of the moved run is computed, but the group has no block before it.
        plan.recompute([(10, 28)])
        assert (plan.num_exact, plan.num_approximate) == (8, 0)
        assert parts(plan, [SWA]) == [(8, [], [[0, 8]])]
        table = [0, 1, *range(20, 26)]
        offers = {"swa": [(4, 5), (8, 6)]}
        done = index.insert(prompt, table, num_computed=32, source=plan, groups=offers)
        assert done.num_exact == 8
        assert done.groups["swa"].blocks == [None, None]


def test_without_a_moved_run_the_plan_is_the_exact_one(kit: Kit) -> None:
    index = made(kit, SWA)
    filled(kit, index, range(2), [])
    with index.plan(kit.seq(TEXT, [3]), ANY_SOURCE) as plan:
        assert plan.num_exact == 8
        assert parts(plan, [SWA]) == [(0, [0, 1], [])]


REFUSED: list[tuple[Callable[[Kit, Any, Any], Any], type[Exception]]] = [
    (lambda kit, _, __: made(kit, GDN, GDN), ValueError),
    (lambda kit, _, __: made(kit, Group.state("", num_slots=1)), ValueError),
    (lambda kit, _, __: made(kit, Group.state("n" * 65, num_slots=1)), ValueError),
    (
        lambda kit, _, __: made(kit, *(Group.state(f"{at}", num_slots=1) for at in range(16))),
        ValueError,
    ),
    (
        lambda kit, _, __: made(kit, Group.window("w", window=9, num_blocks=9, block_size=8)),
        ValueError,
    ),
    (
        lambda kit, _, __: made(kit, Group.window("w", window=1, num_blocks=9, block_size=4)),
        ValueError,
    ),
    (
        lambda kit, _, __: made(kit, Group.window("w", window=66, num_blocks=16, block_size=4)),
        ValueError,
    ),
    (lambda kit, _, __: kit.index(32, 4, groups=["swa"]), TypeError),
    (lambda kit, _, __: kit.index(32, 4, groups=7), TypeError),
    (lambda _, index, __: index.take_freed(group="mla"), ValueError),
    (lambda _, index, __: index.take_freed(group=1), TypeError),
    (lambda _, index, __: index.evict(1, group="mla"), ValueError),
    (lambda _, index, __: index.discard([1], group="mla"), ValueError),
    (lambda _, index, __: index.discard([16], group="swa"), ValueError),
    (lambda _, index, __: index.group_stats("mla"), ValueError),
    (lambda _, index, seq: index.plan(seq, kvtrie.ReusePolicy()), ValueError),
    (lambda _, index, seq: index.plan(seq, path=seq), ValueError),
]


@pytest.mark.parametrize(("call", "error"), REFUSED)
def test_what_groups_refuse(kit: Kit, call: Any, error: type[Exception]) -> None:
    index = made(kit)
    seq = filled(kit, index, range(8), [32])
    before = index.digest()
    with pytest.raises(error):
        call(kit, index, seq)
    assert index.digest() == before


BAD_OFFERS: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"groups": {"mla": []}}, ValueError),
    ({"groups": [("swa", [])]}, TypeError),
    ({"groups": {1: []}}, TypeError),
    ({"groups": {"swa": 1}}, TypeError),
    ({"groups": {"swa": [1]}}, TypeError),
    ({"groups": {"swa": [(4, 1, 2)]}}, ValueError),
    ({"groups": {"swa": [(4, 1.0)]}}, TypeError),
    ({"groups": {"swa": [(-4, 1)]}}, ValueError),
    ({"groups": {"swa": [(4, 16)]}}, ValueError),
    ({"groups": {"swa": [(2, 1)]}}, ValueError),
    ({"groups": {"swa": [(32, 1)]}}, ValueError),
    ({"groups": {"gdn": [(0, 1)]}}, ValueError),
    ({"groups": {"gdn": [(36, 1)]}}, ValueError),
    ({"groups": {"swa": [(8, 1), (4, 2)]}}, ValueError),
    ({"groups": {"swa": [(4, 1), (4, 2)]}}, ValueError),
    ({"groups": {"swa": [(4, 1), (8, 1)]}}, kvtrie.BlockInUseError),
    ({"groups": {"swa": [(8, 1)]}}, kvtrie.BlockInUseError),
    ({"stops": [3]}, ValueError),
    ({"stops": [36]}, ValueError),
    ({"stops": [8, 8]}, ValueError),
    ({"stops": [-4]}, ValueError),
    ({"stops": 8}, TypeError),
]


@pytest.mark.parametrize(("arguments", "error"), BAD_OFFERS)
def test_bad_offers_change_nothing(
    kit: Kit, arguments: dict[str, Any], error: type[Exception]
) -> None:
    index = made(kit)
    seq = filled(kit, index, range(8), [32])
    before = index.digest()
    with pytest.raises(error):
        put(index, seq, list(range(8)), **arguments)
    assert index.digest() == before


def test_plans_refuse_the_wrong_kind_and_a_late_call(kit: Kit) -> None:
    index = made(kit)
    with index.plan(filled(kit, index, range(8), [32])) as plan:
        wrongs: list[Callable[[], Any]] = [
            lambda: plan.group("gdn"),
            lambda: plan.rebuild("gdn"),
            lambda: plan.state("swa"),
            lambda: plan.state("mla"),
            lambda: plan.advance(-1),
        ]
        for wrong in wrongs:
            with pytest.raises(ValueError):  # noqa: PT011 - the messages differ
                wrong()
    late: list[Callable[[], Any]] = [
        lambda: plan.group("mla"),
        lambda: plan.state("gdn"),
        lambda: plan.rebuild("swa"),
        lambda: plan.advance(4),
    ]
    for call in late:
        with pytest.raises(kvtrie.StaleHandleError):
            call()
