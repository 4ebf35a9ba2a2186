"""`RadixIndex.explain` as Python sees it; the reasons themselves are tested in Rust."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import kvtrie
from kvtrie import COMPUTED

NS = kvtrie.Namespace(model="m", salt="tenant")


def seq(ids: list[int], space: kvtrie.Namespace = NS) -> kvtrie.TokenSequence:
    return kvtrie.TokenSequence(ids, space)


@pytest.fixture
def index() -> kvtrie.RadixIndex:
    index = kvtrie.RadixIndex(32, 4, min_run=8)
    index.insert(seq(list(range(10, 26))), [0, 1, 2, 3], num_computed=16, source=COMPUTED)
    return index


def test_every_reason(index: kvtrie.RadixIndex) -> None:
    ids = list(range(10, 26))
    assert index.explain(seq(ids)).reason == "complete"
    assert index.explain(seq([*ids, 1, 2, 3, 4])).reason == "not_cached"
    assert index.explain(seq([*ids[:9], 99, 98, 97])).reason == "diverged"
    other = kvtrie.Namespace(model="m", adapter="lora", salt="tenant")
    assert index.explain(seq(ids, other)).reason == "other_namespace"
    index.evict(1)
    assert index.explain(seq(ids)).reason == "evicted"
    source = kvtrie.Imported(exact_until=12, hops=1, policy=kvtrie.ReusePolicy())
    index.insert(seq(ids), [0, 1, 2, 9], num_computed=16, source=source)
    assert index.explain(seq(ids)).reason == "approximate_only"


def test_fields(index: kvtrie.RadixIndex) -> None:
    index.tag(seq(list(range(10, 26))), [kvtrie.Span(8, 12, "reasoning")])
    why = index.explain(seq([*range(10, 19), 99, *range(20, 30)]), context=2)
    assert (why.position, why.num_exact, why.num_tokens, why.block_size) == (9, 8, 20, 4)
    context = why.context
    assert context.start == 7
    for array, expected in ((context.ours, [17, 18, 99, 20]), (context.theirs, [17, 18, 19, 20])):
        assert array.dtype == np.uint32
        assert array.tolist() == expected
    assert (why.kinds, why.kinds_before) == (("reasoning",), ("reasoning",))
    assert why.other_namespace is None
    saved = why.would_save
    assert (saved.exact, saved.approximate, saved.compute) == (9, 0, 11)
    assert str(why) == (
        "8 of 20 tokens match exactly (2 whole blocks of 4). At position 9 other tokens are "
        "cached: [19, 20] where the prompt has [99, 20], "
        "both after [17, 18]. "
        "The token before is "
        "tagged reasoning. A plan would take 9 tokens exactly and 0 approximately, and leave 11 to "
        "compute."
    )
    assert repr(why) == "<Explanation: diverged at 9, 8 of 20 tokens exact>"


def test_dictionary_is_json_with_the_names_of_the_attributes(index: kvtrie.RadixIndex) -> None:
    other = kvtrie.Namespace(model="n", rope="x", salt="tenant")
    why = index.explain(seq(list(range(10, 26)), other), context=1)
    document = json.loads(json.dumps(why.to_dict()))
    assert document == {
        "reason": "other_namespace",
        "position": 0,
        "num_exact": 0,
        "num_tokens": 16,
        "block_size": 4,
        "context": {"start": 0, "ours": [10], "theirs": []},
        "kinds": [],
        "kinds_before": [],
        "other_namespace": {"fields": ["model", "rope"], "num_tokens": 16},
        "laxer_in": [],
        "would_save": {"exact": 0, "approximate": 0, "compute": 16, "out_of_scope": 0},
        "cut_by": None,
    }
    assert set(document) == {name for name in dir(why) if not name.startswith("_")} - {"to_dict"}


def test_policy_and_keep_last_are_those_of_the_plan(index: kvtrie.RadixIndex) -> None:
    moved = seq([1, 2, 3, *range(10, 26)])
    for policy in (None, kvtrie.ReusePolicy(), kvtrie.EXACT_ONLY):
        for keep_last in (0, 1, 5):
            saved = index.explain(moved, policy, keep_last=keep_last).would_save
            asked = policy or kvtrie.ReusePolicy()
            with index.plan(moved, asked, keep_last=keep_last) as plan:
                counts = (plan.num_exact, plan.num_approximate, plan.num_compute)
            assert (saved.exact, saved.approximate, saved.compute) == counts


def test_nothing_is_used(index: kvtrie.RadixIndex) -> None:
    before = index.digest(), index.stats().clock, index.stats().live_plans
    index.explain(seq(list(range(10, 20))))
    assert (index.digest(), index.stats().clock, index.stats().live_plans) == before


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"context": -1}, ValueError, "context"),
        ({"keep_last": -1}, ValueError, "keep_last"),
        ({"context": 1.5}, TypeError, "float"),
        ({"context": True}, TypeError, "bool"),
        ({"policy": "exact"}, TypeError, "policy"),
        ({"policy": kvtrie.ReusePolicy(min_run=8)}, ValueError, r"RadixIndex\.explain: .*min_run"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], named: str) -> None:
    index = kvtrie.RadixIndex(8, 2, min_run=9)
    with pytest.raises(error, match=named):
        index.explain(seq([1, 2]), **arguments)


def test_context_may_be_longer_than_anything(index: kvtrie.RadixIndex) -> None:
    why = index.explain(seq([*range(10, 19), 99, 98, 97]), context=2**63 - 1)
    assert why.context.start == 0
    assert why.context.theirs.tolist() == list(range(10, 26))
