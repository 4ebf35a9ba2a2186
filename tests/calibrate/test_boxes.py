"""Kinds of edit: each plan is of one or of none, and of the same for an engine and the bench."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtrie
from kvtrie import gates
from kvtrie.calibrate.kinds import KINDS
from kvtrie.gates.boxes import Box, Range, Terms, find

PLANS = 100_000
BLOCK = 4
SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)

Path = tuple[int, ...]


def naive_kind(found: Terms) -> str | None:
    """The shipped kinds, in words of their own."""
    if not found.same_conversation:
        return "other conversation"
    if found.cuts > 1:
        if found.new_context > 0:
            return "replaced" if found.new_context <= 0.5 else "reordered"
        return "several cuts" if found.cuts <= 5 else "many cuts"
    if found.new_context > 0:
        return "one change"
    if found.lost_context > 0:
        return "one cut"
    return "in place" if (found.cuts, found.new_context, found.distance) == (0, 0, 0) else None


def naive_terms(prompt: list[int], came_from: list[Path | None], own: Path) -> Terms | None:
    """Terms by the definitions of P17, token by token.

    ``came_from`` has for each token of the prompt the tokens of its slot's path up to itself, or
    None if it is computed; ``own`` are the tokens of the conversation.
    """
    whole = tuple(prompt)
    moved = {at for at, path in enumerate(came_from) if path and path != whole[: at + 1]}
    is_own = True
    worst = Terms(hops=1)
    for at in sorted(moved):
        path = came_from[at]
        assert path is not None
        is_own = is_own and path == own[: len(path)]
        old = len(path) - 1
        before = came_from[at - 1] if at else None
        if at - 1 in moved and before is not None and path[:-1] == before:
            continue  # within a run
        kept = [
            (new, len(one) - 1)
            for new, one in enumerate(came_from[:at])
            if one is not None and len(one) <= old and path[: len(one)] == one
        ]
        steps = pairwise([*kept, (at, old)])
        worst = Terms(
            cuts=max(worst.cuts, sum(b != (a[0] + 1, a[1] + 1) for a, b in steps)),
            lost_context=max(worst.lost_context, 1 - len(kept) / old if old else 0.0),
            new_context=max(worst.new_context, 1 - len(kept) / at if at else 0.0),
            distance=max(worst.distance, abs(at - old)),
            hops=1,
        )
    return replace(worst, same_conversation=is_own) if moved else None


def edited(rng: Random, texts: list[list[int]]) -> list[int]:
    """Pieces of what is cached, and new tokens, in any order."""
    text = rng.choice(texts)
    prompt = text[: rng.choice((0, 4, 9, 16))]
    for _ in range(rng.randint(1, 4)):
        source = rng.choice(texts) if rng.random() < 0.3 else text
        start = rng.randrange(len(source))
        prompt += source[start : start + rng.choice((10, 16, 24, 40))]
        if rng.random() < 0.4:
            prompt += [rng.randrange(5000, 9000) for _ in range(rng.choice((1, 3, 8)))]
    return [*prompt, 9999]


def test_engine_and_bench_name_the_same_kind_for_every_plan() -> None:
    rng = Random(7)
    boxes, names = list(KINDS.values()), list(KINDS)
    seen: dict[str | None, int] = {}
    done = 0
    while done < PLANS:
        index = kvtrie.RadixIndex(num_blocks=128, block_size=BLOCK, min_run=8, seed=done)
        paths: dict[int, Path] = {}
        texts = [[rng.randrange(5000) for _ in range(60)] for _ in range(2)]
        texts.append(texts[0][:20] + [rng.randrange(5000) for _ in range(40)])
        for number, text in enumerate(texts):
            seq = kvtrie.TokenSequence(text, SPACE)
            ids = np.arange(number * 15, number * 15 + 15, dtype=np.int32)
            session = None if number else "own"
            took = index.insert(seq, ids, num_computed=60, source=kvtrie.COMPUTED, session=session)
            for at, block in enumerate(took.blocks.tolist()):
                paths.setdefault(block, tuple(text[: (at + 1) * BLOCK]))
        for _ in range(500):
            done += 1
            prompt = edited(rng, texts)
            policy = kvtrie.ReusePolicy(min_run=rng.choice((8, 12)), scope="namespace")
            seq = kvtrie.TokenSequence(prompt, SPACE)
            with index.plan(seq, policy, pin=False, session="own") as plan:
                found = gates.terms(plan)
                fresh = np.arange(60, 60 + plan.num_new_blocks, dtype=np.int32)
                moves = plan.moves(np.concatenate([plan.blocks, fresh])).tolist()
                in_place = plan.blocks.tolist()
            came_from: list[Path | None] = [None] * len(prompt)
            for at in range(len(in_place) * BLOCK):
                came_from[at] = tuple(prompt[: at + 1])
            where = {block: at for at, block in enumerate([*in_place, *fresh.tolist()])}
            for source, to, count, _ in moves:
                path = paths[source // BLOCK]
                base = len(path) - BLOCK + source % BLOCK
                first = where[to // BLOCK] * BLOCK + to % BLOCK
                for more in range(count):
                    came_from[first + more] = path[: base + more + 1]
            wanted = naive_terms(prompt, came_from, tuple(texts[0]))
            assert (found is None) == (wanted is None)
            if found is None or wanted is None:
                continue
            assert found.cuts == wanted.cuts
            assert found.distance == wanted.distance
            assert found.same_conversation == wanted.same_conversation
            assert abs(found.lost_context - wanted.lost_context) <= 1e-6
            assert abs(found.new_context - wanted.new_context) <= 1e-6
            held = find(found, boxes)
            name = None if held is None else names[held]
            assert name == naive_kind(found)
            assert sum(found in box for box in boxes) == (name is not None)
            seen[name] = seen.get(name, 0) + 1
    kinds = {"one cut", "one change", "several cuts", "replaced", "reordered"}
    assert kinds | {"other conversation"} <= set(seen)


def test_shipped_boxes_do_not_meet() -> None:
    for one, other in combinations(KINDS.values(), 2):
        assert not one.meets(other)


some_terms = st.builds(
    Terms,
    cuts=st.integers(0, 7) | st.just(65535),
    lost_context=st.sampled_from((0.0, 0.05, 0.1, 0.5, 1.0)),
    new_context=st.sampled_from((0.0, 0.05, 0.1, 0.5, 0.51, 1.0)),
    distance=st.sampled_from((0, 1, 5000)),
    hops=st.integers(0, 3),
    same_conversation=st.booleans(),
)
limits = st.none() | st.integers(-1, 4)
some_ranges = st.builds(
    lambda above, more: Range(above, None if more is None else (above or 0) + more),
    limits,
    st.none() | st.integers(1, 4),
)
some_boxes = st.builds(
    Box,
    cuts=some_ranges,
    hops=some_ranges,
    same_conversation=st.none() | st.booleans(),
)


@given(found=some_terms)
def test_terms_are_in_one_shipped_box_at_most(found: Terms) -> None:
    holding = [name for name, box in KINDS.items() if found in box]
    expected = naive_kind(found)
    assert holding == ([] if expected is None else [expected])


@given(one=some_boxes, other=some_boxes, found=some_terms)
def test_boxes_that_do_not_meet_share_no_terms(one: Box, other: Box, found: Terms) -> None:
    assert one.meets(other) == other.meets(one)
    if found in one and found in other:
        assert one.meets(other)


@given(seen=st.lists(some_terms, min_size=1, max_size=40))
def test_narrowed_box_ends_where_measurements_become_rare(seen: list[Terms]) -> None:
    box = Box().narrowed(seen)
    for name in ("cuts", "lost_context", "new_context", "hops"):
        end = getattr(box, name).most
        reached = sum(getattr(one, name) >= end for one in seen)
        assert 20 * reached >= len(seen)
        beyond = sum(getattr(one, name) > end for one in seen)
        assert 20 * beyond < len(seen)
    assert box.distance == Range()


def test_box_of_one_far_plan_and_many_near_ones_ends_near() -> None:
    near = [Terms(cuts=2, lost_context=0.2)] * 40
    box = KINDS["several cuts"].narrowed([*near, Terms(cuts=5, lost_context=0.9)])
    assert (box.cuts, box.lost_context) == (Range(1, 2), Range(None, 0.2))
    assert Terms(cuts=5) not in box
    assert Terms(cuts=2, lost_context=0.2, distance=9999) in box


@pytest.mark.parametrize("pair", [(1, 1), (2, 1), (float("nan"), 1), (0, float("inf"))])
def test_range_that_is_empty_or_not_finite_is_refused(pair: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="Range"):
        Range(*pair)


def test_range_of_another_type_is_refused() -> None:
    for value in (True, "1"):
        with pytest.raises(TypeError, match="must be a number or None"):
            Range(most=value)  # type: ignore[arg-type] # refused at run time


def test_worst_run_decides() -> None:
    index = kvtrie.RadixIndex(num_blocks=64, block_size=BLOCK, min_run=8)
    text = list(range(60))
    seq = kvtrie.TokenSequence(text, SPACE)
    index.insert(seq, range(15), num_computed=60, source=kvtrie.COMPUTED, session="chat")
    prompt = [*text[:8], *text[16:32], *text[40:56], 99]
    edit = kvtrie.TokenSequence(prompt, SPACE)
    with index.plan(edit, kvtrie.ReusePolicy(), session="chat") as plan:
        assert len(plan.moved_runs) == 2
        found = gates.terms(plan)
        assert found == Terms(
            cuts=2, lost_context=0.5, new_context=0.0, distance=16, hops=1, same_conversation=True
        )
    with index.plan(seq) as plan:
        assert gates.terms(plan) is None
