"""The data of a page that shows a plan: where each token of a prompt comes from, and why.

A plan names the position that KV is copied from, and its blocks. `sources_in` finds the cached path
on which each copied segment is, from the copies that the plan itself returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtrie.inspector.pack import packed, packed_json, pieces_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from kvtrie._core import Explanation, RadixIndex, ReusePlan

CLASSES: Final = ("exact", "approximate", "compute")
"""By number, as in `ReusePlan.segments`."""


@dataclass(frozen=True, slots=True, eq=False)
class PlanSource:
    """A cached path, from which a plan takes KV.

    Attributes:
        name: What the page calls it.
        tokens: Its token ids from position 0 on.
        block: A block at its end, if it is one of a snapshot.
    """

    name: str
    tokens: NDArray[np.uint32]
    block: int | None = None

    @classmethod
    def of_prompt(cls, name: str, ids: Sequence[int]) -> PlanSource:
        """All tokens of a prompt that counts as cached."""
        return cls(f"cached: {name}", np.asarray(ids, np.uint32))


def sources_in(index: RadixIndex, plan: ReusePlan) -> tuple[list[PlanSource], list[int | None]]:
    """The paths that a plan takes KV from, and which of them each segment is on.

    None stands for segments that are computed, and for copies whose blocks cannot be named because
    the pool has too few blocks for a block table of the prompt.
    """
    segments, size = plan.segments, index.block_size
    in_place = plan.blocks
    at: dict[int, int] = {}
    if len(in_place):
        at[0] = int(in_place[-1])
    table = _table(index, plan)
    if table is not None:
        for move in plan.moves(table):
            slot = int(move["dest_slot"])
            position = table.index(slot // size) * size + slot % size
            at[position] = int(move["source_slot"]) // size
    blocks: list[int | None] = []
    for one in segments:
        start, end = int(one["start"]), int(one["end"])
        if one["class"] == 2:
            blocks.append(None)
        elif end <= len(in_place) * size:
            blocks.append(int(in_place[-1]))
        else:
            blocks.append(
                max(((p, b) for p, b in at.items() if start <= p < end), default=(0, None))[1]
            )
    return _paths(index, blocks)


def _table(index: RadixIndex, plan: ReusePlan) -> list[int] | None:
    """A block table that the plan's copies are asked for; nothing is written to it."""
    used = {*plan.blocks.tolist(), *plan.source_blocks.tolist()}
    free = (one for one in range(index.num_blocks) if one not in used)
    new = [one for one, _ in zip(free, range(plan.num_new_blocks), strict=False)]
    return [*plan.blocks.tolist(), *new] if len(new) == plan.num_new_blocks else None


def _paths(
    index: RadixIndex, blocks: Sequence[int | None]
) -> tuple[list[PlanSource], list[int | None]]:
    """Paths that none of the others continues."""
    every = {one: index.path_tokens(one) for one in blocks if one is not None}
    paths = {one: path for one, path in every.items() if path is not None}
    kept: list[int] = []
    chosen: dict[int, int] = {}
    for block, path in sorted(paths.items(), key=lambda one: -len(one[1])):
        for number, longer in enumerate(kept):
            if np.array_equal(paths[longer][: len(path)], path):
                chosen[block] = number
                break
        else:
            chosen[block] = len(kept)
            kept.append(block)
    names = [f"cached path {number + 1}" for number in range(len(kept))]
    sources = [
        PlanSource(name, paths[block], block) for name, block in zip(names, kept, strict=True)
    ]
    return sources, [None if one is None else chosen.get(one) for one in blocks]


def plan_document(
    plan: ReusePlan,
    why: Explanation,
    prompt: tuple[str, Sequence[int]],
    sources: tuple[Sequence[PlanSource], Sequence[int | None]],
    *,
    kinds: Sequence[str],
    decode: Callable[[Sequence[int]], str] | None = None,
    node_of: Mapping[int, int] | None = None,
) -> dict[str, Any]:
    """The data of a page, or of the part of a page that shows a plan.

    Args:
        plan: The plan.
        why: Why the exact match ends where it does.
        prompt: Its name and its token ids.
        sources: The cached paths, and for each segment of the plan the number of its own.
        kinds: Names of kinds by bit.
        decode: Decodes token ids, if text is to be shown.
        node_of: The node of each block in a tree on the same page.
    """
    name, tokens = prompt
    paths, numbers = sources
    in_place = len(plan.blocks) * why.block_size
    segments = [
        {
            "start": int(one["start"]),
            "end": int(one["end"]),
            "oldStart": int(one["old_start"]),
            "delta": int(one["delta"]),
            "positionDelta": int(one["position_delta"]),
            "class": CLASSES[int(one["class"])],
            "hops": int(one["hops"]),
            "inPlace": int(one["end"]) <= in_place,
            "source": number,
            "kinds": [kind for bit, kind in enumerate(kinds) if int(one["kinds"]) >> bit & 1],
        }
        for one, number in zip(plan.segments, numbers, strict=True)
    ]
    every = np.unique(
        np.concatenate([np.asarray(tokens, np.uint32), *(one.tokens for one in paths)])
    )
    return {
        "blockSize": why.block_size,
        "prompt": {"name": name, "length": len(tokens), "tokens": packed(tokens)},
        "sources": [
            {
                "name": one.name,
                "length": len(one.tokens),
                "tokens": packed(one.tokens),
                "node": None if node_of is None or one.block is None else node_of.get(one.block),
            }
            for one in paths
        ],
        "segments": segments,
        "movedRuns": [
            {
                "start": one.start,
                "end": one.end,
                "cuts": one.cuts,
                "lostContext": one.lost_context,
                "newContext": one.new_context,
                "sameConversation": one.same_conversation,
            }
            for one in plan.moved_runs
        ],
        "counts": {
            "exact": plan.num_exact,
            "approximate": plan.num_approximate,
            "compute": plan.num_compute,
        },
        "why": {
            "reason": why.reason,
            "position": why.position,
            "message": str(why),
            "start": why.context.start,
            "ours": why.context.ours.tolist(),
            "theirs": why.context.theirs.tolist(),
            "kinds": list(why.kinds),
        },
        "texts": None if decode is None else packed_json(pieces_of(decode, every.tolist())),
    }
