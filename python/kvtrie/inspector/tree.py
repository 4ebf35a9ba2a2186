"""The data of a page that shows the trees of a snapshot.

Nodes are numbered so that a node is followed by all below it: first a root per namespace, which has
no blocks, then its edges, the largest subtree first. What can be said of many blocks in a row is
said once: a run is the longest stretch of an edge with the same state, age and holders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtrie._core import SharedSalt
from kvtrie.inspector.pack import packed, packed_json, pieces_of
from kvtrie.inspector.snapshot import ABSENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from kvtrie.inspector.snapshot import SnapshotTrees

EXACT, APPROXIMATE, HOLE, DEAD = 0, 1, 2, 4
"""What a run is; `DEAD` is added to one of the others."""
MOST_TOKENS: Final = 16_000_000
"""Of more tokens, a page has the first ones of each edge only."""
_ROOT: Final = (1 << 32) - 1
_OLDEST: Final = (1 << 32) - 2


@dataclass(frozen=True, slots=True)
class PageTree:
    """The data of a page, and which node each block is in.

    Attributes:
        document: The data: plain values for JSON.
        later: Columns that the first picture does not need.
        node_of: The node of each block id.
        order: The edge of each node; -1 for roots.
    """

    document: dict[str, Any]
    later: dict[str, str]
    node_of: Mapping[int, int]
    order: Sequence[int]


def tree_document(
    trees: SnapshotTrees,
    *,
    decode: Callable[[Sequence[int]], str] | None = None,
    sessions: Mapping[bytes, str] | None = None,
    most_tokens: int = MOST_TOKENS,
) -> PageTree:
    """The data of a page.

    Args:
        trees: What a snapshot holds.
        decode: Decodes token ids, if text is to be shown.
        sessions: Known names of sessions by digest; a page shows others by their digest.
        most_tokens: The most tokens of the page.
    """
    order, parents = _order(trees)
    runs = _BlockRuns(trees, order, sessions or {})
    cut = _cut(trees, order, most_tokens)
    tokens = [trees.edges[edge].tokens[:cut] for edge in order if edge >= 0]
    flat = np.concatenate(tokens) if tokens else np.zeros(0, np.uint32)
    columns = {
        "parent": packed(parents),
        "blocks": packed([_length(trees, edge) for edge in order]),
        **runs.columns,
        **_tags(trees, order),
    }
    texts = {} if decode is None else pieces_of(decode, np.unique(flat).tolist())
    document = {
        "blockSize": trees.block_size,
        "numBlocks": trees.num_blocks,
        "clock": trees.clock,
        "kinds": list(trees.kinds),
        "spaces": _spaces(trees),
        "nodes": len(order),
        "counts": runs.counts,
        "sessions": runs.sessions,
        "sets": runs.sets,
        "items": _items(trees, order),
        "tokensPerEdge": cut,
        "columns": columns,
        "hasTexts": decode is not None,
    }
    later = {"tokens": packed(flat), "ids": packed(runs.ids)}
    if decode is not None:
        later["texts"] = packed_json(texts)
    nodes = (node for node, edge in enumerate(order) if edge >= 0)
    node_of = {
        block: node
        for node in nodes
        for block in trees.edges[order[node]].blocks.tolist()
        if block != ABSENT
    }
    return PageTree(document, later, node_of, order)


def _length(trees: SnapshotTrees, edge: int) -> int:
    return len(trees.edges[edge].blocks) if edge >= 0 else 0


def _order(trees: SnapshotTrees) -> tuple[list[int], list[int]]:
    """The edge of each node, and the node above each."""
    edges = trees.edges
    sizes = [len(edge.blocks) for edge in edges]
    for number in range(len(edges) - 1, -1, -1):
        if edges[number].parent >= 0:
            sizes[edges[number].parent] += sizes[number]
    below: list[list[int]] = [[] for _ in edges]
    firsts: list[list[int]] = [[] for _ in trees.spaces]
    for number, edge in enumerate(edges):
        (below[edge.parent] if edge.parent >= 0 else firsts[edge.space]).append(number)
    order, parents = [], []
    for first in firsts:
        order.append(-1)
        parents.append(_ROOT)
        waiting = [(one, len(order) - 1) for one in sorted(first, key=sizes.__getitem__)]
        while waiting:
            number, parent = waiting.pop()
            order.append(number)
            parents.append(parent)
            node = len(order) - 1
            waiting += [(one, node) for one in sorted(below[number], key=sizes.__getitem__)]
    return order, parents


class _BlockRuns:
    """Runs of blocks with the same state, age and holders, edge by edge."""

    def __init__(
        self, trees: SnapshotTrees, order: Sequence[int], names: Mapping[bytes, str]
    ) -> None:
        edges = [trees.edges[edge] for edge in order if edge >= 0]
        lengths = np.array([_length(trees, edge) for edge in order], np.int64)
        starts = np.cumsum(lengths) - lengths
        own = starts[np.array(order, np.int64) >= 0] if len(order) else starts
        self.ids = _joined([edge.blocks for edge in edges], np.uint32)
        use = _joined([edge.last_use for edge in edges], np.uint64)
        age = np.minimum(np.uint64(trees.clock) - use, np.uint64(_OLDEST)).astype(np.uint32)
        state = np.zeros(len(self.ids), np.uint32)
        held = np.zeros(len(self.ids), np.uint32)
        # The first set is that of blocks which no session holds.
        sets: dict[tuple[bytes, ...], int] = {(): 0}
        for edge, start in zip(edges, own.tolist(), strict=True):
            if edge.labels is not None:
                part = slice(start, start + len(edge.blocks))
                labels = edge.labels.astype(np.uint32)
                state[part] = np.where(labels >> 15, APPROXIMATE | (labels & 255) << 8, EXACT)
            for one in edge.dead:
                state[start + one.start - edge.depth : start + one.end - edge.depth] |= DEAD
            for holder in edge.holders:
                part = slice(start + holder.start - edge.depth, start + holder.end - edge.depth)
                held[part] = sets.setdefault(holder.sessions, len(sets))
        state[self.ids == ABSENT] = HOLE
        # Nobody uses a hole.
        age[self.ids == ABSENT] = _OLDEST + 1
        begins = np.zeros(len(self.ids), np.bool_)
        for column in (state, age, held):
            begins[1:] |= column[1:] != column[:-1]
        begins[own] = True
        firsts = np.flatnonzero(begins)
        counts = np.diff(np.append(np.searchsorted(firsts, starts), len(firsts)))
        self.columns = {
            "runs": packed(counts),
            "runBlocks": packed(np.diff(np.append(firsts, len(self.ids)))),
            "runState": packed(state[firsts]),
            "runAge": packed(age[firsts]),
            "runHeld": packed(held[firsts]),
        }
        digests = sorted({one for several in sets for one in several})
        number = {digest: at for at, digest in enumerate(digests)}
        self.sessions = [{"digest": one.hex(), "name": names.get(one)} for one in digests]
        self.sets = [[number[one] for one in several] for several in sets]
        self.counts = {
            "exact": int((state & 3 == EXACT).sum()),
            "approximate": int((state & 3 == APPROXIMATE).sum()),
            "holes": int((state == HOLE).sum()),
            "dead": int((state & DEAD > 0).sum()),
        }


def _joined(parts: Sequence[NDArray[Any]], kind: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, kind)


def _tags(trees: SnapshotTrees, order: Sequence[int]) -> dict[str, str]:
    """Ranges of positions with kinds; the two halves of the kinds' bits are two columns."""
    edges = [trees.edges[edge].tags if edge >= 0 else () for edge in order]
    every = [tag for tags in edges for tag in tags]
    return {
        "tags": packed([len(tags) for tags in edges]),
        "tagStart": packed([tag.start for tag in every]),
        "tagEnd": packed([tag.end for tag in every]),
        "tagLow": packed([tag.kinds & 0xFFFFFFFF for tag in every]),
        "tagHigh": packed([tag.kinds >> 32 for tag in every]),
    }


def _items(trees: SnapshotTrees, order: Sequence[int]) -> list[list[Any]]:
    return [
        [node, item.start, item.end, item.digest.hex()]
        for node, edge in enumerate(order)
        if edge >= 0
        for item in trees.edges[edge].items
    ]


def _spaces(trees: SnapshotTrees) -> list[dict[str, Any]]:
    """The namespaces; a salt is a secret, so it gets a number."""
    numbers: dict[str, int] = {}
    found = []
    for space in trees.spaces:
        salt = space.salt
        tenant = "shared"
        if not isinstance(salt, SharedSalt):
            tenant = f"tenant {numbers.setdefault(salt, len(numbers) + 1)}"
        found.append(
            {
                "model": space.model,
                "kvDtype": space.kv_dtype,
                "rope": space.rope,
                "adapter": space.adapter,
                "tenant": tenant,
            }
        )
    return found


def _cut(trees: SnapshotTrees, order: Iterable[int], most: int) -> int | None:
    """How many tokens of an edge the page has; None if it has all."""
    lengths = np.array([len(trees.edges[edge].tokens) for edge in order if edge >= 0], np.int64)
    if int(lengths.sum()) <= most:
        return None
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if int(np.minimum(lengths, middle).sum()) <= most:
            low = middle
        else:
            high = middle - 1
    return low
