"""Which tokens of moved runs are computed again: the policies that are compared.

All are compared on the same plans. A policy is a function of a `View` that returns a `Choice`. Its
cost is the tokens chosen, and what choosing costs, in tokens that go through all layers. ``NAME20``
chooses 20 % of the moved tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from real import ours
from real.plans import MANY_HOPS
from real.views import Choice, View, to_probed, top

VERSION: Final = 3
"""Raised when what a policy chooses changes: rows of other versions are measured again."""

# A deviation of K and V at this layer shows what all layers before it changed: CacheBlend's choice.
BLEND_LAYER: Final = 1


Chooser = Callable[[View, float], Choice]


def first(view: View, number: int) -> torch.Tensor:
    """The first ``number`` tokens of each moved run."""
    chosen = torch.zeros_like(view.plan.is_moved)
    for start, end, _ in view.plan.runs:
        chosen[start : min(end, start + number)] = True
    return chosen


def random(view: View, share: float) -> Choice:
    generator = torch.Generator().manual_seed(view.seed)
    scores = torch.rand(len(view.plan.source), generator=generator)
    return Choice(top(scores, view.plan.is_moved, view.budget(share)))


def deviation(view: View, layers: slice) -> torch.Tensor:
    """How far K and V are from full recomputation, relative, summed over layers."""
    found = torch.zeros(len(view.plan.source), device=view.reader.device)
    for own, true in ((view.plan.k, view.truth.k), (view.plan.v, view.truth.v)):
        for a, b in zip(own[layers], true[layers], strict=True):
            square = b.float().square().sum((-2, -1)).mean()
            found += (a.float() - b.float()).square().sum((-2, -1)) / square
    return found.cpu()


def blend(view: View, share: float) -> Choice:
    """CacheBlend's: the first layers are computed for all, then those that deviate most."""
    scores = deviation(view, slice(BLEND_LAYER, BLEND_LAYER + 1))
    cost = view.num_moved * (BLEND_LAYER + 1) / view.reader.num_layers
    return Choice(top(scores, view.plan.is_moved, view.budget(share)), cost)


def oracle(view: View, share: float) -> Choice:
    """Knows the deviation in all layers; nothing that serves can."""
    scores = deviation(view, slice(None))
    return Choice(top(scores, view.plan.is_moved, view.budget(share)))


def sink(view: View, share: float) -> Choice:
    """Those that drew most attention where they come from: attention sinks first."""
    return Choice(top(view.received, view.plan.is_moved, view.budget(share)))


def asked(view: View) -> torch.Tensor:
    """The attention of the last message's tokens, at the probed layer, over the mixed KV."""
    reader, layer = view.reader, view.reader.probed
    at = torch.arange(len(view.plan.source))
    tail = slice(view.moved_end, None)
    q = reader.queries(view.gaps.inputs[tail], at[tail])
    return reader.attention(q, at[tail], view.gaps.k[layer], at).mean((0, 1)).cpu()


def query(view: View, share: float) -> Choice:
    """Query attention: those that the last message attends to most."""
    scores = asked(view)
    return Choice(top(scores, view.plan.is_moved, view.budget(share)), to_probed(view, len(scores)))


def lost(view: View, share: float) -> Choice:
    """Those that attended most, where they come from, to text that is not before them here."""
    scores = torch.zeros(len(view.plan.source))
    for start, end, old in view.plan.runs:
        context = view.context(start, end, old)
        keys = view.keys[context][: old + end - start]
        at = torch.arange(old, old + end - start)
        q = view.reader.queries(view.plan.inputs[start:end], at)
        weights = view.reader.attention(q, at, keys, torch.arange(len(keys))).mean(0)
        gone = ~view.kept(context, start)[: len(keys)]
        gone[old:] = False
        scores[start:end] = weights[:, gone].sum(-1).cpu()
    return Choice(top(scores, view.plan.is_moved, view.budget(share)), _probing(view))


def corrected(view: View, share: float) -> Choice:
    """Fronts, and the mean of what changed there added to the KV of each run's rest."""
    chosen = ours.fronts(view, share).chosen
    at = torch.arange(len(chosen))
    some = view.plan.is_computed | chosen
    new, _ = view.reader.mixed(
        view.plan.ids[some], at[some], (view.plan.k[:, ~some], view.plan.v[:, ~some], at[~some])
    )
    k, v = view.plan.k.clone(), view.plan.v.clone()
    rank = some.cumsum(0) - 1
    for start, end, _ in view.plan.runs:
        front = at[start:end][chosen[start:end]]
        rest = at[start:end][~chosen[start:end]]
        if not len(front) or not len(rest):
            continue
        old_k = view.reader.rotated(k[:, front], -front)
        new_k = view.reader.rotated(new.k[:, rank[front]], -front)
        change = (new_k - old_k).float().mean(1, keepdim=True)
        k[:, rest] += view.reader.rotated(change.expand(-1, len(rest), -1, -1), rest).to(k.dtype)
        change = (new.v[:, rank[front]] - v[:, front]).float().mean(1, keepdim=True)
        v[:, rest] += change.to(v.dtype)
    return Choice(chosen, 0.0, (k, v))


def layers(view: View, some: slice) -> Choice:
    """Nothing is computed, but what is moved has its true KV in some layers."""
    k, v, moved = view.plan.k.clone(), view.plan.v.clone(), view.plan.is_moved
    for mixed, true in ((k, view.truth.k), (v, view.truth.v)):
        mixed[some, moved] = true[some, moved]
    return Choice(torch.zeros_like(moved), 0.0, (k, v))


def lower(view: View, _share: float) -> Choice:
    """True KV in the lower half of the layers."""
    return layers(view, slice(view.reader.num_layers // 2))


def upper(view: View, _share: float) -> Choice:
    """True KV in the upper half of the layers."""
    return layers(view, slice(view.reader.num_layers // 2, None))


def one_base(view: View, _share: float) -> Choice:
    """Moved K rotated in all layers by the base of full attention."""
    moved, k = view.plan.is_moved, view.plan.k.clone()
    by = torch.zeros(len(moved), dtype=torch.long)
    for start, end, old in view.plan.runs:
        by[start:end] = start - old
    as_cached = view.reader.rotated(k[:, moved], -by[moved])
    rows = view.reader.rotated(as_cached, by[moved], base_of=view.reader.probed)
    k[:, moved] = rows.to(k.dtype)
    return Choice(torch.zeros_like(moved), 0.0, (k, view.plan.v))


def rebuilt(view: View, _share: float) -> Choice:
    """Windows are not carried: those that are needed are computed again, and no more.

    As `ReusePlan.rebuild`: of the W - 1 tokens before each gap and before the prompt's end, those
    that are neither computed nor in place.

    Raises:
        ValueError: No layer of the model has a window.
    """
    if view.reader.window is None:
        msg = "no layer has a window: none is rebuilt"
        raise ValueError(msg)
    computed, num = view.plan.is_computed, len(view.plan.source)
    before = torch.cat([torch.zeros(1, dtype=torch.bool), computed[:-1]])
    near = torch.zeros_like(computed)
    for at in [*(computed & ~before).nonzero()[:, 0].tolist(), num]:
        near[max(0, at + 1 - view.reader.window) : at] = True
    return Choice(torch.zeros_like(computed), rebuilt=near & view.plan.is_moved)


def _probing(view: View) -> float:
    """What attending from one layer's kept inputs costs, in tokens."""
    return ours.PROBE_COST * view.num_moved / view.reader.num_layers


def _first(number: int) -> Chooser:
    return lambda view, _share: Choice(first(view, number))


def _nothing(view: View, _share: float) -> Choice:
    return Choice(torch.zeros_like(view.plan.is_moved))


@dataclass(frozen=True, slots=True)
class Policy:
    """One row of the tables.

    Attributes:
        name: The name.
        chooses: What is computed in addition to the gaps.
        share: Of the moved tokens.
        reuse: ``exact``, ``moved``, or a control: ``unrotated`` or ``foreign``.
        source: Whose method it is.
        max_hops: Of the plans of edits in a row; those of single edits need one.
    """

    name: str
    chooses: Chooser = _nothing
    share: float = 0.0
    reuse: str = "moved"
    source: str = "kvtrie"
    max_hops: int = MANY_HOPS


def shares(name: str, chooses: Chooser, source: str, *per_cent: int) -> list[Policy]:
    """A way to choose, at shares of the moved tokens."""
    return [Policy(f"{name}{one}", chooses, one / 100, "moved", source) for one in per_cent]


POLICIES: Final = {
    one.name: one
    for one in (
        Policy("exact", reuse="exact", source="prefix caching"),
        Policy("rotated"),
        Policy("unrotated", reuse="unrotated", source="control"),
        Policy("foreign", reuse="foreign", source="control"),
        *(Policy(f"first{n}", _first(n), source="EPIC, LegoLink") for n in (4, 16, 32)),
        *shares("random", random, "at equal cost", 20),
        *shares("blend", blend, "CacheBlend", 20),
        *shares("sink", sink, "attention sink", 20),
        *shares("query", query, "query attention", 20),
        *shares("lost", lost, "recorded lost attention", 20),
        *shares("corrected", corrected, "K and V corrected", 20),
        *shares("fronts", ours.fronts, "kvtrie", 20, 30),
        *shares("ngrams", ours.ngrams, "kvtrie", 20),
        *shares("probe", ours.probe, "kvtrie", 15, 20, 28),
        *shares("adaptive", ours.adaptive, "kvtrie", 14, 20, 26, 38),
        Policy("probe20fp8", ours.probe_fp8, 0.2),
        *shares("question", ours.question, "kvtrie", 20, 30),
        *shares("oracle", oracle, "bound", 20, 30),
        Policy("lower", lower, source="true KV below the middle layer"),
        Policy("upper", upper, source="true KV from the middle layer on"),
    )
}
"""All policies by name; ``exact`` first, as it is the floor."""

ONE_HOP: Final = Policy("rotated, one hop", max_hops=1)
"""`ReusePolicy`'s default: of edits in a row, what was moved once is computed the next time."""

WINDOWS: Final = {
    one.name: one
    for one in (
        Policy("rebuilt", rebuilt),
        Policy("one base", one_base, source="control"),
    )
}
"""Of models whose layers differ in their window and in their base; see `real.gemma3`."""

CONTROLS: Final = ("unrotated", "foreign")
