"""The index: reading, planning, inserting."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from kvtrie import (
    COMPUTED,
    EXACT_ONLY,
    BlockInUseError,
    Group,
    Imported,
    KvTrieError,
    Namespace,
    ReusePolicy,
    Span,
    StaleHandleError,
)
from kvtrie.testing.model._arguments import (
    Integers,
    as_count,
    as_flag,
    as_integers,
    as_session,
    expect,
    int32,
)
from kvtrie.testing.model._draft import IN_PLACE, Cached, Draft, draft, position_deltas
from kvtrie.testing.model._grades import Grade, grade_of, meet
from kvtrie.testing.model._groups import (
    Column,
    GroupEntry,
    Offers,
    check_groups,
    columns,
    cut,
    read_offers,
    read_stops,
    refuse_ids_in_use,
)
from kvtrie.testing.model._plans import ModelPlan, copied_from, is_moved
from kvtrie.testing.model._removal import Removal
from kvtrie.testing.model._results import (
    ModelExplanation,
    ModelGroupInsertResult,
    ModelInsertResult,
    ModelMatch,
    ModelStats,
    ModelWouldSave,
)
from kvtrie.testing.model._sequences import AnySequence, Tokens, read, sort_key
from kvtrie.testing.model._store import Entry, Key, PlanState, exact_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvtrie.testing.model._contexts import ModelMovedRun

Source: TypeAlias = Any
"""A plan, `kvtrie.COMPUTED`, or `kvtrie.Imported(...)`."""

MAX_BLOCKS = 2**31
MAX_BLOCK_SIZE = 4096
MAX_HASH_BITS = 64
MAX_SEED = 2**64 - 1
MAX_POOL_ID = 64
MIN_MIN_RUN = 8
MAX_MEMBERSHIPS = 8
"""The most sessions that one block belongs to."""


class Takes(NamedTuple):
    """What an insert lets groups take: ids at places up to `exact_until`, which is in `reached`."""

    namespace: Namespace
    tokens: Tokens
    reached: int
    """The end of the blocks that back the sequence."""
    exact_until: float
    plan: PlanState | None


class ModelIndex(Removal):
    """`kvtrie.RadixIndex`, as a dictionary from whole prefixes to entries; see there for the calls.

    `seed`, `pool_id`, `hash_bits` and `max_candidates` are ignored: the model tries all places.
    `digest()` equals that of another model with the same calls, never that of a `RadixIndex`.
    `stats()` has only the counts that do not depend on how an index is built.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        min_run: int = 16,
        max_candidates: int = 64,
        moved_runs: bool = True,
        seed: int | None = None,
        pool_id: bytes | None = None,
        hash_bits: int = 64,
        groups: Iterable[Group] = (),
        item_positions: bool = False,
    ) -> None:
        super().__init__(
            as_count(num_blocks, "num_blocks", 1), as_count(block_size, "block_size", 1)
        )
        self.min_run = as_count(min_run, "min_run", MIN_MIN_RUN)
        self.max_candidates = as_count(max_candidates, "max_candidates")
        self.moved_runs = as_flag(moved_runs, "moved_runs")
        self.item_positions = as_flag(item_positions, "item_positions")
        self.seed = None if seed is None else as_count(seed, "seed")
        if pool_id is not None:
            expect(pool_id, bytes, "pool_id")
            if not 1 <= len(pool_id) <= MAX_POOL_ID:
                message = f"pool_id has {len(pool_id)} bytes, not 1 to {MAX_POOL_ID}"
                raise ValueError(message)
        self.pool_id = pool_id
        self.hash_bits = as_count(hash_bits, "hash_bits")
        for name, limit in (
            ("num_blocks", MAX_BLOCKS),
            ("block_size", MAX_BLOCK_SIZE),
            ("seed", MAX_SEED),
            ("hash_bits", MAX_HASH_BITS),
        ):
            if (getattr(self, name) or 0) > limit:
                message = f"{name} is {getattr(self, name)}, above {limit}"
                raise ValueError(message)
        self._columns = columns(groups, self.block_size)

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(column.group for column in self._columns.values())

    # --- reading ----------------------------------------------------------------------------------

    def lookup(
        self, seq: AnySequence, *, keep_last: int = 0, touch: bool = True, start: int = 0
    ) -> ModelMatch:
        namespace, tokens = read(seq)
        keep_last = as_count(keep_last, "keep_last")
        touch = as_flag(touch, "touch")
        start = self._start(start, tokens)
        end = self._hit(namespace, tokens[: max(0, len(tokens) - keep_last)])
        found = [self._entries[key] for key in self._path(namespace, tokens[:end])]
        if touch:
            self._touch(found)
            self._need(namespace, tokens, end)
        self._settle()
        blocks = [entry.block for entry in found[start // self.block_size :]]
        return ModelMatch(len(found) * self.block_size, int32(blocks))

    def _check_items(self, seq: AnySequence) -> None:
        nameless = [item for item in seq.items if item.positions is None]
        if self.item_positions and nameless:
            message = f"{nameless[0]} does not say how many positions it takes"
            raise ValueError(message)

    def _start(self, start: int, tokens: Tokens) -> int:
        start = as_count(start, "start")
        if start % self.block_size or start > len(tokens):
            message = f"start is {start}: not a multiple of {self.block_size} within {len(tokens)}"
            raise ValueError(message)
        return start

    def plan(
        self,
        seq: AnySequence,
        policy: ReusePolicy | None = None,
        *,
        keep_last: int = 1,
        pin: bool = True,
        path: AnySequence | None = None,
        session: str | None = None,
        moved_end: int | None = None,
    ) -> ModelPlan:
        namespace, tokens = read(seq)
        policy = EXACT_ONLY if policy is None else policy
        keep_last = as_count(keep_last, "keep_last")
        pin = as_flag(pin, "pin")
        session = self._asked(tokens, policy, session, moved_end)
        self._refuse_for_groups(policy, path)
        self._check_items(seq)
        cached = self._cached(namespace, session, moved_end, path)
        searched = self._searched(policy)
        self._plans_without_scope += cached.is_without_scope(tokens, keep_last, searched)
        origins, moved_runs = self._draft(cached, tokens, keep_last, searched)
        used = [origin.source.entry for origin in origins if origin is not None]
        self._touch(used)
        end = sum(origin is not None and origin.piece == IN_PLACE for origin in origins)
        self._need(namespace, tokens, end)
        parts = {
            name: column.last_run(namespace, tokens, end) for name, column in self._columns.items()
        }
        state = PlanState(
            namespace,
            tokens,
            self._epoch(namespace),
            pin,
            grade=grade_of(policy, self.kinds) if policy.approximate else None,
            awaits=policy.repair != "fronts"
            and policy.recompute_share > 0
            and any(is_moved(origin) for origin in origins),
        )
        deltas = position_deltas(cached, tokens, origins)
        plan = ModelPlan(self, state, origins, moved_runs, moved_end, parts, deltas, seq.items)
        if pin:
            state.pins |= set(plan.blocks.tolist())
            state.source_pins |= copied_from(origins)
            for name, part in parts.items():
                for number, entry in enumerate(reversed(part)):
                    state.group_pins[name, entry.block] = end - number * self.block_size
            plan.pin_carried()
        self._plans.append(state)
        self._settle()
        return plan

    def explain(
        self,
        seq: AnySequence,
        policy: ReusePolicy | None = None,
        *,
        context: int = 8,
        keep_last: int = 1,
        session: str | None = None,
        moved_end: int | None = None,
    ) -> ModelExplanation:
        namespace, tokens = read(seq)
        policy = ReusePolicy() if policy is None else policy
        as_count(context, "context")
        keep_last = as_count(keep_last, "keep_last")
        session = self._asked(tokens, policy, session, moved_end)
        cached = self._cached(namespace, session, moved_end, None)

        def tokens_of(policy: ReusePolicy) -> tuple[int, int, int]:
            found, _ = self._draft(cached, tokens, keep_last, self._searched(policy))
            exact = sum(origin is not None and origin.exact for origin in found)
            compute = sum(origin is None for origin in found)
            return exact, len(tokens) - exact - compute, compute

        exact, approximate, compute = tokens_of(policy)
        everywhere = tokens_of(policy.replace(scope="namespace"))[-1]
        entries = map(self._entries.get, self._path(namespace, tokens))
        num_exact = len(exact_run(entries)) * self.block_size
        return ModelExplanation(
            num_exact,
            len(tokens),
            self.block_size,
            ModelWouldSave(exact, approximate, compute, max(0, compute - everywhere)),
            # Next to moved runs, windows are copied or rebuilt.
            None if approximate else cut(self._columns.values(), namespace, tokens, num_exact),
        )

    def _asked(
        self, tokens: Tokens, policy: ReusePolicy, session: str | None, moved_end: int | None
    ) -> str | None:
        """The session of a plan, whose arguments are checked."""
        expect(policy, ReusePolicy, "policy")
        session = as_session(session)
        if moved_end is not None and as_count(moved_end, "moved_end") > len(tokens):
            message = f"moved_end is {moved_end}, beyond the {len(tokens)} tokens of the prompt"
            raise ValueError(message)
        if policy.min_run is not None and policy.min_run < self.min_run:
            message = f"policy.min_run is {policy.min_run}, below the index's {self.min_run}"
            raise ValueError(message)
        return session

    def _cached(
        self,
        namespace: Namespace,
        session: str | None,
        moved_end: int | None,
        path: AnySequence | None,
    ) -> Cached:
        """What a plan may use."""
        entries = {own: entry for (ns, own), entry in self._entries.items() if ns == namespace}
        paths = list(entries)
        if path is not None:
            other, whole = read(path)
            if other != namespace:
                message = "path is of another namespace than the prompt"
                raise ValueError(message)
            entries = {own: entry for own, entry in entries.items() if whole[: len(own)] == own}
        return Cached(
            namespace,
            entries,
            self.block_size,
            self.min_run,
            self.moved_runs,
            self.kinds,
            path is not None,
            session,
            moved_end,
            paths,
        )

    def _searched(self, policy: ReusePolicy) -> ReusePolicy:
        """Next to further groups, no partial block is copied; next to states, nothing is."""
        if not self._columns:
            return policy
        groups = [column.group for column in self._columns.values()]
        may_move = policy.approximate and all(group.kind == "window" for group in groups)
        return policy.replace(partial_blocks=False, approximate=may_move)

    def _draft(
        self, cached: Cached, tokens: Tokens, keep_last: int, searched: ReusePolicy
    ) -> tuple[Draft, tuple[ModelMovedRun, ...]]:
        origins, moved_runs = draft(cached, tokens, keep_last, searched)
        if self._columns and all(origin is None or origin.exact for origin in origins):
            return self._exact_draft(cached, tokens, keep_last)
        return origins, moved_runs

    def _refuse_for_groups(self, policy: ReusePolicy, path: AnySequence | None) -> None:
        for name, column in self._columns.items():
            if path is not None:
                message = f"the index has group {name!r}; a plan from one path is for group 0 alone"
                raise ValueError(message)
            if policy.approximate and column.group.num_window_tokens is None:
                message = f"the index has group {name!r} with states, which cannot be moved"
                raise ValueError(message)

    def _exact_draft(
        self, cached: Cached, tokens: Tokens, keep_last: int
    ) -> tuple[Draft, tuple[ModelMovedRun, ...]]:
        """What is in place up to where every group can continue."""
        limited = tokens[: max(0, len(tokens) - keep_last)]
        end = self._hit(cached.namespace, limited)
        return draft(cached, tokens, len(tokens) - end, EXACT_ONLY.replace(partial_blocks=False))

    # --- inserting --------------------------------------------------------------------------------

    def insert(
        self,
        seq: AnySequence,
        blocks: Integers,
        *,
        num_computed: int,
        start: int = 0,
        source: Source,
        spans: Iterable[Span] = (),
        session: str | None = None,
        groups: Mapping[str, Integers] | None = None,
        stops: Integers = (),
    ) -> ModelInsertResult:
        namespace, tokens = read(seq)
        offered = as_integers(blocks, "blocks", self.num_blocks)
        num_computed = as_count(num_computed, "num_computed")
        if num_computed > len(tokens):
            message = f"num_computed is {num_computed}, but the sequence has {len(tokens)} tokens"
            raise ValueError(message)
        start = self._start(start, tokens)
        session = as_session(session)
        kinds, marks = self._spans(spans, tokens)
        offers, stops = read_offers(groups, self._columns), read_stops(stops)
        size = self.block_size
        first, last = start // size, num_computed // size
        if len(offered) < last - first:
            message = f"insert needs {last - first} blocks from {start} on, got {len(offered)}"
            raise ValueError(message)
        plan = self._source(source, namespace, tokens)
        path = self._path(namespace, tokens)
        check_groups(offers, stops, self._columns, len(tokens), size)
        refuse_ids_in_use(offers, self._columns, namespace, tokens)
        self._refuse_blocks_in_use(path, first, offered)
        self._check_items(seq)

        # From here on nothing fails.
        exact_until = min(num_computed, _exact_until(source, plan))
        owned = self._where().keys() | self._out_of_reach()
        before = [self._entries.get(key) for key in path[:first]]
        freed: list[int] = []
        duplicates: list[int] = []
        backing: list[Entry] = []
        if None not in before and (plan is None or plan.epoch == self._epoch(namespace)):
            # Computed blocks before `start` are offered unchanged.
            whole = [entry.block for entry in before if entry is not None] + offered
            for key, block in zip(path[:last], whole, strict=False):
                offer = self._offer(source, plan, key, block, backing)
                entry = self._decide(key, offer, duplicates, freed)
                if entry is None:
                    break
                self._stays += entry is offer
                backing.append(entry)
        self._touch(backing)
        if session is not None:
            _add_session(session, backing, first)
        num_exact = len(exact_run(backing)) * size
        if plan is not None:
            _note(plan, backing, num_exact, len(backing) * size)
        end = len(backing) * size
        takes = Takes(namespace, tokens, end, min(exact_until, num_exact), plan)
        taken = {name: self._take(name, pairs, takes) for name, pairs in offers.items()}
        for position in (end, *self._states(offers, taken), *(at for at in stops if at <= end)):
            self._need(namespace, tokens, position)
        reached = max(0, len(backing) - first)
        surplus = [block for block in offered[reached:] if block not in owned]
        self._kinds = kinds
        self._mark(path, marks)
        self._settle()
        return ModelInsertResult(
            blocks=int32(entry.block for entry in backing[first:]),
            num_exact=num_exact,
            duplicates=int32(duplicates),
            surplus=int32(surplus),
            freed=int32(freed),
            groups=taken,
        )

    def _states(self, offers: Offers, taken: dict[str, ModelGroupInsertResult]) -> list[int]:
        """The positions of the states that were offered and are at their places."""
        return [
            position
            for name, pairs in offers.items()
            for (position, _), block in zip(pairs, taken[name].blocks, strict=True)
            if block is not None and self._columns[name].group.num_window_tokens is None
        ]

    def _take(
        self, name: str, pairs: list[tuple[int, int]], takes: Takes
    ) -> ModelGroupInsertResult:
        """Take the ids that are offered for one group."""
        column, plan = self._columns[name], takes.plan
        is_state = column.group.num_window_tokens is None
        backing: list[int | None] = []
        duplicates: list[int] = []
        surplus: list[int] = []
        for position, block in pairs:
            end, is_held = column.end_of(position), column.is_held(block)
            key = takes.namespace, takes.tokens[:end]
            entry = column.entries.get(key) if end <= takes.reached else None
            if entry is None and is_held and end <= takes.exact_until:
                entry = column.entries[key] = GroupEntry(block, self._clock, needed=is_state)
            elif is_held:
                (surplus if entry is None else duplicates).append(block)
            backing.append(None if entry is None else entry.block)
            if entry is not None and plan is not None and plan.pinned and not is_state:
                plan.group_pins[name, entry.block] = end
        return ModelGroupInsertResult(backing, int32(duplicates), int32(surplus))

    def _source(self, source: Source, namespace: Namespace, tokens: Tokens) -> PlanState | None:
        if source is COMPUTED or isinstance(source, Imported):
            return None
        if not isinstance(source, ModelPlan):
            message = f"source is {source!r}, not a plan, COMPUTED or Imported(...)"
            raise TypeError(message)
        state = source._state  # noqa: SLF001 - a plan is part of its index
        self._own(source)
        if state.released:
            message = "source is a plan that was released"
            raise StaleHandleError(message)
        if state.awaits and not state.recomputed:
            message = "source is a plan whose tokens to compute were not chosen"
            raise ValueError(message)
        if state.namespace != namespace or tokens[: len(state.tokens)] != state.tokens:
            message = f"the sequence does not start with the {len(state.tokens)} tokens of the plan"
            raise ValueError(message)
        return state

    def _refuse_blocks_in_use(self, path: list[Key], first: int, offered: list[int]) -> None:
        where = self._where()
        out_of_reach = self._out_of_reach()
        seen: set[int] = set()
        for position, block in enumerate(offered, first):
            own = path[position] if position < len(path) else None
            elsewhere = block not in out_of_reach and where.get(block, own) != own
            if block in seen or elsewhere:
                message = f"insert: block {block} is given twice, or backs another prefix"
                raise BlockInUseError(message)
            seen.add(block)

    def _offer(
        self, source: Source, plan: PlanState | None, key: Key, block: int, before: list[Entry]
    ) -> Entry:
        exact, hops = self._label(source, plan, len(key[1]), before)
        offer = Entry(block, exact, hops, 0, [0] * self.block_size, self._stays + 1)
        offer.grade = self._grade(source, plan, before)
        return offer

    def _label(
        self, source: Source, plan: PlanState | None, end: int, before: list[Entry]
    ) -> tuple[bool, int]:
        """Whether an offered block that ends at `end` is exact, and its hops."""
        said_exact, hops = True, 0
        if isinstance(source, Imported) and end > source.exact_until:
            said_exact, hops = False, source.hops
        if plan is not None and plan.first_approximate is not None:
            said_exact = end <= plan.first_approximate
            hops = max(plan.hops[end - self.block_size : end], default=0)
        return said_exact and all(entry.exact for entry in before), hops

    def _grade(self, source: Source, plan: PlanState | None, before: list[Entry]) -> Grade:
        """The grade of an offered block, if it is approximate."""
        if plan is not None and plan.grade is not None:
            return plan.grade
        grades = [entry.grade for entry in before if not entry.exact]
        if isinstance(source, Imported):
            grades.append(grade_of(source.policy, self.kinds))
        return meet(grades)

    def _decide(
        self, key: Key, offer: Entry, duplicates: list[int], freed: list[int]
    ) -> Entry | None:
        """The entry that a key has after an offer; None ends the insert."""
        present = self._entries.get(key)
        out_of_reach = offer.block in self._out_of_reach()
        if present is None:
            if out_of_reach:
                return None
            self._entries[key] = offer
            return offer
        if present.block == offer.block:
            return present
        no_worse = present.exact or (
            not offer.exact
            and present.hops <= offer.hops
            and present.grade.is_at_least_as_strict_as(offer.grade)
        )
        if out_of_reach:
            return present if no_worse else None
        if no_worse:
            duplicates.append(offer.block)
            return present
        offer.tags, offer.sessions = present.tags, present.sessions
        self._entries[key] = offer
        old = self._left(present.block)
        if old is not None:
            freed.append(old)
        return offer

    def _own(self, plan: ModelPlan) -> None:
        expect(plan, ModelPlan, "a plan")
        if plan._index is not self:  # noqa: SLF001 - a plan is part of its index
            message = "a plan of another index"
            raise ValueError(message)

    # --- inspection -------------------------------------------------------------------------------

    @property
    def num_approximate(self) -> int:
        return sum(not entry.exact for entry in self._entries.values())

    def stats(self) -> ModelStats:
        return ModelStats(
            indexed=len(self._entries),
            condemned=len(self._condemned) + len(self._waiting),
            waiting=len(self._waiting),
            quarantined=len(self._quarantined - self._condemned),
            pinned=len(self._pinned()),
            evictable=self.num_evictable,
            approximate=self.num_approximate,
            dead=sum(entry.mark is not None for entry in self._entries.values()),
            holes=len(self._holes()),
            live_plans=len(self._plans),
            clock=self._clock,
            unknown_discards=self._unknown_discards,
            plans_without_scope=self._plans_without_scope,
        )

    def digest(self) -> int:
        entries = sorted(
            (
                *(repr(ns), sort_key(key), e.block, e.exact, e.hops, e.last_use, e.mark),
                *(tuple(e.tags), tuple(e.sessions)),
                () if e.exact else e.grade,
            )
            for (ns, key), e in self._entries.items()
        )
        state = (
            entries,
            sorted(self._condemned),
            self._waiting,
            sorted(self._quarantined),
            [
                (sorted(plan.pins), sorted(plan.source_pins), sorted(plan.group_pins.items()))
                for plan in self._plans
            ],
            [
                (
                    repr(column.group),
                    sorted(
                        (repr(ns), sort_key(key), e.block, e.needed, e.last_use)
                        for (ns, key), e in column.entries.items()
                    ),
                    sorted(column.condemned),
                    sorted(column.waiting),
                )
                for column in self._columns.values()
            ],
            self._clock,
            self._marks,
            self._kinds,
            self._unknown_discards,
        )
        raw = hashlib.blake2b(repr(state).encode(), digest_size=8).digest()
        return int.from_bytes(raw, "little")

    def check(self) -> None:
        indexed = [entry.block for entry in self._entries.values()]
        quarantined = self._quarantined - self._condemned
        every = [*indexed, *self._condemned, *self._waiting, *quarantined]
        pinned = self._pinned()
        size = self.block_size
        rules: Mapping[str, bool] = {
            "an id is in one state only": len(set(every)) == len(every),
            "ids are in range": all(0 <= block < self.num_blocks for block in every),
            "what is pinned is indexed or condemned": pinned <= {*indexed, *self._condemned},
            "what is condemned is pinned": self._condemned <= pinned,
            "entries end at block edges": all(len(key[1]) % size == 0 for key in self._entries),
            "exact blocks have no hops": all(
                entry.hops == 0 for entry in self._entries.values() if entry.exact
            ),
            "last uses are in the past": all(
                0 < entry.last_use <= self._clock for entry in self._entries.values()
            ),
            "marks are in the past": all(
                entry.mark is None or 0 < entry.mark <= self._marks
                for entry in self._entries.values()
            ),
            "holes are in bounds": len(self._holes()) <= self.num_blocks
            or self._oldest_end(cut_off=True) is None,
            "groups are sound": all(map(self._is_sound, self._columns.values())),
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            message = f"the model is broken: not true that {', '.join(broken)}"
            raise KvTrieError(message)

    def _is_sound(self, column: Column) -> bool:
        """Whether each id of a group has one state, and each place an exact block of group 0."""
        indexed = [entry.block for entry in column.entries.values()]
        every = [*indexed, *column.condemned, *column.waiting]
        pinned = self._pinned_of(column.group.name)
        at = map(self._entries.get, column.entries)
        return (
            len(set(every)) == len(every)
            and all(0 <= block < column.group.num_blocks for block in every)
            and column.condemned <= pinned <= {*indexed, *column.condemned}
            and all(entry is not None and entry.exact for entry in at)
            and all(0 < entry.last_use <= self._clock for entry in column.entries.values())
        )


def _note(plan: PlanState, backing: list[Entry], num_exact: int, reached: int) -> None:
    """Note in a plan what an insert with it returns."""
    if plan.pinned:
        plan.pins |= {entry.block for entry in backing}
    if num_exact < reached:
        known = plan.first_approximate
        plan.first_approximate = num_exact if known is None else min(known, num_exact)
    plan.used = True


def _exact_until(source: Source, plan: PlanState | None) -> float:
    """The position up to which the source's KV is exact, in groups besides group 0."""
    if isinstance(source, Imported):
        return source.exact_until
    ends = [] if plan is None else [plan.first_approximate, plan.first_rebuilt]
    return min((end for end in ends if end is not None), default=math.inf)


def _add_session(session: str, path: list[Entry], first: int) -> None:
    """Add a session to the blocks from `first` on, and above them up to the first that has it."""
    for position, entry in reversed(list(enumerate(path))):
        if session not in entry.sessions:
            entry.sessions.append(session)
            del entry.sessions[:-MAX_MEMBERSHIPS]
        elif position < first:
            break
