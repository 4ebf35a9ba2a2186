"""Layers with a window in a pool of their own, which keeps the last tokens of each request alone.

A token attends to the ``window - 1`` tokens before it, so a request needs no older block of these
layers. It has the blocks of ``[floor(n / B) * B - window + 1, n)``, n being the tokens computed so
far and B the block size: at most ``ceil((window - 1) / B) + 1`` blocks, whatever its length. What
it leaves in the index is what a prompt needs that continues after its last full block.

A pass reads its window before it writes, layer by layer, and the blocks that it passes are free
for what it writes: one table is of before the pass, one of after it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtrie._core import BlockAllocator, Group, LayoutError, OutOfBlocksError
from kvtrie.pool.kv_pool import KVPool

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch
    from numpy.typing import NDArray

    from kvtrie._core import RadixIndex, ReusePlan
    from kvtrie.pool.layout import KVLayout

GROUP: Final = "window"
"""The name of the group in the index."""


def blocks_of_window(window: int, block_size: int) -> int:
    """Most blocks that a request has at a time: a window before a block, and that block."""
    return -(-(window - 1) // block_size) + 1


@dataclass(frozen=True, slots=True)
class Split:
    """A model's layers in two: those of full attention, and those with its one window.

    Attributes:
        full: The layout of those of full attention, numbered from 0.
        windowed: That of those with the window, numbered from 0.
        window: Tokens that these attend to.
        layers: For each layer of the model, whether it has the window, and its number in its part.
        num_blocks: Blocks for those with the window.
    """

    full: KVLayout
    windowed: KVLayout
    window: int
    layers: tuple[tuple[bool, int], ...]
    num_blocks: int

    @classmethod
    def of(cls, layout: KVLayout, num_blocks: int) -> Split:
        """Split a layout.

        Raises:
            LayoutError: No layer has a window, none has full attention, or windows differ.
            ValueError: ``num_blocks`` are too few for one request.
        """
        windows = layout.windows
        widths = sorted({width for width in windows if width is not None})
        if len(widths) != 1 or None not in windows:
            found = f"windows of {widths} tokens" if widths else "no layer with a window"
            if widths and None not in windows:
                found += " in all layers"
            msg = (
                "Generator: num_window_blocks needs layers with one window next to layers of full "
                f"attention, and the model has {found}"
            )
            raise LayoutError(msg)
        (window,) = widths
        least = blocks_of_window(window, layout.block_size)
        if operator.index(num_blocks) < least:
            msg = (
                f"Generator: num_window_blocks is {num_blocks}; a window of {window} tokens needs "
                f"at least {least} blocks of {layout.block_size}"
            )
            raise ValueError(msg)
        parts: tuple[list[int], list[int]] = ([], [])
        layers = []
        for number, width in enumerate(windows):
            own = parts[width is not None]
            layers.append((width is not None, len(own)))
            own.append(number)
        full, windowed = (_of_layers(layout, part) for part in parts)
        return cls(full, windowed, window, tuple(layers), num_blocks)

    @property
    def group(self) -> Group:
        """The group for an index."""
        size = self.windowed.block_size
        return Group.window(GROUP, window=self.window, num_blocks=self.num_blocks, block_size=size)


def _of_layers(layout: KVLayout, layers: list[int]) -> KVLayout:
    number = {layer: at for at, layer in enumerate(layers)}
    groups = tuple(
        replace(
            layout.layers[group.layers[0]],
            layers=tuple(number[layer] for layer in group.layers),
        )
        for group in layout.groups
        if group.layers[0] in number
    )
    first = groups[0]
    return replace(
        layout,
        num_layers=len(layers),
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        v_head_dim=first.v_head_dim,
        dtype=first.dtype or layout.dtype,
        quant=first.quant,
        groups=groups,
    )


@dataclass(frozen=True, slots=True)
class Windows:
    """The pool of layers with a window, and who owns its blocks."""

    pool: KVPool
    allocator: BlockAllocator
    index: RadixIndex
    window: int
    layers: tuple[tuple[bool, int], ...]

    @classmethod
    def of(cls, split: Split, index: RadixIndex, device: torch.device) -> Windows:
        """Make the pool.

        Raises:
            MemoryError: It does not fit.
        """
        pool = KVPool(split.windowed, num_blocks=split.num_blocks, device=device)
        allocator = BlockAllocator(split.num_blocks)
        return cls(pool, allocator, index, split.window, split.layers)

    @property
    def block_size(self) -> int:
        return self.pool.layout.block_size

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can return."""
        stats = self.index.group_stats(GROUP)
        return self.allocator.num_free + stats.evictable + stats.waiting

    def kept(self, end: int) -> range:
        """The blocks, by their numbers in the sequence, that are kept after a pass to ``end``."""
        whole = end // self.block_size * self.block_size
        first = max(0, whole - self.window + 1) // self.block_size
        return range(first, -(-end // self.block_size))

    def check_room(self, num_blocks: int) -> None:
        if num_blocks > self.num_available:
            msg = (
                f"{num_blocks} blocks of layers with a window wanted, "
                f"{self.num_available} of {self.pool.num_blocks} available"
            )
            raise OutOfBlocksError(msg)

    def allocate(self, num_blocks: int) -> NDArray[np.int32]:
        """Allocate blocks; what nobody has needed to continue is evicted first."""
        self.check_room(num_blocks)
        missing = num_blocks - self.allocator.num_free
        if missing > 0:
            self.allocator.free(self.index.evict(missing, group=GROUP))
        return self.allocator.allocate(num_blocks)

    def reclaim(self) -> None:
        self.allocator.free(self.index.take_freed(group=GROUP))


class WindowTable:
    """The blocks of one request in a `Windows`.

    Every block is the index's, pinned by the request's plan, or held; after `close` none is held.

    Args:
        windows: The pool.
        plan: The request's plan.
        supersedes: Whether blocks of the index that the request has passed are discarded. They are
            of the earlier turns of its conversation; whoever shares them computes them again.
    """

    def __init__(self, windows: Windows, plan: ReusePlan, *, supersedes: bool) -> None:
        self._windows = windows
        self._plan = plan
        self._supersedes = supersedes
        start, ids = plan.group(GROUP)
        self._ids = dict(enumerate(ids.tolist(), start // windows.block_size))
        self._held: dict[int, int] = {}
        self._before = self._after = self._dense()

    @property
    def windows(self) -> Windows:
        return self._windows

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def before(self) -> NDArray[np.int32]:
        """Block ids by number before the pass that was issued last; right where it reads."""
        return self._before

    @property
    def after(self) -> NDArray[np.int32]:
        """Block ids by number after that pass; right where it writes."""
        return self._after

    def issue(self, end: int) -> None:
        """Get the blocks for a pass to ``end``, and give up what no later pass reads.

        Raises:
            OutOfBlocksError: There are too few; the request has its blocks as before.
        """
        windows = self._windows
        kept = windows.kept(end)
        # What an insert offers ends with a full block.
        self._plan.advance(end // windows.block_size * windows.block_size)
        passed = [number for number in self._ids if number not in kept]
        free = [self._held[number] for number in passed if number in self._held]
        wanted = [number for number in kept if number not in self._ids]
        windows.check_room(len(wanted) - len(free))
        before = self._dense()
        shared = [self._ids[number] for number in passed if number not in self._held]
        for number in passed:
            del self._ids[number]
            self._held.pop(number, None)
        windows.allocator.free(free)
        if self._supersedes and shared:
            windows.allocator.free(windows.index.discard(shared, group=GROUP))
        fresh = windows.allocate(len(wanted)).tolist()
        self._held.update(zip(wanted, fresh, strict=True))
        self._ids.update(zip(wanted, fresh, strict=True))
        self._before, self._after = before, self._dense()

    def offers(self, computed: int) -> list[tuple[int, int]]:
        """What an insert offers: (position, id) of held full blocks.

        After a failed pass these are fewer, and right: a pass writes to later blocks alone.
        """
        size = self._windows.block_size
        whole = computed // size
        return [(at * size, id_) for at, id_ in sorted(self._held.items()) if at < whole]

    def close(self, taken: Collection[int] = ()) -> None:
        """Free the held blocks but those that the index has taken."""
        held = [id_ for id_ in self._held.values() if id_ not in taken]
        self._held.clear()
        self._windows.allocator.free(held)

    def _dense(self) -> NDArray[np.int32]:
        table = np.zeros(max(self._ids, default=-1) + 1, dtype=np.int32)
        for number, id_ in self._ids.items():
            table[number] = id_
        return table
