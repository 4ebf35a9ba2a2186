"""A transformers cache whose keys and values are in the blocks of a KV pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvtrie._core import LayoutError
from kvtrie.kernels import reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie.engines._coding import KVCoding
    from kvtrie.engines._windows import WindowTable
    from kvtrie.pool.groups import KVGroup
    from kvtrie.pool.kv_pool import KVPool


def pool_rows(group: KVGroup, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
    """What a pool stores of what transformers caches: K and V, or one latent row.

    For MLA, transformers caches the latent as keys and the rotated part of K as values.
    """
    return [keys, values] if group.v_head_dim else [torch.cat([keys, values], dim=-1)]


def check_rows(
    group: KVGroup, rows: list[torch.Tensor], num_tokens: int, dtype: torch.dtype, layer: int
) -> None:
    """Refuse rows of a model that are not what its layout says."""
    for name, states, dim in zip("KV", rows, (group.head_dim, group.v_head_dim), strict=False):
        want = (1, group.num_kv_heads, num_tokens, dim)
        if tuple(states.shape) != want or states.dtype != dtype:
            msg = (
                f"layer {layer} has {name} of shape {tuple(states.shape)} and {states.dtype}, "
                f"the pool holds {want} of {dtype}"
            )
            raise LayoutError(msg)


class _PassSlots:
    def __init__(
        self, pool: KVPool, table: NDArray[np.int32], ranges: Sequence[tuple[int, int]]
    ) -> None:
        self.pool = pool
        self.start = ranges[0][0]
        self.end = ranges[-1][1]
        self.num_tokens = sum(end - start for start, end in ranges)
        parts = [pool.slots(table, start, end, unique=True) for start, end in ranges]
        self.write_slots = torch.cat(parts)
        self.read_blocks = pool.block_ids(table, self.end)


class _WindowSlots:
    """Where a pass over ``[start, end)`` reads and writes rows of layers with a window."""

    def __init__(self, table: WindowTable, start: int, end: int) -> None:
        windows = table.windows
        self.pool = windows.pool
        self.start = start
        self.end = end
        self.num_tokens = end - start
        self.first_read = max(0, start - windows.window + 1)
        first_written = max(start, windows.kept(end).start * windows.block_size)
        self.num_unwritten = first_written - start
        self.read_slots = self.pool.slots(table.before, self.first_read, start)
        self.write_slots = self.pool.slots(table.after, first_written, end, unique=True)


class _PagedLayer(CacheLayerMixin):
    """One layer: writes new rows to their slots, returns the rows of the whole table.

    A layer with a window returns these as well: the model's mask hides what is before it. With
    ``coding``, rows are stored as codes, and all that are returned are numbers of codes.

    Args:
        slots: Where rows are.
        layer: The layer's number in the model.
        own: Its number in the pool.
        group: The shape of its rows.
        coding: How they are coded; None for floats.
    """

    is_sliding = False

    def __init__(
        self,
        slots: _PassSlots | _WindowSlots,
        layer: int,
        own: int,
        group: KVGroup,
        coding: KVCoding | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # transformers has no types here
        self._slots = slots
        self._layer = layer
        self._own = own
        self._group = group
        self._coding = coding
        self.was_written = False
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pool exists before the model runs."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: Any,  # noqa: ANN401 - the signature of transformers
        **_kwargs: Any,  # noqa: ANN401 - the signature of transformers
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store ``[1, heads, tokens, dim]`` and return the same for every token so far."""
        slots, pool = self._slots, self._slots.pool
        rows = pool_rows(self._group, key_states, value_states)
        dtype = pool.dtype if self._coding is None else key_states.dtype
        check_rows(self._group, rows, slots.num_tokens, dtype, self._layer)
        self.was_written = True
        k = self._store(0, pool.k[self._own], rows[0])
        v = pool.v[self._own]
        if v is None:
            keys, values = k.split([key_states.shape[-1], value_states.shape[-1]], dim=-1)
            return keys, values
        return k, self._store(1, v, rows[1])

    def _store(self, side: int, blocks: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        slots, coding = self._slots, self._coding
        if isinstance(slots, _WindowSlots):
            return self._store_window(slots, blocks, states)
        # A view: the pool is the engine's own, in slot order.
        rows = blocks.view(-1, *blocks.shape[2:])
        new = states[0].transpose(0, 1)
        if coding is not None:
            new = coding.encode(new, self._own, side)
        rows.index_copy_(0, slots.write_slots, new)
        is_whole = slots.num_tokens == slots.end
        if is_whole and coding is None:
            return states
        rows = new
        if not is_whole:
            rows = reference.gather_blocks(blocks, slots.read_blocks)[: slots.end]
        if coding is not None:
            rows = coding.decode(rows, self._own, side, states.dtype)
        return rows.transpose(0, 1).unsqueeze(0)

    def _store_window(
        self, slots: _WindowSlots, blocks: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        # Before the writing, which may be to the same slots.
        before = reference.gather_rows(blocks, slots.read_slots)
        new = states[0].transpose(0, 1)
        rows = blocks.view(-1, *blocks.shape[2:])
        rows.index_copy_(0, slots.write_slots, new[slots.num_unwritten :])
        # What is before the window is hidden by the model's mask.
        hidden = new.new_zeros((slots.first_read, *new.shape[1:]))
        return torch.cat([hidden, before, new]).transpose(0, 1).unsqueeze(0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        slots = self._slots
        return slots.end - slots.num_tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens with KV; this pass counts once it is stored."""
        return self._slots.end if self.was_written else self._slots.start

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        msg = "a paged cache cannot be reset: its blocks belong to the index"
        raise NotImplementedError(msg)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        msg = f"a paged cache holds one sequence, it cannot be reordered by {tuple(beam_idx.shape)}"
        raise NotImplementedError(msg)


class PagedCache(Cache):
    """The cache of one forward pass over positions of a block table: ascending ranges.

    ``update`` scatters the new rows to their slots and returns the rows of ``[0, end)`` in table
    order, ``end`` being that of the last range. The first pass of a prompt without reuse gets its
    own rows back and reads nothing.

    With ``windows``, there is one range, and ``pool`` is of layers with full attention. The others
    are in the windows' pool, and their rows before the window are 0.

    With ``coding``, which is that of a quantised pool without ``windows``, rows are written as
    codes, and ``update`` returns their numbers, those of the new rows included.
    """

    def __init__(
        self,
        pool: KVPool,
        table: NDArray[np.int32],
        ranges: Sequence[tuple[int, int]],
        windows: WindowTable | None = None,
        coding: KVCoding | None = None,
    ) -> None:
        parts: list[_PassSlots | _WindowSlots] = [_PassSlots(pool, table, ranges)]
        layers = [(False, number) for number in range(pool.layout.num_layers)]
        if windows is not None:
            ((start, end),) = ranges
            parts.append(_WindowSlots(windows, start, end))
            layers = list(windows.windows.layers)
        self._paged = [
            _PagedLayer(slots, layer, own, slots.pool.layout.layers[own], coding)
            for layer, (has_window, own) in enumerate(layers)
            for slots in [parts[has_window]]
        ]
        super().__init__(layers=list(self._paged))

    def check_written(self) -> None:
        """Refuse a model that skipped a layer: its KV would not be in the pool."""
        for number, layer in enumerate(self._paged):
            if not layer.was_written:
                msg = f"the model stored no K and V for layer {number} through the cache"
                raise LayoutError(msg)
