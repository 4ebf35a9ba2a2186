"""Values, singletons and results as Python objects."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
from typing import Any

import numpy as np
import pytest

import kvtrie

SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
POLICY = kvtrie.ReusePolicy(
    approximate=False, min_run=32, max_approximate_share=0.5, forbid_kinds=("user", "it's")
)
VALUES = [
    SPACE,
    kvtrie.Namespace(model="m", kv_dtype="fp8", rope="yarn:4", adapter="lora", salt="tenant ä"),
    kvtrie.Item(1, 4, b"\x00digest"),
    kvtrie.Span(0, 7, "reasoning"),
    kvtrie.Imported(exact_until=5, hops=3),
    kvtrie.EXACT_ONLY,
    POLICY,
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_value_survives_copy_pickle_and_repr(value: Any) -> None:
    names = {name: getattr(kvtrie, name) for name in kvtrie.__all__}
    for again in (
        copy.copy(value),
        copy.deepcopy(value),
        pickle.loads(pickle.dumps(value)),  # noqa: S301 - our own
        # The repr of a tenant's namespace has no salt.
        value if "<redacted>" in repr(value) else eval(repr(value), names),  # noqa: S307 - our own
    ):
        assert again == value
        assert hash(again) == hash(value)
    assert value != "something else"


def test_values_differ_in_every_field() -> None:
    assert len(set(VALUES)) == len(VALUES)
    fields: list[dict[str, Any]] = [
        {"kv_dtype": "x"},
        {"rope": "x"},
        {"adapter": "x"},
        {"salt": "x"},
        {"model": "x"},
    ]
    base: dict[str, Any] = {"model": "m", "salt": kvtrie.SHARED}
    assert len({kvtrie.Namespace(**base | more) for more in fields} | {SPACE}) == len(fields) + 1
    changes: list[dict[str, Any]] = [
        {"approximate": False},
        {"min_run": 9},
        {"max_hops": 2},
        {"max_approximate_share": 0.0},
        {"recompute_first": 1},
        {"recompute_last": 1},
        {"forbid_kinds": ("user",)},
        {"max_cuts": 3},
        {"max_lost_context": 0.25},
        {"max_new_context": 0.25},
        {"partial_blocks": False},
    ]
    policies = {kvtrie.ReusePolicy(**change) for change in changes}
    assert len(policies | {kvtrie.ReusePolicy()}) == len(changes) + 1


def test_negative_zero_is_zero() -> None:
    plus, minus = (kvtrie.ReusePolicy(max_approximate_share=zero) for zero in (0.0, -0.0))
    assert plus == minus
    assert hash(plus) == hash(minus)
    assert repr(plus) == repr(minus)


CHANGES: list[tuple[Any, dict[str, Any]]] = [
    (SPACE, {"adapter": "lora", "salt": "tenant"}),
    (VALUES[1], {"model": "n", "adapter": None}),
    (VALUES[2], {"start": 2, "digest": b"other"}),
    (VALUES[3], {"end": 9, "kind": "user"}),
    (VALUES[4], {"hops": 0}),
    (POLICY, {"approximate": True, "max_hops": 3, "forbid_kinds": ["answer"]}),
    (kvtrie.TransferLimits(max_bytes=7), {"max_runs": 3}),
]


@pytest.mark.parametrize(("value", "changes"), CHANGES, ids=repr)
def test_replace_changes_the_named_fields_alone(value: Any, changes: dict[str, Any]) -> None:
    fields = [name for name, kind in vars(type(value)).items() if inspect.isgetsetdescriptor(kind)]
    before = {name: getattr(value, name) for name in fields}
    wanted = before | {
        name: tuple(new) if isinstance(new, list) else new for name, new in changes.items()
    }
    for change in (value.replace, value.__replace__):
        made = change(**changes)
        assert type(made) is type(value)
        assert {name: getattr(made, name) for name in fields} == wanted
        assert change() == value
    assert {name: getattr(value, name) for name in fields} == before


@pytest.mark.parametrize(("value", "changes"), CHANGES, ids=repr)
def test_replace_refuses_what_the_constructor_refuses(value: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'maxhops'"):
        value.replace(maxhops=1)
    field = next(iter(changes))
    with pytest.raises(TypeError, match=rf"{type(value).__name__}: {field} is of type 'list'"):
        value.replace(**{field: []})


def test_replace_checks_the_value_and_names_the_limit() -> None:
    with pytest.raises(
        ValueError, match=r"ReusePolicy: max_hops is 40000; it must be in \[0, 255\]"
    ):
        POLICY.replace(max_hops=40_000)
    with pytest.raises(ValueError, match="Span: start and end are 8 and 7"):
        kvtrie.Span(0, 7, "user").replace(start=8)


@pytest.mark.skipif(sys.version_info < (3, 13), reason="copy.replace is of Python 3.13")
@pytest.mark.parametrize(("value", "changes"), CHANGES, ids=repr)
def test_copy_replaces(value: Any, changes: dict[str, Any]) -> None:
    replace = vars(copy)["replace"]
    assert replace(value, **changes) == value.replace(**changes)


@pytest.mark.parametrize("name", ["SHARED", "COMPUTED"])
def test_singleton_stays_one(name: str) -> None:
    value = getattr(kvtrie, name)
    assert repr(value) == name
    assert copy.copy(value) is value
    assert copy.deepcopy([value])[0] is value
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(value, protocol)) is value  # noqa: S301 - our own


def test_salt_is_the_singleton() -> None:
    assert SPACE.salt is kvtrie.SHARED
    assert kvtrie.Namespace(model="m", salt="SHARED") != SPACE


@pytest.mark.parametrize("value", [*VALUES, kvtrie.RadixIndex(8)], ids=lambda v: type(v).__name__)
def test_nothing_can_be_assigned(value: Any) -> None:
    for name in ("start", "model", "num_blocks", "anything"):
        with pytest.raises(AttributeError):
            setattr(value, name, 1)


def test_errors_form_one_tree() -> None:
    for name in (
        "BlockInUseError",
        "OutOfBlocksError",
        "StaleHandleError",
        "LayoutError",
        "UnsupportedRopeError",
    ):
        error = getattr(kvtrie, name)
        assert error.__bases__ == (kvtrie.KvTrieError,)
        assert (error.__module__, error.__qualname__) == ("kvtrie", name)
        assert error.__doc__
        assert pickle.loads(pickle.dumps(error("x"))).args == ("x",)  # noqa: S301 - our own
    assert kvtrie.KvTrieError.__bases__ == (Exception,)


def test_results_are_arrays_of_their_own() -> None:
    index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    seq = kvtrie.TokenSequence([1, 2, 3, 4], SPACE)
    done = index.insert(seq, [6, 0], num_computed=4, source=kvtrie.COMPUTED)
    match = index.lookup(seq)
    for result in (done, match):
        mine = result.blocks
        assert mine.dtype == np.int32
        mine[:] = 5
        assert result.blocks.tolist() == [6, 0]
    stats = index.stats()
    assert stats == index.stats()
    assert hash(stats) == hash(index.stats())
    assert repr(stats).startswith("IndexStats(indexed=2, condemned=0, ")
    assert repr(index) == "<RadixIndex of 8 blocks of 2 tokens: indexed=2, moved_runs=True>"
    assert repr(seq) == f"<TokenSequence of 4 tokens in {SPACE!r}>"
    assert repr(done).startswith("InsertResult(blocks=[6, 0], num_exact=4, ")


def test_structured_arrays_have_their_fields() -> None:
    index = kvtrie.RadixIndex(num_blocks=8, block_size=4)
    seq = kvtrie.TokenSequence([1, 2, 3, 4, 5, 6, 7, 8], SPACE)
    index.insert(seq, [5, 3], num_computed=8, source=kvtrie.COMPUTED)
    index.tag(seq, [kvtrie.Span(0, 3, "user"), kvtrie.Span(4, 6, "mine")])
    with index.plan(kvtrie.TokenSequence([1, 2, 3, 4, 5, 6, 0, 0, 0], SPACE)) as plan:
        segments, moves = plan.segments, plan.moves([5, 1, 2])
        assert plan.gaps.tolist() == [[6, 9]]
        assert plan.gaps.dtype == np.int64
    names = tuple("start end old_start delta class hops kinds position_delta".split())
    assert segments.dtype.names == names
    assert [segments.dtype[name].str for name in names] == [
        *["<i8"] * 4,
        "|u1",
        "<u2",
        "<u8",
        "<i8",
    ]
    assert segments.dtype.isalignedstruct
    mine = 1 << index.kinds.index("mine")
    assert segments.tolist() == [
        (0, 4, 0, 0, 0, 0, 2, 0),
        (4, 6, 4, 0, 0, 0, mine, 0),
        (6, 9, 6, 0, 2, 0, 0, 0),
    ]
    assert moves.dtype.names == ("source_slot", "dest_slot", "num_tokens", "delta")
    assert {moves.dtype[name].str for name in moves.dtype.names} == {"<i8"}
    assert moves.tolist() == [(12, 4, 2, 0)]
    with index.plan(kvtrie.TokenSequence([], SPACE)) as plan:
        assert plan.segments.shape == (0,)
        assert plan.gaps.shape == (0, 2)
        assert plan.moves([]).shape == (0,)
