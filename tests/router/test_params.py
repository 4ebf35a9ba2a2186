"""Results for vLLM's `kv_transfer_params`, checked by a receiver that trims as vLLM does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtrie
from kvtrie.router.nixl_params import checked_params, cut_params

NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)


def seq(*ids: int) -> kvtrie.TokenSequence:
    return kvtrie.TokenSequence(list(ids), NS)


def params(num_tokens: int | None, *groups: list[int], **others: object) -> dict[str, Any]:
    return {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [list(group) for group in groups],
        "remote_engine_id": "decode-0",
        "remote_request_id": "cmpl-1",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": 12.5,
        "transfer_mode": "pull",
    } | others


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def receive(
    sent: dict[str, Any], block_sizes: list[int], local_sizes: list[int], size: int, hit: int
) -> list[list[tuple[int, int]]]:
    """Pairs (remote block, first token that lands in it) of each group, as a pull makes them.

    The count of tokens is ``min(remote_num_tokens, prompt) - hit``; blocks are allocated for them,
    split into blocks of the sender's size, and paired with the end of the sender's list.
    """
    end = min(sent["remote_num_tokens"], size)
    pairs: list[list[tuple[int, int]]] = []
    for remote, remote_size, local_size in zip(
        sent["remote_block_ids"], block_sizes, local_sizes, strict=True
    ):
        if end <= hit:
            pairs.append([])
            continue
        parts = range(hit // remote_size, cdiv(end, local_size) * local_size // remote_size)
        parts = parts[: len(remote)] if local_size > remote_size else parts
        assert len(parts) <= len(remote)
        taken = remote[len(remote) - len(parts) :]
        pairs.append(
            [(block, part * remote_size) for block, part in zip(taken, parts, strict=True)]
        )
    return pairs


@given(
    data=st.data(),
    num_computed=st.integers(1, 60),
    lookahead=st.integers(0, 2),
    sizes=st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=2),
    partial=st.booleans(),
)
def test_cut_lists_end_in_the_right_blocks_whatever_the_receiver_has(
    data: st.DataObject, num_computed: int, lookahead: int, sizes: list[int], partial: bool
) -> None:
    factor = data.draw(st.sampled_from([1, 2])) if len(set(sizes)) == 1 else 1
    local_sizes = [size * factor for size in sizes]
    # Block b of group g holds the tokens from (b - 1000 * g) * size on; the last are look-ahead.
    groups = [
        list(range(1000 * g, 1000 * g + cdiv(num_computed, size) + lookahead))
        for g, size in enumerate(sizes)
    ]
    usable = data.draw(st.integers(0, num_computed + 8))
    prompt = usable + data.draw(st.integers(1, 20))
    cut = cut_params(
        checked_params(params(num_computed, *groups), "call"),
        usable,
        block_sizes=sizes,
        receiver_block_size=local_sizes[0],
        partial_block=partial,
    )
    if cut.params is None:
        assert cut.num_tokens == 0
        assert cut.reason
        return
    assert cut.reason == ""
    assert cut.params["remote_num_tokens"] == cut.num_tokens <= min(usable, num_computed)
    unit = max(local_sizes)
    hit = data.draw(st.integers(0, prompt // unit)) * unit
    for g, pairs in enumerate(receive(cut.params, sizes, local_sizes, prompt, hit)):
        for block, start in pairs:
            assert (block - 1000 * g) * sizes[g] == start
            assert start < cut.num_tokens


def test_cut_counts_from_the_front_in_every_group() -> None:
    given = checked_params(params(50, list(range(10, 20)), list(range(30, 35)), new="x"), "call")
    cut = cut_params(given, 41, block_sizes=[8, 16])
    assert cut.num_tokens == 32
    assert cut.params == given | {
        "remote_num_tokens": 32,
        "remote_block_ids": [[10, 11, 12, 13], [30, 31]],
    }
    assert cut.params["new"] == "x"
    assert given["remote_num_tokens"] == 50


def test_unequal_block_sizes_of_the_receiver_end_at_common_multiples() -> None:
    given = checked_params(params(80, list(range(5))), "call")
    cut = cut_params(given, 79, block_sizes=[16], receiver_block_size=32, partial_block=True)
    assert cut.params is not None
    assert (cut.num_tokens, cut.params["remote_block_ids"]) == (64, [[0, 1, 2, 3]])


@pytest.mark.parametrize(
    ("given", "sizes", "reason"),
    [
        (params(32, [1, 2], transfer_mode="push"), [16], "transfer_mode is 'push'"),
        (params(32, [1, 2], do_remote_prefill=True, do_remote_decode=False), [16], "prefill"),
        (params(32, [1, 2], do_remote_decode=False), [16], "do_remote_decode"),
        (params(32, [1, 2], _remote_blocks_processed=True), [16], "processed"),
        (params(32, [1, 2], remote_host=None), [16], "remote_host is missing"),
        (params(None, [1, 2]), [16], "remote_num_tokens"),
        (params(0, [1, 2]), [16], "remote_num_tokens"),
        (params(32, [1, 2], dcp_size=2), [16], "dcp_size is 2"),
        (params(32, [1, 2]), None, "without a block_size"),
        (params(32, [1, 2], [3, 4]), [16], "2 block groups, but 1 block sizes"),
        (params(32), [16], "0 block groups"),
        (params(32, [1, 2]) | {"remote_block_ids": None}, [16], "0 block groups"),
        (params(48, [1, 2]), [16], "has 2 blocks of 16, but 48 tokens need 3"),
        (params(48, [0, 0, 5]), [16], "names a block twice"),
        (params(15, [1]), [16], "no whole block of 16 tokens is within 15"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parameters_that_cannot_be_made_safe_are_none_with_a_reason(
    given: dict[str, Any], sizes: list[int] | None, reason: str
) -> None:
    cut = cut_params(checked_params(given, "call"), 40, block_sizes=sizes)
    assert cut.params is None
    assert reason in cut.reason


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("do_remote_decode", 1),
        ("do_remote_prefill", "yes"),
        ("remote_block_ids", "12"),
        ("remote_block_ids", 7),
        ("remote_block_ids", [1, 2]),
        ("remote_block_ids", [[1, -2]]),
        ("remote_block_ids", [[1, True]]),
        ("remote_block_ids", [["1"]]),
        ("remote_block_ids", [[2**63]]),
        ("remote_engine_id", 3),
        ("remote_request_id", b"r"),
        ("remote_host", 1),
        ("transfer_mode", 1),
        ("tp_size", 0),
        ("dcp_size", "2"),
        ("pp_size", None),
        ("remote_num_tokens", -1),
        ("remote_num_tokens", 1.5),
        ("remote_port", True),
        ("remote_blocks_expiry_time", float("nan")),
        ("remote_blocks_expiry_time", "soon"),
    ],
)
def test_malformed_field_is_refused_by_name_and_nothing_is_kept(name: str, value: object) -> None:
    tracker = kvtrie.TurnTracker(block_size=16)
    history = seq(1, 2, 3)
    with pytest.raises(ValueError, match=name):
        tracker.keep(history, num_computed=2, kv_transfer_params=params(2, [1]) | {name: value})
    with pytest.raises(TypeError, match="kv_transfer_params is a list"):
        tracker.keep(history, num_computed=2, kv_transfer_params=[1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="key 1"):
        tracker.keep(history, num_computed=2, kv_transfer_params={1: 2})  # type: ignore[dict-item]
    assert (len(tracker), tracker.num_tokens) == (0, 0)


def test_parameters_are_copied_in_and_handed_out_once() -> None:
    tracker = kvtrie.TurnTracker(block_size=2)
    given = params(5, [7, 8, 9], nested={"list": [1]})
    tracker.keep(seq(1, 2, 3, 4, 5, 6), num_computed=5, kv_transfer_params=given)
    given["nested"]["list"].append(2)
    prompt = seq(1, 2, 3, 4, 5, 9)
    looked = tracker.compare(prompt, take=False)
    assert looked.kv_transfer_params is not None
    looked.kv_transfer_params["nested"]["list"].append(3)
    taken = tracker.compare(prompt)
    assert taken.kv_transfer_params == given | {
        "remote_num_tokens": 4,
        "remote_block_ids": [[7, 8]],
        "nested": {"list": [1]},
    }
    again = tracker.compare(prompt)
    assert (again.kind, again.num_tokens, again.kv_transfer_params) == ("common_prefix", 5, None)
    assert "handed out before" in again.transfer_reason


def test_whole_history_keeps_its_partial_block_and_loses_its_lookahead() -> None:
    tracker = kvtrie.TurnTracker(block_size=4)
    tracker.keep(
        seq(*range(10)),
        num_computed=9,
        # The counter is one step ahead, and there is a block for drafts.
        kv_transfer_params=params(11, [3, 1, 4, 9]),
    )
    answer = tracker.compare(seq(*range(12)))
    assert (answer.kind, answer.num_tokens, answer.num_transfer_tokens) == ("exact_extension", 9, 9)
    assert answer.kv_transfer_params == params(9, [3, 1, 4])


def test_stripped_reasoning_of_sixteen_blocks_gets_the_question_only() -> None:
    question, reasoning, answer = range(64), range(100, 260), range(300, 348)
    tracker = kvtrie.TurnTracker(block_size=16)
    tracker.keep(
        seq(*question, *reasoning, *answer),
        num_computed=271,
        kv_transfer_params=params(271, list(range(17))),
    )
    prompt = seq(*question, *answer, *range(400, 432))
    found = tracker.compare(prompt)
    assert (found.kind, found.num_tokens) == ("common_prefix", 64)
    assert found.kv_transfer_params == params(64, [0, 1, 2, 3])


def test_approximate_history_offers_its_exact_blocks_alone() -> None:
    tracker = kvtrie.TurnTracker(block_size=2)
    tracker.keep(
        seq(*range(8)),
        num_computed=7,
        source=kvtrie.Imported(exact_until=5),
        kv_transfer_params=params(7, [1, 2, 3, 4]),
    )
    answer = tracker.compare(seq(*range(9)), policy=kvtrie.ReusePolicy(scope="namespace"))
    assert (answer.kind, answer.num_tokens, answer.num_exact) == ("exact_extension", 7, 5)
    assert answer.num_transfer_tokens == 5


def test_parameters_of_a_conversation_are_not_for_others() -> None:
    """A receiver that reads one block has all of them released."""
    tracker = kvtrie.TurnTracker(block_size=2)
    tracker.keep(
        seq(1, 2, 3, 4, 5),
        num_computed=4,
        conversation="mine",
        kv_transfer_params=params(4, [7, 8]),
    )
    prompt = seq(1, 2, 9)
    other = tracker.compare(prompt)
    assert (other.kind, other.num_tokens, other.kv_transfer_params) == ("common_prefix", 2, None)
    assert other.transfer_reason == "they are those of conversation 'mine'"
    assert tracker.compare(prompt, conversation="mine").num_transfer_tokens == 2


def test_few_tokens_are_not_worth_a_transfer() -> None:
    tracker = kvtrie.TurnTracker(block_size=2, min_transfer=4)
    tracker.keep(seq(1, 2, 3, 4, 5), num_computed=4, kv_transfer_params=params(4, [7, 8]))
    few = tracker.compare(seq(1, 2, 3, 9, 9))
    assert (few.num_tokens, few.kv_transfer_params) == (3, None)
    assert few.transfer_reason == "they cover 2 tokens, and min_transfer is 4"
    assert tracker.compare(seq(1, 2, 3, 4, 9)).num_transfer_tokens == 4
