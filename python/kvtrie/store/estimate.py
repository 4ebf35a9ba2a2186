"""Load or recompute: which is expected to take less time, from what was measured."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Final, Literal

# A measurement counts half after about 20 others.
_KEPT: Final = 0.966


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """What an `Estimate` says.

    Attributes:
        choice: ``"load"`` or ``"recompute"``.
        why: ``"faster"``: loading takes less time; ``"slower"``: recomputing does; ``"unknown"``:
            one of the two was never measured, so loading is tried; ``"probe"``: recomputing is
            expected to be faster, and loading is tried to see whether it still is.
        load_seconds: Expected for loading; 0 if it is not known.
        compute_seconds: Expected for recomputing; 0 if it is not known.
    """

    choice: Literal["load", "recompute"]
    why: Literal["faster", "slower", "unknown", "probe"]
    load_seconds: float
    compute_seconds: float


class Estimate:
    """Measures loads and prefill, and compares what both are expected to take.

    A load takes a time of its own and a time per byte, both fitted to the loads that were measured;
    older ones count less. `SpanLoader` measures reading and verifying alone: waiting for a thread,
    and the copy into the pool with its rotation, take time besides.

    Args:
        prefill_tokens_per_s: Of the engine, until it is measured.
        probe_every: One in so many loads that would be slower is done nevertheless; else a link
            that was slow once would never be used again.

    Raises:
        ValueError: A number is not above 0.

    Example:
        >>> estimate = Estimate(prefill_tokens_per_s=10_000)
        >>> estimate.loaded(num_bytes=1_000_000, seconds=1.0)
        >>> estimate.choose(num_tokens=100, num_bytes=1_000_000).why
        'slower'
        >>> estimate.choose(num_tokens=100_000, num_bytes=1_000_000).choice
        'load'
    """

    def __init__(self, *, prefill_tokens_per_s: float | None = None, probe_every: int = 64) -> None:
        rate = prefill_tokens_per_s
        if probe_every < 1 or (rate is not None and not 0 < rate < math.inf):
            msg = (
                f"Estimate: prefill_tokens_per_s {rate} must be above 0 and finite, and "
                f"probe_every {probe_every} at least 1"
            )
            raise ValueError(msg)
        self._lock = threading.Lock()
        self._probe_every = probe_every
        self._refused = 0
        # Tokens and seconds of prefill; count, bytes, seconds, bytes * bytes, bytes * seconds.
        self._prefill = (0.0, 0.0) if rate is None else (rate, 1.0)
        self._loads = (0.0, 0.0, 0.0, 0.0, 0.0)

    def loaded(self, *, num_bytes: int, seconds: float) -> None:
        """Count a load that was measured.

        Raises:
            ValueError: A number is negative or not finite.
        """
        _check("loaded", num_bytes, seconds)
        new = 1.0, float(num_bytes), seconds, float(num_bytes) ** 2, num_bytes * seconds
        with self._lock:
            self._loads = _decayed(self._loads, new)

    def computed(self, *, num_tokens: int, seconds: float) -> None:
        """Count a prefill that was measured.

        Raises:
            ValueError: A number is negative or not finite.
        """
        _check("computed", num_tokens, seconds)
        with self._lock:
            tokens, before = self._prefill
            self._prefill = tokens * _KEPT + num_tokens, before * _KEPT + seconds

    def load_seconds(self, num_bytes: int) -> float | None:
        """What a load is expected to take; None if none was measured."""
        with self._lock:
            count, total, seconds, squares, products = self._loads
        if not count:
            return None
        spread = count * squares - total * total
        if spread > 1e-6 * count * squares:
            per_byte = max(0.0, (count * products - total * seconds) / spread)
            own = (seconds - per_byte * total) / count
            if own >= 0:
                return own + per_byte * num_bytes
        # All loads have one size, or a load of nothing would take less than no time: all time is
        # time per byte.
        return seconds / total * num_bytes if total else seconds / count

    def compute_seconds(self, num_tokens: int) -> float | None:
        """What recomputing is expected to take; None if no prefill was measured."""
        with self._lock:
            tokens, seconds = self._prefill
        return num_tokens * seconds / tokens if tokens else None

    def choose(self, *, num_tokens: int, num_bytes: int) -> LoadChoice:
        """Whether to load tokens, or to recompute them."""
        load, compute = self.load_seconds(num_bytes), self.compute_seconds(num_tokens)
        if load is None or compute is None:
            return LoadChoice("load", "unknown", load or 0.0, compute or 0.0)
        if load <= compute:
            return LoadChoice("load", "faster", load, compute)
        with self._lock:
            self._refused += 1
            is_probe = self._refused % self._probe_every == 0
        if is_probe:
            return LoadChoice("load", "probe", load, compute)
        return LoadChoice("recompute", "slower", load, compute)


def _check(call: str, *numbers: float) -> None:
    for number in numbers:
        if not 0 <= number < math.inf:
            msg = f"Estimate.{call}: {number} is negative or not finite"
            raise ValueError(msg)


def _decayed(
    old: tuple[float, float, float, float, float], new: tuple[float, float, float, float, float]
) -> tuple[float, float, float, float, float]:
    one, two, three, four, five = (was * _KEPT + now for was, now in zip(old, new, strict=True))
    return one, two, three, four, five
