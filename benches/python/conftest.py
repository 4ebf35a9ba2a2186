"""How these benchmarks measure.

A single call takes 0.3 to 30 µs, so one round of a benchmark is a loop over calls, each on its own
input made before the clock starts. The time includes the loop (about 20 ns per call) and reading
the result, not making and freeing the inputs. These take 512 KiB at most, so that they are in the
processor's caches; what is cold is the index. Warm repeats one cached sequence; cold draws at
random from all cached ones, or from the half that is not evicted.

The figure is the median over rounds of a round's time divided by its calls. Results are checked
before and after; nodes visited and bytes compared are recorded per call. `KVTRIE_BENCH_SCALE=quick`
shrinks all sizes, for tests.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from forest import Forest, Shape, filled
from meter import Meter

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


@pytest.fixture
def meter(benchmark: BenchmarkFixture) -> Meter:
    return Meter(benchmark)


@pytest.fixture
def rng() -> random.Random:
    return random.Random(4)


@pytest.fixture(scope="module")
def forest(request: pytest.FixtureRequest) -> Forest:
    """An index filled as the parameter says, shared by the tests of a file with the same one."""
    shape: Shape = request.param
    return filled(shape)
