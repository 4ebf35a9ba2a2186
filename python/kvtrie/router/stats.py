"""Counters of a tracker."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class TrackerStats:
    """Counters of a `TurnTracker` at one moment; `TurnTracker.stats` returns a copy of them.

    Answers are counted if the caller takes them (``take=True``).

    Attributes:
        conversations: Kept conversations; a history without an id counts as one.
        histories: Kept histories, including expired ones until the next call.
        history_tokens: Their tokens, each history counted whole.
        kept: Histories that `keep` took so far.
        dropped: Histories dropped so far, by cause: `"expired"`, `"room"` (for others),
            `"replaced"` (by a longer one), `"forgotten"`. `kept` less these is `histories`.
        unknown: Calls with a conversation that was not there, by cause: `"expired"`, `"unknown"`.
        answers: Answers so far, by kind.
        prompt_tokens: Tokens of the prompts of these answers (of what to send, for an alias).
        exact_tokens: Those at the front that an engine has in place, exact.
        approximate_tokens: The same, approximate.
        transfers: Answers with parameters.
        splices: Prompts of `splice` so far, by outcome.
        spliced_tokens: Their tokens with ids of a history.
    """

    conversations: int = 0
    histories: int = 0
    history_tokens: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    exact_tokens: int = 0
    approximate_tokens: int = 0
    transfers: int = 0
    splices: Counter[str] = field(default_factory=Counter)
    spliced_tokens: int = 0
