"""Edits in a row, each over the KV that the one before left: do errors add up?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from kvtrie import COMPUTED, EXACT_ONLY, Imported, ReusePolicy
from real import measure
from real.plans import BLOCK, Shelf
from real.reader import Kept
from real.views import View

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from real.cases import Tokens
    from real.measure import Reference
    from real.policies import Policy
    from real.reader import Reader

POLICIES: Final = ("rotated", "fronts20", "probe28", "exact")
"""Also measured on each edit alone."""


def rows(
    reader: Reader, steps: Sequence[Tokens], truths: Sequence[Reference], policy: Policy
) -> Iterator[dict[str, Any]]:
    """A row for each step, as `measure.compared` has them, next to full recomputation's."""
    num_tokens = sum(len(one.prompt) + len(one.contexts[0]) for one in steps) + 4096
    shelf = Shelf(reader, num_tokens)
    before, _ = reader.full(steps[0].contexts[0])
    shelf.add(steps[0].contexts[0], before)
    reuse = EXACT_ONLY if policy.reuse == "exact" else ReusePolicy(max_hops=policy.max_hops)
    for at, (case, truth) in enumerate(zip(steps, truths, strict=True)):
        plan = shelf.assemble(case.prompt, reuse, moved_end=case.moved_end)
        gaps = measure.filled(reader, plan, plan.is_computed)
        view = View(
            reader=reader,
            plan=plan,
            gaps=gaps,
            truth=truth.kept,
            received=torch.zeros(len(case.prompt)),
            moved_end=case.moved_end,
            seed=at,
            contexts=case.contexts,
        )
        choice = policy.chooses(view, policy.share)
        chosen = plan.is_computed | choice.chosen
        logits = measure.replies(reader, case, truth.reply, plan.k, plan.v, chosen)
        yield {
            "tokens": len(case.prompt),
            "exact": int((plan.source == 0).sum()),
            "moved": int(plan.is_moved.sum()),
            "runs": len(plan.runs),
            "computed": int(chosen.sum()),
            "extra": round(choice.extra, 2),
            **measure.compared(case, truth, logits),
        }
        if at + 1 < len(steps):
            kept = measure.filled(reader, plan, chosen)
            context = steps[at + 1].contexts[0]
            _leave(reader, shelf, case, context, kept, reuse)


def _leave(
    reader: Reader,
    shelf: Shelf,
    case: Tokens,
    context: Sequence[int],
    kept: Kept,
    reuse: ReusePolicy,
) -> None:
    """Cache the prompt with its reply, computed over the KV that the policy made."""
    num = next(
        (at for at, (a, b) in enumerate(zip(case.prompt, context, strict=False)) if a != b),
        min(len(case.prompt), len(context)),
    )
    new, _ = reader.mixed(
        torch.tensor(context[num:]),
        torch.arange(num, len(context)),
        (kept.k[:, :num], kept.v[:, :num], torch.arange(num)),
    )
    whole = Kept(
        torch.cat([kept.k[:, :num], new.k], 1),
        torch.cat([kept.v[:, :num], new.v], 1),
        torch.cat([kept.inputs[:num], new.inputs]),
        torch.cat([kept.outputs[:num], new.outputs]),
    )
    # All but the first block may be approximate: the index labels it so.
    source = Imported(exact_until=BLOCK, policy=reuse) if reuse.approximate else COMPUTED
    shelf.add(context, whole, source)
