"""JSON of clients, engines and routers, which is weighed before it is read.

While Python reads JSON, nothing else runs in the process. What that takes is a matter of how many
values there are, not of bytes: 8 MB of one text take 0.01 s, 8 MB of nested lists 1.6 s. The weight
of 8 MB is found in 0.06 s, mostly without Python's lock.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A document that weighs more is not read. What is read takes at most 0.2 s of a core.
HEAVIEST: Final = 1 << 19
# What a comma outside of strings weighs, and what begins a list, an object, a key's value or the
# fraction or exponent of a number, each of which takes as long as some integers.
_COMMA: Final = 1
_OTHER: Final = 4
_WEIGHTS: Final = bytes(
    _COMMA if byte == ord(",") else _OTHER if byte in b"[{:.eE" else 0 for byte in range(256)
)
_PIECE: Final = 1 << 20
# Digits in a row outside of strings: a number takes longer than its length where there are more.
_MOST_DIGITS: Final = 64


class HeavyError(ValueError):
    """A document has too many values, or too long ones."""


def read_json(text: bytes) -> Any:  # noqa: ANN401 - any JSON
    """Read a document.

    Args:
        text: JSON in UTF-8.

    Raises:
        HeavyError: It weighs more than `HEAVIEST`, or a number has more than 64 digits in a row.
        RecursionError: It is nested too deeply.
        ValueError: It is not JSON.
    """
    # No other encoding: in UTF-16 quotes would be seen where there are none.
    decoded = text.decode("utf-8-sig", "surrogatepass")
    if len(text) > HEAVIEST // _OTHER:
        found = weight(text)
        if found > HEAVIEST:
            msg = f"JSON of a weight above {HEAVIEST}"
            raise HeavyError(msg)
    return json.loads(decoded)


def weight(text: bytes, most: int = HEAVIEST) -> int:
    """What a document weighs, or something above `most` if it weighs more.

    Args:
        text: JSON, up to where it is none.
        most: When to stop.
    """
    if b"\\" in text:
        # Outside of strings there are none.
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    total, in_string, digits = 0, False, 0
    for start in range(0, len(text), _PIECE):
        piece = text[start : start + _PIECE]
        quotes = np.frombuffer(piece, np.uint8) == ord('"')
        quotes[0] ^= in_string
        inside = np.logical_xor.accumulate(quotes)
        in_string = bool(inside[-1])
        weights = np.frombuffer(piece.translate(_WEIGHTS), np.uint8)
        total += int(weights[~inside].sum(dtype=np.int64))
        longest, digits = _longest(piece, inside, digits)
        if longest > _MOST_DIGITS:
            return most + 1
        if total > most:
            break
    return total


def _longest(piece: bytes, inside: NDArray[np.bool_], before: int) -> tuple[int, int]:
    """The most digits in a row outside of strings, and those at the end.

    ``before``: digits that end where the piece begins.
    """
    digits = (np.frombuffer(piece, np.uint8) - np.uint8(ord("0")) <= 9) & ~inside
    if not digits.any():
        return 0, 0
    edges = np.flatnonzero(digits[1:] != digits[:-1]) + 1
    lengths = np.diff(edges, prepend=0, append=len(piece))
    own = lengths[0 if digits[0] else 1 :: 2]
    if digits[0]:
        own[0] += before
    return int(own.max()), int(own[-1]) if digits[-1] else 0
