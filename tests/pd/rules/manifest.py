"""How kvtrie decides: by token ranges, digests and labels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.pd.exchange import Answer, Piece, Want
from tests.truth.check import EXACT

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.pd.engine import Computed


def ledger_of(computed: Computed) -> tuple[kvtrie.SequenceLedger, str]:
    engine = computed.engine
    ledger = kvtrie.SequenceLedger(block_size=engine.block_size)
    seq = kvtrie.TokenSequence(computed.ids, engine.namespace)
    ledger.begin("request", seq, computed.blocks, num_computed=computed.num_computed)
    if computed.lookahead:
        ahead = len(computed.ids) - computed.num_computed + computed.lookahead
        ledger.schedule("request", ahead, num_drafts=computed.lookahead)
    return ledger, "request"


@dataclass(frozen=True)
class RangePlan:
    """The sender writes a manifest of its ledger, and the receiver plans with it."""

    policy: kvtrie.ReusePolicy = kvtrie.EXACT_ONLY
    key: bytes = b"a secret of the deployment"
    keep_last: int = 0
    planner: Callable[..., kvtrie.TransferPlan] | None = None
    plans: list[kvtrie.TransferPlan] = field(default_factory=list)

    def __call__(self, offer: Computed, want: Want, /) -> Answer:
        ledger, request = ledger_of(offer)
        raw = kvtrie.TransferManifest.from_ledger(ledger, request, key=self.key).to_bytes()
        plan = (self.planner or kvtrie.plan_transfer)(
            kvtrie.TransferManifest.from_bytes(raw),
            kvtrie.TokenSequence(want.ids, want.engine.namespace),
            want.blocks,
            cached=(0, want.cached),
            key=self.key,
            policy=self.policy,
            block_size=want.engine.block_size,
            keep_last=self.keep_last,
        )
        self.plans.append(plan)
        return answer_of(plan, offer, want)


def answer_of(plan: kvtrie.TransferPlan, offer: Computed, want: Want) -> Answer:
    theirs, mine = offer.engine.block_size, want.engine.block_size
    pieces = [
        Piece(
            remote * theirs + (start - delta) % theirs,
            local * mine + start % mine,
            start,
            end - start,
            delta,
            kind == EXACT,
            hops,
        )
        for _, remote, local, start, end, delta, kind, hops in plan.pairs.tolist()
    ]
    # A receiver with a cached prefix computes only `compute`.
    claimed, at = [], want.cached
    for start, end in plan.compute.tolist():
        if at < start:
            claimed.append((at, start))
        at = max(at, end)
    if at < len(want.ids):
        claimed.append((at, len(want.ids)))
    return Answer(pieces, claimed, exact_until=plan.exact_until)
