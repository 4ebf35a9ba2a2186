"""Naive manifests of transfers: hashlib, msgpack, and one token after the other.

The code follows docs/transfers.md, not the extension. It is slow on purpose.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgpack

EXACT, APPROXIMATE, LOOKAHEAD = 0, 1, 2
STATE = 0
"""Stands for a window where a group has states."""
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
