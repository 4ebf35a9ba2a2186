"""Engines with visible KV: what a ledger calls final and computed is so, slot by slot."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from tests.truth.check import EXACT, wrong_slots
from tests.truth.labels import UNWRITTEN, LabelledPool, chain

import kvtrie

SIZE = 4
SPACE = kvtrie.Namespace(model="m", salt="truth")


class Engine:
    """One request of an engine with several steps under way, and several drafts per step."""

    def __init__(self, rng: Random, depth: int, drafts: int) -> None:
        self.rng, self.depth, self.drafts = rng, depth, drafts
        self.ledger = kvtrie.SequenceLedger(SIZE)
        prompt = [rng.randrange(9) for _ in range(rng.randrange(1, 20))]
        self.seq = kvtrie.TokenSequence(prompt, SPACE)
        self.tokens = list(prompt)
        self.pool = LabelledPool(60, SIZE)
        self.slots = self.pool.slots(range(60))
        self.ledger.begin(0, self.seq, list(range(60)))
        #: The engine's counter: optimistic, as vLLM's is.
        self.counter = 0
        #: Ids of steps that are done on the device and that the engine has not received.
        self.under_way: deque[tuple[list[int], int]] = deque()
        #: Tokens as the device knows them, and how far it has computed.
        self.device = list(prompt)
        self.device_computed = 0

    def compute(self, start: int, end: int, tokens: list[int]) -> None:
        assert self.pool.compute(self.slots, tokens, chain(tokens, 0), start, end) == 0

    def run_on_device(self, scheduled: int, drafts: int) -> tuple[list[int], int]:
        """Compute, sample, and verify drafts; return the new ids and the number refused."""
        start = self.device_computed
        known = scheduled - drafts
        if start + known < len(self.device):
            # A piece of the prompt: nothing is sampled.
            self.compute(start, start + known, self.device)
            self.device_computed += known
            return [], 0
        guesses = [self.rng.randrange(9) for _ in range(drafts)]
        self.compute(start, start + scheduled, self.device + guesses)
        accepted = self.rng.randint(0, drafts)
        new = [*guesses[:accepted], self.rng.randrange(9)]
        self.device += new
        self.device_computed += known + accepted
        return new, drafts - accepted

    def step(self) -> None:
        rng = self.rng
        received: list[int] = []
        while self.under_way and (len(self.under_way) > self.depth or rng.random() < 0.3):
            new, refused = self.under_way.popleft()
            received += new
            self.counter -= refused
        self.tokens += received
        prompt_left = len(self.tokens) - self.counter
        drafts = 0
        if prompt_left > 1:
            scheduled = rng.randint(1, prompt_left)
            if scheduled < prompt_left and rng.random() < 0.5:
                scheduled = prompt_left
        else:
            drafts = rng.randint(0, self.drafts)
            scheduled = 1 + drafts
        if scheduled == prompt_left and rng.random() < 0.5:
            extra = rng.randint(0, self.drafts)
            drafts, scheduled = extra, scheduled + extra
        declared = [drafts]
        placeholders = [-1] * rng.randrange(3)
        if rng.random() < 0.5:
            # The ids come before the next step is made.
            self.ledger.append(0, received)
            self.check()
            received = []
        ids = received + placeholders
        self.ledger.step([0], [scheduled], [self.counter], ids, [0, len(ids)], num_drafts=declared)
        self.check()
        self.under_way.append(self.run_on_device(scheduled, drafts))
        self.counter += scheduled
        self.check()

    def drain(self) -> None:
        received: list[int] = []
        for new, refused in self.under_way:
            received += new
            self.counter -= refused
        self.under_way.clear()
        self.tokens += received
        self.ledger.step([0], [0], [self.counter], received, [0, len(received)])
        self.check()

    def preempt(self) -> None:
        self.drain()
        to = self.rng.randint(0, self.ledger.lookahead(0)[1])
        gone = self.ledger.rollback(0, to=to)
        written = [self.pool.token[slot] != UNWRITTEN for slot in self.slots]
        assert all(all(written[:end]) for _, end in gone.ranges.tolist())
        for slot in self.slots[to:]:
            self.pool.token[slot] = UNWRITTEN
        self.counter = self.device_computed = min(to, self.counter)

    def check(self) -> None:
        _, end = self.ledger.final_range(0)
        assert end <= len(self.tokens)
        # A step that was just issued is on its way: only what it wrote can be looked at.
        end = min(end, self.device_computed)
        canon = chain(self.tokens, 0)
        assert not wrong_slots(self.pool, self.slots, self.tokens, canon, [EXACT] * end)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("drafts", [0, 1, 4])
def test_final_range_holds_the_kv_of_its_tokens(depth: int, drafts: int) -> None:
    for seed in range(60):
        engine = Engine(Random(f"{depth} {drafts} {seed}"), depth, drafts)
        while len(engine.tokens) < 60 and engine.counter < 180:
            engine.step()
            if engine.rng.random() < 0.03:
                engine.preempt()
        engine.drain()
        # Nothing is under way: all computed KV of the final ids counts.
        assert engine.ledger.final_range(0) == (0, min(engine.counter, len(engine.tokens)))
        assert engine.counter == engine.device_computed
