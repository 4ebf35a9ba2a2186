"""Which tokens of moved runs are computed again: the policies that are compared.

All are compared on the same plans. A policy is a function of a `View` that returns a `Choice`. Its
cost is the tokens chosen, and what choosing costs, in tokens that go through all layers. ``NAME20``
chooses 20 % of the moved tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from real.plans import Assembled
    from real.reader import Kept, Reader

VERSION: Final = 1
"""Raised when what a policy chooses changes: rows of other versions are measured again."""

# A deviation of K and V at this layer shows what all layers before it changed: CacheBlend's choice.
BLEND_LAYER: Final = 1
PROBE_COST: Final = 0.3
"""Of one layer, per token that is probed: its query, its attention and its output."""


@dataclass(frozen=True, slots=True)
class View:
    """What a policy may look at.

    Attributes:
        reader: The model.
        plan: The prompt's KV, with moved runs rotated.
        gaps: KV of all tokens after the gaps were computed over ``plan``, and nothing else.
        truth: KV of the prompt under full recomputation: only what knows it may choose by it.
        received: For each token, the share of attention it drew in the context it comes from.
        moved_end: Where the last message starts.
        seed: Of random choices.
        contexts: The cached sequences.
    """

    reader: Reader
    plan: Assembled
    gaps: Kept
    truth: Kept
    received: torch.Tensor
    moved_end: int
    seed: int
    contexts: tuple[tuple[int, ...], ...] = ()

    @property
    def num_moved(self) -> int:
        return int(self.plan.is_moved.sum())

    def budget(self, share: float) -> int:
        return round(share * self.num_moved)


@dataclass(frozen=True, slots=True)
class Choice:
    """Tokens to compute in addition to the gaps, and what it cost to find them, in tokens."""

    chosen: torch.Tensor
    extra: float = 0.0


Chooser = Callable[[View, float], Choice]


def top(scores: torch.Tensor, allowed: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` allowed tokens with the highest scores."""
    chosen = torch.zeros_like(allowed)
    count = min(count, int(allowed.sum()))
    chosen[scores.float().masked_fill(~allowed, float("-inf")).topk(count).indices] = True
    return chosen


def first(view: View, number: int) -> torch.Tensor:
    """The first ``number`` tokens of each moved run."""
    chosen = torch.zeros_like(view.plan.is_moved)
    for start, end, _ in view.plan.runs:
        chosen[start : min(end, start + number)] = True
    return chosen


def fronts(view: View, share: float) -> Choice:
    """One N for all runs, the largest that stays within the share."""
    lengths = [end - start for start, end, _ in view.plan.runs]
    budget = view.budget(share)
    number = 0
    while number < max(lengths, default=0) and (
        sum(min(number + 1, length) for length in lengths) <= budget
    ):
        number += 1
    return Choice(first(view, number))


def random(view: View, share: float) -> Choice:
    generator = torch.Generator().manual_seed(view.seed)
    scores = torch.rand(len(view.plan.source), generator=generator)
    return Choice(top(scores, view.plan.is_moved, view.budget(share)))


def deviation(view: View, layers: slice) -> torch.Tensor:
    """How far K and V are from full recomputation, relative, summed over layers."""
    found = torch.zeros(len(view.plan.source))
    for own, true in ((view.plan.k, view.truth.k), (view.plan.v, view.truth.v)):
        for a, b in zip(own[layers], true[layers], strict=True):
            square = b.float().square().sum((-2, -1)).mean()
            found += (a.float() - b.float()).square().sum((-2, -1)) / square
    return found


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
    """The attention of the last message's tokens, at the middle layer, over the mixed KV."""
    reader, middle = view.reader, view.reader.middle
    at = torch.arange(len(view.plan.source))
    tail = slice(view.moved_end, None)
    q = reader.queries(view.gaps.inputs[tail], at[tail])
    return reader.attention(q, at[tail], view.gaps.k[middle], at).mean((0, 1))


def to_middle(view: View) -> float:
    """What it costs to know the middle layer's keys of the gaps, in tokens: half of their pass."""
    return int(view.plan.is_computed.sum()) * view.reader.middle / view.reader.num_layers


def question(view: View, share: float) -> Choice:
    """Query attention: those that the last message attends to most."""
    scores = asked(view)
    return Choice(top(scores, view.plan.is_moved, view.budget(share)), to_middle(view))


def probed(view: View) -> torch.Tensor:
    """How much the middle layer's attention output changes in the new context, relative."""
    reader, plan, middle = view.reader, view.plan, view.reader.middle
    at = torch.arange(len(plan.source))
    moved = at[plan.is_moved]
    inputs, before = plan.inputs[moved], plan.outputs[moved]
    after = reader.attended(inputs, moved, view.gaps.k[middle], view.gaps.v[middle], at)
    size = (inputs + before).float().norm(dim=-1)
    scores = torch.zeros(len(plan.source))
    scores[moved] = (after - before).float().norm(dim=-1) / size
    return scores


def _half(view: View, share: float, chosen: torch.Tensor, cost: float) -> Choice:
    """What is chosen, and by the probe up to the share."""
    rest = view.budget(share) - int(chosen.sum())
    scores = probed(view)
    cost += PROBE_COST * view.num_moved / view.reader.num_layers
    return Choice(chosen | top(scores, view.plan.is_moved & ~chosen, rest), cost)


def probe(view: View, share: float) -> Choice:
    """Half of the budget on fronts, half by the probe."""
    return _half(view, share, fronts(view, share / 2).chosen, to_middle(view))


def question_probe(view: View, share: float) -> Choice:
    """Half of the budget by the last message's attention, half by the probe."""
    return _half(view, share, question(view, share / 2).chosen, to_middle(view))


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
    """

    name: str
    chooses: Chooser = _nothing
    share: float = 0.0
    reuse: str = "moved"
    source: str = "kvtrie"


def _shares(name: str, chooses: Chooser, source: str, *per_cent: int) -> list[Policy]:
    return [Policy(f"{name}{one}", chooses, one / 100, "moved", source) for one in per_cent]


OURS: Final = "kvtrie.repair" if find_spec("kvtrie.repair") else ""
"""Where kvtrie's own choosers come from; empty: from this file."""


def _own(name: str, chooses: Chooser) -> Chooser:
    """The package's chooser of this name, where it has one."""
    if not OURS:
        return chooses

    def package(view: View, share: float) -> Choice:
        from real import ours  # noqa: PLC0415 - it imports this module

        found: Choice = getattr(ours, name)(view, share)
        return found

    return package


def _no_ngrams(_view: View, _share: float) -> Choice:
    msg = "the n-gram rule is in kvtrie.repair"
    raise NotImplementedError(msg)


POLICIES: Final = {
    one.name: one
    for one in (
        Policy("exact", reuse="exact", source="prefix caching"),
        Policy("rotated"),
        Policy("unrotated", reuse="unrotated", source="control"),
        Policy("foreign", reuse="foreign", source="control"),
        *(Policy(f"first{n}", _first(n), source="EPIC, LegoLink") for n in (4, 16, 32)),
        *_shares("random", random, "at equal cost", 20),
        *_shares("blend", blend, "CacheBlend", 20),
        *_shares("sink", sink, "attention sink", 20),
        *_shares("question", question, "query attention", 20),
        *_shares("fronts", _own("fronts", fronts), "kvtrie", 20, 30),
        *(_shares("ngrams", _own("ngrams", _no_ngrams), "kvtrie", 20) if OURS else ()),
        *_shares("probe", _own("probe", probe), "kvtrie", 20, 30),
        *_shares("question+probe", question_probe, "kvtrie", 20, 28),
        *_shares("oracle", oracle, "bound", 20, 30),
    )
}
"""All policies by name; ``exact`` first, as it is the floor."""

OWN: Final = ("fronts", "ngrams", "probe")
"""Names of choosers that the package has."""

CONTROLS: Final = ("unrotated", "foreign")
