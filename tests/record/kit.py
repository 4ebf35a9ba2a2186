"""Requests for logs, and what a log of digests may not have."""

from __future__ import annotations

import base64
import json
import random
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrie import Span
from kvtrie.record import Finished, Recorder, RecordOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

KEY = bytes(range(32))
# No number of a log is as large, unless it is one of these.
FIRST = 3_000_000_000


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(FIRST, FIRST + 100_000), k=count)


def finished(tokens: Sequence[int], name: str = "request-1", **given: Any) -> Finished:
    made = {
        "num_prompt": max(0, len(tokens) - 8),
        "arrived": 1_700_000_000.25,
        "first_token": 0.125,
        "took": 1.5,
        "ended": "stopped",
        **given,
    }
    return Finished(tokens=np.array(tokens, np.uint32), request_id=name, **made)


def spans(*ranges: tuple[int, int, str]) -> tuple[Span, ...]:
    return tuple(Span(*one) for one in ranges)


def written(path: Path, requests: Iterable[Finished], **options: Any) -> Recorder:
    recorder = Recorder(
        RecordOptions(path=str(path), **options), block_size=16, engine="test 1", model="a model"
    )
    for one in requests:
        assert recorder.put(one)
        assert recorder.flush()
    recorder.close()
    return recorder


def numbers_in(data: bytes) -> set[int]:
    """Every integer that a log spells out, and every four bytes of its base64."""
    found = {int(one) for one in re.findall(rb"\d+", data)}
    for line in data.splitlines():
        row = json.loads(line)
        for name in ("blocks", "gaps", "windows"):
            packed = base64.b64decode(row.get(name, ""))
            for order in ("<u4", ">u4"):
                for at in range(4):
                    whole = packed[at : at + (len(packed) - at) // 4 * 4]
                    found.update(np.frombuffer(whole, order).tolist())
    return found
