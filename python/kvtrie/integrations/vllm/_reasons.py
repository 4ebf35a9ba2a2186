"""Why tokens of a prompt are computed, by what the index knows when the request is admitted.

Each computed token has one reason, so the counts by reason add up to all computed tokens. A request
costs one call of `RadixIndex.explain`, where moved runs are allowed under the widest policy; plans
only if that one reuses more. Labels of single tokens are made where a prompt has several, and only
when it is computed.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtrie._core import EXACT_ONLY
from kvtrie.gates import widening
from kvtrie.integrations._asked import named
from kvtrie.integrations._filled_plan import COMPUTE
from kvtrie.integrations.vllm._ranges import LEAST_COPIED
from kvtrie.integrations.vllm._requests import Why
from kvtrie.integrations.vllm._tags import RECOMPUTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from vllm.v1.request import Request

    from kvtrie._core import Explanation, ReusePlan, ReusePolicy
    from kvtrie.gates import Decision
    from kvtrie.gates.widening import Step
    from kvtrie.integrations._filled_plan import FilledPlan
    from kvtrie.integrations.vllm._ranges import Range
    from kvtrie.integrations.vllm._requests import LiveRequest, Paint
    from kvtrie.integrations.vllm._sources import Sources
    from kvtrie.integrations.vllm._stats import Counts
    from kvtrie.integrations.vllm._tags import Kinds

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
_NEW: Final = _CODES["new"]
_LAST: Final = _CODES["last_token"]
_SHORT: Final = _CODES["short"]

# Reasons of `kvtrie.Explanation` whose name is another one here, or depends on more.
_EXPLAINED: Final = {
    "complete": "new",
    "other_namespace": "other_adapter",
    # A wider plan says whose fault it is.
    "approximate_only": "diverged",
    "laxer_policy": "diverged",
}
# What it says where the tokens of a block are not known.
_UNKNOWN: Final = ("diverged", "not_cached")
_MAX_FIRST_BLOCKS: Final = 1024
_MAX_POLICIES: Final = 64


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
        # Most requests have the policies of the one before, which take a while to hash.
        self._latest: tuple[object, object, tuple[Step, ...]] = (None, None, ())
        # The salt of the latest prompt with a first block.
        self._salts: OrderedDict[int, str | None] = OrderedDict()

    def find_nothing(self, request: Request, live: LiveRequest) -> bool:
        """Whether no plan has enough of a prompt to be copied; it is labelled then.

        The index is asked under the widest policy, with all of the prompt open to moved runs.
        """
        steps = self._steps_of(live)
        why = self._explain(live, steps[-1][1] if steps else live.policy)
        save, position = why.would_save, why.position
        num_short = save.exact
        if num_short + save.approximate >= LEAST_COPIED:
            return False
        if num_short and (save.approximate or num_short != position or save.compute == 1):
            # Rare, and has more than these labels.
            return False
        reason = self._reason(request, live, why, position, goes_on=False)
        signature = (0, num_short, 0, live.granted, len(live.seq))
        paints = [(0, request.num_prompt_tokens, reason)]
        if num_short:
            paints.append((0, num_short, _SHORT))
        live.why = Why(paints, signature, None if num_short else reason)
        return True

    def look(
        self,
        request: Request,
        live: LiveRequest,
        plan: ReusePlan | FilledPlan,
        num_local: int,
        ranges: Sequence[Range],
        resumes: bool,
    ) -> None:
        """Label the prompt's tokens, given vLLM's own hit and the ranges that will be copied.

        May be called again; what the request has computed before a preemption keeps its labels.
        """
        num_exact, num_approximate = plan.num_exact, plan.num_approximate
        signature = (num_local, num_exact, num_approximate, live.granted, len(live.seq))
        # What was said before the request has computed anything may not hold any more.
        before = live.why if live.account.reached else None
        if before is not None and before.signature == signature:
            return
        count = request.num_prompt_tokens
        why, wider = self._wider(live, num_exact + num_approximate, count)
        if not (num_exact or num_approximate or num_local or before or wider):
            why = why or self._explain(live)
            only = self._reason(request, live, why, why.position, goes_on=False)
            live.why = Why([(0, count, only)], signature, only)
            return
        segments = [(one[0], one[1], one[4]) for one in plan.segments.tolist()]
        planned = [(start, end) for start, end, kind in segments if kind != COMPUTE]
        paints = [(0, count, _LAST)]
        if plan.num_compute > 1:
            why = why or self._explain(live)
            paints += self._computed(request, live, why, planned, num_local, wider)
        gap = next((s for s, e, kind in segments if kind == COMPUTE and e > num_local), count)
        for start, end in planned:
            ends_before = resumes or start < gap
            label = _SHORT if ends_before else _CODES["after_gap"]
            paints.append((max(start, num_local), end, label))
        paints += [(start, end, _PLANNED) for start, end in (*ranges, (0, num_local))]
        if before is not None:
            # Nothing is kept of what they overwrite: vLLM may ask any number of times.
            reached = live.account.reached
            paints = [(max(start, reached), end, code) for start, end, code in paints]
            paints += [(start, min(end, reached), code) for start, end, code in before.paints]
            paints = [one for one in paints if one[0] < one[1]]
        live.why = Why(paints, signature)

    def _computed(
        self,
        request: Request,
        live: LiveRequest,
        why: Explanation,
        planned: Sequence[Range],
        num_local: int,
        wider: Sequence[tuple[str, list[Range]]],
    ) -> Iterator[Paint]:
        reused = [*planned, *(one for _, found in wider for one in found)]
        count, start = request.num_prompt_tokens, max(why.position, num_local)
        # Where the last range after the exact match ends, or 0, and the reason of what is left.
        last = max((end for _, end in reused if end > start), default=0)
        reason = self._reason(request, live, why, start, goes_on=last > 0)
        yield 0, count - 1, reason
        if last:
            yield last, count - 1, _NEW
        # The last token is computed in any case.
        if last != count - 1:
            yield count - 1, count, _NEW if last else reason
        # Of several reasons, the one that alone is in the way.
        for name, found in reversed(wider):
            code = _CODES[name]
            yield from ((start, end, code) for start, end in found)

    def _reason(
        self, request: Request, live: LiveRequest, why: Explanation, start: int, *, goes_on: bool
    ) -> int:
        """The label at ``start``, where the exact match ends."""
        reason = why.reason
        reason = _EXPLAINED.get(reason, reason)
        if reason == "new":
            return _NEW
        hashes, block = request.block_hashes, start // self._block_size
        if block < len(hashes) and self._was_dead(hashes[block]):
            return _CODES["dead_reasoning"]
        if reason not in _UNKNOWN:
            return _CODES[reason]
        if goes_on or block:
            return _CODES["diverged"] if goes_on or reason == "diverged" else _NEW
        salt = request.cache_salt
        known = self._salts.get(self._first_block(live), salt)
        return _CODES["first_seen" if known == salt else "other_salt"]

    def _wider(
        self, live: LiveRequest, num_reused: int, num_prompt: int
    ) -> tuple[Explanation | None, Sequence[tuple[str, list[Range]]]]:
        """What plans under wider policies would reuse, from the narrowest on, if it is more.

        The first is what the index says of the prompt under the widest; None if there is no wider.
        """
        steps = self._steps_of(live)
        if not steps:
            return None, ()
        moved_end = live.find_moved_end(num_prompt)
        why = self._explain(live, steps[-1][1], moved_end)
        if why.num_tokens - why.would_save.compute <= num_reused:
            return why, ()
        wider = []
        for name, policy in steps:
            judged, found = self._reused(live, policy, moved_end)
            wider.append((self._why_exact(live, judged) if name == "exact_asked" else name, found))
        return why, wider

    def _steps_of(self, live: LiveRequest) -> tuple[Step, ...]:
        latest, asked = self._latest, live.policy
        granted = live.granted or asked
        if latest[0] is not granted or latest[1] is not asked:
            latest = self._latest = (granted, asked, self._steps(granted, asked))
        return latest[2]

    def _explain(
        self, live: LiveRequest, policy: ReusePolicy = EXACT_ONLY, moved_end: int | None = None
    ) -> Explanation:
        """Why the exact match ends where it does, and what a plan under a policy would reuse."""
        return self._sources.index.explain(
            live.seq, policy, context=0, session=live.session, moved_end=moved_end
        )

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
        if live.first_block is None:
            size = self._block_size
            images = [(one.start, one.digest) for one in live.seq.items if one.start < size]
            live.first_block = hash((live.seq[:size].tobytes(), *images))
        return live.first_block

    # --- the counts --------------------------------------------------------------------------

    def count(
        self,
        request: Request,
        live: LiveRequest,
        kinds: Kinds,
        counted: Mapping[tuple[str, str], int],
    ) -> None:
        """Count a prompt's computed tokens, once all are; log one line at debug level.

        Args:
            request: The request.
            live: Its state.
            kinds: The kinds of its prompt's tokens.
            counted: The same tokens by how they were reused and by kind.
        """
        first = self._first_block(live)
        salts = self._salts
        salts[first] = request.cache_salt
        salts.move_to_end(first)
        if len(salts) > _MAX_FIRST_BLOCKS:
            salts.popitem(last=False)
        why, live.why = live.why, None
        only = why.only if why is not None else self._without(request)
        if only is not None:
            found = [(only, kind, n) for (how, kind), n in counted.items() if how == RECOMPUTED]
        else:
            paints = why.paints if why is not None else []
            found = self._by_label(request.num_prompt_tokens, live, paints, kinds)
        totals = live.computed = {}
        for code, kind, number in found:
            name = _NAMES[code]
            self._counts.add_computed(name, kind, number)
            totals[name] = totals.get(name, 0) + number
        if _LOG.isEnabledFor(logging.DEBUG):
            self._say(request, live, totals)

    def _without(self, request: Request) -> int:
        """The label of all tokens of a request that was given no plan."""
        return _CODES["not_read" if request.skip_reading_prefix_cache else "stale"]

    def _by_label(
        self, count: int, live: LiveRequest, paints: Sequence[Paint], kinds: Kinds
    ) -> list[tuple[int, str, int]]:
        """Computed tokens by label and kind."""
        labels = np.empty(count, np.int64)
        for start, end, code in paints:
            labels[start:end] = code
        labels[labels == _PLANNED] = _CODES["no_room" if live.is_without_room else "not_copied"]
        names, numbers = kinds
        if numbers is not None:
            labels += numbers * _PLANNED
        for one in live.account.reused:
            labels[one.start : one.end] = -1
        totals = np.bincount(labels[labels >= 0])
        return [
            (at % _PLANNED, names[at // _PLANNED], int(totals[at]))
            for at in totals.nonzero()[0].tolist()
        ]

    def _say(self, request: Request, live: LiveRequest, totals: dict[str, int]) -> None:
        moved = sum(one.end - one.start for one in live.account.reused if one.is_approximate)
        computed = sum(totals.values())
        parts = ", ".join(f"{name} {number}" for name, number in totals.items())
        _LOG.debug(
            "kvtrie: request %s: %d prompt tokens: %d exact, %d moved, %d computed (%s); %s",
            named(request.request_id),
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
