"""Reads the logs of `kvtrie.record`, which show moved runs, with token ids and without.

The requests come in the order in which they arrived. What ends before another arrives and what does
not makes no difference: as in all traces, one is served after the other.

A log of digests has no tokens, so each token gets a number instead. A block that was seen before
gets the numbers that it had then; tokens of other blocks get those of the windows that were seen
before; all others get new ones. So equal numbers are equal tokens, and equal whole blocks equal
numbers: a replay finds every prefix, and no moved run that is not there. Of a moved run it finds
less than there is: less than half of the log's ``min_run`` tokens at each end are left out, and
runs shorter than ``min_run``, unless they hold a whole block of both prompts.

Both kinds of log may mark reasoning, and show whether prompts drop it (`kvtrie.replay.reasoning`).

A log of digests takes about 0.5 µs per token to read, and 4 bytes of memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from kvtrie.record import Log, LogError
from kvtrie.replay.reasoning import dropped
from kvtrie.replay.trace import (
    KnownTokens,
    LogGaps,
    Trace,
    TraceError,
    TraceRequest,
    chained,
    from_keys,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.record import Recorded
    from kvtrie.replay.source import TraceFile
    from kvtrie.replay.trace import Tokens

NAME: Final = "kvtrie log"
_BEGINS: Final = '{"kvtrie_log":'
_NONE: Final = np.empty(0, np.uint32)
_MOST_NUMBERS: Final = 1 << 32


def is_log(first: str) -> bool:
    """Whether the first line is a log's header."""
    return first.startswith(_BEGINS)


def read_log(source: TraceFile, block_size: int | None) -> Trace:
    """Read a log, with the files that its recorder has renamed.

    Raises:
        TraceError: A line is bad, there is no request, or the blocks have another size.
    """
    try:
        log = Log(source.path)
        found = [each for each in log.located() if each[2].num_prompt]
    except LogError as error:
        raise TraceError(error.path, error.line, error.reason) from None
    except OSError as error:
        raise source.error(None, error.strerror or str(error)) from None
    header = log.header
    if header is None or not found:
        raise source.error(None, "the log has no whole request")
    size = header.block_size
    if block_size not in (None, size):
        raise source.error(1, f"the log has blocks of {size} tokens, not {block_size}")
    found.sort(key=lambda each: each[2].arrived)
    every = [one for _, _, one in found]
    # Of different namespaces, equal tokens are different KV.
    are_plain = header.content == "tokens" and len({one.space for one in every}) == 1
    numbers = _Numbers(size, header.window)
    # The last token of a reply has no KV.
    ends = [max(one.num_prompt, one.num_tokens - 1) for one in every]
    keys = chained([one.blocks[: end // size] for one, end in zip(every, ends, strict=True)])
    drops = dropped(every, keys, size)
    requests = []
    for (file, line, one), end, dead in zip(found, ends, drops.ranges, strict=True):
        tokens = one.tokens if are_plain else None
        if tokens is None:
            tokens = numbers.of(source, one)
        requests.append(
            TraceRequest(
                line=line,
                num_tokens=one.num_prompt,
                prompt=_NONE,
                cached=_NONE,
                dead=tuple((first, min(last, end)) for first, last in dead),
                tokens=KnownTokens(tokens[:end], one.num_prompt),
                session=None if one.session is None else f"{one.space}/{one.session}",
                file=str(file),
                arrived=one.arrived,
            )
        )
    trace = Trace(
        str(source.path),
        NAME,
        size,
        (),
        0,
        marks_reasoning=drops.is_known,
        reasoning=drops.reason,
        gaps=_gaps(log, every),
    )
    firsts = [one[: req.num_prompt // size] for one, req in zip(keys, every, strict=True)]
    return from_keys(trace, requests, firsts, keys)


def _gaps(log: Log, found: Sequence[Recorded]) -> LogGaps:
    gone = log.dropped
    return LogGaps(
        rate=min(header.rate for header in log.headers),
        without_session=sum(one.session is None for one in found),
        num_cut=log.num_cut,
        dropped=gone.queue + gone.disk + gone.size,
        recorders=len({header.key for header in log.headers}),
    )


class _Numbers:
    """Numbers for tokens that are known by digests."""

    def __init__(self, block_size: int, window: int) -> None:
        self._block_size = block_size
        self._window = window
        self._next = 0
        # Where a block or a window was seen first.
        self._blocks: dict[int, tuple[Tokens, int]] = {}
        self._windows: dict[int, tuple[Tokens, int]] = {}

    def of(self, source: TraceFile, one: Recorded) -> Tokens:
        """The numbers of a request's tokens."""
        size, window = self._block_size, self._window
        if self._next + one.num_tokens > _MOST_NUMBERS:
            raise source.error(None, f"the log has more than {_MOST_NUMBERS:,} different tokens")
        made = np.arange(self._next, self._next + one.num_tokens, dtype=np.uint32)
        self._next += one.num_tokens
        starts, windows = one.starts.tolist(), one.windows.tolist()
        for start, name in zip(starts, windows, strict=True):
            seen = self._windows.get(name)
            if seen is not None:
                numbers, first = seen
                made[start : start + window] = numbers[first : first + window]
        for at, name in enumerate(one.blocks.tolist()):
            numbers, first = self._blocks.setdefault(name, (made, at * size))
            made[at * size : (at + 1) * size] = numbers[first : first + size]
        for start, name in zip(starts, windows, strict=True):
            self._windows.setdefault(name, (made, start))
        return made
