"""Plans with moved runs, by hand: each example holds for the model and for the index alike.

The expected values were derived from the rules on paper. A character is a token, a block has four,
a match at least eight. `shown` and `rows` write the segments as text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.property.kit import OTHER, Kit, hit, imported, put, result, rows, shown, stats

from kvtrie import EXACT_ONLY, Item, ReusePolicy, Span

if TYPE_CHECKING:
    from collections.abc import Iterator

# Some policies forbid kinds that nothing is tagged with.
pytestmark = pytest.mark.filterwarnings("ignore:.* forbids nothing:UserWarning")


def policy_of(**fields: Any) -> ReusePolicy:
    """A policy whose moved runs may come from the whole namespace."""
    return ReusePolicy(**{"scope": "namespace", **fields})


ANY = policy_of()
WHOLE = ReusePolicy(approximate=False, partial_blocks=False)
AGENT = "SYSTEM..thought1answer.1"


def make(kit: Kit, **more: Any) -> Any:
    return kit.index(64, 4, **{"min_run": 8, "max_candidates": 4096, **more})


@pytest.fixture
def index(kit: Kit) -> Any:
    return make(kit)


def cache(index: Any, seq: Any, first: int = 0, **more: Any) -> list[int]:
    blocks = list(range(first, first + len(seq) // 4))
    done = put(index, seq, blocks, **more)
    return list(done.blocks.tolist())


def plan_of(index: Any, seq: Any, policy: Any = ANY, **more: Any) -> Any:
    """A plan that pins nothing, and may be looked at until the end of the test."""
    plan = index.plan(seq, policy, pin=False, **more)
    LOOKED_AT.append(plan)
    return plan


def planned(index: Any, seq: Any, policy: Any = ANY, **more: Any) -> str:
    return shown(plan_of(index, seq, policy, **more))


LOOKED_AT: list[Any] = []


@pytest.fixture(autouse=True)
def release_what_was_looked_at() -> Iterator[None]:
    yield
    while LOOKED_AT:
        LOOKED_AT.pop().release()


# --- what is found --------------------------------------------------------------------------------


def test_plan_deleted_reasoning(kit: Kit, index: Any) -> None:
    cache(index, kit.seq(AGENT))
    seq = kit.seq("SYSTEM..answer.1user")
    plan = plan_of(index, seq)
    # 16-20: the match ends where what was cached ends.
    assert shown(plan) == "0-8 e, 8-16 a1 from 16, 16-20 c"
    assert plan.segments["delta"].tolist() == [0, -8, 0]
    assert (plan.num_exact, plan.num_approximate, plan.num_compute) == (8, 8, 4)
    assert plan.blocks.tolist() == [0, 1]
    assert plan.source_blocks.tolist() == [4, 5]
    assert plan.num_new_blocks == 3
    assert plan.gaps.tolist() == [[16, 20]]
    assert plan.candidates_dropped == 0
    assert planned(index, seq, EXACT_ONLY) == "0-8 e, 8-20 c"


def test_plan_from_one_path_uses_nothing_else(kit: Kit, index: Any) -> None:
    first, second = kit.seq("first head..abcdefghijkl"), kit.seq("2nd.abcdefghijkl")
    cache(index, first)
    cache(index, second, 8)
    prompt = kit.seq("first head..new!abcdefghijkl?")
    assert plan_of(index, prompt).source_blocks.tolist() == [3, 4, 5]
    from_second = plan_of(index, prompt, path=second)
    assert shown(from_second) == "0-16 c, 16-28 a1 from 4, 28-29 c"
    assert from_second.source_blocks.tolist() == [9, 10, 11]
    # Only as far as the path goes, in whole blocks.
    assert planned(index, prompt, path=kit.seq("first head..abcd")) == "0-12 e, 12-29 c"
    nothing = plan_of(index, prompt, path=kit.seq("never cached"))
    assert (nothing.num_compute, nothing.blocks.tolist()) == (29, [])


def test_plan_from_one_path_takes_the_lower_position_of_two_at_one_distance(
    kit: Kit, index: Any
) -> None:
    text = kit.seq("abcdefgh", "ijklmnop", "abcdefgh")
    put(index, text, [4, 5, 2, 3, 0, 1])
    prompt = kit.seq("12345678", "abcdefgh", ".")
    assert rows(plan_of(index, prompt))[1] == "8-16 a1 from 16"
    assert rows(plan_of(index, prompt, path=text))[1] == "8-16 a1 from 0"


def test_plan_from_the_path_of_the_prompt_itself(kit: Kit, index: Any) -> None:
    seq = kit.seq(AGENT)
    cache(index, seq)
    assert rows(plan_of(index, seq, path=seq)) == rows(plan_of(index, seq))


def test_plan_from_a_path_of_another_namespace_is_refused(kit: Kit, index: Any) -> None:
    with pytest.raises(ValueError, match="path is of another namespace than the prompt"):
        index.plan(kit.seq("abcd"), path=kit.seq("abcd", ns=OTHER))


def test_plan_run_at_any_alignment(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("abcdefghijklmnopqrst"))
    for skip in range(8):
        run = "abcdefghijklmnopqrst"[skip : skip + 9]
        for lead in range(5):
            found = rows(plan_of(index, kit.seq("!" * lead, run, "?"), keep_last=0))
            moved = f"{lead}-{lead + 9} a1" + (f" from {skip}" if skip != lead else "")
            want = [moved, f"{lead + 9}-{lead + 10} c"]
            if lead:
                want = [f"0-{lead} c", *want]
            elif skip == 0:
                # Nothing comes before: the first two blocks in place, and a token of the third.
                want = ["0-8 e", "8-9 e", "9-10 c"]
            assert found == want


def test_plan_run_of_min_run_and_not_shorter(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("abcdefghijkl"))
    assert planned(index, kit.seq("!cdefghij?")) == "0-1 c, 1-9 a1 from 2, 9-10 c"
    assert planned(index, kit.seq("!cdefghi?")) == "0-9 c"
    longer = policy_of(min_run=9)
    assert planned(index, kit.seq("!cdefghij?"), longer) == "0-10 c"
    assert rows(plan_of(index, kit.seq("!cdefghijk?"), longer))[1] == "1-10 a1 from 2"


def test_plan_policy_below_min_run_of_the_index_is_refused(kit: Kit) -> None:
    index = make(kit, min_run=12)
    for policy in (policy_of(min_run=11), policy_of(approximate=False, min_run=8)):
        with pytest.raises(ValueError, match=r"11.*12|8.*12"):
            index.plan(kit.seq("abc"), policy)
    assert stats(index, "clock", "live_plans") == (0, 0)
    plan_of(index, kit.seq("abc"), policy_of(min_run=12))


def test_plan_same_length_substitution_has_delta_0(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("at 12:00 you are a helper"))
    plan = plan_of(index, kit.seq("at 12:45 you are a helper, "))
    # Block 1 is "2:00": its two first tokens are exact. Whole blocks are cached: 24 tokens.
    assert shown(plan) == "0-4 e, 4-6 e, 6-8 c, 8-24 a1, 24-27 c"
    assert plan.segments["delta"].tolist() == [0, 0, 0, 0, 0]
    assert plan.source_blocks.tolist() == [1, 2, 3, 4, 5]


def test_plan_any_order(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("qqqqdocument.onedocument.twodocument.six"))
    plan = plan_of(index, kit.seq("document.sixdocument.onedocument.two?"))
    assert shown(plan) == "0-12 a1 from 28, 12-36 a1 from 4, 36-37 c"


def test_plan_match_may_begin_before_the_uncovered_part(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("abcdefgh"))
    cache(index, kit.seq("wxyzefghijklmnop"), 10)
    # "efghijklmnop" is a match of twelve, of which four are in place already.
    plan = plan_of(index, kit.seq("abcdefghijklmnop?"))
    assert shown(plan) == "0-8 e, 8-16 a1, 16-17 c"
    assert plan.source_blocks.tolist() == [12, 13]


def test_plan_computes_what_is_left_of_a_match_if_it_is_shorter_than_min_run(
    kit: Kit, index: Any
) -> None:
    cache(index, kit.seq("abcdefgh"))
    cache(index, kit.seq("wxyzefghijklmnop"), 10)
    assert planned(index, kit.seq("abcdefghijklmno?")) == "0-8 e, 8-16 c"
    cache(index, kit.seq("....1234567890ab"), 20)
    cache(index, kit.seq("::::890abcdefghi"), 30)
    # Six tokens are left of the second.
    assert planned(index, kit.seq("-1234567890abcdefgh-")) == "0-1 c, 1-13 a1 from 4, 13-20 c"


def test_plan_reaches_furthest_not_longest(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("....abcdefghijkl"))
    cache(index, kit.seq("::::efghijklmnopqrst"), 10)
    # From a: only the first. From m on: the second, of which eight tokens are left.
    plan = plan_of(index, kit.seq("-abcdefghijklmnopqrst-"))
    assert shown(plan) == "0-1 c, 1-13 a1 from 4, 13-21 a1 from 12, 21-22 c"


def test_plan_prefers_a_source_in_order_to_a_repeat_that_reaches_further(
    kit: Kit, index: Any
) -> None:
    cache(index, kit.seq("abcd1234ijklmnop...."))
    cache(index, kit.seq("::::ijklmnopqrst"), 10)
    plan = plan_of(index, kit.seq("abcdijklmnopqrst?"))
    assert shown(plan) == "0-4 e, 4-12 a1 from 8, 12-17 c"
    assert plan.source_blocks.tolist() == [2, 3]
    # Nothing is in place, and no piece comes before: both are in order.
    assert rows(plan_of(index, kit.seq("?ijklmnopqrst?")))[1] == "1-13 a1 from 4"
    # The previous piece ends after it in its text.
    prompt = kit.seq("abcdmnop....!ijklmnopqrst?")
    assert rows(plan_of(index, prompt))[1:4] == ["4-12 a1 from 12", "12-13 c", "13-25 a1 from 4"]


def moved_runs(plan: Any) -> list[tuple[Any, ...]]:
    return [
        (run.start, run.end, run.delta, run.cuts, run.lost_context, run.new_context)
        for run in plan.moved_runs
    ]


def test_plan_says_how_the_context_of_a_moved_run_differs(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("abcdefghijklmnopqrstuvwxyz012345"))
    plan = plan_of(index, kit.seq("abcdefgh", "qrstuvwx", "ijklmnop", "yz012345", "?"))
    assert moved_runs(plan) == [
        (8, 16, -8, 1, 0.5, 0.0),
        (16, 24, 8, 1, 0.0, 0.5),
        (24, 32, 0, 3, 0.0, 0.0),
    ]
    assert [run.distance for run in plan.moved_runs] == [8, 8, 0]
    assert [run.old_start for run in plan.moved_runs] == [16, 8, 24]
    plan = plan_of(index, kit.seq("????", "qrstuvwx", "?"))
    assert moved_runs(plan) == [(4, 12, -12, 0, 1.0, 1.0)]


def test_plan_computes_a_run_beyond_the_limits_of_its_context(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("abcdefghijklmnopqrstuvwxyz012345"))
    prompt = kit.seq("abcdefgh", "qrstuvwx", "ijklmnop", "yz012345", "?")
    first, second, third = "8-16 a1 from 16", "16-24 a1 from 8", "24-32 a1"
    for policy, found in (
        (ReusePolicy(max_cuts=1), ["0-8 e", first, second, "24-33 c"]),
        (ReusePolicy(max_cuts=0), ["0-8 e", "8-33 c"]),
        # Without the first run the others have fewer cuts, and more lost context.
        (ReusePolicy(max_lost_context=0.4), ["0-8 e", "8-16 c", second, third, "32-33 c"]),
        (ReusePolicy(max_lost_context=0.3), ["0-8 e", "8-16 c", second, "24-33 c"]),
        (ReusePolicy(max_new_context=0.4), ["0-8 e", first, "16-24 c", third, "32-33 c"]),
    ):
        plan = plan_of(index, prompt, policy.replace(scope="namespace"))
        assert rows(plan) == found, policy
        starts = [run.start for run in plan.moved_runs]
        assert starts == [int(row.split("-")[0]) for row in found if "a1" in row]


def test_plan_prefers_the_match_that_reaches_further(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("....abcdefgh...."))
    cache(index, kit.seq("::::abcdefghij::"), 10)
    assert planned(index, kit.seq("-abcdefghijk")) == "0-1 c, 1-11 a1 from 4, 11-12 c"


def test_plan_pieces_of_one_delta_stay_apart(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("....abcdefghij..____"))
    cache(index, kit.seq("::::::::cdefghijklmnopqr"), 10)
    prompt = kit.seq("!!!!!!abcdefghijklmnopqr!")
    # abcdefghij moves by +2, cdefghijklmnopqr by 0.
    assert planned(index, prompt) == "0-6 c, 6-16 a1 from 4, 16-24 a1, 24-25 c"
    other = make(kit)
    cache(other, kit.seq("......abcdefghij...."))
    cache(other, kit.seq("::::::::cdefghijklmnopqr"), 10)
    # Both with delta 0: still two pieces.
    assert planned(other, prompt) == "0-6 c, 6-16 a1, 16-24 a1, 24-25 c"


def test_plan_path_goes_on_into_the_child_that_fits(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("____abcdefgh1111"))
    cache(index, kit.seq("____abcdefgh2222"), 10)
    cache(index, kit.seq("____abcdefgh2233"), 20)
    plan = plan_of(index, kit.seq("-abcdefgh2233-"))
    assert rows(plan)[1] == "1-13 a1 from 4"
    assert plan.source_blocks.tolist() == [1, 2, 20 + 3]
    # Both continue equally far: the lower slots win.
    plan = plan_of(index, kit.seq("-abcdefgh22--"))
    assert rows(plan)[1] == "1-11 a1 from 4"
    assert plan.source_blocks.tolist() == [1, 2, 10 + 3]


def test_plan_holes_break_matches(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("____abcdefghijklmnop"))
    index.discard([2])
    # abcd and ijklmnop are left, the first too short.
    assert planned(index, kit.seq("-abcdefghijklmnop-")) == "0-9 c, 9-17 a1 from 12, 17-18 c"


def test_plan_keep_last_is_not_sought(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("____abcdefghijkl"))
    seq = kit.seq("-abcdefghijkl")
    assert planned(index, seq, keep_last=0) == "0-1 c, 1-13 a1 from 4"
    assert planned(index, seq) == "0-1 c, 1-12 a1 from 4, 12-13 c"
    assert planned(index, seq, keep_last=5) == "0-13 c"
    assert planned(index, seq, keep_last=99) == "0-13 c"


def test_plan_sources_on_the_path_of_the_prompt_itself(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("abcdefgh"))
    plan = index.plan(kit.seq("abcdefghabcdefgh?"), ANY)
    # What is in place is copied from as well.
    assert shown(plan) == "0-8 e, 8-16 a1 from 0, 16-17 c"
    assert plan.blocks.tolist() == [0, 1]
    assert plan.source_blocks.tolist() == [0, 1]
    assert stats(index, "pinned") == (2,)
    plan.release_sources()
    assert stats(index, "pinned") == (2,)
    plan.release()


def test_plan_repetitive_prompt(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("a" * 12))
    # In place 12; from there on the match that reaches furthest ends with a slot of the path: its
    # source is all twelve, and the next piece starts again.
    assert planned(index, kit.seq("a" * 33)) == "0-12 e, 12-24 a1 from 0, 24-32 a1 from 4, 32-33 c"
    assert planned(index, kit.seq("a" * 32)) == "0-12 e, 12-24 a1 from 0, 24-32 c"


def test_plan_namespaces_are_walls(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("____abcdefghijkl", ns=OTHER))
    assert planned(index, kit.seq("-abcdefghijkl-")) == "0-14 c"
    assert len(plan_of(index, kit.seq("-abcdefghijkl-", ns=OTHER)).segments) == 3


def test_plan_items_are_compared(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("____abcdefghijkl", items=(Item(6, 10, b"cat"),)))
    # The image is at 2..6 of the run, and moves with it.
    cat = kit.seq("-abcdefghijkl-", items=(Item(3, 7, b"cat"),))
    assert rows(plan_of(index, cat))[1] == "1-13 a1 from 4"
    for wrong in (
        kit.seq("-abcdefghijkl-"),
        kit.seq("-abcdefghijkl-", items=(Item(3, 7, b"dog"),)),
        kit.seq("-abcdefghijkl-", items=(Item(4, 7, b"cat"),)),
    ):
        assert planned(index, wrong) == "0-14 c"


def test_plan_needs_positions_of_items_if_the_index_does(kit: Kit) -> None:
    index = kit.index(32, 2, item_positions=True)
    nameless = kit.seq("__abcd", items=(Item(2, 4, b"cat"),))
    before = index.digest()
    with pytest.raises(ValueError, match="does not say how many positions"):
        put(index, nameless, [0, 1, 2])
    with pytest.raises(ValueError, match="does not say how many positions"):
        index.plan(nameless)
    assert index.digest() == before
    put(index, kit.seq("__abcd", items=(Item(2, 4, b"cat", positions=1),)), [0, 1, 2])
    put(index, kit.seq("__abcdef"), [0, 4, 5, 6])
    assert index.stats().indexed == 6


def test_plan_without_moved_runs(kit: Kit) -> None:
    index = make(kit, moved_runs=False)
    seq = kit.seq("abcdefghijklmnop")
    cache(index, seq, source=imported(exact_until=8))
    # In place through approximate blocks needs no search.
    assert rows(plan_of(index, kit.seq("abcdefghijklmnop?")))[:2] == ["0-8 e", "8-16 a1"]
    assert planned(index, kit.seq("?cdefghijklmnop?")) == "0-16 c"


# --- ties -----------------------------------------------------------------------------------------


def test_plan_ties_fewer_hops(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("-abcdefgh___"), source=imported(exact_until=0, hops=2))
    cache(index, kit.seq("::::::::::::abcdefgh"), 10, source=imported(exact_until=0, hops=1))
    # Block 10 is lower and nearer; what decides first is the hops.
    plan = plan_of(index, kit.seq("!abcdefgh!"), policy_of(max_hops=5))
    assert rows(plan)[1] == "1-9 a2 from 12"


def test_plan_ties_hops_of_the_part_that_is_left(kit: Kit, index: Any) -> None:
    policy = policy_of(max_hops=9)
    # Slots 0..12 of a path: four with 5 hops, eight with none; the other: twelve with 3.
    first = kit.seq("1111abcdefghijkl")
    put(index, first, [0, 1, 2, 3], source=imported(exact_until=0, hops=0))
    put(index, kit.seq("1111"), [0], source=imported(exact_until=0, hops=0))
    index.discard([1])
    put(index, kit.seq("1111abcd"), [0, 5], source=imported(exact_until=0, hops=5))
    cache(index, kit.seq("2222abcdefghijkl"), 10, source=imported(exact_until=0, hops=3))
    # All of it is uncovered: at most 4 against at most 6 hops.
    assert rows(plan_of(index, kit.seq("!abcdefghijkl!"), policy))[1] == "1-13 a4 from 4"
    # The first four are in place: of the part that is left the first has 1.
    cache(index, kit.seq("abcd"), 20)
    assert planned(index, kit.seq("abcdefghijkl!"), policy) == "0-4 e, 4-12 a1 from 8, 12-13 c"


def test_plan_ties_smaller_delta(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("1111abcdefgh"))
    cache(index, kit.seq("22222222abcdefgh"), 10)
    cache(index, kit.seq("3333333333333333abcdefgh"), 20)
    for lead, old in ((5, 4), (7, 8), (11, 8), (13, 16), (30, 16)):
        assert plan_of(index, kit.seq("!" * lead, "abcdefgh!")).segments["old_start"][1] == old
    # As far to both sides: the lower slot.
    plan = plan_of(index, kit.seq("!" * 6, "abcdefgh!"))
    assert plan.source_blocks.tolist() == [1, 2]


def test_plan_ties_lowest_slot_one_by_one(kit: Kit, index: Any) -> None:
    put(index, kit.seq("1111abcdefghijkl"), [30, 5, 9, 20])
    put(index, kit.seq("2222abcdefghijkl"), [31, 6, 2, 21])
    put(index, kit.seq("3333abcdefghijkl"), [32, 5 + 2, 1, 22])
    seq = kit.seq("!!!!abcdefghijkl!")
    assert plan_of(index, seq).source_blocks.tolist() == [5, 9, 20]
    index.discard([5])
    assert plan_of(index, seq).source_blocks.tolist() == [2, 6, 21]
    # Where a match is needed from its second block on, the second block decides.
    put(index, kit.seq("abcd"), [40])
    put(index, kit.seq("1111abcd"), [30, 5])
    assert plan_of(index, kit.seq("abcdefghijkl!")).source_blocks.tolist() == [1, 22]


# --- exactness ------------------------------------------------------------------------------------


def test_plan_exact_blocks_after_a_hole(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("abcdefghijklmnop"))
    index.discard([1])
    seq = kit.seq("abcdefghijklmnop?")
    want = ["0-4 e", "4-8 c", "8-16 e", "16-17 c"]
    for policy in (ANY, EXACT_ONLY):
        plan = plan_of(index, seq, policy)
        assert rows(plan) == want
        assert plan.blocks.tolist() == [0]
        assert plan.source_blocks.tolist() == [2, 3]
        assert (plan.num_exact, plan.num_approximate, plan.num_compute) == (12, 0, 5)
    for policy in (WHOLE, policy_of(approximate=False, min_run=9)):
        assert planned(index, seq, policy) == "0-4 e, 4-17 c"
    assert rows(plan_of(index, seq, policy_of(partial_blocks=False))) == want


def test_plan_exact_part_of_a_block_after_a_hole(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("abcdefghijklmnop"))
    index.discard([1])
    # ijklmn is a match of six only.
    assert planned(index, kit.seq("abcdefghijklmn??"), EXACT_ONLY) == "0-4 e, 4-16 c"
    cache(index, kit.seq("abcdefghijklmnopqrst"))
    index.discard([1])
    plan = plan_of(index, kit.seq("abcdefghijklmnopqr??"), EXACT_ONLY)
    assert rows(plan)[2:] == ["8-18 e", "18-20 c"]


@pytest.mark.parametrize("moved_runs", [True, False])
@pytest.mark.parametrize("policy", [ANY, EXACT_ONLY], ids=["any", "exact"])
def test_plan_exact_part_of_a_sibling_after_a_hole(
    kit: Kit, policy: ReusePolicy, moved_runs: bool
) -> None:
    index = kit.index(16, 16, min_run=8, moved_runs=moved_runs)
    own = "first block.....SYSTEM..thought1answer.1........"
    put(index, kit.seq(own), [0, 1, 2])
    put(index, kit.seq(own[:26], "______"), [0, 3])
    index.discard([0, 1])
    # Block 3 is a sibling of the absent block 1 and shares ten of its tokens; block 2 is there.
    assert planned(index, kit.seq(own, "?"), policy) == "0-16 c, 16-26 e, 26-32 c, 32-48 e, 48-49 c"


def test_plan_exact_blocks_after_an_approximate_one(kit: Kit, index: Any) -> None:
    seq = kit.seq("abcdefghijklmnop")
    cache(index, seq)
    index.discard([1])
    put(index, kit.seq("abcdefgh"), [0, 9], source=imported(exact_until=4, hops=1))
    assert hit(index, seq) == (4, [0])
    longer = kit.seq("abcdefghijklmnop?")
    plan = plan_of(index, longer)
    assert shown(plan) == "0-4 e, 4-8 a1, 8-16 e, 16-17 c"
    assert plan.blocks.tolist() == [0, 9, 2, 3]
    assert (plan.num_exact, plan.num_approximate) == (12, 4)
    exact = plan_of(index, longer, EXACT_ONLY)
    assert rows(exact)[1:3] == ["4-8 c", "8-16 e"]
    assert exact.blocks.tolist() == [0]


def test_plan_in_place_within_max_hops(kit: Kit, index: Any) -> None:
    seq = kit.seq("abcdefghijklmnop")
    cache(index, seq, source=imported(exact_until=4, hops=1))
    index.discard([2])
    put(index, seq, [0, 1, 8, 3], source=imported(exact_until=4, hops=2))
    longer = kit.seq("abcdefghijklmnop?")
    assert (
        planned(index, longer, policy_of(max_hops=2)) == "0-4 e, 4-8 a1, 8-12 a2, 12-16 a1, 16-17 c"
    )
    # Block 8 has too many hops: after it is a run of four, too short to be copied.
    assert planned(index, longer) == "0-4 e, 4-8 a1, 8-17 c"
    assert planned(index, longer, policy_of(max_hops=0)) == "0-4 e, 4-17 c"


def test_plan_copies_under_the_same_prefix_add_no_hop(kit: Kit, index: Any) -> None:
    seq = kit.seq("abcdefghijklmnopqrst")
    cache(index, seq, source=imported(exact_until=4, hops=1))
    index.discard([1])
    # After the hole: approximate under the same prefix, one hop as it was. Elsewhere: one more.
    assert planned(index, kit.seq("abcdefghijklmnopqrst?")) == "0-4 e, 4-8 c, 8-20 a1, 20-21 c"
    assert planned(index, kit.seq("?ijklmnopqrst?")) == "0-14 c"
    moved = plan_of(index, kit.seq("?ijklmnopqrst?"), policy_of(max_hops=2))
    assert rows(moved)[1] == "1-13 a2 from 8"


def test_plan_moved_run_needs_first_hand_kv_under_max_hops_1(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("____abcdefghijkl"), source=imported(exact_until=0, hops=0))
    seq = kit.seq("-abcdefghijkl-")
    # Computed after approximate KV: approximate, of no hops.
    assert rows(plan_of(index, seq))[1] == "1-13 a1 from 4"
    assert len(plan_of(index, seq, policy_of(max_hops=0)).segments) == 1
    second = make(kit)
    cache(second, kit.seq("____abcdefghijkl"), source=imported(exact_until=0, hops=1))
    assert len(plan_of(second, seq).segments) == 1
    assert rows(plan_of(second, seq, policy_of(max_hops=2)))[1] == "1-13 a2 from 4"


def test_plan_slots_of_too_many_hops_break_runs(kit: Kit, index: Any) -> None:
    seq = kit.seq("____abcdefghijklmnop")
    cache(index, seq, source=imported(exact_until=0, hops=0))
    index.discard([2])
    put(index, seq, [0, 1, 9, 3, 4], source=imported(exact_until=0, hops=1))
    assert planned(index, kit.seq("-abcdefghijklmnop-")) == "0-9 c, 9-17 a1 from 12, 17-18 c"
    assert (
        planned(index, kit.seq("-abcdefghijklmnop-"), policy_of(max_hops=2))
        == "0-1 c, 1-5 a1 from 4, 5-9 a2 from 8, 9-17 a1 from 12, 17-18 c"
    )


def test_plan_exact_copy_of_a_sibling_comes_after_what_is_in_place(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("abcdefgh"), source=imported(exact_until=4))
    # An exact sibling that shares three tokens: what is in place wins, the sibling is a source.
    cache(index, kit.seq("abcdefg_"), 10)
    assert planned(index, kit.seq("abcdefgh??")) == "0-4 e, 4-8 a1, 8-10 c"
    exact = plan_of(index, kit.seq("abcdefgh??"), EXACT_ONLY)
    assert shown(exact) == "0-4 e, 4-7 e, 7-10 c"
    assert exact.source_blocks.tolist() == [11]


def test_plan_exact_copy_after_approximate_blocks(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("abcdefghijkl"))
    index.discard([1])
    put(index, kit.seq("abcdefgh"), [0, 9], source=imported(exact_until=4))
    # Block 2 is after an approximate block, and is exact: so is the copy of a part of it.
    assert planned(index, kit.seq("abcdefghij?")) == "0-4 e, 4-8 a1, 8-10 e, 10-11 c"


def test_plan_match_may_cover_what_partial_blocks_leaves(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("abcdefghij__"))
    cache(index, kit.seq("qrstefghij--"), 10)
    policy = policy_of(partial_blocks=False)
    # "abcdefghij" is a match of ten with the path itself, exact; "ij" of it is left.
    assert planned(index, kit.seq("abcdefghij??"), policy) == "0-8 e, 8-10 e, 10-12 c"
    assert planned(index, kit.seq("abcdef??"), policy) == "0-4 e, 4-8 c"


# --- policies -------------------------------------------------------------------------------------


def test_plan_forbidden_kinds_break_moved_runs_by_token(kit: Kit, index: Any) -> None:
    seq = kit.seq("____abcdefghijklmnopqrst")
    cache(index, seq)
    index.tag(seq, [Span(13, 14, "reasoning"), Span(4, 8, "user")])
    policy = policy_of(forbid_kinds=("reasoning", "never seen"))
    plan = plan_of(index, kit.seq("-abcdefghijklmnopqrst-"), policy)
    # The source tokens 4..13 and 14..24 are left.
    assert shown(plan) == "0-1 c, 1-10 a1 from 4, 10-11 c, 11-21 a1 from 14, 21-22 c"
    kinds = {name: 1 << bit for bit, name in enumerate(index.kinds)}
    assert plan.segments["kinds"].tolist() == [0, kinds["user"], 0, 0, 0]
    both = policy_of(forbid_kinds=("reasoning", "user"))
    assert rows(plan_of(index, kit.seq("-abcdefghijklmnopqrst-"), both))[0] == "0-11 c"


def test_plan_forbidden_kinds_end_what_is_in_place_by_block(kit: Kit, index: Any) -> None:
    seq = kit.seq("abcdefghijkl")
    cache(index, seq, source=imported(exact_until=4))
    index.tag(seq, [Span(0, 1, "reasoning"), Span(10, 11, "reasoning")])
    policy = policy_of(forbid_kinds=("reasoning",))
    # The exact block is used whatever its kinds are; of the last block no token.
    assert planned(index, kit.seq("abcdefghijkl?"), policy) == "0-4 e, 4-8 a1, 8-10 a1, 10-13 c"


def test_plan_after_a_forbidden_token_a_block_keeps_its_own_prefix(kit: Kit) -> None:
    policy = policy_of(forbid_kinds=("reasoning",), max_hops=1)
    system, shared = "SYSTEM prompt...", "abcdefghijklmn"
    for hops, found in ((0, "a"), (1, "a1"), (2, None)):
        index = kit.index(64, 16, min_run=8, max_candidates=4096)
        seq = kit.seq(system, shared, "YZ")
        cache(index, seq, source=imported(exact_until=16, hops=hops))
        index.tag(seq, [Span(18, 20, "reasoning")])
        # The prompt leaves the block after "n"; "cd" may not be used.
        plan = plan_of(index, kit.seq(system, shared, "!?"), policy)
        own = [f"16-18 {found}", "18-20 c", f"20-30 {found}", "30-32 c"]
        assert rows(plan) == ["0-16 e", *(own if found else ["16-32 c"])]


def test_plan_tokens_of_the_own_prefix_come_from_several_blocks(kit: Kit) -> None:
    policy = policy_of(forbid_kinds=("reasoning",))
    system = "SYSTEM prompt..."
    index = kit.index(64, 32, min_run=8, max_candidates=4096)
    spans = {"X": (16, 18), "Y": (28, 30), "Z": (17, 19)}
    for first, (end, (start, stop)) in enumerate(spans.items()):
        seq = kit.seq(system, "abcdefghijklmno", end)
        index.insert(seq, [first], num_computed=32, source=imported(exact_until=0, hops=0))
        index.tag(seq, [Span(start, stop, "reasoning")])
    # From its first token on, the block of "Y" reaches furthest; that of "X" goes on where it ends.
    plan = plan_of(index, kit.seq(system, "abcdefghijklmno", "!"), policy)
    assert rows(plan) == ["0-28 a", "28-31 a", "31-32 c"]
    assert plan.source_blocks.tolist() == [0, 1]


def test_plan_forbidden_kinds_never_limit_exact_copies(kit: Kit, index: Any) -> None:
    seq = kit.seq("abcdefghijklmnop")
    cache(index, seq)
    index.tag(seq, [Span(0, 16, "reasoning")])
    index.discard([1])
    policy = policy_of(forbid_kinds=("reasoning",), max_hops=0)
    assert rows(plan_of(index, kit.seq("abcdefghijklmnop?"), policy))[2] == "8-16 e"


def test_plan_recompute_first_and_last(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("____abcdefghijkl"))
    seq = kit.seq("-abcdefghijkl-")
    plan = plan_of(index, seq, policy_of(recompute_first=5, recompute_last=2))
    assert shown(plan) == "0-6 c, 6-11 a1 from 9, 11-14 c"
    # Block 1 of the source is not read any more.
    assert plan.source_blocks.tolist() == [2, 3]
    assert plan.num_approximate == 5
    gone = plan_of(index, seq, policy_of(recompute_first=6, recompute_last=6))
    assert shown(gone) == "0-14 c"
    assert gone.source_blocks.tolist() == []
    assert planned(index, seq, policy_of(recompute_first=99)) == "0-14 c"


def test_plan_recompute_is_per_piece(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("....abcdefghijkl"))
    cache(index, kit.seq("::::efghijklmnopqrst"), 10)
    plan = plan_of(index, kit.seq("-abcdefghijklmnopqrst-"), policy_of(recompute_first=1))
    # Tokens that are computed anyway are not offered to the other match.
    assert shown(plan) == "0-2 c, 2-13 a1 from 5, 13-14 c, 14-21 a1 from 13, 21-22 c"


def test_plan_recompute_leaves_exact_and_in_place_alone(kit: Kit, index: Any) -> None:
    seq = kit.seq("abcdefghijklmnop")
    cache(index, seq)
    index.discard([1])
    policy = policy_of(recompute_first=3, recompute_last=3)
    assert rows(plan_of(index, kit.seq("abcdefghijklmnop?"), policy))[2] == "8-16 e"
    other = make(kit)
    cache(other, seq, source=imported(exact_until=4))
    assert rows(plan_of(other, kit.seq("abcdefghijklmnop?"), policy))[1] == "4-16 a1"


def test_plan_recompute_counts_the_approximate_tokens_of_a_piece(kit: Kit, index: Any) -> None:
    # After a hole: four exact tokens, four approximate ones, four exact, four approximate.
    seq = kit.seq("abcdefghijklmnopqrstuvwx")
    cache(index, seq)
    index.discard([1, 3, 5])
    put(index, kit.seq("abcdefgh"), [0, 9])
    done = put(index, seq, [0, 9, 2, 13, 4, 15], source=imported(exact_until=12, hops=1))
    assert done.blocks.tolist() == [0, 9, 2, 13, 4, 15]
    index.discard([9])
    longer = kit.seq("abcdefghijklmnopqrstuvwx?")
    assert rows(plan_of(index, longer))[2:6] == ["8-12 e", "12-16 a1", "16-20 e", "20-24 a1"]
    policy = policy_of(recompute_first=5, recompute_last=1)
    want = "0-4 e, 4-8 c, 8-12 e, 12-16 c, 16-20 e, 20-21 c, 21-23 a1, 23-25 c"
    assert planned(index, longer, policy) == want


@pytest.mark.parametrize(("share", "kept"), [(1.0, True), (0.5, True), (0.49, False), (0, False)])
def test_plan_beyond_the_approximate_share_is_exact_only(
    kit: Kit, index: Any, share: float, kept: bool
) -> None:
    cache(index, kit.seq("SYSTEM..thought1answer.1"))
    # Ten of twenty tokens; in the block after the prefix two exact ones.
    seq = kit.seq("SYSTEM..thght1answer")
    plan = index.plan(seq, policy_of(max_approximate_share=share), keep_last=0)
    approximate = ["10-20 a1 from 12"] if kept else ["10-20 c"]
    assert rows(plan) == ["0-8 e", "8-10 e", *approximate]
    pinned = 2 + 1 + (3 if kept else 0)
    assert stats(index, "pinned") == (pinned,)
    plan.release()


def test_plan_share_counts_what_is_in_place(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("abcdefgh"), source=imported(exact_until=4))
    seq = kit.seq("abcdefghij")
    assert len(plan_of(index, seq, policy_of(max_approximate_share=0.4)).blocks) == 2
    assert len(plan_of(index, seq, policy_of(max_approximate_share=0.39)).blocks) == 1


def test_plan_exact_only_ignores_the_rest_of_a_policy(kit: Kit, index: Any) -> None:
    seq = kit.seq("abcdefghijkl")
    cache(index, seq)
    index.tag(seq, [Span(0, 12, "user")])
    policy = policy_of(
        approximate=False,
        max_hops=0,
        max_approximate_share=0.0,
        recompute_first=9,
        recompute_last=9,
        forbid_kinds=("user",),
    )
    assert rows(plan_of(index, kit.seq("abcdefghij?"), policy)) == rows(
        plan_of(index, kit.seq("abcdefghij?"), EXACT_ONLY)
    )


# --- pins, last uses, validity --------------------------------------------------------------------


def test_plan_pins_exactly_its_sources(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("SYSTEM..thought1answer.1"))
    plan = index.plan(kit.seq("SYSTEM..answer.1user"), ANY)
    # 0 and 1 in place, 4 and 5 as sources; the blocks between are above them.
    assert stats(index, "pinned", "evictable") == (4, 0)
    plan.release_sources()
    assert stats(index, "pinned", "evictable") == (2, 4)
    plan.release()
    assert stats(index, "pinned", "evictable") == (0, 6)


def test_plan_touches_sources_by_themselves(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("____abcdefgh"))
    cache(index, kit.seq("::::::::"), 10)
    cache(index, kit.seq("++++"), 20)
    plan_of(index, kit.seq("-abcdefgh-"))
    assert stats(index, "clock") == (4,)
    # Last uses: 11 and 10 at 2, 20 at 3, 2 and 1 at 4; block 0 at 1, which is above 1 and 2.
    assert index.evict(9).tolist() == [11, 10, 20, 2, 1, 0]


def test_plan_validates_by_segment(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("....document.one...."))
    cache(index, kit.seq("::::document.two_or_more"), 10)
    seq = kit.seq("....document.two_or_moredocument.one?")
    pinned, loose = index.plan(seq, ANY), index.plan(seq, ANY, pin=False)
    # "document." is in place in part: 0 and 1 and 2 whole, one token of 3.
    assert shown(pinned) == "0-12 e, 12-13 e, 13-24 a1, 24-36 a1 from 4, 36-37 c"
    assert pinned.source_blocks.tolist() == [1, 2, 3, 13, 14, 15]
    index.discard([13])
    assert pinned.validate().tolist() == [True] * 5
    assert loose.validate().tolist() == [True, True, False, True, True]
    index.discard([3])
    assert loose.validate().tolist() == [True, False, False, False, True]
    pinned.release_sources()
    assert pinned.validate().tolist() == [True, False, False, False, True]
    pinned.release()
    loose.release()
    assert sorted(index.take_freed().tolist()) == [3, 13]


# --- moves ----------------------------------------------------------------------------------------


def test_moves_end_at_block_edges_of_both_sides(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("____abcdefghijkl"))
    plan = plan_of(index, kit.seq("-abcdefghijkl-"))
    # Destination 1..13 of blocks 40.., source slots 4..16: edges at 4, 8, 12 and at 5, 9.
    table = [40, 43, 41, 42]
    want = [
        (4, 161, 3, -3),
        (7, 172, 1, -3),
        (8, 173, 3, -3),
        (11, 164, 1, -3),
        (12, 165, 3, -3),
        (15, 168, 1, -3),
    ]
    assert plan.moves(table).tolist() == want
    assert plan.moves(table, 1, 13).tolist() == want
    assert plan.moves(table, 5, 6).tolist() == [(*want[2][:2], 1, -3)]
    assert plan.moves(table, 2, 8).tolist() == [(5, 162, 2, -3), *want[1:3]]
    assert plan.moves(table, 13).tolist() == []
    assert plan.moves([40], 0, 4).tolist() == want[:1]
    with pytest.raises(ValueError, match=r"."):
        plan.moves([40], 0, 5)


def test_moves_never_write_what_the_plan_reads(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("____abcdefghijkl"))
    plan = plan_of(index, kit.seq("-abcdefghijkl-"))
    for wrong in ([1, 40, 41, 42], [40, 41, 42, 3]):
        with pytest.raises(ValueError, match=r"."):
            plan.moves(wrong)
    # Block 0 is not read.
    assert len(plan.moves([0, 40, 41, 42])) == 6


# --- labels ---------------------------------------------------------------------------------------


def test_insert_with_a_plan_labels_after_its_first_approximate_token(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("SYSTEM..thought1answer.1"))
    seq = kit.seq("SYSTEM..answer.1user....")
    plan = index.plan(seq, ANY)
    done = index.insert(seq, [0, 1, 10, 11, 12, 13], num_computed=24, source=plan)
    assert result(done) == ([0, 1, 10, 11, 12, 13], 8, [], [], [])
    assert stats(index, "approximate") == (4,)
    assert hit(index, seq) == (8, [0, 1])
    plan.release()
    # 10 and 11 have one hop; 12 and 13 were computed after them: none.
    assert (
        planned(index, kit.seq("SYSTEM..answer.1user....?")) == "0-8 e, 8-16 a1, 16-24 a, 24-25 c"
    )
    # Blocks computed after them may be moved again; moved blocks, under max_hops=2 only.
    tail = ["1-9 a1 from 16", "9-10 c"]
    again = kit.seq("1user....?")
    assert rows(plan_of(index, again)) == ["0-1 c", *tail]
    assert rows(plan_of(index, again, policy_of(max_hops=2))) == ["0-1 a2 from 15", *tail]


def test_insert_label_begins_with_the_block_of_the_first_approximate_token(
    kit: Kit, index: Any
) -> None:
    cache(index, kit.seq("____abcdefghijkl"))
    # The first approximate token is 5: the block before it is exact, though the plan reaches on.
    seq = kit.seq("12345abcdefghijkl678")
    plan = index.plan(seq, ANY)
    assert rows(plan)[1] == "5-17 a1 from 4"
    done = index.insert(seq, [10, 11, 12, 13, 14], num_computed=20, source=plan)
    assert done.num_exact == 4
    plan.release()
    # Tokens 5..17 reach into 11..14; the hops of a block are the highest of its slots.
    found = rows(plan_of(index, kit.seq("12345abcdefghijkl678?")))
    assert found[:2] == ["0-4 e", "4-20 a1"]


def test_insert_label_lasts_for_the_life_of_the_plan(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("____abcdefghijkl"))
    prompt = "-abcdefghijkl---"
    plan = index.plan(kit.seq(prompt), ANY)
    longer = kit.seq(prompt, "answered")
    index.insert(longer, [10, 11, 12, 13, 14, 15], num_computed=24, source=plan)
    assert stats(index, "approximate") == (6,)
    # Beyond the plan: computed, so of no hops.
    plan.release()
    assert rows(plan_of(index, kit.seq(prompt, "answered", "?")))[:2] == ["0-16 a1", "16-24 a"]


def test_insert_exact_copies_are_exact(kit: Kit, index: Any) -> None:
    seq = kit.seq("abcdefghijklmnop")
    cache(index, seq)
    index.discard([1])
    plan = index.plan(kit.seq("abcdefghijklmnop?"), ANY)
    done = index.insert(
        kit.seq("abcdefghijklmnop?"), [0, 10, 11, 12, 13], num_computed=17, source=plan
    )
    # Exact blocks stay: the copies are duplicates.
    assert result(done) == ([0, 10, 2, 3], 16, [11, 12], [13], [])
    assert hit(index, seq) == (16, [0, 10, 2, 3])
    plan.release()


def test_insert_approximate_copy_never_replaces_exact(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("____abcdefghijkl"))
    seq = kit.seq("-abcdefghijkl---")
    plan = index.plan(seq, ANY)
    put(index, seq, [20, 21, 22, 23])
    done = index.insert(seq, [10, 11, 12, 13], num_computed=16, source=plan)
    assert result(done) == ([20, 21, 22, 23], 16, [10, 11, 12, 13], [], [])
    # Blocks computed after it under this plan were computed from approximate KV all the same.
    longer = kit.seq("-abcdefghijkl---more")
    done = index.insert(longer, [24], num_computed=20, start=16, source=plan)
    assert result(done) == ([24], 16, [], [], [])
    plan.release()
    assert hit(index, longer) == (16, [20, 21, 22, 23])


def test_insert_replaces_approximate_by_exact_and_condemns_sources(kit: Kit, index: Any) -> None:
    seq = kit.seq("____abcdefghijkl")
    cache(index, seq, source=imported(exact_until=0, hops=0))
    plan = index.plan(kit.seq("-abcdefghijkl-"), ANY)
    done = put(index, seq, [20, 21, 22, 23])
    # 0 is free; 1 to 3 are sources.
    assert result(done) == ([20, 21, 22, 23], 16, [], [], [0])
    assert stats(index, "condemned") == (3,)
    assert plan.validate().tolist() == [True, True, True]
    plan.release_sources()
    assert index.take_freed().tolist() == [1, 2, 3]
    plan.release()


def test_each_plan_takes_its_policy(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("SYSTEM..thought1answer.1"))
    seq = kit.seq("SYSTEM..answer.1user")
    made = [index.plan(seq, policy) for policy in (ANY, EXACT_ONLY, policy_of(min_run=8))]
    assert [plan.num_approximate for plan in made] == [8, 0, 8]
    assert [plan.num_new_blocks for plan in made] == [3, 3, 3]
    for plan in made:
        plan.release()
    with pytest.raises(ValueError, match="min_run"):
        make(kit, min_run=16).plan(seq, policy_of(min_run=8))


def test_plan_empty_and_short_prompts(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("____abcdefghijkl"))
    assert len(plan_of(index, kit.seq("")).segments) == 0
    assert planned(index, kit.seq("a")) == "0-1 c"
    empty = make(kit)
    assert planned(empty, kit.seq("abcdefghijkl")) == "0-12 c"
    share = policy_of(max_approximate_share=0.0)
    assert len(plan_of(index, kit.seq(""), share).segments) == 0


def test_plan_segments_are_plain_data(kit: Kit, index: Any) -> None:
    cache(index, kit.seq("SYSTEM..thought1answer.1"))
    plan = plan_of(index, kit.seq("SYSTEM..answer.1user"))
    names = plan.segments.dtype.names
    assert " ".join(names) == "start end old_start delta class hops kinds position_delta"
    assert plan.blocks.dtype == np.int32
    assert plan.source_blocks.dtype == np.int32
    assert plan.gaps.dtype == np.int64
    assert plan.segments.dtype["class"] == np.uint8
    names = plan.moves([*plan.blocks, 11, 12, 13, 14][:5]).dtype.names
    assert " ".join(names) == "source_slot dest_slot num_tokens delta"
