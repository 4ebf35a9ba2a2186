"""Copies rows between a pool and the host, and rotates what moves on the way into the pool."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

try:
    import torch
except ImportError as error:
    _MISSING = (
        "SpanLoader and rows_of of kvtrie.store need torch: pip install 'kvtrie[store,torch]'"
    )
    raise ImportError(_MISSING, name="torch") from error

from kvtrie.pool.kv_pool import KVPool
from kvtrie.store.shape import SpanRows, SpanShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvtrie.store.usable import PlacedSpan

# Tokens that are rotated at once, in a pool of twice as many.
_STAGED: Final = 2048
# Bytes of short runs that are written at once: some hundred tokens of a model of 8B.
_JOINED_BYTES: Final = 64 << 20
_MOVE: Final = [(name, "i8") for name in ("source_slot", "dest_slot", "num_tokens", "delta")]


@dataclass(frozen=True, slots=True)
class Arrived:
    """Verified rows of one piece of the prompt, of one label."""

    span: PlacedSpan
    rows: SpanRows


def write(arrived: list[Arrived], pool: KVPool, table: NDArray[np.integer[Any]]) -> None:
    """Write rows where they belong, rotated to their positions."""
    joined = _joined(arrived, SpanShape.of(pool.layout).token_bytes)
    for one in joined:
        if not one.delta:
            k, v = _tensors(one.rows, pool)
            pool.scatter(k, v, table, one.start)
    _rotate([one for one in joined if one.delta], pool, table)


@dataclass(frozen=True, slots=True)
class _Joined:
    """Rows of spans that continue each other, all rotated by the same."""

    start: int
    delta: int
    hops: int
    rows: list[SpanRows]

    @property
    def num_tokens(self) -> int:
        return sum(one.num_tokens for one in self.rows)

    def within(self, num_tokens: int) -> Iterator[tuple[int, list[SpanRows]]]:
        """In parts of so many tokens: where each begins, and its rows."""
        if len(self.rows) > 1:  # which is short
            yield self.start, self.rows
            return
        for at in range(0, self.num_tokens, num_tokens):
            yield self.start + at, [self.rows[0].part(at, at + num_tokens)]


def _joined(arrived: Sequence[Arrived], token_bytes: int) -> list[_Joined]:
    """Spans in their order; short ones that continue each other together.

    Else whoever has many short messages in a prompt chooses how long it takes to write it.
    """
    most = min(_STAGED, _JOINED_BYTES // token_bytes)
    found: list[_Joined] = []
    end = count = 0
    for one in arrived:
        span = one.span
        last = found[-1] if found else None
        count += one.rows.num_tokens
        if (
            last is not None
            and span.start == end
            and span.delta == last.delta
            and (not span.delta or span.hops == last.hops)
            and count <= most
        ):
            last.rows.append(one.rows)
        else:
            found.append(_Joined(span.start, span.delta, span.hops, [one.rows]))
            count = one.rows.num_tokens
        end = span.end
    return found


def _rotate(moved: list[_Joined], pool: KVPool, table: NDArray[np.integer[Any]]) -> None:
    """Rotate rows in a small pool of their own, then write them where they belong.

    Short ones are rotated together, each by its own delta: a prompt may have a thousand.
    """
    if not moved:
        return
    size = pool.layout.block_size
    counts = [one.num_tokens for one in moved]
    most = _JOINED_BYTES // SpanShape.of(pool.layout).token_bytes
    together = min(_STAGED, most, sum(counts))
    half = -(-min(_STAGED, max(together, *counts)) // size)
    staging = KVPool(
        replace(pool.layout, axes=None), pool.rope, num_blocks=2 * half, device=pool.device
    )
    from_blocks, to_blocks = np.arange(half), np.arange(half, 2 * half)
    for some in _batches(moved, half * size, together):
        k, v = _tensors([rows for one in some for rows in one.rows], pool)
        staging.scatter(k, v, from_blocks, 0)
        places = [0, *accumulate(one.num_tokens for one in some)]
        moves = [
            (at, half * size + at, one.num_tokens, one.delta)
            for at, one in zip(places, some, strict=False)
        ]
        # The delta is one of positions, and `_rotatable` has looked at the items.
        staging.apply(np.array(moves, dtype=_MOVE), hops=some[0].hops, items=())
        k, v = staging.gather(to_blocks, 0, places[-1])
        for one, (low, high) in zip(some, pairwise(places), strict=True):
            pool.scatter(k[:, low:high], None if v is None else v[:, low:high], table, one.start)


def _batches(moved: Iterable[_Joined], most: int, together: int) -> Iterator[list[_Joined]]:
    """What is rotated in one call: a part of so many tokens at most, or several short ones.

    Args:
        moved: What is to be rotated.
        most: Tokens of a part.
        together: Tokens of several ones.
    """
    batch: list[_Joined] = []
    count = 0
    for one in sorted(moved, key=lambda one: one.hops):
        for start, rows in one.within(most):
            part = replace(one, start=start, rows=rows)
            if batch and (batch[0].hops != one.hops or count + part.num_tokens > together):
                yield batch
                batch, count = [], 0
            batch.append(part)
            count += part.num_tokens
    if batch:
        yield batch


def _tensors(rows: Sequence[SpanRows], pool: KVPool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows, one after another, as the pool's tensors ``[layers, tokens, heads, channels]``."""
    layout = pool.layout

    def tensor(sides: list[NDArray[np.uint8]], width: int) -> torch.Tensor:
        # The rows may be gone before a copy that does not block is done.
        if len(sides) == 1:
            numbers = torch.from_numpy(np.ascontiguousarray(sides[0])).to(pool.device)
        else:
            num_layers, _, num_bytes = sides[0].shape
            count = sum(one.shape[1] for one in sides)
            numbers = torch.empty(
                (num_layers, count, num_bytes), dtype=torch.uint8, device=pool.device
            )
            at = 0
            for one in sides:
                numbers[:, at : at + one.shape[1]] = torch.from_numpy(np.ascontiguousarray(one))
                at += one.shape[1]
        shape = (*numbers.shape[:2], layout.num_kv_heads, width)
        return numbers.view(pool.dtype).reshape(shape)

    v = tensor([one.v for one in rows], layout.v_row) if layout.v_row else None
    return tensor([one.k for one in rows], layout.k_row), v


def empty_pinned(shape: SpanShape, num_tokens: int) -> SpanRows:
    """Rows to be filled, in memory that a GPU reads without another copy."""
    sides = [
        torch.empty(
            (shape.num_layers, num_tokens, width), dtype=torch.uint8, pin_memory=True
        ).numpy()
        for width in (shape.k_bytes, shape.v_bytes)
    ]
    return SpanRows(sides[0], sides[1])


def rows_of(pool: KVPool, table: NDArray[np.integer[Any]], start: int, end: int) -> SpanRows:
    """Copy positions of a pool to the host, as `SpanStore.put` takes them.

    Args:
        pool: The pool.
        table: A block table from position 0.
        start: First position.
        end: Position after the last.

    Raises:
        LayoutError: The rows of layers differ in shape.
        ValueError: A position is outside the table.
    """
    return rows_from(*pool.gather(table, start, end))


def rows_from(k: torch.Tensor, v: torch.Tensor | None) -> SpanRows:
    """What `KVPool.gather` has returned, copied to the host."""
    num_layers, num_tokens = k.shape[:2]
    sides = [
        np.empty((num_layers, num_tokens, 0), np.uint8)
        if one is None
        else one.reshape(num_layers, num_tokens, -1).view(torch.uint8).cpu().numpy()
        for one in (k, v)
    ]
    return SpanRows(sides[0], sides[1])
