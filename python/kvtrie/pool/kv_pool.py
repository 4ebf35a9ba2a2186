"""A paged KV pool in torch: checks slots, then gathers, scatters, copies and rotates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

try:
    import torch
except ImportError as error:
    _MISSING = "kvtrie.KVPool needs torch: pip install 'kvtrie[torch]'"
    raise ImportError(_MISSING, name="torch") from error

from kvtrie._core import KvTrieError, LayoutError
from kvtrie.kernels import ops, reference
from kvtrie.kernels.codes import IN_LAYER, CodeForm
from kvtrie.kernels.geometry import Geometry, Placement, Rows
from kvtrie.pool import stored
from kvtrie.pool.angles import AngleTables, windows_of
from kvtrie.pool.moves import check_moves
from kvtrie.pool.placement import MAX_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from kvtrie._core import Item
    from kvtrie.pool.groups import KVGroup
    from kvtrie.pool.layout import KVLayout
    from kvtrie.rope import RopeSpec

    BlockIds = NDArray[np.integer] | Sequence[int] | torch.Tensor

# Bounds the memory of the check, for one layer.
_CHECKED_ROWS: Final = 16_384


class NonFiniteError(KvTrieError):
    """K or V that would be copied is NaN or infinite; nothing was copied.

    Attributes:
        block_ids: The source blocks with such slots, ascending, for ``RadixIndex.discard``.
    """

    def __init__(self, message: str, block_ids: list[int]) -> None:
        super().__init__(message)
        self.block_ids = block_ids

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[str, list[int]]]:
        """Pickle both arguments."""
        return type(self), (str(self), self.block_ids)


class ChainedRotationError(KvTrieError):
    """K of a quantised pool would be rotated and rounded to codes a second time; nothing was moved.

    Attributes:
        hops: The most hops of the plan's KV.
    """

    def __init__(self, message: str, hops: int) -> None:
        super().__init__(message)
        self.hops = hops

    def __reduce__(self) -> tuple[type[ChainedRotationError], tuple[str, int]]:
        """Pickle both arguments."""
        return type(self), (str(self), self.hops)


class CopyEvent:
    """When the copies of one ``KVPool.apply`` are done.

    On a CPU they are done when the call returns. On a GPU they are queued on the current stream.

    Attributes:
        num_requantized: Elements of K that were rotated and rounded to codes again; without scales
            of their own, those of pairs that rotate.

    Example:
        >>> import numpy as np
        >>> layout = kvtrie.KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32")
        >>> fields = ("source_slot", "dest_slot", "num_tokens", "delta")
        >>> moves = np.array([(0, 16, 4, 0)], dtype=[(name, "i8") for name in fields])
        >>> event = kvtrie.KVPool(layout, num_blocks=2).apply(moves)
        >>> event.query()
        True
    """

    def __init__(
        self,
        device: torch.device,
        saturated: torch.Tensor | None = None,
        num_requantized: int = 0,
    ) -> None:
        self._device = device
        self._saturated = saturated
        self.num_requantized = num_requantized
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make a stream wait for the copies; the CPU does not wait.

        Args:
            stream: ``None``: the current stream of the pool's device.
        """
        if self._event is not None:
            self._event.wait(stream or torch.cuda.current_stream(self._device))

    @property
    def num_saturated(self) -> int:
        """Elements of K that were beyond the largest code and are stored as that.

        The device counts, and the first reading waits for the copies; ``apply`` does not.
        """
        if self._saturated is None:
            return 0
        # Another stream than that of the copies may be current.
        self.synchronize()
        return int(self._saturated.item())

    def query(self) -> bool:
        """Whether the copies are done."""
        return self._event is None or bool(self._event.query())

    def synchronize(self) -> None:
        """Block the CPU until the copies are done."""
        if self._event is not None:
            self._event.synchronize()


class KVPool:
    """K and V of all layers, in its own tensors or an engine's (``KVPool.wrap``).

    A pool of its own holds K in one tensor ``[layers, blocks, block_size, heads, head_dim]`` and V,
    if there is one, in another; layers of another shape or type are in tensors of their own.
    ``docs/pool.md`` has examples.

    Every method checks its slots, block ids and positions first: a call that raises has changed
    nothing. Methods write their destination slots and no others. On a GPU the work is queued on the
    current stream.

    Args:
        layout: Geometry and element type.
        rope: How the model rotates K; without it, no move may have a delta.
        num_blocks: Blocks of the pool, 1 to 2**31.
        device: A CPU or a CUDA device.

    Raises:
        LayoutError: ``rope`` has another geometry or layers with state, or ``layout`` describes an
            engine's tensors.
        ValueError: ``num_blocks`` is out of range, or there is no kernel for the device.
        MemoryError: The device has no room; the message says the requested size.

    Example:
        >>> import torch
        >>> layout = kvtrie.KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32")
        >>> pool = kvtrie.KVPool(layout, num_blocks=8)
        >>> rows = torch.arange(6.0).reshape(1, 3, 1, 2)
        >>> pool.scatter(rows, -rows, blocks=[5, 2], start=15)
        >>> k, v = pool.gather([5, 2], start=16, end=18)
        >>> k.flatten().tolist()
        [2.0, 3.0, 4.0, 5.0]
    """

    def __init__(
        self,
        layout: KVLayout,
        rope: RopeSpec | None = None,
        *,
        num_blocks: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int):
            msg = f"KVPool: num_blocks must be an int, not {num_blocks!r}"
            raise TypeError(msg)
        if not 1 <= num_blocks <= MAX_BLOCKS:
            msg = f"KVPool: num_blocks must be in [1, {MAX_BLOCKS}], not {num_blocks}"
            raise ValueError(msg)
        if layout.axes is not None:
            msg = (
                f"KVPool: the layout describes tensors {layout.axes!r} of an engine; "
                "KVPool.wrap takes them"
            )
            raise LayoutError(msg)
        _check_device(torch.device(device))
        _check_rope(layout, rope)
        parts: list[_Part] = []
        for layers in _alike(layout):
            group = layout.layers[layers[0]]
            dtype: torch.dtype = getattr(torch, str(group.dtype))
            sides = [group.k_row, group.v_row] if group.v_row else [group.k_row]
            lead = (len(layers), num_blocks, layout.block_size, group.num_kv_heads)
            try:
                tensors = tuple(
                    torch.zeros((*lead, dim), dtype=dtype, device=device) for dim in sides
                )
            except (MemoryError, RuntimeError) as error:
                if not _is_no_room(error):
                    raise
                gib = num_blocks * layout.bytes_per_block / 2**30
                msg = (
                    f"KVPool: no room for num_blocks={num_blocks} of {layout.bytes_per_block} "
                    f"bytes ({gib:.1f} GiB) on {device}"
                )
                raise MemoryError(msg) from error
            rows = [_stacked(tensor, number) for number, tensor in enumerate(tensors)]
            placement = Placement(
                num_blocks,
                layout.block_size,
                group.num_kv_heads,
                rows[0],
                rows[1] if group.v_row else None,
            )
            parts.append(_Part(group, layers, tensors, placement))
        self._set(layout, rope, parts)

    @classmethod
    def wrap(cls, tensors: object, layout: KVLayout, rope: RopeSpec | None = None) -> KVPool:
        """Use the tensors of an engine; nothing is copied, and the engine owns the blocks.

        Args:
            tensors: As given to ``KVLayout.from_tensors``. They are verified again.
            layout: What that call returned, in this process or another.
            rope: As for the class.

        Raises:
            LayoutError: The tensors do not match the layout, ``rope`` is of another geometry or has
                layers with state, or rows of ``fp8_ds_mla`` are not at even addresses.
            ValueError: There is no kernel for the device.
            TypeError: ``tensors`` is neither a tensor nor a sequence of tensors.

        Example:
            >>> import torch
            >>> layers = [torch.zeros(8, 2, 16, 64) for _ in range(3)]
            >>> axes = "blocks heads tokens (kv dim)"
            >>> layout = kvtrie.KVLayout.from_tensors(
            ...     layers, axes=axes, block_size=16, num_kv_heads=2, head_dim=32
            ... )
            >>> kvtrie.KVPool.wrap(layers, layout).v[0].shape
            torch.Size([8, 16, 2, 32])
        """
        found = layout.place(tensors, "KVPool.wrap")
        for name, mine, want in (
            ("layers", found.num_layers, layout.num_layers),
            ("elements of", found.dtype, layout.dtype),
        ):
            if mine != want:
                msg = f"KVPool.wrap: the tensors have {name} {mine}, the layout says {want}"
                raise LayoutError(msg)
        _check_device(found.tensors[0].device)
        _check_rope(layout, rope)
        pool = cls.__new__(cls)
        # Layers of one axes are alike.
        part = _Part(
            layout.layers[0], tuple(range(layout.num_layers)), found.tensors, found.placement
        )
        pool._set(layout, rope, [part])  # noqa: SLF001 - of its own class
        return pool

    def _set(self, layout: KVLayout, rope: RopeSpec | None, parts: Sequence[_Part]) -> None:
        windows, self._rotaries = windows_of(layout, rope)
        self._layout = layout
        self._rope = rope
        self._launches: list[_Launch] = []
        k: dict[int, torch.Tensor] = {}
        v: dict[int, torch.Tensor] = {}
        for part in parts:
            kind, tensors, at = part.group.kv_type, part.tensors, part.placement
            # Indexing of float8 tensors is not implemented everywhere; bytes are moved.
            if kind is not None:
                tensors = tuple(tensor.view(torch.uint8) for tensor in tensors)
            shape = (at.num_blocks, at.block_size, at.num_kv_heads)
            k |= zip(part.layers, reference.views(tensors, at.k, shape), strict=True)
            if at.v is not None:
                v |= zip(part.layers, reference.views(tensors, at.v, shape), strict=True)
            form = None if kind is None else CodeForm.of(kind)
            if kind is not None and form is None:
                tensors, at = _as_bfloat16(tensors, at)
            own = tuple(windows[layer] for layer in part.layers)
            # A form is needed where codes rotate.
            form = form if any(window is not None for window in own) else None
            self._launches.append(
                _Launch(part.group, part.layers, tensors, Geometry(at, own).to_ints(), form)
            )
        layers = range(layout.num_layers)
        self._k = tuple(k[layer] for layer in layers)
        self._v: tuple[torch.Tensor | None, ...] = tuple(v.get(layer) for layer in layers)
        self._num_blocks = parts[0].placement.num_blocks
        first = layout.groups[0].layers[0] if layout.groups else 0
        self._dtype = self._k[first].dtype
        self._device = self._k[0].device

    @property
    def layout(self) -> KVLayout:
        """Geometry and element type."""
        return self._layout

    @property
    def rope(self) -> RopeSpec | None:
        """How the model rotates K."""
        return self._rope

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._num_blocks

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """Element type of rows: uint8 where the pool is quantised.

        Where layers differ in type, that of the first group; ``k`` has those of all.
        """
        return self._dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V of all blocks."""
        return self._num_blocks * self._layout.bytes_per_block

    @property
    def k(self) -> tuple[torch.Tensor, ...]:
        """K, one view per layer: ``[num_blocks, block_size, kv_heads, head_dim]``.

        Of a quantised layer, bytes: rows of its ``k_row`` in ``layout.layers``, with the scale that
        is stored in them.
        """
        return self._k

    @property
    def v(self) -> tuple[torch.Tensor | None, ...]:
        """V per layer: ``[num_blocks, block_size, kv_heads, v_head_dim]``; or ``None``.

        Of a quantised layer, bytes, as ``k``. For ``fp8_index``, the scales of K.
        """
        return self._v

    def apply(
        self,
        moves: NDArray[Any],
        *,
        check_finite: bool = False,
        hops: int | None = None,
        items: Iterable[Item] | None = None,
    ) -> CopyEvent:
        """Carry out the copies of a plan in all layers: K is rotated by its delta, V is copied.

        The call needs no index: a worker process applies what ``plan.moves(table)`` returned to a
        scheduler. In a quantised layer, a rotated row of K is rounded to codes again.

        Args:
            moves: A structured array with ``source_slot``, ``dest_slot``, ``num_tokens`` and
                ``delta`` (new position minus old position), integers. Where items have positions
                of their own, deltas are in these, as ``plan.moves(table)`` has them.
            check_finite: Whether to check K and V of every source slot first, in all layers. The
                check reads the sources once more, with the memory of 16,384 slots of one layer; on
                a GPU the call waits for the device.
            hops: Most hops of the KV of the plan, ``plan.segments["hops"].max()``. Needed where K
                is rounded to codes again, which may happen once.
            items: The items of the planned sequence, ``plan.items``. Needed for a model with M-RoPE
                (``rope.item_positions``), whose deltas are wrong if one of them has no positions.

        Returns:
            An event that is done when the copies are. Sources may be released once every later
            writer is ordered after it: on one stream, at once.

        Raises:
            TypeError: ``moves`` is not such an array, or ``hops`` is not an int.
            ValueError: A slot is outside the pool, a move is empty, a delta is 2**31 or more
                (beyond 2**27 where K rotates), a destination occurs twice, a slot is both source
                and destination, ``hops`` is needed and is not given or is below 1, or ``items``
                are needed and are not given.
            ItemPositionsError: The model has M-RoPE, and an item has no positions.
            ChainedRotationError: K would be rounded to codes again, and ``hops`` is above 1.
            LayoutError: A move has a delta, and the pool has no ``rope``.
            NonFiniteError: With ``check_finite``, K or V of a source slot is NaN or infinite.
        """
        pieces = check_moves(moves, self._num_blocks * self._layout.block_size)
        if self._rope is None and bool(pieces.delta.any()):
            msg = (
                f"KVPool.apply: a move has delta {pieces.delta[pieces.delta != 0][0]}, "
                "and a pool without rope cannot rotate K"
            )
            raise LayoutError(msg)
        self._check_items(items, has_moves=len(pieces.count) > 0)
        rotates = bool(pieces.delta.any())
        if rotates:
            self._check_hops(hops)
        if not len(pieces.count):
            return CopyEvent(self._device)
        slots, deltas = pieces.expand(self._num_blocks * self._layout.block_size)
        if check_finite:
            self._check_finite(slots[0])
        places = torch.from_numpy(slots)
        tables = AngleTables(self._rotaries, deltas)
        saturated: torch.Tensor | None = None
        num_elements = 0
        for one in self._launches:
            cos, sin = tables.of(one.tensors[0].dtype)
            if one.form is None or not rotates:
                ops.move_rows(one.tensors, places, cos, sin, one.geometry)
                continue
            if saturated is None:
                saturated = torch.zeros(1, dtype=torch.int64, device=self._device)
            form = one.form.to_ints()
            ops.requantize_rows(one.tensors, saturated, places, cos, sin, one.geometry, form)
            num_elements += one.group.num_kv_heads * self._coded_channels(one)
        num_tokens = int(pieces.count[pieces.delta != 0].sum())
        return CopyEvent(self._device, saturated, num_tokens * num_elements)

    def _check_items(self, items: Iterable[Item] | None, *, has_moves: bool) -> None:
        """Refuse deltas that are not differences of positions."""
        if self._rope is None or not self._rope.item_positions:
            return
        if items is not None:
            self._rope.check_items(items)
        elif has_moves:
            msg = (
                "KVPool.apply: the model has M-RoPE, whose deltas depend on the positions of "
                "items: give items=plan.items"
            )
            raise ValueError(msg)

    def _check_hops(self, hops: int | None) -> None:
        """Refuse what would round codes a second time, in any layer."""
        coded = [str(one.group.quant) for one in self._launches if one.form is not None]
        if not coded:
            return
        name = " and ".join(dict.fromkeys(coded))
        if isinstance(hops, bool) or not isinstance(hops, int | np.integer | None):
            msg = f"KVPool.apply: hops must be an int, not {hops!r}"
            raise TypeError(msg)
        if hops is None:
            msg = (
                f"KVPool.apply: a move has a delta, and K of {name} may be rounded to codes again "
                'only once: give hops=plan.segments["hops"].max()'
            )
            raise ValueError(msg)
        if hops < 1:
            msg = f"KVPool.apply: hops is {hops}, and a plan with a delta has at least 1"
            raise ValueError(msg)
        if hops > 1:
            msg = (
                f"KVPool.apply: KV of the plan has {hops} hops, and K of {name} may be rotated "
                "only once, because each rotation rounds its codes again: plan with max_hops=1"
            )
            raise ChainedRotationError(msg, int(hops))

    def _coded_channels(self, one: _Launch) -> int:
        """Channels of a head of K that get new codes where a token rotates, in all its layers."""
        layers = self._rope.layers if self._rope is not None else ()
        rotaries = [
            rotary for layer in one.layers if (rotary := layers[layer]) is not None and rotary.width
        ]
        if one.form is not None and one.form.scales != IN_LAYER:
            return one.group.head_dim * len(rotaries)
        return sum(2 * sum(value != 0 for value in rotary.inv_freq) for rotary in rotaries)

    def gather(
        self, blocks: BlockIds, start: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copy the KV of positions ``[start, end)`` from a block table.

        Args:
            blocks: The table: the block of position 0 first.
            start: First position.
            end: Position after the last.

        Returns:
            K ``[num_layers, end - start, kv_heads, head_dim]`` and V, as many rows ``v_head_dim``
            wide; ``None`` where there is no V. Of a quantised pool, rows of ``k`` and ``v``.

        Raises:
            TypeError: ``blocks`` does not hold integers.
            ValueError: A position is outside the table or a block is outside the pool.
            LayoutError: The rows of layers differ in shape or element type.
        """
        self._check_uniform("gather")
        slots = self.slots(blocks, start, end)
        k = torch.stack([reference.gather_rows(view, slots) for view in self._k])
        views = [view for view in self._v if view is not None]
        if not views:
            return k, None
        return k, torch.stack([reference.gather_rows(view, slots) for view in views])

    def scatter(
        self, k: torch.Tensor, v: torch.Tensor | None, blocks: BlockIds, start: int
    ) -> None:
        """Write KV to the positions of a block table, from ``start``.

        Args:
            k: ``[num_layers, tokens, kv_heads, head_dim]``, in the pool's dtype, on its device. Of
                a quantised pool: bytes, as ``gather`` returns them.
            v: As many rows, ``v_head_dim`` wide; ``None`` where there is no V.
            blocks: As for ``gather``.
            start: Position of the first token.

        Raises:
            TypeError: As for ``gather``.
            ValueError: A shape, dtype or device does not match, a position is outside the table,
                a block is outside the pool, or a written block occurs twice.
            LayoutError: The rows of layers differ in shape or element type.
        """
        self._check_uniform("scatter")
        layout = self._layout
        num_tokens = k.shape[1] if k.dim() > 1 else 0
        self._check_given("k", k, num_tokens, layout.k_row)
        if (v is None) != (layout.v_row == 0):
            msg = (
                f"KVPool.scatter: v is {type(v)}, the pool's v_head_dim is {layout.v_head_dim} "
                f"(rows of {layout.v_row})"
            )
            raise ValueError(msg)
        if v is not None:
            self._check_given("v", v, num_tokens, layout.v_row)
        slots = self.slots(blocks, start, start + num_tokens, unique=True)
        for views, rows in ((self._k, k), (self._v, v)):
            for layer, view in enumerate(views):
                if view is not None and rows is not None:
                    reference.scatter_rows(view, slots, rows[layer])

    def slots(
        self, blocks: BlockIds, start: int, end: int, *, unique: bool = False
    ) -> torch.Tensor:
        """The checked slots of positions ``[start, end)``, int64, on the pool's device.

        Args:
            blocks: As for ``gather``.
            start: First position.
            end: Position after the last.
            unique: Refuse a block that occurs twice among those of the positions.

        Raises:
            TypeError: As for ``gather``.
            ValueError: As for ``gather`` and ``scatter``.
        """
        block_size = self._layout.block_size
        table = self._checked_blocks(blocks, start, end)
        if unique and len(np.unique(table)) != len(table):
            ids, counts = np.unique(table, return_counts=True)
            msg = f"KVPool: block {ids[counts > 1][0]} occurs twice among the blocks to write"
            raise ValueError(msg)
        positions = np.arange(start, end, dtype=np.int64)
        first = start // block_size
        slots = table[positions // block_size - first] * block_size + positions % block_size
        return torch.from_numpy(slots).to(self._device)

    def block_ids(self, blocks: BlockIds, end: int) -> torch.Tensor:
        """The checked ids of the blocks that hold positions ``[0, end)``, int64, on the device.

        Args:
            blocks: As for ``gather``.
            end: Position after the last.

        Raises:
            TypeError: As for ``gather``.
            ValueError: As for ``gather``.
        """
        return torch.from_numpy(self._checked_blocks(blocks, 0, end)).to(self._device)

    def _check_uniform(self, call: str) -> None:
        if not self._layout.is_uniform:
            msg = (
                f"KVPool.{call}: the rows of this pool's layers differ in shape or element type "
                f"({self._layout.kv_dtype}), so one tensor cannot hold them; read or write k and v "
                "of each layer at slots"
            )
            raise LayoutError(msg)

    def _check_finite(self, sources: NDArray[np.integer[Any]]) -> None:
        """Refuse NaN and infinity in source slots; waits for the device once."""
        sources = np.unique(sources)
        slots = torch.from_numpy(sources.astype(np.int64)).to(self._device)
        bad = torch.zeros(len(slots), dtype=torch.bool, device=self._device)
        for views, is_v in ((self._k, False), (self._v, True)):
            for view, group in zip(views, self._layout.layers, strict=True):
                if view is None:
                    continue
                kind = group.kv_type
                for start in range(0, len(slots), _CHECKED_ROWS):
                    some = slice(start, start + _CHECKED_ROWS)
                    rows = reference.gather_rows(view, slots[some])
                    finite = rows.isfinite() if kind is None else stored.finite(rows, kind, is_v)
                    bad[some] |= ~finite.flatten(1).all(dim=1)
        wrong = sources[bad.cpu().numpy()]
        if len(wrong):
            blocks = np.unique(wrong // self._layout.block_size).tolist()
            msg = (
                f"KVPool.apply: moves copy slot {wrong[0]} of block {blocks[0]}, whose K or V is "
                f"NaN or infinite; so are {len(wrong)} source slots in {len(blocks)} blocks"
            )
            raise NonFiniteError(msg, blocks)

    def _check_given(self, name: str, rows: torch.Tensor, num_tokens: int, dim: int) -> None:
        layout = self._layout
        if tuple(rows.shape) != (layout.num_layers, num_tokens, layout.num_kv_heads, dim):
            expected = (layout.num_layers, "tokens", layout.num_kv_heads, dim)
            msg = (
                f"KVPool.scatter: {name} has shape {tuple(rows.shape)}, not {expected} "
                "(num_layers, tokens, kv_heads, channels; the number of tokens of k)"
            )
            raise ValueError(msg)
        if rows.dtype != self._dtype or rows.device != self._device:
            msg = (
                f"KVPool.scatter: {name} is {rows.dtype} on {rows.device}, "
                f"the pool is {self._dtype} on {self._device}"
            )
            raise ValueError(msg)

    def _checked_blocks(self, blocks: BlockIds, start: int, end: int) -> NDArray[np.int64]:
        table = np.asarray(blocks)
        if table.size == 0:
            table = table.astype(np.int64)
        if table.ndim != 1 or table.dtype.kind not in "iu":
            msg = (
                "KVPool: blocks must be a one-dimensional array of integers, "
                f"not {table.ndim}-dimensional {table.dtype}"
            )
            raise TypeError(msg)
        block_size = self._layout.block_size
        limit = len(table) * block_size
        if not 0 <= start <= end <= limit:
            msg = (
                f"KVPool: positions [{start}, {end}) are outside the table of {len(table)} blocks "
                f"([0, {limit}])"
            )
            raise ValueError(msg)
        used = table[start // block_size : -(-end // block_size)]
        if len(used) and not (0 <= int(used.min()) and int(used.max()) < self._num_blocks):
            bad = int(used[(used < 0) | (used >= self._num_blocks)][0])
            msg = (
                f"KVPool: block {bad} (slot {bad * block_size}) is outside the pool of "
                f"{self._num_blocks} blocks ({self._num_blocks * block_size} slots)"
            )
            raise ValueError(msg)
        return used.astype(np.int64)


def _is_no_room(error: Exception) -> bool:
    """Whether torch had no memory; a device that is missing or broken raises RuntimeErrors too."""
    # On a CPU there is no class for it: no memory, or more bytes than 63 bits count.
    texts = ("DefaultCPUAllocator: can't allocate memory", "Storage size calculation overflowed")
    is_named = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return is_named or any(text in str(error) for text in texts)


def _check_device(device: torch.device) -> None:
    if device.type not in ops.DEVICE_TYPES:
        msg = f"KVPool: no kernel for {device}; a pool is on {' or '.join(ops.DEVICE_TYPES)}"
        raise ValueError(msg)


def _check_rope(layout: KVLayout, rope: RopeSpec | None) -> None:
    if rope is None:
        return
    if len(rope.layers) != layout.num_layers:
        msg = f"KVPool: rope has {len(rope.layers)} layers, the layout has {layout.num_layers}"
        raise LayoutError(msg)
    if rope.state_layers:
        msg = (
            f"KVPool: the model keeps recurrent state in {len(rope.state_layers)} of its layers, "
            "which belongs to one prefix and cannot be moved"
        )
        raise LayoutError(msg)
    of_layers = zip(rope.layers, rope.dims, layout.layers, strict=True)
    for number, (rotary, dim, group) in enumerate(of_layers):
        if dim != group.head_dim:
            where = "" if layout.is_uniform and not rope.head_dims else f" in layer {number}"
            msg = f"KVPool: rope has head_dim {dim}{where}, the layout has {group.head_dim}"
            raise LayoutError(msg)
        if rotary is not None and rotary.start < group.first_rotated:
            msg = (
                f"KVPool: layer {number} rotates channels from {rotary.start} on, and those of "
                f"{group.quant} before {group.first_rotated} are not rotated"
            )
            raise LayoutError(msg)


def _as_bfloat16(
    tensors: tuple[torch.Tensor, ...], placement: Placement
) -> tuple[tuple[torch.Tensor, ...], Placement]:
    """Rows of bytes as rows of bfloat16, of which the last ones rotate; the others keep their bits.

    Raises:
        LayoutError: A stride, an offset or an address is odd.
    """
    k = placement.k
    starts = [at for one in tensors for at in (one.data_ptr(), one.storage_offset())]
    numbers = (*k.strides[:3], *k.offsets, k.dim, *starts)
    if k.strides[3] != 1 or any(number % 2 for number in numbers):
        msg = (
            "KVPool: rows with a bfloat16 part need channels next to each other, and even strides, "
            f"offsets and addresses, not strides {k.strides} and offsets {k.offsets}"
        )
        raise LayoutError(msg)
    of_two = [tensor.as_strided((_span(tensor),), (1,)) for tensor in tensors]
    wide = tuple(tensor.view(torch.bfloat16) for tensor in of_two)
    block, token, head, _ = (step // 2 for step in k.strides)
    offsets = tuple(offset // 2 for offset in k.offsets)
    rows = Rows(k.dim // 2, (block, token, head, 1), k.tensors, offsets)
    at = placement
    return wide, Placement(at.num_blocks, at.block_size, at.num_kv_heads, rows, None)


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first of a tensor to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in steps)


@dataclass(frozen=True, slots=True)
class _Part:
    """Layers of one shape and type: their tensors, and where rows are in them."""

    group: KVGroup
    layers: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    placement: Placement


@dataclass(frozen=True, slots=True)
class _Launch:
    """What moves rows of such layers: with ``form``, those that rotate are rounded again."""

    group: KVGroup
    layers: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    geometry: tuple[int, ...]
    form: CodeForm | None


def _alike(layout: KVLayout) -> list[tuple[int, ...]]:
    """The layers of each shape and type."""
    found: dict[object, tuple[int, ...]] = {}
    for layer, group in enumerate(layout.layers):
        key = (group.shape, group.dtype, group.quant)
        found[key] = (*found.get(key, ()), layer)
    return list(found.values())


def _stacked(tensor: torch.Tensor, number: int) -> Rows:
    """The rows of a tensor ``[layers, blocks, tokens, heads, dim]``."""
    layer, block, token, head, dim = tensor.stride()
    layers = range(tensor.shape[0])
    return Rows(
        tensor.shape[-1],
        (block, token, head, dim),
        (number,) * len(layers),
        tuple(layer * step for step in layers),
    )
