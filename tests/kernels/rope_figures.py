"""Prints the figures of docs/rope.md: how exact rotated keys are.

Run: python -m tests.kernels.rope_figures
"""

from __future__ import annotations

import sys

import torch
from tests.kernels import test_rotate as rotation

from kvtrie.kernels.reference import rotate

TOKENS = 256
OLD = 40_000
ROPE = rotation.spec(inv_freq=rotation.frequencies(64, 1e6))
DELTAS = (1, -1, 1534, -32768, 131071, 10**6, -(10**6))


def main() -> None:
    say = sys.stdout.write
    unrotated, old = rotation.keys(ROPE, TOKENS), OLD + torch.arange(TOKENS)
    for dtype in rotation.DTYPES:
        say(f"{dtype}\n")
        source = unrotated.to(dtype)
        worst = 0.0
        for delta in DELTAS:
            exact = rotation.complex_rotation(source, ROPE, delta)
            once = rotation.error(exact.to(dtype), exact)
            worst = max(worst, rotation.error(rotate(source, ROPE, delta), exact) / once)
        say(f"  one rotation over one rounding, worst of {len(DELTAS)} deltas: {worst:.4f}\n")
        cached = rotation.complex_rotation(unrotated, ROPE, old).to(dtype)
        for rotations in (1, 16, 64):
            generator = torch.Generator().manual_seed(5)
            steps = torch.randint(-500, 500, (rotations,), generator=generator).tolist()
            moved = cached
            for step in steps:
                moved = rotate(moved, ROPE, step)
            exact = rotation.complex_rotation(unrotated, ROPE, old + sum(steps))
            chained = rotation.error(moved, exact)
            once = rotation.error(rotate(cached, ROPE, sum(steps)), exact)
            say(f"  {rotations:2} rotations: chained {chained:.1e}, once {once:.1e}\n")
    rotary = ROPE.layers[0]
    if rotary is None:
        return
    say("angles in float32 and everything else in float64\n")
    for position in (32_768, 10**6):
        at = torch.arange(position - TOKENS, position)
        exact = rotation.complex_rotation(unrotated, ROPE, at)
        angles = (at.float()[:, None] * torch.tensor(rotary.inv_freq).float()).double()
        first, second = unrotated.chunk(2, dim=-1)
        rotated = torch.complex(first, second) * torch.exp(1j * angles)
        got = torch.cat((rotated.real, rotated.imag), dim=-1)
        say(
            f"  position {position:,}: relative error {rotation.error(got, exact):.1e}, "
            f"worst channel {float((got - exact).abs().max()):.1e}\n"
        )


if __name__ == "__main__":
    main()
