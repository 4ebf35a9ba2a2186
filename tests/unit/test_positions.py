"""Items that say how many positions they take (D20), from Python."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import kvtrie
from kvtrie import COMPUTED, Item, Namespace, ReusePolicy, TokenSequence

SPACE = Namespace(model="m", salt="tenant")
IMAGE = Item(4, 16, b"cat", positions=3)


def prompt(*parts: range | int | None) -> TokenSequence:
    """A prompt of text and images of 12 tokens; an image is how many positions it takes."""
    ids: list[int] = []
    items = []
    for part in parts:
        if isinstance(part, range):
            ids += part
        else:
            items.append(Item(len(ids), len(ids) + 12, b"cat", positions=part))
            ids += [9] * 12
    return TokenSequence(ids, SPACE, items)


def test_an_item_is_a_value_with_its_positions() -> None:
    assert (IMAGE.positions, IMAGE.num_tokens) == (3, 12)
    assert (Item(4, 16, b"cat").positions, Item(4, 16, b"cat").num_tokens) == (None, None)
    assert repr(IMAGE) == "Item(4, 16, b'cat', positions=3)"
    part = Item(4, 10, b"cat", positions=3, num_tokens=12)
    assert repr(part) == "Item(4, 10, b'cat', positions=3, num_tokens=12)"
    assert part == IMAGE.replace(end=10)
    distinct = [IMAGE, part, Item(4, 16, b"cat"), IMAGE.replace(positions=4)]
    assert len(set(distinct)) == len(distinct)
    for one in distinct:
        assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one  # noqa: S301 - our own bytes


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"positions": 0}, ValueError, r"Item: positions is 0; it must be in \[1, 2147483647\]"),
        ({"positions": 2**31}, ValueError, r"Item: positions is 2147483648; it must be in"),
        ({"positions": -1}, ValueError, "positions is -1"),
        ({"positions": 1.0}, TypeError, "positions is of type 'float'"),
        (
            {"positions": 2, "num_tokens": 11},
            ValueError,
            r"num_tokens is 11; .* \[12, 2147483647\]",
        ),
        ({"num_tokens": 12}, ValueError, "num_tokens is 12 and positions is None"),
    ],
)
def test_wrong_positions_are_refused(given: dict[str, Any], error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        Item(4, 16, b"cat", **given)


def test_nothing_follows_a_part_of_an_item() -> None:
    seq = prompt(range(4), 3, range(20, 24))
    assert [seq.position(at) for at in (0, 4, 15, 16, 20)] == [0, 4, 4, 7, 11]
    seq.truncate(10)
    assert seq.items == (IMAGE.replace(end=10),)
    again = TokenSequence(seq[:], SPACE, seq.items)
    for one in (seq, again):
        with pytest.raises(ValueError, match="cut at 10 inside an item of 12 tokens from 4 on"):
            one.extend([1])
        with pytest.raises(ValueError, match="cut at 10"):
            one.position(10)
        assert len(one) == 10
    with pytest.raises(ValueError, match="the first of 12 tokens"):
        TokenSequence([9] * 11, SPACE, seq.items)
    seq.truncate(4)
    seq.extend([1])
    assert seq.position(5) == 5
    with pytest.raises(ValueError, match=r"token is 6; it must be in \[0, 5\]"):
        seq.position(6)


def test_a_plan_moves_in_positions() -> None:
    index = kvtrie.RadixIndex(64, 4, moved_runs=True, min_run=8)
    cached = prompt(range(4), 3, range(20, 40))
    index.insert(cached, range(9), num_computed=36, source=COMPUTED)
    policy = ReusePolicy(approximate=True, scope="namespace")
    with index.plan(prompt(range(4), range(20, 40)), policy) as plan:
        moved = plan.segments[plan.segments["class"] == 1][0]
        assert (moved["delta"], moved["position_delta"]) == (-12, -3)
        assert plan.items == ()
        assert set(plan.moves([0, *range(40, 45)])["delta"].tolist()) == {-3}
    with index.plan(prompt(range(4), 3, range(20, 22))) as plan:
        assert plan.items == (IMAGE,)
        assert plan.num_exact == 17
    # An image that takes other positions, or does not say, is another one.
    for other in (4, None):
        assert index.lookup(prompt(range(4), other, range(20, 40))).num_tokens == 4


def test_a_manifest_of_such_items_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the item at \[4, 16\) says that it takes 3 positions"):
        kvtrie.TransferManifest.from_blocks(
            prompt(range(4), 3), range(4), key=b"k" * 16, num_computed=16, block_size=4
        )
