"""A serving engine over labelled KV: prefix cache, ledger, drafts, steps in flight, leases.

It reports to the ledger what a real engine could report, with its scheduler's optimistic counter.
The device is a queue: steps are scheduled, and run later, in order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from tests.pd.engine import Engine
from tests.pd.leases import LeaseError, Leases
from tests.truth.check import EXACT, is_loaded_right, wrong_slots
from tests.truth.labels import chain

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from random import Random

PLACEHOLDER = -1
"""Placeholder for a sampled id that is not known yet."""

JUNK = 2**31
"""A token sampled after the end of a request."""

SESSION = "talk"
"""Its engines serve one conversation, so moved runs may come from all of it."""


@dataclass(frozen=True)
class Envelope:
    sender: ServingEngine
    lease: int
    raw: bytes


@dataclass
class Live:
    """A request of a serving engine.

    `to_compute` are ranges of the next prefill chunks; `future` the ids that the model will sample,
    the last first; `guess` the probability that a draft is right; `counter` the scheduler's
    computed tokens, with steps in flight; `ids` and `canon` the sequence as the device knows it;
    `done` what it has computed, except gaps; `arrived` the ids that were not reported to the
    ledger.
    """

    name: Hashable
    seq: kvtrie.TokenSequence
    table: list[int]
    slots: list[int]
    ids: list[int]
    canon: list[int]
    to_compute: deque[tuple[int, int]]
    future: list[int]
    num_drafts: int = 0
    guess: float = 0.0
    counter: int = 0
    done: int = 0
    arrived: list[int] = field(default_factory=list)
    in_flight: int = 0
    built_under: list[kvtrie.ReusePolicy] = field(default_factory=list)
    """The policies that approximate KV of the request was planned or loaded under."""


class ServingEngine(Engine):
    """An engine with a prefix cache, which serves requests step by step."""

    def __init__(
        self,
        name: str,
        rng: Random,
        *,
        block_size: int,
        num_blocks: int,
        namespace: kvtrie.Namespace | None = None,
        depth: int = 0,
    ) -> None:
        super().__init__(name, block_size=block_size, num_blocks=num_blocks, namespace=namespace)
        self.rng = rng
        self.num_blocks = num_blocks
        self.depth = depth
        # Slots read before they were written, and loads that differ from their claim.
        self.broken = 0
        self.index = kvtrie.RadixIndex(
            num_blocks=num_blocks, block_size=block_size, min_run=8, seed=0
        )
        self.ledger = kvtrie.SequenceLedger(block_size=block_size)
        self.live: dict[Hashable, Live] = {}
        self.leases = Leases()
        self.device: deque[Callable[[], None]] = deque()

    def drain(self) -> None:
        device = self.device
        while device:
            device.popleft()()

    def _drop_behind(self) -> None:
        while self.device and sum(live.in_flight for live in self.live.values()) > self.depth:
            self.device.popleft()()

    def _clear(self, blocks: list[int]) -> None:
        self.device.append(lambda: self.pool.clear(blocks))

    def take(self, num_blocks: int) -> list[int]:
        blocks: list[int] = self.allocator.allocate(num_blocks, evict_from=self.index).tolist()
        self._clear(blocks)
        return blocks

    def give_back(self, done: kvtrie.InsertResult) -> None:
        self.allocator.free(done.duplicates)
        self.allocator.free(done.surplus)
        self.allocator.free(done.freed)
        self.allocator.free(self.index.take_freed())

    def prepare(
        self, name: Hashable, ids: Sequence[int], policy: kvtrie.ReusePolicy, keep_last: int
    ) -> tuple[Live, kvtrie.ReusePlan]:
        seq = kvtrie.TokenSequence(ids, self.namespace)
        plan = self.index.plan(seq, policy, keep_last=keep_last, session=SESSION)
        try:
            fresh = self.take(plan.num_new_blocks)
        except kvtrie.OutOfBlocksError:
            plan.release()
            raise
        table = [*plan.blocks.tolist(), *fresh]
        live = Live(
            name, seq, table, self.pool.slots(table), list(ids), self.chain(ids), deque(), []
        )
        if plan.num_approximate:
            live.built_under.append(policy)
        moves = plan.moves(np.asarray(table, dtype=np.int32))
        for source, target, count, delta in moves.tolist():
            self._move(live, source, target, count, delta)
        # The copies are ordered before every later writer: there is one queue.
        plan.release_sources()
        return live, plan

    def _move(self, live: Live, source: int, target: int, count: int, delta: int) -> None:
        position = live.slots.index(target)
        places = live.canon[position : position + count]
        self.device.append(lambda: self.pool.load(self.pool, source, target, places, delta))

    def begin(self, live: Live, plan: kvtrie.ReusePlan) -> None:
        self.ledger.begin(live.name, live.seq, live.table, source=plan, session=SESSION)
        self._begun(live)

    def begin_imported(
        self, live: Live, plan: kvtrie.ReusePlan, transfer: kvtrie.TransferPlan
    ) -> None:
        self.ledger.begin(
            live.name,
            live.seq,
            live.table,
            source=transfer.source,
            missing=transfer.missing,
            plan=plan,
            session=SESSION,
        )
        source = transfer.source
        if isinstance(source, kvtrie.Imported) and source.policy is not None:
            live.built_under.append(source.policy)
        self._begun(live)

    def begin_computed(self, live: Live, plan: kvtrie.ReusePlan, loaded: int) -> None:
        self.ledger.begin(live.name, live.seq, live.table, source=plan, session=SESSION)
        _, present = self.ledger.final_range(live.name)
        self.ledger.schedule(live.name, loaded - present)
        self.ledger.confirm(live.name, loaded)
        self._begun(live)

    def _begun(self, live: Live) -> None:
        missing = [tuple(range_) for range_ in self.ledger.missing(live.name).tolist()]
        live.to_compute.extend(missing)
        live.counter = missing[0][0] if missing else len(live.ids)
        self.live[live.name] = live

    def grow(self, live: Live, num_tokens: int) -> bool:
        needed = -(-num_tokens // self.block_size) - len(live.table)
        if needed > 0:
            try:
                more = self.take(needed)
            except kvtrie.OutOfBlocksError:
                return False
            self.ledger.add_blocks(live.name, more)
            live.table += more
            # Steps in flight keep their table.
            live.slots = live.slots + self.pool.slots(more)
        return True

    def step(self, names: Sequence[Hashable]) -> list[Hashable]:
        rng = self.rng
        starved: list[Hashable] = []
        requests: list[Hashable] = []
        scheduled: list[int] = []
        computed: list[int] = []
        drafts: list[int] = []
        ids: list[int] = []
        offsets = [0]
        work: list[Callable[[], None]] = []
        for name in names:
            live = self.live[name]
            if not (live.to_compute or live.future):
                continue
            start, count, num_drafts = self._next(live)
            if not self.grow(live, start + count):
                starved.append(name)
                continue
            requests.append(name)
            scheduled.append(count)
            computed.append(live.counter)
            drafts.append(num_drafts)
            # Sometimes the ids arrive after the counter that includes them.
            if rng.random() < 0.9:
                ids += live.arrived
                live.arrived = []
            if (live.in_flight or live.arrived) and rng.random() < 0.3:
                ids.append(PLACEHOLDER)
            offsets.append(len(ids))
            if live.to_compute:
                work.append(self._prefill(live, start, start + count))
            else:
                work.append(self._decode(live, num_drafts))
        if requests:
            prefills = self.live[requests[0]].to_compute
            if len(requests) == 1 and not (self.depth or prefills) and rng.random() < 0.3:
                self._step_by_calls(requests[0], scheduled[0], computed[0], ids, drafts[0])
            else:
                self.ledger.step(requests, scheduled, computed, ids, offsets, num_drafts=drafts)
            for name in requests:
                self.live[name].in_flight += 1
            self.device.extend(work)
            self._drop_behind()
        return starved

    def _next(self, live: Live) -> tuple[int, int, int]:
        if live.to_compute:
            start, end = live.to_compute[0]
            return start, min(end - start, self.rng.choice((1, 3, 16, 64))), 0
        num_drafts = live.num_drafts
        if num_drafts and self.rng.random() < 0.2:
            num_drafts = self.rng.randrange(num_drafts)
        return live.counter, 1 + num_drafts, num_drafts

    def _step_by_calls(
        self, name: Hashable, scheduled: int, computed: int, ids: list[int], drafts: int
    ) -> None:
        self.ledger.append(name, ids)
        self.ledger.confirm(name, computed)
        if self.ledger.lookahead(name)[1] > computed:
            self.ledger.rollback(name, computed)
        self.ledger.schedule(name, scheduled, num_drafts=drafts)

    def _prefill(self, live: Live, start: int, end: int) -> Callable[[], None]:
        _, last = live.to_compute.popleft()
        if end < last:
            live.to_compute.appendleft((end, last))
            live.counter = end
        elif live.to_compute:
            live.counter = live.to_compute[0][0]
        else:
            live.counter = len(live.ids)
        samples, slots = not live.to_compute, live.slots

        def run() -> None:
            live.in_flight -= 1
            self.broken += self.pool.compute(
                slots, live.ids, live.canon, start, end, root=self.root
            )
            if samples:
                live.done = len(live.ids)
                self._sample(live, 1)

        return run

    def _decode(self, live: Live, num_drafts: int) -> Callable[[], None]:
        live.counter += 1 + num_drafts
        slots = live.slots

        def run() -> None:
            live.in_flight -= 1
            base = live.done
            if not live.future:
                # Its samples are dropped, but the counter includes it.
                junk = [JUNK] * (num_drafts + 1 + max(0, base - len(live.ids)))
                ids = live.ids + junk
                canon = live.canon + chain(junk, live.canon[-1])
                self.broken += self.pool.compute(
                    slots, ids, canon, base, base + 1 + num_drafts, root=self.root
                )
                live.done = base + 1
                return
            upcoming = live.future[-num_drafts:][::-1] if num_drafts else []
            upcoming += [7] * (num_drafts - len(upcoming))
            proposed = [
                token if self.rng.random() < live.guess else token + 1 for token in upcoming
            ]
            accepted = 0
            while (
                accepted < min(num_drafts, len(live.future) - 1)
                and proposed[accepted] == upcoming[accepted]
            ):
                accepted += 1
            ids = live.ids[: base + 1] + proposed
            canon = live.canon[: base + 1]
            canon += chain(proposed, canon[-1])
            self.broken += self.pool.compute(
                slots, ids, canon, base, base + 1 + num_drafts, root=self.root
            )
            live.done = base + 1 + accepted
            live.counter -= num_drafts - accepted
            self._sample(live, accepted + 1)

        return run

    def _sample(self, live: Live, count: int) -> None:
        new = [live.future.pop() for _ in range(min(count, len(live.future)))]
        live.ids += new
        live.canon += chain(new, live.canon[-1] if live.canon else self.root)
        live.arrived += new

    def settle(self, live: Live) -> None:
        self.drain()
        self._tell(live)

    def _tell(self, live: Live) -> None:
        ids, live.arrived = live.arrived, []
        if live.num_drafts and not live.to_compute:
            # With drafts in flight, ids and the counter without rejected drafts go together.
            self.ledger.step([live.name], [0], [live.counter], ids, [0, len(ids)])
            return
        if ids:
            self.ledger.append(live.name, ids)
        if not live.to_compute:
            self.ledger.confirm(live.name, live.counter)

    def commit(self, live: Live) -> None:
        self.give_back(self.ledger.commit(live.name, self.index))
        live.table = self.ledger.blocks(live.name).tolist()
        live.slots = self.pool.slots(live.table)

    def strip(self, ids: Sequence[int], start: int, end: int, *, remove: bool) -> None:
        seq = kvtrie.TokenSequence(ids, self.namespace)
        if remove:
            self.allocator.free(self.index.remove_spans(seq, [(start, end)]).freed)
            self.allocator.free(self.index.take_freed())
        else:
            self.index.mark_dead(seq, [(start, end)])

    def preempt(self, live: Live, *, drop_blocks: bool, wait: bool = True) -> Live:
        """Roll back some of the computed tokens, as engines do when blocks run short."""
        if wait or self.ledger.new_range(live.name)[0] >= len(live.ids):
            self.settle(live)
        else:
            live = self._parted(live)
        committed, verified = self.ledger.new_range(live.name)
        if live.future:
            # The next token must still be sampled.
            verified = min(verified, len(live.ids) - 1)
        to = self.rng.randint(min(committed, verified), verified)
        gone = self.ledger.rollback(live.name, to, drop_blocks=drop_blocks)
        self.allocator.free(gone.blocks)
        live.table = self.ledger.blocks(live.name).tolist()
        live.slots = self.pool.slots(live.table)
        live.to_compute = deque(tuple(part) for part in self.ledger.missing(live.name).tolist())
        live.counter = live.done = to
        self.resampling(live)
        return live

    def _parted(self, live: Live) -> Live:
        """The request without its steps in flight, which keep the old request."""
        self._tell(live)
        other = replace(
            live,
            ids=live.ids[:],
            canon=live.canon[:],
            future=live.future[:],
            arrived=[],
            in_flight=0,
        )
        self.live[live.name] = other
        return other

    def resampling(self, live: Live) -> None:
        """Let a resumed prefill end by sampling the next token, as the first one did."""
        if not live.to_compute:
            live.counter = live.done = len(live.ids)

    def finish(self, live: Live, *, wait: bool = True) -> None:
        """End a request; its computed KV goes to the index.

        Without `wait`, steps in flight run afterwards, and write to their scheduled slots.
        """
        if wait:
            self.settle(live)
        self.give_back(self.ledger.finish(live.name, self.index))
        self._ended(live)

    def forget(self, live: Live) -> None:
        held = self.ledger.forget(live.name).tolist()
        self.allocator.free(held)
        self.allocator.free(self.index.take_freed())
        self._ended(live)

    def _ended(self, live: Live) -> None:
        del self.live[live.name]
        self.allocator.free(self.index.take_freed())

    def export(self, live: Live, key: bytes) -> Envelope:
        manifest = kvtrie.TransferManifest.from_ledger(self.ledger, live.name, key=key)
        said = manifest.policy
        for policy in live.built_under:
            if said is not None and not policy.is_at_least_as_strict_as(said):
                raise ValueError(f"the manifest says {said}, KV was built under {policy}")
        raw = manifest.to_bytes()
        lease = self.leases.grant(live.name, self.ledger.blocks(live.name).tolist())
        return Envelope(self, lease, raw)

    def end_lease(self, number: int) -> None:
        name = self.leases.end(number)
        if name is not None and name in self.live:
            self.finish(self.live[name])

    def load(
        self,
        live: Live,
        envelope: Envelope,
        transfer: kvtrie.TransferPlan,
        *,
        breaks_after: int | None = None,
    ) -> None:
        sender = envelope.sender
        pairs = transfer.pairs.tolist()
        sender.leases.require(envelope.lease, sorted({pair[1] for pair in pairs}))
        # A remote reader is not in the sender's queue, so it waits for the steps in flight.
        sender.drain()
        self.drain()
        theirs, mine = sender.block_size, self.block_size
        for _, remote, local, start, end, delta, kind, hops in pairs[:breaks_after]:
            canon, slot = live.canon[start:end], local * mine + start % mine
            self.pool.load(
                sender.pool, remote * theirs + (start - delta) % theirs, slot, canon, delta
            )
            ids, exact = live.ids[start:end], kind == EXACT
            if not is_loaded_right(
                self.pool, slot, ids, canon, start, exact=exact, hops=hops, root=self.root
            ):
                self.broken += 1
        if breaks_after is not None:
            message = f"the connection broke after {breaks_after} of {len(pairs)} pairs"
            raise LeaseError(message)

    def wrong(self, live: Live) -> list[tuple[int, str]]:
        self.drain()
        _, end = self.ledger.final_range(live.name)
        classes, hops = [0] * end, [0] * end
        for start, stop, kind, count in self.ledger.labels(live.name).tolist():
            if kind or count:
                classes[start:stop] = [kind] * (stop - start)
                hops[start:stop] = [count] * (stop - start)
        slots = self.pool.slots(self.ledger.blocks(live.name).tolist())
        return wrong_slots(self.pool, slots, live.ids, live.canon, classes, hops, root=self.root)

    def leaks(self) -> list[str]:
        """What is left without requests: pins, condemned blocks, blocks without an owner."""
        self.allocator.free(self.index.take_freed())
        stats = self.index.stats()
        total = self.allocator.num_free + stats.indexed
        found = []
        if stats.pinned or stats.condemned:
            found.append(f"{stats.pinned} pinned, {stats.condemned} condemned")
        if total != self.num_blocks:
            found.append(f"free + indexed is {total}, of {self.num_blocks}")
        if len(self.ledger):
            found.append(f"{len(self.ledger)} requests in the ledger")
        self.index.check()
        return found
