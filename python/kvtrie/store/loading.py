"""Loads runs for the gaps of a plan, and places them in a pool, rotated to their positions.

`SpanLoader.start` returns at once. Threads look runs up, read and verify them. `SpanLoad.place`
takes what has arrived; what has not is late, and the engine computes it.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

try:
    import torch
except ImportError as error:
    _MISSING = (
        "SpanLoader and rows_of of kvtrie.store need torch: pip install 'kvtrie[store,torch]'"
    )
    raise ImportError(_MISSING, name="torch") from error

from kvtrie._core import EXACT_ONLY, Imported, ReusePolicy
from kvtrie.pool.kv_pool import KVPool
from kvtrie.rope import ItemPositionsError
from kvtrie.store.contexts import PrefixMarks, PromptContexts, SpanContext
from kvtrie.store.shape import SpanRows, SpanShape
from kvtrie.store.threads import Crew, Shares

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvtrie._core import Item, ReusePlan, TokenSequence
    from kvtrie.rope import RopeSpec
    from kvtrie.store.estimate import Estimate
    from kvtrie.store.runs import SpanRun
    from kvtrie.store.store import SpanStore
    from kvtrie.store.value import SpanHeader

_LOG: Final = logging.getLogger("kvtrie.store")
_LAXEST: Final = ReusePolicy(max_hops=255, scope="namespace")
_MIN_RUN: Final = 16
# Tokens that are rotated at once, in a pool of twice as many.
_STAGED: Final = 2048
# Bytes of short runs that are written at once: some hundred tokens of a model of 8B.
_JOINED_BYTES: Final = 64 << 20
# The largest delta by which a pool rotates.
_FURTHEST: Final = 1 << 27
_MOVE: Final = [(name, "i8") for name in ("source_slot", "dest_slot", "num_tokens", "delta")]


@dataclass(frozen=True, slots=True)
class PlacedSpan:
    """Tokens of a prompt whose KV came from the store.

    Attributes:
        start: First token, a position of the prompt.
        end: One past the last.
        is_exact: Whether it was computed at this position after these very tokens, by exact KV.
        hops: 0 if exact; else those of the KV as it is in the pool.
        delta: Position in the prompt minus the position that it was computed at, by which K is
            rotated (rule D20).
        context: What a moved span was computed after, if `SpanLoader.seek` was asked for it.
    """

    start: int
    end: int
    is_exact: bool
    hops: int
    delta: int
    context: SpanContext | None = None


@dataclass(frozen=True, slots=True)
class PlacedSpans:
    """What a load has put into a pool.

    Attributes:
        spans: The tokens that were placed, ascending.
        compute: Ranges that the engine computes: what is left of the plan's gaps.
        source: For `RadixIndex.insert` of the prompt, in the place of the plan, if anything
            approximate was placed; else None, and the plan is the source.
    """

    spans: tuple[PlacedSpan, ...]
    compute: tuple[tuple[int, int], ...]
    source: Imported | None


@dataclass(frozen=True, slots=True)
class _Arrived:
    """Verified rows of one piece of the prompt, of one label."""

    span: PlacedSpan
    rows: SpanRows


class SpanLoader:
    """Loads from a store, in threads of its own.

    Args:
        store: From where.
        estimate: Decides between loading and recomputing, and is fed with what loads take. None:
            everything that is found is loaded.
        threads: Loads at once.
        max_waiting: Loads that may wait; more are recomputed, and counted as ``busy``.
        pinned: Whether rows arrive in pinned memory, for pools on a GPU.
        max_bytes: Bytes of the rows of all loads that were neither placed nor cancelled. A load
            that would need more is recomputed, and counted as ``busy``.
        is_shared: Whether tenants share ``max_waiting`` and ``max_bytes``: each takes no more of
            them than it leaves free, and they take turns. Else who comes first takes all.

    Raises:
        ValueError: A number is below 1.
    """

    def __init__(
        self,
        store: SpanStore,
        *,
        estimate: Estimate | None = None,
        threads: int = 4,
        max_waiting: int = 64,
        pinned: bool = False,
        max_bytes: int = 1 << 30,
        is_shared: bool = False,
    ) -> None:
        if max_bytes < 1:
            msg = f"SpanLoader: max_bytes is {max_bytes}; it must be at least 1"
            raise ValueError(msg)
        self._store = store
        self._estimate = estimate
        self._pinned = pinned
        self._room = _Room(max_bytes, is_shared=is_shared)
        self._crew = Crew(
            "SpanLoader",
            threads=threads,
            max_waiting=max_waiting,
            failed=self._failed,
            is_shared=is_shared,
        )

    def start(
        self,
        plan: ReusePlan,
        seq: TokenSequence,
        runs: Sequence[SpanRun],
        policy: ReusePolicy = EXACT_ONLY,
        *,
        session: str | None = None,
        moved_end: int | None = None,
        keep_last: int = 1,
    ) -> SpanLoad:
        """Begin to load what a plan has to compute; it never waits.

        Args:
            plan: The plan of the prompt, which says what is missing.
            seq: The prompt.
            runs: Its runs, as `SpanStore.runs` returns them.
            policy: What may be used approximately.
            session: The prompt's conversation, for ``scope="conversation"``.
            moved_end: As for `RadixIndex.plan`: moved runs supply no token from here on.
            keep_last: Tokens at the end that are computed in any case.
        """
        end = len(seq) - keep_last
        gaps = [(int(low), min(int(high), end)) for low, high in plan.gaps if low < end]
        asked = _Asked(
            gaps=tuple(gaps),
            all_gaps=tuple((int(low), int(high)) for low, high in plan.gaps),
            num_tokens=len(seq),
            policy=policy,
            session=self._store.session_of(seq.namespace, session),
            moved_end=len(seq) if moved_end is None else moved_end,
            planned=_approximate(plan),
            items=seq.items,
        )
        load = SpanLoad(self._store, asked, owner=_owner(seq))
        pieces = _pieces_within(runs, gaps)
        if not pieces:
            load.finish()
        else:
            self._offer(load, lambda: self._fetch(load, asked, pieces))
        return load

    def seek(
        self,
        seq: TokenSequence,
        gaps: Sequence[tuple[int, int]],
        runs: Callable[[], Sequence[SpanRun]],
        policy: ReusePolicy = EXACT_ONLY,
        *,
        session: str | None = None,
        moved_end: int | None = None,
        to_first_gap: bool = False,
        contexts: bool = False,
        shared_prefix: int = 0,
        done: Callable[[], None] | None = None,
    ) -> SpanLoad:
        """Begin to load ranges of a prompt, for a caller that makes the plan itself.

        What arrives is labelled, and cut by no policy: tokens that a policy computes again at the
        ends of moved runs are in it, and runs of any length.

        Args:
            seq: The prompt.
            gaps: Ranges that are wanted, ascending.
            runs: Returns the runs of the prompt; called in a thread.
            policy: What may be used approximately.
            session: The prompt's conversation, for ``scope="conversation"``.
            moved_end: As for `RadixIndex.plan`.
            to_first_gap: Whether only what continues the beginning of the first range is wanted.
            contexts: Whether the caller judges what moved spans were computed after. Then only
                those move whose `PlacedSpan.context` is known, and limits of contexts are left to
                the caller.
            shared_prefix: Tokens, a multiple of 16: a run of a prompt that begins with as many of
                this one's is in scope too; 0: none is.
            done: Called when nothing more will arrive, in any thread.
        """
        asked = _Asked(
            gaps=tuple(gaps),
            all_gaps=tuple(gaps),
            num_tokens=len(seq),
            policy=policy,
            session=self._store.session_of(seq.namespace, session),
            moved_end=len(seq) if moved_end is None else moved_end,
            planned=(0, 0, 0),
            items=seq.items,
            is_whole=True,
            to_first_gap=to_first_gap,
            contexts=contexts,
            shared_prefix=shared_prefix if shared_prefix <= len(seq) else 0,
        )
        load = SpanLoad(self._store, asked, done, owner=_owner(seq))

        def work() -> None:
            named = runs()
            self._fetch(load, asked, _pieces_within(named, gaps), _TurnMarks(seq, named))

        self._offer(load, work)
        return load

    def _offer(self, load: SpanLoad, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            finally:
                load.finish()

        if not self._crew.offer(guarded, load.owner):
            self._store.count("busy")
            load.finish()

    def close(self, timeout: float = 5.0) -> bool:
        """Take no more loads, and wait for those that run; whether all have ended."""
        return self._crew.close(timeout)

    def _fetch(
        self,
        load: SpanLoad,
        asked: _Asked,
        pieces: list[tuple[SpanRun, _Ranges]],
        contexts: _TurnMarks | None = None,
    ) -> None:
        there = self._store.exists([run for run, _ in pieces])
        found = [one for one, is_there in zip(pieces, there, strict=True) if is_there]
        self._store.count("absent", len(pieces) - len(found))
        if asked.to_first_gap:
            found = found[: next((at for at, one in enumerate(there) if not one), len(there))]
        num_tokens = sum(high - low for _, part in found for low, high in part)
        num_bytes = num_tokens * self._store.shape.token_bytes
        if not found or not self._is_worth(num_tokens, num_bytes):
            return
        if not load.takes_room(self._room, num_bytes):
            self._store.count("busy")
            return
        began, num_read = time.monotonic(), 0
        for run, part in found:
            # Nobody waits for more: what was read so far still says how slow the link is.
            if load.is_taken:
                break
            num_here = self._one(load, asked, run, part, contexts)
            num_read += num_here
            if asked.to_first_gap and num_here < sum(high - low for low, high in part):
                break
        if contexts is not None:
            load.contexts = contexts.told(self._store)
        if self._estimate is not None and num_read:
            self._estimate.loaded(
                num_bytes=num_read * self._store.shape.token_bytes,
                seconds=max(time.monotonic() - began, 1e-9),
            )

    def _is_worth(self, num_tokens: int, num_bytes: int) -> bool:
        if self._estimate is None:
            return True
        chosen = self._estimate.choose(num_tokens=num_tokens, num_bytes=num_bytes)
        self._store.count(f"chose_{chosen.choice}_{chosen.why}")
        return chosen.choice == "load"

    def _one(
        self,
        load: SpanLoad,
        asked: _Asked,
        run: SpanRun,
        part: _Ranges,
        contexts: _TurnMarks | None,
    ) -> int:
        """Read one run, hand over what of it may be used, and return how many tokens were read."""
        if not asked.policy.approximate:
            # Whether a run is exact here is in its header, which is small.
            head = self._store.get_ranges(run, [], [])
            if head is None or not _pieces(self._store, asked, run, part, head[0]):
                return 0
        into = [self._rows(high - low) for low, high in part]
        found = self._store.get_ranges(run, part, into)
        if found is None:
            return 0
        header, good = found
        for span in _pieces(self._store, asked, run, part, header, contexts):
            for (low, high), is_good, rows in zip(part, good, into, strict=True):
                at = run.start + low
                if is_good and at <= span.start and span.end <= run.start + high:
                    load.arrived(_Arrived(span, rows.part(span.start - at, span.end - at)))
        return sum(rows.num_tokens for rows, is_good in zip(into, good, strict=True) if is_good)

    def _rows(self, num_tokens: int) -> SpanRows:
        if not self._pinned:
            return self._store.shape.empty(num_tokens)
        shape = self._store.shape
        sides = [
            torch.empty(
                (shape.num_layers, num_tokens, width), dtype=torch.uint8, pin_memory=True
            ).numpy()
            for width in (shape.k_bytes, shape.v_bytes)
        ]
        return SpanRows(sides[0], sides[1])

    def _failed(self, error: Exception) -> None:
        self._store.count("load_failed")
        _LOG.error("runs were not loaded", exc_info=error)


class SpanLoad:
    """One load under way. `SpanLoader.start` makes it."""

    def __init__(
        self,
        store: SpanStore,
        asked: _Asked,
        done: Callable[[], None] | None = None,
        *,
        owner: str | None = None,
    ) -> None:
        self.owner = owner
        self._store = store
        self._asked = asked
        self._say_done = done
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._arrived: list[_Arrived] = []
        self.contexts: PromptContexts | None = None
        self._is_taken = self._is_over = False
        # What its rows take of the loader's room.
        self._room: _Room | None = None
        self._num_bytes = 0

    @property
    def is_done(self) -> bool:
        """Whether nothing more will arrive."""
        return self._done.is_set()

    @property
    def is_taken(self) -> bool:
        """Whether nobody waits for more."""
        return self._is_taken

    @property
    def num_arrived(self) -> int:
        """Tokens that have arrived, verified."""
        with self._lock:
            return sum(one.span.end - one.span.start for one in self._arrived)

    def wait(self, timeout: float) -> bool:
        """Wait until all has arrived, at most so many seconds; whether that is so."""
        return self._done.wait(timeout)

    def arrived(self, one: _Arrived) -> None:
        """Hand over verified rows; they are ignored once the load was taken."""
        with self._lock:
            if not self._is_taken:
                self._arrived.append(one)

    def finish(self) -> None:
        """Say that nothing more will arrive."""
        self._done.set()
        if self._say_done is not None:
            self._say_done()

    def takes_room(self, room: _Room, num_bytes: int) -> bool:
        """Whether there is room for the rows of this load, until it is placed or cancelled."""
        with self._lock:
            if self._is_over:
                return False
            if not room.take(num_bytes, self.owner):
                return False
            self._room, self._num_bytes = room, num_bytes
        return True

    def cancel(self) -> None:
        """Take nothing, and load no more."""
        self._take()
        self._give_room()

    def take(self, pool: KVPool) -> TakenSpans:
        """Take what has arrived, once, to write it in parts. Cancel the load after that.

        Args:
            pool: That it will be written to, of the store's geometry.

        Raises:
            ValueError: The pool has another geometry, or the load was taken before.
        """
        self._check("take", pool)
        return TakenSpans(tuple(self._rotatable(self._take(), pool)), self.contexts)

    def place(self, pool: KVPool, table: NDArray[np.integer[Any]]) -> PlacedSpans:
        """Write what has arrived into the blocks of a prompt; once.

        The copies are queued on the current stream. Nothing else of the pool is written. Apply the
        plan's own moves before or after: they have other destinations.

        Args:
            pool: Of the store's geometry.
            table: The prompt's block table, from position 0.

        Raises:
            ValueError: The pool has another geometry, the table is too short or has a block that
                is not in the pool, or the load was taken before. Nothing was written.
        """
        self._check("place", pool)
        num_blocks = -(-self._asked.num_tokens // pool.layout.block_size)
        if len(table) < num_blocks:
            msg = f"SpanLoad.place: the table has {len(table)} blocks, the prompt {num_blocks}"
            raise ValueError(msg)
        used = np.asarray(table)[:num_blocks]
        wrong = used[(used < 0) | (used >= pool.num_blocks)]
        if len(wrong):
            msg = f"SpanLoad.place: block {wrong[0]} is not in the pool of {pool.num_blocks}"
            raise ValueError(msg)
        if not self.is_done:
            self._store.count("late")
        arrived = self._usable(self._take(), pool)
        _write(arrived, pool, table)
        self._give_room()
        spans = tuple(one.span for one in arrived)
        self._store.count("placed_exact", sum(one.end - one.start for one in spans if one.is_exact))
        approximate = sum(one.end - one.start for one in spans if not one.is_exact)
        self._store.count("placed_approximate", approximate)
        left = _without(self._asked.all_gaps, spans)
        self._store.count("recomputed", sum(high - low for low, high in left))
        return PlacedSpans(spans, left, self._source(spans))

    def _check(self, call: str, pool: KVPool) -> None:
        if SpanShape.of(pool.layout) != self._store.shape:
            msg = f"SpanLoad.{call}: the pool is not of the store's geometry {self._store.shape}"
            raise ValueError(msg)
        if self._is_taken:
            msg = f"SpanLoad.{call}: the load was placed or cancelled before"
            raise ValueError(msg)

    def _give_room(self) -> None:
        with self._lock:
            self._is_over = True
            room, self._room = self._room, None
        if room is not None:
            room.give(self._num_bytes, self.owner)

    def _take(self) -> list[_Arrived]:
        with self._lock:
            self._is_taken = True
            found, self._arrived = self._arrived, []
        return sorted(found, key=lambda one: one.span.start)

    def _rotatable(self, arrived: list[_Arrived], pool: KVPool) -> list[_Arrived]:
        kind = pool.layout.kv_type
        most = 1 if kind is not None and kind.requantizes else 255
        usable = []
        can_rotate = pool.rope is not None and _say_positions(pool.rope, self._asked.items)
        for one in arrived:
            is_far = abs(one.span.delta) > _FURTHEST
            if one.span.delta and (not can_rotate or is_far or one.span.hops > most):
                self._store.count("not_rotated")
                continue
            usable.append(one)
        return usable

    def _usable(self, arrived: list[_Arrived], pool: KVPool) -> list[_Arrived]:
        usable = self._rotatable(arrived, pool)
        asked = self._asked
        approximate = asked.planned[2] + sum(
            one.span.end - one.span.start for one in usable if not one.span.is_exact
        )
        if approximate > asked.policy.max_approximate_share * asked.num_tokens:
            self._store.count("share")
            usable = [one for one in usable if one.span.is_exact]
        return usable

    def _source(self, spans: tuple[PlacedSpan, ...]) -> Imported | None:
        approximate = [one for one in spans if not one.is_exact]
        if not approximate:
            return None
        first, hops, _ = self._asked.planned
        return Imported(
            exact_until=min(first, approximate[0].start),
            hops=max(hops, *(one.hops for one in approximate)),
            policy=self._asked.policy,
        )


@dataclass(frozen=True, slots=True)
class TakenSpans:
    """Verified rows for ranges of a prompt. `SpanLoad.take` makes it.

    Attributes:
        contexts: What the contexts of moved spans are compared by, if any was asked for.
    """

    _arrived: tuple[_Arrived, ...]
    contexts: PromptContexts | None = None

    @property
    def spans(self) -> tuple[PlacedSpan, ...]:
        """What the rows are for, ascending."""
        return tuple(one.span for one in self._arrived)

    def write(
        self,
        pool: KVPool,
        table: NDArray[np.integer[Any]],
        ranges: Iterable[tuple[int, int]],
        *,
        first: int = 0,
    ) -> int:
        """Write the rows of ranges, rotated; any number of times.

        Args:
            pool: As for `SpanLoad.take`.
            table: A block table.
            ranges: Positions of the prompt: first one and one past the last of each.
            first: The position that the table begins with.

        Returns:
            How many tokens were written: less than the ranges have, if rows are missing.
        """
        some = []
        for start, end in ranges:
            # They are apart, so their ends ascend as well.
            at = bisect_right(self._arrived, start, key=lambda one: one.span.end)
            for one in islice(self._arrived, at, None):
                low, high = max(one.span.start, start), min(one.span.end, end)
                if low >= high:
                    break
                span = replace(one.span, start=low - first, end=high - first)
                begin = one.span.start
                some.append(_Arrived(span, one.rows.part(low - begin, high - begin)))
        _write(some, pool, table)
        return sum(one.rows.num_tokens for one in some)


def _owner(seq: TokenSequence) -> str | None:
    """The tenant of a sequence; None for everybody."""
    salt = seq.namespace.salt
    return salt if isinstance(salt, str) else None


class _Room:
    """Bytes that rows may take."""

    def __init__(self, num_bytes: int, *, is_shared: bool) -> None:
        self._left = num_bytes
        self._shares = Shares(num_bytes) if is_shared else None
        self._lock = threading.Lock()

    def take(self, num_bytes: int, owner: str | None) -> bool:
        with self._lock:
            if num_bytes > self._left:
                return False
            if self._shares is not None and not self._shares.take(owner, num_bytes):
                return False
            self._left -= num_bytes
        return True

    def give(self, num_bytes: int, owner: str | None) -> None:
        with self._lock:
            self._left += num_bytes
            if self._shares is not None:
                self._shares.give(owner, num_bytes)


_Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a prompt needs, and what it allows."""

    gaps: _Ranges
    all_gaps: _Ranges
    num_tokens: int
    policy: ReusePolicy
    session: str | None
    moved_end: int
    # Of the plan: the first approximate token, the most hops, and approximate tokens.
    planned: tuple[int, int, int]
    items: Sequence[Item]
    # Whether the caller cuts what arrives, and wants nothing after the first range that is missing.
    is_whole: bool = False
    to_first_gap: bool = False
    # Whether the caller judges contexts, and the tokens that make two prompts one conversation.
    contexts: bool = False
    shared_prefix: int = 0


class _TurnMarks:
    """The marks of a prompt, and of the prompts that its runs were computed in, as needed."""

    def __init__(self, seq: TokenSequence, runs: Sequence[SpanRun]) -> None:
        self._seq = seq
        self._runs = runs
        self._own: PrefixMarks | None = None
        self._turns: dict[str, PrefixMarks | None] = {}

    def of(self, store: SpanStore, run: SpanRun, header: SpanHeader) -> PrefixMarks | None:
        """Those of the prompt that a run was computed in; why there are none is counted."""
        if header.turn is None or self._turns.get(header.turn) is None:
            found = store.get_context(run, header)
            if header.turn is None or found is None:
                return None
            self._turns[header.turn] = found
        return self._turns[header.turn]

    def own(self, store: SpanStore) -> PrefixMarks:
        """Those of the prompt."""
        if self._own is None:
            ends = (at for run in self._runs for at in (run.start, run.end))
            key = store.mark_key(self._seq.namespace)
            self._own = PrefixMarks.of(key, self._seq[:], ends)
        return self._own

    def told(self, store: SpanStore) -> PromptContexts | None:
        """What the caller compares by; None if no run has marks."""
        turns = {name: one for name, one in self._turns.items() if one is not None}
        if not turns:
            return None
        return PromptContexts(self.own(store), turns, store.mark_key(self._seq.namespace))


def _approximate(plan: ReusePlan) -> tuple[int, int, int]:
    segments = plan.segments
    some = segments[segments["class"] == 1]
    first = int(some["start"].min()) if len(some) else int(segments["end"].max(initial=0))
    hops = int(some["hops"].max()) if len(some) else 0
    return first, hops, int((some["end"] - some["start"]).sum())


def _pieces_within(
    runs: Sequence[SpanRun], gaps: Sequence[tuple[int, int]]
) -> list[tuple[SpanRun, _Ranges]]:
    ends = [high for _, high in gaps]
    return [(run, part) for run in runs if (part := _within(run, gaps, ends))]


def _within(run: SpanRun, gaps: Sequence[tuple[int, int]], ends: Sequence[int]) -> _Ranges:
    """What of a run is in gaps, which end at ``ends``, counted from the run's first token."""
    found = []
    for number in range(bisect_right(ends, run.start), len(gaps)):
        low, high = gaps[number]
        if low >= run.end:
            break
        found.append((max(low, run.start) - run.start, min(high, run.end) - run.start))
    return tuple(found)


def _without(gaps: _Ranges, spans: Sequence[PlacedSpan]) -> _Ranges:
    """What is left of gaps; both ascend."""
    left: list[tuple[int, int]] = []
    number = 0
    for low, high in gaps:
        at = low
        while number < len(spans) and spans[number].end <= high:
            if at < spans[number].start:
                left.append((at, spans[number].start))
            at = spans[number].end
            number += 1
        if at < high:
            left.append((at, high))
    return tuple(left)


def _say_positions(rope: RopeSpec, items: Sequence[Item]) -> bool:
    """Whether the deltas of a prompt with such items are differences of positions."""
    try:
        rope.check_items(items)
    except ItemPositionsError:
        return False
    return True


def _pieces(
    store: SpanStore,
    asked: _Asked,
    run: SpanRun,
    part: _Ranges,
    header: SpanHeader,
    contexts: _TurnMarks | None = None,
) -> list[PlacedSpan]:
    """What may be used of a run's ranges, with labels. What may not is counted by reason."""
    judged: _Judgement | None = None
    if header.is_at(run):
        exact = [(low, min(high, header.exact_until), True, 0) for low, high in part]
        rest = [(max(low, header.exact_until), high, False, header.hops) for low, high in part]
        found = [one for one in (*exact, *rest) if one[0] < one[1]]
    else:
        edges = [(low, min(high, header.exact_until), 1) for low, high in part]
        edges += [(max(low, header.exact_until), high, header.hops + 1) for low, high in part]
        found = [(low, high, False, hops) for low, high, hops in edges if low < high]
    usable = []
    for low, high, is_exact, hops in sorted(found):
        start, end, delta = run.start + low, run.start + high, run.position - header.position
        context = None
        if not is_exact:
            was_moved = not header.is_at(run)
            if was_moved:
                end = min(end, asked.moved_end)
            why = _refusal(asked, run, header, end - start, hops, was_moved=was_moved)
            if why is None and was_moved:
                judged = judged or _judge(store, asked, run, header, contexts)
                why = judged.why
                if why is None and judged.has_context and header.turn is not None:
                    context = SpanContext(
                        header.turn,
                        header.start + low,
                        judged.same_conversation,
                        low < header.exact_until,
                    )
            if why is not None:
                if why != _COUNTED:
                    store.count(why)
                continue
            if was_moved and not asked.is_whole:
                start += asked.policy.recompute_first
                end -= asked.policy.recompute_last
        if start < end:
            usable.append(PlacedSpan(start, end, is_exact, hops, delta, context))
    return usable


@dataclass(frozen=True, slots=True)
class _Judgement:
    """Whether a run may move by what it was computed after; ``why`` not."""

    why: str | None
    same_conversation: bool = False
    has_context: bool = False


# Why a run has no context is counted where it is read.
_COUNTED: Final = ""


def _judge(
    store: SpanStore, asked: _Asked, run: SpanRun, header: SpanHeader, contexts: _TurnMarks | None
) -> _Judgement:
    """Whether a moved run is in scope, and its context is known where it has to be."""
    policy = asked.policy
    is_own = asked.session is not None and header.session == asked.session
    wants_prefix = not is_own and asked.shared_prefix > 0 and header.turn is not None
    marks = None
    if contexts is not None and (asked.contexts or (wants_prefix and policy.scope != "namespace")):
        marks = contexts.of(store, run, header)
        if marks is None and asked.contexts:
            return _Judgement(_COUNTED)
    if marks is not None and contexts is not None and wants_prefix:
        is_own = marks.num_common(contexts.own(store)) >= asked.shared_prefix
    if policy.scope == "conversation" and not is_own:
        return _Judgement("scope")
    has_limits = (
        policy.max_cuts is not None or policy.max_lost_context < 1 or policy.max_new_context < 1
    )
    if has_limits and not asked.contexts:
        # Nobody compares which tokens were before the run.
        return _Judgement("context")
    return _Judgement(None, is_own, has_context=asked.contexts)


def _refusal(
    asked: _Asked,
    run: SpanRun,
    header: SpanHeader,
    num_tokens: int,
    hops: int,
    *,
    was_moved: bool,
) -> str | None:
    """Why approximate KV may not be used; None if it may."""
    policy = asked.policy
    if not policy.approximate:
        return "not_exact"
    if hops > policy.max_hops:
        return "hops"
    if set(policy.forbid_kinds) & {*run.kinds, *header.kinds}:
        return "kinds"
    if header.exact_until < header.num_tokens:
        built = header.policy or _LAXEST
        if not built.is_at_least_as_strict_as(policy):
            return "laxer_policy"
    if not was_moved:
        return None
    if not asked.is_whole and num_tokens < (policy.min_run or _MIN_RUN):
        return "short"
    return "repair" if policy.recompute_share and not asked.is_whole else None


@dataclass(frozen=True, slots=True)
class _Joined:
    """Rows of spans that continue each other, all rotated by the same."""

    start: int
    delta: int
    hops: int
    rows: list[SpanRows]

    @property
    def num_tokens(self) -> int:
        return sum(one.num_tokens for one in self.rows)

    def within(self, num_tokens: int) -> Iterator[tuple[int, list[SpanRows]]]:
        """In parts of so many tokens: where each begins, and its rows."""
        if len(self.rows) > 1:  # which is short
            yield self.start, self.rows
            return
        for at in range(0, self.num_tokens, num_tokens):
            yield self.start + at, [self.rows[0].part(at, at + num_tokens)]


def _joined(arrived: Sequence[_Arrived], token_bytes: int) -> list[_Joined]:
    """Spans in their order; short ones that continue each other together.

    Else whoever has many short messages in a prompt chooses how long it takes to write it.
    """
    most = min(_STAGED, _JOINED_BYTES // token_bytes)
    found: list[_Joined] = []
    end = count = 0
    for one in arrived:
        span = one.span
        last = found[-1] if found else None
        count += one.rows.num_tokens
        if (
            last is not None
            and span.start == end
            and span.delta == last.delta
            and (not span.delta or span.hops == last.hops)
            and count <= most
        ):
            last.rows.append(one.rows)
        else:
            found.append(_Joined(span.start, span.delta, span.hops, [one.rows]))
            count = one.rows.num_tokens
        end = span.end
    return found


def _write(arrived: list[_Arrived], pool: KVPool, table: NDArray[np.integer[Any]]) -> None:
    """Write rows where they belong, rotated to their positions."""
    joined = _joined(arrived, SpanShape.of(pool.layout).token_bytes)
    for one in joined:
        if not one.delta:
            k, v = _tensors(one.rows, pool)
            pool.scatter(k, v, table, one.start)
    _rotate([one for one in joined if one.delta], pool, table)


def _rotate(moved: list[_Joined], pool: KVPool, table: NDArray[np.integer[Any]]) -> None:
    """Rotate rows in a small pool of their own, then write them where they belong.

    Short ones are rotated together, each by its own delta: a prompt may have a thousand.
    """
    if not moved:
        return
    size = pool.layout.block_size
    counts = [one.num_tokens for one in moved]
    most = _JOINED_BYTES // SpanShape.of(pool.layout).token_bytes
    together = min(_STAGED, most, sum(counts))
    half = -(-min(_STAGED, max(together, *counts)) // size)
    staging = KVPool(
        replace(pool.layout, axes=None), pool.rope, num_blocks=2 * half, device=pool.device
    )
    from_blocks, to_blocks = np.arange(half), np.arange(half, 2 * half)
    for some in _batches(moved, half * size, together):
        k, v = _tensors([rows for one in some for rows in one.rows], pool)
        staging.scatter(k, v, from_blocks, 0)
        places = [0, *accumulate(one.num_tokens for one in some)]
        moves = [
            (at, half * size + at, one.num_tokens, one.delta)
            for at, one in zip(places, some, strict=False)
        ]
        # The delta is one of positions, and `_rotatable` has looked at the items.
        staging.apply(np.array(moves, dtype=_MOVE), hops=some[0].hops, items=())
        k, v = staging.gather(to_blocks, 0, places[-1])
        for one, (low, high) in zip(some, pairwise(places), strict=True):
            pool.scatter(k[:, low:high], None if v is None else v[:, low:high], table, one.start)


def _batches(moved: Iterable[_Joined], most: int, together: int) -> Iterator[list[_Joined]]:
    """What is rotated in one call: a part of so many tokens at most, or several short ones.

    Args:
        moved: What is to be rotated.
        most: Tokens of a part.
        together: Tokens of several ones.
    """
    batch: list[_Joined] = []
    count = 0
    for one in sorted(moved, key=lambda one: one.hops):
        for start, rows in one.within(most):
            part = replace(one, start=start, rows=rows)
            if batch and (batch[0].hops != one.hops or count + part.num_tokens > together):
                yield batch
                batch, count = [], 0
            batch.append(part)
            count += part.num_tokens
    if batch:
        yield batch


def _tensors(rows: Sequence[SpanRows], pool: KVPool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows, one after another, as the pool's tensors ``[layers, tokens, heads, channels]``."""
    layout = pool.layout

    def tensor(sides: list[NDArray[np.uint8]], width: int) -> torch.Tensor:
        # The rows may be gone before a copy that does not block is done.
        if len(sides) == 1:
            numbers = torch.from_numpy(np.ascontiguousarray(sides[0])).to(pool.device)
        else:
            num_layers, _, num_bytes = sides[0].shape
            count = sum(one.shape[1] for one in sides)
            numbers = torch.empty(
                (num_layers, count, num_bytes), dtype=torch.uint8, device=pool.device
            )
            at = 0
            for one in sides:
                numbers[:, at : at + one.shape[1]] = torch.from_numpy(np.ascontiguousarray(one))
                at += one.shape[1]
        shape = (*numbers.shape[:2], layout.num_kv_heads, width)
        return numbers.view(pool.dtype).reshape(shape)

    v = tensor([one.v for one in rows], layout.v_row) if layout.v_row else None
    return tensor([one.k for one in rows], layout.k_row), v


def rows_of(pool: KVPool, table: NDArray[np.integer[Any]], start: int, end: int) -> SpanRows:
    """Copy positions of a pool to the host, as `SpanStore.put` takes them.

    Args:
        pool: The pool.
        table: A block table from position 0.
        start: First position.
        end: Position after the last.

    Raises:
        LayoutError: The rows of layers differ in shape.
        ValueError: A position is outside the table.
    """
    return rows_from(*pool.gather(table, start, end))


def rows_from(k: torch.Tensor, v: torch.Tensor | None) -> SpanRows:
    """What `KVPool.gather` has returned, copied to the host."""
    num_layers, num_tokens = k.shape[:2]
    sides = [
        np.empty((num_layers, num_tokens, 0), np.uint8)
        if one is None
        else one.reshape(num_layers, num_tokens, -1).view(torch.uint8).cpu().numpy()
        for one in (k, v)
    ]
    return SpanRows(sides[0], sides[1])
