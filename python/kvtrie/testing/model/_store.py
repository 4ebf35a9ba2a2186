"""The cached entries by whole prefix, their pins, and the eviction order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from kvtrie import Namespace
from kvtrie.testing.model._arguments import Int32, int32
from kvtrie.testing.model._grades import LAXEST, Grade
from kvtrie.testing.model._sequences import Tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtrie.testing.model._groups import Column

Key: TypeAlias = tuple[Namespace, Tokens]


@dataclass
class Entry:
    """The entry of one whole prefix: the block of its last tokens."""

    block: int
    exact: bool
    hops: int
    last_use: int
    tags: list[int]
    """One bit set per token of the block."""
    stay: int
    """The number of this stay of the block id in the index, which ends when the id leaves."""
    sessions: list[str] = field(default_factory=list)
    """The sessions that the block belongs to, the one that came first at the front."""
    mark: int | None = None
    """The call of `mark_dead` that marked it, counted from 1."""
    grade: Grade = LAXEST
    """Of no meaning if it is exact."""


@dataclass
class PlanState:
    """The part of a plan that its index keeps, so that a collected plan can be released."""

    namespace: Namespace
    tokens: Tokens
    epoch: tuple[int, int]
    pinned: bool
    first_approximate: int | None = None
    """The position after which everything inserted with the plan is approximate."""
    hops: list[int] = field(default_factory=list)
    """The hops of each token of the prompt once the plan is applied."""
    pins: set[int] = field(default_factory=set)
    """Blocks pinned together with all blocks above them."""
    source_pins: set[int] = field(default_factory=set)
    """Blocks pinned alone."""
    group_pins: dict[tuple[str, int], int] = field(default_factory=dict)
    """The names of groups with their ids that are pinned; each with the end of its place."""
    first_rebuilt: int | None = None
    """The first token of a window that is rebuilt."""
    grade: Grade | None = None
    """The grade of its policy; None if that allows exact KV only."""
    released: bool = False
    used: bool = False
    """Whether an insert has used the plan."""
    awaits: bool = False
    """Whether `ModelPlan.recompute` must be called before an insert."""
    recomputed: bool = False


def exact_run(entries: Iterable[Entry | None]) -> list[Entry]:
    run = []
    for entry in entries:
        if entry is None or not entry.exact:
            break
        run.append(entry)
    return run


class ModelStore:
    """One dictionary from whole prefixes to entries; everything else is computed from it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._entries: dict[Key, Entry] = {}
        self._condemned: set[int] = set()
        self._waiting: list[int] = []
        # Permanently out of use, including condemned ones.
        self._quarantined: set[int] = set()
        self._plans: list[PlanState] = []
        self._clock = 0
        self._marks = 0
        self._stays = 0
        self._plans_without_scope = 0
        self._columns: dict[str, Column] = {}
        """The groups besides group 0, by name."""

    # --- computed from all entries ----------------------------------------------------------------

    def _path(self, namespace: Namespace, tokens: Tokens) -> list[Key]:
        size = self.block_size
        ends = range(size, len(tokens) + 1, size)
        return [(namespace, tokens[:end]) for end in ends]

    def _above(self, keys: Iterable[Key]) -> set[Key]:
        """All keys above some, present or not."""
        above: set[Key] = set()
        for namespace, tokens in keys:
            for end in range(len(tokens) - self.block_size, 0, -self.block_size):
                key = namespace, tokens[:end]
                if key in above:
                    break
                above.add(key)
        return above

    def _where(self) -> dict[int, Key]:
        return {entry.block: key for key, entry in self._entries.items()}

    def _holes(self) -> set[Key]:
        """Keys of absent blocks with a present block below."""
        return self._above(self._entries) - self._entries.keys()

    def _is_here(self, block: int, stay: int) -> bool:
        return any(entry.block == block and entry.stay == stay for entry in self._entries.values())

    # --- pins -------------------------------------------------------------------------------------

    def _pinned(self) -> set[int]:
        return {block for plan in self._plans for block in plan.pins | plan.source_pins}

    def _pinned_of(self, name: str) -> set[int]:
        """The ids of a group that plans pin."""
        return {block for plan in self._plans for own, block in plan.group_pins if own == name}

    def _holding(self) -> set[Key]:
        """Keys that are pinned together with everything above them."""
        blocks = {block for plan in self._plans for block in plan.pins}
        return {key for key, entry in self._entries.items() if entry.block in blocks}

    def _evictable(self) -> list[Key]:
        """Keys neither pinned nor above a pinned one; dead blocks may be above a source."""
        pinned = self._pinned()
        anchors = {key for key, entry in self._entries.items() if entry.block in pinned}
        above, held = self._above(anchors), self._above(self._holding())
        return [
            key
            for key, entry in self._entries.items()
            if key not in anchors and key not in (above if entry.mark is None else held)
        ]

    # --- groups -----------------------------------------------------------------------------------

    def _hit(self, namespace: Namespace, tokens: Tokens) -> int:
        """The tokens after which every group can continue."""
        exact = exact_run(map(self._entries.get, self._path(namespace, tokens)))
        ends = range(0, len(exact) * self.block_size + 1, self.block_size)
        return max(
            end
            for end in ends
            if all(own.can_continue(namespace, tokens, end) for own in self._columns.values())
        )

    def _need(self, namespace: Namespace, tokens: Tokens, end: int) -> None:
        """Touch what groups have of what they need to continue after `end` tokens."""
        for column in self._columns.values():
            for own in column.needs(tokens, end):
                entry = column.entries.get((namespace, own))
                if entry is not None:
                    entry.last_use, entry.needed = self._clock, True

    # --- using ------------------------------------------------------------------------------------

    def _touch(self, entries: Iterable[Entry]) -> None:
        """Give entries one last use; dead ones lose their mark."""
        self._clock += 1
        for entry in entries:
            entry.last_use, entry.mark = self._clock, None

    # --- leaving ----------------------------------------------------------------------------------

    def _next_victim(self) -> Key | None:
        """The next key to evict: a dead one, else the least recently used end."""
        dead = [key for key in self._evictable() if self._entries[key].mark is not None]
        if dead:
            return min(dead, key=lambda key: (self._entries[key].mark, -len(key[1])))
        return self._oldest_end()

    def _oldest_end(self, *, cut_off: bool = False) -> Key | None:
        """The first unpinned key without a present one below, by last use, depth and id."""
        pinned = self._pinned()
        above = self._above(self._entries)
        holes = above - self._entries.keys()
        return min(
            (
                key
                for key, entry in self._entries.items()
                if key not in above
                and entry.block not in pinned
                and not (cut_off and holes.isdisjoint(self._above([key])))
            ),
            key=lambda key: (
                self._entries[key].last_use,
                -len(key[1]),
                self._entries[key].block,
            ),
            default=None,
        )

    def _pop(self, key: Key) -> int:
        """Remove an entry, and the ids of groups at its place; its block."""
        for name, column in self._columns.items():
            gone = column.entries.pop(key, None)
            if gone is not None:
                pinned = gone.block in self._pinned_of(name)
                (column.condemned if pinned else column.waiting).add(gone.block)
        return self._entries.pop(key).block

    def _left(self, block: int) -> int | None:
        """A block that left; None if it is pinned, and so condemned."""
        if block in self._pinned():
            self._condemned.add(block)
            return None
        return block

    def _out_of_reach(self) -> set[int]:
        """Blocks neither indexed nor held by the caller: no insert takes them."""
        return self._condemned | set(self._waiting) | self._quarantined

    def _forget(self, keys: Iterable[Key]) -> Int32:
        gone = [self._pop(key) for key in list(keys)]
        freed = [block for block in gone if self._left(block) is not None]
        self._settle()
        return int32(freed)

    def _settle(self) -> None:
        """End every call: free released blocks, and bound the number of holes."""
        freed = self._condemned - self._pinned()
        self._condemned -= freed
        self._waiting += sorted(freed - self._quarantined)
        cut_off: list[int] = []
        while len(self._holes()) > self.num_blocks:
            victim = self._oldest_end(cut_off=True)
            if victim is None:
                break
            cut_off.append(self._pop(victim))
        self._waiting += sorted(cut_off)
        for name, column in self._columns.items():
            released = column.condemned - self._pinned_of(name)
            column.condemned -= released
            column.waiting |= released

    def _release(self, state: PlanState) -> None:
        state.released = True
        self._plans = [plan for plan in self._plans if plan is not state]
        self._settle()
