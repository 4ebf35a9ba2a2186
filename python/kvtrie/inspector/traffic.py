"""The data of a page that shows a log: its requests, what each reused, and what was there before.

Besides what the engine wrote, each request is compared with all earlier ones: the longest run of
whole blocks that one of them began with, and the runs that one of them had at another position.
That a request had it does not mean that its KV was still cached, and runs shorter than the log's
``min_run`` may be missed.
"""

from __future__ import annotations

from collections import deque
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from kvtrie.inspector.pack import packed_json
from kvtrie.record import Log, LogError

if TYPE_CHECKING:
    from pathlib import Path

    from kvtrie.record import Recorded

MOST_REQUESTS: Final = 20_000
"""Of more requests, a page has the latest."""
_MOST_RUNS: Final = 24


def traffic_document(path: Path, *, most: int = MOST_REQUESTS) -> dict[str, Any]:
    """The data of a page.

    Args:
        path: The log.
        most: The most requests of the page.

    Raises:
        LogError: The log cannot be read, or has no whole request.
        OSError: A file cannot be read.
    """
    log = Log(path)
    found = sorted(log, key=lambda one: one.arrived)
    header = log.header
    if header is None or not found:
        why = "the log has no whole request"
        raise LogError(path, 1, why)
    earlier = _Earlier(header.block_size, header.window)
    names = _Names()
    rows: deque[dict[str, Any]] = deque(maxlen=most)
    first = max(0, len(found) - most)
    for number, one in enumerate(found):
        if number >= first:
            rows.append({**_row(one, names), **earlier.of(one, first)})
        earlier.add(one, number)
    return {
        "blockSize": header.block_size,
        "minRun": header.min_run,
        "content": header.content,
        "engine": header.engine,
        "model": header.model,
        "rate": header.rate,
        "numCut": log.num_cut,
        "dropped": log.dropped.queue + log.dropped.disk + log.dropped.size,
        "total": len(found),
        "shown": len(rows),
        "restarts": len({one.key for one in log.headers}) - 1,
        "kinds": names.of["kind"],
        "sessions": names.of["session"],
        "spaces": names.of["space"],
        "requests": packed_json(list(rows)),
    }


class _Names:
    """Numbers for names that occur in many rows."""

    def __init__(self) -> None:
        self.of: dict[str, list[str]] = {"kind": [], "session": [], "space": []}
        self._numbers: dict[tuple[str, str], int] = {}

    def number(self, what: str, name: str) -> int:
        key = what, name
        if key not in self._numbers:
            self._numbers[key] = len(self.of[what])
            self.of[what].append(name)
        return self._numbers[key]


def _row(one: Recorded, names: _Names) -> dict[str, Any]:
    row: dict[str, Any] = {
        "request": one.request,
        "session": None if one.session is None else names.number("session", one.session),
        "space": names.number("space", one.space),
        "arrived": one.arrived,
        "first": one.first_token,
        "took": one.took,
        "ended": one.ended,
        "prompt": one.num_prompt,
        "tokens": one.num_tokens,
        "reused": [list(each) for each in one.reused],
        "spans": [[each.start, each.end, names.number("kind", each.kind)] for each in one.spans],
        "computed": dict(one.computed),
    }
    if one.would is not None:
        would = one.would
        row["would"] = {
            "exact": would.exact,
            "moved": would.moved,
            "afterGaps": would.after_gaps,
            "computed": would.computed,
            "cleared": would.cleared,
        }
    return row


class _Earlier:
    """What requests before this one had."""

    def __init__(self, block_size: int, window: int) -> None:
        self._block_size = block_size
        self._window = window
        # A number for each prefix of blocks, and the latest request that had it.
        self._prefixes: dict[tuple[int, int], int] = {}
        self._latest: list[int] = []
        # The latest request with a window, and where it had it.
        self._windows: dict[int, tuple[int, int]] = {}

    def add(self, one: Recorded, number: int) -> None:
        at = -1
        for block in one.blocks.tolist():
            at = self._prefixes.setdefault((at, block), len(self._latest))
            if at == len(self._latest):
                self._latest.append(number)
            else:
                self._latest[at] = number
        places = zip(repeat(number), one.starts.tolist(), strict=False)
        self._windows.update(zip(one.windows.tolist(), places, strict=False))

    def of(self, one: Recorded, first: int) -> dict[str, Any]:
        """The longest prefix in common and the moved runs; requests are counted from ``first``."""
        at, count = -1, 0
        for block in one.blocks[: one.num_prompt // self._block_size].tolist():
            found = self._prefixes.get((at, block))
            if found is None:
                break
            at, count = found, count + 1
        prefix = count * self._block_size
        runs = self._runs(one, prefix)
        kept = sorted(runs, key=lambda run: run[0] - run[1])[:_MOST_RUNS]
        return {
            "prefix": [self._latest[at] - first, prefix] if count else None,
            "seen": [[start, end, old, number - first] for start, end, old, number in sorted(kept)],
            "seenMore": sum(end - start for start, end, *_ in runs)
            - sum(end - start for start, end, *_ in kept),
        }

    def _runs(self, one: Recorded, prefix: int) -> list[tuple[int, int, int, int]]:
        """Runs after the prefix: start, end, the start in the earlier request, its number."""
        runs: list[tuple[int, int, int, int]] = []
        for start, window in zip(one.starts.tolist(), one.windows.tolist(), strict=True):
            end = min(start + self._window, one.num_prompt)
            place = self._windows.get(window)
            if place is None or start < prefix or end <= start:
                continue
            number, old = place
            last = runs[-1] if runs else (0, 0, 0, -1)
            if last[3] == number and last[2] - last[0] == old - start and start <= last[1]:
                runs[-1] = (last[0], end, last[2], number)
                continue
            begin = max(start, runs[-1][1]) if runs else start
            if begin < end:
                runs.append((begin, end, old + begin - start, number))
        return runs
