"""What the snapshot source of an engine says of itself, in front of each of its answers."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

_VERSION: Final = 1
LONGEST_HEADER: Final = 256
"""Most bytes of a header."""


class SnapshotHeader(NamedTuple):
    """What comes with a snapshot: whose it is, and the last batch that counts."""

    incarnation: str
    number: int

    @classmethod
    def read(cls, frames: list[bytes], *others: str) -> SnapshotHeader:
        """Read an answer of a header, and of `others`.

        Raises:
            ValueError: It is something else.
        """
        names = ("empty", "header", *others)
        if len(frames) != len(names):
            msg = f"it has {len(frames)} frames, not [{', '.join(names)}]"
            raise ValueError(msg)
        frame = frames[1]
        if len(frame) > LONGEST_HEADER:
            msg = f"its header has {len(frame)} bytes; the limit is {LONGEST_HEADER}"
            raise ValueError(msg)
        said: Any = json.loads(frame)
        known = said if isinstance(said, dict) else {}
        version, name, number = (known.get(key) for key in ("version", "incarnation", "number"))
        if version != _VERSION:
            msg = f"its version is {version!r}, not {_VERSION}"
            raise ValueError(msg)
        if not isinstance(name, str) or not name:
            msg = f"its incarnation is {name!r}"
            raise ValueError(msg)
        if isinstance(number, bool) or not isinstance(number, int) or not -1 <= number < 1 << 63:
            msg = f"its number is {number!r}"
            raise ValueError(msg)
        return cls(name, number)
