"""What a generator tells those who watch it, such as metrics and spans.

Watchers are called in the generator's thread, while the request waits for them. An error of theirs
ends the request. Without one, a phase costs a fraction of a microsecond.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, cast

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from kvtrie._core import ReusePlan, ReusePolicy, TokenSequence
    from kvtrie.engines._request import Request

Phase = Literal["plan", "copy", "compute", "decode", "insert"]
"""Parts of a request: plans of its prompt; copies and rotations of cached KV, and the choice of
what is computed over them; passes of the model over prompt tokens, or over the last generated one;
inserts into the index."""

_NOTHING: Final = contextlib.nullcontext()


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A plan, before blocks are evicted for it. Each attempt to admit a request makes one.

    Attributes:
        seq: The tokens; the prompt, until the request is admitted.
        plan: The plan. It is not released.
        policy: The policy that it was made under.
        session: As in `Options`.
        moved_end: As in `Options`.
        is_without_room: Whether it uses blocks in place only, because the plan just before it found
            no room next to its sources.
    """

    seq: TokenSequence
    plan: ReusePlan
    policy: ReusePolicy
    session: str | None
    moved_end: int | None
    is_without_room: bool


class Watcher:
    """Told of each request; its methods do nothing.

    The engine may change what it was given afterwards: read it at once.
    """

    def submitted(self, request: Request) -> None:
        """A request is queued."""

    def phase(
        self, request: Request, name: Phase, num_tokens: int
    ) -> AbstractContextManager[object]:
        """A phase begins; its end leaves the returned context. Phases are not nested.

        Args:
            request: The request.
            name: The phase.
            num_tokens: Tokens of the sequence for ``"plan"``, those that are copied, those that are
                run through the model, or those with KV that are offered to the index.
        """
        del request, name, num_tokens
        return _NOTHING

    def planned(self, request: Request, planned: Planned) -> None:
        """The request has a plan, and no new blocks yet."""

    def admitted(self, request: Request, plan: ReusePlan) -> None:
        """The request runs for the first time; its `usage` is known."""

    def emitted(self, request: Request) -> None:
        """The last one of the request's `tokens` is new."""

    def preempted(self, request: Request) -> None:
        """The request gave its blocks to an older one, and waits again."""

    def ended(self, request: Request) -> None:
        """The request has its `finish_reason`, and no blocks any more."""


class Watched:
    """One request and those who watch it."""

    __slots__ = ("_request", "_watchers")

    def __init__(self, request: Request, watchers: Sequence[Watcher]) -> None:
        self._request = request
        self._watchers = tuple(watchers)

    def phase(self, name: Phase, num_tokens: int) -> AbstractContextManager[object]:
        if not self._watchers:
            return _NOTHING
        if len(self._watchers) == 1:
            return self._watchers[0].phase(self._request, name, num_tokens)
        return self._phases(name, num_tokens)

    def submitted(self) -> None:
        for watcher in self._watchers:
            watcher.submitted(self._request)

    def planned(self, planned: Planned) -> None:
        for watcher in self._watchers:
            watcher.planned(self._request, planned)

    def admitted(self, plan: ReusePlan) -> None:
        for watcher in self._watchers:
            watcher.admitted(self._request, plan)

    def emitted(self) -> None:
        for watcher in self._watchers:
            watcher.emitted(self._request)

    def preempted(self) -> None:
        for watcher in self._watchers:
            watcher.preempted(self._request)

    def ended(self) -> None:
        for watcher in self._watchers:
            watcher.ended(self._request)

    def _phases(self, name: Phase, num_tokens: int) -> AbstractContextManager[object]:
        with contextlib.ExitStack() as stack:
            for watcher in self._watchers:
                stack.enter_context(watcher.phase(self._request, name, num_tokens))
            return stack.pop_all()


UNWATCHED: Final = Watched(cast("Request", None), ())
"""Nobody watches, so no request is needed."""
