"""Hypothesis strategies for the inputs of an index; see ``docs/testing.md``.

Example:
    >>> from hypothesis import given
    >>> from kvtrie.testing import strategies as kv
    >>> @given(kv.families(), kv.block_sizes())
    ... def test_my_engine(prompts, block_size): ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hypothesis import strategies as st

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "NAMESPACES",
    "Prompt",
    "block_sizes",
    "edits",
    "families",
    "groups",
    "items",
    "namespaces",
    "offers",
    "policies",
    "pool_sizes",
    "prompts",
    "ranges",
    "sessions",
    "sources",
    "spans",
    "stops",
    "token_ids",
]

NAMESPACES: tuple[kvtrie.Namespace, ...] = (
    kvtrie.Namespace(model="model", salt=kvtrie.SHARED),
    kvtrie.Namespace(model="model", salt="tenant"),
    kvtrie.Namespace(model="model", adapter="adapter", salt="tenant"),
)
"""Three namespaces: two differ by the salt, two by the adapter."""

LARGEST_TOKEN = 2**32 - 1
LARGEST_BLOCK_SIZE = 4096
KINDS = ("system", "user", "reasoning", "answer", "mine", "yours")
DIGESTS = (b"a", b"b", b"a longer digest of an image")
POSITIONS = (None, None, None, 1, 2, 5, 40)


@dataclass(frozen=True)
class Prompt:
    """The content of a sequence, as plain values.

    Attributes:
        ids: Token ids.
        namespace: The namespace.
        items: Ranges that represent something else, such as an image.
    """

    ids: tuple[int, ...]
    namespace: kvtrie.Namespace
    items: tuple[kvtrie.Item, ...] = ()

    def sequence(self) -> kvtrie.TokenSequence:
        """A fresh `kvtrie.TokenSequence`."""
        return kvtrie.TokenSequence(list(self.ids), self.namespace, items=self.items)


def namespaces() -> st.SearchStrategy[kvtrie.Namespace]:
    """One of three namespaces."""
    return st.sampled_from(NAMESPACES)


def block_sizes() -> st.SearchStrategy[int]:
    """Mostly 1 to 8, sometimes 16 and 17 (not only powers of two), rarely the largest, 4096."""
    small = st.integers(1, 8)
    return st.one_of(small, small, small, st.sampled_from([16, 17, LARGEST_BLOCK_SIZE]))


def pool_sizes(largest: int = 32) -> st.SearchStrategy[int]:
    """Pool sizes: small, so that eviction happens."""
    return st.integers(1, largest)


def token_ids(alphabet: int = 3) -> st.SearchStrategy[int]:
    """A token id of a small alphabet, which includes the largest valid id."""
    return st.sampled_from([LARGEST_TOKEN, *range(alphabet - 1)])


@st.composite
def items(draw: st.DrawFn, start: int, end: int) -> tuple[kvtrie.Item, ...]:
    """At most two items within `[start, end)`; usually none."""
    found: list[kvtrie.Item] = []
    while start < end and len(found) < 2 and draw(st.integers(0, 3)) == 0:
        first = draw(st.integers(start, end - 1))
        last = draw(st.integers(first + 1, end))
        takes = draw(st.sampled_from(POSITIONS))
        found.append(kvtrie.Item(first, last, draw(st.sampled_from(DIGESTS)), positions=takes))
        start = last
    return tuple(found)


@st.composite
def prompts(
    draw: st.DrawFn, *, max_tokens: int = 24, alphabet: int = 3, with_items: bool = True
) -> Prompt:
    """A prompt of up to `max_tokens` tokens; empty ones are valid and occur."""
    ids = draw(st.lists(token_ids(alphabet), max_size=max_tokens))
    found = draw(items(0, len(ids))) if with_items else ()
    return Prompt(tuple(ids), draw(namespaces()), found)


@st.composite
def edits(draw: st.DrawFn, prompt: Prompt, *, max_tokens: int = 24, alphabet: int = 3) -> Prompt:
    """A prompt that differs from an earlier one by an edit, as histories do.

    Runs are appended, cut off, replaced, removed, inserted or moved. Sometimes the same tokens come
    in another namespace, or with another item.
    """
    ids, namespace, kept = list(prompt.ids), prompt.namespace, prompt.items
    kind = draw(
        st.sampled_from(
            ["append", "append", "cut", "middle", "middle", "delete", "move", "wall", "item"]
        )
    )
    at = len(ids)
    if kind == "append":
        ids += draw(st.lists(token_ids(alphabet), max_size=8))
    elif kind == "cut":
        at = draw(st.integers(0, len(ids)))
        del ids[at:]
    elif kind == "middle":
        at = draw(st.integers(0, len(ids)))
        end = draw(st.integers(at, min(len(ids), at + 4)))
        ids[at:end] = draw(st.lists(token_ids(alphabet), max_size=4))
    elif kind in {"delete", "move"}:
        at = draw(st.integers(0, len(ids)))
        end = draw(st.integers(at, len(ids)))
        part = ids[at:end]
        del ids[at:end]
        if kind == "move":
            to = draw(st.integers(0, len(ids)))
            ids[to:to] = part
            at = min(at, to)
    elif kind == "wall":
        namespace = draw(namespaces())
    else:
        at = draw(st.integers(0, len(ids)))
    ids = ids[:max_tokens]
    at = min(at, len(ids))
    kept = tuple(item for item in kept if item.end <= at)
    if kind in {"append", "item"}:
        kept += draw(items(at, len(ids)))
    return Prompt(tuple(ids), namespace, kept)


@st.composite
def families(
    draw: st.DrawFn, *, max_prompts: int = 8, max_tokens: int = 24, alphabet: int = 3
) -> list[Prompt]:
    """Up to `max_prompts` prompts, each new or an edit of an earlier one: a tree."""
    family = [draw(prompts(max_tokens=max_tokens, alphabet=alphabet))]
    for _ in range(draw(st.integers(0, max_prompts - 1))):
        earlier = draw(st.sampled_from(family))
        family.append(draw(edits(earlier, max_tokens=max_tokens, alphabet=alphabet)))
    return family


@st.composite
def policies(draw: st.DrawFn, *, min_run: int = 8) -> kvtrie.ReusePolicy:
    """A policy: exact KV alone, anything, or something between; `min_run` is the index's."""
    if draw(st.integers(0, 3)) == 0:
        return kvtrie.ReusePolicy(approximate=False, partial_blocks=draw(st.booleans()))
    return kvtrie.ReusePolicy(
        min_run=draw(st.sampled_from([None, None, min_run, min_run + 1])),
        max_hops=draw(st.sampled_from([1, 1, 0, 2, 9])),
        max_approximate_share=draw(st.sampled_from([1.0, 1.0, 0.5, 0.0])),
        recompute_first=draw(st.sampled_from([0, 0, 1, 4])),
        recompute_last=draw(st.sampled_from([0, 0, 1, 4])),
        forbid_kinds=draw(st.sampled_from([(), (), KINDS[2:3], KINDS[1:5]])),
        max_cuts=draw(st.sampled_from([None, None, 0, 1])),
        max_lost_context=draw(st.sampled_from([1.0, 1.0, 0.5, 0.0])),
        max_new_context=draw(st.sampled_from([1.0, 1.0, 0.5, 0.0])),
        scope=draw(st.sampled_from(["namespace", "conversation"])),
        shared_prefix=draw(st.sampled_from([1, 2, 3, 16])),
        recompute_share=draw(st.sampled_from([0.0, 0.0, 0.2, 1.0])),
        partial_blocks=draw(st.booleans()),
    )


@st.composite
def groups(
    draw: st.DrawFn, block_size: int, *, max_groups: int = 3, largest: int = 32
) -> list[kvtrie.Group]:
    """One to `max_groups` groups of layers for an index of this block size.

    Windows are shorter or longer than a block. A pool has at most `largest` ids, or as many as the
    window takes.
    """
    found = []
    for number in range(draw(st.integers(1, max_groups))):
        if draw(st.integers(0, 2)) == 0:
            found.append(
                kvtrie.Group.state(f"states {number}", num_slots=draw(pool_sizes(largest)))
            )
            continue
        window = draw(st.integers(2, 4 * block_size + 2))
        needed = -(-(window - 1) // block_size)
        num_blocks = draw(st.integers(needed, max(needed, largest)))
        found.append(
            kvtrie.Group.window(
                f"window {number}", window=window, num_blocks=num_blocks, block_size=block_size
            )
        )
    return found


@st.composite
def offers(
    draw: st.DrawFn, group: kvtrie.Group, length: int, block_size: int
) -> list[tuple[int, int]]:
    """Pairs of a position and an id for one group, as `insert(groups=)` takes them.

    Places are those of any whole blocks of a sequence, ids any of the pool; both occur once.
    """
    ends = range(block_size, length + 1, block_size)
    chosen = [end for end in ends if draw(st.booleans())][: group.num_blocks]
    back = 0 if group.kind == "state" else block_size
    ids = draw(
        st.lists(
            st.integers(0, group.num_blocks - 1),
            unique=True,
            min_size=len(chosen),
            max_size=len(chosen),
        )
    )
    return [(end - back, block) for end, block in zip(chosen, ids, strict=True)]


@st.composite
def stops(draw: st.DrawFn, length: int, block_size: int) -> list[int]:
    """Some of the positions within a sequence that `insert(stops=)` takes."""
    return [stop for stop in range(0, length + 1, block_size) if draw(st.integers(0, 3)) == 0]


def sessions() -> st.SearchStrategy[str | None]:
    """None, one of a few conversations, or one of more than a block belongs to."""
    few, many = (st.integers(0, most).map("session {}".format) for most in (2, 11))
    return st.one_of(st.none(), few, many)


@st.composite
def ranges(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    """At most three ranges of a sequence, ascending and disjoint; some are adjacent, some empty."""
    count = draw(st.integers(0, 3))
    edges = draw(st.lists(st.integers(0, length), min_size=2 * count, max_size=2 * count))
    edges.sort()
    return list(zip(edges[::2], edges[1::2], strict=True))


def sources(max_tokens: int = 24) -> st.SearchStrategy[object]:
    """Sources of KV other than plans; `exact_until` is at most `max_tokens`."""
    imported = st.builds(
        kvtrie.Imported,
        exact_until=st.integers(0, max_tokens),
        hops=st.integers(0, 3),
        policy=st.one_of(st.none(), policies().filter(lambda policy: policy.approximate)),
    )
    return st.one_of(st.just(kvtrie.COMPUTED), imported)


@st.composite
def spans(draw: st.DrawFn, length: int, *, kinds: Sequence[str] = KINDS) -> list[kvtrie.Span]:
    """At most three spans within a sequence; they may overlap and may be empty."""
    found = []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, length))
        end = draw(st.integers(start, length))
        found.append(kvtrie.Span(start, end, draw(st.sampled_from(kinds))))
    return found
