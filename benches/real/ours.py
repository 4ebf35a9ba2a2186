"""kvtrie's own choosers over a view of the suite: what `kvtrie.repair` computes again.

The suite's `fronts` and `probe` say the same in a few lines of torch, and are used where the
package has no `kvtrie.repair`. Rows of the two have different keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvtrie.repair import Fronts, Moved, Ngrams, Scored
from kvtrie.repair.probe import LayerProbe
from real.policies import PROBE_COST, Choice, to_middle

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from real.policies import View
    from real.reader import Reader

_PROBES: dict[int, LayerProbe] = {}


def fronts(view: View, share: float) -> Choice:
    """The first N tokens of each run, one N for all."""
    return _chosen(view, share, Fronts())


def ngrams(view: View, share: float) -> Choice:
    """Half fronts, half tokens whose n-gram match changed; needs no record."""
    return _chosen(view, share, Ngrams())


def probe(view: View, share: float) -> Choice:
    """Half fronts, half by how much the middle layer's attention output changes."""

    def scores(moved: Moved) -> NDArray[np.floating[Any]]:
        at = torch.from_numpy(moved.positions)
        layer, plan = view.reader.middle, view.plan
        found = _probe(view.reader).scores(
            plan.inputs[at], plan.outputs[at], at, view.gaps.k[layer], view.gaps.v[layer]
        )
        return found.numpy()

    cost = to_middle(view) + PROBE_COST * view.num_moved / view.reader.num_layers
    return _chosen(view, share, Scored(scores), cost)


def _chosen(view: View, share: float, chooser: Any, cost: float = 0.0) -> Choice:  # noqa: ANN401 - a protocol of kvtrie's
    plan = view.plan
    tokens = plan.ids.numpy()

    def context(number: int) -> NDArray[np.int64] | None:
        part = plan.segments[number]
        some = tokens[int(part["start"]) : int(part["end"])]
        first = int(part["old_start"])
        for one in view.contexts:
            if np.array_equal(one[first : first + len(some)], some):
                return np.array(one, dtype=np.int64)
        return None

    moved = Moved(tokens, plan.segments, plan.num_in_place, context)
    chosen = torch.zeros_like(plan.is_moved)
    for start, end in chooser.choose(moved, share):
        chosen[int(start) : int(end)] = True
    return Choice(chosen, cost)


def _probe(reader: Reader) -> LayerProbe:
    if id(reader) not in _PROBES:
        _PROBES[id(reader)] = LayerProbe(reader.model, reader.middle)
    return _PROBES[id(reader)]
