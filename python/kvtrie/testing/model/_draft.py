"""The source of the KV of each prompt token in a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kvtrie import Namespace, ReusePolicy
from kvtrie.testing.model._contexts import ModelMovedRun, context
from kvtrie.testing.model._cover import Allowed, Piece, Slots, Source, cover
from kvtrie.testing.model._grades import grade_of
from kvtrie.testing.model._sequences import Tokens, common, shift, sort_key

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

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

    namespace: Namespace
    entries: dict[Tokens, Entry]
    block_size: int
    min_run: int
    moved_runs: bool
    kinds: tuple[str, ...]
    is_one_path: bool = False
    session: str | None = None
    moved_end: int | None = None
    paths: Collection[Tokens] = ()
    """The paths of all present entries of the namespace, those that a plan may not use too."""

    def shared_prefix(self, tokens: Tokens, policy: ReusePolicy) -> Tokens | None:
        """The prompt's first blocks, if a cached path begins with them."""
        end = policy.shared_prefix * self.block_size
        shared = tokens[:end]
        is_cached = any(path[:end] == shared for path in self.paths)
        return shared if end <= len(tokens) and is_cached else None

    def scope(self, tokens: Tokens, policy: ReusePolicy) -> Callable[[Tokens, Entry], bool]:
        """Whether moved runs may come from the block at the end of a path (P18)."""
        if policy.scope == "namespace" or self.is_one_path:
            return lambda _path, _entry: True
        return self.conversation(tokens, policy)

    def conversation(self, tokens: Tokens, policy: ReusePolicy) -> Callable[[Tokens, Entry], bool]:
        """Whether the block at the end of a path is of the conversation, whatever the scope."""
        shared = self.shared_prefix(tokens, policy)

        def is_of_conversation(path: Tokens, entry: Entry) -> bool:
            least = 0 if shared is None else min(len(path), len(shared))
            shares = shared is not None and path[:least] == shared[:least]
            return shares or self.session in entry.sessions

        return is_of_conversation

    def is_without_scope(self, tokens: Tokens, keep_last: int, policy: ReusePolicy) -> bool:
        """Whether no moved run is looked for, because nothing is in scope."""
        wanted = policy.approximate and self.moved_runs and policy.max_hops > 0
        has_scope = policy.scope == "namespace" or self.is_one_path or self.session is not None
        if not wanted or has_scope or not self.entries:
            return False
        # The partial block and the blocks in place are those of any policy.
        limited = tokens[: max(0, len(tokens) - keep_last)]
        start = _start_of_cover(self, limited, policy)
        end = len(limited) if self.moved_end is None else min(len(limited), self.moved_end)
        return start < end and self.shared_prefix(tokens, policy) is None


def draft(
    cached: Cached, tokens: Tokens, keep_last: int, policy: ReusePolicy
) -> tuple[Draft, tuple[ModelMovedRun, ...]]:
    """Find the source of the KV of each prompt token, and the moved runs.

    Whole blocks in place come first, then the exact part of one more block, then the cover.
    """
    limited = tokens[: max(0, len(tokens) - keep_last)]
    allowed = _allowed(cached, tokens, policy)
    used = _in_place(cached, limited, allowed)
    found = _origins(IN_PLACE, used)
    pieces = []
    if policy.partial_blocks:
        pieces += _sibling(cached, limited, len(found))
    if policy.approximate or policy.partial_blocks:
        start = len(found) + sum(len(piece.sources) for piece in pieces)
        by_position = cached.is_one_path
        slots = Slots(limited, cached.entries, cached.block_size, allowed, by_position=by_position)
        previous = used.sources[-1] if used.sources else None
        pieces += cover(slots, start, policy.min_run or cached.min_run, previous)
    paths = {id(entry): path for path, entry in cached.entries.items()}
    is_of_conversation = cached.conversation(tokens, policy)
    runs, copied = [], []
    in_place = len(found)
    for number, piece in enumerate(pieces, IN_PLACE + 1):
        found += [None] * (piece.start - len(found))
        whole = _origins(number, piece)
        origins = _recomputed(whole, policy.recompute_first, policy.recompute_last)
        if not piece.same_prefix:
            path = paths[id(piece.sources[-1].entry)]
            run = context(found, piece.start, origins, path, paths)
            if run is None or not run.is_within(policy):
                continue
            left = [origin.source.entry for origin in origins if origin is not None]
            is_own = all(is_of_conversation(paths[id(entry)], entry) for entry in left)
            runs.append(run._replace(same_conversation=is_own))
        copied.append((piece.start, whole))
        found += origins
    # Contexts are those before the share is computed.
    first = _front([origins for _, origins in copied], policy)
    del found[in_place:]
    for start, whole in copied:
        found += [None] * (start - len(found))
        found += _recomputed(whole, first, policy.recompute_last)
    found += [None] * (len(tokens) - len(found))
    approximate = sum(origin is not None and not origin.exact for origin in found)
    if approximate and approximate / len(tokens) > policy.max_approximate_share:
        exact_only = ReusePolicy(
            approximate=False, min_run=policy.min_run, partial_blocks=policy.partial_blocks
        )
        return draft(cached, tokens, keep_last, exact_only)
    return found, tuple(runs)


def position_deltas(cached: Cached, tokens: Tokens, found: Draft) -> list[int]:
    """For each prompt token, its new position minus its old one; 0 if it is computed."""
    paths = {id(entry): path for path, entry in cached.entries.items()}

    def moved(at: int, origin: Origin | None) -> int:
        if origin is None:
            return 0
        old = origin.source.position
        return at + shift(tokens, at) - old - shift(paths[id(origin.source.entry)], old)

    return [moved(at, origin) for at, origin in enumerate(found)]


def _allowed(cached: Cached, tokens: Tokens, policy: ReusePolicy) -> Allowed:
    forbidden = sum(1 << i for i, kind in enumerate(cached.kinds) if kind in policy.forbid_kinds)
    moved_end = len(tokens) if cached.moved_end is None else cached.moved_end
    return Allowed(
        policy.approximate,
        cached.moved_runs,
        policy.max_hops,
        forbidden,
        moved_end,
        cached.scope(tokens, policy),
        grade_of(policy, cached.kinds),
    )


def _start_of_cover(cached: Cached, limited: Tokens, policy: ReusePolicy) -> int:
    """The end of the blocks in place, and of the partial block."""
    start = len(_in_place(cached, limited, _allowed(cached, limited, policy)).sources)
    partial = _sibling(cached, limited, start) if policy.partial_blocks else []
    return start + sum(len(piece.sources) for piece in partial)


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
