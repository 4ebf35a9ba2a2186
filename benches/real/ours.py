"""kvtrie's own choosers over a view of the suite: what `ReusePolicy(repair=...)` computes again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from kvtrie.engines._repair import _QUESTION, _Best, _ranks  # as the engine combines the two
from kvtrie.repair import Fronts, Moved, Ngrams, Scored
from kvtrie.repair.probe import LayerProbe
from real.views import Choice, to_middle

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtrie.repair import Chooser
    from real.reader import Reader
    from real.views import View

PROBE_COST: Final = 0.3
"""Of one layer, per token that is probed: its query, its attention and its output."""

_PROBES: dict[int, LayerProbe] = {}


def fronts(view: View, share: float) -> Choice:
    """The first N tokens of each run, one N for all."""
    return _chosen(view, share, Fronts())


def ngrams(view: View, share: float) -> Choice:
    """Half fronts, half tokens whose n-gram match changed; needs no record."""
    return _chosen(view, share, Ngrams())


def probe(view: View, share: float) -> Choice:
    """Half fronts, half by how much the middle layer's attention output changes."""
    return _chosen(view, share, Scored(lambda moved: changes(view, moved).numpy()), _cost(view))


def question(view: View, share: float) -> Choice:
    """By what the last tokens to compute attend to or by the probe: the better rank counts."""
    asked = torch.arange(len(view.plan.source))[view.plan.is_computed][-_QUESTION:]
    layer = view.reader.middle
    paid = _probe(view.reader).attention(
        view.gaps.inputs[asked], asked, view.gaps.k[layer], view.gaps.v[layer]
    )
    moved = moved_by(view)
    paid = paid[torch.from_numpy(moved.positions)]
    best = _Best(torch.maximum(_ranks(changes(view, moved)), _ranks(paid)).numpy())
    return _chosen(view, share, best, _cost(view))


def changes(view: View, moved: Moved) -> torch.Tensor:
    """The probe's scores of what is moved."""
    at = torch.from_numpy(moved.positions)
    layer, plan = view.reader.middle, view.plan
    return _probe(view.reader).scores(
        plan.inputs[at], plan.outputs[at], at, view.gaps.k[layer], view.gaps.v[layer]
    )


def _cost(view: View) -> float:
    """Of the probe: the gaps up to the middle layer, and a part of that layer for what moved."""
    return to_middle(view) + PROBE_COST * view.num_moved / view.reader.num_layers


def _chosen(view: View, share: float, chooser: Chooser, cost: float = 0.0) -> Choice:
    chosen = torch.zeros_like(view.plan.is_moved)
    for start, end in chooser.choose(moved_by(view), share):
        chosen[int(start) : int(end)] = True
    return Choice(chosen, cost)


def moved_by(view: View) -> Moved:
    """What the plan moves, as choosers see it."""
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

    return Moved(tokens, plan.segments, plan.num_in_place, context)


def _probe(reader: Reader) -> LayerProbe:
    if id(reader) not in _PROBES:
        _PROBES[id(reader)] = LayerProbe(reader.model, reader.middle)
    return _PROBES[id(reader)]
