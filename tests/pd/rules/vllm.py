"""How vLLM's connectors pair the blocks of two engines: by counting them.

Neither side says at which position its list of blocks starts, and nothing compares tokens. So every
rule here is right if both lists end at the same token, and copies wrong KV otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.pd.exchange import Answer, PeerError, Piece, Want

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.pd.engine import Computed


@dataclass(frozen=True)
class SuffixTrim:
    """Pull: the receiver's uncached blocks get the last ones of the sender's list.

    The front of the sender's list is dropped until both have the same length. That is wrong as soon
    as the sender has something that the receiver does not have:
    https://github.com/vllm-project/vllm/issues/43094 (stripped reasoning),
    https://github.com/vllm-project/vllm/issues/43996 (a look-ahead block),
    https://github.com/vllm-project/vllm/pull/50558 (more blocks than the sender).

    With `clip`, the sender first keeps only as many blocks as its computed tokens fill at `clip`
    tokens per block, as in vLLM 0.32. Under decode-context parallelism a block spans `block_size`
    tokens on each rank, but the clip counts those of one rank, so a look-ahead block stays.
    `rounded` rounds the sender's length up to whole blocks: wrong if the receiver's prompt ends
    inside the last one. https://github.com/vllm-project/vllm/issues/34616
    """

    clip: int | None = None
    rounded: bool = False

    def __call__(self, offer: Computed, want: Want, /) -> Answer:
        remote: Sequence[int] = offer.blocks
        if self.clip is not None:
            remote = remote[: -(-offer.num_computed // self.clip)]
        local = want.uncached_blocks
        if len(local) > len(remote):
            message = f"AssertionError: {len(local)} local blocks <= {len(remote)} remote blocks"
            raise PeerError(message)
        remote = remote[len(remote) - len(local) :]
        reported = offer.num_computed
        if self.rounded:
            size = offer.engine.block_size
            reported = -(-reported // size) * size
        return _whole_blocks(offer, want, remote, min(reported, len(want.ids)))


@dataclass(frozen=True)
class HeadTrim:
    """Push: the sender writes its first blocks into the receiver's uncached ones.

    The receiver registers only the blocks after its cached prefix, but the sender cuts its list at
    the other end: its first blocks are written after the prefix.
    https://github.com/vllm-project/vllm/pull/48758
    """

    def __call__(self, offer: Computed, want: Want, /) -> Answer:
        remote = offer.blocks[: len(want.uncached_blocks)]
        return _whole_blocks(offer, want, remote, min(offer.num_computed, len(want.ids)))


def _whole_blocks(offer: Computed, want: Want, remote: Sequence[int], end: int) -> Answer:
    """Copy these blocks into the receiver's uncached ones, and claim everything up to `end`."""
    size = offer.engine.block_size
    first = len(want.blocks) - len(want.uncached_blocks)
    pairs = zip(remote, want.uncached_blocks, strict=False)
    pieces = [
        Piece(theirs * size, mine * size, (first + index) * size, size)
        for index, (theirs, mine) in enumerate(pairs)
    ]
    return Answer(pieces, [(want.cached, end)] if end > want.cached else [])


suffix_trim = SuffixTrim()
"""The pull rule of `SuffixTrim`, with nothing clipped."""

head_trim = HeadTrim()
"""The push rule of `HeadTrim`."""
