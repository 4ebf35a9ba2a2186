"""Replays conversations on several threads, in the order in which their rows are wanted.

Whether a conversation is wanted depends on the rows before it: an edit ends when its verdicts are
clear. So some are begun before that is known, at most two for each thread, and what turns out not
to be wanted is dropped. The rows that are taken, and their order, are those of one thread.

Threads share the model's weights and have modules of their own, because the probe watches modules.
torch computes outside Python's lock.
"""

from __future__ import annotations

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transformers import PreTrainedModel

    from kvtrie.calibrate._steps import Step

Rows = list[dict[str, Any]]
Wanted = tuple[str, int]
"""The name of an edit, and the number of its conversation."""


class Replayer(Protocol):
    """Replays one conversation at a time."""

    def replay(self, steps: list[Step], *, is_chain: bool) -> Rows: ...


class Maker(Protocol):
    """Makes the conversations of an edit; not for two threads at once, as tokenizers are not."""

    name: str

    def make(self, number: int) -> tuple[list[Step], bool]: ...


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same model in other modules: weights are shared.

    Buffers are not: a pass may write to those of RoPE.
    """
    shared = {id(one): one for one in model.parameters()}
    return copy.deepcopy(model, shared)


class Ahead:
    """Replays on as many threads as there are benches; with one bench on the caller's.

    It is closed at the end.
    """

    def __init__(self, benches: Sequence[Replayer]) -> None:
        self._benches: SimpleQueue[Replayer] = SimpleQueue()
        for bench in benches:
            self._benches.put(bench)
        self._alone = benches[0] if len(benches) == 1 else None
        self._most = 2 * len(benches) if self._alone is None else 1
        self._threads = ThreadPoolExecutor(len(benches), thread_name_prefix="kvtrie-calibrate")
        self._begun: dict[Wanted, Future[Rows]] = {}

    def begin(self, wanted: Iterable[tuple[Maker, int]]) -> None:
        """Begin the first of what will be wanted, as far as there is room."""
        for _, (source, number) in zip(range(self._most), wanted, strict=False):
            key = source.name, number
            if key not in self._begun and len(self._begun) < self._most:
                try:
                    made = source.make(number)
                except Exception as error:  # noqa: BLE001 - it is raised if it is wanted
                    self._begun[key] = Future()
                    self._begun[key].set_exception(error)
                else:
                    self._begun[key] = self._begin(*made)

    def drop(self, edit: str) -> None:
        """No more of an edit is wanted."""
        for key in [key for key in self._begun if key[0] == edit]:
            self._begun.pop(key).cancel()

    def stop(self) -> None:
        """Begin nothing more; what runs is still to be taken."""
        for key in [key for key, one in self._begun.items() if one.cancel()]:
            del self._begun[key]

    def take(self, source: Maker, number: int) -> Rows | None:
        """What was observed in a conversation; None if it was not begun."""
        found = self._begun.pop((source.name, number), None)
        return None if found is None else found.result()

    def _begin(self, steps: list[Step], is_chain: bool) -> Future[Rows]:
        if self._alone is None:
            return self._threads.submit(self._replay, steps, is_chain=is_chain)
        done: Future[Rows] = Future()
        done.set_result(self._alone.replay(steps, is_chain=is_chain))
        return done

    def _replay(self, steps: list[Step], *, is_chain: bool) -> Rows:
        bench = self._benches.get()
        try:
            return bench.replay(steps, is_chain=is_chain)
        finally:
            self._benches.put(bench)

    def close(self) -> None:
        """Begin nothing more, and wait for what runs."""
        self._threads.shutdown(cancel_futures=True)
