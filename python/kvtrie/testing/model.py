"""A naive model of the index, to test engines and the index itself against.

`ModelIndex` answers the same calls as `kvtrie.RadixIndex`, with the same arguments, results and
exceptions, and keeps no data structure worth the name: one dictionary from a namespace and a whole
token prefix to what is cached there. Everything else (what may be evicted, where the holes are,
what is pinned) is found by looking at all of it, every time. That makes it slow, and short enough
to be read beside the rules that it follows:

* a block is shared only whole, and only below `num_computed`;
* one block id backs at most one entry, and one prefix has at most one entry;
* a match is the longest run of present exact blocks from position 0;
* exact replaces approximate, fewer hops replace more, and else the first writer stays;
* what is pinned never leaves the caller's hands twice: it is condemned, and `take_freed` names it
  after its last release;
* blocks leave by last use, deepest, lowest id, and only from the ends.

Use it for the tests of an engine: run the engine once on `RadixIndex` and once on `ModelIndex`
with the same seed, and compare. Sequences are `ModelSequence` (which keeps nothing but ids and
items) or `kvtrie.TokenSequence`; plans are `ModelPlan` and belong to the model that made them.

Example:
    >>> import kvtrie
    >>> from kvtrie.testing.model import ModelIndex, ModelSequence
    >>> ns = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    >>> index = ModelIndex(num_blocks=8, block_size=2)
    >>> seq = ModelSequence([1, 2, 3, 4, 5], ns)
    >>> done = index.insert(seq, [7, 3, 5], num_computed=5, source=kvtrie.COMPUTED)
    >>> done.blocks.tolist(), done.surplus.tolist()
    ([7, 3], [5])
    >>> index.lookup(ModelSequence([1, 2, 3, 9], ns)).num_tokens
    2
"""

from __future__ import annotations

import array
import hashlib
import itertools
import operator
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt

from kvtrie import (
    COMPUTED,
    EXACT_ONLY,
    BlockInUseError,
    Imported,
    Item,
    KvTrieError,
    Namespace,
    OutOfBlocksError,
    ReusePolicy,
    Span,
    StaleHandleError,
    TokenSequence,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

__all__ = [
    "ModelAllocator",
    "ModelIndex",
    "ModelInsertBatch",
    "ModelInsertResult",
    "ModelMatch",
    "ModelMatchBatch",
    "ModelPlan",
    "ModelPlanBatch",
    "ModelSequence",
    "ModelStats",
]

Token: TypeAlias = int | tuple[int, bytes, int]
"""What two positions are compared by: the id, or inside an item (id, digest, offset in it)."""

Tokens: TypeAlias = tuple[Token, ...]
Key: TypeAlias = tuple[Namespace, Tokens]
Int32: TypeAlias = npt.NDArray[np.int32]
Int64: TypeAlias = npt.NDArray[np.int64]
Integers: TypeAlias = Any
"""Anything that holds integers: list, tuple, array, memoryview, numpy, CPU tensor."""

T = TypeVar("T")
Source: TypeAlias = Any
"""A plan, `kvtrie.COMPUTED`, or `kvtrie.Imported(...)`."""

FIRST_KINDS = ("system", "user", "reasoning", "answer", "tool_call", "tool_result", "lookahead")
MAX_KINDS = 64
MAX_BLOCKS = 2**31
MAX_BLOCK_SIZE = 4096
MAX_HASH_BITS = 64
MAX_SEED = 2**64 - 1
MIN_MIN_RUN = 8
MAX_DIGEST = 64
TOKEN_LIMIT = 2**32
EXACT, COMPUTE = 0, 2
"""Classes of a segment (1, approximate, is not planned yet)."""

SEGMENT_DTYPE = np.dtype(
    [
        ("start", "<i8"),
        ("end", "<i8"),
        ("old_start", "<i8"),
        ("delta", "<i8"),
        ("class", "u1"),
        ("hops", "<u2"),
        ("kinds", "<u8"),
    ]
)
MOVE_DTYPE = np.dtype(
    [("source_slot", "<i8"), ("dest_slot", "<i8"), ("num_tokens", "<i8"), ("delta", "<i8")]
)


# --- arguments ------------------------------------------------------------------------------------


def _count(value: object, what: str, low: int = 0) -> int:
    """`value` as an int of at least `low`; bool and float are no counts."""
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        message = f"{what} is {value!r}, not an integer"
        raise TypeError(message)
    number = operator.index(value)
    if number < low:
        message = f"{what} is {number}, below {low}"
        raise ValueError(message)
    return number


def _instance(value: object, kind: type, what: str) -> None:
    """Refuse what is not of its type."""
    if not isinstance(value, kind):
        message = f"{what} is of type {type(value).__name__}, not {kind.__name__}"
        raise TypeError(message)


def _flag(value: object, what: str) -> bool:
    """`value` if it is a bool."""
    if not isinstance(value, bool | np.bool_):
        message = f"{what} is {value!r}, not a bool"
        raise TypeError(message)
    return bool(value)


def _integers(values: Integers, what: str, limit: int) -> list[int]:
    """`values` as a list of ints in `0..limit`; every type that could hide a mistake is refused."""
    if isinstance(values, list | tuple):
        numbers = [_count(value, f"{what}[{i}]", -TOKEN_LIMIT) for i, value in enumerate(values)]
    else:
        if isinstance(values, str | bytes | bytearray) or not (
            isinstance(values, memoryview | array.array) or hasattr(values, "__array__")
        ):
            message = f"{what} is a {type(values).__name__}, not a list or an array of integers"
            raise TypeError(message)
        data = np.asarray(values)
        if data.dtype.kind not in "iu":
            message = f"{what} has dtype {data.dtype}, not an integer one"
            raise TypeError(message)
        if data.ndim != 1:
            message = f"{what} has {data.ndim} dimensions, not 1"
            raise ValueError(message)
        numbers = data.tolist()
    for number in numbers:
        if not 0 <= number < limit:
            message = f"{what} holds {number}, outside 0..{limit}"
            raise ValueError(message)
    return numbers


def _ids(numbers: Iterable[int]) -> Int32:
    return np.array(list(numbers), dtype=np.int32)


def _effective(ids: Sequence[int], items: Sequence[Item]) -> Tokens:
    """The tokens that are compared: in an item, the id with the item's digest and the offset."""
    tokens: list[Token] = list(ids)
    for item in items:
        for position in range(item.start, item.end):
            tokens[position] = (ids[position], bytes(item.digest), position - item.start)
    return tuple(tokens)


def _sort_key(tokens: Tokens) -> list[tuple[int, int, bytes, int]]:
    """Orders tokens by (id, item or none), none first."""
    return [(t, 0, b"", 0) if isinstance(t, int) else (t[0], 1, t[1], t[2]) for t in tokens]


def _common(left: Tokens, right: Tokens) -> int:
    """How many tokens `left` and `right` share from the front."""
    for n, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return n
    return min(len(left), len(right))


# --- sequences ------------------------------------------------------------------------------------


class ModelSequence:
    """Token ids from position 0 in a namespace: `kvtrie.TokenSequence` without any memory.

    Args:
        ids: Token ids, each in `0..2**32`.
        namespace: What the KV depends on besides the tokens.
        items: Ranges that stand for something else (an image), ascending and disjoint.
    """

    def __init__(self, ids: Integers, namespace: Namespace, items: Sequence[Item] = ()) -> None:
        _instance(namespace, Namespace, "namespace")
        self._namespace = namespace
        self._ids: list[int] = []
        self._items: list[Item] = []
        self._tokens: Tokens = ()
        self.extend(ids, items)

    @property
    def namespace(self) -> Namespace:
        """The namespace that the sequence lives in."""
        return self._namespace

    @property
    def items(self) -> tuple[Item, ...]:
        """The items, in order of position."""
        return tuple(self._items)

    @property
    def tokens(self) -> Tokens:
        """The tokens as they are compared; `kvtrie.TokenSequence` has no such property."""
        return self._tokens

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, where: int) -> int: ...

    @overload
    def __getitem__(self, where: slice) -> npt.NDArray[np.uint32]: ...

    def __getitem__(self, where: int | slice) -> int | npt.NDArray[np.uint32]:
        if isinstance(where, slice):
            return np.array(self._ids[where], dtype=np.uint32)
        return self._ids[where]

    def __repr__(self) -> str:
        return f"ModelSequence({self._ids}, {self._namespace}, items={self._items})"

    def extend(self, ids: Integers, items: Sequence[Item] = ()) -> None:
        """Append `ids`; `items` are given by their positions in the whole sequence.

        Args:
            ids: More token ids.
            items: Items that lie within the new ids.
        """
        new = _integers(ids, "ids", TOKEN_LIMIT)
        end = len(self._ids)
        for item in items:
            _instance(item, Item, "an item")
            if not end <= item.start < item.end <= len(self._ids) + len(new):
                message = f"{item!r} is empty, overlaps another or leaves the new ids"
                raise ValueError(message)
            end = item.end
        self._ids += new
        self._items += items
        self._tokens = _effective(self._ids, self._items)

    def truncate(self, n: int) -> None:
        """Forget everything from position `n` on; an item that is cut ends there.

        Args:
            n: The new length, at most the present one.
        """
        n = _count(n, "n")
        if n > len(self._ids):
            message = f"truncate to {n}, but the sequence has {len(self._ids)} tokens"
            raise ValueError(message)
        del self._ids[n:]
        self._items = [
            item if item.end <= n else Item(item.start, n, item.digest)
            for item in self._items
            if item.start < n
        ]
        self._tokens = _effective(self._ids, self._items)


AnySequence: TypeAlias = ModelSequence | TokenSequence


def _read(seq: AnySequence) -> tuple[Namespace, Tokens]:
    """Namespace and compared tokens of a sequence, read anew at every call."""
    if isinstance(seq, ModelSequence):
        return seq.namespace, seq.tokens
    _instance(seq, TokenSequence, "seq")
    return seq.namespace, _effective(seq[0 : len(seq)].tolist(), seq.items)


# --- results --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelMatch:
    """What `lookup` found: tokens from 0, and the blocks from `start` on."""

    num_tokens: int
    blocks: Int32


@dataclass(frozen=True)
class ModelInsertResult:
    """What `insert` did; attributes as those of `kvtrie.InsertResult`."""

    blocks: Int32
    num_exact: int
    duplicates: Int32
    surplus: Int32
    freed: Int32


@dataclass(frozen=True)
class ModelStats:
    """The counts of `kvtrie.IndexStats` that do not depend on how the index is built."""

    indexed: int
    condemned: int
    waiting: int
    pinned: int
    evictable: int
    approximate: int
    holes: int
    live_plans: int
    clock: int
    unknown_discards: int


@dataclass(frozen=True)
class ModelMatchBatch:
    """What `lookup_many` found, flat, with offsets."""

    num_tokens: Int64
    blocks: Int32
    offsets: Int64
    errors: dict[int, Exception]


@dataclass(frozen=True)
class ModelPlanBatch:
    """What `plan_many` made; a plan that failed is None."""

    plans: list[ModelPlan | None]
    blocks: Int32
    offsets: Int64
    num_new_blocks: Int64
    errors: dict[int, Exception]


@dataclass(frozen=True)
class ModelInsertBatch:
    """What `insert_many` did, flat, with offsets."""

    blocks: Int32
    offsets: Int64
    num_exact: Int64
    duplicates: Int32
    duplicate_offsets: Int64
    surplus: Int32
    surplus_offsets: Int64
    freed: Int32
    freed_offsets: Int64
    errors: dict[int, Exception]


def _flat(parts: Sequence[Int32]) -> tuple[Int32, Int64]:
    offsets = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
    return (np.concatenate(parts) if parts else _ids([])), offsets


# --- the index ------------------------------------------------------------------------------------


@dataclass
class _Entry:
    """What is cached under one whole prefix: the block that holds its last tokens."""

    block: int
    exact: bool
    hops: int
    stamp: int
    tags: list[int]
    """One bit set a token of the block."""
    stay: int
    """A number for this stay of this block id in the index: when the id leaves, it ends."""


@dataclass
class _PlanState:
    """The part of a plan that its index keeps, so that a collected plan can be released."""

    namespace: Namespace
    tokens: Tokens
    epoch: tuple[int, int]
    pinned: bool
    first_approximate: int | None = None
    pins: set[int] = field(default_factory=set)
    source_pins: set[int] = field(default_factory=set)
    released: bool = False


def _exact_run(entries: Iterable[_Entry | None]) -> list[_Entry]:
    """The entries before the first that is absent or approximate."""
    run = []
    for entry in entries:
        if entry is None or not entry.exact:
            break
        run.append(entry)
    return run


class ModelIndex:
    """`kvtrie.RadixIndex`, as a dictionary from whole prefixes to entries.

    `seed` and `hash_bits` are accepted and ignored: results do not depend on them. `digest()` is
    the model's own and equals that of another model that was fed the same calls, never that of a
    `RadixIndex`. `stats()` has the counts that do not depend on how an index is built.

    Args:
        num_blocks: Block ids lie in `0..num_blocks`.
        block_size: Tokens a block.
        min_run: At least 8; kept for the moved runs of a later version.
        max_candidates: Likewise.
        moved_runs: Likewise.
        seed: Ignored.
        hash_bits: Ignored.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        min_run: int = 16,
        max_candidates: int = 64,
        moved_runs: bool = True,
        seed: int = 0,
        hash_bits: int = 64,
    ) -> None:
        self.num_blocks = _count(num_blocks, "num_blocks", 1)
        self.block_size = _count(block_size, "block_size", 1)
        self.min_run = _count(min_run, "min_run", MIN_MIN_RUN)
        self.max_candidates = _count(max_candidates, "max_candidates")
        self.moved_runs = _flag(moved_runs, "moved_runs")
        self.seed = _count(seed, "seed")
        self.hash_bits = _count(hash_bits, "hash_bits")
        for name, limit in (
            ("num_blocks", MAX_BLOCKS),
            ("block_size", MAX_BLOCK_SIZE),
            ("seed", MAX_SEED),
            ("hash_bits", MAX_HASH_BITS),
        ):
            if getattr(self, name) > limit:
                message = f"{name} is {getattr(self, name)}, above {limit}"
                raise ValueError(message)
        self._entries: dict[Key, _Entry] = {}
        self._condemned: set[int] = set()
        self._waiting: list[int] = []
        self._plans: list[_PlanState] = []
        self._clock = 0
        self._stays = 0
        self._kinds = list(FIRST_KINDS)
        self._unknown_discards = 0
        self._resets = 0
        self._drops: dict[Namespace, int] = {}

    # --- looking at all of it ---------------------------------------------------------------------

    def _path(self, namespace: Namespace, tokens: Tokens) -> list[Key]:
        """The keys of all full blocks of a sequence."""
        size = self.block_size
        ends = range(size, len(tokens) + 1, size)
        return [(namespace, tokens[:end]) for end in ends]

    def _above(self, keys: Iterable[Key]) -> set[Key]:
        """The keys of everything strictly above `keys`, present or not."""
        size = self.block_size
        return {(ns, tokens[:end]) for ns, tokens in keys for end in range(size, len(tokens), size)}

    def _last_tokens(self, key: Key) -> Tokens:
        """The tokens of the block itself."""
        return key[1][-self.block_size :]

    def _where(self) -> dict[int, Key]:
        return {entry.block: key for key, entry in self._entries.items()}

    def _pinned(self) -> set[int]:
        return {block for plan in self._plans for block in plan.pins | plan.source_pins}

    def _holes(self) -> set[Key]:
        """Absent blocks below which something is present."""
        return self._above(self._entries) - self._entries.keys()

    def _evictable(self) -> list[Key]:
        """What is neither pinned nor above something pinned."""
        pinned = self._pinned()
        anchors = {key for key, entry in self._entries.items() if entry.block in pinned}
        kept = anchors | self._above(anchors)
        return [key for key in self._entries if key not in kept]

    def _next_victim(self, *, cut_off: bool = False) -> Key | None:
        """The unpinned block with nothing present below that leaves next.

        Args:
            cut_off: Only among the blocks that have a hole above them.
        """
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
                self._entries[key].stamp,
                -len(key[1]),
                self._entries[key].block,
            ),
            default=None,
        )

    def _epoch(self, namespace: Namespace) -> tuple[int, int]:
        return self._resets, self._drops.get(namespace, 0)

    def _exact_blocks(self, namespace: Namespace, tokens: Tokens) -> list[_Entry]:
        """The entries of the longest run of present exact blocks from position 0."""
        return _exact_run([self._entries.get(key) for key in self._path(namespace, tokens)])

    # --- leaving ----------------------------------------------------------------------------------

    def _remove(self, key: Key) -> int | None:
        """Take an entry out; its id, or None when it is pinned and thereby condemned."""
        block = self._entries.pop(key).block
        return self._left(block)

    def _left(self, block: int) -> int | None:
        if block in self._pinned():
            self._condemned.add(block)
            return None
        return block

    def _settle(self) -> None:
        """End of every call: what was released comes free, and the holes are kept in bounds."""
        freed = self._condemned - self._pinned()
        self._condemned -= freed
        self._waiting += sorted(freed)
        cut_off: list[int] = []
        while len(self._holes()) > self.num_blocks:
            victim = self._next_victim(cut_off=True)
            if victim is None:
                break
            cut_off.append(self._entries.pop(victim).block)
        self._waiting += sorted(cut_off)

    def _forget(self, keys: Iterable[Key]) -> Int32:
        """Take entries out; the ids that are free now."""
        freed = [block for block in map(self._remove, list(keys)) if block is not None]
        self._settle()
        return _ids(freed)

    # --- reading ----------------------------------------------------------------------------------

    def lookup(
        self, seq: AnySequence, *, keep_last: int = 0, touch: bool = True, start: int = 0
    ) -> ModelMatch:
        """Find the longest run of present exact blocks from position 0.

        Args:
            seq: What to look for.
            keep_last: So many tokens at the end are not matched.
            touch: Whether this counts as use.
            start: Blocks before this position are not listed.

        Returns:
            The tokens matched, counted from 0, and the blocks from `start` on.
        """
        namespace, tokens = _read(seq)
        keep_last = _count(keep_last, "keep_last")
        touch = _flag(touch, "touch")
        start = self._start(start, tokens)
        found = self._exact_blocks(namespace, tokens[: max(0, len(tokens) - keep_last)])
        if touch:
            self._clock += 1
            for entry in found:
                entry.stamp = self._clock
        self._settle()
        blocks = [entry.block for entry in found[start // self.block_size :]]
        return ModelMatch(len(found) * self.block_size, _ids(blocks))

    def _start(self, start: int, tokens: Tokens) -> int:
        start = _count(start, "start")
        if start % self.block_size or start > len(tokens):
            message = f"start is {start}: no multiple of {self.block_size} within {len(tokens)}"
            raise ValueError(message)
        return start

    def plan(
        self,
        seq: AnySequence,
        policy: ReusePolicy | None = None,
        *,
        keep_last: int = 1,
        pin: bool = True,
    ) -> ModelPlan:
        """Say how to build the KV of a prompt.

        Args:
            seq: The prompt.
            policy: What may be reused, None being `EXACT_ONLY`; approximate reuse is refused yet.
            keep_last: So many tokens at the end are left to compute.
            pin: Whether what the plan uses stays until it is released.

        Returns:
            The plan: whole exact blocks in place, then the exact tokens of one more, copied.
        """
        namespace, tokens = _read(seq)
        policy = EXACT_ONLY if policy is None else policy
        _instance(policy, ReusePolicy, "policy")
        keep_last = _count(keep_last, "keep_last")
        pin = _flag(pin, "pin")
        if policy.approximate:
            message = "policy.approximate is True, but this version plans exact reuse only"
            raise ValueError(message)
        limited = tokens[: max(0, len(tokens) - keep_last)]
        used = self._exact_blocks(namespace, limited)
        source, shared = None, 0
        if policy.partial_blocks:
            source, shared = self._sibling(namespace, limited, len(used))
        self._clock += 1
        for entry in [*used, *([source] if source else [])]:
            entry.stamp = self._clock
        state = _PlanState(namespace, tokens, self._epoch(namespace), pin)
        if pin:
            state.pins |= {entry.block for entry in used}
            state.source_pins |= {source.block} if source else set()
        self._plans.append(state)
        self._settle()
        return ModelPlan(self, state, used, source, shared)

    def _sibling(
        self, namespace: Namespace, tokens: Tokens, depth: int
    ) -> tuple[_Entry | None, int]:
        """The exact block at this place that shares most tokens with the rest, and how many."""
        start = depth * self.block_size
        prefix, rest = tokens[:start], tokens[start:]
        best: tuple[int, list[tuple[int, int, bytes, int]], _Entry] | None = None
        for key, entry in self._entries.items():
            other, path = key
            if not entry.exact or other != namespace or len(path) != start + self.block_size:
                continue
            shared = _common(path[start:], rest)
            if path[:start] != prefix or shared == 0:
                continue
            order = -shared, _sort_key(path[start:])
            if best is None or order < best[:2]:
                best = *order, entry
        return (None, 0) if best is None else (best[2], -best[0])

    # --- inserting --------------------------------------------------------------------------------

    def insert(
        self,
        seq: AnySequence,
        blocks: Integers,
        *,
        num_computed: int,
        start: int = 0,
        source: Source,
        spans: Iterable[Span] = (),
    ) -> ModelInsertResult:
        """Offer blocks for the front of a sequence.

        Args:
            seq: The sequence that the blocks belong to.
            blocks: Ids, the first for the block at `start`.
            num_computed: So many tokens from 0 have KV.
            start: The position of the first id, a multiple of the block size.
            source: Where the KV came from: a plan, `COMPUTED` or `Imported(...)`.
            spans: Tags to set afterwards.

        Returns:
            The ids that back the sequence from `start` on, and what became of the others.
        """
        namespace, tokens = _read(seq)
        offered = _integers(blocks, "blocks", self.num_blocks)
        num_computed = _count(num_computed, "num_computed")
        if num_computed > len(tokens):
            message = f"num_computed is {num_computed}, but the sequence has {len(tokens)} tokens"
            raise ValueError(message)
        start = self._start(start, tokens)
        kinds, marks = self._spans(spans, tokens)
        size = self.block_size
        first, last = start // size, num_computed // size
        if len(offered) < last - first:
            message = f"insert needs {last - first} blocks from {start} on, got {len(offered)}"
            raise ValueError(message)
        plan = self._source(source, namespace, tokens)
        path = self._path(namespace, tokens)
        self._refuse_blocks_in_use(path, first, offered)

        # From here on nothing fails.
        self._clock += 1
        owned = self._where().keys() | self._condemned | set(self._waiting)
        before = [self._entries.get(key) for key in path[:first]]
        freed: list[int] = []
        duplicates: list[int] = []
        backing: list[_Entry] = []
        if None not in before and (plan is None or plan.epoch == self._epoch(namespace)):
            # What lies before `start` is offered as it is, as far as it was computed.
            whole = [entry.block for entry in before if entry is not None] + offered
            for key, block in zip(path[:last], whole, strict=False):
                exact, hops = self._label(source, plan, len(key[1]), backing)
                offer = _Entry(block, exact, hops, 0, [0] * size, self._stays + 1)
                entry = self._decide(key, offer, duplicates, freed)
                if entry is None:
                    break
                self._stays += entry is offer
                backing.append(entry)
        for entry in backing:
            entry.stamp = self._clock
        num_exact = len(_exact_run(backing)) * size
        if plan is not None:
            if plan.pinned:
                plan.pins |= {entry.block for entry in backing}
            if num_exact < len(backing) * size:
                known = plan.first_approximate
                plan.first_approximate = num_exact if known is None else min(known, num_exact)
        reached = max(0, len(backing) - first)
        surplus = [block for block in offered[reached:] if block not in owned]
        self._kinds = kinds
        self._mark(path, marks)
        self._settle()
        return ModelInsertResult(
            blocks=_ids(entry.block for entry in backing[first:]),
            num_exact=num_exact,
            duplicates=_ids(duplicates),
            surplus=_ids(surplus),
            freed=_ids(freed),
        )

    def _entries_and_condemned(self) -> set[int]:
        return self._where().keys() | self._condemned | set(self._waiting)

    def _source(self, source: Source, namespace: Namespace, tokens: Tokens) -> _PlanState | None:
        """The plan behind a source, if it is one that may be used for these tokens."""
        if source is COMPUTED or isinstance(source, Imported):
            return None
        if not isinstance(source, ModelPlan):
            message = f"source is {source!r}, not a plan, COMPUTED or Imported(...)"
            raise TypeError(message)
        state = source._state  # noqa: SLF001 - a plan is part of its index
        self._own(source)
        if state.released:
            message = "source is a plan that was released"
            raise StaleHandleError(message)
        if state.namespace != namespace or tokens[: len(state.tokens)] != state.tokens:
            message = f"the sequence does not start with the {len(state.tokens)} tokens of the plan"
            raise ValueError(message)
        return state

    def _refuse_blocks_in_use(self, path: list[Key], first: int, offered: list[int]) -> None:
        where = self._where()
        condemned = self._condemned | set(self._waiting)
        seen: set[int] = set()
        for position, block in enumerate(offered, first):
            own = path[position] if position < len(path) else None
            elsewhere = block not in condemned and where.get(block, own) != own
            if block in seen or elsewhere:
                message = f"insert: block {block} is given twice, or backs another prefix"
                raise BlockInUseError(message)
            seen.add(block)

    def _label(
        self, source: Source, plan: _PlanState | None, end: int, before: list[_Entry]
    ) -> tuple[bool, int]:
        """Whether an offered block that ends at `end` behind `before` is exact, and its hops."""
        said_exact, hops = True, 0
        if isinstance(source, Imported) and end > source.exact_until:
            said_exact, hops = False, source.hops
        if plan is not None and plan.first_approximate is not None:
            said_exact = end <= plan.first_approximate
        return said_exact and all(entry.exact for entry in before), hops

    def _decide(
        self, key: Key, offer: _Entry, duplicates: list[int], freed: list[int]
    ) -> _Entry | None:
        """Decide between what stands at a place and what is offered; None where it ends."""
        standing = self._entries.get(key)
        condemned = offer.block in self._condemned or offer.block in self._waiting
        if standing is None:
            if condemned:
                return None
            self._entries[key] = offer
            return offer
        if standing.block == offer.block or condemned:
            return standing
        better = not standing.exact and (offer.exact or offer.hops < standing.hops)
        if not better:
            duplicates.append(offer.block)
            return standing
        offer.tags = standing.tags
        self._entries[key] = offer
        old = self._left(standing.block)
        if old is not None:
            freed.append(old)
        return offer

    # --- tags -------------------------------------------------------------------------------------

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of the kinds, by bit."""
        return tuple(self._kinds)

    def _spans(
        self, spans: Iterable[Span], tokens: Tokens
    ) -> tuple[list[str], list[tuple[range, int]]]:
        """The kinds as they will be, and the ranges to mark with their bits."""
        kinds = list(self._kinds)
        marks = []
        for span in spans:
            _instance(span, Span, "a span")
            if span.end > len(tokens):
                message = f"{span!r} ends behind the {len(tokens)} tokens of the sequence"
                raise ValueError(message)
            if span.start == span.end:
                continue
            if span.kind not in kinds:
                kinds.append(span.kind)
            marks.append((range(span.start, span.end), 1 << kinds.index(span.kind)))
        if len(kinds) > MAX_KINDS:
            message = f"{len(kinds)} kinds of spans, above {MAX_KINDS}"
            raise ValueError(message)
        return kinds, marks

    def _mark(self, path: list[Key], marks: list[tuple[range, int]]) -> None:
        for depth, key in enumerate(path):
            entry = self._entries.get(key)
            if entry is not None:
                for offset in range(self.block_size):
                    position = depth * self.block_size + offset
                    for where, bit in marks:
                        entry.tags[offset] |= bit if position in where else 0

    def tag(self, seq: AnySequence, spans: Iterable[Span]) -> None:
        """Set tags on the tokens of a sequence that have a block.

        Args:
            seq: The sequence; others that share its prefix share the tags.
            spans: Ranges with their kinds.
        """
        namespace, tokens = _read(seq)
        self._kinds, marks = self._spans(spans, tokens)
        self._mark(self._path(namespace, tokens), marks)
        self._settle()

    def tags(self, seq: AnySequence) -> list[Span]:
        """The tags of every present block on the path of a sequence.

        Args:
            seq: The sequence.

        Returns:
            A kind's runs as long as they go, sorted by (start, end, kind).
        """
        namespace, tokens = _read(seq)
        bits: list[int] = []
        for key in self._path(namespace, tokens):
            entry = self._entries.get(key)
            bits += entry.tags if entry is not None else [0] * self.block_size
        spans = []
        for bit, kind in enumerate(self._kinds):
            start = None
            for position, here in enumerate([*bits, 0]):
                if here >> bit & 1:
                    start = position if start is None else start
                elif start is not None:
                    spans.append(Span(start, position, kind))
                    start = None
        return sorted(spans, key=lambda span: (span.start, span.end, span.kind))

    # --- leaving, by call -------------------------------------------------------------------------

    def take_freed(self) -> Int32:
        """Hand out what waits since its last release."""
        freed, self._waiting = self._waiting, []
        return _ids(freed)

    def evict(self, n: int) -> Int32:
        """Hand out at most `n` blocks: what waits, then by last use, deepest, lowest id.

        Args:
            n: How many are wanted.
        """
        n = _count(n, "n")
        freed, self._waiting = self._waiting[:n], self._waiting[n:]
        while len(freed) < n and (victim := self._next_victim()) is not None:
            freed.append(self._entries.pop(victim).block)
        self._settle()
        return _ids(freed)

    @property
    def num_evictable(self) -> int:
        """Indexed blocks that are neither pinned nor above a pinned one."""
        return len(self._evictable())

    def discard(self, block_ids: Integers) -> Int32:
        """Take blocks out wherever they are.

        Args:
            block_ids: Ids; unknown ones are counted, repeated ones once.

        Returns:
            Those that are free now, in the order given. A pinned one is condemned instead.
        """
        wanted = list(dict.fromkeys(_integers(block_ids, "block_ids", self.num_blocks)))
        where = self._where()
        self._unknown_discards += sum(block not in where for block in wanted)
        return self._forget(where[block] for block in wanted if block in where)

    def drop(self, namespace: Namespace) -> Int32:
        """Empty a namespace and start an epoch of it.

        Args:
            namespace: Which one.
        """
        _instance(namespace, Namespace, "namespace")
        self._drops[namespace] = self._drops.get(namespace, 0) + 1
        freed = self._forget(key for key in self._entries if key[0] == namespace)
        return np.sort(freed)

    def reset(self) -> Int32:
        """Empty the index and start an epoch of all namespaces."""
        self._resets += 1
        return np.sort(self._forget(self._entries))

    # --- plans ------------------------------------------------------------------------------------

    def _release(self, state: _PlanState) -> None:
        state.released = True
        self._plans = [plan for plan in self._plans if plan is not state]
        self._settle()

    def _is_here(self, block: int, stay: int) -> bool:
        """Whether a block never left since it was seen."""
        return any(entry.block == block and entry.stay == stay for entry in self._entries.values())

    # --- a scheduler step -------------------------------------------------------------------------

    def lookup_many(
        self,
        seqs: Sequence[AnySequence],
        *,
        keep_last: int = 0,
        touch: bool = True,
        starts: Integers | None = None,
    ) -> ModelMatchBatch:
        """`lookup` for each sequence in order; an error spoils its own item alone."""
        each = _each("starts", starts, _sequences(seqs), 0)
        keep_last = _count(keep_last, "keep_last")
        errors: dict[int, Exception] = {}
        found = []
        for i, (seq, start) in enumerate(zip(seqs, each, strict=True)):
            try:
                match = self.lookup(seq, keep_last=keep_last, touch=touch, start=start)
            except (KvTrieError, TypeError, ValueError) as error:
                errors[i] = error
                match = ModelMatch(0, _ids([]))
            found.append(match)
        blocks, offsets = _flat([match.blocks for match in found])
        num_tokens = np.array([match.num_tokens for match in found], dtype=np.int64)
        return ModelMatchBatch(num_tokens, blocks, offsets, errors)

    def plan_many(
        self,
        seqs: Sequence[AnySequence],
        policies: Sequence[ReusePolicy] | None = None,
        *,
        keep_last: int = 1,
        pin: bool = True,
    ) -> ModelPlanBatch:
        """`plan` for each sequence in order; an error spoils its own item alone."""
        each = _each("policies", policies, _sequences(seqs), EXACT_ONLY)
        keep_last = _count(keep_last, "keep_last")
        errors: dict[int, Exception] = {}
        plans: list[ModelPlan | None] = []
        for i, (seq, policy) in enumerate(zip(seqs, each, strict=True)):
            try:
                plans.append(self.plan(seq, policy, keep_last=keep_last, pin=pin))
            except (KvTrieError, TypeError, ValueError) as error:
                errors[i] = error
                plans.append(None)
        blocks, offsets = _flat([plan.blocks if plan else _ids([]) for plan in plans])
        new = np.array([plan.num_new_blocks if plan else 0 for plan in plans], dtype=np.int64)
        return ModelPlanBatch(plans, blocks, offsets, new, errors)

    def insert_many(
        self,
        seqs: Sequence[AnySequence],
        blocks: Integers,
        offsets: Integers,
        num_computed: Integers,
        *,
        sources: Sequence[Source],
        starts: Integers | None = None,
    ) -> ModelInsertBatch:
        """`insert` for each sequence; item i brings `blocks[offsets[i]:offsets[i + 1]]`."""
        count = _sequences(seqs)
        items = zip(
            seqs,
            _slices(list(offsets), count, len(blocks)),
            _each("num_computed", num_computed, count, 0),
            _each("sources", sources, count, COMPUTED),
            _each("starts", starts, count, 0),
            strict=True,
        )
        errors: dict[int, Exception] = {}
        done = []
        for i, (seq, part, computed, source, start) in enumerate(items):
            try:
                result = self.insert(
                    seq, blocks[part], num_computed=computed, start=start, source=source
                )
            except (KvTrieError, TypeError, ValueError) as error:
                errors[i] = error
                result = ModelInsertResult(_ids([]), 0, _ids([]), _ids([]), _ids([]))
            done.append(result)
        backing, backing_offsets = _flat([result.blocks for result in done])
        duplicates, duplicate_offsets = _flat([result.duplicates for result in done])
        surplus, surplus_offsets = _flat([result.surplus for result in done])
        freed, freed_offsets = _flat([result.freed for result in done])
        return ModelInsertBatch(
            blocks=backing,
            offsets=backing_offsets,
            num_exact=np.array([result.num_exact for result in done], dtype=np.int64),
            duplicates=duplicates,
            duplicate_offsets=duplicate_offsets,
            surplus=surplus,
            surplus_offsets=surplus_offsets,
            freed=freed,
            freed_offsets=freed_offsets,
            errors=errors,
        )

    def release_many(self, plans: Sequence[ModelPlan]) -> dict[int, Exception]:
        """`release` for each plan in order; the errors by place."""
        errors: dict[int, Exception] = {}
        for i, plan in enumerate(plans):
            try:
                self._own(plan)
                plan.release()
            except (KvTrieError, TypeError, ValueError) as error:
                errors[i] = error
        return errors

    def _own(self, plan: ModelPlan) -> None:
        """Refuse what is no plan of this index."""
        _instance(plan, ModelPlan, "a plan")
        if plan._index is not self:  # noqa: SLF001 - a plan is part of its index
            message = "a plan of another index"
            raise ValueError(message)

    # --- looking from outside ---------------------------------------------------------------------

    def stats(self) -> ModelStats:
        """Counts of what the index knows."""
        return ModelStats(
            indexed=len(self._entries),
            condemned=len(self._condemned),
            waiting=len(self._waiting),
            pinned=len(self._pinned()),
            evictable=self.num_evictable,
            approximate=sum(not entry.exact for entry in self._entries.values()),
            holes=len(self._holes()),
            live_plans=len(self._plans),
            clock=self._clock,
            unknown_discards=self._unknown_discards,
        )

    def digest(self) -> int:
        """A number that two models have in common when they were fed the same calls."""
        entries = sorted(
            (repr(ns), _sort_key(tokens), e.block, e.exact, e.hops, e.stamp, tuple(e.tags))
            for (ns, tokens), e in self._entries.items()
        )
        state = (
            entries,
            sorted(self._condemned),
            self._waiting,
            [(sorted(plan.pins), sorted(plan.source_pins)) for plan in self._plans],
            self._clock,
            self._kinds,
            self._unknown_discards,
        )
        raw = hashlib.blake2b(repr(state).encode(), digest_size=8).digest()
        return int.from_bytes(raw, "little")

    def check(self) -> None:
        """Raise `KvTrieError` when the model contradicts itself."""
        indexed = [entry.block for entry in self._entries.values()]
        every = [*indexed, *self._condemned, *self._waiting]
        pinned = self._pinned()
        size = self.block_size
        rules: Mapping[str, bool] = {
            "an id is in one state only": len(set(every)) == len(every),
            "ids are in range": all(0 <= block < self.num_blocks for block in every),
            "what is pinned is indexed or condemned": pinned <= {*indexed, *self._condemned},
            "what is condemned is pinned": self._condemned <= pinned,
            "entries end at block edges": all(len(key[1]) % size == 0 for key in self._entries),
            "exact blocks have no hops": all(
                entry.hops == 0 for entry in self._entries.values() if entry.exact
            ),
            "stamps are of the past": all(
                0 < entry.stamp <= self._clock for entry in self._entries.values()
            ),
            "holes are in bounds": len(self._holes()) <= self.num_blocks
            or self._next_victim(cut_off=True) is None,
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            message = f"the model is broken: not true that {', '.join(broken)}"
            raise KvTrieError(message)


def _each(what: str, values: Sequence[T] | None, count: int, default: T) -> list[T]:
    """One value an item: `values`, or `default` for each."""
    if values is None:
        return [default] * count
    if len(values) != count:
        message = f"{what} has {len(values)} values for {count} sequences"
        raise ValueError(message)
    return list(values)


def _slices(offsets: list[int], count: int, total: int) -> list[slice]:
    """The part of a flat array that belongs to each item."""
    if len(offsets) != count + 1 or offsets != sorted(offsets) or offsets[0] != 0:
        message = f"offsets {offsets} do not ascend from 0 by {count} steps"
        raise ValueError(message)
    if offsets[-1] != total:
        message = f"offsets end at {offsets[-1]}, not at the {total} blocks"
        raise ValueError(message)
    return [slice(*pair) for pair in itertools.pairwise(offsets)]


def _sequences(seqs: Sequence[AnySequence]) -> int:
    """How many sequences there are, if it is a list of them."""
    if not isinstance(seqs, list | tuple):
        message = f"seqs is a {type(seqs).__name__}, not a list of sequences"
        raise TypeError(message)
    return len(seqs)


class ModelPlan:
    """How to build the KV of a prompt: `kvtrie.ReusePlan`, made by `ModelIndex.plan`."""

    def __init__(
        self,
        index: ModelIndex,
        state: _PlanState,
        used: list[_Entry],
        source: _Entry | None,
        shared: int,
    ) -> None:
        self._index = index
        self._state = state
        size = index.block_size
        self._in_place = [(entry.block, entry.stay) for entry in used]
        self._source = None if source is None else (source.block, source.stay)
        in_place_end, copied_end = len(used) * size, len(used) * size + shared
        length = len(state.tokens)
        kinds = [0, 0, 0]
        for entry in used:
            for bits in entry.tags:
                kinds[0] |= bits
        if source is not None:
            for bits in source.tags[:shared]:
                kinds[1] |= bits
        edges = [
            (0, in_place_end, EXACT, kinds[0]),
            (in_place_end, copied_end, EXACT, kinds[1]),
            (copied_end, length, COMPUTE, kinds[2]),
        ]
        self._copied = range(in_place_end, copied_end)
        self._num_exact = copied_end
        self._segments = np.array(
            [
                (start, end, start, 0, label, 0, bits)
                for start, end, label, bits in edges
                if start < end
            ],
            dtype=SEGMENT_DTYPE,
        )

    def __repr__(self) -> str:
        return f"ModelPlan({self.blocks.tolist()}, {self._segments.tolist()})"

    @property
    def blocks(self) -> Int32:
        """Ids used in place, for the first whole blocks."""
        return _ids(block for block, _ in self._in_place)

    @property
    def num_new_blocks(self) -> int:
        """How many blocks the caller brings for the rest of the prompt."""
        return -(-len(self._state.tokens) // self._index.block_size) - len(self._in_place)

    @property
    def num_exact(self) -> int:
        """Tokens that are reused exactly, in place or by a copy."""
        return self._num_exact

    @property
    def num_approximate(self) -> int:
        """Tokens that are reused approximately: none in this version."""
        return 0

    @property
    def num_compute(self) -> int:
        """Tokens that must be computed."""
        return len(self._state.tokens) - self._num_exact

    @property
    def candidates_dropped(self) -> int:
        """Places that were not tried: none in this version."""
        return 0

    @property
    def gaps(self) -> Int64:
        """What must be computed, as rows of (start, end)."""
        rows = self._segments[self._segments["class"] == COMPUTE]
        return np.stack([rows["start"], rows["end"]], axis=1).astype(np.int64)

    @property
    def segments(self) -> npt.NDArray[np.void]:
        """Every token once: where it comes from."""
        return self._segments.copy()

    @property
    def source_blocks(self) -> Int32:
        """The ids that are copied from."""
        return _ids([] if self._source is None else [self._source[0]])

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._state.released

    @property
    def pinned(self) -> bool:
        """Whether the plan was made with `pin=True`."""
        return self._state.pinned

    def moves(
        self, table: Integers, start: int = 0, end: int | None = None
    ) -> npt.NDArray[np.void]:
        """The copies as plain data.

        Args:
            table: The block ids of the prompt, from position 0.
            start: Only copies to positions from here on.
            end: And before this one; None is the end of the prompt.
        """
        ids = _integers(table, "table", self._index.num_blocks)
        size = self._index.block_size
        length = len(self._state.tokens)
        start = _count(start, "start")
        end = length if end is None else _count(end, "end")
        if not start <= end <= length:
            message = f"the range {start}..{end} does not lie in 0..{length}"
            raise ValueError(message)
        if len(ids) < -(-end // size):
            message = f"table has {len(ids)} blocks, too few for {end} tokens"
            raise ValueError(message)
        first, last = max(start, self._copied.start), min(end, self._copied.stop)
        moves = []
        if self._source is not None and first < last:
            dest = ids[first // size]
            if dest in {self._source[0], *self.blocks.tolist()}:
                message = f"block {dest} would be written, but the plan reads it"
                raise ValueError(message)
            offset = first % size
            source_slot, dest_slot = self._source[0] * size + offset, dest * size + offset
            moves.append((source_slot, dest_slot, last - first, 0))
        return np.array(moves, dtype=MOVE_DTYPE)

    def validate(self) -> npt.NDArray[np.bool_]:
        """One answer a segment: true while pinned, or while its blocks never left."""
        answers = []
        state = self._state
        for segment in self._segments:
            if segment["class"] == COMPUTE:
                used, pins = [], state.pins
            elif segment["start"] == self._copied.start and self._source is not None:
                used, pins = [self._source], state.source_pins
            else:
                used, pins = self._in_place, state.pins
            live = set() if state.released else pins
            is_here = self._index._is_here  # noqa: SLF001 - a plan is part of its index
            answers.append(all(block in live or is_here(block, stay) for block, stay in used))
        return np.array(answers, dtype=np.bool_)

    def release_sources(self) -> None:
        """Let go of the blocks that were copied from; a second call does nothing."""
        if self._state.released:
            message = "release_sources: the plan was released"
            raise StaleHandleError(message)
        self._state.source_pins.clear()
        self._index._settle()  # noqa: SLF001 - a plan is part of its index

    def release(self) -> None:
        """Let go of everything; a second call is a `StaleHandleError`."""
        if self._state.released:
            message = "release: the plan was released before"
            raise StaleHandleError(message)
        self._index._release(self._state)  # noqa: SLF001 - a plan is part of its index

    def __enter__(self) -> Self:
        if self._state.released:
            message = "with: the plan was released before"
            raise StaleHandleError(message)
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


class ModelAllocator:
    """`kvtrie.BlockAllocator`: a free list for engines that have none.

    Args:
        num_blocks: Ids lie in `0..num_blocks`; all are free at first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = _count(num_blocks, "num_blocks", 1)
        self._free = list(range(self.num_blocks))

    @property
    def num_free(self) -> int:
        """How many ids are free."""
        return len(self._free)

    def allocate(self, n: int, evict_from: ModelIndex | None = None) -> Int32:
        """Hand out `n` ids, free ones first, then evicted ones; all of them or none.

        Args:
            n: How many.
            evict_from: The index to take the rest from.

        Raises:
            OutOfBlocksError: When there are not so many; nothing is evicted then.
        """
        n = _count(n, "n")
        available = self.num_free
        if evict_from is not None:
            if evict_from.num_blocks != self.num_blocks:
                message = f"the index has {evict_from.num_blocks} blocks, not {self.num_blocks}"
                raise ValueError(message)
            available += evict_from.num_evictable + evict_from.stats().waiting
        if n > available:
            message = f"allocate: {n} blocks wanted, {available} available"
            raise OutOfBlocksError(message)
        taken, self._free = self._free[:n], self._free[n:]
        if evict_from is not None and len(taken) < n:
            taken += evict_from.evict(n - len(taken)).tolist()
        return _ids(taken)

    def free(self, ids: Integers) -> None:
        """Take ids back.

        Args:
            ids: Ids that were handed out; anything else is a `ValueError` and changes nothing.
        """
        numbers = _integers(ids, "ids", self.num_blocks)
        twice = set(numbers) & set(self._free)
        if twice or len(set(numbers)) < len(numbers):
            message = f"free: {sorted(twice) or numbers} are free already, or given twice"
            raise ValueError(message)
        self._free += numbers
