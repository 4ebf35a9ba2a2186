"""Naive manifests and plans of transfers: hashlib, msgpack, and one token after the other.

The code follows docs/transfers.md, not the extension. It is slow on purpose.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import math
import struct
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgpack

EXACT, APPROXIMATE, LOOKAHEAD = 0, 1, 2
STATE = 0
"""Stands for a window where a group has states."""
MAX_CANDIDATES = 64
MAX_HOPS = 255


class Refused(Exception):  # noqa: N818 - as the extension names it
    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


@dataclass(frozen=True)
class Space:
    model: str = "m"
    kv_dtype: str = "auto"
    rope: str = "default"
    adapter: str | None = None
    salt: str | None = None


@dataclass(frozen=True)
class Prompt:
    ids: tuple[int, ...]
    items: tuple[tuple[int, int, bytes], ...] = ()
    space: Space = field(default_factory=Space)


@dataclass(frozen=True)
class Run:
    start: int
    num_tokens: int
    flags: int
    hops: int
    blocks: tuple[int, ...]
    prefix: bytes
    digests: tuple[bytes, ...]
    digest: bytes = b""


@dataclass(frozen=True)
class Group:
    group: int
    block_size: int
    runs: tuple[Run, ...]
    window: int | None = None
    """None: its layers attend to all tokens."""

    @property
    def head(self) -> list[int | None]:
        return [self.group, self.block_size, self.window]


@dataclass(frozen=True)
class Manifest:
    """A manifest that was read; `namespace` and `policy` are as they were packed."""

    namespace: tuple[Any, ...]
    groups: tuple[Group, ...]
    policy: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Limits:
    max_bytes: int = 64 << 20
    max_groups: int = 64
    max_runs: int = 1 << 16
    max_blocks: int = 1 << 22
    max_tokens: int = 1 << 26
    max_block_size: int = 1 << 12


@dataclass(frozen=True)
class Policy:
    approximate: bool = False
    min_run: int | None = None
    max_hops: int = 1
    max_approximate_share: float = 1.0
    recompute_first: int = 0
    recompute_last: int = 0
    forbid_kinds: tuple[str, ...] = ()
    max_cuts: int | None = None
    max_lost_context: float = 1.0
    max_new_context: float = 1.0
    scope: Literal["conversation", "namespace"] = "conversation"
    shared_prefix: int = 16
    recompute_share: float = 0.0
    repair: Literal["fronts", "ngrams", "probe", "question", "adaptive"] = "fronts"


Head = tuple[tuple[Any, ...], tuple[Any, ...] | None, list[list[int | None]]]
"""The namespace and the policy, as packed, and number, block size and window of each group."""

Tables = dict[int, tuple[int, list[Any]]]
"""Tokens per block and ids by group: of groups with windows or states, pairs (position, id)."""

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


# What is hashed.


def keyed(key: bytes, person: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16, key=key, person=person).digest()


def encoded(prompt: Prompt, start: int, end: int) -> bytes:
    data = struct.pack(f"<I{end - start}I", 1, *prompt.ids[start:end])
    pieces = 0
    for first, last, digest in prompt.items:
        begin, stop = max(first, start), min(last, end)
        if begin < stop:
            data += struct.pack("<4I", begin - start, stop - start, begin - first, len(digest))
            data += digest
            pieces += 1
    return data + struct.pack("<2I", pieces, end - start)


def block_digest(key: bytes, prompt: Prompt, start: int, end: int) -> bytes:
    return keyed(key, b"kvtrie.block", encoded(prompt, start, end))


def prefix_digest(key: bytes, prompt: Prompt, start: int) -> bytes:
    return keyed(key, b"kvtrie.prefix", encoded(prompt, 0, start))


def packed_space(key: bytes, space: Space) -> tuple[Any, ...]:
    salt = None if space.salt is None else keyed(key, b"kvtrie.salt", space.salt.encode())
    return (space.model, space.kv_dtype, space.rope, space.adapter, salt)


def packed_policy(policy: Policy | None) -> tuple[Any, ...] | None:
    if policy is None:
        return None
    return (
        policy.min_run,
        policy.max_hops,
        policy.max_approximate_share,
        policy.recompute_first,
        policy.recompute_last,
        policy.max_cuts,
        policy.max_lost_context,
        policy.max_new_context,
        policy.shared_prefix if policy.scope == "conversation" else None,
        policy.recompute_share,
        policy.repair,
    )


def is_strict(built: tuple[Any, ...] | None, policy: Policy) -> bool:
    """Whether a packed policy is at least as strict as another; None is the laxest."""
    lax = (None, MAX_HOPS, 1.0, 0, 0, None, 1.0, 1.0, None, 0.0, "fronts")
    min_run, hops, share, first, last, cuts, lost, new, shared, again, repair = built or lax
    asked_shared = policy.shared_prefix if policy.scope == "conversation" else 0
    as_repaired = again >= policy.recompute_share and repair == policy.repair
    return (
        (min_run or 0) >= (policy.min_run or 0)
        and hops <= policy.max_hops
        and share <= policy.max_approximate_share
        and first >= policy.recompute_first
        and last >= policy.recompute_last
        and (policy.max_cuts is None or (cuts is not None and cuts <= policy.max_cuts))
        and lost <= policy.max_lost_context
        and new <= policy.max_new_context
        and (shared or 0) >= asked_shared
        and (policy.recompute_share == 0 or as_repaired)
    )


def fields_of(run: Run) -> list[Any]:
    ids = struct.pack(f"<{len(run.blocks)}I", *run.blocks)
    digests = b"".join(run.digests)
    return [run.start, run.num_tokens, run.flags, run.hops, ids, run.prefix, digests]


def run_digest(key: bytes, head: Head, group: int, run: Run, context: bytes = b"") -> bytes:
    start = [*([context] if context else []), 3]
    values = [*start, *head, group, *fields_of(run)]
    return keyed(key, b"kvtrie.run", b"".join(msgpack.packb(value) for value in values))


# Writing.


def manifest_of(
    prompt: Prompt,
    tables: Tables,
    labels: list[tuple[int, int] | None],
    num_lookahead: int,
    key: bytes,
    built: Policy | None = None,
    windows: dict[int, int] | None = None,
) -> Manifest:
    """`built` is the policy of approximate KV; `windows` are by group, 0 for states."""
    windows = windows or {}
    namespace = packed_space(key, prompt.space)
    full = {group: table for group, table in tables.items() if group not in windows}
    built_under = packed_policy(built) if is_approximate(labels, full) else None
    heads = [[group, tables[group][0], windows.get(group)] for group in sorted(tables)]
    head = namespace, built_under, heads
    groups = []
    for group in sorted(tables):
        size, table = tables[group]
        window = windows.get(group)
        if window is None:
            made = runs_from_0(prompt, size, table, labels, num_lookahead, key)
        else:
            made = runs_at(prompt, size, table, labels, key, is_state=window == STATE)
        signed = [replace(run, digest=run_digest(key, head, group, run)) for run in made]
        groups.append(Group(group, size, tuple(signed), window))
    return Manifest(namespace, tuple(groups), built_under)


def runs_from_0(
    prompt: Prompt,
    size: int,
    table: list[int],
    labels: list[tuple[int, int] | None],
    num_lookahead: int,
    key: bytes,
) -> list[Run]:
    end = len(labels)
    runs: list[tuple[int, int, int, int, list[int]]] = []
    for block, first in enumerate(range(0, end, size)):
        inside = labels[first : first + size]
        known = [label for label in inside if label is not None]
        if len(known) < len(inside):
            continue
        flags = max(label[0] for label in known)
        hops = max((label[1] for label in known if label[0] == APPROXIMATE), default=0)
        if runs and runs[-1][:2] == (flags, hops) and runs[-1][3] == first:
            _, _, start, _, ids = runs.pop()
        else:
            start, ids = first, []
        runs.append((flags, hops, start, first + len(inside), [*ids, table[block]]))
    made = [run_of(prompt, size, key, *run) for run in runs]
    held, issued = -(-end // size), -(-(end + num_lookahead) // size)
    if held < issued:
        ids = table[held:issued]
        made.append(Run(held * size, len(ids) * size, LOOKAHEAD, 0, tuple(ids), b"", ()))
    return made


def runs_at(
    prompt: Prompt,
    size: int,
    table: list[tuple[int, int]],
    labels: list[tuple[int, int] | None],
    key: bytes,
    *,
    is_state: bool,
) -> list[Run]:
    """The runs of a group with a window or states: those of exact KV."""
    exact = [label is not None and label[0] == EXACT for label in labels]
    runs: list[tuple[int, int, list[int]]] = []
    for first, id_ in table:
        if is_state:
            if first <= len(exact) and all(exact[:first]):
                runs.append((first, first, [id_]))
        elif exact[first : first + size] and all(exact[first : first + size]):
            stop = min(first + size, len(exact))
            if runs and runs[-1][1] == first:
                start, _, ids = runs.pop()
                runs.append((start, stop, [*ids, id_]))
            else:
                runs.append((first, stop, [id_]))
    return [run_of(prompt, size, key, EXACT, 0, *run) for run in runs]


def run_of(
    prompt: Prompt,
    size: int,
    key: bytes,
    flags: int,
    hops: int,
    first: int,
    stop: int,
    ids: list[int],
) -> Run:
    digests = [
        block_digest(key, prompt, at, min(at + size, stop)) for at in range(first, stop, size)
    ]
    prefix = prefix_digest(key, prompt, first)
    return Run(first, stop - first, flags, hops, tuple(ids), prefix, tuple(digests))


def is_approximate(labels: list[tuple[int, int] | None], tables: Tables) -> bool:
    """Whether a whole block with an approximate token is sent."""
    return any(
        None not in block and APPROXIMATE in [label[0] for label in block if label]
        for size, _ in tables.values()
        for block in (labels[at : at + size] for at in range(0, len(labels), size))
    )


def as_value(manifest: Manifest) -> list[Any]:
    groups = [
        [*group.head, [[*fields_of(run), run.digest] for run in group.runs]]
        for group in manifest.groups
    ]
    return ["kvtrie.manifest", 3, list(manifest.namespace), manifest.policy, groups]


def to_bytes(manifest: Manifest) -> bytes:
    packed: bytes = msgpack.packb(as_value(manifest))
    return packed


# Reading.


def from_bytes(raw: bytes, limits: Limits | None = None) -> Manifest:  # noqa: PLR0912 - in order
    limits = limits or Limits()
    if len(raw) > limits.max_bytes:
        raise Refused("limits", "bytes")
    try:
        value = msgpack.unpackb(raw, strict_map_key=False)
        packed = msgpack.packb(value)
    except Exception as error:
        raise Refused("malformed", str(error)) from error
    if packed != raw:
        raise Refused("malformed", "another encoding is shorter")
    if not isinstance(value, list) or len(value) < 2 or value[0] != "kvtrie.manifest":
        raise Refused("malformed", "no manifest")
    if not is_count(value[1]):
        raise Refused("malformed", "version")
    if value[1] != 3:
        raise Refused("version")
    if len(value) != 5:
        raise Refused("malformed", "entries")
    namespace = checked_namespace(value[2])
    policy = checked_policy(value[3])
    found: list[Group] = []
    for item in listed(value[4], None, "groups", limits.max_groups):
        group, size, window, runs = listed(item, 4, "a group")
        if not is_count(group) or group >= 2**31 or (found and group <= found[-1].group):
            raise Refused("malformed", "group")
        if not is_count(size) or size == 0:
            raise Refused("malformed", "block size")
        if size > limits.max_block_size:
            raise Refused("limits", "block size")
        if window is not None and (not is_count(window) or window == 1 or window >= 2**32):
            raise Refused("malformed", "window")
        left = limits.max_runs - sum(len(group.runs) for group in found)
        blocks = limits.max_blocks - sum(len(r.blocks) for group in found for r in group.runs)
        made: list[Run] = []
        for run in listed(runs, None, "runs", left):
            made.append(checked_run(run, size, window, made, blocks, limits))
        ids = [block for run in made for block in run.blocks]
        if len(set(ids)) < len(ids):
            raise Refused("malformed", "a block twice")
        found.append(Group(group, size, tuple(made), window))
    return Manifest(namespace, tuple(found), policy)


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def listed(value: Any, length: int | None, what: str, limit: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise Refused("malformed", what)
    if limit is not None and len(value) > limit:
        raise Refused("limits", what)
    return value


def checked_namespace(value: Any) -> tuple[Any, ...]:
    model, kv_dtype, rope, adapter, salt = listed(value, 5, "namespace")
    texts = [model, kv_dtype, rope] + ([] if adapter is None else [adapter])
    if not all(isinstance(text, str) and text for text in texts):
        raise Refused("malformed", "a name")
    if salt is not None and not (isinstance(salt, bytes) and len(salt) == 16):
        raise Refused("malformed", "salt")
    return (model, kv_dtype, rope, adapter, salt)


def checked_policy(value: Any) -> tuple[Any, ...] | None:
    if value is None:
        return None
    fields = listed(value, 11, "policy")
    min_run, hops, share, first, last, cuts, lost, new, shared, again, repair = fields
    counts = [number for number in (min_run, cuts, shared) if number is not None]
    if not all(is_count(number) for number in (*counts, hops, first, last)):
        raise Refused("malformed", "a number of the policy")
    for one in (share, lost, new, again):
        if not isinstance(one, float) or not 0 <= one <= 1 or math.copysign(1, one) < 0:
            raise Refused("malformed", "a share of the policy")
    if hops > MAX_HOPS or (cuts or 0) >= 2**16 or (min_run or 8) < 8 or shared == 0:
        raise Refused("malformed", "a limit of the policy")
    if min_run == 0 or repair not in ("fronts", "ngrams", "probe", "question", "adaptive"):
        raise Refused("malformed", "the repair of the policy")
    return tuple(fields)


def checked_run(  # noqa: PLR0912 - one step after the other
    value: Any, size: int, window: int | None, made: list[Run], blocks_left: int, limits: Limits
) -> Run:
    start, tokens, flags, hops, ids, prefix, digests, digest = listed(value, 8, "a run")
    if not all(is_count(number) for number in (start, tokens, flags, hops)):
        raise Refused("malformed", "numbers")
    if start + tokens > min(limits.max_tokens, 2**32 - 1):
        raise Refused("limits", "tokens")
    if flags > LOOKAHEAD or hops > (MAX_HOPS if flags == APPROXIMATE else 0):
        raise Refused("malformed", "label")
    ahead = flags == LOOKAHEAD
    if window is not None and flags != EXACT:
        raise Refused("malformed", "label")
    is_state = window == STATE
    if start % size or (ahead and tokens % size):
        raise Refused("malformed", "geometry")
    if (tokens > 0 or start == 0) if is_state else tokens == 0:
        raise Refused("malformed", "geometry")
    if made:
        last = made[-1]
        is_partial = any(run.num_tokens % size for run in made)
        if start < last.start + last.num_tokens or last.flags == LOOKAHEAD:
            raise Refused("malformed", "order")
        if is_partial and not ahead:
            raise Refused("malformed", "order")
        if is_state and start == last.start:
            raise Refused("malformed", "order")
    blocks = 1 if is_state else -(-tokens // size)
    if sum(len(run.blocks) for run in made) + blocks > blocks_left:
        raise Refused("limits", "blocks")
    hashed = 0 if ahead or is_state else blocks
    lengths = [4 * blocks, 0 if ahead else 16, 16 * hashed, 16]
    for data, length in zip((ids, prefix, digests, digest), lengths, strict=True):
        if not isinstance(data, bytes) or len(data) != length:
            raise Refused("malformed", "bytes")
    numbers = struct.unpack(f"<{blocks}I", ids)
    if any(number >= 2**31 for number in numbers):
        raise Refused("malformed", "block id")
    parts = tuple(digests[at : at + 16] for at in range(0, len(digests), 16))
    return Run(start, tokens, flags, hops, numbers, prefix, parts, digest)


# Planning.

Load = tuple[int, int, int, int]
"""What one token is loaded from: position there, class, hops, block id."""


def plan(  # noqa: PLR0912 - one step after the other
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


def matches_of(  # noqa: PLR0912 - one step after the other
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
