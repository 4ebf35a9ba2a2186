"""The source of the KV of each prompt token in a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kvtrie import ReusePolicy
from kvtrie.testing.model._cover import Allowed, Piece, Slots, Source, cover
from kvtrie.testing.model._sequences import Tokens, common, sort_key

if TYPE_CHECKING:
    from kvtrie.testing.model._store import Entry

IN_PLACE = 0
"""The number of the piece used in place; copied pieces count from 1."""


class Origin(NamedTuple):
    """The source of one token's KV, and its label once the plan is applied.

    No segment spans two pieces; `exact` and `hops` are those of the token here.
    """

    piece: int
    source: Source
    exact: bool
    hops: int


Draft: TypeAlias = list[Origin | None]
"""One origin per token; None: computed."""


@dataclass(frozen=True)
class Cached:
    """The state of an index that a draft depends on.

    `entries` are the present ones of the namespace, by whole prefix; `kinds` are names, by bit. If
    `is_one_path`, the order of the entries is that of positions.
    """

    entries: dict[Tokens, Entry]
    block_size: int
    min_run: int
    moved_runs: bool
    kinds: tuple[str, ...]
    is_one_path: bool = False


def draft(cached: Cached, tokens: Tokens, keep_last: int, policy: ReusePolicy) -> Draft:
    """Find the source of the KV of each prompt token.

    Whole blocks in place come first, then the exact part of one more block, then the cover.
    """
    limited = tokens[: max(0, len(tokens) - keep_last)]
    forbidden = sum(1 << i for i, kind in enumerate(cached.kinds) if kind in policy.forbid_kinds)
    allowed = Allowed(policy.approximate, cached.moved_runs, policy.max_hops, forbidden)
    used = _in_place(cached, limited, allowed)
    found = _origins(IN_PLACE, used)
    pieces = []
    if policy.partial_blocks:
        pieces += _sibling(cached, limited, len(found))
    if policy.approximate or policy.partial_blocks:
        start = len(found) + sum(len(piece.sources) for piece in pieces)
        by_position = cached.is_one_path
        slots = Slots(limited, cached.entries, cached.block_size, allowed, by_position=by_position)
        pieces += cover(slots, start, policy.min_run or cached.min_run)
    copied = [_origins(number, piece) for number, piece in enumerate(pieces, IN_PLACE + 1)]
    first = _front(copied, policy)
    for piece, origins in zip(pieces, copied, strict=True):
        found += [None] * (piece.start - len(found))
        found += _recomputed(origins, first, policy.recompute_last)
    found += [None] * (len(tokens) - len(found))
    approximate = sum(origin is not None and not origin.exact for origin in found)
    if approximate and approximate / len(tokens) > policy.max_approximate_share:
        exact_only = ReusePolicy(
            approximate=False, min_run=policy.min_run, partial_blocks=policy.partial_blocks
        )
        return draft(cached, tokens, keep_last, exact_only)
    return found


def _in_place(cached: Cached, limited: Tokens, allowed: Allowed) -> Piece:
    """Whole blocks under the same prefix: exact ones, then allowed approximate ones."""
    size = cached.block_size
    sources: list[Source] = []
    for end in range(size, len(limited) + 1, size):
        entry = cached.entries.get(limited[:end])
        if entry is None or not (entry.exact or allowed.in_place(entry)):
            break
        sources += _block(entry, end - size, size)
    return Piece(0, sources, same_prefix=True)


def _sibling(cached: Cached, limited: Tokens, start: int) -> list[Piece]:
    """The exact tokens of the block that shares most with the prompt."""
    size = cached.block_size
    prefix, rest = limited[:start], limited[start:]
    siblings = [
        (-shared, sort_key(tokens[start:]), entry.block, entry)
        for tokens, entry in cached.entries.items()
        if entry.exact and len(tokens) == start + size and tokens[:start] == prefix
        if (shared := common(tokens[start:], rest))
    ]
    if not siblings:
        return []
    shared, *_, entry = min(siblings)
    return [Piece(start, _block(entry, start, -shared), same_prefix=True)]


def _block(entry: Entry, start: int, count: int) -> list[Source]:
    return [Source(entry, offset, start + offset) for offset in range(count)]


def _origins(number: int, piece: Piece) -> Draft:
    """The origins of a piece; another prefix or position adds a hop."""
    moved = not piece.same_prefix
    return [
        Origin(number, source, source.entry.exact and not moved, source.entry.hops + moved)
        for source in piece.sources
    ]


def _approximate(origins: Draft) -> list[int]:
    return [i for i, origin in enumerate(origins) if origin is not None and not origin.exact]


def _front(pieces: list[Draft], policy: ReusePolicy) -> int:
    """The tokens computed at the start of each piece: the fewest that reach the share."""
    if policy.repair != "fronts":
        return policy.recompute_first
    lengths = [len(_approximate(origins)) for origins in pieces]
    wanted = math.ceil(policy.recompute_share * sum(lengths))
    first = 0
    while sum(min(first, length) for length in lengths) < wanted:
        first += 1
    return max(first, policy.recompute_first)


def _recomputed(origins: Draft, first: int, last: int) -> Draft:
    """The origins without the ends of the approximate part that the policy recomputes."""
    part = _approximate(origins)
    again = {*part[:first], *part[max(0, len(part) - last) :]}
    return [None if i in again else origin for i, origin in enumerate(origins)]
