"""Calls whose errors must not end vLLM's engine: they are logged and counted."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtrie.integrations.vllm._stats import Counts

_LOG = logging.getLogger("vllm.kvtrie")
_Result = TypeVar("_Result")


class Guard:
    """Logs and counts errors of the scheduler's half."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def call(self, call: Callable[..., _Result], *args: object) -> _Result | None:
        """Call; count an error and return None if it raises."""
        try:
            return call(*args)
        except Exception:
            self.note("%s failed", getattr(call, "__name__", call))
            return None

    def note(self, what: str, *given: object) -> None:
        """Log and count the error that is being handled."""
        _LOG.exception(f"kvtrie: {what}", *given)
        self._counts.add("errors")
