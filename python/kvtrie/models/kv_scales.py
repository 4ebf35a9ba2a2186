"""Scales of quantised K and V, one of each layer: those of a checkpoint, and their name."""

from __future__ import annotations

import hashlib
import math
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

from safetensors import SafetensorError, safe_open

from kvtrie._core import LayoutError
from kvtrie.models.fingerprint import CheckpointError, weight_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from os import PathLike

    from torch import Tensor

# As vLLM reads them: of K and V apart, or one of both.
_NAME: Final = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\.(?:.*\.)?"
    r"(?:(?P<side>k|v|kv)_scale|(?P<proj>k|v)_proj\.output_scale)$"
)


def scaled_name(kv_dtype: str, scales: Sequence[tuple[float, float]]) -> str:
    """What a namespace and a gate call KV whose codes have these scales.

    Args:
        kv_dtype: As ``KVLayout.kv_dtype``.
        scales: Of K and of V, per layer.

    Returns:
        ``kv_dtype``, ``@`` and a digest of 16 hex digits; ``kv_dtype`` alone if every scale is 1.

    Example:
        >>> scaled_name("fp8_e4m3", [(1.0, 1.0)]), scaled_name("fp8_e4m3", [(0.5, 0.25)])
        ('fp8_e4m3', 'fp8_e4m3@3086fc08d045b783')
    """
    flat = [one for pair in scales for one in pair]
    if all(one == 1 for one in flat):
        return kv_dtype
    raw = struct.pack(f"<{len(flat)}d", *flat)
    digest = hashlib.blake2b(raw, digest_size=8, person=b"kvtrie.scales.1").hexdigest()
    return f"{kv_dtype}@{digest}"


def checkpoint_scales(
    directory: str | PathLike[str], num_layers: int
) -> tuple[tuple[float, float], ...] | None:
    """The scales of K and of V of every layer; None if no safetensors file has any.

    Args:
        directory: A model directory; only its safetensors files are read.
        num_layers: Attention layers of the model.

    Raises:
        LayoutError: A scale is not one positive number, a layer has none, or two of K or of V, or
            is another; or the index or a file of the weights is missing or broken.
    """
    root = Path(directory)
    # Weights of another format have none by these names.
    if not any(root.glob("*.safetensors*")):
        return None
    found: dict[tuple[int, str], float] = {}
    names: dict[tuple[int, str], str] = {}
    for file, named, tensor in _scales(root):
        value = float(tensor) if tensor.numel() == 1 else math.nan
        if not 0 < value < math.inf:
            msg = (
                f"{file.name}: {named.string} of shape {tuple(tensor.shape)} must be one positive "
                "number, a scale of a whole layer"
            )
            raise LayoutError(msg)
        for side in named["side"] or named["proj"]:
            key = int(named["layer"]), side
            if key in found:
                msg = (
                    f"{directory}: {names[key]} and {named.string} are both scales of "
                    f"{side.upper()} in layer {key[0]}, which must have one"
                )
                raise LayoutError(msg)
            found[key], names[key] = value, named.string
    if not found:
        return None
    wanted = {(layer, side) for layer in range(num_layers) for side in "kv"}
    odd = sorted(wanted ^ found.keys())
    if odd:
        layer, side = odd[0]
        what = "no scale" if odd[0] in wanted else "a scale"
        msg = (
            f"{directory}: the checkpoint has {what} of {side.upper()} in layer {layer}, next to "
            f"scales of others; the model has {num_layers} layers"
        )
        raise LayoutError(msg)
    return tuple((found[layer, "k"], found[layer, "v"]) for layer in range(num_layers))


def _scales(root: Path) -> Iterator[tuple[Path, re.Match[str], Tensor]]:
    """The tensors with the name of a scale, and their files."""
    try:
        for file in weight_files(root):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - the file is no mapping
                    named = _NAME.search(name)
                    if named is not None:
                        yield file, named, tensors.get_tensor(name)
    except (CheckpointError, OSError, SafetensorError) as error:
        msg = f"{root}: cannot read the scales of the checkpoint: {error}"
        raise LayoutError(msg) from error
