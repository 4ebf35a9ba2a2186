"""What a stored run consists of: sizes of its units, and where each is in the value.

A value is a header of 1,024 bytes, then the run's blocks of 16 tokens, each with one unit per
layer: the block's rows of K, its rows of V, and 16 bytes by which the unit is verified. So a range
of tokens is one range of bytes, and a unit is what can be verified alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtrie._core import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvtrie.pool.layout import KVLayout

HEADER_BYTES: Final = 1024
SEAL_BYTES: Final = 16
UNIT_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class SpanRows:
    """K and V of some tokens as bytes.

    Args:
        k: ``uint8[layers, tokens, bytes of all heads of K]``, contiguous in its last axis.
        v: The same of V; with 0 bytes in its last axis where there is no V.
    """

    k: NDArray[np.uint8]
    v: NDArray[np.uint8]

    @property
    def num_tokens(self) -> int:
        """Tokens that the rows are of."""
        return int(self.k.shape[1])

    def part(self, start: int, end: int) -> SpanRows:
        """The rows of tokens ``[start, end)``, as views."""
        return SpanRows(self.k[:, start:end], self.v[:, start:end])

    def joined(self, *others: SpanRows) -> SpanRows:
        """These rows and those of the tokens after them, as copies."""
        k, v = ([getattr(one, side) for one in (self, *others)] for side in ("k", "v"))
        return SpanRows(np.concatenate(k, axis=1), np.concatenate(v, axis=1))


@dataclass(frozen=True, slots=True)
class SpanShape:
    """The KV geometry of a store: what one token takes in one layer.

    Args:
        num_layers: Attention layers.
        num_kv_heads: KV heads per layer.
        k_bytes: Bytes of one token's K in one layer, all heads together.
        v_bytes: The same of V; 0 for none.
        kv_dtype: Name of the element type, or of the quantisation.

    Raises:
        ValueError: A size is below 1 (``v_bytes``: below 0).

    Example:
        >>> shape = SpanShape(
        ...     num_layers=2, num_kv_heads=1, k_bytes=64, v_bytes=64, kv_dtype="float32"
        ... )
        >>> shape.num_bytes(16) - 1024, shape.blocks_at(16, 17)
        (4128, (1, 2))
    """

    num_layers: int
    num_kv_heads: int
    k_bytes: int
    v_bytes: int
    kv_dtype: str

    def __post_init__(self) -> None:
        for name, least in (("num_layers", 1), ("num_kv_heads", 1), ("k_bytes", 1), ("v_bytes", 0)):
            if getattr(self, name) < least:
                msg = f"SpanShape: {name} is {getattr(self, name)}; it must be at least {least}"
                raise ValueError(msg)

    @classmethod
    def of(cls, layout: KVLayout) -> SpanShape:
        """The geometry of a pool. Its block size does not matter.

        Raises:
            LayoutError: The rows of layers differ in shape or element type.
        """
        if not layout.is_uniform:
            msg = (
                "SpanShape: the rows of this pool's layers differ in shape or element type "
                f"({layout.kv_dtype}); a store needs one"
            )
            raise LayoutError(msg)
        heads = layout.num_kv_heads * layout.item_size
        return cls(
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            k_bytes=heads * layout.k_row,
            v_bytes=heads * layout.v_row,
            kv_dtype=layout.kv_dtype,
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V, all layers together."""
        return self.num_layers * (self.k_bytes + self.v_bytes)

    def block_bytes(self, num_tokens: int) -> int:
        """Bytes of a block of tokens with what its units are verified by."""
        return num_tokens * self.token_bytes + self.num_layers * SEAL_BYTES

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of the value of a run."""
        whole, rest = divmod(num_tokens, UNIT_TOKENS)
        blocks = whole * self.block_bytes(UNIT_TOKENS)
        return HEADER_BYTES + blocks + (self.block_bytes(rest) if rest else 0)

    def blocks_at(self, start: int, end: int) -> tuple[int, int]:
        """The blocks ``[first, last)`` that hold a range of a run's tokens."""
        return start // UNIT_TOKENS, -(-end // UNIT_TOKENS)

    def bytes_at(self, first: int, last: int, num_tokens: int) -> tuple[int, int]:
        """Where blocks ``[first, last)`` are in the value of a run of ``num_tokens``."""
        size = self.block_bytes(UNIT_TOKENS)
        end = self.num_bytes(num_tokens)
        return HEADER_BYTES + first * size, min(HEADER_BYTES + last * size, end)

    def empty(self, num_tokens: int) -> SpanRows:
        """Rows to read into, whose bytes mean nothing yet."""
        layers = self.num_layers
        return SpanRows(
            np.empty((layers, num_tokens, self.k_bytes), np.uint8),
            np.empty((layers, num_tokens, self.v_bytes), np.uint8),
        )

    def check(self, call: str, rows: SpanRows, num_tokens: int) -> None:
        """Check rows.

        Raises:
            ValueError: They are of another shape or element type.
        """
        for name, found, width in (("k", rows.k, self.k_bytes), ("v", rows.v, self.v_bytes)):
            want = (self.num_layers, num_tokens, width)
            if found.shape != want or found.dtype != np.uint8:
                msg = f"{call}: {name} is {found.dtype}{found.shape}; it must be uint8{want}"
                raise ValueError(msg)

    def fields(self) -> list[int | str]:
        """The geometry as the descriptor of a store has it."""
        return [
            self.num_layers,
            self.num_kv_heads,
            self.k_bytes,
            self.v_bytes,
            self.kv_dtype,
            UNIT_TOKENS,
        ]


def check_ranges(call: str, ranges: Sequence[tuple[int, int]], num_tokens: int) -> None:
    """Check ranges of a run's tokens.

    Raises:
        ValueError: One is empty or outside the run.
    """
    for start, end in ranges:
        if not 0 <= start < end <= num_tokens:
            msg = f"{call}: range ({start}, {end}) is empty or outside the run of {num_tokens}"
            raise ValueError(msg)
