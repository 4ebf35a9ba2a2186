"""Where the KV of one prompt came from, in the terms of vLLM's usage and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Reused(NamedTuple):
    """A range of a prompt whose KV was not computed; ``is_copied``: the connector copied it."""

    start: int
    end: int
    is_approximate: bool
    is_copied: bool


@dataclass(slots=True, eq=False)
class Account:
    """Counts each position once, by how the request got its KV first.

    vLLM counts what the first admission finds. What a preempted request finds again of its own is
    no reuse; what it finds after the furthest position that it had reached is.

    Attributes:
        reached: The first position without KV so far, at any admission.
        reused: Ranges in order of their positions.
    """

    reached: int = 0
    reused: list[Reused] = field(default_factory=list)
    # Tokens of the first ranges by `Reused.is_copied`, and how many ranges these are: a request
    # may have thousands, and get another in each step.
    _tokens: list[int] = field(default_factory=lambda: [0, 0])
    _num_told: int = 0

    def admit(self, num_local: int, exact: int) -> None:
        """Record vLLM's own hit, its first ``exact`` tokens exact; drop a refused admission's."""
        if self.reused:
            self._keep(self.reached)
        if num_local > self.reached:
            self._add(0, exact, is_approximate=False, is_copied=False)
            self._add(exact, num_local, is_approximate=True, is_copied=False)

    def copy(self, start: int, end: int, *, is_approximate: bool) -> None:
        self._add(start, end, is_approximate=is_approximate, is_copied=True)

    def reach(self, position: int) -> None:
        """A step computes up to a position."""
        self.reached = max(self.reached, position)

    def fail(self, position: int) -> None:
        """Everything from a position on is computed after all."""
        self.reached = min(self.reached, position)
        self._keep(position)

    def tell(self, request: Request) -> None:
        """Correct what vLLM reports of the request with its first token; later nothing changes."""
        stats, count = request.prefill_stats, request.num_prompt_tokens
        if stats is None:
            return
        tokens = self._tokens
        for one in self.reused[self._num_told :]:
            tokens[one.is_copied] += max(0, min(one.end, count) - one.start)
        self._num_told = len(self.reused)
        stats.set(
            num_prompt_tokens=count,
            num_local_cached_tokens=tokens[False],
            num_external_cached_tokens=tokens[True],
        )

    def _add(self, start: int, end: int, *, is_approximate: bool, is_copied: bool) -> None:
        start = max(start, self.reached)
        if start < end:
            self.reused.append(Reused(start, end, is_approximate, is_copied))

    def _keep(self, position: int) -> None:
        self._tokens, self._num_told = [0, 0], 0
        self.reused = [
            one._replace(end=min(one.end, position)) for one in self.reused if one.start < position
        ]
