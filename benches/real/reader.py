"""Forward passes of a model of Llama's or Gemma 3's form: in full, and over KV partly given.

`Reader.mixed` computes any set of tokens in one pass: queries of those tokens, keys and values of
the given tokens and of their own, a mask by position. A pass of n tokens over a prompt of m has the
attention of n * m pairs, with the mask in memory: a byte per pair, two where layers have windows.

KV, records and logits are on the model's device. What is said of tokens (ids, positions, masks,
scores) is on the CPU, and the reader takes it to the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvtrie import LayoutError
from kvtrie.engines._products import product
from kvtrie.models.config import ConfigFields
from kvtrie.models.layers import layer_windows
from kvtrie.repair.probe import probed_layer

if TYPE_CHECKING:
    from collections.abc import Sequence

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
"""Masks of transformers, by type of layer."""


@dataclass(frozen=True, slots=True)
class Kept:
    """KV of tokens, and what choosers read: for each, at the probed layer, its input and output.

    Attributes:
        k: ``[layers, tokens, heads, dim]``.
        v: Likewise.
        inputs: The probed layer's input, ``[tokens, hidden]``.
        outputs: What the layer's attention adds to it, ``[tokens, hidden]``.
    """

    k: torch.Tensor
    v: torch.Tensor
    inputs: torch.Tensor
    outputs: torch.Tensor


class Reader:
    """A loaded model in evaluation mode, one sequence at a time.

    Args:
        model: Of one window, or none; where layers have one, others have full attention.
        ends: Tokens that end a reply next to the config's.

    Attributes:
        windows: Of each layer; None: full attention.
        window: The width that layers with one have, or None.
        probed: The layer that kvtrie's probe probes.

    Raises:
        LayoutError: Windows are of several widths, or no layer has full attention.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - transformers has no types for them
        ends: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.core = model.model
        self.device: torch.device = model.device
        self.num_layers = int(model.config.num_hidden_layers)
        self._ends = {model.config.eos_token_id, *ends}
        fields = ConfigFields(model.config, "Reader: cannot read", LayoutError)
        self.windows = layer_windows(fields, self.num_layers)
        widths = {one for one in self.windows if one is not None}
        if len(widths) > 1:
            msg = f"windows of {len(widths)} widths ({sorted(widths)}): the reader knows one"
            raise LayoutError(msg)
        self.window = next(iter(widths), None)
        self.probed = probed_layer(self.windows)
        self._seen: dict[str, torch.Tensor] = {}
        layer = self.core.layers[self.probed]
        layer.register_forward_pre_hook(self._see_input, with_kwargs=True)
        layer.self_attn.register_forward_hook(self._see_output)

    def full(self, ids: Sequence[int], num_logits: int = 1) -> tuple[Kept, torch.Tensor]:
        """All tokens from nothing; the logits of the last ``num_logits``."""
        cache = DynamicCache()
        with torch.inference_mode():
            out = self.model(
                input_ids=torch.tensor([list(ids)], device=self.device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=num_logits,
            )
        return self._kept(cache, 0), out.logits[0]

    def mixed(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        *,
        branches: torch.Tensor | None = None,
        rebuilt: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
        num_logits: int = 1,
    ) -> tuple[Kept, torch.Tensor]:
        """Some tokens over the KV of others.

        Args:
            ids: The tokens to compute.
            positions: Of each of them, ascending in each branch.
            given: K and V of other tokens, as in `Kept`, and their positions.
            branches: 0 for a token of the prompt, else the number of the reply that it belongs to.
                A reply's tokens see the prompt and their own reply.
            rebuilt: bool, of each token to compute: it is computed for layers with a window alone.
                Full attention sees what is given of it, which must be there.
            hidden: bool, of each given token: layers with a window do not see it.
            num_logits: How many of the last tokens' logits are returned.
        """
        k, v, at = given
        ids, positions, at = (one.to(self.device) for one in (ids, positions, at))
        cache = DynamicCache()
        for layer in range(self.num_layers):
            cache.update(_row(k[layer]), _row(v[layer]), layer)
        own = torch.zeros_like(positions) if branches is None else branches.to(self.device)
        kv_at = torch.cat([at, positions])
        kv_own = torch.cat([torch.zeros_like(at), own])
        mask = (kv_at <= positions[:, None]) & ((kv_own == 0) | (kv_own == own[:, None]))
        masks: Any = mask[None, None]
        if self.window is not None:
            near = mask & (kv_at > positions[:, None] - self.window)
            if rebuilt is not None:
                mask = mask.clone()
                mask[:, len(at) :] &= ~rebuilt.to(self.device)
            if hidden is not None:
                near[:, : len(at)] &= ~hidden.to(self.device)
            masks = {FULL: mask[None, None], SLIDING: near[None, None]}
        elif rebuilt is not None or hidden is not None:
            msg = "no layer has a window: none is rebuilt or hidden"
            raise ValueError(msg)
        with torch.inference_mode():
            out = self.model(
                input_ids=ids[None],
                position_ids=positions[None],
                attention_mask=masks,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=num_logits,
            )
        return self._kept(cache, len(at)), out.logits[0]

    def greedy(self, kept: Kept, last: torch.Tensor, num_tokens: int) -> list[int]:
        """The model's own reply after a prompt, of which ``last`` are the logits."""
        cache = DynamicCache()
        for layer in range(self.num_layers):
            cache.update(_row(kept.k[layer]), _row(kept.v[layer]), layer)
        found = [int(last.argmax())]
        while len(found) < num_tokens and found[-1] not in self._ends:
            with torch.inference_mode():
                ids = torch.tensor([found[-1:]], device=self.device)
                out = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
            found.append(int(out.logits[0, -1].argmax()))
        return found

    # --- what choosers ask ------------------------------------------------------------------------

    def queries(self, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotated queries of the probed layer: ``[heads, tokens, dim]``."""
        layer = self.core.layers[self.probed]
        with torch.inference_mode():
            q = layer.self_attn.q_proj(layer.input_layernorm(inputs))
            q = q.view(len(inputs), -1, layer.self_attn.head_dim).transpose(0, 1)
            if hasattr(layer.self_attn, "q_norm"):
                q = layer.self_attn.q_norm(q)
            cos, sin = self._angles(q, positions[None].to(q.device), self.probed)
            q, _ = apply_rotary_pos_emb(q[None], q[None], cos, sin)
        rows: torch.Tensor = q[0]
        return rows

    def rotated(
        self, k: torch.Tensor, by: torch.Tensor, base_of: int | None = None
    ) -> torch.Tensor:
        """K of all layers, rotated by so many positions: ``[layers, tokens, heads, dim]``.

        Each layer has its own base, or all have that of the layer ``base_of``.
        """
        by = by.to(k.device)
        found = torch.empty_like(k, dtype=torch.float32)
        for layer, keys in enumerate(k.float()):
            rows = keys.transpose(0, 1)[None]
            cos, sin = self._angles(rows, by.abs()[None], layer if base_of is None else base_of)
            rows, _ = apply_rotary_pos_emb(rows, rows, cos, sin * by.sign()[None, :, None])
            found[layer] = rows[0].transpose(0, 1)
        return found

    def attention(
        self, q: torch.Tensor, q_at: torch.Tensor, k: torch.Tensor, k_at: torch.Tensor
    ) -> torch.Tensor:
        """Weights of the probed layer: ``[heads, queries, keys]`` in float32."""
        q_at, k_at = q_at.to(q.device), k_at.to(q.device)
        scale = self.core.layers[self.probed].self_attn.scaling
        grouped = k.transpose(0, 1).repeat_interleave(len(q) // k.shape[1], dim=0)
        scores = product(q, grouped.transpose(1, 2)).float() * scale
        weights: torch.Tensor = scores.masked_fill(k_at > q_at[:, None], float("-inf")).softmax(-1)
        return weights

    def attended(
        self,
        inputs: torch.Tensor,
        at: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_at: torch.Tensor,
        chunk: int = 512,
    ) -> torch.Tensor:
        """What the probed layer's attention adds for tokens with these inputs, over this KV."""
        layer = self.core.layers[self.probed].self_attn
        found = []
        for start in range(0, len(inputs), chunk):
            part = slice(start, start + chunk)
            q = self.queries(inputs[part], at[part])
            weights = self.attention(q, at[part], k, k_at).to(v.dtype)
            grouped = v.transpose(0, 1).repeat_interleave(len(q) // v.shape[1], dim=0)
            rows = product(weights, grouped).transpose(0, 1).reshape(q.shape[1], -1)
            with torch.inference_mode():
                found.append(layer.o_proj(rows))
        return torch.cat(found) if found else inputs

    def _angles(
        self, rows: torch.Tensor, at: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of positions as a layer has them."""
        if self.window is None:
            cos, sin = self.core.rotary_emb(rows, at)
        else:
            cos, sin = self.core.rotary_emb(rows, at, self.model.config.layer_types[layer])
        return cos, sin

    def _see_input(self, _layer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self._seen["inputs"] = hidden[0]

    def _see_output(self, _layer: object, _args: object, output: tuple[torch.Tensor, ...]) -> None:
        self._seen["outputs"] = output[0][0]

    def _kept(self, cache: DynamicCache, start: int) -> Kept:
        k, v = (
            torch.stack([getattr(one, name)[0, :, start:].transpose(0, 1) for one in cache.layers])
            for name in ("keys", "values")
        )
        return Kept(k, v, self._seen["inputs"], self._seen["outputs"])


def _row(states: torch.Tensor) -> torch.Tensor:
    """Tokens of one layer as a cache has them: ``[1, heads, tokens, dim]``."""
    return states.transpose(0, 1).unsqueeze(0)
