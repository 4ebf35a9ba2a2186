"""Naive plans of transfers: one token after the other.

The code follows docs/transfers.md, not the extension. It is slow on purpose.
"""

from __future__ import annotations

import hmac
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

from tests.transfer.naive import (
    APPROXIMATE,
    EXACT,
    LOOKAHEAD,
    STATE,
    Group,
    Manifest,
    Policy,
    Prompt,
    Refused,
    block_digest,
    is_strict,
    packed_space,
    prefix_digest,
    run_digest,
)

MAX_CANDIDATES = 64

Load = tuple[int, int, int, int]
"""What one token is loaded from: position there, class, hops, block id."""

Pair = tuple[int, int, int, int, int, int, int, int]
"""group, remote, local, start, end, delta, class, hops."""


@dataclass(frozen=True)
class Plan:
    pairs: list[Pair]
    compute: list[tuple[int, int]]
    exact_until: int
    hops: int
    num_exact: int
    num_approximate: int
    policy: Policy | None
    """What approximate KV is said to be built under; None if there is none."""


def plan(  # noqa: PLR0912 - as docs/transfers.md has it, step by step
    manifest: Manifest,
    prompt: Prompt,
    tables: dict[int, tuple[int | None, list[Any]]],
    key: bytes,
    *,
    cached: tuple[int, int] = (0, 0),
    keep_last: int = 0,
    policy: Policy | None = None,
    windows: dict[int, int] | None = None,
) -> Plan:
    policy = policy or Policy()
    windows = windows or {}
    head = manifest.namespace, manifest.policy, [group.head for group in manifest.groups]
    for group in manifest.groups:
        for run in group.runs:
            wanted = run_digest(key, head, group.group, run)
            if not hmac.compare_digest(wanted, run.digest):
                raise Refused("digest")
    if manifest.namespace != packed_space(key, prompt.space):
        raise Refused("namespace")
    if [(group.group, group.window) for group in manifest.groups] != [
        (group, windows.get(group)) for group in sorted(tables)
    ]:
        raise Refused("groups")
    if cached[0] == cached[1]:
        cached = (0, 0)
    if windows:
        return continued(manifest, prompt, tables, key, cached[1], keep_last)
    length = len(prompt.ids)
    until = max(0, length - keep_last)
    open_ = [at < until and not cached[0] <= at < cached[1] for at in range(length)]
    here = set(range(*cached))
    loads = loads_of(manifest, prompt, key, open_, policy, here)
    count = sum(max(load[1] for load in loads[at]) == APPROXIMATE for at in loads)
    if length and count / length > policy.max_approximate_share:
        loads = loads_of(manifest, prompt, key, open_, Policy(), here)
    pairs: list[Pair] = []
    for place, group in enumerate(manifest.groups):
        size, table = tables[group.group]
        size = size or group.block_size
        for at in sorted(loads):
            source, class_, hops, block = loads[at][place]
            pair = (group.group, block, table[at // size], at, at + 1, at - source, class_, hops)
            before = pairs[-1] if pairs else None
            if before and before[4] == at and before[:3] == pair[:3] and before[5:] == pair[5:]:
                pairs[-1] = (*before[:4], at + 1, *before[5:])
            else:
                pairs.append(pair)
    compute: list[tuple[int, int]] = []
    for at in range(length):
        if at in loads or (at < until and cached[0] <= at < cached[1]):
            continue
        if compute and compute[-1][1] == at:
            compute[-1] = (compute[-1][0], at + 1)
        else:
            compute.append((at, at + 1))
    approximate = [at for at in loads if any(load[1] == APPROXIMATE for load in loads[at])]
    return Plan(
        pairs,
        compute,
        min(approximate, default=length),
        max((load[2] for at in loads for load in loads[at]), default=0),
        len(loads) - len(approximate),
        len(approximate),
        said(manifest, loads, policy) if approximate else None,
    )


def continued(
    manifest: Manifest,
    prompt: Prompt,
    tables: dict[int, tuple[int | None, list[Any]]],
    key: bytes,
    cached: int,
    keep_last: int,
) -> Plan:
    """The plan next to windows and states: every position is tried, from the end on."""
    length = len(prompt.ids)
    everywhere = [True] * length
    sizes = {group.group: tables[group.group][0] or group.block_size for group in manifest.groups}
    sent = {
        group.group: group_loads(
            group, prompt, key, everywhere, Policy(), False, set(), is_alone=False
        )
        for group in manifest.groups
        if group.window != STATE
    }
    states = {
        group.group: {
            run.start: run.blocks[0]
            for run in group.runs
            if run.start <= length
            and run.prefix == prefix_digest(key, prompt, run.start)
            and run.start % sizes[group.group] == 0
        }
        for group in manifest.groups
        if group.window == STATE
    }

    def needs(group: Group, end: int) -> set[int]:
        """The tokens of a window's group without which nothing continues at a position."""
        assert group.window
        first = max(0, end - group.window + 1)
        return set(range(first - first % sizes[group.group], end))

    def continues(end: int) -> bool:
        for group in manifest.groups:
            if group.window is None:
                fits = set(range(cached, end)) <= set(sent[group.group])
            elif group.window == STATE:
                fits = end in (0, cached) or end in states[group.group]
            else:
                fits = needs(group, end) <= set(sent[group.group]) | needs(group, cached)
            if not fits:
                return False
        # Without a group whose layers attend to all tokens, there is what is cached alone.
        return end <= cached or any(group.window is None for group in manifest.groups)

    end = max(at for at in range(max(0, length - keep_last) + 1) if continues(at))
    pairs: list[Pair] = []
    for group in manifest.groups:
        number, size = group.group, sizes[group.group]
        table = tables[number][1]
        if group.window is None:
            local, tokens = dict(zip(range(0, length, size), table, strict=False)), {*range(end)}
            tokens -= {*range(cached)}
        elif group.window == STATE:
            if end not in (0, cached):
                slot = states[number][end]
                pairs.append((number, slot, dict(table).get(end, -1), end, end, 0, EXACT, 0))
            continue
        else:
            local, tokens = dict(table), needs(group, end) - needs(group, cached)
        for at in sorted(tokens):
            block = sent[number][at][3]
            pair = (number, block, local.get(at - at % size, -1), at, at + 1, 0, EXACT, 0)
            before = pairs[-1] if pairs else None
            is_same = before and before[4] == at and before[:2] == pair[:2]
            if before and is_same and before[3] // size == at // size:
                pairs[-1] = (*before[:4], at + 1, *before[5:])
            else:
                pairs.append(pair)
    loaded = max(0, end - cached)
    compute = [(end, length)] if end < length else []
    is_full = any(group.window is None for group in manifest.groups)
    return Plan(pairs, compute, length, 0, loaded if is_full else 0, 0, None)


def said(manifest: Manifest, loads: dict[int, list[Load]], policy: Policy) -> Policy:
    """The policy, with the repair that was really done, and the share that all loads have of it."""
    if policy.repair == "fronts" or policy.recompute_share == 0:
        return policy
    moved, sent_on = False, False
    for place, group in enumerate(manifest.groups):
        labels = {
            block: (run.flags, run.hops)
            for run in group.runs
            if run.flags != LOOKAHEAD
            for block in run.blocks
        }
        for _, _, hops, block in (loads[at][place] for at in loads):
            moved = moved or hops == labels[block][1] + 1
            sent_on = sent_on or labels[block][0] == APPROXIMATE
    if not moved:
        return policy
    share = 0.0 if sent_on else policy.recompute_share
    return replace(policy, repair="fronts", recompute_share=share)


def loads_of(
    manifest: Manifest,
    prompt: Prompt,
    key: bytes,
    open_: list[bool],
    policy: Policy,
    here: set[int],
) -> dict[int, list[Load]]:
    """Loads by position, one per group, of positions that all groups have."""
    takes = policy.approximate and not policy.forbid_kinds and is_strict(manifest.policy, policy)
    is_alone = len(manifest.groups) == 1
    groups = [
        group_loads(group, prompt, key, open_, policy, takes, here, is_alone=is_alone)
        for group in manifest.groups
    ]
    if not groups:
        return {}
    common = set.intersection(*(set(loads) for loads in groups))
    return {at: [loads[at] for loads in groups] for at in sorted(common)}


def group_loads(
    group: Group,
    prompt: Prompt,
    key: bytes,
    open_: list[bool],
    policy: Policy,
    takes: bool,
    here: set[int],
    *,
    is_alone: bool,
) -> dict[int, Load]:
    """`takes`: whether approximate blocks may be loaded; `here`: the positions that are cached."""
    size, length = group.block_size, len(prompt.ids)
    is_approximate = policy.approximate and not policy.forbid_kinds
    loads: dict[int, Load] = {}
    kept: dict[int, int] = {}
    for run in group.runs:
        if run.flags == LOOKAHEAD or run.start >= length:
            continue
        if run.flags == APPROXIMATE and (not takes or run.hops > policy.max_hops):
            continue
        if run.prefix != prefix_digest(key, prompt, run.start):
            continue
        for place, digest in enumerate(run.digests):
            first = run.start + place * size
            stop = min(first + size, run.start + run.num_tokens)
            if stop > length or digest != block_digest(key, prompt, first, stop):
                break
            for at in range(first, stop):
                if open_[at]:
                    loads[at] = (at, run.flags, run.hops, run.blocks[place])
                if open_[at] or (at in here and run.flags == EXACT):
                    kept[at] = at
    is_limited = (
        policy.max_cuts is not None or min(policy.max_lost_context, policy.max_new_context) < 1
    )
    if is_approximate and (is_alone or not is_limited):
        add_moved(group, prompt, key, open_, policy, loads, takes, kept)
    return loads


def is_within(policy: Policy, kept: dict[int, int], start: int, source: int) -> bool:
    """Whether the context of a run is within the limits: rule P17, token by token."""
    before = [(at, kept[at]) for at in sorted(kept) if at < start and kept[at] < source]
    steps = itertools.pairwise([*before, (start, source)])
    cuts = sum((at + 1, there + 1) != after for (at, there), after in steps)
    lost = max(0.0, 1 - len(before) / source) if source else 0.0
    new = max(0.0, 1 - len(before) / start) if start else 0.0
    return (
        (policy.max_cuts is None or cuts <= policy.max_cuts)
        and lost <= policy.max_lost_context
        and new <= policy.max_new_context
    )


@dataclass(frozen=True)
class Match:
    """Consecutive blocks at one distance: (here, there, length, hops, id) of each."""

    blocks: tuple[tuple[int, int, int, int, int], ...]

    @property
    def start(self) -> int:
        return self.blocks[0][0]

    @property
    def end(self) -> int:
        return self.blocks[-1][0] + self.blocks[-1][2]

    def load(self, at: int) -> Load:
        for here, there, length, hops, block in self.blocks:
            if here <= at < here + length:
                return (there + at - here, APPROXIMATE, hops, block)
        raise LookupError(at)

    def rank(self, at: int, stop: int, size: int) -> tuple[int, int, int, int]:
        """The rank of a match that has a token: the least is taken."""
        end = min(self.end, stop)
        inside = [block for block in self.blocks if block[0] < end and block[0] + block[2] > at]
        slot = inside[0][4] * size + (at - inside[0][0])
        return (-end, max(block[3] for block in inside), abs(at - self.load(at)[0]), slot)


def matches_of(  # noqa: PLR0912 - as docs/transfers.md has it, step by step
    group: Group, prompt: Prompt, key: bytes, policy: Policy, min_run: int, takes: bool
) -> tuple[dict[int, list[Match]], int]:
    """The matches that windows nominate, by position, and the partial block's length."""
    length, size = len(prompt.ids), group.block_size
    blocks = {}
    for run in group.runs:
        if run.flags == LOOKAHEAD or run.hops + 1 > policy.max_hops:
            continue
        if run.flags == APPROXIMATE and not takes:
            continue
        for place, digest in enumerate(run.digests):
            there = run.start + place * size
            count = min(size, run.start + run.num_tokens - there)
            blocks[there] = (digest, count, run.hops + 1, run.blocks[place])
    lengths = {block[1] for block in blocks.values()}
    digests = {
        (at, count): block_digest(key, prompt, at, at + count)
        for count in lengths
        for at in range(length - count + 1)
    }
    places: dict[tuple[bytes, int], list[int]] = {}
    for there, (digest, count, _, _) in sorted(blocks.items()):
        places.setdefault((digest, count), []).append(there)
    matches: dict[tuple[int, int], Match] = {}
    deltas = {
        at - there
        for (at, count), digest in digests.items()
        for there in places.get((digest, count), [])
    }
    for delta in deltas:
        chains: list[list[tuple[int, int, int, int, int]]] = []
        for there, (digest, count, hops, block) in sorted(blocks.items()):
            here = there + delta
            if digests.get((here, count)) != digest:
                continue
            if not chains or chains[-1][-1][1] + size != there:
                chains.append([])
            chains[-1].append((here, there, count, hops, block))
        for chain in chains:
            for block_at in chain:
                matches[delta, block_at[0]] = Match(tuple(chain))
    windows: dict[int, list[Match]] = {}
    for (at, count), digest in digests.items():
        near = sorted(places.get((digest, count), []), key=lambda there: (abs(at - there), there))
        # A partial block is not a window unless it is long enough.
        if count == size or count >= min_run:
            found = [matches[at - there, at] for there in near[:MAX_CANDIDATES]]
            windows.setdefault(at, []).extend(found)
    partial = min(lengths, default=size)
    return windows, partial if partial < size else 0


def add_moved(
    group: Group,
    prompt: Prompt,
    key: bytes,
    open_: list[bool],
    policy: Policy,
    loads: dict[int, Load],
    takes: bool,
    kept: dict[int, int],
) -> None:
    """`kept`: for each token of the prompt that is the sender's KV, its position there."""
    length, size = len(prompt.ids), group.block_size
    min_run = 16 if policy.min_run is None else policy.min_run
    windows, partial = matches_of(group, prompt, key, policy, min_run, takes)
    is_left = [open_[at] and at not in loads for at in range(length)]
    pieces: list[tuple[int, int, Any]] = []
    at = 0
    while at < length:
        if not is_left[at]:
            at += 1
            continue
        stop = next((token for token in range(at, length) if not is_left[token]), length)
        found = [
            match
            for window in range(max(0, at - size - partial + 1), at + 1)
            for match in windows.get(window, [])
            if match.start <= at < match.end and match.end - match.start >= min_run
        ]
        if not found:
            at += 1
            continue
        best = min(found, key=lambda match: match.rank(at, stop, size))
        if min(best.end, stop) - at < min_run:
            at += 1
            continue
        pieces.append((at, min(best.end, stop), best))
        at = min(best.end, stop)
    allowed = []
    for at, end, best in pieces:
        inside = range(at + policy.recompute_first, end - policy.recompute_last)
        if inside and is_within(policy, kept, inside[0], best.load(inside[0])[0]):
            allowed.append((at, end, best))
            kept.update((token, best.load(token)[0]) for token in inside)
    pieces = allowed
    wanted = math.ceil(policy.recompute_share * sum(end - at for at, end, _ in pieces))
    first = 0
    while sum(min(first, end - at) for at, end, _ in pieces) < wanted:
        first += 1
    first = max(first, policy.recompute_first)
    for at, end, best in pieces:
        for token in range(at + first, end - policy.recompute_last):
            loads[token] = best.load(token)
