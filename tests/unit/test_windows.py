"""The windows that an index keeps to find moved runs, seen from outside."""

from __future__ import annotations

import numpy as np
import pytest

import kvtrie

SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)


def filled(*, moved_runs: bool, min_run: int = 16, length: int = 1_600) -> kvtrie.RadixIndex:
    index = kvtrie.RadixIndex(num_blocks=1_000, min_run=min_run, moved_runs=moved_runs)
    seq = kvtrie.TokenSequence(np.arange(length, dtype=np.uint32), SPACE)
    index.insert(seq, list(range(length // 16)), num_computed=length, source=kvtrie.COMPUTED)
    index.check()
    return index


@pytest.mark.parametrize("min_run", [8, 16, 100])
def test_a_window_is_kept_for_every_stride(min_run: int) -> None:
    # Windows end at every (min_run - 7)-th position from the start, the first with eight tokens.
    stride = min_run - 7
    ends = [end for end in range(7, 1_600) if (end + 1) % stride == 0]
    assert filled(moved_runs=True, min_run=min_run).stats().windows == len(ends)


def test_windows_are_removed_with_their_blocks() -> None:
    index = filled(moved_runs=True)
    index.discard([10])
    index.check()
    assert index.stats().windows == 1_600 // 9 - 2
    index.evict(1_000)
    index.check()
    assert index.stats().windows == 0


def test_an_index_without_moved_runs_keeps_none() -> None:
    off, on = filled(moved_runs=False).stats(), filled(moved_runs=True).stats()
    assert off.windows == 0
    assert off.bytes < on.bytes
