"""Prints the error of moved K in quantised pools, on real keys, next to direct rounding.

    make models
    python benches/python/quantized_keys.py

Keys are those that SmolLM2-135M-Instruct computes of a text in float32. Direct rounding quantises
the same keys rotated in float64; a moved key is quantised, rotated in the pool and quantised again.
The exit code is 1 if a moved key errs by more than 1.5 times as much.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvtrie.kernels import codes, reference
from kvtrie.kernels.codes import CodeForm
from kvtrie.models.kv_types import KV_TYPES
from kvtrie.pool import KVLayout, KVPool
from kvtrie.rope import RopeSpec

ROOT: Final = Path(__file__).resolve().parents[2]
MODEL: Final = ROOT / "target" / "models" / "smollm2-135m-instruct"
TEXTS: Final = ("docs/design.md", "docs/concepts.md")
TOKENS: Final = 700
DELTAS: Final = (-400, 57, 1534)
TURNS: Final = 4
LIMIT: Final = 1.5
BLOCK: Final = 16

MOVES: Final = [(name, "i8") for name in ("source_slot", "dest_slot", "num_tokens", "delta")]


def real_keys() -> tuple[torch.Tensor, RopeSpec]:
    """K of all layers, ``[layers, tokens, heads, channels]``, float32, and how it rotates."""
    if not MODEL.is_dir():
        sys.exit(f"{MODEL} is missing: run `make models`")
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    found = []
    for name in TEXTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        ids = tokenizer(text, return_tensors="pt").input_ids[:, :TOKENS]
        with torch.inference_mode():
            cache = model(ids, use_cache=True).past_key_values
        layers = [layer.keys[0].transpose(0, 1) for layer in cache.layers]
        found.append(torch.stack(layers))
    return torch.cat(found, dim=1), RopeSpec.from_config(model.config)


class Stored:
    """Keys in a quantised pool, and back."""

    def __init__(self, quant: str, k: torch.Tensor, rope: RopeSpec) -> None:
        self.kind = KV_TYPES[quant]
        form = CodeForm.of(self.kind)
        if form is None:
            msg = f"{quant} rounds no codes"
            raise ValueError(msg)
        self.form = form
        # Index rows have one head.
        self.k = k[:, :, :1] if self.kind.is_single else k
        self.rope = rope
        # The scale of a layer, as a calibration of the same text finds it.
        self.scale = self.k.abs().amax(dim=(1, 2, 3), keepdim=True) / codes.LARGEST[form.code]

    def rows(self, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.form.scales == codes.IN_LAYER:
            return codes.encode(k.float() / self.scale, self.form.code)[0], None
        found, scales = codes.quantize(k, self.form)
        its = scales.unsqueeze(-1).view(torch.uint8)
        if self.form.scales == codes.IN_ROW:
            return torch.cat([found, its], dim=-1), None
        return found, its

    def floats(self, rows: torch.Tensor, its: torch.Tensor | None) -> torch.Tensor:
        dim = self.k.shape[-1]
        numbers = codes.decode(rows[..., :dim].contiguous(), self.form.code).double()
        if self.form.scales == codes.IN_LAYER:
            return numbers * self.scale.double()
        scales = rows[..., dim:] if its is None else its
        return numbers * scales.contiguous().view(torch.float32).double()

    def moved(self, deltas: tuple[int, ...]) -> tuple[torch.Tensor, int, int]:
        """Keys after moves by each delta, and how many elements saturated, of how many."""
        layers, tokens, heads, dim = self.k.shape
        layout = KVLayout(
            num_layers=layers,
            num_kv_heads=heads,
            head_dim=dim,
            v_head_dim=0,
            dtype="uint8",
            quant=self.kind.name,
        )
        blocks = -(-tokens // BLOCK)
        pool = KVPool(layout, self.rope, num_blocks=2 * blocks)
        tables = list(range(blocks)), list(range(blocks, 2 * blocks))
        rows, its = self.rows(self.k)
        pool.scatter(rows, its, tables[0], 0)
        saturated = elements = 0
        for turn, delta in enumerate(deltas):
            source, dest = (tables[(turn + side) % 2][0] * BLOCK for side in (0, 1))
            moves = np.array([(source, dest, tokens, delta)], dtype=MOVES)
            # A second turn is what a plan may not do: here it shows why.
            event = pool.apply(moves, hops=1)
            saturated += event.num_saturated
            elements += event.num_requantized
        got = pool.gather(tables[len(deltas) % 2], 0, tokens)
        return self.floats(*got), saturated, elements


def rotated(k: torch.Tensor, rope: RopeSpec, delta: int) -> torch.Tensor:
    return torch.stack(
        [
            reference.rotate(rows.double().transpose(0, 1), rope, delta, layer).transpose(0, 1)
            for layer, rows in enumerate(k)
        ]
    )


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def main() -> int:
    say = sys.stdout.write
    k, rope = real_keys()
    say(f"{k.shape[0]} layers, {k.shape[1]} tokens, {k.shape[2]} heads of {k.shape[3]}\n")
    say("| KV type | delta | direct | moved | ratio | saturated | furthest beyond | chained |\n")
    worst = 0.0
    for quant, kind in KV_TYPES.items():
        if not kind.requantizes:
            continue
        for delta in DELTAS:
            it = Stored(quant, k, rope)
            want = rotated(it.k, rope, delta)
            direct = error(it.floats(*it.rows(want)), want)
            got, saturated, elements = it.moved((delta,))
            ratio = error(got, want) / direct
            worst = max(worst, ratio)
            over = float((want.abs().amax((1, 2, 3)) / it.k.abs().amax((1, 2, 3))).max()) - 1
            steps = tuple(delta + turn for turn in range(TURNS))
            far = rotated(it.k, rope, sum(steps))
            chained = error(it.moved(steps)[0], far) / error(it.floats(*it.rows(far)), far)
            shown = f"{max(over, 0):.1%}" if it.form.scales == codes.IN_LAYER else "-"
            say(
                f"| {quant} | {delta} | {direct:.2e} | {error(got, want):.2e} | {ratio:.2f} "
                f"| {saturated} of {elements} | {shown} | {chained:.2f} |\n"
            )
    say(f"worst ratio {worst:.2f}, limit {LIMIT}\n")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
