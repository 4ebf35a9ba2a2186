"""Columns of numbers for a page: compressed, as text that is safe in HTML."""

from __future__ import annotations

import base64
import json
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt


def packed(values: npt.ArrayLike) -> str:
    """Numbers below 2**32, as base64 of compressed little-endian 32-bit integers."""
    return _base64(np.asarray(values).astype("<u4").tobytes())


def packed_json(value: Any) -> str:  # noqa: ANN401 - whatever JSON can hold
    """A large value as base64 of compressed JSON."""
    return _base64(json.dumps(value, separators=(",", ":"), allow_nan=False).encode())


def _base64(data: bytes) -> str:
    # Level 1: a browser inflates each as fast, and a page is written in a third of the time.
    return base64.b64encode(zlib.compress(data, 1)).decode()


def pieces_of(decode: Callable[[Sequence[int]], str], ids: Iterable[int]) -> dict[int, str]:
    """The text of each token id.

    Decoders drop a space at the start of a text, so each is decoded after another token. A
    character that consists of several tokens is a replacement character in each.
    """
    found = sorted(set(ids))
    if not found:
        return {}
    # After an ordinary letter, if the vocabulary shows one.
    before = next((one for one in found if decode([one]).strip().isalpha()), found[0])
    start = decode([before])
    texts = {}
    for one in found:
        both = decode([before, one])
        texts[one] = both[len(start) :] if both.startswith(start) else decode([one])
    return texts
