"""Why tokens of a prompt are computed, by what the index knows when the request is admitted.

Each computed token has one reason, so the counts by reason add up to all computed tokens. A request
costs one lookup, and where moved runs are allowed one plan under the widest policy; more plans only
if that one reuses more.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtrie._core import EXACT_ONLY
from kvtrie.gates import widening
from kvtrie.integrations.vllm._ranges import COMPUTE
from kvtrie.integrations.vllm._tags import kinds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from vllm.v1.request import Request

    from kvtrie._core import Explanation, ReusePlan, ReusePolicy, Span
    from kvtrie.gates import Decision
    from kvtrie.gates.widening import Step
    from kvtrie.integrations.vllm._requests import LiveRequest, Range
    from kvtrie.integrations.vllm._sources import Sources
    from kvtrie.integrations.vllm._stats import Counts

_LOG = logging.getLogger("vllm.kvtrie")

REASONS: Final = {
    "first_seen": "Not one whole block of the prompt is cached.",
    "new": "After the last token that is cached.",
    "diverged": "Other tokens are cached there: an edit, or another conversation branches off.",
    "evicted": "They were cached after the same tokens, and left.",
    "dead_reasoning": "They follow reasoning of a finished turn that vLLM evicted first.",
    "other_adapter": "They are cached under another LoRA adapter.",
    "other_salt": "The latest prompt with the same first block had another cache_salt.",
    "exact_asked": "Approximate KV would do, but exact reuse is asked for, or shadow mode is on.",
    "uncalibrated": "Likewise, but the gate file does not cover the request's adapter.",
    "not_cleared": "Likewise, but the gate file does not clear this kind of edit.",
    "limited": "Moved runs that the policy's limits forbid.",
    "out_of_scope": "Moved runs of other conversations.",
    "recomputed": "Tokens of moved runs that the policy recomputes.",
    "after_gap": "KV is there, but reuse ends at the first gap without KvtrieScheduler.",
    "short": "KV is there, but of too few tokens in a row to be copied, or in the last block.",
    "no_room": "KV is there, but there was no room for the prompt next to its pinned sources.",
    "stale": "The plan was given up because vLLM kept reusing its sources.",
    "not_copied": "KV was there: a copy failed, or the request was preempted before it.",
    "not_read": "The request reads no cache, as for log-probabilities of its prompt.",
    "last_token": "The last token, computed for its logits; all before it is reused.",
}
"""Reasons by name, as metrics have them; none says what another tenant has."""

_NAMES: Final = tuple(REASONS)
_CODES: Final = {name: code for code, name in enumerate(_NAMES)}
_PLANNED: Final = len(_NAMES)
"""The label of tokens whose KV the request gets."""

# Reasons of `kvtrie.Explanation` whose name is another one here, or depends on more.
_EXPLAINED: Final = {
    "complete": "new",
    "other_namespace": "other_adapter",
    # A wider plan says whose fault it is.
    "approximate_only": "diverged",
}
_MAX_FIRST_BLOCKS: Final = 1024
_MAX_POLICIES: Final = 64


@dataclass(slots=True, eq=False)
class Why:
    """Labels of a prompt's tokens, and what they depend on."""

    labels: NDArray[np.int8]
    signature: tuple[object, ...]


class Reasons:
    """Labels the tokens of each prompt when it is admitted, and counts those that are computed.

    ``was_dead`` says of a block's hash whether it was evicted first, as dead reasoning.
    """

    def __init__(
        self,
        sources: Sources,
        decision: Decision,
        block_size: int,
        counts: Counts,
        was_dead: Callable[[bytes], bool],
    ) -> None:
        self._sources = sources
        self._decision = decision
        self._block_size = block_size
        self._counts = counts
        self._was_dead = was_dead
        self._steps = lru_cache(maxsize=_MAX_POLICIES)(self._make_steps)
        # The salt of the latest prompt with a first block.
        self._salts: OrderedDict[int, str | None] = OrderedDict()

    def look(
        self,
        request: Request,
        live: LiveRequest,
        plan: ReusePlan,
        num_local: int,
        ranges: Sequence[Range],
        resumes: bool,
    ) -> None:
        """Label the prompt's tokens, given vLLM's own hit and the ranges that will be copied.

        May be called again; what the request has computed before a preemption keeps its labels.
        """
        signature = (num_local, plan.num_exact, plan.num_approximate, live.granted, len(live.seq))
        before = live.why
        if before is not None and before.signature == signature:
            return
        count = request.num_prompt_tokens
        segments = [(one[0], one[1], one[4]) for one in plan.segments.tolist()]
        planned = [(start, end) for start, end, kind in segments if kind != COMPUTE]
        labels = np.full(count, _CODES["last_token"], np.int8)
        if plan.num_compute > 1:
            self._label_computed(request, live, plan, planned, num_local, labels)
        gap = next((s for s, e, kind in segments if kind == COMPUTE and e > num_local), count)
        for start, end in planned:
            ends_before = resumes or start < gap
            labels[max(start, num_local) : end] = _CODES["short" if ends_before else "after_gap"]
        for start, end in ranges:
            labels[start:end] = _PLANNED
        labels[:num_local] = _PLANNED
        if before is not None:
            reached = live.account.reached
            labels[:reached] = before.labels[:reached]
        live.why = Why(labels, signature)

    def _label_computed(
        self,
        request: Request,
        live: LiveRequest,
        plan: ReusePlan,
        planned: Sequence[Range],
        num_local: int,
        labels: NDArray[np.int8],
    ) -> None:
        why = self._sources.index.explain(live.seq, EXACT_ONLY, context=0)
        start = max(why.position, num_local)
        wider = list(self._wider(live, plan))
        reused = [*planned, *(one for _, found in wider for one in found)]
        last = max((end for _, end in reused if end > start), default=0)
        reason = _CODES[self._explained(request, live, why, start, goes_on=last > 0)]
        labels[:-1] = reason
        if last:
            labels[last:-1] = _CODES["new"]
        # The last token is computed in any case.
        if last != len(labels) - 1:
            labels[-1] = labels[-2] if len(labels) > 1 else reason
        # Of several reasons, the one that alone is in the way.
        for name, found in reversed(wider):
            for first, end in found:
                labels[first:end] = _CODES[name]

    def _explained(
        self, request: Request, live: LiveRequest, why: Explanation, start: int, *, goes_on: bool
    ) -> str:
        """The reason at ``start``, where the exact match ends."""
        reason = _EXPLAINED.get(why.reason, why.reason)
        hashes, block = request.block_hashes, start // self._block_size
        if reason == "new":
            return reason
        if block < len(hashes) and self._was_dead(hashes[block]):
            return "dead_reasoning"
        if reason not in ("diverged", "not_cached"):
            return reason
        if goes_on:
            return "diverged"
        if start >= self._block_size:
            return "new" if reason == "not_cached" else reason
        salt = self._salts.get(self._first_block(live), request.cache_salt)
        return "first_seen" if salt == request.cache_salt else "other_salt"

    def _wider(self, live: LiveRequest, plan: ReusePlan) -> Iterator[tuple[str, list[Range]]]:
        """What plans under wider policies would reuse, from the narrowest on."""
        steps = self._steps(live.granted or live.policy, live.policy)
        if not steps:
            return
        moved_end = live.moved_end
        if not live.policy.approximate and live.reading is not None:
            live.reading.follow(live.seq)
            moved_end = live.reading.stream.moved_end
        _, widest = self._reused(live, steps[-1][1], moved_end)
        if _length(widest) <= plan.num_exact + plan.num_approximate:
            return
        for name, policy in steps:
            judged, found = self._reused(live, policy, moved_end)
            if name == "exact_asked":
                yield self._why_exact(live, judged), found
            else:
                yield name, found

    def _reused(
        self, live: LiveRequest, policy: ReusePolicy, moved_end: int | None
    ) -> tuple[Decision, list[Range]]:
        plan = self._sources.index.plan(
            live.seq,
            policy,
            keep_last=1,
            pin=False,
            session=live.session,
            moved_end=moved_end,
        )
        judged = self._decision.of(plan)
        found = [(one[0], one[1]) for one in plan.segments.tolist() if one[4] != COMPUTE]
        plan.release()
        return judged, found

    def _why_exact(self, live: LiveRequest, judged: Decision) -> str:
        if live.is_uncalibrated:
            return "uncalibrated"
        return "exact_asked" if judged.policy.approximate else "not_cleared"

    def _make_steps(self, granted: ReusePolicy, asked: ReusePolicy) -> tuple[Step, ...]:
        """Wider and wider policies, and the reason why a token is reused only from there on."""
        cleared = self._decision.policy
        if not cleared.approximate:
            return ()
        judged = "not_cleared" if asked.approximate else "exact_asked"
        wide = asked if asked.approximate else cleared
        return tuple(widening.steps(granted, wide, judged))

    def _first_block(self, live: LiveRequest) -> int:
        return hash(live.seq[: self._block_size].tobytes())

    # --- the counts --------------------------------------------------------------------------

    def count(self, request: Request, live: LiveRequest, spans: Iterable[Span]) -> None:
        """Count a prompt's computed tokens, once all are; log one line at debug level."""
        first = self._first_block(live)
        self._salts[first] = request.cache_salt
        self._salts.move_to_end(first)
        if len(self._salts) > _MAX_FIRST_BLOCKS:
            self._salts.popitem(last=False)
        count = request.num_prompt_tokens
        computed = np.ones(count, np.bool_)
        for one in live.account.reused:
            computed[one.start : one.end] = False
        why, live.why = live.why, None
        if why is None:
            code = _CODES["not_read" if request.skip_reading_prefix_cache else "stale"]
            labels = np.full(count, code, np.int8)
        else:
            labels = why.labels
        found = labels[computed].astype(np.int64)
        found[found == _PLANNED] = _CODES["no_room" if live.is_without_room else "not_copied"]
        names, kinds = kinds_of(count, spans)
        if kinds is not None:
            found += kinds[computed] * len(_NAMES)
        totals: dict[str, int] = {}
        numbers = np.bincount(found)
        for at in np.flatnonzero(numbers).tolist():
            kind, code = divmod(at, len(_NAMES))
            self._counts.add_computed(_NAMES[code], names[kind], int(numbers[at]))
            totals[_NAMES[code]] = totals.get(_NAMES[code], 0) + int(numbers[at])
        live.computed = totals
        if _LOG.isEnabledFor(logging.DEBUG):
            self._say(request, live, totals)

    def _say(self, request: Request, live: LiveRequest, totals: dict[str, int]) -> None:
        moved = sum(one.end - one.start for one in live.account.reused if one.is_approximate)
        computed = sum(totals.values())
        parts = ", ".join(f"{name} {number}" for name, number in totals.items())
        _LOG.debug(
            "kvtrie: request %s: %d prompt tokens: %d exact, %d moved, %d computed (%s); %s",
            request.request_id,
            request.num_prompt_tokens,
            request.num_prompt_tokens - moved - computed,
            moved,
            computed,
            parts,
            self._verdict(live),
        )

    def _verdict(self, live: LiveRequest) -> str:
        if live.is_uncalibrated:
            return "exact reuse: the gate file does not cover its adapter"
        if not self._decision.policy.approximate:
            return f"exact reuse: {self._decision.reason}"
        if not live.policy.approximate:
            is_shadow = live.shadow_policy is not None and live.shadow_policy.approximate
            return "exact reuse: shadow mode" if is_shadow else "exact reuse: asked for"
        return f"approximate reuse: {live.verdict}"


def _length(ranges: Iterable[Range]) -> int:
    return sum(end - start for start, end in ranges)
