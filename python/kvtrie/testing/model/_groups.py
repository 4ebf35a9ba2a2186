"""Groups of layers besides group 0: their ids by whole prefix, and what they need to continue."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvtrie import BlockInUseError, Group
from kvtrie.testing.model._arguments import Integers, as_count, as_integers, expect
from kvtrie.testing.model._draft import IN_PLACE, Draft

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvtrie import Namespace
    from kvtrie.testing.model._sequences import Tokens
    from kvtrie.testing.model._store import Key

MAX_GROUPS = 15
MAX_NAME = 64
MAX_POSITION = 2**63

Offers: TypeAlias = "dict[str, list[tuple[int, int]]]"
"""Pairs of a position and an id, by the name of the group."""


@dataclass
class GroupEntry:
    """The id of a group at one whole prefix."""

    block: int
    last_use: int
    needed: bool
    """Whether a call has needed it, or it is a state."""


@dataclass
class Column:
    """What one group has. A state is at the whole prefix of the tokens before it."""

    group: Group
    block_size: int
    entries: dict[Key, GroupEntry] = field(default_factory=dict)
    condemned: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)

    def needs(self, tokens: Tokens, end: int) -> list[Tokens]:
        """The whole prefixes at which the group must have ids to continue after `end` tokens."""
        window = self.group.num_window_tokens
        if window is None:
            return [tokens[:end]] if end else []
        first = end - window + 1
        ends = range(self.block_size, end + 1, self.block_size)
        return [tokens[:last] for last in ends if last > first]

    def reads(self, end: int, position: int) -> bool:
        """Whether the token at `position`, or a later one, reads what is at a place up to `end`."""
        window = self.group.num_window_tokens
        if window is None:
            return end >= position
        return end > position - window + 1

    def can_continue(self, namespace: Namespace, tokens: Tokens, end: int) -> bool:
        return all((namespace, own) in self.entries for own in self.needs(tokens, end))

    def last_run(self, namespace: Namespace, tokens: Tokens, end: int) -> list[GroupEntry]:
        """Of what is needed at `end`, the entries without a gap before it."""
        found: list[GroupEntry] = []
        for own in reversed(self.needs(tokens, end)):
            entry = self.entries.get((namespace, own))
            if entry is None:
                break
            found.insert(0, entry)
        return found

    def end_of(self, position: int) -> int:
        """The end of the place of an offer."""
        is_state = self.group.num_window_tokens is None
        return position if is_state else position + self.block_size

    def is_held(self, block: int) -> bool:
        """Whether an id belongs to the caller."""
        indexed = {entry.block for entry in self.entries.values()}
        return block not in indexed | self.condemned | self.waiting

    def next_victim(self, pinned: set[int]) -> Key | None:
        return min(
            (key for key, entry in self.entries.items() if entry.block not in pinned),
            key=lambda key: (
                self.entries[key].needed,
                self.entries[key].last_use,
                -len(key[1]),
                self.entries[key].block,
            ),
            default=None,
        )


def cut(
    known: Iterable[Column], namespace: Namespace, tokens: Tokens, end: int
) -> tuple[str, int] | None:
    """The group that cuts last, each asked in turn for its deepest end, and the end of all."""
    each, agreed, last = list(known), 0, None
    while each and agreed < len(each) and end:
        column = each.pop(0)
        each.append(column)
        ends = range(end, -1, -column.block_size)
        own = next(at for at in ends if column.can_continue(namespace, tokens, at))
        agreed += 1
        if own < end:
            agreed, last, end = 1, column.group.name, own
    return None if last is None else (last, end)


def columns(groups: Iterable[Group], block_size: int) -> dict[str, Column]:
    """Empty columns of groups, which are checked."""
    found: dict[str, Column] = {}
    for number, group in enumerate(groups):
        expect(group, Group, f"groups[{number}]")
        if number == MAX_GROUPS:
            message = f"groups has more than {MAX_GROUPS} groups"
            raise ValueError(message)
        name, window = group.name, group.num_window_tokens
        length = len(name.encode())
        window_blocks = 0 if window is None else -(-(window - 1) // block_size)
        for wrong, what in (
            (not 1 <= length <= MAX_NAME, f"a name of {length} bytes, not 1 to {MAX_NAME}"),
            (
                group.block_size not in {None, block_size},
                f"block_size {group.block_size}, not that of the index, {block_size}",
            ),
            (window is not None and window < 2, f"window {window}, below 2"),
            (
                window_blocks > group.num_blocks,
                f"a window of {window_blocks} blocks, but {group.num_blocks} in its pool",
            ),
            (name in found, "the name of another one"),
        ):
            if wrong:
                message = f"group {name!r} has {what}"
                raise ValueError(message)
        found[name] = Column(group, block_size)
    return found


def column_of(known: Mapping[str, Column], name: str) -> Column:
    expect(name, str, "the name of a group")
    if name not in known:
        message = f"there is no group {name!r}; the index has {list(known) or 'group 0 alone'}"
        raise ValueError(message)
    return known[name]


def read_offers(given: Mapping[str, Integers] | None, known: Mapping[str, Column]) -> Offers:
    if given is None:
        return {}
    if not hasattr(given, "items"):
        message = f"groups is of type {type(given).__name__}, not a mapping of names to pairs"
        raise TypeError(message)
    found: Offers = {}
    for name, pairs in given.items():
        column_of(known, name)
        if name in found:
            message = f"groups has group {name!r} twice"
            raise ValueError(message)
        found[name] = _as_pairs(pairs, f"groups[{name!r}]")
    return found


def _as_pairs(pairs: Integers, what: str) -> list[tuple[int, int]]:
    if hasattr(pairs, "__array__"):
        array = np.asarray(pairs)
        if array.dtype.kind not in "iu":
            message = f"{what} has dtype {array.dtype}, not an integer one"
            raise TypeError(message)
        if array.ndim != 2 or array.shape[1] != 2:
            message = f"{what} has shape {array.shape}, not (n, 2)"
            raise ValueError(message)
        pairs = array.tolist()
    if not isinstance(pairs, list | tuple) or not all(isinstance(p, list | tuple) for p in pairs):
        message = f"{what} is {pairs!r}, not pairs of a position and an id"
        raise TypeError(message)
    for pair in pairs:
        if len(pair) != 2:
            message = f"{what} has {pair!r}, not a pair of a position and an id"
            raise ValueError(message)
    return [(as_count(position, what), as_count(block, what)) for position, block in pairs]


def read_stops(stops: Integers) -> list[int]:
    return as_integers(stops, "stops", MAX_POSITION)


def check_groups(
    offers: Offers, stops: list[int], known: Mapping[str, Column], length: int, block_size: int
) -> None:
    _check_stops(stops, length, block_size)
    _check_offers(offers, known, length)


def _check_stops(stops: list[int], length: int, block_size: int) -> None:
    before = -1
    for stop in stops:
        if stop % block_size or not before < stop <= length:
            message = (
                f"stops has {stop}, not a multiple of {block_size} after {before}, within {length}"
            )
            raise ValueError(message)
        before = stop


def _check_offers(offers: Offers, known: Mapping[str, Column], length: int) -> None:
    for name, pairs in offers.items():
        column = known[name]
        before, seen = -1, set()
        for position, block in pairs:
            end = column.end_of(position)
            is_place = position % column.block_size == 0 and 0 < end <= length
            if not is_place or position <= before:
                message = (
                    f"group {name!r} has position {position}: not a multiple of "
                    f"{column.block_size} after {before}, inside the {length} tokens"
                )
                raise ValueError(message)
            if block >= column.group.num_blocks:
                message = f"group {name!r} has id {block}, outside [0, {column.group.num_blocks})"
                raise ValueError(message)
            before = position
            seen.add(block)
        if len(seen) < len(pairs):
            message = f"group {name!r} has an id twice in {pairs}"
            raise BlockInUseError(message)


def refuse_ids_in_use(
    offers: Offers, known: Mapping[str, Column], namespace: Namespace, tokens: Tokens
) -> None:
    for name, pairs in offers.items():
        column = known[name]
        where = {entry.block: key for key, entry in column.entries.items()}
        for position, block in pairs:
            own = namespace, tokens[: column.end_of(position)]
            if where.get(block, own) != own:
                message = f"group {name!r} has id {block} at another place than {position}"
                raise BlockInUseError(message)


def missing(draft: Draft, window: int, start: int) -> list[tuple[int, list[int]]]:
    """The tokens of which a window lacks KV, for each gap and the prompt's end.

    Each comes with the first token of the gap. `start` is where the group's ids in place begin.
    """
    length = len(draft)

    def is_computed(at: int) -> bool:
        return draft[at] is None

    def is_there(at: int) -> bool:
        origin = draft[at]
        return origin is None or (origin.piece == IN_PLACE and at >= start)

    gaps = [at for at in range(length) if is_computed(at) and (at == 0 or not is_computed(at - 1))]
    found = []
    for gap in [*gaps, length]:
        lacking = [at for at in range(max(0, gap - window + 1), gap) if not is_there(at)]
        if lacking:
            found.append((gap, lacking))
    return found
