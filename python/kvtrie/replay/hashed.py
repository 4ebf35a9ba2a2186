"""Readers of traces that name the blocks of each prompt by ids: Mooncake's and Qwen-Bailian's.

Both are one JSON object per line with ``input_length`` and ``hash_ids``. Mooncake's ids (also those
of agentic40) are chained: equal ids are equal prefixes. Qwen-Bailian's name a block of 16 tokens by
its content, so an id may follow different ids. Both become chains here: a block is the same if
its id and all ids before it are.

Neither has tokens, replies or reasoning, so moved runs are not visible. The last id may name a
block that is not full; it is left out. A ``timestamp`` is in milliseconds in Mooncake's, in seconds
in Qwen-Bailian's; a line may have none. A file of n ids costs about 0.5 µs per id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtrie.replay.source import finite, read_json
from kvtrie.replay.trace import Trace, TraceRequest, chained, from_keys

if TYPE_CHECKING:
    from kvtrie.replay.source import TraceFile
    from kvtrie.replay.trace import Keys

_MOONCAKE_SIZES: Final = (512, 64, 16)
_BAILIAN_SIZE: Final = 16
_MILLISECONDS: Final = 1e-3
_NONE: Final = np.empty(0, np.uint32)


def is_mooncake(first: str) -> bool:
    """Whether the first line has lengths and ids."""
    return _has(first, "input_length", "hash_ids")


def is_bailian(first: str) -> bool:
    """Whether the first line has lengths, ids and chats."""
    return _has(first, "input_length", "hash_ids", "chat_id", "parent_chat_id")


def read_mooncake(source: TraceFile, block_size: int | None) -> Trace:
    """Read Mooncake's format: the size of a block follows from lengths and numbers of ids.

    Raises:
        TraceError: A line is bad, or no size or more than one fits all lines.
    """
    sizes = (block_size,) if block_size else _MOONCAKE_SIZES
    return _read(source, "Mooncake", sizes, _MILLISECONDS)


def read_bailian(source: TraceFile, block_size: int | None) -> Trace:
    """Read Qwen-Bailian's format, 16 tokens per block.

    Raises:
        TraceError: A line is bad.
    """
    return _read(source, "Qwen-Bailian", (block_size or _BAILIAN_SIZE,), 1.0)


def _has(first: str, *names: str) -> bool:
    try:
        found = read_json(first)
    except ValueError:
        return False
    return isinstance(found, dict) and all(name in found for name in names)


def _read(source: TraceFile, name: str, sizes: tuple[int, ...], unit: float) -> Trace:
    requests: list[TraceRequest] = []
    ids: list[Keys] = []
    for line, text in source.lines():
        length, found, time = _fields(source, line, text)
        fitting = tuple(
            size for size in sizes if length // size <= len(found) <= -(-length // size)
        )
        if not fitting:
            said = " or ".join(map(str, sizes))
            reason = f"{len(found)} hash_ids for {length} tokens do not fit blocks of {said} tokens"
            raise source.error(line, reason)
        sizes = fitting
        arrived = None if time is None else time * unit
        requests.append(TraceRequest(line, length, _NONE, _NONE, arrived=arrived))
        ids.append(found)
    if len(sizes) > 1:
        said = " and of ".join(map(str, sizes))
        raise source.error(None, f"all lines fit blocks of {said} tokens; give --block-size")
    keys = chained(
        [one[: req.num_tokens // sizes[0]] for one, req in zip(ids, requests, strict=True)]
    )
    empty = Trace(str(source.path), name, sizes[0], (), 0)
    return from_keys(empty, requests, keys, keys)


def _fields(source: TraceFile, line: int, text: str) -> tuple[int, Keys, float | None]:
    try:
        found: Any = read_json(text)
    except ValueError:
        reason = "not JSON: the line is cut off, or not one object, or nested too deeply"
        raise source.error(line, reason) from None
    if not isinstance(found, dict):
        raise source.error(line, "not a JSON object")
    for name in ("input_length", "hash_ids"):
        if name not in found:
            raise source.error(line, f"there is no {name}")
    length, ids = found["input_length"], found["hash_ids"]
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise source.error(line, f"input_length is {str(length)[:40]!r}, not a positive integer")
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise source.error(line, "hash_ids is not a list of integers")
    try:
        return length, np.array(ids, dtype=np.uint64), finite(found.get("timestamp"))
    except (OverflowError, ValueError):
        reason = "hash_ids has a number outside 0 to 2**64 - 1"
        raise source.error(line, reason) from None
