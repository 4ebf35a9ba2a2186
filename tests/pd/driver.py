"""Random conversations between a prefill and a decode engine, with faults, every label checked.

An `Episode` is a pair of small engines and some conversations, from empty pools to drained ones.
Its seed determines it. A wrong label raises `WrongError`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tests.pd import faults
from tests.pd.leases import LeaseError
from tests.pd.serving import Envelope, Live, ServingEngine
from tests.truth.check import APPROXIMATE, EXACT

import kvtrie

KEYS = (b"the deployment's secret", b"another deployment's secret")
SPACES = tuple(
    kvtrie.Namespace(model="model@1", kv_dtype=dtype, rope="none", salt=salt)
    for dtype, salt in (("bfloat16", "tenant-a"), ("fp8", "tenant-a"), ("bfloat16", "tenant-b"))
)
REASONS = frozenset(("malformed", "version", "limits", "namespace", "digest", "groups"))
BLOCK_SIZES = (2, 3, 4, 4, 8)

Counts = collections.Counter[str]
Planner = Callable[..., kvtrie.TransferPlan]


class WrongError(Exception):
    """A slot with a wrong label, or something that was not freed."""


def check_grade(
    manifest: kvtrie.TransferManifest, transfer: kvtrie.TransferPlan, policy: kvtrie.ReusePolicy
) -> int:
    """How many pairs load what the sender has as approximate: built under a policy as strict."""
    runs = [run for run in manifest.runs if run.class_ == APPROXIMATE]
    sent = {(run.group, block) for run in runs for block in run.blocks.tolist()}
    count = sum((group, remote) in sent for group, remote, *_ in transfer.pairs.tolist())
    lax = kvtrie.ReusePolicy(max_hops=255, scope="namespace")
    if count and not (manifest.policy or lax).is_at_least_as_strict_as(policy):
        raise WrongError(f"{count} blocks of {manifest.policy} are loaded under {policy}")
    return count


@dataclass
class Conversation:
    """Messages, and what the engines sent about them.

    Attributes:
        messages: Kinds and tokens, in order.
        returned: What the decode engine returned last, for the next turn.
        envelopes: All that was ever sent about it.
    """

    messages: list[tuple[str, list[int]]] = field(default_factory=list)
    returned: Envelope | None = None
    envelopes: list[Envelope] = field(default_factory=list)

    def ids(self) -> list[int]:
        return [token for _, tokens in self.messages for token in tokens]


class Episode:
    def __init__(self, rng: Random, planner: Planner | None = None) -> None:
        self.rng = rng
        self.planner = planner or kvtrie.plan_transfer
        self.counts: Counts = collections.Counter()
        size = rng.choice(BLOCK_SIZES)
        sizes = (size, size if rng.random() < 0.5 else rng.choice(BLOCK_SIZES))
        self.prefill, self.decode = (
            ServingEngine(
                name,
                rng,
                block_size=block_size,
                num_blocks=rng.choice((400, 800, 1600)) // block_size,
                namespace=SPACES[0],
                depth=rng.choice((0, 0, 1, 2)),
            )
            for name, block_size in zip("PD", sizes, strict=True)
        )
        self.phrases = [[rng.randrange(40) for _ in range(rng.randrange(3, 24))] for _ in range(6)]
        self.conversations = [Conversation() for _ in range(rng.randrange(1, 4))]
        self.longest = rng.choice((60, 150, 150))
        self.usual: list[kvtrie.ReusePolicy] = []
        self.names = 0
        self.background: dict[str, list[Live]] = {"P": [], "D": []}

    def text(self) -> list[int]:
        rng = self.rng
        out: list[int] = []
        for _ in range(rng.choice((1, 1, 2, 3))):
            if rng.random() < 0.6:
                out += rng.choice(self.phrases)
            else:
                out += [rng.randrange(5000) for _ in range(rng.randrange(1, 20))]
        return out

    def edit(self, talk: Conversation) -> None:
        """What clients and templates do to a history: strip reasoning, compact, change a token."""
        rng, messages = self.rng, talk.messages
        if rng.random() < 0.7:
            for engine in (self.prefill, self.decode):
                if rng.random() < 0.3:
                    self.strip(engine, messages)
            messages[:] = [message for message in messages if message[0] != "reasoning"]
        kind = rng.random()
        if messages and kind < 0.08:
            at = rng.randrange(len(messages))
            del messages[at : at + rng.randrange(1, 3)]
            messages.insert(at, ("summary", self.text()[:8]))
        elif messages and kind < 0.15:
            _, tokens = rng.choice(messages)
            if tokens:
                tokens[rng.randrange(len(tokens))] = rng.randrange(5000)
        elif len(messages) > 2 and kind < 0.18:
            rng.shuffle(messages)
        if len(talk.ids()) > self.longest:
            messages.clear()
        messages.append(("user", self.text()))

    def strip(self, engine: ServingEngine, messages: list[tuple[str, list[int]]]) -> None:
        ids = [token for _, tokens in messages for token in tokens]
        at = 0
        for kind, tokens in messages:
            if kind == "reasoning":
                engine.strip(ids, at, at + len(tokens), remove=self.rng.random() < 0.5)
            at += len(tokens)

    def policy(self) -> kvtrie.ReusePolicy:
        """Often one of a few: then a receiver may load what a sender has as approximate."""
        rng = self.rng
        if rng.random() < 0.4:
            return kvtrie.EXACT_ONLY
        if len(self.usual) == 2 and rng.random() < 0.6:
            return rng.choice(self.usual)
        self.usual = [*self.usual[-1:], self.approximate_policy()]
        return self.usual[-1]

    def approximate_policy(self) -> kvtrie.ReusePolicy:
        rng = self.rng
        return kvtrie.ReusePolicy(
            approximate=True,
            min_run=rng.choice((None, 8, 8, 12)),
            max_hops=rng.choice((1, 1, 2, 3)),
            max_approximate_share=rng.choice((1.0, 1.0, 0.5)),
            recompute_first=rng.choice((0, 0, 1, 5)),
            recompute_last=rng.choice((0, 0, 1, 5)),
        )

    def turn(self) -> None:
        rng = self.rng
        talk = rng.choice(self.conversations)
        self.edit(talk)
        prompt = talk.ids()
        first = rng.randrange(5000)
        sent = self.serve_prefill(talk, prompt, first)
        ids = [*prompt, first] if rng.random() < 0.5 else prompt
        future = self.text() if ids is not prompt else [first, *self.text()]
        cut = rng.randrange(len(future) + 1)
        for _ in range(2 if rng.random() < 0.05 else 1):
            self.serve_decode(talk, ids, future, sent)
        if sent is not None and rng.random() < 0.97:
            self.prefill.end_lease(sent.lease)
        answer = [*ids[len(prompt) :], *future]
        talk.messages += [("reasoning", answer[:cut]), ("answer", answer[cut:])]
        self.counts["turns"] += 1

    def serve_prefill(self, talk: Conversation, prompt: list[int], first: int) -> Envelope | None:
        rng, engine = self.rng, self.prefill
        live = self.admit(engine, prompt, talk.returned, talk)
        if talk.returned is not None and rng.random() < 0.9:
            talk.returned.sender.end_lease(talk.returned.lease)
            talk.returned = None
        if live is None:
            return None
        live.future = [first]
        live = self.run(engine, live, rng.randrange(4) if rng.random() < 0.08 else None)
        if live.name not in engine.live:
            return None
        sent = engine.export(live, KEYS[0])
        talk.envelopes.append(sent)
        return sent

    def serve_decode(
        self, talk: Conversation, ids: list[int], future: list[int], sent: Envelope | None
    ) -> None:
        rng, engine = self.rng, self.decode
        live = self.admit(engine, ids, sent, talk)
        if live is None:
            return
        live.future = future[::-1]
        live.num_drafts = rng.choice((0, 0, 1, 3))
        live.guess = rng.choice((0.2, 0.8, 1.0))
        # Sometimes it is asked for its KV while drafts are in flight.
        stop = rng.randrange(15) if rng.random() < 0.15 else None
        live = self.run(engine, live, stop)
        if live.name not in engine.live:
            return
        if stop is not None or rng.random() < 0.7:
            if talk.returned is not None:
                engine.end_lease(talk.returned.lease)
            talk.returned = engine.export(live, KEYS[0])
            talk.envelopes.append(talk.returned)
        else:
            engine.finish(live)

    def admit(
        self, engine: ServingEngine, ids: list[int], sent: Envelope | None, talk: Conversation
    ) -> Live | None:
        rng = self.rng
        keep_last = rng.choice((1, 1, 1, 2, 6))
        self.names += 1
        fault = rng.choice(faults.FAULTS) if sent is not None and rng.random() < 0.4 else ""
        if fault == "dropped":
            sent = None
        if fault == "stale":
            sent = rng.choice(talk.envelopes) if talk.envelopes else None
        if fault == "reordered":
            others = [envelope for other in self.conversations for envelope in other.envelopes[-2:]]
            sent = rng.choice(others) if others else None
        if sent is not None and sent.sender is engine:
            sent = None
        local = kvtrie.EXACT_ONLY if sent is not None else self.policy()
        try:
            live, plan = engine.prepare(self.names, ids, local, keep_last)
        except kvtrie.OutOfBlocksError:
            self.counts["out of blocks"] += 1
            self.relieve(engine)
            return None
        try:
            self.begin(engine, live, plan, sent, fault, keep_last)
        except BaseException:
            if live.name not in engine.live:
                plan.release()
            raise
        self.look(engine, live, "begin")
        return live

    def begin(
        self,
        engine: ServingEngine,
        live: Live,
        plan: kvtrie.ReusePlan,
        sent: Envelope | None,
        fault: str,
        keep_last: int,
    ) -> None:
        transfer = None
        if sent is not None:
            self.counts["transfers"] += 1
            if fault:
                self.counts[f"fault: {fault}"] += 1
            for again in (fault == "duplicated", False):
                broken = self.counts["connection broke"]
                transfer = self.plan(engine, live, plan, sent, fault, keep_last)
                retry = self.counts["connection broke"] > broken and self.rng.random() < 0.5
                self.counts["retries"] += retry
                if not (again or retry):
                    break
        if transfer is None:
            engine.begin(live, plan)
        else:
            self.begin_loaded(engine, live, plan, transfer)

    def plan(
        self,
        engine: ServingEngine,
        live: Live,
        plan: kvtrie.ReusePlan,
        sent: Envelope,
        fault: str,
        keep_last: int,
    ) -> kvtrie.TransferPlan | None:
        rng = self.rng
        raw, key, seq = sent.raw, KEYS[0], live.seq
        if fault == "truncated":
            raw = faults.truncated(raw, rng)
        elif fault == "mutated":
            raw = faults.mutated(raw, rng)
        elif fault == "key":
            key = KEYS[1]
        elif fault == "namespace":
            seq = kvtrie.TokenSequence(live.ids, rng.choice(SPACES[1:]))
        cached = int(plan.gaps[0][0]) if len(plan.gaps) else len(live.ids)
        policy = self.policy()
        try:
            manifest = kvtrie.TransferManifest.from_bytes(raw)
            transfer = self.planner(
                manifest,
                seq,
                live.table,
                cached=(0, cached),
                key=key,
                policy=policy,
                block_size=engine.block_size,
                keep_last=keep_last,
            )
        except kvtrie.TransferRefused as refusal:
            if refusal.reason not in REASONS or not str(refusal):
                raise WrongError(f"a refusal without a reason: {refusal!r}") from refusal
            self.counts[f"refused: {refusal.reason}"] += 1
            return None
        if fault in ("truncated", "key", "namespace"):
            raise WrongError(f"accepted in spite of: {fault}")
        if fault == "mutated" and raw != sent.raw:
            # A run that is missing as a whole is not detected here; every label is checked.
            self.counts["changed and accepted"] += 1
        self.check_plan(engine, live, sent, transfer, min(cached, len(live.ids) - keep_last))
        self.check_policy(live, transfer, policy)
        self.counts["approximate blocks sent on"] += check_grade(manifest, transfer, policy)
        breaks = rng.randrange(len(transfer.pairs) + 1) if rng.random() < 0.03 else None
        try:
            engine.load(live, sent, transfer, breaks_after=breaks)
        except LeaseError:
            self.counts["lease ended" if breaks is None else "connection broke"] += 1
            return None
        moved = sum(int(pair["end"] - pair["start"]) for pair in transfer.pairs if pair["class"])
        loaded = sum(int(pair["end"] - pair["start"]) for pair in transfer.pairs)
        self.counts["tokens loaded exact"] += loaded - moved
        self.counts["tokens loaded approximate"] += moved
        self.counts["tokens to compute"] += int(
            sum(end - start for start, end in transfer.compute.tolist())
        )
        self.counts["transfers that loaded"] += loaded > 0
        return transfer

    def check_plan(
        self,
        engine: ServingEngine,
        live: Live,
        sent: Envelope,
        transfer: kvtrie.TransferPlan,
        cached: int,
    ) -> None:
        """Pairs are inside blocks; with what is cached and computed they cover the prompt once."""
        theirs, mine, length = sent.sender.block_size, engine.block_size, len(live.ids)
        covered = [(start, end) for start, end in transfer.compute.tolist()]
        if length and (not covered or covered[-1][1] != length):
            raise WrongError(f"the last of {length} tokens is not computed: {covered}")
        for _, _, local, start, end, delta, _, _ in transfer.pairs.tolist():
            last = end - 1
            if (start - delta) // theirs != (
                last - delta
            ) // theirs or start // mine != last // mine:
                raise WrongError(f"a pair crosses blocks: {start}..{end}, delta {delta}")
            if local != live.table[start // mine]:
                raise WrongError(f"position {start} is in {live.table[start // mine]}, not {local}")
            covered.append((start, end))
        at = max(0, cached)
        for start, end in sorted(covered):
            if start != at:
                raise WrongError(f"{at}..{start} is covered by none, or twice: {sorted(covered)}")
            at = end

    def check_policy(
        self, live: Live, transfer: kvtrie.TransferPlan, policy: kvtrie.ReusePolicy
    ) -> None:
        moved = [
            (end - start, hops)
            for _, _, _, start, end, _, kind, hops in transfer.pairs.tolist()
            if kind != EXACT
        ]
        share = sum(count for count, _ in moved)
        if moved and not policy.approximate:
            raise WrongError(f"{share} approximate tokens under EXACT_ONLY")
        if share > policy.max_approximate_share * len(live.ids):
            raise WrongError(f"{share} approximate tokens of {len(live.ids)}: {policy}")
        if any(hops > policy.max_hops for _, hops in moved):
            raise WrongError(f"too many hops: {policy}")

    def begin_loaded(
        self,
        engine: ServingEngine,
        live: Live,
        plan: kvtrie.ReusePlan,
        transfer: kvtrie.TransferPlan,
    ) -> None:
        """Begin after a load: as imported, or, where all is exact, as if computed here."""
        compute, gaps = transfer.compute.tolist(), plan.gaps.tolist()
        exact = not any(pair["class"] for pair in transfer.pairs)
        if exact and len(compute) == 1 and len(gaps) == 1 and self.rng.random() < 0.5:
            engine.begin_computed(live, plan, compute[0][0])
            self.counts["begun as computed"] += 1
        else:
            engine.begin_imported(live, plan, transfer)
            self.counts["begun as imported"] += 1

    def run(self, engine: ServingEngine, live: Live, stop: int | None = None) -> Live:
        """Step until a request has nothing left to do, while things happen to it.

        With `stop`, it stays as it is after so many steps, with what is in flight.
        """
        rng = self.rng
        self.join(engine)
        while live.to_compute or live.future:
            others = [other.name for other in self.background[engine.name]]
            starved = live.name in engine.step([live.name, *others])
            self.leave(engine)
            if stop is not None:
                if not stop:
                    self.counts["exported in flight"] += 1
                    return live
                stop -= 1
            happens = rng.random()
            if starved or happens < 0.015:
                self.counts["preemptions"] += 1
                wait = rng.random() < 0.5
                self.counts["preemptions in flight"] += bool(live.in_flight and not wait)
                live = engine.preempt(
                    live, drop_blocks=bool(starved) or rng.random() < 0.7, wait=wait
                )
                self.look(engine, live, "preemption")
                if starved:
                    self.relieve(engine)
                    engine.drain()
                    if not engine.grow(live, len(live.ids) + 8):
                        self.abort(engine, live)
                        return live
            elif happens < 0.02:
                self.abort(engine, live)
                return live
            elif happens < 0.07:
                engine.commit(live)
                self.counts["commits"] += 1
            elif happens < 0.12:
                self.look(engine, live, "step")
            elif happens < 0.14:
                self.contradict(engine, live)
        engine.settle(live)
        self.look(engine, live, "end")
        _, verified = engine.ledger.final_range(live.name)
        if verified != min(live.done, len(live.ids)):
            raise WrongError(f"{verified} verified, {live.done} computed, of {len(live.ids)}")
        return live

    def contradict(self, engine: ServingEngine, live: Live) -> None:
        ledger, name = engine.ledger, live.name
        verified, issued = ledger.lookahead(name)
        committed, _ = ledger.new_range(name)
        room = len(live.table) * engine.block_size
        end = len(live.seq)
        calls: list[Callable[[], object]] = [
            lambda: ledger.confirm(name, issued + 1),
            lambda: ledger.confirm(name, verified - 1),
            lambda: ledger.rollback(name, issued + 1),
            lambda: ledger.rollback(name, committed - 1),
            lambda: ledger.schedule(name, room - issued + 1),
            lambda: ledger.schedule(name, 1, num_drafts=2),
            lambda: ledger.append(name, [1, -1, 2]),
            lambda: ledger.append(name, [2**32]),
            lambda: ledger.blocks_for(name, 0, verified + 1),
            lambda: ledger.add_blocks(name, live.table[-1:]),
            lambda: ledger.begin(name, kvtrie.TokenSequence([1], engine.namespace), []),
            lambda: ledger.begin(-1, live.seq, live.table),
            lambda: ledger.step([name, name], [0, 0], [issued] * 2, [], [0, 0, 0]),
            lambda: ledger.step([name], [room], [issued], [5], [0, 1]),
            lambda: ledger.step([name, -1], [0, 0], [issued, 0], [5], [0, 1, 1]),
            lambda: live.seq.extend([1]),
            lambda: live.seq.truncate(max(0, end - 1)),
        ]
        before = self.state(engine, live)
        try:
            self.rng.choice(calls)()
        except (ValueError, kvtrie.KvTrieError):
            self.counts["contradictions"] += 1
        else:
            raise WrongError(f"a contradiction was taken: {before}")
        if self.state(engine, live) != before:
            raise WrongError(f"an error changed {before} to {self.state(engine, live)}")

    def state(self, engine: ServingEngine, live: Live) -> tuple[object, ...]:
        ledger, name = engine.ledger, live.name
        return (
            len(live.seq),
            ledger.new_range(name),
            ledger.lookahead(name),
            ledger.missing(name).tolist(),
            ledger.blocks(name).tolist(),
            ledger.labels(name).tolist(),
            len(ledger),
        )

    def join(self, engine: ServingEngine) -> None:
        rng = self.rng
        others = self.background[engine.name]
        if len(others) > 2 or rng.random() > 0.2:
            return
        talk = rng.choice(self.conversations)
        live = self.admit(engine, [*talk.ids(), *self.text()], None, talk)
        if live is not None:
            live.future = self.text()
            live.num_drafts = rng.choice((0, 2))
            live.guess = 0.5
            others.append(live)
            self.counts["next to another"] += 1

    def leave(self, engine: ServingEngine) -> None:
        others = self.background[engine.name]
        for live in list(others):
            if not (live.to_compute or live.future):
                engine.settle(live)
                self.look(engine, live, "end next to another")
                engine.finish(live)
                others.remove(live)

    def abort(self, engine: ServingEngine, live: Live) -> None:
        self.counts["aborts"] += 1
        if self.rng.random() < 0.5:
            engine.finish(live, wait=self.rng.random() < 0.5)
        else:
            engine.forget(live)

    def relieve(self, engine: ServingEngine) -> None:
        for number in list(engine.leases.requests):
            engine.end_lease(number)
        for live in self.background[engine.name]:
            self.abort(engine, live)
        self.background[engine.name].clear()
        self.counts["leases ended early"] += 1

    def look(self, engine: ServingEngine, live: Live, when: str) -> None:
        wrong = engine.wrong(live)
        self.counts["looks"] += 1
        if wrong or engine.broken:
            raise WrongError(
                f"{engine.name} {when}: {len(wrong)} wrong, {engine.broken} broken: {wrong[:5]}"
            )

    def finish(self) -> Counts:
        for engine in (self.prefill, self.decode):
            for number in list(engine.leases.requests):
                engine.end_lease(number)
            for live in list(engine.live.values()):
                engine.finish(live)
            engine.drain()
            leaks = engine.leaks()
            if leaks:
                raise WrongError(f"{engine.name}: {'; '.join(leaks)}")
            for talk in self.conversations:
                self.look_up(engine, talk.ids())
        self.counts["episodes"] += 1
        return self.counts

    def look_up(self, engine: ServingEngine, ids: list[int]) -> None:
        match = engine.index.lookup(kvtrie.TokenSequence(ids, engine.namespace))
        slots = engine.pool.slots(match.blocks.tolist())
        end = match.num_tokens
        if [engine.pool.context[slot] for slot in slots[:end]] != engine.chain(ids)[:end]:
            raise WrongError(f"{engine.name}: the index calls exact what is not")


def play(seed: int, turns: int, planner: Planner | None = None) -> Counts:
    episode = Episode(Random(seed), planner)
    try:
        for _ in range(turns):
            episode.turn()
        return episode.finish()
    except Exception as error:
        error.add_note(f"tests.pd.driver.play({seed}, {turns})")
        for engine in (episode.prefill, episode.decode):
            for live in list(engine.live.values()):
                engine.forget(live)
        raise
