"""The value of a run as bytes: a sealed header that labels it, sealed units of KV, and marks."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtrie._core import ReusePolicy
from kvtrie.store.keys import CONTEXT_UNIT, HEADER_UNIT, ID_BYTES, VERSION, Sealer, TenantKey
from kvtrie.store.shape import HEADER_BYTES, SEAL_BYTES, UNIT_TOKENS, SpanRows, SpanShape

if TYPE_CHECKING:
    from kvtrie.store.runs import SpanRun

_MAGIC: Final = struct.pack("<8sI", b"kvtrie.s", VERSION)
_TEXT_BYTES: Final = HEADER_BYTES - len(_MAGIC) - ID_BYTES - SEAL_BYTES
_POLICY_FIELDS: Final = (
    *("min_run", "max_hops", "max_approximate_share", "recompute_first", "recompute_last"),
    *("forbid_kinds", "max_cuts", "max_lost_context", "max_new_context", "scope"),
    *("shared_prefix", "recompute_share", "repair"),
)


@dataclass(frozen=True, slots=True)
class SpanHeader:
    """What a stored run is: where its KV was computed, and how exact it is.

    Attributes:
        start: Number of its first token then.
        position: Position of its first token then, by which K was rotated (`SpanRun.position`).
        num_tokens: Its length.
        prefix: Digest of all tokens before it then.
        exact_until: How many of its tokens, from the first, are exact.
        hops: Hops of the others.
        policy: The policy that the others were built under; None if it is not known.
        session: Digest of the conversation that it was computed in, if one was named.
        kinds: Kinds of the spans that it overlaps.
        written: When it was stored, in seconds since 1970.
        context_bytes: Bytes of the marks of the prompt that it was computed in; 0 for none.
        turn: The name of these marks; None without them.
    """

    start: int
    position: int
    num_tokens: int
    prefix: str
    exact_until: int
    hops: int
    policy: ReusePolicy | None
    session: str | None
    kinds: tuple[str, ...]
    written: int
    context_bytes: int = 0
    turn: str | None = None

    def is_at(self, run: SpanRun) -> bool:
        """Whether a prompt's run has the position and all tokens before it that this one had."""
        return self.start == run.start and self.prefix == run.prefix


_HEADER_FIELDS: Final = tuple(one.name for one in fields_of(SpanHeader))


def write_value(
    shape: SpanShape,
    tenant: TenantKey,
    name: str,
    header: SpanHeader,
    rows: SpanRows,
    context: bytes = b"",
) -> bytearray:
    """Make the value of a run. ``context`` are the marks that the header counts.

    Raises:
        ValueError: The header has no room: too many kinds.
    """
    # Not asdict, which copies deeply and takes as long as to seal a short run.
    fields: dict[str, Any] = {name: getattr(header, name) for name in _HEADER_FIELDS}
    if header.policy is not None:
        fields["policy"] = {field: getattr(header.policy, field) for field in _POLICY_FIELDS}
    text = json.dumps(fields, separators=(",", ":")).encode()
    if len(text) > _TEXT_BYTES:
        msg = f"SpanStore.put: the header has {len(text)} bytes; the limit is {_TEXT_BYTES}"
        raise ValueError(msg)
    value_id = os.urandom(ID_BYTES)
    sealer = tenant.sealer(name, value_id)
    parts = [_MAGIC, value_id, sealer.seal(HEADER_UNIT, text.ljust(_TEXT_BYTES))]
    for block, start in enumerate(range(0, rows.num_tokens, UNIT_TOKENS)):
        some = rows.part(start, start + UNIT_TOKENS)
        for layer in range(shape.num_layers):
            unit = some.k[layer].tobytes() + some.v[layer].tobytes()
            parts.append(sealer.seal(block * shape.num_layers + layer, unit))
    if context:
        parts.append(sealer.seal(CONTEXT_UNIT, context))
    return bytearray().join(parts)


def context_at(shape: SpanShape, header: SpanHeader) -> tuple[int, int]:
    """Where the marks are in the value of a run that has some."""
    start = shape.num_bytes(header.num_tokens)
    return start, start + header.context_bytes + SEAL_BYTES


def read_header(tenant: TenantKey, name: str, raw: memoryview) -> tuple[SpanHeader, Sealer] | str:
    """Verify a header, or return why it cannot be used."""
    if len(raw) != HEADER_BYTES:
        return "truncated"
    if raw[: len(_MAGIC)] != _MAGIC:
        return "version" if raw[:8] == _MAGIC[:8] else "malformed"
    body = len(_MAGIC) + ID_BYTES
    sealer = tenant.sealer(name, bytes(raw[len(_MAGIC) : body]))
    text = sealer.open(HEADER_UNIT, raw[body:])
    if text is None:
        return "forged"
    # Whoever has sealed it has the key and wrote what `write_value` writes.
    fields: dict[str, Any] = json.loads(bytes(text))
    policy = fields.pop("policy")
    fields["kinds"] = tuple(fields["kinds"])
    if policy is not None:
        policy = ReusePolicy(approximate=True, **policy)
    return SpanHeader(policy=policy, **fields), sealer


def read_range(
    shape: SpanShape, sealer: Sealer, raw: memoryview, at: tuple[int, int], into: SpanRows
) -> bool:
    """Verify the blocks that hold a range of tokens, and copy the range.

    Args:
        shape: The geometry.
        sealer: That of the value.
        raw: The blocks' bytes.
        at: The range, within the run.
        into: Rows of the range. After False their bytes mean nothing.

    Returns:
        Whether every unit is what was stored.
    """
    start, end = at
    first, _ = shape.blocks_at(start, end)
    done, block = 0, first
    while done < len(raw):
        size = min(shape.block_bytes(UNIT_TOKENS), len(raw) - done)
        whole, rest = divmod(size - shape.num_layers * SEAL_BYTES, shape.token_bytes)
        if rest or whole < 1:
            return False
        here = block * UNIT_TOKENS
        low, high = max(start, here), min(end, here + whole)
        step = size // shape.num_layers
        for layer in range(shape.num_layers):
            sealed = raw[done + layer * step : done + (layer + 1) * step]
            unit = sealer.open(block * shape.num_layers + layer, sealed)
            if unit is None:
                return False
            numbers = np.frombuffer(unit, np.uint8)
            k = numbers[: whole * shape.k_bytes].reshape(whole, shape.k_bytes)
            v = numbers[whole * shape.k_bytes :].reshape(whole, shape.v_bytes)
            into.k[layer, low - start : high - start] = k[low - here : high - here]
            into.v[layer, low - start : high - start] = v[low - here : high - here]
        done += size
        block += 1
    return True
