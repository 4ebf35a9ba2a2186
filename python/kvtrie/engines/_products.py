"""Matrix products in bfloat16 and float16 on processors that have no instructions for them.

There torch multiplies element by element: 1,024 tokens of SmolLM2-135M take 25.5 s in bfloat16, and
4.2 s in float32 (torch 2.13, one core of an AMD EPYC with AVX2). Here the operands become float32,
and the product is rounded once to the element type. Such instructions do the same: the product of
two bfloat16 or float16 numbers is exact in float32, sums are kept in float32, and the last rounding
is the only one that is coarse. What remains is the order of the sums, which differs between
processors anyway.

A layer's weight is widened in slices of a million elements, which costs 4 MiB at a time. Up to
three tokens are left to torch, which multiplies them as quickly. Experts that are no
`torch.nn.Linear` stay as they are.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn
from torch.nn import functional

# Elements of a weight that are widened at a time.
_SLICE: Final = 1 << 20
# Tokens that torch multiplies as quickly.
_FEW: Final = 3

# A build of torch without oneDNN has no such question.
_ASKED: Final = {
    torch.bfloat16: getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None),
    torch.float16: getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None),
}


def is_slow(of: torch.Tensor) -> bool:
    """Whether products of a tensor's element type take long on its device."""
    is_supported = _ASKED.get(of.dtype)
    return of.device.type == "cpu" and is_supported is not None and not is_supported()


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right`` of one element type, in that type."""
    if is_slow(left):
        return (left.float() @ right.float()).to(left.dtype)
    return left @ right


def speed_up(model: nn.Module) -> None:
    """Let a model's linear layers whose products take long multiply in float32.

    Weights stay what and where they are.
    """
    for module in model.modules():
        # Subclasses, as of quantised models, multiply in their own way.
        if type(module) is nn.Linear and is_slow(module.weight):
            module.__class__ = _Linear


class _Linear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        if input.dtype != self.weight.dtype or input.numel() <= _FEW * self.in_features:
            return super().forward(input)
        bias = self._parameters["bias"]
        rows = input.reshape(-1, self.in_features).float()
        found = rows.new_empty((len(rows), self.out_features), dtype=input.dtype)
        step = max(1, _SLICE // self.in_features)
        for start in range(0, self.out_features, step):
            part = slice(start, start + step)
            wide = None if bias is None else bias[part].float()
            found[:, part] = functional.linear(rows, self.weight[part].float(), wide)
        return found.reshape(*input.shape[:-1], self.out_features)
