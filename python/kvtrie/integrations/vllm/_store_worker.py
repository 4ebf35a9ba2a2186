"""The worker's half of the store: threads load runs for requests that wait, and write turns.

Nothing here waits for the store on the step's path. A turn is read from vLLM's blocks after vLLM
has freed them, run by run, as long as no step writes to them: the scheduler's half names the blocks
that a step is going to write, and what was not read of them by then is given up. A block that was
not full has no hash, and vLLM hands it out first: if the step that brings a turn writes to its last
block, that one is read before it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtrie._core import SHARED, Namespace, TokenSequence
from kvtrie.integrations import _store_identity
from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations._turns import TurnWriter, sought_runs
from kvtrie.integrations.vllm import _gate
from kvtrie.integrations.vllm._metadata import FoundSpans, StoreReport
from kvtrie.integrations.vllm._settings import WHERE
from kvtrie.store import Estimate, SpanShape

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from kvtrie.integrations._served import EngineModel
    from kvtrie.integrations._store_settings import StoreSettings
    from kvtrie.integrations._turns import StorePrompt
    from kvtrie.integrations.vllm._metadata import Load, Seek, StoreStep
    from kvtrie.integrations.vllm._settings import Settings
    from kvtrie.integrations.vllm._stats import Counts
    from kvtrie.pool.kv_pool import KVPool
    from kvtrie.store import SpanLoad, SpanStore, TakenSpans

_LOG: Final = logging.getLogger("vllm.kvtrie")
# Seconds that a step without tokens waits for a load to end.
_PAUSE: Final = 0.005
_COUNTED: Final = "store"


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
    store = given.open(space, SpanShape.of(pool.layout), WHERE)
    _LOG.info("kvtrie: store %s: %d runs of this model", given.backend, store.num_runs)
    return StoreWorker(store, given, space, counts, pool.device)


def _identity(given: StoreSettings, served: EngineModel, vllm_config: VllmConfig) -> str:
    """What the KV of a model depends on: its weights, and how vLLM computes with them.

    Raises:
        SettingsError: There is no name for what cannot be told from others.
    """
    config = vllm_config.model_config
    return _store_identity.identity(
        given,
        served,
        config.hf_text_config,
        WHERE,
        dtype=str(config.dtype).removeprefix("torch."),
        context=config.max_model_len,
        overrides=config.hf_overrides,
    )


class StoreWorker:
    """Loads and writes runs.

    Args:
        store: Where.
        settings: How.
        space: The store's namespace.
        counts: Where everything is counted.
        device: That of the pools that `map` is given.
    """

    def __init__(
        self,
        store: SpanStore,
        settings: StoreSettings,
        space: Namespace,
        counts: Counts,
        device: torch.device,
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
        self._loader = settings.loader(store, self._estimate, device)
        self._turns = TurnWriter(store, self._sequence, max(1, settings.turns), _LOG)

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
        wanted = sum(end - start for start, end in load.stored)
        written = 0
        if taken is not None and self._pool is not None:
            written = taken.write(self._pool, table, load.stored, first=load.first)
        if written != wanted:
            msg = f"{written} of {wanted} tokens of {len(load.stored)} ranges are loaded"
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

        return self._loader.seek(
            seq,
            seek.gaps,
            lambda: sought_runs(self.store, seq, seek.prompt, seek.gaps),
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

    def _tell(self) -> None:
        """Count what the store has counted since."""
        now = self.store.counts()
        for name, number in now.items():
            if number != self._told[name]:
                self._counts.add(f"{_COUNTED}/{name}", number - self._told[name])
                self._told[name] = number
