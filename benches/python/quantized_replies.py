"""Prints what moved K in quantised pools costs the next tokens of a real model.

    make models
    python benches/python/quantized_replies.py

A prompt of SmolLM2-135M-Instruct loses a block of 400 tokens after the first 200; the 700 tokens
after it move, and 64 tokens follow. KL and top 1 of these 64 compare with full recomputation in
float32, over the texts. K and V are both kept in the type. The exit code is 1 if K that is not
rotated loses no more than K that is: then nothing was measured.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import quantized_keys as keys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvtrie.rope import RopeSpec

HEAD: Final = 200
BLOCK: Final = 400
RUN: Final = 700
TAIL: Final = 64
TYPES: Final = (
    *("fp8_e4m3", "fp8_e5m2", "int8"),
    *("fp8_per_token_head", "int8_per_token_head"),
)
TEXTS: Final = ("docs/design.md", "docs/concepts.md", "docs/calibrate.md")
STEPS: Final = (-100, -100, -100, -100)

KV = tuple[torch.Tensor, torch.Tensor]


def kv_of(model: Any, ids: torch.Tensor) -> KV:  # noqa: ANN401 - of transformers
    """K and V of all layers, ``[layers, tokens, heads, channels]``."""
    with torch.inference_mode():
        cache = model(ids, use_cache=True).past_key_values
    k = torch.stack([layer.keys[0].transpose(0, 1) for layer in cache.layers])
    return k, torch.stack([layer.values[0].transpose(0, 1) for layer in cache.layers])


def after(model: Any, kv: KV, tail: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - likewise
    """Logarithms of the probabilities after each token of the tail."""
    cache = DynamicCache()
    for layer, (k, v) in enumerate(zip(*kv, strict=True)):
        sides = (side.float().transpose(0, 1).unsqueeze(0) for side in (k, v))
        cache.update(*sides, layer)
    with torch.inference_mode():
        logits = model(tail, past_key_values=cache).logits[0]
    found: torch.Tensor = logits.double().log_softmax(-1)
    return found


def rounded(quant: str, x: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    it = keys.Stored(quant, x, rope)
    return it.floats(*it.rows(x))


def variants(old: KV, new: KV, rope: RopeSpec) -> dict[str, KV]:
    """KV of the head and the run of the shorter prompt, by the way it is made."""
    head = tuple(side[:, :HEAD] for side in old)
    run = tuple(side[:, HEAD + BLOCK :] for side in old)
    float_k = torch.cat([head[0].double(), keys.rotated(run[0], rope, -BLOCK)], dim=1)
    v = torch.cat([head[1], run[1]], dim=1)
    found = {
        "float32: moved": (float_k, v),
        "float32: not rotated": (torch.cat([head[0], run[0]], dim=1), v),
    }
    for quant in TYPES:
        found[f"{quant}: exact"] = (rounded(quant, new[0], rope), rounded(quant, new[1], rope))
        of_head, of_v = rounded(quant, head[0], rope), rounded(quant, v, rope)
        for name, steps in (("moved", (-BLOCK,)), (f"moved in {len(STEPS)} steps", STEPS)):
            moved, _, _ = keys.Stored(quant, run[0], rope).moved(steps)
            found[f"{quant}: {name}"] = (torch.cat([of_head, moved], dim=1), of_v)
    return found


def main() -> int:
    say = sys.stdout.write
    if not keys.MODEL.is_dir():
        sys.exit(f"{keys.MODEL} is missing: run `make models`")
    tokenizer: Any = AutoTokenizer.from_pretrained(keys.MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(keys.MODEL, dtype=torch.float32)
    rope = RopeSpec.from_config(model.config)
    figures: dict[str, list[tuple[float, float]]] = {}
    for name in TEXTS:
        text = (keys.ROOT / name).read_text(encoding="utf-8")
        ids = tokenizer(text, return_tensors="pt").input_ids[:, : HEAD + BLOCK + RUN + TAIL]
        prompt, tail = ids[:, :-TAIL], ids[:, -TAIL:]
        shorter = torch.cat([prompt[:, :HEAD], prompt[:, HEAD + BLOCK :]], dim=1)
        new = kv_of(model, shorter)
        want = after(model, new, tail)
        for label, kv in variants(kv_of(model, prompt), new, rope).items():
            got = after(model, kv, tail)
            kl = float((want.exp() * (want - got)).sum(-1).mean())
            same = float((want.argmax(-1) == got.argmax(-1)).double().mean())
            figures.setdefault(label, []).append((kl, same))
    means = {
        label: tuple(sum(column) / len(rows) for column in zip(*rows, strict=True))
        for label, rows in figures.items()
    }
    for label, (kl, same) in means.items():
        say(f"| {label} | KL {kl:.4f} | top 1 {same:.3f} |\n")
    return int(means["float32: not rotated"][0] <= 2 * means["float32: moved"][0])


if __name__ == "__main__":
    sys.exit(main())
