"""How everything here is measured.

A single call takes 0.3 to 30 µs, so one round of a benchmark is a loop over calls, each on its own
input that was made before the clock started: a ready `TokenSequence` that no index has seen, a
numpy array, or a list. The time includes the loop (about 20 ns per call) and reading the result,
not making and freeing the inputs. The inputs of one round take 512 KiB at most: they are in the
processor's caches, as those of a request that was just tokenised are; what is cold is the index.
Warm repeats one cached sequence; cold draws at random from all cached ones, or from half of them
where the other half is to be evicted. The figure is the median over rounds of a round's time
divided by its calls.

Each benchmark checks its result before and after it is timed. Where the index counts nodes visited
and bytes compared, both are recorded per call. The garbage collector is off.

`KVTRIE_BENCH_SCALE=quick` shrinks all sizes and runs every benchmark a few times: for tests.
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
