"""The worker's half of the store: threads load runs for requests that wait, and write turns.

Nothing here waits for the store on the step's path. A turn is read from vLLM's blocks after vLLM
has freed them, run by run, as long as no step writes to them: the scheduler's half names the blocks
that a step is going to write, and what was not read of them by then is given up. A block that was
not full has no hash, and vLLM hands it out first: if the step that brings a turn writes to its last
block, that one is read before it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtrie._core import SHARED, Namespace, Span, TokenSequence
from kvtrie.gates import GateMismatchError
from kvtrie.integrations import _served
from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations.vllm import _gate
from kvtrie.integrations.vllm._metadata import FoundSpans, StoreReport
from kvtrie.integrations.vllm._settings import WHERE
from kvtrie.integrations.vllm._store_settings import HOST
from kvtrie.models.fingerprint import (
    CheckpointError,
    checkpoint_digest,
    rope_id,
    settings_digest,
    weights_digest,
)
from kvtrie.store import (
    BackendError,
    Estimate,
    SpanLoader,
    SpanShape,
    SpanStore,
    StoreRefused,
    TenantLimits,
    rows_of,
)
from kvtrie.store.contexts import with_marks
from kvtrie.store.threads import Crew

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from vllm.config import VllmConfig

    from kvtrie.integrations._served import EngineModel
    from kvtrie.integrations.vllm._metadata import Load, Seek, StorePrompt, StoreStep, TurnToWrite
    from kvtrie.integrations.vllm._settings import Settings
    from kvtrie.integrations.vllm._stats import Counts
    from kvtrie.integrations.vllm._store_settings import StoreSettings
    from kvtrie.pool.kv_pool import KVPool
    from kvtrie.store import PrefixMarks, SpanLoad, SpanRows, SpanRun, TakenSpans

_LOG: Final = logging.getLogger("vllm.kvtrie")
# Runs of one prompt that are looked up.
_MAX_RUNS: Final = 1024
# Loads that wait for a thread, and seconds that a step without tokens waits for one to end.
_MAX_WAITING: Final = 64
_PAUSE: Final = 0.005
# Turns between two visits to runs that have outlived their time.
_SWEEP_EVERY: Final = 64
_COUNTED: Final = "store"
# Tokens of short runs that are copied at once; a step may have to wait for the copy.
_READ_TOKENS: Final = 256


def make(settings: Settings, vllm_config: VllmConfig, pool: KVPool, counts: Counts) -> StoreWorker:
    """Open the store of the served model.

    Raises:
        StoreRefused: It is of another model, KV, geometry, key or version, or does not answer.
        SettingsError: The key cannot be read, or the model has no name of its own.
    """
    given = settings.stored()
    if given is None:
        msg = f"{WHERE}: there is no store"
        raise SettingsError(msg)
    served = _gate.engine_model(settings, vllm_config)
    model = _identity(given, served, vllm_config)
    space = Namespace(model=model, kv_dtype=served.kv_dtype, salt=SHARED)
    try:
        backend = given.open_backend()
    except BackendError as error:
        msg = f"{WHERE}: store: {error}"
        raise StoreRefused(msg, reason=error.reason) from error
    store = SpanStore(
        backend,
        given.key(WHERE),
        space,
        SpanShape.of(pool.layout),
        max_bytes=given.max_bytes,
        limits=TenantLimits(max_bytes=given.tenant_bytes, lifetime=given.lifetime),
        longest=given.run_tokens,
    )
    _LOG.info("kvtrie: store %s: %d runs of this model", given.backend, store.num_runs)
    return StoreWorker(store, given, space, counts)


def _identity(given: StoreSettings, served: EngineModel, vllm_config: VllmConfig) -> str:
    """What the KV of a model depends on: its weights, and how vLLM computes with them.

    Raises:
        SettingsError: There is no name for what cannot be told from others.
    """
    name, config = given.model, vllm_config.model_config
    dtype = str(config.dtype).removeprefix("torch.")
    # What another process has stored may be of weights that differ in a few rows.
    digest = checkpoint_digest if given.backend == HOST else weights_digest
    said = [_digest(served, digest) if name is None else name, dtype]
    settings = config.hf_text_config
    said.append(settings_digest(settings))
    if "longrope" in rope_id(settings) or '"su"' in rope_id(settings):
        # vLLM chooses the factors of all positions by the longest context that it serves.
        said.append(f"context {config.max_model_len}")
    if served.quantization is not None:
        said.append(served.quantization)
    overrides: object = config.hf_overrides
    if callable(overrides):
        if name is None:
            why = "hf_overrides is a function"
            raise _nameless(why)
    elif overrides:
        text = json.dumps(overrides, default=repr, sort_keys=True)
        # The store's description has room for names alone.
        said.append(hashlib.blake2b(text.encode(), digest_size=16).hexdigest())
    return " ".join(said)


def _digest(served: EngineModel, digest: Callable[[Path], str]) -> str:
    try:
        return _served.checkpoint_of(served, digest)
    except (GateMismatchError, CheckpointError) as error:
        raise _nameless(error) from error


def _nameless(why: object) -> SettingsError:
    return SettingsError(
        f"{WHERE}: store: the model cannot be told from others: {why}; give it a name that "
        'changes with its weights: "model"'
    )


class StoreWorker:
    """Loads and writes runs.

    Args:
        store: Where.
        settings: How.
        space: The store's namespace.
        counts: Where everything is counted.
    """

    def __init__(
        self, store: SpanStore, settings: StoreSettings, space: Namespace, counts: Counts
    ) -> None:
        self.store = store
        self._space = space
        self._counts = counts
        self._told: Counter[str] = Counter()
        self._estimate = Estimate(prefill_tokens_per_s=settings.prefill_tokens_per_s)
        self._pool: KVPool | None = None
        self._arrival = threading.Event()
        # By ticket.
        self._loads: dict[int, SpanLoad] = {}
        self._taken: dict[int, TakenSpans] = {}
        self._loader = SpanLoader(
            store,
            estimate=self._estimate,
            threads=settings.threads,
            max_waiting=_MAX_WAITING,
            max_bytes=settings.load_bytes,
            is_shared=True,
        )
        self._turns = _Turns(store, self._sequence, max(1, settings.turns))

    def map(self, pool: KVPool, for_reading: KVPool) -> None:
        """Use these pools of the same tensors, the second one in other threads."""
        self._pool = pool
        self._turns.pool = for_reading

    def unmap(self) -> None:
        """Read and write no block until `map`."""
        self._turns.give_up()
        self._pool = self._turns.pool = None

    # --- the step ------------------------------------------------------------------------------

    def begin(self, step: StoreStep) -> None:
        """Before anything is written to blocks."""
        if step.generation is not None:
            # What waits to be written is of the time before.
            self._turns.give_up()
            self.store.renew(step.generation)
        for turn in step.turns:
            self._turns.offer(turn, self._pool, step.overwritten)
        self._turns.overwritten(step.overwritten)

    def write(self, load: Load) -> None:
        """Write what was loaded for a request into its blocks.

        Raises:
            RuntimeError: Rows are missing.
        """
        taken = self._taken.get(load.ticket)
        table = np.array(load.blocks, np.int64)
        for start, end in load.stored:
            written = 0
            if taken is not None and self._pool is not None:
                written = taken.write(self._pool, table, start, end, first=load.first)
            if written != end - start:
                msg = f"{written} of the tokens [{start}, {end}) are loaded"
                raise RuntimeError(msg)

    def end(self, step: StoreStep) -> None:
        """After the copies of the step."""
        for tokens, seconds in step.prefills:
            self._estimate.computed(num_tokens=tokens, seconds=seconds)
        for ticket in step.drops:
            self._taken.pop(ticket, None)
            load = self._loads.pop(ticket, None)
            if load is not None:
                load.cancel()
        for seek in step.seeks:
            self._loads[seek.ticket] = self._seek(seek)
        if step.waits and not self._has_news():
            # Else the engine would run without pause, and keep the threads from running.
            self._arrival.wait(_PAUSE)
        self._arrival.clear()

    def report(self) -> StoreReport | None:
        """What has happened since the last report; None for nothing."""
        self._tell()
        report = StoreReport(num_written=self._turns.take_done())
        for ticket, load in self._loads.items():
            if load.is_done and ticket not in self._taken and self._pool is not None:
                taken = self._taken[ticket] = load.take(self._pool)
                report.found[ticket] = FoundSpans(taken.spans, taken.contexts)
        return report if report.found or report.num_written else None

    def wait(self, timeout: float) -> bool:
        """Wait until no turn waits to be written, at most so many seconds; whether that is so."""
        return self._turns.wait(timeout)

    def close(self) -> None:
        """End the threads; turns that wait for them are written, if that takes no more than 5 s."""
        self._turns.close()
        self._loader.close(timeout=1.0)
        self._tell()
        self.store.close()

    # --- inside --------------------------------------------------------------------------------

    def _has_news(self) -> bool:
        return any(
            load.is_done for ticket, load in self._loads.items() if ticket not in self._taken
        )

    def _seek(self, seek: Seek) -> SpanLoad:
        seq = self._sequence(seek.prompt)

        def runs() -> list[SpanRun]:
            found = self._runs(seq, seek.prompt)
            low, high = seek.gaps[0][0], seek.gaps[-1][1]
            wanted = [run for run in found if run.end > low and run.start < high]
            self.store.count("too_many", max(0, len(wanted) - _MAX_RUNS))
            return wanted[:_MAX_RUNS]

        return self._loader.seek(
            seq,
            seek.gaps,
            runs,
            seek.policy,
            session=seek.prompt.session,
            moved_end=seek.moved_end,
            to_first_gap=seek.to_first_gap,
            contexts=seek.judges,
            shared_prefix=seek.policy.shared_prefix * self._block_size(),
            done=self._arrival.set,
        )

    def _block_size(self) -> int:
        return 0 if self._pool is None else self._pool.layout.block_size

    def _sequence(self, prompt: StorePrompt) -> TokenSequence:
        return TokenSequence(prompt.tokens, self._space.replace(salt=prompt.salt or SHARED))

    def _runs(self, seq: TokenSequence, prompt: StorePrompt) -> list[SpanRun]:
        return runs_of(self.store, seq, prompt)

    def _tell(self) -> None:
        """Count what the store has counted since."""
        now = self.store.counts()
        for name, number in now.items():
            if number != self._told[name]:
                self._counts.add(f"{_COUNTED}/{name}", number - self._told[name])
                self._told[name] = number


def runs_of(store: SpanStore, seq: TokenSequence, prompt: StorePrompt) -> list[SpanRun]:
    """The runs of a prompt."""
    spans = [Span(start, end, kind) for start, end, kind in prompt.spans]
    return store.runs(seq, prompt.borders, spans)


def _neighbours(runs: Sequence[SpanRun]) -> Iterator[list[SpanRun]]:
    """Runs that are next to each other, as many as are read at once."""
    some: list[SpanRun] = []
    for run in runs:
        if some and (run.start != some[-1].end or run.end - some[0].start > _READ_TOKENS):
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
        # The positions in the last block, if they were read at once.
        self.tail: SpanRows | None = None
        self.tail_start = 0


class _Turns:
    """Writes turns in a thread."""

    def __init__(self, store: SpanStore, sequence: Any, max_waiting: int) -> None:  # noqa: ANN401 - a method
        self.pool: KVPool | None = None
        self._store = store
        self._sequence = sequence
        self._changed = threading.Condition()
        # Blocks that are being copied.
        self._reading: frozenset[int] = frozenset()
        self._jobs: list[_Writing] = []
        self._num_done = self._num_written = 0
        self._crew = Crew(
            "kvtrie-turns",
            threads=1,
            max_waiting=max_waiting,
            failed=self._failed,
            is_shared=True,
        )

    def offer(self, turn: TurnToWrite, pool: KVPool | None, overwritten: Sequence[int]) -> None:
        """Have a turn written; ``overwritten``: blocks that the step writes to."""
        job = _Writing(turn)
        if pool is not None:
            size, end = pool.layout.block_size, turn.pieces[-1][1]
            number = (end - 1) // size
            if turn.blocks[number] in overwritten:
                job.tail_start = number * size
                table = np.array(turn.blocks, np.int64)
                job.tail = rows_of(pool, table, job.tail_start, end)
                job.blocks.discard(turn.blocks[number])
        with self._changed:
            self._jobs.append(job)
        if not self._crew.offer(lambda: self._write(job), turn.prompt.salt):
            self._store.count("dropped", len(turn.pieces))
            self._end(job)

    def overwritten(self, blocks: Sequence[int]) -> None:
        """Give up what was not copied of these blocks, and wait for the copy of one of them."""
        if not blocks or not self._jobs:
            return
        with self._changed:
            for job in self._jobs:
                job.lost |= job.blocks.intersection(blocks)
            self._changed.wait_for(lambda: self._reading.isdisjoint(blocks))

    def give_up(self) -> None:
        """Read no block of any turn."""
        with self._changed:
            for job in self._jobs:
                job.tail = None
                job.lost.update(job.turn.blocks)
            self._changed.wait_for(lambda: not self._reading)

    def take_done(self) -> int:
        if not self._num_done:
            return 0
        with self._changed:
            done, self._num_done = self._num_done, 0
        return done

    def wait(self, timeout: float) -> bool:
        return self._crew.wait(timeout)

    def close(self) -> None:
        self._crew.close(timeout=5.0)

    def _write(self, job: _Writing) -> None:
        try:
            turn = job.turn
            labels = {(start, end): (exact, hops) for start, end, exact, hops in turn.pieces}
            seq = self._sequence(turn.prompt)
            session = self._store.session_of(seq.namespace, turn.prompt.session)
            runs = runs_of(self._store, seq, turn.prompt)
            marks: PrefixMarks | None = None
            marked: set[int] = set()
            wanted = [run for run in runs if self._is_wanted(run, labels.get((run.start, run.end)))]
            for some in _neighbours(wanted):
                whole = self._read(job, some[0].start, some[-1].end)
                for run in some:
                    rows = whole
                    if whole is not None:
                        at = some[0].start
                        rows = whole.part(run.start - at, run.end - at)
                    elif len(some) > 1:
                        # Perhaps only a neighbour was overwritten.
                        rows = self._read(job, run.start, run.end)
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
            self._num_written += 1
            if self._num_written % _SWEEP_EVERY == 0:
                self._store.sweep()
        finally:
            self._end(job)

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
            if job.tail is not None and end > job.tail_start:
                tail = job.tail.part(max(0, start - job.tail_start), end - job.tail_start)
                end = job.tail_start
                if start >= end:
                    return tail
            size = pool.layout.block_size
            used = job.turn.blocks[start // size : -(-end // size)]
            if not job.lost.isdisjoint(used):
                return None
            self._reading = frozenset(used)
        try:
            rows = rows_of(pool, np.array(job.turn.blocks, np.int64), start, end)
            return rows if tail is None else rows.joined(tail)
        finally:
            with self._changed:
                self._reading = frozenset()
                self._changed.notify_all()

    def _end(self, job: _Writing) -> None:
        with self._changed:
            self._jobs.remove(job)
            self._num_done += 1

    def _failed(self, error: Exception) -> None:
        self._store.count("put_failed")
        _LOG.error("kvtrie: a turn was not stored", exc_info=error)
