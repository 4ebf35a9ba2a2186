"""A transformers cache whose keys and values live in the blocks of a KV pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.cache_utils import Cache, CacheLayerMixin

from kvtrie._core import LayoutError
from kvtrie.kernels import reference

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvtrie.pool import KVPool


class _Window:
    """What one forward pass writes and reads: positions ``[start, end)`` of a block table."""

    def __init__(self, pool: KVPool, table: NDArray[np.int32], start: int, end: int) -> None:
        self.pool = pool
        self.start = start
        self.end = end
        self.write_slots = pool.slots(table, start, end, unique=True)
        self.read_blocks = pool.block_ids(table, end)


class _PagedLayer(CacheLayerMixin):
    """One layer: writes new rows to their slots, answers the rows of the whole table."""

    is_sliding = False

    def __init__(self, window: _Window, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # transformers has no types here
        self._window = window
        self._layer = layer
        self.was_written = False
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool is there before the model runs."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: Any,  # noqa: ANN401 - the signature of transformers
        **_kwargs: Any,  # noqa: ANN401 - the signature of transformers
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store ``[1, heads, tokens, dim]`` and return the same for every token so far."""
        window = self._window
        layout = window.pool.layout
        new = window.end - window.start
        for name, states, dim in (
            ("K", key_states, layout.head_dim),
            ("V", value_states, layout.v_head_dim),
        ):
            want = (1, layout.num_kv_heads, new, dim)
            if tuple(states.shape) != want or states.dtype != window.pool.dtype:
                msg = (
                    f"layer {self._layer} offers {name} of shape {tuple(states.shape)} and "
                    f"{states.dtype}, the pool holds {want} of {window.pool.dtype}"
                )
                raise LayoutError(msg)
        self.was_written = True
        return (
            self._store(window.pool.k[self._layer], key_states),
            self._store(window.pool.v[self._layer], value_states),
        )

    def _store(self, blocks: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor:
        window = self._window
        if blocks is None:
            msg = f"the pool has no V for layer {self._layer}: it holds latent rows (MLA)"
            raise LayoutError(msg)
        # A view: the pool is the engine's own, whose rows of a layer lie slot by slot.
        rows = blocks.view(-1, *blocks.shape[2:])
        rows.index_copy_(0, window.write_slots, states[0].transpose(0, 1))
        if window.start == 0:
            return states
        rows = reference.gather_blocks(blocks, window.read_blocks)[: window.end]
        return rows.transpose(0, 1).unsqueeze(0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that the mask covers."""
        return self._window.start + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens stored before this pass, and those of this pass once the layer has them."""
        return self._window.end if self.was_written else self._window.start

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1

    def reset(self) -> None:
        """Refused: the pool's contents belong to the index."""
        msg = "a paged cache cannot be reset: its blocks belong to the index"
        raise NotImplementedError(msg)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Refused: one sequence a cache, no beams."""
        msg = f"a paged cache holds one sequence, it cannot be reordered by {tuple(beam_idx.shape)}"
        raise NotImplementedError(msg)


class PagedCache(Cache):
    """The cache of one forward pass over positions ``[start, end)`` of a block table.

    ``update`` scatters the new rows to their slots and returns the rows of ``[0, end)`` in table
    order, so a model sees what a contiguous cache would show it. The first pass of a prompt without
    any reuse gets its own rows back and reads nothing.

    Args:
        pool: The pool that the table's ids name.
        table: Block ids of the sequence, position 0 first.
        start: First position that the pass computes; everything before it is in the table.
        end: Position behind the last.

    Raises:
        ValueError: If a position lies outside the table or a block outside the pool.
    """

    def __init__(self, pool: KVPool, table: NDArray[np.int32], start: int, end: int) -> None:
        window = _Window(pool, table, start, end)
        self._paged = [_PagedLayer(window, layer) for layer in range(pool.layout.num_layers)]
        super().__init__(layers=list(self._paged))

    def check_written(self) -> None:
        """Check after a pass that every layer came by.

        Raises:
            LayoutError: If the model left out a layer, so that its KV is not in the pool.
        """
        for number, layer in enumerate(self._paged):
            if not layer.was_written:
                msg = f"the model stored no K and V for layer {number} through the cache"
                raise LayoutError(msg)
