"""Plans: segments, copies, validity and pins of a draft."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from kvtrie import Item, StaleHandleError
from kvtrie.testing.model._arguments import (
    Int32,
    Int64,
    Integers,
    as_count,
    as_integers,
    as_ranges,
    expect,
    int32,
)
from kvtrie.testing.model._draft import IN_PLACE, Draft, Origin
from kvtrie.testing.model._groups import GroupEntry, column_of, missing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

    from kvtrie.testing.model._contexts import ModelMovedRun
    from kvtrie.testing.model._store import ModelStore, PlanState

EXACT, APPROXIMATE, COMPUTE = range(3)
"""Classes of a segment."""

SEGMENT_DTYPE = np.dtype(
    [
        ("start", "<i8"),
        ("end", "<i8"),
        ("old_start", "<i8"),
        ("delta", "<i8"),
        ("class", "u1"),
        ("hops", "<u2"),
        ("kinds", "<u8"),
        ("position_delta", "<i8"),
    ]
)
SOURCE = 2**64
"""The end of the place of an id of a group that a plan copies from: no position passes it."""

MOVE_DTYPE = np.dtype(
    [("source_slot", "<i8"), ("dest_slot", "<i8"), ("num_tokens", "<i8"), ("delta", "<i8")]
)


def _stretches(draft: Draft) -> list[tuple[int, list[Origin | None]]]:
    """Runs of equal piece, class and hops: the start of each, and its origins."""
    stretches = []
    start = 0
    for _, group in itertools.groupby(draft, _likeness):
        origins = list(group)
        stretches.append((start, origins))
        start += len(origins)
    return stretches


def _likeness(origin: Origin | None) -> tuple[int, bool, int] | None:
    return None if origin is None else (origin.piece, origin.exact, origin.hops)


def _kinds(origins: list[Origin | None]) -> int:
    kinds = 0
    for origin in origins:
        if origin is not None:
            kinds |= origin.source.entry.tags[origin.source.offset]
    return kinds


def _segment(start: int, origins: list[Origin | None], kinds: int, moved: int) -> tuple[int, ...]:
    end, first = start + len(origins), origins[0]
    if first is None:
        return (start, end, start, 0, COMPUTE, 0, 0, 0)
    old = first.source.position
    label = EXACT if first.exact else APPROXIMATE
    return (start, end, old, start - old, label, first.hops, kinds, moved)


def copied_from(draft: Draft) -> set[int]:
    return {
        origin.source.entry.block
        for origin in draft
        if origin is not None and origin.piece != IN_PLACE
    }


def is_moved(origin: Origin | None) -> bool:
    """Whether a token is copied approximately."""
    return origin is not None and origin.piece != IN_PLACE and not origin.exact


class ModelPlan:
    """`kvtrie.ReusePlan`, made by `ModelIndex.plan`."""

    def __init__(
        self,
        index: ModelStore,
        state: PlanState,
        draft: Draft,
        moved_runs: tuple[ModelMovedRun, ...],
        moved_end: int | None,
        parts: Mapping[str, list[GroupEntry]],
        position_deltas: Sequence[int],
        items: tuple[Item, ...],
    ) -> None:
        self.moved_end = moved_end
        self.items = items
        self._position_deltas = position_deltas
        self._index = index
        self._state = state
        self._sources = copied_from(draft)
        # A part of a segment keeps its kinds.
        self._kinds = [
            kinds for _, origins in _stretches(draft) for kinds in [_kinds(origins)] * len(origins)
        ]
        self._moved_runs = moved_runs
        end = sum(origin is not None and origin.piece == IN_PLACE for origin in draft)
        # Of each group, where its ids begin, and the ids.
        self._parts = {
            name: (end - len(part) * index.block_size, [entry.block for entry in part])
            for name, part in parts.items()
        }
        self._set(draft)
        self._in_place = [
            origin.source.entry.block
            for origin in draft[:: index.block_size]
            if origin is not None and origin.piece == IN_PLACE
        ]

    def _set(self, draft: Draft, *, carries: bool = True) -> None:
        self._draft = draft
        stretches = _stretches(draft)
        self._segments = np.array(
            [
                _segment(start, origins, self._kinds[start], self._position_deltas[start])
                for start, origins in stretches
            ],
            dtype=SEGMENT_DTYPE,
        )
        self._used = [_stays(origins) for _, origins in stretches]
        approximate = [at for at, origin in enumerate(draft) if origin and not origin.exact]
        self._carried = {name: self._carry(name) if carries else {} for name in self._parts}
        lacking = [part for name in self._parts for part in self._missing(name)]
        state = self._state
        state.first_approximate = min(
            (*approximate, *(computed_after for computed_after, _ in lacking)), default=None
        )
        state.first_rebuilt = min((tokens[0] for _, tokens in lacking), default=None)
        state.hops = [origin.hops if origin else 0 for origin in draft]

    def _carry(self, name: str) -> dict[int, int]:
        """The tokens that a window lacks and its group has at their sources, with its ids."""
        column = self._index._columns[name]  # noqa: SLF001 - its index
        keys = {id(entry): key for key, entry in self._index._entries.items()}  # noqa: SLF001 - its index
        found = {}
        for token in (token for _, lacking in self._lacking(name) for token in lacking):
            origin = self._draft[token]
            if origin is None or origin.piece == IN_PLACE:
                continue
            key = keys.get(id(origin.source.entry))
            if key is not None and key in column.entries:
                found[token] = column.entries[key].block
        return found

    def pin_carried(self) -> None:
        """Pin what windows take along, until the plan is released."""
        if self._state.pinned:
            for name, carried in self._carried.items():
                for block in carried.values():
                    self._state.group_pins[name, block] = SOURCE

    def _lacking(self, name: str) -> list[tuple[int, list[int]]]:
        window = self._index._columns[name].group.num_window_tokens  # noqa: SLF001 - its index
        return [] if window is None else missing(self._draft, window, self._parts[name][0])

    def _missing(self, name: str) -> list[tuple[int, list[int]]]:
        carried = self._carried[name]
        left = [
            (gap, [token for token in lacking if token not in carried])
            for gap, lacking in self._lacking(name)
        ]
        return [(gap, lacking) for gap, lacking in left if lacking]

    def __repr__(self) -> str:
        return f"ModelPlan({self._in_place}, {self._segments.tolist()})"

    @property
    def blocks(self) -> Int32:
        self._check_live("blocks")
        return int32(self._in_place)

    @property
    def num_new_blocks(self) -> int:
        return -(-len(self._draft) // self._index.block_size) - len(self._in_place)

    @property
    def num_exact(self) -> int:
        return self._count(EXACT)

    @property
    def num_approximate(self) -> int:
        return self._count(APPROXIMATE)

    @property
    def num_compute(self) -> int:
        return self._count(COMPUTE)

    def _count(self, label: int) -> int:
        rows = self._segments[self._segments["class"] == label]
        return int((rows["end"] - rows["start"]).sum())

    @property
    def candidates_dropped(self) -> int:
        return 0

    @property
    def gaps(self) -> Int64:
        rows = self._segments[self._segments["class"] == COMPUTE]
        return np.stack([rows["start"], rows["end"]], axis=1).astype(np.int64)

    @property
    def segments(self) -> npt.NDArray[np.void]:
        return self._segments.copy()

    @property
    def moved_runs(self) -> tuple[ModelMovedRun, ...]:
        return self._moved_runs

    @property
    def source_blocks(self) -> Int32:
        self._check_live("source_blocks")
        return int32(sorted(self._sources))

    @property
    def released(self) -> bool:
        return self._state.released

    @property
    def pinned(self) -> bool:
        return self._state.pinned

    def moves(
        self,
        table: Integers,
        start: int = 0,
        end: int | None = None,
        *,
        group: str | None = None,
    ) -> npt.NDArray[np.void]:
        num_blocks = self._index.num_blocks
        carried = None
        if group is not None:
            self._part("moves", group, "window")
            carried = self._carried[group]
            num_blocks = self._index._columns[group].group.num_blocks  # noqa: SLF001 - its index
        ids = as_integers(table, "table", num_blocks)
        size = self._index.block_size
        length = len(self._draft)
        start = as_count(start, "start")
        end = length if end is None else as_count(end, "end")
        if not start <= end <= length:
            message = f"the range [{start}, {end}) is not in [0, {length}]"
            raise ValueError(message)
        self._check_live("moves")
        if group is None or carried is None:
            self._check_table(ids, start // size, -(-end // size))
        else:
            self._check_group_table(ids, group, [at for at in carried if start <= at < end], end)
        moves: list[list[int]] = []
        for position in range(start, end):
            origin = self._draft[position]
            if origin is None or origin.piece == IN_PLACE:
                continue
            if carried is not None and position not in carried:
                continue
            dest, source = ids[position // size], origin.source
            goes_on = (
                moves
                and position % size
                and source.offset
                and position > start
                and _likeness(self._draft[position - 1]) == _likeness(origin)
                and (carried is None or position - 1 in carried)
            )
            if goes_on:
                moves[-1][2] += 1
            else:
                block = source.entry.block if carried is None else carried[position]
                source_slot = block * size + source.offset
                dest_slot = dest * size + position % size
                moves.append([source_slot, dest_slot, 1, self._position_deltas[position]])
        return np.array([tuple(move) for move in moves], dtype=MOVE_DTYPE)

    def _check_live(self, call: str) -> None:
        if self._state.released:
            message = f"{call}: the plan was released"
            raise StaleHandleError(message)

    def _check_table(self, ids: list[int], first: int, needed: int) -> None:
        front = list(zip(ids, self._in_place, strict=False))
        written = ids[max(first, len(self._in_place)) : needed]
        for wrong, message in (
            (len(ids) < needed, f"table has {len(ids)} blocks; it needs {needed}"),
            (any(given != own for given, own in front), "table does not start with blocks"),
            (len(set(ids)) < len(ids), "table has a block twice"),
            (not self._sources.isdisjoint(written), "table has a source of the plan"),
        ):
            if wrong:
                raise ValueError(message)

    def _check_group_table(self, ids: list[int], name: str, copied: list[int], end: int) -> None:
        size = self._index.block_size
        if len(ids) < -(-end // size):
            message = f"table has {len(ids)} blocks; it needs {-(-end // size)}"
            raise ValueError(message)
        written = [ids[at] for at in sorted({position // size for position in copied})]
        read = {*self._carried[name].values(), *self._parts[name][1]}
        if len(set(written)) < len(written) or not read.isdisjoint(written):
            message = "table has a block twice, or one that the plan reads"
            raise ValueError(message)

    def recompute(self, ranges: Iterable[tuple[int, int]]) -> None:
        given = [(as_count(start, "start"), as_count(end, "end")) for start, end in ranges]
        self._check_live("recompute")
        chosen = {
            token
            for start, end in as_ranges(given, len(self._draft))
            for token in range(start, end)
        }
        state = self._state
        late = state.used or state.recomputed
        if late or not all(is_moved(self._draft[token]) for token in chosen):
            message = "recompute: a token is not in a moved run, or the plan was used"
            raise ValueError(message)
        draft = [None if i in chosen else origin for i, origin in enumerate(self._draft)]
        # Other prompts may have the ids of sources that are not pinned.
        self._set(draft, carries=bool(state.source_pins))
        self.pin_carried()
        state.recomputed = True

    def _part(self, call: str, name: str, kind: str) -> tuple[int, list[int]]:
        expect(name, str, "name")
        self._check_live(call)
        group = column_of(self._index._columns, name).group  # noqa: SLF001 - a part of its index
        if group.kind != kind:
            message = f"{call}: group {name!r} is one with a {group.kind}"
            raise ValueError(message)
        return self._parts[name]

    def group(self, name: str) -> tuple[int, Int32]:
        start, blocks = self._part("group", name, "window")
        return start, int32(blocks)

    def state(self, name: str) -> int | None:
        _, blocks = self._part("state", name, "state")
        return blocks[0] if blocks else None

    def rebuild(self, name: str) -> Int64:
        self._part("rebuild", name, "window")
        tokens = sorted({token for _, lacking in self._missing(name) for token in lacking})
        starts = [token for token in tokens if token - 1 not in tokens]
        ends = [token + 1 for token in tokens if token + 1 not in tokens]
        return np.array([starts, ends], dtype=np.int64).T

    def advance(self, position: int) -> None:
        position = as_count(position, "position")
        self._check_live("advance")
        state, index = self._state, self._index
        state.group_pins = {
            (name, block): end
            for (name, block), end in state.group_pins.items()
            if index._columns[name].reads(end, position)  # noqa: SLF001 - a part of its index
        }
        index._settle()  # noqa: SLF001 - a plan is part of its index

    def validate(self) -> npt.NDArray[np.bool_]:
        state, answers = self._state, []
        is_here = self._index._is_here  # noqa: SLF001 - a plan is part of its index
        for segment, used in zip(self._segments, self._used, strict=True):
            in_place = segment["start"] < len(self._in_place) * self._index.block_size
            pins = state.pins if in_place else state.source_pins
            live = set() if state.released else pins
            answers.append(all(block in live or is_here(block, stay) for block, stay in used))
        return np.array(answers, dtype=np.bool_)

    def release_sources(self) -> None:
        self._check_live("release_sources")
        self._state.source_pins.clear()
        self._index._settle()  # noqa: SLF001 - a plan is part of its index

    def release(self) -> None:
        self._check_live("release")
        self._index._release(self._state)  # noqa: SLF001 - a plan is part of its index

    def __enter__(self) -> Self:
        self._check_live("with")
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._state.released:
            self.release()

    def __del__(self) -> None:
        if not self._state.released:
            self.release()
            warnings.warn("a plan was collected unreleased", ResourceWarning, stacklevel=2)


def _stays(origins: Iterable[Origin | None]) -> list[tuple[int, int]]:
    entries = [origin.source.entry for origin in origins if origin is not None]
    return list(dict.fromkeys((entry.block, entry.stay) for entry in entries))
