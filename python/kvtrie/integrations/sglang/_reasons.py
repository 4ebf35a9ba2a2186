"""Why tokens of a prompt are computed, by what the index knows when SGLang matches the prompt.

Each computed token has one reason, those of `kvtrie.metrics.reasons` and a few that only SGLang
has. A prompt is looked at again only if its match has changed. A look costs one plan and one
`explain`; where runs may be moved, one plan more, and further ones only if that one reuses more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import numpy as np

from kvtrie._core import EXACT_ONLY
from kvtrie.integrations.sglang._ids import sequence_of
from kvtrie.metrics.prompts import OTHER, by_kind, kinds_of
from kvtrie.metrics.reasons import REASONS as LABELS
from kvtrie.metrics.reasons import Context, label

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from sglang.srt.managers.schedule_batch import Req

    from kvtrie._core import Namespace, RadixIndex, Span
    from kvtrie.gates import Decision
    from kvtrie.integrations.sglang._moving import Ask

REASONS: Final = LABELS | {
    "after_gap": 'KV is there, but reuse ends at the first gap without `"gaps": true`.',
    "page": "KV is there, but not of a whole page, or of more gaps than a chunk has tokens.",
    "not_copied": "KV was there: a copy failed, or its source left before the prompt was admitted.",
    "not_matched": "The prompt was not looked up: an id of it is negative, or a call failed.",
}
"""Reasons by name, as metrics and logs have them; none says what another tenant has."""

_NAMES: Final = tuple(REASONS)
# Of the first ones, the codes that `label` gives.
_CODES: Final = {name: code for code, name in enumerate(_NAMES)}
_COMPUTE: Final = 2
_MAX_FIRST_PAGES: Final = 1024


@dataclass(slots=True, eq=False)
class Look:
    """What was seen of a prompt.

    Attributes:
        match: What it depends on: the prompt's length, its exact match and what was promised.
        labels: The reason of each token, should it be computed.
        first: Of the prompt's first page.
        space: What separates it from others.
    """

    match: tuple[int, int, int]
    labels: NDArray[np.int8]
    first: int
    space: Namespace


class ComputedReasons:
    """Labels prompts when they are matched, and counts their computed tokens at their end.

    Args:
        index: The index.
        decision: The gate's; None: nothing is moved.
        goes_on: Whether reuse continues after gaps.
        is_shadow: Whether what would be moved is only counted.
    """

    def __init__(
        self, index: RadixIndex, decision: Decision | None, *, goes_on: bool, is_shadow: bool
    ) -> None:
        self._index = index
        self._decision = decision
        self._goes_on = goes_on
        self._is_shadow = is_shadow
        self._looks: WeakKeyDictionary[Req, Look] = WeakKeyDictionary()
        # The space of the latest prompt with a first page.
        self._spaces: dict[int, Namespace] = {}
        self._kinds = [OTHER]

    def look(
        self, request: Req, space: Namespace, known: int, ask: Ask | None, *, is_exact: bool
    ) -> None:
        """Label a prompt.

        Args:
            request: The request.
            space: Its namespace.
            known: Tokens of the exact match.
            ask: How the match is continued; None: it was not planned.
            is_exact: Whether the request asks for exact reuse.

        Raises:
            ValueError: An id of it is negative.
        """
        if request.retracted_stain:
            return  # it counts as it was admitted first
        ids = request.full_untruncated_fill_ids
        promised = 0 if ask is None or self._is_shadow else ask.promised
        match = len(ids), known, promised
        before = self._looks.get(request)
        if before is not None and before.match == match:
            return
        seq = sequence_of(ids, space, limit=len(ids))
        granted = EXACT_ONLY if ask is None or self._is_shadow else ask.decision.policy
        decision = self._decision
        is_exact = is_exact or self._is_shadow or decision is None
        first = hash(seq[: self._index.block_size].tobytes())
        context = Context(
            policy=granted,
            asked=EXACT_ONLY if is_exact or decision is None else decision.policy,
            default=decision,
            session=None if ask is None else ask.session,
            moved_end=None if ask is None else ask.moved_end,
            has_other_salt=lambda: self._spaces.get(first, space) != space,
        )
        plan = self._index.plan(
            seq, granted, pin=False, session=context.session, moved_end=context.moved_end
        )
        try:
            labels = label(self._index, seq, plan, context)
            self._mark_unused(labels, plan.segments[["start", "end", "class"]].tolist(), match)
        finally:
            plan.release()
        self._looks[request] = Look(match, labels, first, space)

    def _mark_unused(
        self,
        labels: NDArray[np.int8],
        segments: Sequence[tuple[int, int, int]],
        match: tuple[int, int, int],
    ) -> None:
        """Label what a plan covers, and SGLang does not get."""
        _, known, promised = match
        gap = next((start for start, _, kind in segments if kind == _COMPUTE), len(labels))
        for start, end, kind in segments:
            if kind == _COMPUTE:
                continue
            ends_before = self._goes_on or start < gap
            labels[start:end] = _CODES["page" if ends_before else "after_gap"]
        # Of these it gets the KV, unless a copy fails, or is computed as a gap.
        got = labels[: known + promised]
        unused = (got == _CODES["page"]) | (got == _CODES["after_gap"])
        got[unused] = _CODES["not_copied"]

    def ended(
        self,
        request: Req,
        reused: Sequence[tuple[int, int, str]],
        done: int,
        spans: Callable[[], Sequence[Span]],
    ) -> Counter[tuple[str, str]]:
        """Count a prompt's computed tokens, by reason and kind, once.

        Args:
            request: A request that has ended, or is put back into the queue.
            reused: Ranges of its prompt that were not computed.
            done: Its tokens that have KV; it may have been aborted before all had.
            spans: The kinds of its tokens.
        """
        count = len(request.origin_input_ids)
        look = self._looks.pop(request, None)
        labels = np.full(count, _CODES["not_matched"], np.int8)
        if look is not None:
            labels[: len(look.labels)] = look.labels[:count]
            self._spaces.pop(look.first, None)
            self._spaces[look.first] = look.space
            if len(self._spaces) > _MAX_FIRST_PAGES:
                del self._spaces[next(iter(self._spaces))]
        computed = np.arange(count) < done
        for start, end, _ in reused:
            computed[start:end] = False
        kinds = kinds_of(self._kinds, count, [one for one in spans() if one.start < count])
        return by_kind(labels[computed], kinds[computed], _NAMES, self._kinds)
