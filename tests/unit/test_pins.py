"""Matches of ids that have no sequence yet, and pins of matches."""

from __future__ import annotations

import gc
import warnings
from array import array
from typing import Any

import numpy as np
import pytest

import kvtrie

SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)


def filled(num_tokens: int = 8, size: int = 2) -> kvtrie.RadixIndex:
    """An index with the tokens 0, 1, ... in the blocks 3, 4, ..."""
    index = kvtrie.RadixIndex(64, size, moved_runs=False)
    seq = kvtrie.TokenSequence(range(num_tokens), SPACE)
    blocks = range(3, 3 + num_tokens // size)
    index.insert(seq, blocks, num_computed=num_tokens, source=kvtrie.COMPUTED)
    return index


@pytest.mark.parametrize("kind", [list, tuple, lambda ids: array("q", ids), np.array])
@pytest.mark.parametrize("limit", [None, 0, 1, 5, 8, 90])
def test_a_match_of_ids_is_a_lookup_of_their_sequence(kind: Any, limit: int | None) -> None:
    index, ids = filled(), kind([0, 1, 2, 3, 4, 5, 9, 9])
    found = index.match(ids, SPACE, limit)
    seq = kvtrie.TokenSequence(ids, SPACE, limit=limit)
    same = index.lookup(seq)
    assert (found.num_tokens, found.blocks.tolist()) == (same.num_tokens, same.blocks.tolist())
    assert found.sequence[:].tolist() == seq[:].tolist()
    assert found.sequence.namespace is SPACE
    assert same.sequence is seq


def test_a_match_touches() -> None:
    index = filled()
    other = kvtrie.TokenSequence([50, 51], SPACE)
    index.insert(other, [40], num_computed=2, source=kvtrie.COMPUTED)
    index.match(range(8), SPACE)
    assert index.evict(1).tolist() == [40]


def test_an_array_of_64_bits_is_read_up_to_its_limit() -> None:
    """What comes after it may be no token id. Nothing keeps the array afterwards."""
    ids = array("q", [0, 1, 2, 3, -5, 2**40])
    assert filled().match(ids, SPACE, 4).num_tokens == 4
    for count, at, value in ((5, 4, -5), (6, 4, -5)):
        with pytest.raises(ValueError, match=rf"RadixIndex.match: ids\[{at}\] is {value}; "):
            filled().match(ids, SPACE, count)
    ids.append(7)  # an array that somebody reads cannot grow
    with pytest.raises(ValueError, match=r"RadixIndex\.match: limit is -1; "):
        filled().match(ids, SPACE, -1)


def test_a_pin_holds_what_was_found_and_no_more() -> None:
    index = filled()
    found = index.match(range(4), SPACE)
    whole = index.match(range(8), SPACE)
    with index.pin(found) as pin:
        assert index.evict(9).tolist() == [6, 5]
        assert pin.found.blocks.tolist() == [3, 4]
        found = pin.found
        assert (found.num_tokens, found.consecutive_from, pin.released) == (4, 3, False)
    assert pin.released
    # Two blocks have left since that match.
    with index.pin(whole) as pin:
        assert pin.found.num_tokens == 4
    assert index.evict(9).tolist() == [4, 3]
    with index.pin(whole) as pin:
        assert (pin.found.num_tokens, pin.found.blocks.tolist()) == (0, [])


def test_a_pin_of_a_match_does_not_grow_with_its_prompt() -> None:
    index = filled(4)
    found = index.match(range(8), SPACE)
    assert found.num_tokens == 4
    more = kvtrie.TokenSequence(range(8), SPACE)
    index.insert(more, [20, 21], num_computed=8, start=4, source=kvtrie.COMPUTED)
    with index.pin(found) as pin:
        assert pin.found.num_tokens == 4
        assert index.evict(9).tolist() == [21, 20]


def test_a_pin_of_a_match_from_a_position_on() -> None:
    index = filled()
    with index.pin(index.lookup(kvtrie.TokenSequence(range(8), SPACE), start=4)) as pin:
        assert (pin.found.num_tokens, pin.found.blocks.tolist()) == (8, [5, 6])
        assert index.num_evictable == 0


def test_a_release_says_how_many_blocks_wait() -> None:
    index = filled()
    pins = [index.pin(index.match(range(8), SPACE)) for _ in range(2)]
    assert index.discard([4, 5]).tolist() == []
    assert [pin.release() for pin in pins] == [0, 2]
    assert sorted(index.take_freed().tolist()) == [4, 5]


def test_a_pin_is_released_once() -> None:
    index = filled()
    pin = index.pin(index.match(range(8), SPACE))
    pin.release()
    with pytest.raises(
        kvtrie.StaleHandleError, match=r"Pin\.release: the pin was released already"
    ):
        pin.release()
    with pytest.raises(kvtrie.StaleHandleError, match=r"Pin\.__enter__: the pin was released "):
        pin.__enter__()
    with index.pin(index.match(range(8), SPACE)) as pin:
        pin.release()  # leaving the block is no second release
    assert repr(pin) == "<Pin of 8 tokens, released=True>"


def test_a_pin_that_is_collected_is_released_and_says_so() -> None:
    index = filled()
    pin: Any = index.pin(index.match(range(8), SPACE))
    assert index.num_evictable == 0
    with pytest.warns(ResourceWarning, match="a Pin was collected unreleased"):
        pin = None
    assert (pin, index.num_evictable) == (None, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        index.pin(index.match(range(8), SPACE)).release()
        gc.collect()


def test_a_pin_of_something_else_is_refused() -> None:
    index: Any = filled()
    with pytest.raises(
        TypeError, match=r"RadixIndex\.pin: found is of type 'int'; it must be a Mat"
    ):
        index.pin(7)


def test_an_insert_says_how_many_ids_it_did_not_take() -> None:
    index, seq = filled(), kvtrie.TokenSequence(range(9), SPACE)
    done = index.insert(seq, [30, 31, 32, 33, 34], num_computed=9, source=kvtrie.COMPUTED)
    assert len(done.duplicates) + len(done.surplus) == done.num_refused == 5
    new = kvtrie.TokenSequence(range(100, 104), SPACE)
    done = index.insert(new, [30, 31], num_computed=4, source=kvtrie.COMPUTED)
    assert (done.num_refused, done.blocks.tolist()) == (0, [30, 31])
