"""Keyed digests of tokens: of whole blocks, and of windows at positions that the tokens choose.

Windows are chosen by winnowing: of each ``span`` windows in a row, the one with the least keyed
rolling hash, of equal ones the last. The choice depends on these tokens alone. A run of
``min_run = window + span - 1`` tokens has ``span`` windows, so wherever it is copied to, the same
one is chosen. Chosen windows overlap, because ``span`` is less than ``window``. The rolling hash is
not cryptographic and never leaves this module: what is returned is BLAKE2b of the window's tokens.

Each namespace (salt and adapter) has a key of its own, derived from the log's, so that equal tokens
of different tenants have digests that are not equal.

A block and a window take half a microsecond each, choosing windows 0.04 us per token.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

DIGEST_BYTES: Final = 8
"""Of two different blocks or windows among a thousand million, a few percent chance of equality."""
MIN_RUNS: Final = (16, 256)
"""The least and the greatest ``min_run``."""
BLOCK_SIZES: Final = (1, 4096)
"""The least and the greatest block, in tokens, as of an index."""
KEY_BYTES: Final = (16, 64)
"""The shortest and the longest key."""

_AT_ONCE: Final = 256

# BLAKE2b's `person`: digests for different purposes have nothing in common.
_KEY_ID: Final = b"kvtrie log id"
_SPACE: Final = b"kvtrie log space"
_NAME: Final = b"kvtrie log name"
_SHARE: Final = b"kvtrie log share"
_BLOCK: Final = b"kvtrie log block"
_WINDOW: Final = b"kvtrie log windw"
_ROLLING: Final = b"kvtrie log roll"


def new_key() -> bytes:
    """A random key."""
    return secrets.token_bytes(32)


def read_key(path: Path) -> bytes:
    """The key in a file.

    Raises:
        ValueError: The file does not have 16 to 64 bytes.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        key = file.read(KEY_BYTES[1] + 1)
    _check_key(key, str(path))
    return key


class Digester:
    """Digests of tokens and names under one key.

    Args:
        key: 16 to 64 secret bytes.
        block_size: Tokens per block.
        min_run: The shortest run of tokens that two prompts always have a window of in common.
        pause: Seconds to sleep after every 256 digests, so that other threads can run.

    Raises:
        ValueError: One of them is outside its limits.
    """

    def __init__(self, key: bytes, *, block_size: int, min_run: int, pause: float = 0.0) -> None:
        _check_key(key, "the key")
        if not BLOCK_SIZES[0] <= block_size <= BLOCK_SIZES[1]:
            msg = f"block_size must be from {BLOCK_SIZES[0]} to {BLOCK_SIZES[1]}, not {block_size}"
            raise ValueError(msg)
        if not MIN_RUNS[0] <= min_run <= MIN_RUNS[1]:
            msg = f"min_run must be from {MIN_RUNS[0]} to {MIN_RUNS[1]}, not {min_run}"
            raise ValueError(msg)
        self._key = key
        self._block_size = block_size
        self._span = min_run // 2
        self._pause = pause
        self.window = min_run - self._span + 1
        """Tokens of a window."""
        self.key_id = self._digest(b"", _KEY_ID).hex()
        """Names the key without showing it: logs with the same one can be compared."""

    def name(self, kind: str, text: str) -> str:
        """A digest that stands for the name of a request or a session."""
        return self._digest(json.dumps([kind, text]).encode(), _NAME).hex()

    def share(self, text: str) -> float:
        """A number from 0 up to 1 by which names are sampled, the same for the same name."""
        return int.from_bytes(self._digest(json.dumps(text).encode(), _SHARE)) / 2**64

    def space(self, salt: str | None, adapter: str | None) -> bytes:
        """The key of a namespace, for the other calls."""
        text = json.dumps([salt, adapter]).encode()
        return hashlib.blake2b(text, key=self._key, person=_SPACE, digest_size=32).digest()

    def space_name(self, space: bytes) -> str:
        """A digest that stands for a namespace."""
        return _keyed(b"", space, _NAME).hex()

    def blocks(self, tokens: NDArray[np.uint32], space: bytes) -> bytes:
        """The digests of all whole blocks, one after the other."""
        data, step = tokens.astype("<u4", copy=False).tobytes(), 4 * self._block_size
        return self._each(data, range(0, len(data) // step * step, step), step, space, _BLOCK)

    def windows(self, tokens: NDArray[np.uint32], space: bytes) -> tuple[bytes, bytes]:
        """The chosen windows: how far each starts after the one before, and their digests.

        A distance is one byte, and the first one is from the first token.
        """
        starts = self._chosen(tokens, space)
        data, length = tokens.astype("<u4", copy=False).tobytes(), 4 * self.window
        gaps = np.diff(starts, prepend=0).astype(np.uint8).tobytes()
        digests = self._each(data, (4 * starts).tolist(), length, space, _WINDOW)
        return gaps, digests

    def _chosen(self, tokens: NDArray[np.uint32], space: bytes) -> NDArray[np.int64]:
        """The first tokens of the chosen windows, ascending."""
        hashes = _rolling(tokens, self.window, _keyed(b"", space, _ROLLING, 32))
        if len(hashes) < self._span:
            return np.zeros(0, np.int64)
        found = _last_minima(hashes, self._span)
        is_new = np.ones(len(found), np.bool_)
        is_new[1:] = found[1:] != found[:-1]
        return found[is_new]

    def _each(
        self, data: bytes, starts: Sequence[int], length: int, key: bytes, purpose: bytes
    ) -> bytes:
        found: list[bytes] = []
        # A copy is twice as fast as a new one.
        empty = hashlib.blake2b(key=key, person=purpose, digest_size=DIGEST_BYTES)
        for first in range(0, len(starts), _AT_ONCE):
            if first and self._pause:
                time.sleep(self._pause)
            for at in starts[first : first + _AT_ONCE]:
                one = empty.copy()
                one.update(data[at : at + length])
                found.append(one.digest())
        return b"".join(found)

    def _digest(self, data: bytes, purpose: bytes) -> bytes:
        return _keyed(data, self._key, purpose)


def _keyed(data: bytes, key: bytes, purpose: bytes, size: int = DIGEST_BYTES) -> bytes:
    return hashlib.blake2b(data, key=key, person=purpose, digest_size=size).digest()


def _check_key(key: bytes, what: str) -> None:
    if not KEY_BYTES[0] <= len(key) <= KEY_BYTES[1]:
        size = f"more than {KEY_BYTES[1]}" if len(key) > KEY_BYTES[1] else str(len(key))
        msg = f"{what} must have {KEY_BYTES[0]} to {KEY_BYTES[1]} bytes, not {size}"
        raise ValueError(msg)


def _rolling(tokens: NDArray[np.uint32], length: int, secret: bytes) -> NDArray[np.uint64]:
    """A hash of each window, modulo 2**64: a polynomial in an odd secret number."""
    count = len(tokens) - length + 1
    if count < 1:
        return np.zeros(0, np.uint64)
    first, second, base = (one | 1 for one in _numbers(secret))
    values = _mixed(tokens.astype(np.uint64) * np.uint64(first) + np.uint64(second))
    sums = np.zeros(len(tokens) + 1, np.uint64)
    np.cumsum(values * _powers(base, len(tokens)), out=sums[1:])
    # An odd number has an inverse modulo 2**64: the position of the window leaves its hash.
    return _mixed((sums[length:] - sums[:count]) * _powers(pow(base, -1, 1 << 64), count))


def _last_minima(values: NDArray[np.uint64], length: int) -> NDArray[np.int64]:
    """Where the least of each ``length`` values in a row is; of equal ones, the last."""
    least, places, width = values, np.arange(len(values)), 1
    while width < length:
        # Of twice as many values, the lesser of two minima.
        step = min(width, length - width)
        left, right = least[:-step], least[step:]
        is_right = right <= left
        least = np.where(is_right, right, left)
        places = np.where(is_right, places[step:], places[:-step])
        width += step
    return places


def _numbers(secret: bytes) -> Iterator[int]:
    return (int.from_bytes(secret[at : at + 8], "little") for at in (0, 8, 16))


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's last step: each bit of the result depends on all bits."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
