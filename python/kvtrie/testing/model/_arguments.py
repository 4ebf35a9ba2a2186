"""Checks of arguments: values that could hide a mistake are refused."""

from __future__ import annotations

import array
import operator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable

Int32: TypeAlias = npt.NDArray[np.int32]
Int64: TypeAlias = npt.NDArray[np.int64]
Integers: TypeAlias = Any
"""Anything that holds integers: list, tuple, array, memoryview, numpy, CPU tensor."""

TOKEN_LIMIT = 2**32
MAX_SESSION = 256
"""Bytes of the longest session id."""


def as_count(value: object, what: str, low: int = 0) -> int:
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        message = f"{what} is {value!r}, not an integer"
        raise TypeError(message)
    number = operator.index(value)
    if number < low:
        message = f"{what} is {number}, below {low}"
        raise ValueError(message)
    return number


def expect(value: object, kind: type, what: str) -> None:
    if not isinstance(value, kind):
        message = f"{what} is of type {type(value).__name__}, not {kind.__name__}"
        raise TypeError(message)


def as_flag(value: object, what: str) -> bool:
    if not isinstance(value, bool | np.bool_):
        message = f"{what} is {value!r}, not a bool"
        raise TypeError(message)
    return bool(value)


def as_integers(values: Integers, what: str, limit: int) -> list[int]:
    """Refuses every type that could hide a mistake."""
    if isinstance(values, list | tuple | range):
        numbers = [as_count(value, f"{what}[{i}]", -TOKEN_LIMIT) for i, value in enumerate(values)]
    else:
        if isinstance(values, str | bytes | bytearray) or not (
            isinstance(values, memoryview | array.array) or hasattr(values, "__array__")
        ):
            message = f"{what} is a {type(values).__name__}, not a list or an array of integers"
            raise TypeError(message)
        data = np.asarray(values)
        if data.dtype.kind not in "iu":
            message = f"{what} has dtype {data.dtype}, not an integer one"
            raise TypeError(message)
        if data.ndim != 1:
            message = f"{what} has {data.ndim} dimensions, not 1"
            raise ValueError(message)
        numbers = data.tolist()
    for number in numbers:
        if not 0 <= number < limit:
            message = f"{what} holds {number}, outside [0, {limit})"
            raise ValueError(message)
    return numbers


def int32(numbers: Iterable[int]) -> Int32:
    return np.array(list(numbers), dtype=np.int32)


def as_ranges(ranges: Iterable[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """Ascending and disjoint; adjacent ranges are merged."""
    merged: list[tuple[int, int]] = []
    for given in ranges:
        start, end = (as_count(value, "a range") for value in given)
        floor = merged[-1][1] if merged else 0
        if not floor <= start <= end <= length:
            message = f"the range [{start}, {end}) is reversed or not within [{floor}, {length}]"
            raise ValueError(message)
        if merged and start == floor:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((start, end))
    return merged


def as_session(session: str | None) -> str | None:
    if session is None:
        return None
    expect(session, str, "session")
    length = len(session.encode())
    if not 1 <= length <= MAX_SESSION:
        message = f"session has {length} bytes, not 1 to {MAX_SESSION}"
        raise ValueError(message)
    return session
