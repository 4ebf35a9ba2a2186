"""Reader of traces of text: LMCache's agent traces.

They are one JSON object per line with ``timestamp``, ``input``, ``output`` and ``session_id``, one
file per session, often in one archive. Requests come in the order of their times, over all
sessions; times are in microseconds. A prompt is ``input``; ``output`` is the reply that is cached
after it. Nothing marks reasoning, and no chat template is applied.

Token ids come from a tokenizer, if there is one. Otherwise a token is a word with the space before
it, up to three digits, a run of punctuation, or a run of white space. These are whole tokens of no
model; equal texts are equal tokens, so hit rates are close to a model's, and sizes are of such
tokens. A byte of text costs about 0.2 µs then, and each token 4 bytes of memory.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtrie.replay.source import finite, read_json
from kvtrie.replay.trace import KnownTokens, Trace, TraceRequest, chain_keys, from_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.replay.source import TraceFile
    from kvtrie.replay.trace import Tokens

NAME: Final = "LMCache agent"
_TEXTS: Final = ("input", "output", "session_id")
_BLOCK_SIZE: Final = 16
_PIECES: Final = re.compile(r" ?[^\W\d_]+|\d{1,3}| ?(?:[^\w\s]|_)+|\s+")
_LONGEST_SESSION: Final = 256
_MICROSECONDS: Final = 1e-6
_NONE: Final = np.empty(0, np.uint32)
WORDS: Final = "words and marks of the text, not a model's: give --tokenizer for a model's"
"""What tokens are without a tokenizer."""


def is_agent(first: str) -> bool:
    """Whether the first line has a prompt, a reply and a session as text."""
    try:
        found = read_json(first)
    except ValueError:
        return False
    return isinstance(found, dict) and all(isinstance(found.get(one), str) for one in _TEXTS)


def read_agent(source: TraceFile, block_size: int | None) -> Trace:
    """Read a file of one session, or of several, or an archive of such files.

    Raises:
        TraceError: A line is bad, no request has an input, or the tokenizer makes no ids of one.
    """
    encode = source.encode or _Words()
    size = block_size or _BLOCK_SIZE
    rows = []
    for file, line, text in source.located():
        row = _row(source, file, line, text)
        if row["input"]:
            rows.append((row["timestamp"], file, line, row))
    if not rows:
        raise source.error(None, "no request has an input")
    rows.sort(key=lambda one: one[:3])
    requests, prompts, cached = [], [], []
    for _, file, line, row in rows:
        prompt = _ids(source, file, line, encode(row["input"]))
        reply = _ids(source, file, line, encode(row["output"]))
        # The last token of a reply has no KV.
        whole = np.concatenate([prompt, reply[:-1]])
        if not len(prompt):
            raise source.error(line, "the tokenizer makes no token of input", file)
        time = finite(row["timestamp"])
        requests.append(
            TraceRequest(
                line=line,
                num_tokens=len(prompt),
                prompt=_NONE,
                cached=_NONE,
                tokens=KnownTokens(whole, len(prompt)),
                session=_session(row["session_id"]),
                arrived=None if time is None else time * _MICROSECONDS,
                file=file,
            )
        )
        keys = chain_keys(whole, size)
        prompts.append(keys[: len(prompt) // size])
        cached.append(keys)
    are = WORDS if source.encode is None else "those of the tokenizer"
    trace = Trace(str(source.path), NAME, size, (), 0, tokens_are=are)
    return from_keys(trace, requests, prompts, cached)


class _Words:
    """Numbers for words and marks, in the order in which they occur."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> list[int]:
        numbers = self._numbers
        return [numbers.setdefault(one, len(numbers)) for one in _PIECES.findall(text)]


def _session(name: str) -> str | None:
    """A name that an index takes; None for an empty one."""
    if len(name.encode()) > _LONGEST_SESSION:
        return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    return name or None


def _ids(source: TraceFile, file: str, line: int, ids: Sequence[int]) -> Tokens:
    try:
        return np.array(ids, dtype=np.uint32)
    except (OverflowError, ValueError):
        reason = "the tokenizer returns an id outside 0 to 2**32 - 1"
        raise source.error(line, reason, file) from None


def _row(source: TraceFile, file: str, line: int, text: str) -> dict[str, Any]:
    try:
        found: Any = read_json(text)
    except ValueError:
        reason = "not JSON: the line is cut off, or not one object, or nested too deeply"
        raise source.error(line, reason, file) from None
    if not isinstance(found, dict):
        raise source.error(line, "not a JSON object", file)
    for name in ("timestamp", *_TEXTS):
        if name not in found:
            raise source.error(line, f"there is no {name}", file)
        value = found[name]
        is_right = isinstance(value, str) if name in _TEXTS else _is_number(value)
        if not is_right:
            wanted = "a text" if name in _TEXTS else "a number"
            raise source.error(line, f"{name} is {str(value)[:40]!r}, not {wanted}", file)
        if name in _TEXTS and any("\ud800" <= one <= "\udfff" for one in set(value)):
            raise source.error(line, f"{name} has half a character (a lone surrogate)", file)
    return found


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        # NaN has no place in an order.
        return not math.isnan(value)
    return isinstance(value, int) and not isinstance(value, bool)
