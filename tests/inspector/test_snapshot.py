"""`read_snapshot` against the naive model, entry by entry, after random calls."""

from __future__ import annotations

from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from tests.property.twin import DroppedError, Twin

import kvtrie
from kvtrie.inspector.snapshot import ABSENT, SnapshotTrees, read_snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

# Some policies forbid kinds that nothing is tagged with.
pytestmark = pytest.mark.filterwarnings("ignore:.* forbids nothing:UserWarning")


def entries(trees: SnapshotTrees) -> Iterator[tuple[Any, dict[str, Any] | None]]:
    """Each block of each edge by its namespace and whole prefix; a hole has no entry."""
    size = trees.block_size
    prefixes: list[tuple[Any, ...]] = []
    for edge in trees.edges:
        above = prefixes[edge.parent] if edge.parent >= 0 else ()
        inside = {
            position: (item.digest, position - item.start, item.positions, item.num_tokens)
            for item in edge.items
            for position in range(item.start, item.end)
        }
        start = edge.depth * size
        assert len(above) == start
        own = tuple(
            inside.get(position, token)
            for position, token in enumerate(edge.tokens.tolist(), start)
        )
        prefixes.append(above + own)
        assert len(edge.tokens) == size * len(edge.blocks) == size * len(edge.last_use)
        for at, block in enumerate(edge.blocks.tolist()):
            depth = edge.depth + at
            end = (depth + 1) * size
            key = trees.spaces[edge.space], prefixes[-1][:end]
            if block == ABSENT:
                yield key, None
                continue
            label = 0 if edge.labels is None else int(edge.labels[at])
            tags = [
                sum(tag.kinds for tag in edge.tags if tag.start <= position < tag.end)
                for position in range(end - size, end)
            ]
            marks = [one.value for one in edge.dead if one.start <= depth < one.end]
            holders = [one.sessions for one in edge.holders if one.start <= depth < one.end]
            yield (
                key,
                {
                    "block": block,
                    "exact": not label >> 15,
                    "hops": label & 255,
                    "last_use": int(edge.last_use[at]),
                    "tags": tags,
                    "mark": marks[0] if marks else None,
                    "sessions": list(holders[0]) if holders else [],
                },
            )


def expected(model: Any) -> dict[Any, dict[str, Any]]:
    def plain(key: Any) -> Any:
        space, tokens = key
        return space, tuple(one if isinstance(one, int) else one[1:] for one in tokens)

    return {
        plain(key): {
            "block": entry.block,
            "exact": entry.exact,
            "hops": 0 if entry.exact else entry.hops,
            "last_use": entry.last_use,
            "tags": entry.tags,
            "mark": entry.mark,
            "sessions": [blake2b(one.encode(), digest_size=16).digest() for one in entry.sessions],
        }
        for key, entry in model._entries.items()
    }


@pytest.mark.parametrize("seed", range(60))
def test_every_block_is_as_in_the_model(seed: int) -> None:
    rng = Random(seed)
    block_size = rng.choice([1, 2, 3, 4, 8])
    twin = Twin(
        rng,
        num_blocks=rng.choice([8, 24, 64]),
        block_size=block_size,
        seed=seed,
        mirror=False,
        alphabet=rng.choice([2, 3]),
        max_tokens=block_size * 16,
        long=seed % 2 == 0,
    )
    try:
        for step in range(120):
            twin.step()
            if step % 10 == 9:
                compare(twin)
    except DroppedError:
        pass
    twin.abandon()


def compare(twin: Twin) -> None:
    trees = read_snapshot(twin.real.snapshot())
    assert trees.clock == twin.real.stats().clock
    assert trees.kinds == twin.real.kinds
    assert (trees.num_blocks, trees.block_size) == (twin.num_blocks, twin.block_size)
    assert [space for space in trees.spaces if space in twin.real.namespaces()] or not trees.edges
    found = list(entries(trees))
    there = {key: entry for key, entry in found if entry is not None}
    assert there == expected(twin.model)
    assert len({key for key, _ in found}) == len(found)
    assert len(found) - len(there) == twin.real.stats().holes


def test_grades_with_later_bounds_are_passed_over() -> None:
    space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    policy = kvtrie.ReusePolicy(repair="adaptive", recompute_share=0.2)
    seq = kvtrie.TokenSequence([1, 2, 3, 4], space)
    source = kvtrie.Imported(2, hops=1, policy=policy)
    index.insert(seq, [5, 6], num_computed=4, source=source)
    blob = index.snapshot()
    assert blob[8] == 7
    (edge,) = read_snapshot(blob).edges
    assert edge.blocks.tolist() == [5, 6]
    assert edge.labels is not None
    assert edge.labels.astype(bool).tolist() == [False, True]


def test_other_versions_and_other_bytes_are_refused() -> None:
    blob = kvtrie.RadixIndex(num_blocks=8).snapshot()
    assert read_snapshot(blob).edges == []
    newer = blob[:8] + (4).to_bytes(4, "little") + blob[12:]
    with pytest.raises(kvtrie.SnapshotError, match="version 4; the inspector reads versions 3"):
        read_snapshot(newer)
    with pytest.raises(kvtrie.SnapshotError, match="no snapshot"):
        read_snapshot(b"hello")
