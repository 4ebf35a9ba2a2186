"""The ledger's rules without a counter: a list of slots, each with what is known of it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field


class RefusedError(Exception):
    """An impossible call."""


@dataclass
class Slot:
    present: bool = False
    issued: bool = False
    claimed: bool = False


@dataclass
class NaiveRequest:
    size: int
    tokens: list[int]
    table: list[int]
    slots: list[Slot] = field(default_factory=list)
    #: Positions of unverified drafts, one list each time that some were issued.
    drafts: list[list[int]] = field(default_factory=list)
    committed: int = 0

    def __post_init__(self) -> None:
        self.slots = [Slot() for _ in range(len(self.table) * self.size)]

    @property
    def verified(self) -> int:
        """The end of what is final and computed."""
        for at, slot in enumerate(self.slots):
            is_draft = any(drafts[0] <= at for drafts in self.drafts)
            if at >= len(self.tokens) or not (slot.present or slot.claimed) or is_draft:
                return at
        return len(self.slots)

    @property
    def issued(self) -> int:
        """The end of what is issued."""
        for at, slot in enumerate(self.slots):
            if not (slot.present or slot.issued):
                return at
        return len(self.slots)

    @property
    def missing(self) -> list[int]:
        """Final positions without KV."""
        return [
            at
            for at in range(self.verified, len(self.tokens))
            if at >= len(self.slots) or not self.slots[at].present
        ]

    def schedule(self, tokens: int, drafts: int) -> None:
        free = [at for at, slot in enumerate(self.slots) if not (slot.present or slot.issued)]
        free = free[:tokens]
        if len(free) < tokens or drafts > tokens:
            raise RefusedError
        for at in free:
            self.slots[at].issued = True
        if drafts:
            self.drafts.append(free[tokens - drafts :])

    def append(self, ids: list[int]) -> None:
        """Final ids, then placeholders."""
        known = list(ids)
        while known and known[-1] == -1:
            known.pop()
        if any(not 0 <= token < 2**32 for token in known):
            raise RefusedError
        self.tokens += known

    def confirm(self, computed: int) -> None:
        """Claim all positions below, and no others."""
        if not self.verified <= computed <= self.issued or not self._knows_whose(computed):
            raise RefusedError
        claimed = next(
            (at for at, slot in enumerate(self.slots) if not (slot.present or slot.claimed)),
            len(self.slots),
        )
        num_drafts = len(self.drafts)
        self._claim(computed)
        start = self._after_present(computed)
        if start < claimed or len(self.drafts) < num_drafts:
            # The engine reports its position, without the refused drafts.
            for at, slot in enumerate(self.slots):
                slot.issued = at < computed
            self.drafts = [drafts for drafts in self.drafts if drafts[0] < start]

    def _knows_whose(self, computed: int) -> bool:
        """Whether a decreasing claim identifies the step whose drafts it leaves out."""
        claimed = next(
            (at for at, slot in enumerate(self.slots) if not (slot.present or slot.claimed)),
            len(self.slots),
        )
        return computed >= claimed or not self.drafts or self.drafts[0][0] < len(self.tokens)

    def _after_present(self, at: int) -> int:
        while at < len(self.slots) and self.slots[at].present:
            at += 1
        return at

    def _claim(self, computed: int) -> None:
        left = [drafts for drafts in self.drafts if drafts[0] >= len(self.tokens)]
        if len(left) < len(self.drafts) and left:
            # The positions of steps under way decrease by the number of refused drafts.
            refused = max(0, self.issued - self._after_present(computed))
            left = [drafts for drafts in left if drafts[0] >= len(self.tokens) + refused]
            left = [[at - refused for at in drafts] for drafts in left]
        self.drafts = left
        for at, slot in enumerate(self.slots):
            slot.claimed = at < computed

    def step(self, ids: list[int], computed: int, tokens: int, drafts: int) -> None:
        after = copy.deepcopy(self)
        if not after.verified <= computed <= after.issued:
            raise RefusedError
        after.append(ids)
        after._claim(computed)
        start = after._after_present(computed)
        after.drafts = [drafts for drafts in after.drafts if drafts[0] < start]
        for at, slot in enumerate(after.slots):
            slot.issued = at < computed
        after.schedule(tokens, drafts)
        self.__dict__.update(after.__dict__)

    def add_blocks(self, blocks: list[int]) -> None:
        both = self.table + blocks
        if len(set(both)) < len(both):
            raise RefusedError
        self.table = both
        self.slots += [Slot() for _ in range(len(blocks) * self.size)]

    def rollback(self, to: int, *, drop_blocks: bool) -> tuple[list[int], list[int]]:
        if not self.committed <= to <= self.issued:
            raise RefusedError
        rest = range(to, len(self.slots))
        verified = self.verified
        gone = [at for at in rest if at < verified or self.slots[at].present]
        for at in rest:
            self.slots[at] = Slot()
        self.drafts = [drafts for drafts in self.drafts if drafts[0] < to]
        keep = -(-to // self.size) if drop_blocks else len(self.table)
        cut, self.table = self.table[keep:], self.table[:keep]
        del self.slots[keep * self.size :]
        return gone, cut
