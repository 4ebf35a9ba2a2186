"""Scores moved tokens by how much one layer's attention output changes in the assembled context.

The layer is two thirds up, where stale KV costs SmolLM2-135M most (``docs/repair.md``), or in a
model with windows the last one of full attention before that. Of each moved token its input h and
its attention output o were kept when its KV was computed (``Records``). Attending from h again, at
the new position, to the KV that is assembled for the prompt gives what the output would be there.
The score is the change next to what the layer passes on:
``|o_new - o_old| / |h + o_old|``, o after the output projection.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import DynamicCache

from kvtrie._core import LayoutError
from kvtrie.models.config import ConfigFields
from kvtrie.models.layers import layer_windows, num_kv_layers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel

# Queries that attend at once; their keys end with the last of them. A GPU waits for launches, and
# has room for a mask of so many rows, but not for their weights.
_CHUNK: Final = 128
_CHUNK_ON_GPU: Final = 2048
_CHECKED: Final = 9
_TOLERANCE: Final = {
    torch.float64: 1e-5,
    torch.float32: 1e-3,
    torch.float16: 3e-2,
    torch.bfloat16: 1e-1,
}


def probed_layer(windows: Sequence[int | None]) -> int:
    """The number of the layer that is probed by default.

    It is two thirds up, or the last layer of full attention before that, else the first after it.

    Args:
        windows: The window of each layer that keeps KV, or None for full attention.

    Raises:
        LayoutError: No layer has full attention.
    """
    full = [layer for layer, window in enumerate(windows) if window is None]
    if not full:
        msg = f"each of the {len(windows)} layers has a window: none is probed"
        raise LayoutError(msg)
    aim = 2 * len(windows) // 3
    return max((layer for layer in full if layer <= aim), default=full[0])


class _Stop(Exception):  # noqa: N818 - ends a pass, no error
    pass


class _Given:
    """A cache that gives a layer's K and V, whatever the pass computes."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._rows = keys, values

    def update(self, *_args: object, **_kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rows


class PassView:
    """What a pass showed of the layer, ``[tokens, hidden]``: its input and its attention output."""

    def __init__(self) -> None:
        self.h: torch.Tensor | None = None
        self.out: torch.Tensor | None = None


def changed(new: torch.Tensor, h: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """How much an attention output changed next to what the layer passes on, float32 ``[tokens]``.

    Args:
        new: The output in the assembled context, ``[tokens, hidden]``.
        h: The layer's kept input, as ``new``.
        out: Its kept attention output, as ``new``.
    """
    passed = (h + out).float().norm(dim=-1).clamp_min(1e-12)
    found: torch.Tensor = (new - out).float().norm(dim=-1) / passed
    return found


class LayerProbe:
    """One layer of a model, as the transformers library builds it (``self_attn`` in ``layers``).

    Args:
        model: A causal LM in eval mode.
        layer: The layer's number; None: that of `probed_layer`.

    Raises:
        LayoutError: The model has no such layer, or one with a window, or none without one; some
            layer of it has state or chunks; or attending from the kept input does not give the
            layer's own attention output.
    """

    def __init__(self, model: PreTrainedModel, layer: int | None = None) -> None:
        decoder: Any = model.get_decoder()
        layers: Any = getattr(decoder, "layers", None)
        if layers is None or getattr(decoder, "rotary_emb", None) is None:
            msg = f"{type(model).__name__} has no decoder layers with rotary embeddings to probe"
            raise LayoutError(msg)
        fields = ConfigFields(model.config, "LayerProbe: cannot probe", LayoutError)
        # Layers that share another's KV have none of their own.
        windows = layer_windows(fields, num_kv_layers(fields))
        self.layer = probed_layer(windows) if layer is None else layer
        if not 0 <= self.layer < len(windows):
            msg = f"layer {layer} is not one of the model's {len(windows)} layers with KV"
            raise LayoutError(msg)
        self._model = model
        self._rotary = decoder.rotary_emb
        self._block = layers[self.layer]
        if not (hasattr(self._block, "self_attn") and hasattr(self._block, "input_layernorm")):
            msg = f"layer {self.layer} of {type(model).__name__} has no self_attn to probe"
            raise LayoutError(msg)
        window = windows[self.layer]
        if window is not None:
            msg = (
                f"layer {self.layer} of {type(model).__name__} attends over a window of "
                f"{window} tokens: it is not probed"
            )
            raise LayoutError(msg)
        # Gemma 3's frequencies differ by the type of layer, and its module asks for it.
        takes_type = "layer_type" in inspect.signature(self._rotary.forward).parameters
        kinds: Any = getattr(self._block.self_attn.config, "layer_types", None)
        self._of_type = {"layer_type": kinds[self.layer]} if takes_type and kinds else {}
        self._check()

    @property
    def hidden(self) -> int:
        """Channels of the layer's input."""
        embeddings: Any = self._model.get_input_embeddings()
        return int(embeddings.weight.shape[1])

    @contextlib.contextmanager
    def seeing(self, *, stop: bool = False) -> Iterator[PassView]:
        """Note what a pass of the model shows of the layer.

        Args:
            stop: End the pass after the layer's attention.
        """
        seen = PassView()

        def before(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.h = (args[0] if args else kwargs["hidden_states"])[0]

        def after(_: object, _args: object, out: Any) -> None:  # noqa: ANN401 - a layer's own
            seen.out = (out[0] if isinstance(out, tuple) else out)[0]
            if stop:
                raise _Stop

        handles = [
            self._block.register_forward_pre_hook(before, with_kwargs=True),
            self._block.self_attn.register_forward_hook(after),
        ]
        try:
            yield seen
        except _Stop:
            pass
        finally:
            for handle in handles:
                handle.remove()

    def scores(
        self,
        h: torch.Tensor,
        out: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """The scores of tokens, float32 ``[tokens]``.

        Costs the attention of one layer over these tokens, about a third of the layer.

        Args:
            h: The layer's kept input, ``[tokens, hidden]``.
            out: Its kept attention output, as ``h``.
            positions: New positions, ascending int64 ``[tokens]``.
            keys: The assembled K of the layer, rotated, ``[end, kv_heads, head_dim]``.
            values: The assembled V, as ``keys``.
        """
        scores = torch.empty(len(positions), dtype=torch.float32, device=h.device)
        for some, new, _ in self.attended(h, positions, keys, values):
            scores[some] = changed(new, h[some], out[some])
        return scores

    def attention(
        self, h: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """The mean attention that tokens pay to each position, float32 ``[end]``.

        Args:
            h: The layer's input of these tokens, ``[tokens, hidden]``.
            positions: As for ``scores``.
            keys: As for ``scores``.
            values: As for ``scores``.
        """
        paid = torch.zeros(len(keys), dtype=torch.float32, device=h.device)
        for some, _, weights in self.attended(h, positions, keys, values, weighs=True):
            if weights is not None:
                part = len(positions[some]) / len(positions)
                paid[: weights.shape[-1]] += weights.mean(dim=(0, 1)) * part
        return paid

    def attended(
        self,
        h: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        weighs: bool = False,
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
        """The layer's attention of tokens, 128 at a time, on a GPU 2,048 if they need no weights.

        With weights the memory is a few times 128 x heads x end elements; they are not kept.

        Args:
            h: As for ``scores``.
            positions: As for ``scores``.
            keys: As for ``scores``.
            values: As for ``scores``.
            weighs: Whether weights are wanted. They take eager attention.

        Yields:
            Which of the tokens; their attention output, ``[some, hidden]``; and the weights, which
            sum to 1 for each head and token, float32 ``[heads, some, last position + 1]``, or None
            if they are not wanted or the layer returns none.
        """
        chunk = _CHUNK_ON_GPU if h.is_cuda and not (weighs or self._is_eager) else _CHUNK
        starts = range(0, len(positions), chunk)
        # The device is waited for once.
        last = torch.tensor(
            [min(start + chunk, len(positions)) - 1 for start in starts], dtype=torch.int64
        )
        ends = (positions[last.to(positions.device)] + 1).cpu().tolist()
        for start, end in zip(starts, ends, strict=True):
            some = slice(start, start + chunk)
            given = h[some], positions[some], keys[:end], values[:end]
            new, weights = self._weighed(*given) if weighs else self._attend(*given)
            yield some, new, None if weights is None else weights[0].float()

    @property
    def _is_eager(self) -> bool:
        config: Any = self._block.self_attn.config
        return bool(config._attn_implementation == "eager")  # noqa: SLF001 - as transformers does

    def _weighed(
        self, h: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``_attend``, in eager attention, which returns its weights."""
        config: Any = self._block.self_attn.config
        kind = config._attn_implementation  # noqa: SLF001 - eager attention returns its weights
        config._attn_implementation = "eager"  # noqa: SLF001
        try:
            return self._attend(h, positions, keys, values)
        finally:
            config._attn_implementation = kind  # noqa: SLF001

    def _attend(
        self, h: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = [part.transpose(0, 1).unsqueeze(0) for part in (keys, values)]
        seen = torch.arange(len(keys), device=h.device) <= positions.unsqueeze(1)
        attn: Any = self._block.self_attn
        mask = seen[None, None]
        if self._is_eager:
            low = torch.finfo(h.dtype).min
            mask = torch.zeros(mask.shape, dtype=h.dtype, device=h.device).masked_fill(~mask, low)
        with torch.inference_mode():
            states = self._block.input_layernorm(h.unsqueeze(0))
            angles = self._rotary(states, position_ids=positions.unsqueeze(0), **self._of_type)
            found = attn(
                hidden_states=states,
                position_embeddings=angles,
                attention_mask=mask,
                past_key_values=_Given(rows[0], rows[1]),
            )
        return found[0][0], found[1]

    def _check(self) -> None:
        """Compare the attention of a tiny pass with what attending from its kept input gives."""
        model: Any = self._model
        cache: Any = DynamicCache(config=model.config)
        ids = torch.arange(_CHECKED, device=model.device).unsqueeze(0)
        try:
            with torch.inference_mode(), self.seeing() as seen:
                model(input_ids=ids, past_key_values=cache, use_cache=True)
            rows = cache.layers[self.layer]
            keys, values = rows.keys[0].transpose(0, 1), rows.values[0].transpose(0, 1)
            h, out = torch.as_tensor(seen.h), torch.as_tensor(seen.out)
            new, _ = self._attend(h, ids[0], keys, values)
        except Exception as error:
            msg = f"layer {self.layer} of {type(model).__name__} cannot be probed: {error}"
            raise LayoutError(msg) from error
        if not (new - out).abs().max() <= _TOLERANCE[new.dtype] * out.abs().max():
            msg = (
                f"layer {self.layer} of {type(model).__name__} cannot be probed: attending from "
                "its kept input does not give its own attention output"
            )
            raise LayoutError(msg)
