"""What a stored run was computed after, and the terms in which a plan describes a moved run.

A gate judges a moved run by how much of its old context comes before it in the prompt (rule P17).
So a run is stored with *marks* of the prompt that it is of: digests of all tokens before each
sixteenth token, and before each border of its runs. Two prompts share the tokens up to the last
position where both have the same mark. Marks need the tenant's key, and say nothing without it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtrie.store.shape import UNIT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from kvtrie._core import ReusePolicy

MAX_MARKS: Final = 1 << 14
"""Marks that a run is stored with at most: some 250,000 tokens."""
_MARK: Final = np.dtype([("position", "<u4"), ("digest", "<u8")])
_MAX_CUTS: Final = 65535
# Of one plan, whose runs beyond them have the worst context.
_MOST_STRETCHES: Final = 256
_MOST_COMPARED: Final = 2048


@dataclass(frozen=True, slots=True, eq=False)
class PrefixMarks:
    """Digests of all tokens before some positions of a prompt.

    Attributes:
        marks: The positions, ascending, and the digests: a structured array with the fields
            ``position`` (uint32) and ``digest`` (uint64).
    """

    marks: NDArray[np.void]
    # The positions, and the digests before each sixteenth token.
    _positions: NDArray[np.uint32] = field(init=False, repr=False)
    _grid: NDArray[np.uint64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        positions = np.ascontiguousarray(self.marks["position"])
        on_grid = positions % UNIT_TOKENS == 0
        object.__setattr__(self, "_positions", positions)
        object.__setattr__(self, "_grid", np.ascontiguousarray(self.marks["digest"][on_grid]))

    @classmethod
    def of(
        cls, key: bytes, tokens: NDArray[np.uint32], positions: Iterable[int] = ()
    ) -> PrefixMarks:
        """The marks of a prompt: at each sixteenth token, and at these positions inside it."""
        num = len(tokens)
        some = {one for one in positions if 0 < one <= num}
        wanted = sorted(some.union(range(UNIT_TOKENS, num + 1, UNIT_TOKENS)))
        whole = memoryview(np.ascontiguousarray(tokens, dtype="<u4").tobytes())
        said = hashlib.blake2b(key=key, digest_size=8, person=b"kvtrie.s.marks")
        digests, done = bytearray(), 0
        for at in wanted:
            said.update(whole[4 * done : 4 * at])
            done = at
            digests += said.copy().digest()
        marks = np.empty(len(wanted), _MARK)
        marks["position"] = wanted
        marks["digest"] = np.frombuffer(digests, "<u8")
        return cls(marks)

    @classmethod
    def read(cls, raw: bytes | memoryview) -> PrefixMarks | None:
        """What `tobytes` has returned; None if it is something else."""
        if len(raw) % _MARK.itemsize or len(raw) > MAX_MARKS * _MARK.itemsize:
            return None
        marks = np.frombuffer(raw, _MARK)
        positions = marks["position"].astype(np.int64)
        grid = positions[positions % UNIT_TOKENS == 0]
        ascends = bool((np.diff(positions, prepend=0) > 0).all())
        is_whole = np.array_equal(grid, np.arange(1, len(grid) + 1) * UNIT_TOKENS)
        return cls(marks) if ascends and is_whole else None

    def tobytes(self) -> bytes:
        """The marks as bytes."""
        return self.marks.tobytes()

    def num_common(self, other: PrefixMarks) -> int:
        """How many tokens two prompts have in common from their beginning, as far as both say."""
        count = min(len(self._grid), len(other._grid))
        differ = np.flatnonzero(self._grid[:count] != other._grid[:count])
        # What differs before one token differs before all that follow.
        common = UNIT_TOKENS * (int(differ[0]) if len(differ) else count)
        mine, others = self._after(common), other._after(common)
        return max((at for at in mine if mine[at] == others.get(at)), default=common)

    def _after(self, position: int) -> dict[int, int]:
        """The marks between a position of the grid and the next one."""
        first = int(np.searchsorted(self._positions, np.uint32(position), side="right"))
        some = self.marks[first : first + UNIT_TOKENS].tolist()
        return {at: digest for at, digest in some if at < position + UNIT_TOKENS}


def with_marks(sizes: Sequence[int], num_bytes: int) -> list[bool]:
    """Which of a turn's runs are stored with its marks: the largest, while marks take no more.

    Each run has the marks of its whole prompt: with all runs of very many short messages, they
    would take many times the KV.

    Args:
        sizes: Bytes of each run.
        num_bytes: Bytes of the marks.
    """
    most = sum(sizes) // max(1, num_bytes)
    largest = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)[:most]
    chosen = [False] * len(sizes)
    for number in largest:
        chosen[number] = True
    return chosen


@dataclass(frozen=True, slots=True)
class SpanContext:
    """What a moved span was computed after.

    Attributes:
        turn: Names the marks of the prompt that it was computed in.
        old_start: Number of its first token there.
        same_conversation: Whether it is of the prompt's session, or its old prompt begins with the
            prompt's shared prefix.
        was_exact: Whether its KV was exact before it moved.
    """

    turn: str
    old_start: int
    same_conversation: bool
    was_exact: bool


@dataclass(frozen=True, slots=True, eq=False)
class PromptContexts:
    """What the contexts of a prompt's moved spans are compared by.

    Attributes:
        own: The marks of the prompt.
        turns: Those of the prompts that its spans were computed in, by `SpanContext.turn`.
        key: Under which marks are made.
    """

    own: PrefixMarks
    turns: dict[str, PrefixMarks]
    key: bytes = field(repr=False)

    def marks_of(self, tokens: NDArray[np.uint32]) -> PrefixMarks:
        """The marks of another prompt, wherever these prompts have some."""
        return PrefixMarks.of(self.key, tokens, self._positions())

    def _positions(self) -> list[int]:
        known = np.concatenate([one.marks["position"] for one in (self.own, *self.turns.values())])
        borders: list[int] = np.unique(known[known % UNIT_TOKENS != 0]).tolist()
        return borders[:MAX_MARKS]


@dataclass(frozen=True, slots=True)
class PathStretch:
    """Consecutive tokens of a prompt that are consecutive tokens of another.

    Attributes:
        start: First token of the prompt.
        end: One past the last.
        old_start: The first token's number in the other.
        path: The other, by a name; None if it is not known.
    """

    start: int
    end: int
    old_start: int
    path: object


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """A moved run in the terms of rule P17, as `kvtrie.MovedRun` has them."""

    start: int
    end: int
    old_start: int
    cuts: int = _MAX_CUTS
    lost_context: float = 1.0
    new_context: float = 1.0
    same_conversation: bool = False

    @property
    def distance(self) -> int:
        """Number of tokens by which the run moves."""
        return abs(self.start - self.old_start)

    def is_within(self, policy: ReusePolicy) -> bool:
        """Whether a policy allows its context."""
        return (
            (policy.max_cuts is None or self.cuts <= policy.max_cuts)
            and self.lost_context <= policy.max_lost_context
            and self.new_context <= policy.max_new_context
        )


class KeptContext:
    """What comes before a moved run in a prompt, from left to right.

    Args:
        paths: Marks by the name of a path. What has another path is kept for no run.
    """

    def __init__(self, paths: dict[Any, PrefixMarks]) -> None:
        self._paths = paths
        self._stretches: list[PathStretch] = []
        self._common: dict[tuple[Any, Any], int] = {}

    def keep(self, stretch: PathStretch) -> None:
        """Keep what is in place, or copied, as context of later runs."""
        last = self._stretches[-1] if self._stretches else None
        if (
            last is not None
            and last.path == stretch.path
            and last.end == stretch.start
            and last.start - last.old_start == stretch.start - stretch.old_start
        ):
            self._stretches[-1] = replace(last, end=stretch.end)
        else:
            self._stretches.append(stretch)

    def num_common(self, one: object, other: object) -> int | None:
        """How many tokens two paths share; None if too many were compared before."""
        if one == other:
            return 1 << 62
        found = self._common.get((one, other))
        if found is None:
            if len(self._common) >= 2 * _MOST_COMPARED:
                return None
            marks, others = self._paths.get(one), self._paths.get(other)
            found = 0 if marks is None or others is None else marks.num_common(others)
            self._common[one, other] = self._common[other, one] = found
        return found

    def judge(self, run: PathStretch, *, same_conversation: bool) -> JudgedRun:
        """The context of a moved run, which is not kept by this."""
        start, old_start = run.start, run.old_start
        is_known = run.path in self._paths and len(self._stretches) <= _MOST_STRETCHES
        if not is_known:
            return JudgedRun(start, run.end, old_start)
        kept, cuts, following = 0, 0, None
        for one in self._stretches:
            common = self.num_common(one.path, run.path)
            if common is None:
                return JudgedRun(start, run.end, old_start)
            last = min(common, old_start)
            count = min(last, one.old_start + one.end - one.start) - one.old_start
            if one.path is None or count <= 0:
                continue
            at = one.start, one.old_start
            cuts += following is not None and following != at
            following = at[0] + count, at[1] + count
            kept += count
        cuts += following is not None and following != (start, old_start)
        return JudgedRun(
            start,
            run.end,
            old_start,
            min(cuts, _MAX_CUTS),
            _without(kept, old_start),
            _without(kept, start),
            same_conversation,
        )


def _without(kept: int, every: int) -> float:
    """The share of tokens that are not kept."""
    return max(0.0, 1.0 - kept / every) if every else 0.0
