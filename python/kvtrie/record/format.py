"""The lines of a log: JSON objects, one per line, each whole or not there.

The first line of each file is its header, the others are requests, and notes of what was dropped.
Arrays of digests are base64 of 8 bytes each. Reading checks every field: what it returns is a
record, or the message names the field.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from kvtrie._core import Span
from kvtrie.record._errors import short
from kvtrie.record.digests import BLOCK_SIZES, DIGEST_BYTES, MIN_RUNS, Digester

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

VERSION: Final = 1
"""Of the format."""
MARK: Final = "kvtrie_log"
"""The first key of each file: what follows is the version."""
CONTENTS: Final = ("digests", "tokens")
"""What a log has of its prompts."""
ENDS: Final = ("stopped", "length", "aborted", "other")
"""How a request may have ended."""
REUSES: Final = ("exact", "moved")
"""The classes of reused KV."""

_MAX_TOKEN: Final = (1 << 32) - 1
_LONGEST_DIGEST: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What all requests of one file have in common.

    Attributes:
        content: ``"digests"`` or ``"tokens"``.
        block_size: Tokens per block.
        min_run: The shortest run of tokens that two prompts always have a window of in common.
        window: Tokens of a window.
        key: Names the key of the digests; files with the same one can be compared.
        rate: The share of the sessions or requests that are recorded.
        engine: What wrote it, with its version.
        model: The name of the model.
        began: When the file was begun, in seconds since 1970.
    """

    content: str
    block_size: int
    min_run: int
    window: int
    key: str
    rate: float
    engine: str
    model: str
    began: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Would:
    """What moving KV would have reused of a prompt that was served without.

    Attributes:
        exact: Prompt tokens with exact KV.
        moved: Prompt tokens that would have been moved, or found where others were.
        after_gaps: Those of both that need reuse after gaps.
        computed: The others.
        cleared: Whether the gate clears this kind of edit; if not, ``moved`` is 0.
    """

    exact: int
    moved: int
    after_gaps: int
    computed: int
    cleared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One finished request, as an engine hands it to a `Recorder`.

    Attributes:
        tokens: The token ids of the prompt and of the reply.
        num_prompt: How many of them are the prompt.
        request_id: Its name; a digest of it is written, as of ``session``.
        arrived: When it arrived, in seconds since 1970.
        first_token: Seconds from then to its first token, if known.
        took: Seconds from then to its end.
        ended: How it ended, one of `ENDS`.
        session: The conversation that it belongs to, if known.
        salt: Its cache salt.
        adapter: Its adapter.
        spans: The kinds of its tokens.
        reused: Ranges of its prompt that were not computed, each with one of `REUSES`.
        computed: Computed tokens of its prompt, by reason.
        would: What moving would have reused.
    """

    tokens: NDArray[np.uint32]
    num_prompt: int
    request_id: str
    arrived: float
    took: float
    ended: str
    first_token: float | None = None
    session: str | None = None
    salt: str | None = None
    adapter: str | None = None
    spans: Sequence[Span] = ()
    reused: Sequence[tuple[int, int, str]] = ()
    computed: Mapping[str, int] = field(default_factory=dict)
    would: Would | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """One finished request, as a log has it.

    Attributes:
        request: A digest of its name.
        session: A digest of its session's name, if it named one.
        space: A digest of its namespace. Digests of different namespaces are never equal.
        num_prompt: Tokens of its prompt.
        num_tokens: Tokens of its prompt and its reply.
        blocks: Digests of the whole blocks of both.
        starts: The first tokens of its windows, ascending.
        windows: Their digests.
        tokens: The token ids of both; None in a log of digests.
        arrived: When it arrived, in seconds since 1970.
        first_token: Seconds from then to its first token, if known.
        took: Seconds from then to its end.
        ended: How it ended, one of `ENDS`.
        spans: The kinds of its tokens.
        reused: Ranges of its prompt that were not computed, each with one of `REUSES`.
        computed: Computed tokens of its prompt, by reason; empty if they are not known.
        would: What moving would have reused, if the engine was asked.
    """

    request: str
    session: str | None
    space: str
    num_prompt: int
    num_tokens: int
    blocks: NDArray[np.uint64]
    starts: NDArray[np.int64]
    windows: NDArray[np.uint64]
    tokens: NDArray[np.uint32] | None
    arrived: float
    first_token: float | None
    took: float
    ended: str
    spans: tuple[Span, ...]
    reused: tuple[tuple[int, int, str], ...]
    computed: Mapping[str, int]
    would: Would | None


@dataclass(frozen=True, slots=True)
class Dropped:
    """Requests that a recorder has not written.

    Attributes:
        queue: Because its queue was full.
        disk: Because the file could not be written.
        size: Because the record was longer than a file may be.
    """

    queue: int = 0
    disk: int = 0
    size: int = 0

    def __bool__(self) -> bool:
        return bool(self.queue or self.disk or self.size)

    def __add__(self, other: Dropped) -> Dropped:
        return Dropped(self.queue + other.queue, self.disk + other.disk, self.size + other.size)

    def __sub__(self, other: Dropped) -> Dropped:
        return Dropped(self.queue - other.queue, self.disk - other.disk, self.size - other.size)


class FieldError(ValueError):
    """A line that is no record; the message names the field."""


class VersionError(ValueError):
    """A header of another version."""


# --- writing ---------------------------------------------------------------------------------


def header_line(header: Header) -> bytes:
    """The first line of a file."""
    return _line({MARK: VERSION, **asdict(header)})


def dropped_line(dropped: Dropped) -> bytes:
    """The line that notes what was dropped since the last such line."""
    return _line({"dropped": asdict(dropped)})


def request_line(one: Finished, digester: Digester, content: str) -> bytes:
    """The line of a request: with ``content="digests"`` no token id is in it."""
    space = digester.space(one.salt, one.adapter)
    row: dict[str, Any] = {"request": digester.name("request", one.request_id)}
    if one.session is not None:
        row["session"] = digester.name("session", one.session)
    row |= {
        "space": digester.space_name(space),
        "arrived": round(one.arrived, 3),
        "took": round(one.took, 4),
        "ended": one.ended,
        "num_prompt": one.num_prompt,
        "num_tokens": len(one.tokens),
    }
    if one.first_token is not None:
        row["first_token"] = round(one.first_token, 4)
    if content == "tokens":
        row["tokens"] = one.tokens.tolist()
    else:
        gaps, windows = digester.windows(one.tokens, space)
        row["blocks"] = _packed(digester.blocks(one.tokens, space))
        row["gaps"], row["windows"] = _packed(gaps), _packed(windows)
    row["spans"] = [[span.start, span.end, span.kind] for span in one.spans]
    row["reused"] = [list(range_) for range_ in one.reused]
    row["computed"] = dict(one.computed)
    if one.would is not None:
        row["would"] = asdict(one.would)
    return _line(row)


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _packed(data: bytes) -> str:
    return base64.b64encode(data).decode()


# --- reading ---------------------------------------------------------------------------------


def read_header(row: Mapping[str, Any]) -> Header:
    """The header in a row that has `MARK`.

    Raises:
        VersionError: It is of another version.
        FieldError: A field is missing or invalid.
    """
    version = row[MARK]
    if version != VERSION or isinstance(version, bool):
        msg = f"the log is of version {short(version)}, and this kvtrie reads version {VERSION}"
        raise VersionError(msg)
    content = _text(row, "content")
    if content not in CONTENTS:
        _wrong("content", content, f"one of {', '.join(CONTENTS)}")
    min_run = _count(row, "min_run")
    if not MIN_RUNS[0] <= min_run <= MIN_RUNS[1]:
        _wrong("min_run", min_run, f"from {MIN_RUNS[0]} to {MIN_RUNS[1]}")
    block_size, window, rate = (
        _count(row, "block_size"),
        _count(row, "window"),
        _number(row, "rate"),
    )
    # A reader takes as much memory as there are blocks, and as much time as there are windows.
    if not BLOCK_SIZES[0] <= block_size <= BLOCK_SIZES[1]:
        _wrong("block_size", block_size, f"from {BLOCK_SIZES[0]} to {BLOCK_SIZES[1]}")
    if not 1 <= window <= min_run:
        _wrong("window", window, f"from 1 to min_run, {min_run}")
    if not 0 <= rate <= 1:
        _wrong("rate", rate, "from 0 to 1")
    return Header(
        content=content,
        block_size=block_size,
        min_run=min_run,
        window=window,
        key=_text(row, "key"),
        rate=rate,
        engine=_text(row, "engine"),
        model=_text(row, "model"),
        began=_number(row, "began"),
    )


def read_dropped(row: Mapping[str, Any]) -> Dropped:
    """What a row with ``"dropped"`` says.

    Raises:
        FieldError: A field is missing or invalid.
    """
    found = row["dropped"]
    if not isinstance(found, dict):
        _wrong("dropped", found, "an object")
    return Dropped(*(_count(found, one.name) for one in fields(Dropped)))


def read_request(row: Mapping[str, Any], header: Header) -> Recorded:
    """The request in a row with ``"request"``.

    Raises:
        FieldError: A field is missing or invalid.
    """
    num_prompt, num_tokens = _count(row, "num_prompt"), _count(row, "num_tokens")
    if num_prompt > num_tokens:
        _wrong("num_prompt", num_prompt, f"at most num_tokens, {num_tokens}")
    space = _digest(row, "space")
    tokens = _tokens(row, num_tokens) if header.content == "tokens" else None
    if tokens is None:
        blocks, gaps, windows = (_bytes(row, one) for one in ("blocks", "gaps", "windows"))
    else:
        # A reader's own digests of ids that are there anyway: this key hides nothing.
        own = Digester(bytes(32), block_size=header.block_size, min_run=header.min_run)
        key = own.space(space, None)
        blocks, (gaps, windows) = own.blocks(tokens, key), own.windows(tokens, key)
    if len(blocks) != num_tokens // header.block_size * DIGEST_BYTES:
        _wrong("blocks", f"{len(blocks)} bytes", f"{DIGEST_BYTES} bytes for each whole block")
    if len(windows) != len(gaps) * DIGEST_BYTES:
        _wrong("windows", f"{len(windows)} bytes", f"{DIGEST_BYTES} bytes for each of gaps")
    starts = np.cumsum(np.frombuffer(gaps, np.uint8), dtype=np.int64)
    if len(starts) and starts[-1] + header.window > num_tokens:
        _wrong("gaps", int(starts[-1]), f"inside {num_tokens} tokens")
    # As many as any prompt of this length has, so that a short line cannot name many tokens.
    least = max(0, num_tokens - header.window + 1) // (header.min_run - header.window + 1)
    if tokens is None and len(gaps) < least:
        _wrong("windows", len(gaps), f"at least {least} in {num_tokens} tokens")
    ended = _text(row, "ended")
    if ended not in ENDS:
        _wrong("ended", ended, f"one of {', '.join(ENDS)}")
    return Recorded(
        request=_digest(row, "request"),
        session=_digest(row, "session") if "session" in row else None,
        space=space,
        num_prompt=num_prompt,
        num_tokens=num_tokens,
        blocks=np.frombuffer(blocks, "<u8").astype(np.uint64, copy=False),
        starts=starts,
        windows=np.frombuffer(windows, "<u8").astype(np.uint64, copy=False),
        tokens=tokens,
        arrived=_number(row, "arrived"),
        first_token=_number(row, "first_token") if "first_token" in row else None,
        took=_number(row, "took"),
        ended=ended,
        spans=tuple(_span(one) for one in _ranges(row, "spans", num_tokens)),
        reused=_reused(row, num_prompt),
        computed=_computed(row, num_prompt),
        would=_would(row, num_prompt) if "would" in row else None,
    )


def _span(one: tuple[int, int, str]) -> Span:
    try:
        return Span(*one)
    except ValueError as error:
        msg = f"spans: {error}"
        raise FieldError(msg) from None


def _reused(row: Mapping[str, Any], num_prompt: int) -> tuple[tuple[int, int, str], ...]:
    found = _ranges(row, "reused", num_prompt)
    for one in found:
        if one[2] not in REUSES:
            _wrong("reused", one[2], f"one of {', '.join(REUSES)}")
    return tuple(found)


def _computed(row: Mapping[str, Any], num_prompt: int) -> dict[str, int]:
    found = row.get("computed")
    if not isinstance(found, dict):
        _wrong("computed", found, "an object")
    counts = {name: _count(found, name) for name in found}
    if sum(counts.values()) > num_prompt:
        _wrong("computed", sum(counts.values()), f"at most num_prompt, {num_prompt}")
    return counts


def _would(row: Mapping[str, Any], num_prompt: int) -> Would:
    found = row["would"]
    if not isinstance(found, dict):
        _wrong("would", found, "an object")
    cleared = found.get("cleared")
    if not isinstance(cleared, bool):
        _wrong("cleared", cleared, "true or false")
    numbers = {one: _count(found, one) for one in ("exact", "moved", "after_gaps", "computed")}
    if numbers["exact"] + numbers["moved"] + numbers["computed"] != num_prompt:
        _wrong("would", found, f"of {num_prompt} tokens in all")
    return Would(**numbers, cleared=cleared)


def _tokens(row: Mapping[str, Any], num_tokens: int) -> NDArray[np.uint32]:
    found = row.get("tokens")
    if not isinstance(found, list) or len(found) != num_tokens:
        _wrong("tokens", found, f"an array of num_tokens, {num_tokens}")
    for one in found:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= _MAX_TOKEN:
            _wrong("tokens", one, f"token ids from 0 to {_MAX_TOKEN}")
    return np.array(found, np.uint32)


def _ranges(row: Mapping[str, Any], name: str, most: int) -> list[tuple[int, int, str]]:
    found = row.get(name)
    if not isinstance(found, list):
        _wrong(name, found, "an array")
    for one in found:
        if not (isinstance(one, list) and len(one) == 3 and isinstance(one[2], str) and one[2]):
            _wrong(name, one, "arrays of a start, an end and a name")
        if not all(isinstance(at, int) and not isinstance(at, bool) for at in one[:2]):
            _wrong(name, one, "arrays of a start, an end and a name")
        if not 0 <= one[0] <= one[1] <= most:
            _wrong(name, one, f"ranges inside {most} tokens")
    return [(one[0], one[1], one[2]) for one in found]


def _bytes(row: Mapping[str, Any], name: str) -> bytes:
    text = _text(row, name)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        _wrong(name, text, "base64")


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        _wrong(name, value, "a text")
    if not value.isascii() and any("\ud800" <= one <= "\udfff" for one in value):
        _wrong(name, value, "a text without half a character (a lone surrogate)")
    return value


def _digest(row: Mapping[str, Any], name: str) -> str:
    value = _text(row, name)
    if len(value) > _LONGEST_DIGEST:
        _wrong(name, f"{len(value)} characters", f"at most {_LONGEST_DIGEST}")
    return value


def _count(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        _wrong(name, value, "a whole number from 0")
    return value


def _number(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        _wrong(name, value, "a number")
    try:
        is_finite = math.isfinite(value)
    except OverflowError:
        is_finite = False
    if not is_finite:
        _wrong(name, value, "a number")
    return float(value)


def _wrong(name: str, value: object, wanted: str) -> NoReturn:
    msg = f"{name} must be {wanted}, not {short(value)}"
    raise FieldError(msg)
