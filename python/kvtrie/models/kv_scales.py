"""Scales of quantised K and V that a checkpoint has, one of each layer."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from safetensors import safe_open

from kvtrie._core import LayoutError
from kvtrie.models.fingerprint import CheckpointError, weight_files

if TYPE_CHECKING:
    from os import PathLike

# As vLLM reads them: of K and V apart, or one of both.
_NAME: Final = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\.(?:.*\.)?"
    r"(?:(?P<side>k|v|kv)_scale|(?P<proj>k|v)_proj\.output_scale)$"
)


def checkpoint_scales(
    directory: str | PathLike[str], num_layers: int
) -> tuple[tuple[float, float], ...] | None:
    """The scales of K and of V of every layer; None if the checkpoint has none.

    Args:
        directory: A model directory; only its safetensors files are read.
        num_layers: Attention layers of the model.

    Raises:
        LayoutError: A scale is not one positive number, or a layer has none or is another.
    """
    try:
        files = weight_files(Path(directory))
    except CheckpointError:
        # Weights of another format, which have none by these names.
        return None
    found: dict[tuple[int, str], float] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                named = _NAME.search(name)
                if named is None:
                    continue
                tensor = tensors.get_tensor(name)
                value = float(tensor) if tensor.numel() == 1 else math.nan
                if not 0 < value < math.inf:
                    msg = (
                        f"{file.name}: {name} of shape {tuple(tensor.shape)} must be one positive "
                        "number, a scale of a whole layer"
                    )
                    raise LayoutError(msg)
                for side in named["side"] or named["proj"]:
                    found[int(named["layer"]), side] = value
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
