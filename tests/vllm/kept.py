"""One engine at a time, kept as long as the next test wants the same.

vLLM keeps some of its state in the process, and starting an engine takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.vllm import heap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Kept:
    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._key: object = None
        self._engine: Any = None
        self._is_first = True
        heap.leave_out_what_there_is()

    def get(self, model: Path, **options: Any) -> Any:
        key = (model, repr(sorted(options.items())))
        if self._key != key:
            self.close()
            self._engine, self._key = self._make(model, **options), key
            # A reset would have it find nothing that a store has.
            self._engine.counts.clear()
        else:
            self._engine.reset()
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            if self._is_first:
                # A first engine imports the rest of vLLM.
                heap.leave_out_what_there_is()
                self._is_first = False
        self._engine = self._key = None

    def lend(self, model: Path) -> Iterator[Callable[..., Any]]:
        """What starts an engine, or takes the one that runs; it must be idle afterwards."""
        used: list[Any] = []

        def start(model: Path = model, **options: Any) -> Any:
            used.append(self.get(model, **options))
            return used[-1]

        try:
            yield start
            if used:
                used[-1].drain()
                used[-1].check_idle()
        except BaseException:
            self.close()
            raise
