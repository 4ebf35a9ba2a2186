"""kvtrie's own choosers over a view of the suite: what `ReusePolicy(repair=...)` computes again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from kvtrie.engines._repair import _QUESTION, _Best, _ranks  # as the engine combines the two
from kvtrie.repair import Adaptive, Fronts, Moved, Ngrams, Probed
from kvtrie.repair.probe import LayerProbe
from kvtrie.repair.records import Records
from real.plans import BLOCK
from real.views import Choice, to_probed

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
    """A quarter fronts, the rest by how much the probed layer's attention output changes."""
    scores = changes(view, moved_by(view)).numpy()
    return _chosen(view, share, Probed(scores), _cost(view, _moved_end(view)))


def adaptive(view: View, share: float) -> Choice:
    """As the probe, and more of what changed more."""
    scores = changes(view, moved_by(view)).numpy()
    return _chosen(view, share, Adaptive(scores), _cost(view, _moved_end(view)))


def probe_fp8(view: View, share: float) -> Choice:
    """The same from records in float8, as ``Generator(records="fp8")`` keeps them."""
    moved = moved_by(view)
    num, (_, hidden) = len(moved.positions), view.plan.inputs.shape
    layer, dtype = view.reader.probed, view.plan.inputs.dtype
    device = view.reader.device
    num_blocks = -(-num // BLOCK)
    records = Records(num_blocks, BLOCK, hidden, layer=layer, dtype=dtype, fp8=True, device=device)
    at, slots = torch.from_numpy(moved.positions), torch.arange(num, device=device)
    records.write(slots, view.plan.inputs[at], view.plan.outputs[at])
    kept = records.read(slots)
    if kept is None:
        message = "records that were written are not known"
        raise RuntimeError(message)
    rows = view.gaps.k[layer], view.gaps.v[layer]
    scores = _probe(view.reader).scores(*kept, at.to(device), *rows)
    return _chosen(view, share, Probed(scores.cpu().numpy()), _cost(view, int(at.max()) + 1))


def question(view: View, share: float) -> Choice:
    """By what the last tokens to compute attend to or by the probe: the better rank counts."""
    asked = torch.arange(len(view.plan.source))[view.plan.is_computed][-_QUESTION:]
    layer = view.reader.probed
    paid = _probe(view.reader).attention(
        view.gaps.inputs[asked],
        asked.to(view.reader.device),
        view.gaps.k[layer],
        view.gaps.v[layer],
    )
    moved = moved_by(view)
    paid = paid.cpu()[torch.from_numpy(moved.positions)]
    best = _Best(torch.maximum(_ranks(changes(view, moved)), _ranks(paid)).numpy())
    return _chosen(view, share, best, _cost(view, len(view.plan.source)))


def changes(view: View, moved: Moved) -> torch.Tensor:
    """The probe's scores of what is moved, on the CPU."""
    at = torch.from_numpy(moved.positions)
    layer, plan = view.reader.probed, view.plan
    rows = view.gaps.k[layer], view.gaps.v[layer]
    probe, there = _probe(view.reader), at.to(view.reader.device)
    return probe.scores(plan.inputs[at], plan.outputs[at], there, *rows).cpu()


def _moved_end(view: View) -> int:
    """Where the last moved token ends: gaps after it are not run for the probe."""
    return int(view.plan.is_moved.nonzero().max()) + 1 if view.num_moved else 0


def _cost(view: View, end: int) -> float:
    """Of the probe: gaps before ``end`` up to its layer, and a part of that for what moved."""
    return to_probed(view, end) + PROBE_COST * view.num_moved / view.reader.num_layers


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
        _PROBES[id(reader)] = LayerProbe(reader.model, reader.probed)
    return _PROBES[id(reader)]
