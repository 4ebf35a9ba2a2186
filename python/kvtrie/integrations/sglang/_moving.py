"""KV after an edit: what continues a match, and its copies inside SGLang's pool.

A plan covers a prompt with what is in place and with moved runs. SGLang takes a prefix, so what the
plan covers after the exact match is copied into pages of the request's own: approximate pages as
they are, moved runs with rotated keys. It ends at the plan's first gap, or, where gaps are computed
on their own (`kvtrie.integrations.sglang._gaps`), at the last. The gate decides on every plan.

What a store has loaded (`kvtrie.integrations.sglang._stored`) is laid over the plan where it would
compute, and judged with it.

It costs a plan in each round in which the request waits, and one more when it is admitted.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from kvtrie._core import Imported, LayoutError, UnsupportedRopeError
from kvtrie.integrations._filled_plan import (
    APPROXIMATE,
    FilledPlan,
    judges,
    limits_contexts,
    missing,
)
from kvtrie.integrations._sections import read_sections
from kvtrie.integrations.sglang._stored import Wanted
from kvtrie.pool.kv_pool import KVPool
from kvtrie.pool.layout import KVLayout
from kvtrie.record import Would
from kvtrie.rope import RopeSpec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from sglang.srt.managers.schedule_batch import Req

    from kvtrie._core import RadixIndex, ReusePlan, ReusePolicy, TokenSequence
    from kvtrie.gates import Decision
    from kvtrie.integrations._filled_plan import Range
    from kvtrie.integrations.sglang._settings import Wish
    from kvtrie.integrations.sglang._stored import FoundRuns
    from kvtrie.tags import Tagger
    from kvtrie.tags.openings import Openings

Gaps = tuple[tuple[int, int], ...]
"""Ranges of tokens that a plan computes, in order."""


@dataclass(frozen=True, slots=True)
class Ask:
    """How a request's prompt is planned, each time the same.

    Attributes:
        seq: The whole pages of the prompt.
        decision: The gate's, whose policy the plan is made under.
        session: The id of its conversation.
        moved_end: Where its last message begins, which no moved run supplies.
        promised: Tokens after the exact match that the plan covers, in whole pages; those of gaps
            that are computed on their own are among them.
        would: What the plan brings.
        arrived: What the store has loaded for it, which is laid over each plan.
        is_judged: Whether a gate judges plans by the context of their moved runs.
        wanted: What the plan lacks, as the store is asked for it.
    """

    seq: TokenSequence
    decision: Decision
    session: str | None
    moved_end: int | None
    promised: int = 0
    would: Would | None = None
    arrived: FoundRuns | None = None
    is_judged: bool = False
    wanted: Wanted | None = None

    def plan(self, index: RadixIndex, *, pin: bool) -> ReusePlan | FilledPlan:
        """The plan of all its tokens: SGLang keeps the prompt's last one back itself."""
        policy, arrived = self.decision.policy, self.arrived
        plan = index.plan(
            self.seq,
            policy,
            keep_last=0,
            pin=pin,
            session=self.session,
            moved_end=self.moved_end,
        )
        if arrived is None:
            return plan
        try:
            return FilledPlan(
                plan,
                arrived.spans,
                policy,
                is_judged=self.is_judged,
                sought=arrived.policy,
                contexts=arrived.contexts,
                index=index,
            )
        except BaseException:
            plan.release()
            raise


@dataclass(frozen=True, slots=True)
class Built:
    """What a request's KV was built from, for the labels of its pages.

    Attributes:
        exact_until: Its first approximate token; all from there on are.
        reused: Ranges of approximate KV that it did not compute: start, end and hops.
        gaps: Ranges in between, which are computed before the step that computes the rest.
        end: Where the rest begins.
        policy: What it was built under.
    """

    exact_until: int
    reused: tuple[tuple[int, int, int], ...]
    gaps: Gaps
    end: int
    policy: ReusePolicy

    @classmethod
    def of(cls, plan: ReusePlan | FilledPlan, gaps: Gaps, end: int, policy: ReusePolicy) -> Built:
        """What the tokens of a plan before ``end``, some of them approximate, are built from."""
        reused = tuple(
            (int(one["start"]), min(int(one["end"]), end), int(one["hops"]))
            for one in plan.segments
            if one["class"] == APPROXIMATE and one["start"] < end
        )
        return cls(reused[0][0], reused, gaps, end, policy)

    @property
    def num_approximate(self) -> int:
        """Tokens of approximate KV that it did not compute."""
        return sum(end - start for start, end, _ in self.reused)

    def labels(self, start: int, end: int, size: int) -> list[tuple[int, Imported]]:
        """How pages are labelled, in order: numbers of pages with the same label.

        A page has the most hops of any KV in it; what was computed after approximate KV has none.

        Args:
            start: Where the first page begins.
            end: Where the last one ends.
            size: Tokens of a page.
        """
        return [
            (len(list(same)), Imported(self.exact_until, hops=count, policy=self.policy))
            for count, same in groupby(self.hops(start, end, size))
        ]

    def hops(self, start: int, end: int, size: int) -> list[int]:
        """The hops of each page, as `labels` has them."""
        hops = np.zeros((end - start) // size, np.int64)
        for first, last, count in self.reused:
            inside = slice(max(0, first - start) // size, max(0, -(-(last - start) // size)))
            hops[inside] = np.maximum(hops[inside], count)
        found: list[int] = hops.tolist()
        return found


class Moving:
    """Decides what a request may reuse besides an exact match, and copies it.

    Args:
        decision: The gate's; approximate.
        tagger: The model's chat format; None: no preset reads it.
        pool: SGLang's K and V, a slot a block.
        stream: SGLang's forward stream, on which a step may still write what is copied; None where
            steps run on the caller's stream: on a CPU, and without overlap scheduling.
        default: What a request gets that does not ask: ``"approximate"`` or ``"exact"``.
        is_checked: Whether a gate file was read; it covers no LoRA adapter.
        max_in_gaps: How many tokens of a prompt are computed in gaps, for what comes after; 0: what
            is reused ends at the first gap.
        is_shadow: Whether what would be moved is only counted.
        openings: How messages begin, where no format says it.
    """

    def __init__(
        self,
        decision: Decision,
        tagger: Tagger | None,
        pool: KVPool,
        stream: Any,  # noqa: ANN401 - of a device's module
        default: str,
        *,
        is_checked: bool,
        max_in_gaps: int = 0,
        is_shadow: bool = False,
        openings: Openings | None = None,
    ) -> None:
        self.decision = decision
        self._tagger = tagger
        self._openings = openings
        self.pool = pool
        self._stream = stream
        self._default = default
        self._is_checked = is_checked
        self._max_in_gaps = max_in_gaps
        self.is_shadow = is_shadow
        # The length of a prompt, and where its last message begins.
        self._ends: WeakKeyDictionary[Req, tuple[int, int | None]] = WeakKeyDictionary()

    def ask(
        self,
        index: RadixIndex,
        seq: TokenSequence,
        known: int,
        request: Req,
        wish: Wish,
        arrived: FoundRuns | None = None,
    ) -> Ask | None:
        """How to continue an exact match of a prompt; None if nothing may.

        Args:
            index: The index.
            seq: The whole pages of the prompt.
            known: Tokens of the exact match.
            request: The request.
            wish: What it asks for.
            arrived: What the store has loaded for it.
        """
        if self.is_shadow:
            arrived = None
        size = index.block_size
        if self.is_exact(wish) or len(seq) - known < size:
            return None
        if request.input_embeds is not None or (request.lora_id is not None and self._is_checked):
            return None
        moved_end = self._moved_end(request)
        moved_end = None if moved_end is None else min(moved_end, len(seq))
        num_prompt = len(request.full_untruncated_fill_ids)
        decision, judged = None, self.decision
        while judged is not decision:
            decision = judged
            found = Ask(
                *(seq, decision, wish.session, moved_end),
                arrived=arrived,
                is_judged=judges(self.decision),
                wanted=self._wanted([(known, len(seq))], wish.session, moved_end),
            )
            if not decision.policy.approximate:
                computed = num_prompt - known
                would = Would(exact=known, moved=0, after_gaps=0, computed=computed, cleared=False)
                return replace(found, would=would)
            with found.plan(index, pin=False) as plan:
                judged = decision.of(plan)
                end = max(known, self._reach(plan, len(seq), size))
                would = _would(plan, known, end, num_prompt)
                lacks = missing(plan, decision.policy, known, len(seq))
        # Exact KV alone is found by the match.
        return replace(
            found,
            promised=end - known if would.moved else 0,
            would=would,
            wanted=self._wanted(lacks, wish.session, moved_end),
        )

    def drops_fronts(self, ask: Ask) -> bool:
        """Whether the front of each moved run has to be computed, where no gap is."""
        policies = (self.decision.policy, ask.decision.policy)
        return not (self.goes_on or self.is_shadow) and any(map(_computes_fronts, policies))

    def _wanted(
        self, lacks: Sequence[Range], session: str | None, moved_end: int | None
    ) -> Wanted | None:
        """What a plan lacks, as the store is asked for it; None: exact runs alone are wanted."""
        policy = self.decision.policy
        if self.is_shadow or (_computes_fronts(policy) and not self.goes_on):
            return None
        return Wanted(
            tuple(lacks if self.goes_on else lacks[:1]),
            policy,
            session,
            moved_end,
            goes_on=self.goes_on,
            judges=judges(self.decision) or limits_contexts(policy),
        )

    @property
    def goes_on(self) -> bool:
        """Whether reuse continues after gaps."""
        return self._max_in_gaps > 0

    def is_exact(self, wish: Wish) -> bool:
        """Whether a request asks for exact reuse, or gets it by default."""
        return (wish.reuse or self._default) == "exact"

    def gaps(self, plan: ReusePlan | FilledPlan, ask: Ask, end: int) -> Gaps | None:
        """The gaps of a later plan before the end of what was promised; None if it cannot be kept.

        Args:
            plan: Another plan of the same request: sources may have been evicted, or have come.
            ask: What was promised.
            end: Where it ends.
        """
        found = _before(plan, end)
        if num_tokens(found) > self._max_in_gaps or ask.decision.of(plan) is not ask.decision:
            return None
        if _first_approximate(plan) >= end:
            return None  # what would be copied has been computed in the meantime
        # What ends in a gap would be computed twice.
        return None if found and found[-1][1] == end else found

    def _reach(self, plan: ReusePlan | FilledPlan, num_tokens: int, size: int) -> int:
        """The whole pages of a prompt up to the last gap, or the first that is not computed."""
        end, left = num_tokens, self._max_in_gaps
        gaps: list[list[int]] = plan.gaps.tolist()
        for first, last in gaps:
            left -= last - first
            if left < 0 or last == num_tokens:
                end = first
                break
        end = end // size * size
        # A gap at the end is left to the step that computes the rest.
        for first, last in reversed(gaps):
            if first < end <= last:
                end = first // size * size
        return end

    def copy(self, moves: NDArray[np.void]) -> None:
        """Queue copies between slots on the stream that writes and reads them."""
        on_stream: AbstractContextManager[Any] = nullcontext()
        if self._stream is not None:
            on_stream = torch.get_device_module(self.pool.device).stream(self._stream)
        with on_stream:
            self.pool.apply(moves)

    def _moved_end(self, request: Req) -> int | None:
        """Where the last message of the prompt begins: read once, as a request waits for rounds."""
        ids = request.full_untruncated_fill_ids
        known = self._ends.get(request)
        if known is None or known[0] != len(ids):
            end = None
            if self._tagger is not None:
                stream = read_sections(self._tagger, np.asarray(ids))
                # Of a prompt with too many delimiters all may be the last message.
                end = 0 if stream is None else stream.moved_end
            elif self._openings is not None:
                end = self._openings.last(np.asarray(ids))
            known = self._ends[request] = len(ids), end
        return known[1]


def _computes_fronts(policy: ReusePolicy) -> bool:
    return policy.approximate and bool(policy.recompute_first or policy.recompute_share)


def num_tokens(gaps: Gaps) -> int:
    """Tokens in gaps."""
    return sum(end - start for start, end in gaps)


def _before(plan: ReusePlan | FilledPlan, end: int) -> Gaps:
    """The gaps of a plan before a position."""
    return tuple((start, min(last, end)) for start, last in plan.gaps.tolist() if start < end)


def _first_approximate(plan: ReusePlan | FilledPlan) -> float:
    """The first token with approximate KV; infinity without any."""
    starts = (int(one["start"]) for one in plan.segments if one["class"] == APPROXIMATE)
    return min(starts, default=float("inf"))


def _would(plan: ReusePlan | FilledPlan, known: int, end: int, num_prompt: int) -> Would:
    """What a plan brings besides an exact match, if what it covers up to a position is reused."""
    gaps = _before(plan, end)
    moved = sum(
        max(0, min(int(one["end"]), end) - max(int(one["start"]), known))
        for one in plan.segments
        if one["class"] == APPROXIMATE
    )
    first = gaps[0][0] if gaps else end
    reused = end - num_tokens(gaps)
    return Would(
        exact=reused - moved,
        moved=moved,
        after_gaps=reused - first,
        computed=num_prompt - reused,
        cleared=True,
    )


def pool_of(kvcache: Any, config: object) -> KVPool:  # noqa: ANN401 - one of SGLang's many
    """SGLang's K and V as a pool with a slot a block, whose keys can be rotated.

    Raises:
        LayoutError: K and V are kept in another way than a row of each for a slot.
        UnsupportedRopeError: The model's keys cannot be rotated, or it has M-RoPE.
    """
    tensors, layout = _tensors_of(kvcache)
    rope = RopeSpec.from_config(config)
    if rope.item_positions:
        msg = "M-RoPE is not supported: the cache knows no positions of images"
        raise UnsupportedRopeError(msg)
    return KVPool.wrap(tensors, layout, rope)


def unmoved_pool_of(kvcache: Any) -> KVPool:  # noqa: ANN401 - one of SGLang's many
    """SGLang's K and V as a pool with a slot a block, whose keys stay as they are.

    Raises:
        LayoutError: K and V are kept in another way than a row of each for a slot.
    """
    return KVPool.wrap(*_tensors_of(kvcache))


def _tensors_of(
    kvcache: Any,  # noqa: ANN401 - one of SGLang's many
) -> tuple[tuple[list[torch.Tensor], ...], KVLayout]:
    name = type(kvcache).__name__
    if name != "MHATokenToKVPool" or kvcache.kv_cache_layout != "nhd" or kvcache.start_layer:
        msg = f"how {name} keeps K and V is not known"
        raise LayoutError(msg)
    if kvcache.is_quantized_kv_cache or kvcache.store_dtype != kvcache.dtype:
        msg = f"KV of {kvcache.dtype} is quantised"
        raise LayoutError(msg)
    tensors = tuple(
        [one.unsqueeze(1) for one in each] for each in (kvcache.k_buffer, kvcache.v_buffer)
    )
    layout = KVLayout.from_tensors(
        tensors,
        axes="blocks tokens heads dim",
        block_size=1,
        num_kv_heads=kvcache.head_num,
        head_dim=kvcache.head_dim,
        v_head_dim=kvcache.v_head_dim,
    )
    return tensors, layout
