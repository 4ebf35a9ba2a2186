"""Turns that have ended, written to a store in a thread, for engines that free their KV at once.

A turn is read from its blocks after the engine has freed them, run by run, as long as nobody writes
to them: whoever is about to hand blocks out says so (`TurnWriter.overwritten`), and what was not
read of them by then is given up. It waits for no more than a copy of 256 tokens that is under way.

Tenants take turns: after some runs of one, the rest of a long turn waits for those of others.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtrie._core import Span
from kvtrie.store.contexts import with_marks
from kvtrie.store.placing import rows_of
from kvtrie.store.threads import Crew
from kvtrie.store.writing import SWEEP_SECONDS, sweep_some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from logging import Logger

    import torch
    from numpy.typing import NDArray

    from kvtrie._core import ReusePolicy, TokenSequence
    from kvtrie.pool.kv_pool import KVPool
    from kvtrie.store import PrefixMarks, SpanRows, SpanRun, SpanStore
    from kvtrie.tags import Stream

MOST_RUNS: Final = 1024
"""Runs of one prompt that are looked up, and of one turn that are written: its first ones."""
# Runs of a turn that are written before others have theirs.
_PUTS_AT_ONCE: Final = 32
# Tokens that are copied at once; a step may have to wait for the copy.
_READ_TOKENS: Final = 256
_GENERATED: Final = ("answer", "reasoning", "tool_call")


@dataclass(frozen=True, slots=True)
class StorePrompt:
    """Tokens of one request as the store cuts and names them.

    ``spans`` are start, end and kind.
    """

    tokens: NDArray[Any]
    salt: str | None
    borders: tuple[int, ...]
    spans: tuple[tuple[int, int, str], ...]
    session: str | None


@dataclass(frozen=True, slots=True)
class TurnToWrite:
    """Runs of a request that has ended, and the blocks that hold them from position 0.

    ``pieces`` are start, end, exact tokens and hops of each. ``slots`` are the slots of the tokens
    in the pool, where the blocks are not the pool's.
    """

    prompt: StorePrompt
    blocks: tuple[int, ...]
    pieces: tuple[tuple[int, int, int, int | None], ...]
    policy: ReusePolicy
    slots: torch.Tensor | None = None


def borders_of(stream: Stream) -> set[int]:
    """Where prompts are cut: where the model's own sections begin and end, and between others.

    What the template writes around a message goes with what is not the model's. So a turn has the
    runs that the next prompt has, although the last token that was sampled has no KV; and no run is
    the template's alone, which would be the same everywhere, and stored as computed in one place.
    """
    borders: set[int] = set()
    follows_own = False
    for one in sorted(stream.sections, key=lambda one: one.span.start):
        if one.nested:
            continue
        is_own = one.kind in _GENERATED
        if is_own:
            borders |= {one.span.start, one.span.end, *one.dropped}
        elif not follows_own:
            borders.add(one.span.start)
        follows_own = is_own
    return borders


def runs_of(store: SpanStore, seq: TokenSequence, prompt: StorePrompt) -> list[SpanRun]:
    """The runs of a prompt."""
    spans = [Span(start, end, kind) for start, end, kind in prompt.spans]
    return store.runs(seq, prompt.borders, spans)


def sought_runs(
    store: SpanStore, seq: TokenSequence, prompt: StorePrompt, gaps: Sequence[tuple[int, int]]
) -> list[SpanRun]:
    """The first runs of a prompt between the ends of what is looked up."""
    low, high = gaps[0][0], gaps[-1][1]
    wanted = [run for run in runs_of(store, seq, prompt) if run.end > low and run.start < high]
    store.count("too_many", max(0, len(wanted) - MOST_RUNS))
    return wanted[:MOST_RUNS]


def _neighbours(runs: Sequence[SpanRun]) -> Iterator[list[SpanRun]]:
    """Runs that are next to each other, as many as are read at once."""
    some: list[SpanRun] = []
    for run in runs:
        is_full = len(some) == _PUTS_AT_ONCE
        if some and (
            is_full or run.start != some[-1].end or run.end - some[0].start > _READ_TOKENS
        ):
            yield some
            some = []
        some.append(run)
    if some:
        yield some


class _Writing:
    """A turn that is to be written."""

    def __init__(self, turn: TurnToWrite) -> None:
        self.turn = turn
        self.blocks = set(turn.blocks)
        self.lost: set[int] = set()
        # The positions from here on are read elsewhere, if they still are to be read.
        self.tail: Callable[[], SpanRows] | None = None
        self.tail_start: int | None = None
        self.ready: Callable[[], None] | None = None
        # What is left to do; others may have their turn after each step.
        self.steps: Iterator[None] = iter(())


class TurnWriter:
    """Writes turns in a thread.

    Args:
        store: Where.
        sequence: Makes the sequence of a prompt.
        max_waiting: Turns that may wait.
        log: Where a turn that fails is reported.
        block_size: Tokens of a block; None: the pool's.
        ended: Called when a turn was written or given up, in any thread.
    """

    def __init__(
        self,
        store: SpanStore,
        sequence: Callable[[StorePrompt], TokenSequence],
        max_waiting: int,
        log: Logger,
        *,
        block_size: int | None = None,
        ended: Callable[[], None] | None = None,
    ) -> None:
        self.pool: KVPool | None = None
        """What the thread reads; None: nothing."""
        self._store = store
        self._sequence = sequence
        self._log = log
        self._block_size = block_size
        self._ended = ended
        self._changed = threading.Condition()
        # Blocks that are being copied.
        self._reading: frozenset[int] = frozenset()
        self._jobs: list[_Writing] = []
        self._num_done = 0
        self._crew = Crew(
            "kvtrie-turns",
            threads=1,
            max_waiting=max_waiting,
            failed=self._failed,
            is_shared=True,
            chore=lambda: sweep_some(store),
            chore_every=SWEEP_SECONDS,
        )

    def offer(self, turn: TurnToWrite, pool: KVPool | None, overwritten: Sequence[int]) -> None:
        """Have a turn written, whose blocks are those of the pool.

        Args:
            turn: The turn.
            pool: What the caller's thread reads.
            overwritten: Blocks that are written to next. If the last one is among them, what the
                turn has in it is read now.
        """
        job = _Writing(turn)
        if pool is not None:
            size, end = pool.layout.block_size, turn.pieces[-1][1]
            number = (end - 1) // size
            if turn.blocks[number] in overwritten:
                job.tail_start = number * size
                rows = rows_of(pool, np.array(turn.blocks, np.int64), job.tail_start, end)
                job.tail = lambda: rows
                job.blocks.discard(turn.blocks[number])
        self._offer(job)

    def offer_slots(
        self,
        turn: TurnToWrite,
        tail: Callable[[], SpanRows] | None,
        tail_start: int,
        ready: Callable[[], None],
    ) -> None:
        """Have a turn written, whose ``slots`` say where it is.

        Args:
            turn: The turn.
            tail: Returns the rows from a position on, whose slots are handed out at once; called
                in the thread. None: the blocks have all.
            tail_start: That position.
            ready: Returns when all of the turn is in its slots; called in the thread.
        """
        job = _Writing(turn)
        job.tail, job.ready = tail, ready
        job.tail_start = None if tail is None else tail_start
        self._offer(job)

    def _offer(self, job: _Writing) -> None:
        job.steps = self._steps(job)
        with self._changed:
            self._jobs.append(job)
        if not self._crew.offer(lambda: self._write(job), job.turn.prompt.salt):
            self._store.count("dropped", len(job.turn.pieces))
            self._end(job)

    @property
    def is_idle(self) -> bool:
        """Whether no turn waits or is being read."""
        return not self._jobs

    def overwritten(self, blocks: Iterable[int]) -> None:
        """Give up what was not copied of these blocks, and wait for the copy of one of them."""
        blocks = set(blocks)
        if not blocks or not self._jobs:
            return
        with self._changed:
            for job in self._jobs:
                job.lost |= job.blocks & blocks
            self._changed.wait_for(lambda: self._reading.isdisjoint(blocks))

    def give_up(self) -> None:
        """Read no block of any turn."""
        with self._changed:
            for job in self._jobs:
                job.tail = None
                job.lost.update(job.turn.blocks)
            self._changed.wait_for(lambda: not self._reading)

    def take_done(self) -> int:
        """Turns that were written or given up since the last call."""
        if not self._num_done:
            return 0
        with self._changed:
            done, self._num_done = self._num_done, 0
        return done

    def wait(self, timeout: float) -> bool:
        """Wait until no turn waits, at most so many seconds; whether that is so."""
        return self._crew.wait(timeout)

    def close(self) -> None:
        """End the thread; turns that wait for it are written, if that takes no more than 5 s."""
        self._crew.close(timeout=5.0)

    def _write(self, job: _Writing) -> None:
        is_over = True
        try:
            for _ in job.steps:
                if self._crew.put_back(lambda: self._write(job), job.turn.prompt.salt):
                    is_over = False
                    return
        finally:
            if is_over:
                self._end(job)

    def _steps(self, job: _Writing) -> Iterator[None]:
        """Write a turn; between two steps nothing of the pool is held."""
        turn = job.turn
        if job.ready is not None:
            job.ready()
        labels = {(start, end): (exact, hops) for start, end, exact, hops in turn.pieces}
        seq = self._sequence(turn.prompt)
        session = self._store.session_of(seq.namespace, turn.prompt.session)
        runs = runs_of(self._store, seq, turn.prompt)
        marks: PrefixMarks | None = None
        marked: set[int] = set()
        wanted = [run for run in runs if self._is_wanted(run, labels.get((run.start, run.end)))]
        count = 0
        for some in _neighbours(wanted):
            if count + len(some) > _PUTS_AT_ONCE:
                yield
                count = 0
            count += len(some)
            for run, rows in self._rows_of(job, some):
                if rows is None:
                    self._store.count("overwritten")
                    continue
                if marks is None:
                    borders = [at for one in runs for at in (one.start, one.end)]
                    marks = self._store.marks(seq, borders)
                    marked = self._marked(wanted, marks)
                exact, hops = labels[run.start, run.end]
                self._store.put(
                    run,
                    rows,
                    exact_until=exact,
                    hops=hops,
                    policy=turn.policy,
                    session=session,
                    marks=marks if run.start in marked else None,
                )
                del rows

    def _rows_of(
        self, job: _Writing, some: Sequence[SpanRun]
    ) -> Iterator[tuple[SpanRun, SpanRows | None]]:
        """The rows of runs that are next to each other; None of what was overwritten."""
        at = some[0].start
        whole = self._read(job, at, some[-1].end)
        for run in some:
            if whole is not None:
                yield run, whole.part(run.start - at, run.end - at)
            elif len(some) > 1:
                # Perhaps only a neighbour was overwritten.
                yield run, self._read(job, run.start, run.end)
            else:
                yield run, None

    def _marked(self, runs: Sequence[SpanRun], marks: PrefixMarks | None) -> set[int]:
        """Where the runs begin that are stored with marks."""
        if marks is None:
            return set()
        sizes = [self._store.shape.num_bytes(run.num_tokens) for run in runs]
        chosen = with_marks(sizes, len(marks.tobytes()))
        return {run.start for run, is_chosen in zip(runs, chosen, strict=True) if is_chosen}

    def _is_wanted(self, run: SpanRun, label: tuple[int, int | None] | None) -> bool:
        if label is None:
            return False
        exact, hops = label
        if self._store.is_known(run, exact_until=exact, hops=hops):
            self._store.count("known")
            return False
        return True

    def _read(self, job: _Writing, start: int, end: int) -> SpanRows | None:
        """Copy a range of a turn; None if a block of it was written to since."""
        tail = None
        with self._changed:
            pool = self.pool
            if pool is None:
                return None
            read_tail, tail_start = job.tail, job.tail_start
        if tail_start is not None and end > tail_start:
            if read_tail is None:
                return None
            tail = read_tail().part(max(0, start - tail_start), end - tail_start)
            end = tail_start
            if start >= end:
                return tail
        parts = []
        for low in range(start, end, _READ_TOKENS):
            part = self._copy(job, pool, low, min(low + _READ_TOKENS, end))
            if part is None:
                return None
            parts.append(part)
        if tail is not None:
            parts.append(tail)
        return parts[0] if len(parts) == 1 else parts[0].joined(*parts[1:])

    def _copy(self, job: _Writing, pool: KVPool, start: int, end: int) -> SpanRows | None:
        """Copy a range out of the pool, whose blocks wait for that; None as `_read`."""
        size = self._block_size or pool.layout.block_size
        used = job.turn.blocks[start // size : -(-end // size)]
        with self._changed:
            if self.pool is not pool or not job.lost.isdisjoint(used):
                return None
            self._reading = frozenset(used)
        try:
            rows = _rows(pool, job.turn, start, end)
        finally:
            with self._changed:
                # Whoever could not wait for the copy has said so by now, or has no slots yet.
                is_whole = self.pool is pool and job.lost.isdisjoint(used)
                self._reading = frozenset()
                self._changed.notify_all()
        return rows if is_whole else None

    def _end(self, job: _Writing) -> None:
        with self._changed:
            self._jobs.remove(job)
            self._num_done += 1
        if self._ended is not None:
            self._ended()

    def _failed(self, error: Exception) -> None:
        self._store.count("put_failed")
        self._log.error("kvtrie: a turn was not stored", exc_info=error)


def _rows(pool: KVPool, turn: TurnToWrite, start: int, end: int) -> SpanRows:
    if turn.slots is None:
        return rows_of(pool, np.array(turn.blocks, np.int64), start, end)
    return rows_of(pool, turn.slots[start:end].numpy(force=True), 0, end - start)
