"""One benchmark: rounds over fresh inputs, and the columns of its row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from forest import QUICK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_benchmark.fixture import BenchmarkFixture

    import kvtrie

T = TypeVar("T")
R = TypeVar("R")

BATCH_BYTES = 512 * 1024


def calls_for(length: int, bytes_a_token: int = 4) -> int:
    return max(1, min(64, BATCH_BYTES // (length * bytes_a_token)))


class Meter:
    """Times a loop over fresh inputs and records what the published tables need."""

    def __init__(self, benchmark: BenchmarkFixture) -> None:
        self._benchmark = benchmark

    def __call__(
        self,
        work: str,
        target: Callable[[Sequence[T]], R],
        fresh: Callable[[], T],
        *,
        calls: int,
        rounds: int = 400,
        index: kvtrie.RadixIndex | None = None,
        after: Callable[[], None] = lambda: None,
        **notes: object,
    ) -> R:
        """Run one benchmark."""
        columns: dict[str, Any] = {"work": work, "calls": calls, **notes}
        if index is not None:
            columns |= counted(index, lambda: target([fresh() for _ in range(calls)]), calls)
            after()

        def setup() -> tuple[tuple[list[T]], dict[str, object]]:
            return ([fresh() for _ in range(calls)],), {}

        def teardown(_inputs: Sequence[T]) -> None:
            after()

        # pytest-benchmark has no annotations.
        result: R = self._benchmark.pedantic(  # type: ignore[no-untyped-call]
            target,
            setup=setup,
            teardown=teardown,
            rounds=2 if QUICK else rounds,
            warmup_rounds=1 if QUICK else min(20, rounds // 10 + 1),
        )
        # Without a clock nothing has called it yet.
        after()
        self._note(columns)
        return result

    def single(
        self, work: str, target: Callable[[], R], before: Callable[[], None], *, rounds: int
    ) -> R:
        """Time every call by itself, to see the slowest; the clock itself adds 0.1 to 0.5 µs."""
        # pytest-benchmark has no annotations.
        result: R = self._benchmark.pedantic(  # type: ignore[no-untyped-call]
            target, setup=before, rounds=10 if QUICK else rounds, warmup_rounds=10
        )
        self._note({"work": work, "calls": 1, "single_calls": True})
        return result

    def _note(self, columns: dict[str, Any]) -> None:
        """Put the columns where `record.py` finds them, with percentiles in µs per call."""
        stats = self._benchmark.stats
        if stats is not None:
            times = stats.stats.sorted_data
            for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
                seconds = times[min(int(share * len(times)), len(times) - 1)]
                columns[name] = seconds / columns["calls"] * 1e6
            columns["max"] = times[-1] / columns["calls"] * 1e6
        self._benchmark.extra_info.update(columns)


def counted(index: kvtrie.RadixIndex, act: Callable[[], object], calls: int) -> dict[str, float]:
    """Nodes visited and bytes compared per call, from the index's own counters."""
    before = index.stats()
    act()
    after = index.stats()
    return {
        "nodes_visited": (after.nodes_visited - before.nodes_visited) / calls,
        "bytes_compared": (after.bytes_compared - before.bytes_compared) / calls,
    }
