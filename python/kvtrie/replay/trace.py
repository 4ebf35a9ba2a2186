"""Requests as a cache sees them: full blocks, named so that equal ids are equal prefixes.

A reader makes a `Trace` from any file. It names each block by a *chain key*: equal keys mean equal
tokens in the block and in everything before it. A reader that has tokens gets keys from
`chain_keys`, which costs about 10 ns per token; one that has ids of blocks, from `chained`.
`from_keys` numbers the keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Ids = NDArray[np.uint32]
    Keys = NDArray[np.uint64]
    Tokens = NDArray[np.uint32]

_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


class TraceError(ValueError):
    """A trace cannot be read or replayed; the text is one sentence with the file and the line."""

    def __init__(self, path: Path | str, line: int | None, reason: str) -> None:
        where = f"{path}, line {line}" if line is not None else str(path)
        super().__init__(f"{where}: {reason}")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Attributes:
        line: Its line in its file.
        num_tokens: Tokens of the prompt, at least 1.
        prompt: Ids of the prompt's full blocks.
        cached: Ids of the full blocks that are cached when it ends. They begin with ``prompt``;
            more of them are the reply's.
        dead: Ranges of tokens of the cached sequence: reasoning that the template drops once this
            request has ended.
        tokens: Returns the prompt's tokens and the cached sequence's; None where the file shows
            none, and moved runs are not visible. Their numbers need not be a vocabulary's. It is
            enough that equal runs of tokens are equal runs of numbers and other tokens other
            numbers, so numbers made from fingerprints of windows will do.
        session: The conversation, or None where it is not known.
        file: Its file, or ``""`` where that is the trace's.
        arrived: When it arrived, in seconds from any origin, or None where the file has
            no number for it.
    """

    line: int
    num_tokens: int
    prompt: Ids
    cached: Ids
    dead: tuple[tuple[int, int], ...] = ()
    tokens: Callable[[], tuple[Tokens, Tokens]] | None = None
    session: str | None = None
    file: str = ""
    arrived: float | None = None

    def findable(self, block_size: int) -> int:
        """Blocks that a prefix cache may find: the last token of a prompt is always computed."""
        return min(len(self.prompt), (self.num_tokens - 1) // block_size)


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """The tokens of a prompt and its reply, as ``TraceRequest.tokens`` returns them.

    Attributes:
        whole: Those of both.
        num_prompt: How many are the prompt's.
    """

    whole: Tokens
    num_prompt: int

    def __call__(self) -> tuple[Tokens, Tokens]:
        """The prompt's, and those of both."""
        return self.whole[: self.num_prompt], self.whole


@dataclass(frozen=True, slots=True)
class LogGaps:
    """What a recorder's log does not have, so that hit rates of it are not those of the traffic.

    Attributes:
        rate: The share of sessions that was recorded, or of requests without one.
        without_session: Requests that name no session: each was sampled by itself.
        num_cut: Last lines that were cut and not read.
        dropped: Requests that the recorder did not write.
        recorders: Processes that wrote the log. In a log of digests, what prompts of two of them
            have in common is not visible.
    """

    rate: float = 1.0
    without_session: int = 0
    num_cut: int = 0
    dropped: int = 0
    recorders: int = 1


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded traffic.

    Attributes:
        path: The file, for messages.
        format: The name of its format.
        block_size: Tokens per block.
        requests: In the order of the file.
        num_ids: Ids of blocks are below it, and each occurs.
        marks_reasoning: Whether the trace says which tokens are reasoning that will be dropped.
        synthetic: The overlay that made replies and marks, or ``""``.
        reasoning: How that is known, or why it is not, in a sentence, or ``""``.
        gaps: What a recorder's log does not have; None for other formats.
        tokens_are: What the tokens are where they are no model's, or ``""``.
    """

    path: str
    format: str
    block_size: int
    requests: tuple[TraceRequest, ...]
    num_ids: int
    marks_reasoning: bool = False
    synthetic: str = ""
    reasoning: str = ""
    gaps: LogGaps | None = None
    tokens_are: str = ""

    @property
    def shows_tokens(self) -> bool:
        """Whether moved runs are visible."""
        return all(one.tokens is not None for one in self.requests)

    @property
    def longest(self) -> TraceRequest:
        """The request that caches most blocks: a pool must hold it."""
        return max(self.requests, key=lambda one: len(one.cached))

    def error(self, one: TraceRequest, reason: str) -> TraceError:
        """An error that names a request's file and line."""
        return TraceError(one.file or self.path, one.line, reason)


def chain_keys(tokens: Tokens, block_size: int) -> Keys:
    """The chain keys of a sequence's full blocks.

    A key is the sum of a hash of each token and its position, 64 bits. Two prefixes that differ
    have the same key with a probability of 2**-64, unless someone chose the tokens for it.
    """
    num = len(tokens) // block_size
    mixed = np.arange(num * block_size, dtype=np.uint64)
    mixed <<= np.uint64(32)
    mixed |= tokens[: num * block_size]
    mixed *= _ODD
    for shift, factor in _MIX:
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    sums = mixed.reshape(num, block_size).sum(axis=1, dtype=np.uint64)
    return np.cumsum(sums, dtype=np.uint64)


def chained(requests: Sequence[Keys]) -> Sequence[Keys]:
    """Chain keys from ids of blocks, one array per request.

    Ids may name a block's content alone, or be chained already; these are returned as they are,
    which costs a tenth of the 0.5 µs per block that others take.
    """
    every = np.concatenate([np.empty(0, np.uint64), *requests])
    names, first, ids = np.unique(every, return_index=True, return_inverse=True)
    before = np.full(len(ids), len(names))
    before[1:] = ids[:-1]
    lengths = np.array([len(one) for one in requests])
    before[(np.cumsum(lengths) - lengths)[lengths > 0]] = len(names)
    if bool(np.all(before == before[first][ids])):
        return requests
    known: dict[tuple[int, int], int] = {}
    chained = []
    for request in requests:
        parent = -1
        keys = []
        for one in request.tolist():
            parent = known.setdefault((parent, one), len(known))
            keys.append(parent)
        chained.append(np.array(keys, dtype=np.uint64))
    return chained


def from_keys(
    trace: Trace, requests: Sequence[TraceRequest], prompts: Sequence[Keys], cached: Sequence[Keys]
) -> Trace:
    """A trace whose blocks are numbered by their chain keys.

    Args:
        trace: All that is not in the other arguments; its requests are replaced.
        requests: Their ids are replaced.
        prompts: The chain keys of each prompt's full blocks.
        cached: Those of each cached sequence.
    """
    every = np.concatenate([np.empty(0, np.uint64), *cached])
    names, numbers = np.unique(every, return_inverse=True)
    ids = numbers.astype(np.uint32)
    found = []
    at = 0
    for one, prompt, whole in zip(requests, prompts, cached, strict=True):
        mine = ids[at : at + len(whole)]
        at += len(whole)
        found.append(replace(one, prompt=mine[: len(prompt)], cached=mine))
    return replace(trace, requests=tuple(found), num_ids=len(names))
