"""Synthetic replies with reasoning for a trace that marks none, so that what drops it can be seen.

Overlays are workloads laid over recorded prompts, and everything about reasoning in their figures
is synthetic:

* ``W01``: every reply begins with 1,500 tokens of reasoning, and no later prompt has them.
* ``W11``: every reply begins with 150 tokens of reasoning, which the prompts of the same user turn
  keep. A user turn is 13 requests of a conversation (12 tool calls and an answer). When the user
  speaks again, the reasoning of the whole turn is gone.

A request continues the latest earlier one whose full blocks it begins with. A reply is the
reasoning, then ``output`` tokens: those that the next request of the conversation has there, and
tokens of its own after them. Each block of the trace becomes its own run of distinct tokens, so
moved runs are visible. What is dropped is marked dead when the last request of its turn ends; a
branch of that turn may still use it. Only full blocks of prompts are used, and requests without one
are left out.

An overlay costs about 20 ns per token of the trace, once; its tokens are made again, at about 2 ns
each, for every pool size that kvtrie's index replays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtrie.replay.trace import Trace, TraceError, TraceRequest, chain_keys, from_keys

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtrie.replay.trace import Ids, Tokens

_MOST_TOKENS: Final = 2**32


@dataclass(frozen=True, slots=True)
class Overlay:
    """What is laid over a trace.

    Attributes:
        name: The workload's.
        reasoning: Tokens of reasoning in each reply.
        turn: Requests of one user turn, after which the reasoning is dropped.
        output: Tokens of each reply after its reasoning.
    """

    name: str
    reasoning: int
    turn: int
    output: int

    def over(self, trace: Trace) -> Trace:
        """The trace with replies that have reasoning.

        Raises:
            TraceError: The trace marks reasoning itself, has no request of a full block, or more
                tokens than 2**32.
        """
        if trace.marks_reasoning:
            reason = f"the trace marks reasoning itself; the overlay {self.name} is not for it"
            raise TraceError(trace.path, None, reason)
        kept = [one for one in trace.requests if len(one.prompt)]
        if not kept:
            raise TraceError(trace.path, None, "no prompt has a full block, so there is no overlay")
        texts = _Texts(self, trace, kept)
        prompts, cached, requests = [], [], []
        for index, one in enumerate(kept):
            prompt, whole = texts.tokens(index)
            prompts.append(chain_keys(prompt, trace.block_size))
            cached.append(chain_keys(whole, trace.block_size))
            requests.append(
                replace(
                    one,
                    num_tokens=len(prompt),
                    dead=texts.dead(index),
                    tokens=_Later(texts, index),
                    session=f"{texts.root[index]}",
                )
            )
        empty = replace(trace, requests=(), marks_reasoning=True, synthetic=self.name, reasoning="")
        return from_keys(empty, requests, prompts, cached)


OVERLAYS: Final[Mapping[str, Overlay]] = {
    "W01": Overlay("W01", reasoning=1500, turn=1, output=400),
    "W11": Overlay("W11", reasoning=150, turn=13, output=33),
}


@dataclass(frozen=True, slots=True)
class _Later:
    """Makes a request's tokens when they are needed: all of a trace would not fit in memory."""

    texts: _Texts
    index: int

    def __call__(self) -> tuple[Tokens, Tokens]:
        return self.texts.tokens(self.index)


class _Texts:
    """Which request continues which, and the tokens of each."""

    def __init__(self, overlay: Overlay, trace: Trace, requests: Sequence[TraceRequest]) -> None:
        self._overlay = overlay
        self._size = trace.block_size
        self._ids: list[Ids] = [one.prompt for one in requests]
        # Tokens of the trace's blocks come first, then each request's reasoning and reply.
        self._own = trace.num_ids * trace.block_size
        self._each = overlay.reasoning + overlay.output
        if self._own + self._each * len(requests) > _MOST_TOKENS:
            reason = f"more than {_MOST_TOKENS} distinct tokens; the overlay numbers no more"
            raise TraceError(trace.path, None, reason)
        # Of each request: those of its user turn before it, its conversation, what continues it.
        self._turn: list[tuple[int, ...]] = []
        self.root: list[int] = []
        self._next = [-1] * len(requests)
        ends = np.full(trace.num_ids, -1, dtype=np.int64)
        for index, ids in enumerate(self._ids):
            before = ends[ids[:-1]]
            at = np.flatnonzero(before >= 0)
            parent = int(before[at[-1]]) if len(at) else -1
            self._turn.append(self._history(parent))
            self.root.append(index if parent < 0 else self.root[parent])
            if parent >= 0 and self._next[parent] < 0:
                self._next[parent] = index
            ends[ids[-1]] = index

    def _history(self, parent: int) -> tuple[int, ...]:
        if parent < 0 or len(self._turn[parent]) + 1 == self._overlay.turn:
            return ()
        return (*self._turn[parent], parent)

    def tokens(self, index: int) -> tuple[Tokens, Tokens]:
        """The prompt, and the prompt with its reply."""
        base = self._blocks(self._ids[index])
        turn = self._turn[index]
        edges = [0, *(len(self._ids[one]) * self._size for one in turn), len(base)]
        parts = []
        for number, (start, end) in enumerate(pairwise(edges)):
            if number:
                parts.append(self._reasoning(turn[number - 1]))
            parts.append(base[start:end])
        prompt = np.concatenate(parts)
        return prompt, np.concatenate([prompt, self._reasoning(index), self._reply(index)])

    def dead(self, index: int) -> tuple[tuple[int, int], ...]:
        """Ranges of the reasoning that no later prompt has, once this request has ended."""
        turn = (*self._turn[index], index)
        if len(turn) < self._overlay.turn:
            return ()
        length = self._overlay.reasoning
        starts = [len(self._ids[one]) * self._size + n * length for n, one in enumerate(turn)]
        return tuple((start, start + length) for start in starts)

    def _blocks(self, ids: Ids) -> Tokens:
        every = np.empty((len(ids), self._size), dtype=np.uint32)
        np.multiply(ids[:, None], np.uint32(self._size), out=every)
        every += np.arange(self._size, dtype=np.uint32)
        return every.ravel()

    def _reasoning(self, index: int) -> Tokens:
        start = self._own + index * self._each
        return np.arange(start, start + self._overlay.reasoning, dtype=np.uint32)

    def _reply(self, index: int) -> Tokens:
        length = self._overlay.output
        following = self._next[index]
        known = np.empty(0, np.uint32)
        if following >= 0:
            at = len(self._ids[index])
            blocks = self._ids[following][at : at + -(-length // self._size)]
            known = self._blocks(blocks)[:length]
        start = self._own + index * self._each + self._overlay.reasoning
        own = np.arange(start, start + length - len(known), dtype=np.uint32)
        return np.concatenate([known, own])
