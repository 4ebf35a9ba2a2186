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
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtrie._core import EXACT_ONLY, Imported
from kvtrie.rope import ItemPositionsError
from kvtrie.store.placing import Arrived, empty_pinned, write
from kvtrie.store.shape import SpanShape
from kvtrie.store.threads import Crew, Shares
from kvtrie.store.usable import (
    Asked,
    PlacedSpan,
    TurnMarks,
    approximate_in,
    pieces_within,
    usable_spans,
    without,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from kvtrie._core import Item, ReusePlan, ReusePolicy, TokenSequence
    from kvtrie.pool.kv_pool import KVPool
    from kvtrie.rope import RopeSpec
    from kvtrie.store.contexts import PromptContexts
    from kvtrie.store.estimate import Estimate
    from kvtrie.store.runs import SpanRun
    from kvtrie.store.store import SpanStore
    from kvtrie.store.usable import Ranges

_LOG: Final = logging.getLogger("kvtrie.store")
# The largest delta by which a pool rotates.
_FURTHEST: Final = 1 << 27


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
        asked = Asked(
            gaps=tuple(gaps),
            all_gaps=tuple((int(low), int(high)) for low, high in plan.gaps),
            num_tokens=len(seq),
            policy=policy,
            session=self._store.session_of(seq.namespace, session),
            moved_end=len(seq) if moved_end is None else moved_end,
            planned=approximate_in(plan),
            items=seq.items,
        )
        load = SpanLoad(self._store, asked, owner=_owner(seq))
        pieces = pieces_within(runs, gaps)
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
        asked = Asked(
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
            self._fetch(load, asked, pieces_within(named, gaps), TurnMarks(seq, named))

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
        asked: Asked,
        pieces: list[tuple[SpanRun, Ranges]],
        contexts: TurnMarks | None = None,
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
        asked: Asked,
        run: SpanRun,
        part: Ranges,
        contexts: TurnMarks | None,
    ) -> int:
        """Read one run, hand over what of it may be used, and return how many tokens were read."""
        if not asked.policy.approximate:
            # Whether a run is exact here is in its header, which is small.
            head = self._store.get_ranges(run, [], [])
            if head is None or not usable_spans(self._store, asked, run, part, head[0]):
                return 0
        empty = empty_pinned if self._pinned else SpanShape.empty
        into = [empty(self._store.shape, high - low) for low, high in part]
        found = self._store.get_ranges(run, part, into)
        if found is None:
            return 0
        header, good = found
        for span in usable_spans(self._store, asked, run, part, header, contexts):
            for (low, high), is_good, rows in zip(part, good, into, strict=True):
                at = run.start + low
                if is_good and at <= span.start and span.end <= run.start + high:
                    load.arrived(Arrived(span, rows.part(span.start - at, span.end - at)))
        return sum(rows.num_tokens for rows, is_good in zip(into, good, strict=True) if is_good)

    def _failed(self, error: Exception) -> None:
        self._store.count("load_failed")
        _LOG.error("runs were not loaded", exc_info=error)


class SpanLoad:
    """One load under way. `SpanLoader.start` makes it."""

    def __init__(
        self,
        store: SpanStore,
        asked: Asked,
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
        self._arrived: list[Arrived] = []
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

    def arrived(self, one: Arrived) -> None:
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
        write(arrived, pool, table)
        self._give_room()
        spans = tuple(one.span for one in arrived)
        self._store.count("placed_exact", sum(one.end - one.start for one in spans if one.is_exact))
        approximate = sum(one.end - one.start for one in spans if not one.is_exact)
        self._store.count("placed_approximate", approximate)
        left = without(self._asked.all_gaps, spans)
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

    def _take(self) -> list[Arrived]:
        with self._lock:
            self._is_taken = True
            found, self._arrived = self._arrived, []
        return sorted(found, key=lambda one: one.span.start)

    def _rotatable(self, arrived: list[Arrived], pool: KVPool) -> list[Arrived]:
        kind = pool.layout.kv_type
        most = 1 if kind is not None and kind.requantizes else 255
        usable = []
        can_rotate = pool.rope is not None and say_positions(pool.rope, self._asked.items)
        for one in arrived:
            is_far = abs(one.span.delta) > _FURTHEST
            if one.span.delta and (not can_rotate or is_far or one.span.hops > most):
                self._store.count("not_rotated")
                continue
            usable.append(one)
        return usable

    def _usable(self, arrived: list[Arrived], pool: KVPool) -> list[Arrived]:
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

    _arrived: tuple[Arrived, ...]
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
                some.append(Arrived(span, one.rows.part(low - begin, high - begin)))
        write(some, pool, table)
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


def say_positions(rope: RopeSpec, items: Sequence[Item]) -> bool:
    """Whether the deltas of a prompt with such items are differences of positions."""
    try:
        rope.check_items(items)
    except ItemPositionsError:
        return False
    return True
