"""Faults of a manifest in transit: by the network, a crash or a hostile peer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

FAULTS = ("dropped", "duplicated", "reordered", "truncated", "mutated", "stale", "key", "namespace")
"""The faults that `tests.pd` knows: the last two are a receiver of another deployment."""


def truncated(raw: bytes, rng: Random) -> bytes:
    return raw[: rng.randrange(len(raw))]


def mutated(raw: bytes, rng: Random) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(data)) if data else 0
        kind = rng.randrange(6)
        if kind == 0:
            data[at : at + 1] = bytes((rng.randrange(256),))
        elif kind == 1:
            data[at : at + 1] = bytes((data[at] ^ 1 << rng.randrange(8),)) if data else b""
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.choice((1, 1, 4, 16)))
        elif kind == 3:
            del data[at : at + rng.choice((1, 1, 4, 16))]
        elif kind == 4:
            part = data[at : at + rng.choice((1, 4, 16, 64))]
            data[at:at] = part
        else:
            # Block ids and digests have these sizes: whole ones are swapped.
            size = rng.choice((4, 16))
            other = rng.randrange(len(data)) if data else 0
            low, high = min(at, other), max(at, other)
            if low + size <= high and high + size <= len(data):
                data[low : low + size], data[high : high + size] = (
                    data[high : high + size],
                    data[low : low + size],
                )
    return bytes(data)
