"""The data of the pages: numbering of nodes, paths that a plan copies from, what a log shows."""

from __future__ import annotations

import base64
import json
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.browser.kit import OTHER, SPACE, log, small, words

import kvtrie
from kvtrie.inspector import (
    plan_document,
    read_snapshot,
    sources_in,
    traffic_document,
    tree_document,
)
from kvtrie.inspector.pack import pieces_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray


def numbers(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<u4")


def unpacked(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))


def test_nodes_follow_the_nodes_above_them() -> None:
    index, _ = small()
    trees = read_snapshot(index.snapshot())
    tree = tree_document(trees)
    parents, blocks = (numbers(tree.document["columns"][name]) for name in ("parent", "blocks"))
    assert [int(one) for one in np.flatnonzero(parents == 2**32 - 1)] == [0, len(parents) - 2]
    assert all(one < node for node, one in enumerate(parents.tolist()) if one < 2**32 - 1)
    assert sorted(one for one in tree.order if one >= 0) == list(range(len(trees.edges)))
    flat, ids = numbers(tree.later["tokens"]), numbers(tree.later["ids"])
    at = np.cumsum(blocks) - blocks
    for block, node in tree.node_of.items():
        path: list[int] = []
        above = node
        while above < 2**32 - 1:
            start = int(at[above]) * 8
            path = [*flat[start : start + 8 * int(blocks[above])].tolist(), *path]
            above = int(parents[above])
        found = index.path_tokens(block)
        assert found is not None
        assert path[: len(found)] == found.tolist()
        assert block in ids[at[node] : at[node] + blocks[node]]


def test_runs_add_up_to_the_index_s_own_counts() -> None:
    index, _ = small()
    tree = tree_document(read_snapshot(index.snapshot()))
    columns = {name: numbers(one) for name, one in tree.document["columns"].items()}
    stats = index.stats()
    state, length = columns["runState"], columns["runBlocks"]
    assert (
        length[state & 3 == 1].sum() == stats.approximate == tree.document["counts"]["approximate"]
    )
    assert length[state == 2].sum() == stats.holes == tree.document["counts"]["holes"]
    assert length[state & 4 > 0].sum() == stats.dead == tree.document["counts"]["dead"]
    assert length[state & 3 != 2].sum() == stats.indexed
    assert columns["runs"].sum() == len(state) == len(columns["runAge"])
    assert columns["blocks"].sum() == length.sum()
    # A hole has no age; the latest call used something.
    assert set(columns["runAge"][state == 2].tolist()) == {2**32 - 1}
    assert columns["runAge"].min() == 0


def test_of_too_many_tokens_each_edge_keeps_its_first() -> None:
    index, _ = small()
    trees = read_snapshot(index.snapshot())
    whole = tree_document(trees)
    assert whole.document["tokensPerEdge"] is None
    tree = tree_document(trees, most_tokens=500)
    cut = tree.document["tokensPerEdge"]
    lengths = [len(trees.edges[edge].tokens) for edge in tree.order if edge >= 0]
    kept = [min(cut, length) for length in lengths]
    assert sum(kept) <= 500 < sum(min(cut + 1, length) for length in lengths)
    assert len(numbers(tree.later["tokens"])) == sum(kept)


def test_an_empty_index_is_a_page() -> None:
    tree = tree_document(read_snapshot(kvtrie.RadixIndex(8).snapshot()))
    assert (tree.document["nodes"], tree.document["spaces"]) == (0, [])


def test_tenants_are_numbers() -> None:
    index, _ = small()
    tree = tree_document(read_snapshot(index.snapshot()))
    assert [one["tenant"] for one in tree.document["spaces"]] == ["tenant 1", "tenant 2"]
    assert SPACE.salt != OTHER.salt


@pytest.mark.parametrize("num_blocks", [512, 40])
def test_each_copied_segment_is_on_its_path(num_blocks: int) -> None:
    """The tokens of a segment are those of its source at the old position."""
    index = kvtrie.RadixIndex(num_blocks, 4, min_run=8)
    first, second = words(60, 1), words(60, 2)
    for number, tokens in enumerate((first, second)):
        seq = kvtrie.TokenSequence(tokens, SPACE)
        blocks = range(15 * number, 15 * number + 15)
        index.insert(seq, blocks, num_computed=60, source=kvtrie.COMPUTED, session="chat")
    prompt = [*first[:21], *second[10:40], *first[30:58], 7]
    policy = kvtrie.ReusePolicy(scope="namespace")
    seq = kvtrie.TokenSequence(prompt, SPACE)
    with index.plan(seq, policy) as plan:
        sources, numbered = sources_in(index, plan)
        document = plan_document(
            plan,
            index.explain(seq, policy),
            ("prompt", prompt),
            (sources, numbered),
            kinds=index.kinds,
        )
    copied = 0
    for one in document["segments"]:
        if one["class"] == "compute" or one["source"] is None:
            continue
        source = sources[one["source"]].tokens.tolist()
        length = one["end"] - one["start"]
        assert (
            source[one["oldStart"] : one["oldStart"] + length] == prompt[one["start"] : one["end"]]
        )
        copied += one["class"] == "approximate"
    assert copied >= 2
    assert {one.name for one in sources} == {"cached path 1", "cached path 2"}


def test_a_run_after_a_deleted_image_has_its_delta_in_positions() -> None:
    index = kvtrie.RadixIndex(64, 4, min_run=8)
    tokens = words(60, 1)
    image = kvtrie.Item(4, 20, b"picture", positions=4)
    cached = kvtrie.TokenSequence(tokens, SPACE, items=[image])
    index.insert(cached, range(15), num_computed=60, source=kvtrie.COMPUTED, session="chat")
    seq = kvtrie.TokenSequence([*tokens[:4], *tokens[20:60], 7], SPACE)
    policy = kvtrie.ReusePolicy(scope="namespace")
    with index.plan(seq, policy) as plan:
        why = index.explain(seq, policy)
        asked = ("prompt", list(seq))
        document = plan_document(plan, why, asked, sources_in(index, plan), kinds=index.kinds)
    moved = [one for one in document["segments"] if one["class"] == "approximate"]
    assert {(one["delta"], one["positionDelta"]) for one in moved} == {(-16, -4)}


def test_a_pool_without_room_for_the_prompt_names_no_paths() -> None:
    index = kvtrie.RadixIndex(4, 4, min_run=8)
    seq = kvtrie.TokenSequence(words(16, 1), SPACE)
    index.insert(seq, range(4), num_computed=16, source=kvtrie.COMPUTED, session="chat")
    prompt = kvtrie.TokenSequence([7, *words(16, 1), *words(30, 2)], SPACE)
    with index.plan(prompt, kvtrie.ReusePolicy(), session="chat") as plan:
        sources, numbered = sources_in(index, plan)
        assert plan.num_approximate
    assert (sources, set(numbered)) == ([], {None})


def test_pieces_keep_spaces_and_join_to_the_text() -> None:
    vocabulary = {1: " one", 2: " two", 3: "three", 4: "<end>"}

    def decode(ids: Sequence[int]) -> str:
        # As decoders that drop the first space.
        return "".join(vocabulary[one] for one in ids).removeprefix(" ")

    assert pieces_of(decode, [4, 2, 1, 3, 2]) == vocabulary
    assert pieces_of(decode, []) == {}


def test_a_log_shows_what_earlier_requests_had(tmp_path: Path) -> None:
    log(tmp_path / "log", 40)
    found = traffic_document(tmp_path / "log")
    rows = unpacked(found["requests"])
    assert (found["total"], found["shown"], len(rows)) == (40, 40, 40)
    assert rows[0]["prefix"] is None
    assert rows[0]["seen"] == []
    # The system prompt of another session.
    assert rows[1]["prefix"] == [0, 96]
    # The fourth turn of a chat: 40 tokens are gone, so what follows moved by as many.
    assert rows[15]["prefix"] == [10, 112]
    ((start, end, old, number),) = rows[15]["seen"]
    assert (old - start, number) == (40, 10)
    assert 120 <= start < 136
    assert rows[15]["prompt"] - 48 - 16 < end <= rows[15]["prompt"] - 48
    assert rows[15]["seenMore"] == 0
    assert rows[15]["computed"] == {"diverged": 72}


def test_a_long_log_shows_its_latest_requests(tmp_path: Path) -> None:
    log(tmp_path / "log", 40)
    found = traffic_document(tmp_path / "log", most=10)
    rows = unpacked(found["requests"])
    assert (found["total"], found["shown"], len(rows)) == (40, 10, 10)
    # Of requests that are left out, only that there was one.
    assert rows[0]["prefix"][0] < 0
    assert rows[9]["prefix"][0] == 4
