"""The connector's state of one live request."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtrie._core import COMPUTED, Imported
from kvtrie.gates import laxest
from kvtrie.integrations._sections import read_on
from kvtrie.integrations.vllm._account import Account
from kvtrie.integrations.vllm._carried_copies import NOTHING, Carried
from kvtrie.tags import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from kvtrie._core import ReusePlan, ReusePolicy, Span, TokenSequence
    from kvtrie.integrations._filled_plan import FilledPlan
    from kvtrie.integrations.vllm._metadata import FoundSpans
    from kvtrie.integrations.vllm._ranges import Range
    from kvtrie.integrations.vllm._sources import Stretch
    from kvtrie.integrations.vllm._tags import Reading
    from kvtrie.record import Would
    from kvtrie.tags.openings import Openings

# A range and the label of its tokens.
Paint = tuple[int, int, int]

MOST_STRETCHES: Final = 256
"""Stretches of blocks of one request that have their own hops; with more, all have the most."""


@dataclass(slots=True, eq=False)
class Pending:
    """A plan with copies that are not all issued.

    Attributes:
        pinned: Its blocks, which the pool may not hand out meanwhile.
        promised: The tokens after vLLM's own hit that need no computing.
        after_gaps: Ranges that may be copied when the gap before is computed, ascending.
        is_read: Whether copies from its blocks were issued.
        jumped: The range that this step skips, if the step includes the request.
        rows: Parts of what is promised or skipped that the step computes as rows.
        num_overcounted: Tokens in rows that vLLM counts as external hits.
        carried: What is copied with them in other groups of blocks.
    """

    plan: ReusePlan | FilledPlan
    pinned: list[KVCacheBlock]
    promised: Range
    after_gaps: list[Range]
    allocated: bool = False
    is_read: bool = False
    jumped: Range | None = None
    rows: list[Range] = field(default_factory=list)
    num_overcounted: int = 0
    carried: Carried = NOTHING

    def reads(self, block_ids: Collection[int]) -> bool:
        return any(block.block_id in block_ids for block in self.pinned)


@dataclass(slots=True, eq=False)
class LatestPlan:
    """What came of a request's latest plan: a request that finds no room is asked about each step.

    Attributes:
        key: What it was planned with.
        used: The blocks that the plan reads. It holds while all are there.
        plan: The plan; None if nothing of it is copied.
        promised: As `Pending` has it, before rows extend it.
        after_gaps: Likewise.
    """

    key: tuple[int, ...]
    used: list[int]
    plan: ReusePlan | FilledPlan | None = None
    promised: Range = (0, 0)
    after_gaps: tuple[Range, ...] = ()


@dataclass(slots=True, eq=False)
class Why:
    """Labels of a prompt's tokens, and what they depend on.

    Attributes:
        paints: Ranges and their labels, of which the last one that holds a token counts. They are
            only looked at when the prompt is computed.
        signature: What the request was admitted with.
        only: The label of all tokens; None if there are several.
    """

    paints: list[Paint]
    signature: tuple[object, ...]
    only: int | None = None


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request from arrival to finish.

    Attributes:
        seq: Its tokens that were final at the last update.
        exact_until: Its first approximate token; None while all is exact.
        moved: Ranges of approximate KV that it did not compute, ascending and apart, and their
            hops.
        latest: What its latest plan was, while it waits to be admitted; None: plan again.
        num_refused: How often vLLM found no blocks while this request's sources were pinned.
        last_free: Free blocks when that last happened.
        is_without_room: Whether it was admitted without reuse for that reason.
        is_offered: Whether the index knows the prompt's blocks.
        session: The id of its conversation.
        first_hit: Tokens of vLLM's own hit when it began.
        new_reading: What begins to read the spans of its tokens; None if that is done, or never.
        reading: The spans of its tokens, as far as they were read.
        moved_end: Where the prompt's last message of a user or a tool begins, if it is known.
        has_moved_end: Whether that was looked for (`find_moved_end`).
        openings: How messages begin, where tags do not say it.
        num_local: vLLM's own hit at the last admission.
        has_other_template: Whether the served chat template cannot have rendered the prompt.
        granted: The policy of its latest plan, which the gate may have narrowed.
        verdict: Why it may reuse what it may, in a sentence.
        is_uncalibrated: Whether it gets exact reuse because the gate does not cover its adapter.
        why: Why tokens of its prompt are computed.
        computed: Computed tokens of its prompt, by reason.
        shadow_policy: What it might reuse if shadow mode moved; None without that mode.
        would: What it would have reused then.
        account: Where the KV of its prompt came from.
        is_counted: Whether `account` is in the stats.
        built_under: What its plans are as strict as at least, which the index keeps as the grade
            of its approximate blocks; None before the first plan with any.
        stored: What the store has loaded for it, until it is copied; None for nothing.
        ticket: What that is known by to the worker's half.
        is_before_reset: Whether it may have KV from before a reset; it is not stored then.
        is_untagged: Whether it has more delimiters than are read. Its tokens are of no kind, where
            its last message begins is not known, and what it leaves is not stored.
        first_block: A digest of its first block's tokens, once it is needed.
    """

    seq: TokenSequence
    policy: ReusePolicy
    exact_until: int | None = None
    moved: list[tuple[int, int, int]] = field(default_factory=list)
    pending: Pending | None = None
    latest: LatestPlan | None = None
    num_refused: int = 0
    last_free: int = -1
    is_without_room: bool = False
    is_offered: bool = False
    new_reading: Callable[[], Reading] | None = None
    reading: Reading | None = None
    openings: Openings | None = None
    account: Account = field(default_factory=Account)
    is_counted: bool = False
    session: str | None = None
    moved_end: int | None = None
    has_moved_end: bool = False
    first_hit: int = 0
    built_under: ReusePolicy | None = None
    has_other_template: bool = False
    num_local: int = 0
    granted: ReusePolicy | None = None
    verdict: str = ""
    is_uncalibrated: bool = False
    why: Why | None = None
    computed: dict[str, int] = field(default_factory=dict)
    shadow_policy: ReusePolicy | None = None
    would: Would | None = None
    stored: FoundSpans | None = None
    ticket: int = 0
    is_before_reset: bool = False
    is_untagged: bool = False
    first_block: int | None = None

    def is_built_under(self, policy: ReusePolicy) -> None:
        """Take note of a plan with approximate KV. Its request may have used others before."""
        before = self.built_under
        if before is not policy:
            self.built_under = policy if before is None else laxest([before, policy])

    @property
    def grade(self) -> ReusePolicy:
        """What its approximate KV is as strict as at least."""
        return self.policy if self.built_under is None else self.built_under

    def is_exact_until(self, position: int) -> bool:
        """Whether its tokens before a position are exact."""
        return self.exact_until is None or position <= self.exact_until

    def stretches(self, num_blocks: int, block_size: int) -> list[Stretch]:
        """The exactness of its blocks, in order.

        A block has the most hops of any KV moved into it. KV that the request computed after moved
        KV is approximate with 0 hops. Of more than `MOST_STRETCHES`, all have the most hops.
        """
        if self.exact_until is None:
            return [(num_blocks, COMPUTED)]
        hops = [0] * num_blocks
        for start, end, count in self.moved:
            for block in range(start // block_size, min(-(-end // block_size), num_blocks)):
                hops[block] = max(hops[block], count)
        found = [(len(list(same)), count) for count, same in groupby(hops)]
        if len(found) > MOST_STRETCHES:
            # Each takes a call of the index. More hops than there are only forbid more.
            found = [(num_blocks, max(hops))]
        return [
            (length, Imported(self.exact_until, hops=count, policy=self.grade))
            for length, count in found
        ]

    def hops_of(self, block: int, block_size: int) -> int:
        """The most hops of KV in one of its approximate blocks."""
        first, last = block * block_size, (block + 1) * block_size
        moved = self.moved
        at = bisect_right(moved, first, key=itemgetter(1))
        hops = 0
        while at < len(moved) and moved[at][0] < last:
            hops = max(hops, moved[at][2])
            at += 1
        return hops

    def follow(self, request: Request) -> None:
        if len(self.seq) < request.num_tokens:
            self.seq.extend(request.all_token_ids[len(self.seq) :])

    def begins_with(self, num_local: int) -> None:
        """Record vLLM's own hit, at every admission."""
        self.num_local = num_local
        if not self.account.reached:
            self.first_hit = num_local
        exact = num_local if self.exact_until is None else min(num_local, self.exact_until)
        self.account.admit(num_local, exact)
        # Blocks that vLLM found may have left the index since, with their hops: assume the most.
        self.moved = [(exact, num_local, self.policy.max_hops)] if exact < num_local else []

    def loaded_by_others(self, end: int) -> None:
        """Record what another connector has loaded after vLLM's own hit, up to ``end``."""
        start, self.num_local = self.num_local, end
        exact = end if self.exact_until is None else max(start, min(end, self.exact_until))
        for first, last, is_approximate in ((start, exact, False), (exact, end, True)):
            if first < last:
                self.account.copy(first, last, is_approximate=is_approximate)
        if exact < end:
            # It stores no hops: assume the most.
            self.moved.append((exact, end, self.policy.max_hops))

    def read(self) -> Reading | None:
        """The spans of its tokens so far; None if they are not tagged, for whatever reason."""
        if self.new_reading is not None:
            self.reading, self.new_reading = self.new_reading(), None
        if self.reading is not None and not self.reading.follow(self.seq):
            self.reading, self.is_untagged = None, True
        return self.reading

    def find_moved_end(self, num_prompt: int) -> int | None:
        """Where its prompt's last message of a user or a tool begins; None if it is not known.

        Of an untagged request all may be the last message, so nothing moves into it. It is found
        once, by the prompt's tokens alone: what the model says ends no message of a user.
        """
        if not self.has_moved_end:
            self.moved_end = self._read_moved_end(num_prompt)
            self.has_moved_end = True
        return self.moved_end

    def _read_moved_end(self, num_prompt: int) -> int | None:
        reading = self.read()
        if self.is_untagged:
            return 0
        if self.openings is not None:
            return self.openings.last(np.asarray(self.seq[:num_prompt]))
        if reading is None or len(self.seq) == num_prompt:
            return None if reading is None else reading.stream.moved_end
        prompt = Stream(reading.stream.tagger)
        return prompt.moved_end if read_on(prompt, np.asarray(self.seq[:num_prompt])) else 0

    def new_spans(self) -> list[Span]:
        """The spans that have ended since the last call."""
        reading = self.read()
        return [] if reading is None else reading.new_spans()

    def becomes_approximate(self, position: int) -> None:
        self.exact_until = position if self.exact_until is None else min(self.exact_until, position)


def adapter_of(request: Request) -> str | None:
    """The identity of a request's LoRA adapter; None without one.

    It includes the path, as in vLLM's hashes: a name may be reused while the engine runs.
    """
    lora = request.lora_request
    return None if lora is None else json.dumps([lora.lora_name, lora.lora_path])
