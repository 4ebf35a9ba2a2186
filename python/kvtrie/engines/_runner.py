"""Runs a model over positions of a sequence with a block table."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from kvtrie.engines._paged_cache import PagedCache
from kvtrie.engines._probe import TOLERANCE, forward_inputs, language_config
from kvtrie.kernels import reference
from kvtrie.pool.kv_pool import KVPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from kvtrie._core import TokenSequence
    from kvtrie.engines._coding import KVCoding
    from kvtrie.engines._images import PlacedImages
    from kvtrie.engines._repair import Repair
    from kvtrie.engines._windows import WindowTable

    Ranges = Sequence[tuple[int, int]]

# Positions of a tiny prompt, and the gaps in it, by which sparse passes are checked.
_CHECKED: Final = 9
_CHECKED_GAPS: Final = ((2, 4), (6, 7), (8, 9))
# Of the check, in a model with windows: shorter than the prompt.
_CHECKED_WINDOW: Final = 3


# Queries of a masked attention at once on a CPU, whose kernel computes what the mask hides; a GPU
# has more to do in one launch.
_CHUNKS: Final = {"cpu": 128, "cuda": 2048}


class _UpToLast(TorchFunctionMode):
    """Attends with some queries at a time, and with the keys up to the last of these alone.

    With queries spread over the prompt, that is half of the products.
    """

    def __init__(self, positions: NDArray[np.int64], chunk: int) -> None:
        super().__init__()
        self._parts = [
            (start, start + chunk, int(positions[start : start + chunk][-1]) + 1)
            for start in range(0, len(positions), chunk)
        ]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what any function of torch returns
        given = dict(kwargs or {})
        mask = given.get("attn_mask")
        attends = func is torch.nn.functional.scaled_dot_product_attention
        if not (attends and isinstance(mask, torch.Tensor) and len(args) == 3):
            return func(*args, **given)
        query, key, value = args
        parts = []
        for start, stop, end in self._parts:
            given["attn_mask"] = mask[..., start:stop, :end]
            some = query[..., start:stop, :], key[..., :end, :], value[..., :end, :]
            parts.append(func(*some, **given))
        return torch.cat(parts, dim=-2)


class Runner:
    """A model and the pool of its KV, with ``coding`` if that is quantised.

    ``is_sparse`` is what another runner of the model has found.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pool: KVPool,
        *,
        coding: KVCoding | None = None,
        is_sparse: bool | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._coding = coding
        self._config: Any = language_config(model)
        self._inputs = forward_inputs(model)
        self._is_sparse = is_sparse
        self._windows = pool.layout.windows
        self.repair: Repair | None = None

    @property
    def is_sparse(self) -> bool:
        """Whether one pass may compute several ranges; checked by two tiny passes at first use."""
        if self._is_sparse is None:
            self._is_sparse = self._check_sparse()
        return self._is_sparse

    def run(
        self,
        seq: TokenSequence,
        table: NDArray[np.int32],
        ranges: Ranges,
        images: PlacedImages | None = None,
        windows: WindowTable | None = None,
    ) -> torch.Tensor:
        """Compute the KV of ascending ranges into a table that has all other KV before their end.

        Each token attends to everything before it, the other ranges included, as if the ranges were
        computed one after the other. Several ranges need ``is_sparse``. The mask takes one byte per
        computed token and position before the end, or one element of the model where it attends
        eagerly. ``images`` are those of the whole sequence; a range may begin inside one. With
        ``windows``, which have the blocks of layers with a window, ``table`` is of the others.

        Returns the last position's logits, float32, on the CPU.
        """
        ids = np.concatenate([seq[start:end] for start, end in ranges])
        if self.repair is None:
            return self._run(self._pool, ids, table, ranges, images, windows)
        slots = [self._pool.slots(table, start, end) for start, end in ranges]
        with self.repair.recording(torch.cat(slots)):
            return self._run(self._pool, ids, table, ranges, images, windows)

    def begin(self, tokens: NDArray[np.int64], table: NDArray[np.int32], ranges: Ranges) -> None:
        """Run ranges as far as something ends the pass; what it stored is to be computed again."""
        ids = np.concatenate([tokens[start:end] for start, end in ranges])
        self._run(self._pool, ids, table, ranges)

    def _run(
        self,
        pool: KVPool,
        ids: NDArray[np.integer[Any]],
        table: NDArray[np.int32],
        ranges: Ranges,
        images: PlacedImages | None = None,
        windows: WindowTable | None = None,
    ) -> torch.Tensor:
        device = pool.device
        coding = self._coding if pool is self._pool else None
        cache = PagedCache(pool, table, ranges, windows, coding)
        parts = [torch.arange(start, end, device=device) for start, end in ranges]
        positions = torch.cat(parts)
        options: dict[str, Any] = {}
        narrowed: Any = contextlib.nullcontext()
        if "position_ids" in self._inputs:
            options["position_ids"] = positions.unsqueeze(0)
        if "cache_position" in self._inputs:
            options["cache_position"] = positions
        if "logits_to_keep" in self._inputs:
            options["logits_to_keep"] = 1
        if len(ranges) > 1:
            options["attention_mask"] = self._masks(positions, ranges[-1][1])
            narrowed = _UpToLast(positions.cpu().numpy(), _CHUNKS.get(device.type, 2048))
        tokens = torch.from_numpy(ids.astype(np.int64)).to(device)
        with torch.inference_mode():
            if images is None:
                options["input_ids"] = tokens.unsqueeze(0)
            else:
                options["position_ids"] = images.positions(positions)
                options["inputs_embeds"] = images.embeddings(tokens, positions).unsqueeze(0)
            with narrowed:
                out = self._model(past_key_values=cache, use_cache=True, **options)
        cache.check_written()
        row: torch.Tensor = out.logits[0, -1].float().cpu()
        return row

    def _masks(self, positions: torch.Tensor, end: int) -> Any:  # noqa: ANN401 - what a model takes
        """The mask of all layers, or those of full attention and of windows by their names."""
        windows = sorted({window or 0 for window in self._windows})
        masks = [self._mask(positions, end, window) for window in windows]
        if len(masks) == 1:
            return masks[0]
        return dict(zip(("full_attention", "sliding_attention"), masks, strict=True))

    def _mask(self, positions: torch.Tensor, end: int, window: int) -> torch.Tensor:
        """What each computed token attends to, ``[1, 1, tokens, end]``; window 0: all before it."""
        at = torch.arange(end, device=positions.device)
        seen = at <= positions.unsqueeze(1)
        if window:
            seen &= at > positions.unsqueeze(1) - window
        if self._config._attn_implementation == "eager":  # noqa: SLF001 - as transformers does
            dtype = self._model.dtype
            low = torch.tensor(torch.finfo(dtype).min, dtype=dtype, device=positions.device)
            return torch.where(seen, torch.zeros_like(low), low)[None, None]
        return seen[None, None]

    def _check_sparse(self) -> bool:
        """Compare a tiny prompt computed at once with one whose gaps are computed in one pass."""
        config = self._config
        kind = getattr(config, "_attn_implementation", None)
        if "position_ids" not in self._inputs or kind not in ("sdpa", "eager"):
            return False
        windows = {window for window in self._windows if window is not None}
        if not windows:
            return self._is_same_with_gaps()
        if len(windows) > 1 or not hasattr(config, "sliding_window"):
            return False
        # Else the tiny prompt would be within every window.
        windows_of_layers, window_of_model = self._windows, config.sliding_window
        self._windows = tuple(window and _CHECKED_WINDOW for window in windows_of_layers)
        config.sliding_window = _CHECKED_WINDOW
        try:
            return self._is_same_with_gaps()
        finally:
            self._windows = windows_of_layers
            config.sliding_window = window_of_model

    def _is_same_with_gaps(self) -> bool:
        # In floats: codes may round apart what differs by rounding.
        name = str(self._model.dtype).removeprefix("torch.")
        layout = replace(self._pool.layout, dtype=name, quant=None)
        table = np.arange(-(-_CHECKED // layout.block_size), dtype=np.int32)
        pool = KVPool(layout, num_blocks=len(table), device=self._pool.device)
        every = [rows for rows in (*pool.k, *pool.v) if rows is not None]
        slots = pool.slots(table, 0, _CHECKED)
        ids = np.arange(_CHECKED)
        gaps = np.concatenate([np.arange(start, end) for start, end in _CHECKED_GAPS])
        try:
            whole = self._run(pool, ids, table, [(0, _CHECKED)])
            kept = [reference.gather_rows(rows, slots) for rows in every]
            for rows, old in zip(every, kept, strict=True):
                reference.scatter_rows(rows, slots[gaps], torch.full_like(old[gaps], 3))
            sparse = self._run(pool, ids[gaps], table, _CHECKED_GAPS)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False
        found = [reference.gather_rows(rows, slots) for rows in every]
        return all(
            bool((new - old).abs().max() <= TOLERANCE[layout.dtype] * old.abs().max())
            for old, new in [(whole, sparse), *zip(kept, found, strict=True)]
        )
