"""Finds in a log which reasoning the template drops, and when.

A log marks what is reasoning, not what its chat template does with it. That is read from the log
itself: a turn is finished when a reply stops without a tool call. The next user turn begins with
the same blocks up to the turn's first reasoning, and either has that reasoning there, or has not.
What most of them do is taken as the template's rule, for all turns, as an engine knows it from the
template. Spans and digests of blocks are enough, so a log of digests shows it too.

The search takes one look-up per block of the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.record import Recorded
    from kvtrie.replay.trace import Keys

    Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class DroppedReasoning:
    """What is dropped once each request has ended.

    Attributes:
        is_known: Whether the log shows what becomes of reasoning.
        ranges: Ranges of tokens of each request.
        reason: How that is known, or why it is not, in a sentence, or ``""`` if nothing is marked.
    """

    is_known: bool
    ranges: tuple[Ranges, ...]
    reason: str


def dropped(
    requests: Sequence[Recorded], keys: Sequence[Keys], block_size: int
) -> DroppedReasoning:
    """What is dropped of the requests of a log.

    Args:
        requests: In the order of their arrival.
        keys: Chain keys of each one's whole blocks.
        block_size: Tokens per block.
    """
    none: tuple[Ranges, ...] = ((),) * len(requests)
    if not any(span.kind == "reasoning" for one in requests for span in one.spans):
        return DroppedReasoning(is_known=False, ranges=none, reason="")
    kept, gone = _evidence(requests, keys, block_size)
    if not kept + gone:
        reason = (
            "the log marks reasoning, but no prompt in it continues a finished turn that had some, "
            "so whether it is dropped is not known"
        )
        return DroppedReasoning(is_known=False, ranges=none, reason=reason)
    cases = f"{gone:,} of {kept + gone:,} prompts that continue a finished turn are without it"
    if kept >= gone:
        reason = f"reasoning stays in the history: {cases}"
        return DroppedReasoning(is_known=True, ranges=none, reason=reason)
    found = tuple(_reasoning(one) if _is_finished(one) else () for one in requests)
    reason = f"reasoning is dropped when its turn is finished: {cases}"
    return DroppedReasoning(is_known=True, ranges=found, reason=reason)


def _evidence(
    requests: Sequence[Recorded], keys: Sequence[Keys], block_size: int
) -> tuple[int, int]:
    """Prompts that continue a finished turn: how many have its first reasoning, and have not."""
    kept = gone = 0
    # Turns that wait for their next one, by the prefix before their reasoning.
    waiting: dict[tuple[str | None, int], tuple[int, int, int]] = {}
    for one, mine in zip(requests, keys, strict=True):
        num_users = sum(span.kind == "user" for span in one.spans)
        spans = {(span.start, span.end) for span in one.spans if span.kind == "reasoning"}
        for key in mine[: one.num_prompt // block_size].tolist() if waiting else ():
            turn = waiting.get((one.session, key))
            if turn is not None and num_users > turn[0]:
                del waiting[one.session, key]
                kept += turn[1:] in spans
                gone += turn[1:] not in spans
        ranges = _reasoning(one) if _is_finished(one) else ()
        before = ranges[0][0] // block_size if ranges else 0
        if before:
            waiting[one.session, int(mine[before - 1])] = (num_users, *ranges[0])
    return kept, gone


def _is_finished(one: Recorded) -> bool:
    """Whether the reply ends the turn, so that a user speaks next."""
    calls = any(span.kind == "tool_call" and span.end > one.num_prompt for span in one.spans)
    return one.ended == "stopped" and not calls


def _reasoning(one: Recorded) -> Ranges:
    """The reasoning after the last user message, where that is marked."""
    last = max((span.end for span in one.spans if span.kind == "user"), default=0)
    found = {
        (span.start, span.end)
        for span in one.spans
        if span.kind == "reasoning" and span.start < span.end and span.end > last
    }
    return tuple(sorted(found))
