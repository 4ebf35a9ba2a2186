"""An index and the model of it, given the same calls, every result compared.

`Twin` drives `kvtrie.RadixIndex`, a second one with the same seed (the mirror) and
`kvtrie.testing.model.ModelIndex`. A `random.Random`, or hypothesis's `randoms()`, chooses the
calls.
"""

from __future__ import annotations

import collections
import gc
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np

import kvtrie
from kvtrie.testing.model import ModelIndex, ModelPlan, ModelSequence
from kvtrie.testing.strategies import DIGESTS, KINDS, NAMESPACES, POSITIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random


STATS = (
    "indexed",
    "condemned",
    "waiting",
    "quarantined",
    "pinned",
    "evictable",
    "approximate",
    "dead",
    "holes",
    "live_plans",
    "clock",
    "unknown_discards",
    "plans_without_scope",
)
REFUSED = (kvtrie.KvTrieError, TypeError, ValueError)
SCOPES: Final[tuple[Literal["namespace"], Literal["conversation"]]] = ("namespace", "conversation")
MAX_SEQUENCES = 10
MAX_PLANS = 6
MIN_RUN = 8
MANY_CANDIDATES = 1 << 20
"""More places than a window of a small index has: no candidate is dropped."""


class MismatchError(AssertionError):
    """The index and the model gave different results."""


class DroppedError(Exception):
    """The index did not try all places: from here on it need not agree with the model."""


def lacks_tokens(items: Sequence[kvtrie.Item]) -> bool:
    """Whether the last item was cut, and says how many positions it takes: nothing follows it."""
    return bool(items) and (items[-1].num_tokens or 0) > items[-1].end - items[-1].start


@dataclass
class Pair:
    """A live sequence, extended and truncated in place, on both sides."""

    real: kvtrie.TokenSequence
    mirror: kvtrie.TokenSequence
    model: ModelSequence

    @classmethod
    def of(cls, model: ModelSequence, *, shared: bool = True, form: Any = list) -> Pair:
        ids = [int(token) for token in model[0 : len(model)]]
        given = np.array(ids, dtype=np.int64) if form is np.array else form(ids)
        real = kvtrie.TokenSequence(given, model.namespace, items=model.items)
        other = kvtrie.TokenSequence(given, model.namespace, items=model.items)
        return cls(real, real if shared else other, model)

    def each(self) -> list[Any]:
        shared = self.mirror is self.real
        return [self.real, self.model] if shared else [self.real, self.mirror, self.model]

    def fresh(self) -> kvtrie.TokenSequence:
        return Pair.of(self.model).real


@dataclass
class Plans:
    """One plan on all sides, and the sequence it was made for."""

    real: kvtrie.ReusePlan
    mirror: kvtrie.ReusePlan | None
    model: ModelPlan
    pair: Pair
    used: bool = False
    moves: bool = False


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        names = value.dtype.names
        kind = value.dtype.str if names is None else str(names)
        return (kind, value.shape, value.tolist())
    if isinstance(value, tuple):
        return [tuple(getattr(run, name) for name in MOVED_RUN) for run in value]
    if isinstance(value, dict):
        return {name: pick(own, IN_GROUP) for name, own in value.items()}
    return value


class Explained:
    """What an explanation says that the model has, too."""

    def __init__(self, found: Any) -> None:
        save = found.would_save
        self.cut_by, self.out_of_scope = found.cut_by, save.out_of_scope
        saved = [save.exact, save.approximate, save.compute, save.out_of_scope]
        self.said = [found.num_exact, found.num_tokens, found.block_size, saved, found.cut_by]


MOVED_RUN = (
    *("start", "end", "old_start", "delta", "distance"),
    *("cuts", "lost_context", "new_context", "same_conversation"),
)


MATCH = ("num_tokens", "blocks")
REMOVED = ("freed", "kept", "condemned")
INSERTED = ("blocks", "num_exact", "duplicates", "surplus", "freed", "groups")
IN_GROUP = ("blocks", "duplicates", "surplus")
PLAN = (
    "blocks",
    "num_new_blocks",
    "num_exact",
    "num_approximate",
    "num_compute",
    "gaps",
    "segments",
    "moved_runs",
    "source_blocks",
    "candidates_dropped",
    "released",
    "pinned",
    "moved_end",
)


def pick(result: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: _plain(getattr(result, name)) for name in names}


def _restored(index: kvtrie.RadixIndex) -> kvtrie.RadixIndex:
    return kvtrie.RadixIndex.restore(index.snapshot(), pool_id=index.pool_id)


class Twin:
    """The index under test, its mirror and the model, with the blocks that the caller holds."""

    def __init__(
        self,
        rng: Random,
        *,
        num_blocks: int,
        block_size: int,
        hash_bits: int = 64,
        seed: int = 0,
        mirror: bool = True,
        alphabet: int = 2,
        max_tokens: int = 24,
        holes: float = 0.2,
        min_run: int = MIN_RUN,
        moved_runs: bool = True,
        max_candidates: int = MANY_CANDIDATES,
        long: bool = False,
        plan_weight: int = 1,
        groups: Sequence[kvtrie.Group] = (),
    ) -> None:
        self.rng = rng
        self.long = long
        self.plan_weight = plan_weight
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.alphabet = alphabet
        self.max_tokens = max_tokens
        self.holes = holes
        self.min_run = min_run
        self.real, twin = (
            kvtrie.RadixIndex(
                num_blocks,
                block_size,
                min_run=min_run,
                max_candidates=max_candidates,
                moved_runs=moved_runs,
                seed=seed,
                hash_bits=hash_bits,
                groups=groups,
            )
            for _ in range(2)
        )
        self.mirror = twin if mirror else None
        self.model = ModelIndex(
            num_blocks, block_size, min_run=min_run, moved_runs=moved_runs, groups=groups
        )
        self.held = set(range(num_blocks))
        self.pairs: list[Pair] = []
        self.usual: list[kvtrie.ReusePolicy] = []
        self.plans: list[Plans] = []
        self.stale: list[Plans] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.log: list[str] = []

    def fail(self, what: str, real: object, model: object) -> None:
        recent = "\n  ".join(self.log[-12:])
        message = f"{what}:\n  index {real}\n  model {model}\nafter\n  {recent}"
        raise MismatchError(message)

    def same(self, what: str, real: object, model: object) -> None:
        if real != model:
            self.fail(what, real, model)

    def both(
        self, what: str, call: Callable[[Any, str], Any], names: Sequence[str] | None
    ) -> tuple[Any, Any, Any] | None:
        """Make a call on all sides; the results, or None where it was refused on all."""
        self.log.append(what)
        self.counts["calls"] += 1
        before = self.real.digest()
        stats = self.stats(self.real)
        indexed = {entry.block for entry in self.model._entries.values()}
        real, real_error = _try(call, self.real, "real")
        model, model_error = _try(call, self.model, "model")
        self.same(f"{what} raised", real_error, model_error)
        mirror = None
        if self.mirror is not None:
            mirror, mirror_error = _try(call, self.mirror, "mirror")
            self.same(f"{what} raised on the mirror", mirror_error, real_error)
        if real_error is not None:
            self.counts["errors"] += 1
            self.counts[f"error {real_error}"] += 1
            self.same(f"digest after refused {what}", self.real.digest(), before)
            self.same(f"stats after refused {what}", self.stats(self.real), stats)
            return None
        self.stop_if_dropped(real, mirror, model)
        self.counts["left by the bound on holes"] += len(indexed & set(self.model._waiting))
        if names is None:
            self.same(what, _plain(real), _plain(model))
        else:
            self.same(what, pick(real, names), pick(model, names))
        return real, mirror, model

    def stop_if_dropped(self, real: Any, *others: Any) -> None:
        """Release what was planned and stop, if the index did not try all places."""
        made, *more = (getattr(side, "plans", [side]) for side in (real, *others))
        if not any(getattr(plan, "candidates_dropped", 0) for plan in made):
            return
        for plan in [*made, *(plan for side in more for plan in side)]:
            if plan is not None:
                plan.release()
        raise DroppedError

    def stats(self, index: Any) -> dict[str, int]:
        stats = index.stats()
        return {name: getattr(stats, name) for name in STATS}

    def verify(self) -> None:
        stats = self.stats(self.real)
        self.same("stats", stats, self.stats(self.model))
        self.same("num_evictable", self.real.num_evictable, self.model.num_evictable)
        self.same("num_evictable of stats", self.real.num_evictable, stats["evictable"])
        self.same("num_approximate", self.real.num_approximate, stats["approximate"])
        self.real.check()
        if self.mirror is not None:
            self.same("digest of the mirror", self.real.digest(), self.mirror.digest())
        owned = sum(stats[name] for name in ("indexed", "condemned", "quarantined"))
        self.same("quarantined", _plain(self.real.quarantined), _plain(self.model.quarantined))
        self.same("conservation", len(self.held) + owned, self.num_blocks)

    def give(self, what: str, ids: Any) -> None:
        got = [int(block) for block in ids]
        self.same(f"{what} hands out what is held", self.held & set(got), set())
        self.same(f"{what} hands out an id twice", len(set(got)), len(got))
        self.held |= set(got)

    def ids_of(self, name: str, *args: Any) -> Any:
        """Make a call that hands out blocks; their ids, none where it was refused."""
        got = self.both(f"{name}{args}", lambda index, _: getattr(index, name)(*args), None)
        if got is None:
            return []
        self.give(name, got[0])
        return got[0]

    def order(self, key: Any) -> int:
        return self.model._entries[key].block

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def tokens(self, most: int) -> list[int]:
        count = self.rng.randint(most // 2 if self.long else 0, most)
        if self.chance(0.02 if self.long else 0.2):
            return [self.rng.randrange(self.alphabet)] * count
        ids = [self.rng.randrange(self.alphabet) for _ in range(count)]
        return [2**32 - 1 if self.alphabet == token + 1 else token for token in ids]

    def items(self, start: int, end: int) -> list[kvtrie.Item]:
        if start >= end or not self.chance(0.05 if self.long else 0.15):
            return []
        first = self.rng.randint(start, end - 1)
        last = self.rng.randint(first + 1, end)
        takes = self.rng.choice(POSITIONS)
        return [kvtrie.Item(first, last, self.rng.choice(DIGESTS), positions=takes)]

    def pair(self) -> Pair:
        if not self.pairs:
            self.new_sequence()
        return self.rng.choice(self.pairs)

    def seq(self, pair: Pair, side: str, *, fresh: bool) -> Any:
        if side == "model":
            return pair.model
        return pair.fresh() if fresh else getattr(pair, side)

    def spans(self, length: int) -> list[kvtrie.Span]:
        found = []
        for _ in range(self.rng.randint(0, 2)):
            start = self.rng.randint(0, length)
            end = self.rng.randint(start, length)
            end += length - end + 1 if self.chance(0.02) else 0
            kinds = KINDS if start < end else ("user", "answer")
            found.append(kvtrie.Span(start, end, self.rng.choice(kinds)))
        return found

    def start(self, length: int) -> int:
        if self.chance(0.6):
            return 0
        if self.chance(0.03):
            return self.rng.randint(-1, length + self.block_size)
        return self.rng.randint(0, length // self.block_size) * self.block_size

    def block_for(self, pair: Pair, position: int, used: set[int]) -> int | None:
        """An id to offer at a place: what is there, a held one, rarely a wrong one, or None."""
        model = self.model
        path = model._path(pair.model.namespace, pair.model.tokens)
        entry = model._entries.get(path[position]) if position < len(path) else None
        roll = self.rng.random()
        if entry is not None and roll < 0.6:
            return entry.block
        owned = model._out_of_reach()
        if owned and roll > 0.95:
            return self.rng.choice(sorted(owned))
        if roll > 0.997 and model._entries:
            return self.rng.choice(sorted(other.block for other in model._entries.values()))
        if roll > 0.994 and used:
            return self.rng.choice(sorted(used))
        free = sorted(self.held - used)
        if free:
            return self.rng.choice(free)
        return None if entry is None else entry.block

    def offer(self, pair: Pair, source: Plans | object) -> tuple[int, int, list[int]]:
        length, size = len(pair.model), self.block_size
        if len(self.held) * size < length and self.chance(0.5):
            self.evict()
        computed = length if self.chance(0.7) else self.rng.randint(0, length)
        if self.chance(0.01):
            computed = self.rng.choice([-1, length + 1])
        start = self.start(length)
        if isinstance(source, Plans) and self.chance(0.3):
            start = min(len(source.model._in_place) * size, length // size * size)
        first = max(0, start) // size
        count = max(0, computed // size - first)
        if self.chance(0.3):
            count += self.rng.randint(1, 2)
        if self.chance(0.01):
            count = max(0, count - self.rng.randint(1, 2))
        used: set[int] = set()
        blocks: list[int] = []
        for position in range(first, first + count):
            block = self.block_for(pair, position, used)
            if block is None:
                computed = min(computed, position * size)
                break
            blocks.append(block)
            used.add(block)
        return computed, start, blocks

    def source(self) -> tuple[Plans | object, Pair]:
        roll = self.rng.random()
        if self.plans and roll < 0.5:
            plans = self.rng.choice(self.plans)
            return plans, (plans.pair if self.chance(0.99) else self.pair())
        if self.stale and roll > 0.995:
            plans = self.rng.choice(self.stale)
            return plans, plans.pair
        if roll < 0.75:
            return kvtrie.COMPUTED, self.pair()
        pair = self.pair()
        exact_until, hops = self.rng.randint(0, len(pair.model) + 1), self.rng.randint(0, 3)
        built = self.policy()
        policy = built if built.approximate and self.chance(0.5) else None
        return kvtrie.Imported(exact_until=exact_until, hops=hops, policy=policy), pair

    @staticmethod
    def source_of(source: Plans | object, side: str) -> Any:
        return getattr(source, side) if isinstance(source, Plans) else source

    def new_sequence(self) -> None:
        if len(self.pairs) >= MAX_SEQUENCES:
            self.pairs.pop(self.rng.randrange(len(self.pairs)))
        if self.pairs and self.chance(0.85):
            other = self.cached_pair().model
            ids = [int(token) for token in other[0 : len(other)]]
            namespace, items, at = other.namespace, list(other.items), len(ids)
            for _ in range(self.rng.choice([1, 1, 2, 3])):
                at = min(at, self.edit(ids))
            items = [item for item in items if item.end <= at]
            if self.chance(0.05):
                namespace = self.rng.choice(NAMESPACES)
        else:
            ids, items, namespace, at = self.tokens(self.max_tokens), [], NAMESPACES[0], 0
            if self.chance(0.2):
                namespace = self.rng.choice(NAMESPACES)
        ids = ids[: self.max_tokens]
        items = [item for item in items if item.end <= len(ids)]
        if lacks_tokens(items) and items[-1].end < len(ids):
            items.pop()
        items += self.items(min(at, len(ids)), len(ids))
        self.log.append(f"sequence {ids} {namespace.salt} {items}")
        form, shared = self.rng.choice([list, tuple, np.array]), self.chance(0.3)
        model = ModelSequence(ids, namespace, tuple(items))
        self.pairs.append(Pair.of(model, shared=shared, form=form))

    def cached_pair(self) -> Pair:
        entries = self.model._entries

        def cached(pair: Pair) -> int:
            path = self.model._path(pair.model.namespace, pair.model.tokens)
            return sum(key in entries for key in path)

        return max(self.rng.choices(self.pairs, k=3 if self.long else 1), key=cached)

    def edit(self, ids: list[int]) -> int:
        """Edit a history as clients do; the position of the first token that may differ."""
        at, end = sorted(self.rng.randint(0, len(ids)) for _ in range(2))
        kind = self.rng.choice(["replace", "replace", "delete", "paste", "move"])
        if kind == "replace":
            end = min(len(ids), at + self.rng.randint(0, 3))
            ids[at:end] = self.tokens(3)
        elif kind == "delete":
            del ids[at:end]
        elif kind == "paste":
            other = self.rng.choice(self.pairs).model
            first, last = sorted(self.rng.randint(0, len(other)) for _ in range(2))
            ids[at:at] = [int(token) for token in other[first:last]]
        else:
            # A part goes elsewhere, as documents that are put in another order.
            part = ids[at:end]
            del ids[at:end]
            to = self.rng.randint(0, len(ids))
            ids[to:to] = part
            at = min(at, to)
        return at

    def extend(self) -> None:
        pair = self.pair()
        length = len(pair.model)
        if length >= self.max_tokens or lacks_tokens(pair.model.items):
            self.new_sequence()
            return
        ids = self.tokens(min(self.max_tokens - length, 3 * self.block_size))
        items = self.items(length, length + len(ids))
        self.log.append(f"extend by {ids} {items}")
        for seq in pair.each():
            seq.extend(ids, items=tuple(items))
        self.same_sequence(pair)

    def truncate(self) -> None:
        pair = self.pair()
        n = self.rng.randint(0, len(pair.model))
        self.log.append(f"truncate to {n}")
        for seq in pair.each():
            seq.truncate(n)
        self.same_sequence(pair)

    def same_sequence(self, pair: Pair) -> None:
        real, model = pair.real, pair.model
        self.same("len(seq)", len(real), len(model))
        self.same("seq[:]", real[0 : len(real)].tolist(), model[0 : len(model)].tolist())
        self.same(
            "seq.items",
            [(item.start, item.end, item.digest) for item in real.items],
            [(item.start, item.end, item.digest) for item in model.items],
        )

    def lookup(self) -> None:
        pair, fresh = self.pair(), self.chance(0.5)
        args = self.lookup_args(pair)
        found = self.both(
            f"lookup({pair.model.tokens}, {args})",
            lambda index, side: index.lookup(self.seq(pair, side, fresh=fresh), **args),
            MATCH,
        )
        if found:
            self.counts["matched tokens"] += found[0].num_tokens
            self.counts["hits"] += found[0].num_tokens > 0

    def lookup_args(self, pair: Pair) -> dict[str, Any]:
        keep_last = self.rng.choice([0, 0, 1, 2, self.max_tokens + 1])
        return {
            "keep_last": -1 if self.chance(0.005) else keep_last,
            "touch": self.chance(0.7),
            "start": self.start(len(pair.model)),
        }

    def plan(self) -> None:
        if self.long and self.chance(0.6):
            self.new_sequence()
            pair = self.pairs[-1]
        else:
            pair = self.pair()
        fresh, pin = self.chance(0.3), self.chance(0.8)
        keep_last, policy = self.rng.choice([1, 1, 1, 0, 3]), self.policy()
        session, moved_end = self.session(), self.moved_end(len(pair.model))
        made = self.both(
            f"plan({pair.model.tokens}, keep_last={keep_last}, pin={pin}, {policy}, "
            f"session={session}, moved_end={moved_end})",
            lambda index, side: index.plan(
                self.seq(pair, side, fresh=fresh),
                policy,
                keep_last=keep_last,
                pin=pin,
                session=session,
                moved_end=moved_end,
            ),
            PLAN,
        )
        if made:
            plans = Plans(*made, pair)
            self.count_plan(plans, policy, session)
            self.add_plans(plans)
        while len(self.plans) > MAX_PLANS:
            self.release()

    def explain(self) -> None:
        """What a plan would reuse, and the group that cuts it; nothing changes."""
        pair = self.pair()
        policy = None if self.chance(0.3) else self.policy()
        args: dict[str, Any] = {
            "keep_last": -1 if self.chance(0.005) else self.rng.choice([1, 1, 0, 3]),
            "session": self.session(),
            "moved_end": self.moved_end(len(pair.model)),
        }
        before = self.real.digest()

        def explained(index: Any, side: str) -> Explained:
            return Explained(index.explain(self.seq(pair, side, fresh=False), policy, **args))

        what = f"explain({pair.model.tokens}, {policy}, {args})"
        try:
            made = self.both(what, explained, ("said",))
        except MismatchError:
            self.stop_if_not_all_tried(pair, policy, args)
            raise
        self.same(f"digest after {what}", self.real.digest(), before)
        if made:
            self.counts["explained"] += 1
            self.counts["explained, cut by a group"] += made[0].cut_by is not None
            self.counts["explained, out of scope"] += made[0].out_of_scope > 0

    def stop_if_not_all_tried(
        self, pair: Pair, policy: kvtrie.ReusePolicy | None, args: dict[str, Any]
    ) -> None:
        """Stop, if a plan of what was explained would not try all places."""
        asked = kvtrie.ReusePolicy() if policy is None else policy
        for scope in SCOPES:
            wanted = asked.replace(scope=scope)
            made = _try(
                lambda index, _: index.plan(pair.fresh(), wanted, pin=False, **args),  # noqa: B023
                self.real,
                "real",
            )[0]
            if made is not None:
                self.stop_if_dropped(made)
                made.release()

    def session(self) -> str | None:
        """None, one of a few conversations, or one of more than a block belongs to."""
        if self.chance(0.3):
            return None
        if self.chance(0.01):
            return self.rng.choice(["", "s" * 257])
        return f"session {self.rng.randrange(12 if self.chance(0.2) else 2)}"

    def moved_end(self, length: int) -> int | None:
        if self.chance(0.6):
            return None
        if self.chance(0.02):
            return self.rng.choice([-1, length + 1])
        return self.rng.randint(0, length)

    def policy(self) -> kvtrie.ReusePolicy:
        """Often one of a few, so that plans may use what others built."""
        if len(self.usual) < 3 or self.chance(0.4):
            self.usual = [*self.usual[-2:], self.any_policy()]
            return self.usual[-1]
        return self.rng.choice(self.usual)

    def any_policy(self) -> kvtrie.ReusePolicy:
        if self.chance(0.25):
            return kvtrie.ReusePolicy(approximate=False, partial_blocks=self.chance(0.7))
        choice = self.rng.choice
        if self.chance(0.5):
            return kvtrie.ReusePolicy(max_hops=choice([1, 2, 9]), scope=choice(SCOPES))
        min_run = choice([None] * 4 + [self.min_run + more for more in (0, 1, 4)])
        if self.min_run > MIN_RUN and self.chance(0.02):
            min_run = MIN_RUN
        return kvtrie.ReusePolicy(
            min_run=min_run,
            max_hops=choice([0, 1, 1, 1, 2, 3, 9]),
            max_approximate_share=choice([1.0] * 5 + [0.0, 0.25, 0.5]),
            recompute_first=choice([0, 0, 0, 1, 4]),
            recompute_last=choice([0, 0, 0, 1, 4]),
            forbid_kinds=choice([(), (), (), ("reasoning",), ("user", "mine"), ("unknown",)]),
            max_cuts=choice([None, None, None, 0, 1, 2]),
            max_lost_context=choice([1.0, 1.0, 1.0, 0.75, 0.25]),
            max_new_context=choice([1.0, 1.0, 1.0, 0.75, 0.25]),
            scope=choice(SCOPES),
            shared_prefix=choice([1, 1, 2, 3, 16]),
            recompute_share=choice([0.0, 0.0, 0.0, 0.15, 0.5, 1.0]),
            repair=choice(["fronts"] * 8 + ["ngrams", "probe", "adaptive"]),
            partial_blocks=self.chance(0.8),
        )

    def count_plan(self, plans: Plans, policy: kvtrie.ReusePolicy, session: str | None) -> None:
        model, segments = plans.model, plans.model.segments
        in_place = len(model.blocks) * self.block_size
        copied = segments[(segments["start"] >= in_place) & (segments["class"] != 2)]
        path = self.model._path(plans.pair.model.namespace, plans.pair.model.tokens)
        holes = self.model._holes()
        labels = {entry.block: entry.exact for entry in self.model._entries.values()}
        used = [*model.blocks.tolist(), *model.source_blocks.tolist()]
        self.counts.update(
            {
                "plans": 1,
                "plans >= 3 segments": len(segments) >= 3,
                "plans >= 5 segments": len(segments) >= 5,
                "plans, hole on the path": not holes.isdisjoint(path),
                "plans, hole in the index": bool(holes),
                "plans, approximate entries used": not all(map(labels.__getitem__, used)),
                "plans, approximate in place": 1 in segments["class"][segments["start"] < in_place],
                "plans, moved runs": 1 in copied["class"],
                "plans, exact after a gap": 0 in copied["class"][copied["start"] > in_place],
                "plans, more than one hop": bool((segments["hops"] > 1).any()),
                "plans, scope of a conversation": policy.approximate
                and policy.scope == "conversation",
                "plans, share computed": policy.approximate and policy.recompute_share > 0,
                "plans, session": session is not None,
                "plans, moved_end": model.moved_end is not None,
                "copies": len(model.source_blocks),
            }
        )
        plans.moves = 1 in copied["class"]

    def add_plans(self, plans: Plans) -> None:
        self.plans.append(plans)
        model = plans.model
        for _ in range(2):
            # Mostly a table of other blocks, sometimes one that would overwrite what is read.
            used = {*model.blocks.tolist(), *model.source_blocks.tolist()}
            other = [block for block in range(self.num_blocks) if block not in used]
            count = model.num_new_blocks + self.rng.choice([0, 0, 0, 1, -1])
            if len(other) < count or self.chance(0.1):
                other = [self.rng.randrange(self.num_blocks) for _ in range(max(1, count))]
            table = [*model.blocks.tolist(), *other[: max(0, count)]]
            args: list[int] = []
            if self.chance(0.5):
                args = [self.rng.randint(0, len(plans.pair.model)) for _ in range(2)]
                args = args if self.chance(0.1) else sorted(args)
            self.both(
                f"moves({table}, {args}) of {model}",
                lambda _, side: getattr(plans, side).moves(table, *args),  # noqa: B023
                None,
            )

    def recompute(self) -> None:
        """Compute tokens of moved runs, sometimes of anything else."""
        if not self.plans:
            return
        moved = [plans for plans in self.plans if plans.moves]
        plans = self.rng.choice(moved if moved and self.chance(0.8) else self.plans)
        in_place = len(plans.model._in_place) * self.block_size
        ranges = []
        for part in plans.model.segments:
            if part["class"] == 1 and part["start"] >= in_place and self.chance(0.7):
                ends = [self.rng.randint(int(part["start"]), int(part["end"])) for _ in range(2)]
                ranges.append((min(ends), max(ends)))
        if self.chance(0.2):
            ends = [self.rng.randint(0, len(plans.pair.model)) for _ in range(2)]
            ranges.append((ends[0], ends[1]))
        self.both(
            f"recompute({ranges}) of {plans.model}",
            lambda _, side: getattr(plans, side).recompute(ranges),
            None,
        )
        if not plans.model.released:
            for name in PLAN:
                real, model = pick(plans.real, [name]), pick(plans.model, [name])
                self.same(f"{name} after recompute({ranges})", real, model)
            again = plans.model._state.recomputed and bool(ranges)
            self.counts["plans, recomputed"] += again

    def insert(self) -> None:
        source, pair = self.source()
        computed, start, blocks = self.offer(pair, source)
        spans, fresh = self.spans(len(pair.model)) if self.chance(0.2) else [], self.chance(0.4)
        session, more = self.session(), self.more_to_insert(pair)
        done = self.both(
            f"insert({pair.model.tokens}, {blocks}, num_computed={computed}, start={start}, "
            f"source={source.model if isinstance(source, Plans) else source}, {spans}, {session}, "
            f"{more})",
            lambda index, side: index.insert(
                self.seq(pair, side, fresh=fresh),
                np.array(blocks, dtype=np.int32) if fresh else blocks,
                num_computed=computed,
                start=start,
                source=self.source_of(source, side),
                spans=spans,
                session=session,
                **more,
            ),
            INSERTED,
        )
        if done:
            if isinstance(source, Plans):
                source.used = True
            self.inserted(done[0])

    def more_to_insert(self, _pair: Pair) -> dict[str, Any]:
        """Further arguments of an insert."""
        return {}

    def hollow(self) -> None:
        """Fill up to three paths as deep as held ids allow and discard all of each but its end."""
        for _ in range(self.rng.randint(1, 3)):
            if self.chance(0.5):
                pair = self.pair()
            else:
                ids = [self.rng.randrange(self.alphabet) for _ in range(self.max_tokens)]
                pair = Pair.of(ModelSequence(ids, NAMESPACES[0]))
            self.hollow_path(pair)

    def hollow_path(self, pair: Pair) -> None:
        size = self.block_size
        blocks = sorted(self.held)[: len(pair.model) // size]
        done = self.both(
            f"insert({pair.model.tokens}, {blocks}) to be hollowed",
            lambda index, side: index.insert(
                self.seq(pair, side, fresh=False),
                blocks,
                num_computed=len(blocks) * size,
                source=kvtrie.COMPUTED,
            ),
            INSERTED,
        )
        if done:
            self.inserted(done[0])
            self.ids_of("discard", done[0].blocks[:-1])

    def inserted(self, done: Any) -> None:
        out = {*done.duplicates.tolist(), *done.surplus.tolist()}
        self.same("duplicates and surplus that are not held", out - self.held, set())
        taken = self.held & set(done.blocks.tolist())
        self.held -= taken
        self.give("freed", done.freed)
        self.counts["inserted blocks"] += len(taken)
        self.counts["duplicates"] += len(done.duplicates)
        self.counts["replaced"] += len(done.freed)

    def validate(self) -> None:
        for plans in [*self.plans, *self.stale]:
            valid = plans.real.validate().tolist()
            self.same(f"validate {plans.model}", valid, plans.model.validate().tolist())
            self.counts["segments found invalid"] += valid.count(False)

    def on_plan(self, plans: Plans, call: str) -> None:
        self.both(
            f"{call} of {plans.model}", lambda _, side: getattr(getattr(plans, side), call)(), None
        )

    def release_sources(self) -> None:
        known = self.stale if self.stale and self.chance(0.05) else self.plans
        if known:
            self.on_plan(self.rng.choice(known), "release_sources")

    def release(self) -> None:
        if self.stale and self.chance(0.05):
            self.on_plan(self.rng.choice(self.stale), "release")
        elif self.plans:
            plans = self.plans.pop(self.rng.randrange(len(self.plans)))
            self.counts["aborts"] += not plans.used
            self.on_plan(plans, "release")
            self.retire(plans)

    def retire(self, plans: Plans) -> None:
        self.stale = [*self.stale[-2:], plans]

    def collect(self) -> None:
        """Let a plan go out of scope unreleased: it releases itself and warns."""
        if not self.plans:
            return
        plans = self.plans.pop(self.rng.randrange(len(self.plans)))
        self.log.append(f"collect {plans.model}")
        self.counts["collected plans"] += 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wanted = 2 if plans.mirror is None else 3
            del plans
            if len(caught) < wanted:
                gc.collect()
        kinds = [warning.category for warning in caught]
        self.same("warnings", kinds, [ResourceWarning] * wanted)

    def take_freed(self) -> None:
        self.counts["taken freed"] += len(self.ids_of("take_freed"))

    def evict(self) -> None:
        n = self.rng.choice([0, 1, 1, 2, 3])
        if self.chance(0.05):
            n = self.rng.choice([-1, self.num_blocks])
        dead = self.model.stats().dead
        self.counts["evicted"] += len(self.ids_of("evict", n))
        self.counts["evicted dead"] += dead - self.model.stats().dead

    def discard(self) -> None:
        ids = [self.rng.randrange(self.num_blocks) for _ in range(self.rng.randint(0, 1))]
        indexed = sorted(entry.block for entry in self.model._entries.values())
        if indexed and self.chance(0.8):
            ids += [self.rng.choice(indexed) for _ in range(self.rng.randint(1, 2))]
        if self.model._entries and self.chance(self.holes):
            # Everything above one block: a deep hole.
            deep = self.rng.choice(sorted(self.model._entries, key=self.order))
            above = self.model._above([deep])
            ids += [entry.block for key, entry in self.model._entries.items() if key in above]
        if self.chance(0.2):
            ids += ids[:1]
        if self.chance(0.01):
            ids.append(self.rng.choice([-1, self.num_blocks]))
        self.counts["discarded"] += len(self.ids_of("discard", ids))

    def quarantine(self) -> None:
        """Quarantine one or two ids of any state, but keep a part of the pool."""
        if len(self.model.quarantined) > self.num_blocks // 4:
            return
        ids = [self.rng.randrange(self.num_blocks)]
        indexed = sorted(entry.block for entry in self.model._entries.values())
        if indexed and self.chance(0.7):
            ids.append(self.rng.choice(indexed))
        if self.chance(0.2):
            ids += ids[:1]
        if self.chance(0.05):
            ids.append(self.rng.choice([-1, self.num_blocks]))
        got = self.both(f"quarantine({ids})", lambda index, _: index.quarantine(ids), None)
        if got:
            self.held -= set(ids)
            self.counts["quarantined"] += got[0]

    def ranges(self, length: int) -> list[tuple[int, int]]:
        edges = sorted(self.rng.randint(0, length) for _ in range(2 * self.rng.randint(0, 3)))
        ranges = list(zip(edges[::2], edges[1::2], strict=True))
        if self.chance(0.3):
            ranges = [(0, length)]
        if self.chance(0.03):
            ranges += self.rng.choice([[(length, length + 1)], [(1, 0)], ranges[:1], [(-1, 0)]])
        return ranges

    def mark_dead(self) -> None:
        pair = self.pair()
        ranges = self.ranges(len(pair.model))
        marked = self.both(
            f"mark_dead({pair.model.tokens}, {ranges})",
            lambda index, side: index.mark_dead(self.seq(pair, side, fresh=False), ranges),
            None,
        )
        if marked:
            self.counts["marked dead"] += marked[0]

    def remove_spans(self) -> None:
        pair, force = self.pair(), self.chance(0.3)
        ranges = self.ranges(len(pair.model))
        removed = self.both(
            f"remove_spans({pair.model.tokens}, {ranges}, force={force})",
            lambda index, side: index.remove_spans(
                self.seq(pair, side, fresh=False), ranges, force=force
            ),
            REMOVED,
        )
        if removed:
            self.give("remove_spans", removed[0].freed)
            self.counts["removed by span"] += len(removed[0].freed)
            self.counts["kept, extended"] += len(removed[0].kept)
            self.counts["condemned by span"] += len(removed[0].condemned)

    def drop(self) -> None:
        self.ids_of("drop", self.rng.choice(NAMESPACES))

    def reset(self) -> None:
        self.ids_of("reset")

    def restart(self) -> None:
        """Continue with the index that a snapshot restores; the model stays."""
        while self.plans:
            self.release()
        # Plans of the index before are no plans of this one.
        self.stale.clear()
        self.log.append("restart")
        self.counts["restarts"] += 1
        digest = self.real.digest()
        self.real = _restored(self.real)
        self.same("digest of the restored index", self.real.digest(), digest)
        if self.mirror is not None:
            self.mirror = _restored(self.mirror)
        # A restored index counts again.
        self.model._plans_without_scope = 0

    def tag(self) -> None:
        pair = self.pair()
        spans = self.spans(len(pair.model))
        self.both(
            f"tag({pair.model.tokens}, {spans})",
            lambda index, side: index.tag(self.seq(pair, side, fresh=False), spans),
            None,
        )
        self.same("kinds", tuple(self.real.kinds), self.model.kinds)

    def tags(self) -> None:
        pair = self.pair()
        self.both(
            f"tags({pair.model.tokens})",
            lambda index, side: index.tags(self.seq(pair, side, fresh=False)),
            None,
        )

    def survey(self) -> None:
        for pair in self.pairs:
            self.both(
                f"lookup({pair.model.tokens}, touch=False)",
                lambda index, side: index.lookup(self.seq(pair, side, fresh=False), touch=False),  # noqa: B023
                MATCH,
            )

    CALLS: tuple[tuple[str, int], ...] = (
        ("new_sequence", 6),
        ("extend", 8),
        ("truncate", 3),
        ("lookup", 10),
        ("plan", 12),
        ("explain", 3),
        ("recompute", 6),
        ("insert", 30),
        ("validate", 8),
        ("release_sources", 3),
        ("release", 11),
        ("collect", 1),
        ("take_freed", 3),
        ("evict", 5),
        ("discard", 5),
        ("mark_dead", 5),
        ("remove_spans", 3),
        ("tag", 3),
        ("tags", 3),
        ("survey", 2),
    )

    LONG: ClassVar = {
        "plan": 30,
        "insert": 40,
        "evict": 2,
        "discard": 3,
        "extend": 5,
        "truncate": 1,
    }
    """Other weights, for an index that fills up with long histories."""

    def step(self) -> None:
        names, weights = zip(*self.CALLS, strict=True)
        if self.long:
            weights = tuple(self.LONG.get(name, weight) for name, weight in self.CALLS)
        weights = tuple(
            weight * (self.plan_weight if each in ("plan", "release") else 1)
            for each, weight in zip(names, weights, strict=True)
        )
        name = self.rng.choices(names, weights)[0]
        if self.chance(0.1 * self.holes):
            name = "hollow"
        if self.chance(0.006):
            name = self.rng.choice(["drop", "reset", "restart", "quarantine"])
        getattr(self, name)()
        self.verify()

    def drain(self) -> None:
        while self.plans:
            self.release()
        there = set(range(self.num_blocks)) - set(self.model.quarantined.tolist())
        while self.held != there:
            if not len(self.ids_of("evict", self.num_blocks)):
                break
        self.verify()
        self.same("blocks lost", there - self.held, set())
        self.same("plans left", self.stats(self.real)["live_plans"], 0)

    def abandon(self) -> None:
        """Release all plans after a mismatch, so that none warns."""
        for plans in [*self.plans, *self.stale]:
            for plan in (plans.real, plans.mirror, plans.model):
                if plan is not None and not plan.released:
                    plan.release()
        self.plans.clear()

    def shape(self) -> dict[str, int]:
        model, size = self.model, self.block_size
        children = collections.Counter(
            (ns, tokens[:-size]) for ns, tokens in {*model._entries, *model._holes()}
        )
        return {
            "depth": max((len(tokens) // size for _, tokens in model._entries), default=0),
            "branches": sum(count > 1 for count in children.values()),
            "fan": max(children.values(), default=0),
            **self.stats(model),
        }


def _try(call: Callable[[Any, str], Any], index: Any, side: str) -> tuple[Any, str | None]:
    try:
        return call(index, side), None
    except REFUSED as error:
        return None, type(error).__name__
