"""`Twin` for an index with groups of layers: all that it says of each group is compared, too."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tests.property.twin import REFUSED, Pair, Plans, Twin

import kvtrie
from kvtrie.testing.model._plans import SOURCE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

COUNTS = ("indexed", "pinned", "evictable", "condemned", "waiting")
UNKNOWN = "unknown"
FAR = 2**31


def random_groups(rng: Random, block_size: int, num_blocks: int) -> list[kvtrie.Group]:
    """One to three groups, with windows shorter and longer than a block, and mostly small pools."""
    groups = []
    for number in range(rng.choice([1, 1, 2, 3])):
        name, room = f"g{number}", rng.choice([1, 4, num_blocks, 2 * num_blocks])
        if rng.random() < 0.35:
            groups.append(kvtrie.Group.state(name, num_slots=room))
            continue
        window = rng.choice([2, 3, block_size, block_size + 1, block_size + 2, 2 * block_size])
        window = max(2, rng.choice([window, rng.randint(2, 6 * block_size + 2)]))
        needed = -(-(window - 1) // block_size)
        groups.append(
            kvtrie.Group.window(
                name, window=window, num_blocks=needed + room, block_size=block_size
            )
        )
    return groups


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except REFUSED as error:
        return type(error).__name__


class GroupTwin(Twin):
    """An index with groups, its mirror and the model, with the ids of each the caller holds."""

    def __init__(self, rng: Random, *, groups: Sequence[kvtrie.Group], **more: Any) -> None:
        super().__init__(rng, groups=groups, **more)
        self.groups = {group.name: group for group in groups}
        self.has_states = any(group.kind == "state" for group in groups)
        self.group_held = {group.name: set(range(group.num_blocks)) for group in groups}
        self.same("groups", self.real.groups, self.model.groups)

    def name(self) -> str:
        return UNKNOWN if self.chance(0.01) else self.rng.choice(list(self.groups))

    def give_group(self, name: str, ids: Any) -> None:
        got = [int(block) for block in ids]
        self.same(f"group {name}: an id is handed out twice", len(set(got)), len(got))
        self.same(f"group {name}: what is held", self.group_held[name] & set(got), set())
        self.group_held[name] |= set(got)

    def verify(self) -> None:
        super().verify()
        self.model.check()
        for name, group in self.groups.items():
            real, model = self.real.group_stats(name), self.model.group_stats(name)
            counts = {count: getattr(real, count) for count in COUNTS}
            expected = {count: getattr(model, count) for count in COUNTS}
            self.same(f"group_stats({name!r})", counts, expected)
            owned = counts["indexed"] + counts["condemned"] + counts["waiting"]
            owned += len(self.group_held[name])
            self.same(f"conservation in group {name}", owned, group.num_blocks)

    def policy(self) -> kvtrie.ReusePolicy:
        found = super().policy()
        if self.has_states and self.chance(0.97):
            return found.replace(approximate=False)
        return found

    # --- plans ------------------------------------------------------------------------------------

    def same_parts(self, plans: Plans) -> None:
        for name in [*self.groups, UNKNOWN]:
            parts = []
            for plan in (plans.real, plans.model):
                window = _outcome(lambda: plan.group(name))  # noqa: B023
                if not isinstance(window, str):
                    window = window[0], window[1].dtype.str, window[1].tolist()
                state = _outcome(lambda: plan.state(name))  # noqa: B023
                rebuilt = _outcome(lambda: plan.rebuild(name))  # noqa: B023
                if not isinstance(rebuilt, str):
                    rebuilt = rebuilt.shape, rebuilt.dtype.str, rebuilt.tolist()
                parts.append((window, state, rebuilt))
            self.same(f"group, state and rebuild of {name} in {plans.model}", *parts)
            self.same_group_moves(plans, name)

    def same_group_moves(self, plans: Plans, name: str) -> None:
        """Mostly into blocks that the plan does not read, each once."""
        needed = -(-len(plans.pair.model) // self.block_size)
        num_blocks = self.groups[name].num_blocks if name in self.groups else 4
        read = set(plans.model._carried.get(name, {}).values()) if self.chance(0.9) else set()
        free = [block for block in range(num_blocks) if block not in read] or [0]
        table = [free[at % len(free)] for at in range(needed - self.chance(0.02))]
        if self.chance(0.1):
            self.rng.shuffle(table)
        start, end = 0, None
        if self.chance(0.3):
            start = self.rng.randint(0, len(plans.pair.model))
            end = self.rng.randint(0, len(plans.pair.model))
        found = []
        for plan in (plans.real, plans.model):
            moves = _outcome(partial(plan.moves, table, start, end, group=name))
            found.append(moves if isinstance(moves, str) else moves.tolist())
        self.same(f"moves of {name} in {plans.model}", *found)
        self.counts["plans, windows carried"] += bool(found[1]) and not isinstance(found[1], str)

    def count_plan(self, plans: Plans, policy: kvtrie.ReusePolicy, session: str | None) -> None:
        super().count_plan(plans, policy, session)
        namespace, tokens = plans.pair.model.namespace, plans.pair.model.tokens
        rebuilds = [
            bool(len(plans.model.rebuild(name)))
            for name, group in self.groups.items()
            if group.kind == "window"
        ]
        path = self.model._path(namespace, tokens)
        exact = 0
        for key in path:
            entry = self.model._entries.get(key)
            if entry is None or not entry.exact:
                break
            exact += 1
        # At most 3 tokens at the end are left out.
        in_place = len(plans.model.blocks)
        self.counts["plans, cut by a group"] += exact - in_place > -(-3 // self.block_size)
        self.counts["plans, in place in groups"] += in_place > 0
        self.counts["plans, windows rebuilt"] += any(rebuilds)

    def add_plans(self, plans: Plans) -> None:
        super().add_plans(plans)
        self.same_parts(plans)

    def recompute(self) -> None:
        super().recompute()
        for plans in [*self.plans, *self.stale[-1:]]:
            self.same_parts(plans)

    def advance(self) -> None:
        known = self.stale if self.stale and self.chance(0.05) else self.plans
        if not known:
            return
        plans = self.rng.choice(known)
        position = self.rng.randint(0, len(plans.pair.model) + 4 * self.block_size)
        pins = [pin for pin in plans.model._state.group_pins.items() if pin[1] != SOURCE]
        if pins and self.chance(0.6):
            # Near the last token that reads a pinned id.
            (name, _), end = self.rng.choice(pins)
            window = self.groups[name].num_window_tokens
            reader = end if window is None else end + window - 2
            position = max(0, reader + self.rng.randint(-1, 1))
        position = self.rng.choice([-1, FAR]) if self.chance(0.02) else position
        before = len(plans.model._state.group_pins)
        self.both(
            f"advance({position}) of {plans.model}",
            lambda _, side: getattr(plans, side).advance(position),
            None,
        )
        self.counts["advanced"] += before - len(plans.model._state.group_pins)

    # --- inserts ----------------------------------------------------------------------------------

    def more_to_insert(self, pair: Pair) -> dict[str, Any]:
        length, size = len(pair.model), self.block_size
        more: dict[str, Any] = {}
        names = [name for name in self.groups if self.chance(0.9)]
        self.rng.shuffle(names)
        offers = {name: self.group_offers(pair, name) for name in names}
        if self.chance(0.005):
            offers[UNKNOWN] = []
        if offers:
            more["groups"] = offers
        stops = [stop for stop in range(0, length + 1, size) if self.chance(0.15)]
        if self.chance(0.01):
            stops += [length + size, 0]
        if stops:
            more["stops"] = stops
        return more

    def group_offers(self, pair: Pair, name: str) -> list[tuple[int, int]]:
        """Ids for all places, the last ones or some: what is there, held ids, rarely wrong ones."""
        size, group = self.block_size, self.groups[name]
        column, held = self.model._columns[name], self.group_held[name]
        namespace, tokens = pair.model.namespace, pair.model.tokens
        last = len(tokens) // size
        kind = self.rng.choice(["all", "last", "some"])
        first = max(0, last - self.rng.randint(1, 6)) if kind == "last" else 0
        places = [at for at in range(first, last) if kind != "some" or self.chance(0.4)]
        if len(held) < len(places) and self.chance(0.5):
            self.evict_group(name)
        if kind != "some" and len(held) < len(places):
            places = places[-max(1, len(held)) :]
        offers: list[tuple[int, int]] = []
        used: set[int] = set()
        for place in places:
            end = (place + 1) * size
            entry = column.entries.get((namespace, tokens[:end]))
            free = sorted(held - used)
            block = self.rng.choice(free) if free else None
            if entry is not None and self.chance(0.6):
                block = entry.block
            elif column.condemned | column.waiting and self.chance(0.05):
                block = self.rng.choice(sorted(column.condemned | column.waiting))
            elif self.chance(0.003):
                block = self.rng.choice([group.num_blocks, self.rng.randrange(group.num_blocks)])
            if block is None:
                continue
            offers.append((end if group.kind == "state" else place * size, block))
            used.add(block)
        if self.chance(0.005):
            offers.append((self.rng.randint(0, len(tokens) + size), 0))
        return offers

    def inserted(self, done: Any) -> None:
        super().inserted(done)
        for name, own in done.groups.items():
            held = self.group_held[name]
            out = {*own.duplicates.tolist(), *own.surplus.tolist()}
            self.same(f"group {name}: not taken, and not held", out - held, set())
            taken = held & {block for block in own.blocks if block is not None}
            self.same(f"group {name}: taken, and not taken", taken & out, set())
            self.group_held[name] = held - taken
            self.counts["taken in groups"] += len(taken)
            self.counts["duplicates in groups"] += len(own.duplicates)
            self.counts["surplus in groups"] += len(own.surplus)

    # --- what leaves ------------------------------------------------------------------------------

    def of_group(self, call: str, name: str, *args: Any) -> int:
        got = self.both(
            f"{call}({args}, group={name!r})",
            lambda index, _: getattr(index, call)(*args, group=name),
            None,
        )
        if got is None:
            return 0
        self.give_group(name, got[0])
        return len(got[0])

    def evict_group(self, name: str | None = None) -> None:
        n = self.rng.choice([0, 1, 1, 2, 3, 5])
        if self.chance(0.02):
            n = self.rng.choice([-1, FAR])
        self.counts["evicted from groups"] += self.of_group("evict", name or self.name(), n)

    def discard_group(self) -> None:
        name = self.name()
        group = self.groups.get(name)
        ids: list[int] = []
        if group is not None:
            indexed = sorted(each.block for each in self.model._columns[name].entries.values())
            ids = [self.rng.randrange(group.num_blocks) for _ in range(self.rng.randint(0, 2))]
            ids += [self.rng.choice(indexed) for _ in range(2) if indexed]
            if self.chance(0.2):
                ids += ids[:1]
            if self.chance(0.02):
                ids.append(self.rng.choice([-1, group.num_blocks]))
        self.counts["discarded from groups"] += self.of_group("discard", name, ids)

    def take_group(self) -> None:
        self.counts["taken freed of groups"] += self.of_group("take_freed", self.name())

    CALLS = (
        *Twin.CALLS,
        ("advance", 6),
        ("evict_group", 6),
        ("discard_group", 3),
        ("take_group", 5),
    )

    def drain(self) -> None:
        super().drain()
        for name, group in self.groups.items():
            while self.of_group("evict", name, group.num_blocks):
                pass
            held = len(self.group_held[name])
            self.same(f"ids lost in group {name}", held, group.num_blocks)
        self.verify()
