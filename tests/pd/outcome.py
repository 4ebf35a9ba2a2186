"""One transfer under a rule, and its outcome in the receiver's slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.pd.exchange import Answer, PeerError, Piece, Rule, Want
from tests.truth.check import APPROXIMATE, EXACT, wrong_slots

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.pd.engine import Computed, Engine


@dataclass(frozen=True)
class Outcome:
    """The outcome of a transfer, in tokens.

    `exact` of `loaded` are claimed exact. `wrong` of them are in slots that do not hold what is
    claimed: `unwritten` never written, `never_computed` never computed by the sender. `tainted` of
    `computed` are claimed exact and attended to wrong KV. `refused` says why nothing was loaded,
    `failed` which assertion ended the request.
    """

    loaded: int
    exact: int
    computed: int
    wrong: int = 0
    unwritten: int = 0
    never_computed: int = 0
    tainted: int = 0
    refused: str | None = None
    failed: str | None = None


def transfer(
    source: Computed, receiver: Engine, ids: Sequence[int], *, rule: Rule, cached: int = 0
) -> Outcome:
    """Move KV from a sender to a receiver, compute the rest there, and check every slot.

    The receiver copies what the rule says, block by block or slot by slot. It computes what the
    rule does not claim, on top of the copies.

    Example:
        >>> from tests import pd
        >>> held = pd.Engine("P").compute(range(32), lookahead=1)
        >>> pd.transfer(held, pd.Engine("D"), range(32), rule=pd.vllm.suffix_trim).wrong
        32
    """
    ids = list(ids)
    if not 0 <= cached <= len(ids):
        message = f"transfer: cached is {cached}, of {len(ids)} tokens"
        raise ValueError(message)
    pool, root = receiver.pool, receiver.root
    blocks = receiver.allocate(len(ids))
    slots, canon = pool.slots(blocks), receiver.chain(ids)
    pool.compute(slots, ids, canon, 0, cached, root=root)
    want = Want(receiver, ids, blocks, cached)
    refused = None
    try:
        answer = rule(source, want)
    except PeerError as error:
        receiver.allocator.free(blocks)
        return Outcome(0, 0, 0, failed=str(error))
    except kvtrie.TransferRefused as refusal:
        answer, refused = Answer([]), refusal.reason
    for piece in answer.pieces:
        _load(source.engine, receiver, piece, canon)
    exact_until = len(ids) if answer.exact_until is None else answer.exact_until
    classes = [EXACT] * min(exact_until, len(ids)) + [APPROXIMATE] * (len(ids) - exact_until)
    hops = [0] * len(ids)
    claimed = [False] * len(ids)
    for start, end in answer.claimed:
        claimed[start:end] = [True] * (end - start)
    for piece in answer.pieces:
        end = piece.position + piece.num_tokens
        for position in range(piece.position, min(end, len(ids))):
            hops[position] = piece.hops
            if exact_until < len(ids):
                classes[position] = EXACT if piece.exact else APPROXIMATE
    at = cached
    while at < len(ids):
        end = at
        while end < len(ids) and claimed[end] == claimed[at]:
            end += 1
        if not claimed[at]:
            pool.compute(slots, ids, canon, at, end, root=root)
        at = end
    computed_ids = set(source.ids[: source.num_computed])
    faults = wrong_slots(pool, slots, ids, canon, classes, hops, root=root, start=cached)
    wrong = [(position, why) for position, why in faults if claimed[position]]
    outcome = Outcome(
        loaded=sum(claimed),
        exact=sum(taken and kind == EXACT for taken, kind in zip(claimed, classes, strict=True)),
        computed=len(ids) - cached - sum(claimed),
        wrong=len(wrong),
        unwritten=sum(why == "unwritten" for _, why in wrong),
        never_computed=sum(ids[position] not in computed_ids for position, _ in wrong),
        tainted=len(faults) - len(wrong),
        refused=refused,
    )
    receiver.allocator.free(blocks)
    return outcome


def _load(sender: Engine, receiver: Engine, piece: Piece, canon: Sequence[int]) -> None:
    """Copy one piece; blocks are copied whole, even if the prompt ends inside."""
    places = list(canon[piece.position : piece.position + piece.num_tokens])
    places += [0] * (piece.num_tokens - len(places))
    receiver.pool.load(sender.pool, piece.source_slot, piece.slot, places, piece.delta)
