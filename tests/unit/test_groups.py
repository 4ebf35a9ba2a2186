"""Groups of layers (rules G1 to G8); `rust/kvtrie-core/tests/groups` has the brute-force model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtrie
from kvtrie import Group, Span, TokenSequence, tags

if TYPE_CHECKING:
    from collections.abc import Callable

SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
TEXT = list(range(100, 132))


def made(groups: list[Any] | None = None, min_run: int = 16) -> kvtrie.RadixIndex:
    both = [
        Group.window("swa", window=9, num_blocks=16, block_size=4),
        Group.state("gdn", num_slots=8),
    ]
    groups = both if groups is None else groups
    return kvtrie.RadixIndex(num_blocks=32, block_size=4, seed=1, groups=groups, min_run=min_run)


def filled(index: kvtrie.RadixIndex, windows: range, states: list[int]) -> TokenSequence:
    """The sequence of `TEXT` with blocks 0 to 7, window blocks at `windows` and states."""
    seq = TokenSequence(TEXT, SPACE)
    done = index.insert(
        seq,
        range(8),
        num_computed=32,
        source=kvtrie.COMPUTED,
        groups={
            "swa": [(4 * block, block) for block in windows],
            "gdn": [(position, position // 4 - 1) for position in states],
        },
    )
    assert done.blocks.tolist() == list(range(8))
    return seq


@pytest.mark.parametrize(
    ("windows", "states", "end"),
    [
        (range(8), [32], 32),
        (range(8), [20, 28], 28),  # group 0 and the window go on without a state
        (range(6), [32], 0),  # a state after a gap in the window
        (range(6), [20, 32], 20),
        (range(1, 8), [8, 12], 12),  # at 8, the window would need block 0
        (range(8), [], 0),
        (range(0), [32], 0),
        (range(6, 8), [32], 32),  # what is before the window is not needed
        (range(7, 8), [32], 0),
    ],
)
def test_a_hit_ends_where_every_group_can_continue(
    windows: range, states: list[int], end: int
) -> None:
    index = made()
    filled(index, windows, states)
    prompt = TokenSequence([*TEXT, 7], SPACE)
    assert index.lookup(prompt).num_tokens == end
    with index.plan(prompt) as plan:
        assert plan.num_exact == end
        assert plan.gaps.tolist() == [[end, 33]]
        assert plan.blocks.tolist() == list(range(end // 4))
        start, blocks = plan.group("swa")
        assert start == max(0, end - 8)
        assert blocks.tolist() == list(range(start // 4, end // 4))
        assert plan.state("gdn") == (end // 4 - 1 if end else None)
    cut = index.explain(prompt).cut_by
    if end == 32:
        assert cut is None
    else:
        assert cut is not None
        assert cut[1] == end
    index.check()


def test_explain_names_the_group_that_cut_last() -> None:
    index = made()
    filled(index, range(8), [20])
    explanation = index.explain(TokenSequence([*TEXT, 7], SPACE))
    assert explanation.cut_by == ("gdn", 20)
    assert 'Group "gdn" lets the prompt continue after 20 tokens, not after 32' in str(explanation)


def test_only_exact_ids_at_present_blocks_are_taken() -> None:
    index = made()
    seq = TokenSequence(TEXT, SPACE)
    done = index.insert(
        seq,
        range(4),
        num_computed=16,
        source=kvtrie.Imported(exact_until=8),
        groups={"swa": [(0, 3), (4, 4), (8, 5), (20, 6)], "gdn": [(8, 1), (16, 2)]},
    )
    assert done.groups["swa"].blocks == [3, 4, None, None]
    assert done.groups["swa"].surplus.tolist() == [5, 6]
    assert done.groups["gdn"].blocks == [1, None]
    assert done.groups["gdn"].surplus.tolist() == [2]
    again = index.insert(
        seq,
        range(2),
        num_computed=8,
        source=kvtrie.COMPUTED,
        groups={"swa": [(0, 3), (4, 9)]},
    )
    assert again.groups["swa"].blocks == [3, 4]
    assert again.groups["swa"].duplicates.tolist() == [9]
    assert (
        repr(again.groups["swa"]) == "GroupInsertResult(blocks=[3, 4], duplicates=[9], surplus=[])"
    )


def test_a_plan_pins_its_ids_until_it_advances_or_is_released() -> None:
    index = made()
    filled(index, range(8), [16, 32])
    with index.plan(TokenSequence([*TEXT, 7], SPACE)) as plan:
        assert index.group_stats("swa").pinned == 2
        # Seven others and the state at 16 go, the pinned ones stay.
        assert sorted(index.evict(16, group="swa").tolist()) == [0, 1, 2, 3, 4, 5]
        assert index.evict(16, group="gdn").tolist() == [3]
        plan.advance(33)
        assert index.group_stats("gdn").pinned == 0
        assert index.group_stats("swa").pinned == 2
        plan.advance(44)
        assert index.group_stats("swa").pinned == 0
        assert index.num_evictable == 0  # group 0 stays pinned
    assert index.evict(16, group="swa").tolist() == [7, 6]


@pytest.mark.parametrize(("position", "pinned"), [(16, [2, 3]), (17, [3]), (20, [3]), (21, [])])
def test_the_next_token_decides_which_blocks_of_a_window_stay(
    position: int, pinned: list[int]
) -> None:
    # The token at 16 attends to 11 to 16, that at 17 to 12 to 17: blocks 3 and 4.
    index = made(groups=[Group.window("swa", window=6, num_blocks=16, block_size=4)])
    seq = TokenSequence(TEXT[:16], SPACE)
    offers = {"swa": [(4 * block, block) for block in range(4)]}
    index.insert(seq, range(4), num_computed=16, source=kvtrie.COMPUTED, groups=offers)
    with index.plan(TokenSequence([*TEXT[:16], 7], SPACE)) as plan:
        plan.advance(position)
        gone = set(index.evict(16, group="swa").tolist())
        assert sorted(set(range(4)) - gone) == pinned
        plan.advance(2**63 - 1)
        assert index.group_stats("swa").pinned == 0


def test_windows_that_nobody_needed_are_evicted_first() -> None:
    index = made()
    seq = TokenSequence(TEXT, SPACE)
    offers = {"swa": [(4 * block, block) for block in range(8)]}
    index.insert(seq, range(8), num_computed=32, source=kvtrie.COMPUTED, groups=offers, stops=[12])
    assert index.evict(16, group="swa").tolist() == [5, 4, 3, 0, 7, 6, 2, 1]


def test_ids_leave_with_blocks_of_group_0() -> None:
    index = made()
    filled(index, range(8), [32])
    assert index.evict(1).tolist() == [7]
    assert index.take_freed(group="swa").tolist() == [7]
    assert index.take_freed(group="gdn").tolist() == [7]
    assert index.discard([0]).tolist() == [0]
    assert index.take_freed(group="swa").tolist() == [0]
    assert index.discard([1, 1, 9], group="swa").tolist() == [1]
    assert index.group_stats("swa") == kvtrie_stats(index, indexed=5)
    assert index.stats().indexed == 6  # a missing window block is no hole in group 0
    assert index.stats().holes == 1
    assert index.reset().tolist() == [1, 2, 3, 4, 5, 6]
    assert index.take_freed(group="swa").tolist() == [2, 3, 4, 5, 6]
    index.check()


def kvtrie_stats(index: kvtrie.RadixIndex, *, indexed: int) -> kvtrie.GroupStats:
    stats = index.group_stats("swa")
    assert (stats.indexed, stats.evictable, stats.waiting) == (indexed, indexed, 0)
    return stats


def test_a_snapshot_has_the_groups() -> None:
    index = made()
    filled(index, range(8), [16, 32])
    index.discard([0])
    again = kvtrie.RadixIndex.restore(index.snapshot(), pool_id=index.pool_id)
    assert again.digest() == index.digest()
    assert again.groups == index.groups
    assert again.snapshot() == index.snapshot()
    assert again.take_freed(group="swa").tolist() == [0]
    assert again.digest() != index.digest()
    empty = kvtrie.RadixIndex.restore(index.snapshot(), pool_id=None)
    assert empty.groups == index.groups
    assert empty.group_stats("swa").indexed == 0


BAD_GROUPS: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: made(groups=[Group.window("w", window=66, num_blocks=16, block_size=4)]),
        "window 66, which takes 17 blocks of 4; its pool has 16",
    ),
    (
        lambda: made(groups=[Group.window("w", window=1, num_blocks=16, block_size=4)]),
        "window 1; it must be at least 2",
    ),
    (
        lambda: made(groups=[Group.window("w", window=9, num_blocks=16, block_size=8)]),
        "block_size 8; it must be that of the index, 4",
    ),
    (lambda: made(groups=[Group.state("s", num_slots=1)] * 2), 'two groups of the name "s"'),
    (lambda: made(groups=[Group.state("", num_slots=1)]), "has 0 bytes; it must have 1 to 64"),
    (
        lambda: made(groups=[Group.state(str(at), num_slots=1) for at in range(16)]),
        "16 groups; it must have at most 15",
    ),
    (lambda: Group.state("s", num_slots=0), "num_slots"),
]


@pytest.mark.parametrize(("make", "message"), BAD_GROUPS)
def test_bad_groups_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_group_must_be_a_group() -> None:
    with pytest.raises(TypeError, match=r"groups\[0\] is of type 'str'; it must be a Group"):
        made(groups=["swa"])


BAD_OFFERS: list[tuple[dict[str, Any], str]] = [
    ({"groups": {"mla": [(0, 1)]}}, "there is no group 'mla'; the index has 'swa', 'gdn'"),
    ({"groups": {"swa": [(0, 16)]}}, r"id 16; it must be in \[0, 16\), its pool"),
    ({"groups": {"swa": [(0, 2**32)]}}, r"id 4294967296; it must be in \[0, 2147483648\)"),
    ({"groups": {"swa": [(2, 1)]}}, r"^RadixIndex\.insert: .* position 2; it must be a multiple"),
    ({"groups": {"swa": [(32, 1)]}}, "position 32; .* inside the 32 tokens"),
    ({"groups": {"gdn": [(36, 1)]}}, "position 36; .* inside the 32 tokens"),
    ({"groups": {"gdn": [(0, 1)]}}, "position 0"),
    ({"groups": {"swa": [(8, 1), (4, 2)]}}, "position 4 after one at 8; positions must ascend"),
    ({"stops": [3]}, "stops has 3; it must be a multiple of the block size 4"),
    ({"stops": [36]}, "stops has 36"),
    ({"stops": [8, 8]}, "stops has 8 after 8"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_OFFERS)
def test_bad_offers_change_nothing(arguments: dict[str, Any], message: str) -> None:
    index = made()
    before = index.digest()
    seq = TokenSequence(TEXT, SPACE)
    with pytest.raises(ValueError, match=message):
        index.insert(seq, range(8), num_computed=32, source=kvtrie.COMPUTED, **arguments)
    assert index.digest() == before


@pytest.mark.parametrize(
    "offers",
    [[(4, 1), (8, 1)], [(8, 1)]],  # given twice; at another place already
)
def test_an_id_has_one_place(offers: list[tuple[int, int]]) -> None:
    index = made()
    seq = filled(index, range(8), [])
    before = index.digest()
    with pytest.raises(kvtrie.BlockInUseError, match='group "swa" has id 1'):
        index.insert(seq, range(8), num_computed=32, source=kvtrie.COMPUTED, groups={"swa": offers})
    assert index.digest() == before


def test_what_is_for_group_0_alone_is_refused_by_name() -> None:
    index = made()
    seq = filled(index, range(8), [32])
    before = index.digest()
    with pytest.raises(ValueError, match='group "gdn" with states, which cannot be moved'):
        index.plan(seq, kvtrie.ReusePolicy())
    with pytest.raises(ValueError, match='group "swa" besides group 0; a plan from one path'):
        index.plan(seq, path=TokenSequence(TEXT, SPACE))
    assert index.digest() == before
    with index.plan(seq) as plan:
        with pytest.raises(
            ValueError, match=r"group 'gdn' is one with states; call ReusePlan\.state"
        ):
            plan.group("gdn")
        with pytest.raises(ValueError, match="group 'swa' is one with a window"):
            plan.state("swa")
        with pytest.raises(ValueError, match="there is no group 'mla'"):
            plan.state("mla")
        ledger = kvtrie.SequenceLedger(block_size=4)
        with pytest.raises(ValueError, match="2 groups besides group 0, the ledger has 0"):
            ledger.begin("a", seq, range(8), source=plan)
    with pytest.raises(kvtrie.StaleHandleError):
        plan.group("swa")
    ledger.begin("a", seq, range(8), source=kvtrie.COMPUTED, num_computed=32)
    with pytest.raises(ValueError, match='the index has group "swa" where the ledger has no group'):
        ledger.finish("a", index)
    for call in (index.evict, index.discard):
        with pytest.raises(ValueError, match="there is no group 'mla'"):
            call(*([1] if call == index.evict else [[1]]), group="mla")
    with pytest.raises(ValueError, match="the index has group 0 alone"):
        kvtrie.RadixIndex(num_blocks=4).take_freed(group="swa")


def test_windows_next_to_a_moved_run_are_rebuilt_and_labelled() -> None:
    index = made(groups=[Group.window("swa", window=9, num_blocks=16, block_size=4)], min_run=8)
    seq = TokenSequence(TEXT, SPACE)
    # The group has no block where the run comes from.
    offers = {"swa": [(4 * block, block) for block in range(5)]}
    index.insert(seq, range(8), num_computed=32, source=kvtrie.COMPUTED, groups=offers)
    prompt = TokenSequence([*TEXT[:8], 1, 2, *TEXT[12:30], 3], SPACE)
    policy = kvtrie.ReusePolicy(scope="namespace")
    with index.plan(prompt, policy) as plan:
        classes = plan.segments[["start", "end", "class"]].tolist()
        assert classes == [(0, 8, 0), (8, 10, 2), (10, 28, 1), (28, 29, 2)]
        start, blocks = plan.group("swa")
        assert (start, blocks.tolist()) == (0, [0, 1])
        # The first gap has its window; that of the last one is in the moved run.
        assert plan.rebuild("swa").tolist() == [[20, 28]]
        done = index.insert(
            prompt,
            [0, 1, *range(20, 25)],
            num_computed=28,
            source=plan,
            groups={"swa": [(8, 8), (20, 9)]},
        )
        assert done.num_exact == 8
        assert done.groups["swa"].surplus.tolist() == [8, 9]
    # Without a moved run, the plan is the exact one, however much window KV is missing.
    index.evict(16, group="swa")
    with index.plan(TokenSequence([*TEXT, 3], SPACE), policy) as plan:
        assert plan.num_exact == plan.num_approximate == 0
        assert plan.rebuild("swa").tolist() == []


def test_counts_next_to_rebuilt_windows_are_of_group_0() -> None:
    index = made(groups=[Group.window("swa", window=9, num_blocks=16, block_size=4)], min_run=8)
    seq = TokenSequence(TEXT, SPACE)
    index.insert(seq, range(8), num_computed=32, source=kvtrie.COMPUTED)
    prompt = TokenSequence([*TEXT[:8], 1, 2, *TEXT[12:30], 3], SPACE)
    with index.plan(prompt, kvtrie.ReusePolicy(scope="namespace")) as plan:
        # The exact prefix and the moved run both lack the window's KV.
        assert plan.rebuild("swa").tolist() == [[0, 8], [20, 28]]
        assert (plan.num_exact, plan.num_approximate, plan.num_compute) == (8, 18, 3)
        # After the first rebuilt token, nothing that is computed is exact.
        done = index.insert(prompt, [0, 1, *range(20, 25)], num_computed=28, source=plan)
        assert done.num_exact == 8
    # No exact plan rebuilds: without a window, nothing is in place.
    with index.plan(prompt) as plan:
        assert (plan.num_exact, plan.rebuild("swa").tolist()) == (0, [])


def test_arrays_of_pairs_are_offers() -> None:
    index = made()
    seq = TokenSequence(TEXT, SPACE)
    pairs = np.array([[24, 3], [28, 4]])
    done = index.insert(
        seq, range(8), num_computed=32, source=kvtrie.COMPUTED, groups={"swa": pairs}
    )
    assert done.groups["swa"].blocks == [3, 4]
    with pytest.raises(TypeError, match="groups is of type 'list'"):
        index.insert(seq, range(8), num_computed=32, source=kvtrie.COMPUTED, groups=[(0, 1)])  # type: ignore[arg-type]


def test_stops_are_before_reasoning_and_at_ends_of_turns() -> None:
    spans = [
        Span(0, 33, "system"),
        Span(40, 50, "user"),
        Span(52, 90, "reasoning"),
        Span(90, 100, "tool_call"),
        Span(110, 130, "tool_result"),
        Span(131, 131, "reasoning"),
        Span(131, 144, "answer"),
    ]
    assert tags.stops(spans, 16) == [32, 48, 96, 128, 144]
    assert tags.stops([Span(3, 9, "reasoning")], 16) == []
    with pytest.raises(ValueError, match="block_size is 0"):
        tags.stops(spans, 0)
