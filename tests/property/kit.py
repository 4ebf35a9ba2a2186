"""The index or the model, and short names for what examples ask of either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import kvtrie
from kvtrie import COMPUTED, Item

NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
OTHER = kvtrie.Namespace(model="m", salt="tenant")


@dataclass
class Kit:
    index_class: Any
    sequence_class: Any
    allocator_class: Any

    def index(self, num_blocks: int = 16, block_size: int = 2, **more: Any) -> Any:
        return self.index_class(num_blocks, block_size, **more)

    def seq(self, *parts: Any, ns: Any = NS, items: tuple[Item, ...] = ()) -> Any:
        """A sequence of parts: lists of ids, or text, of which each character is an id."""
        ids = [ord(token) if isinstance(token, str) else token for part in parts for token in part]
        return self.sequence_class(ids, ns, items=items)


def put(index: Any, seq: Any, blocks: list[int], *, source: Any = COMPUTED, **more: Any) -> Any:
    return index.insert(seq, blocks, num_computed=len(seq), source=source, **more)


def result(done: Any) -> tuple[list[int], int, list[int], list[int], list[int]]:
    """(blocks, num_exact, duplicates, surplus, freed)."""
    return (
        done.blocks.tolist(),
        done.num_exact,
        done.duplicates.tolist(),
        done.surplus.tolist(),
        done.freed.tolist(),
    )


def hit(index: Any, seq: Any, **more: Any) -> tuple[int, list[int]]:
    match = index.lookup(seq, touch=False, **more)
    return match.num_tokens, match.blocks.tolist()


def stats(index: Any, *names: str) -> tuple[int, ...]:
    found = index.stats()
    return tuple(getattr(found, name) for name in names)


def rows(plan: Any) -> list[str]:
    """The segments, each as `8-16 a1 from 12`: start, end, class, hops, old start.

    The class is its first letter: exact, approximate, to compute. No hops and an old start that is
    the start are left out.
    """
    return [
        f"{s['start']}-{s['end']} {'eac'[s['class']]}{s['hops'] or ''}"
        + (f" from {s['old_start']}" if s["old_start"] != s["start"] else "")
        for s in plan.segments
    ]


def shown(plan: Any) -> str:
    return ", ".join(rows(plan))


def imported(exact_until: int, hops: int = 1) -> kvtrie.Imported:
    """KV from elsewhere that was built under a policy so strict that all may use it."""
    huge = 2**31
    strict = kvtrie.ReusePolicy(
        min_run=huge,
        max_hops=0,
        max_approximate_share=0.0,
        recompute_first=huge,
        recompute_last=huge,
        max_cuts=0,
        max_lost_context=0.0,
        max_new_context=0.0,
        scope="conversation",
        shared_prefix=huge,
        recompute_share=1.0,
        forbid_kinds=("system", "user", "reasoning", "answer", "tool_call", "tool_result"),
    )
    return kvtrie.Imported(exact_until, hops, strict)
