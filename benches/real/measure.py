"""One case under many policies, compared with full recomputation: a row for each."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from kvtrie import EXACT_ONLY
from real import policies
from real.conversations import FROM_OTHERS
from real.plans import REUSE, REUSE_OTHERS, SESSION, Assembled, Shelf
from real.reader import Kept
from real.views import View

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtrie import ReusePolicy
    from real.cases import Tokens
    from real.policies import Policy
    from real.reader import Reader

VERSION: Final = 2
"""Raised when what a row says changes."""

REPLY_TOKENS: Final = 20
"""Of the model's own greedy reply, which is the reference."""


def plan_digest(reader: Reader, case: Tokens) -> str:
    """Names what kvtrie plans for a case, without any KV."""
    shelf = Shelf(reader, room(case), records=False)
    for one, session in zip(case.contexts, sessions(case), strict=True):
        shelf.name(one, session)
    total = hashlib.sha256()
    for policy in (EXACT_ONLY, approximate(case)):
        with shelf.plan(case.prompt, policy, case.moved_end) as plan:
            for field in ("start", "end", "old_start", "class"):
                total.update(plan.segments[field].astype("<i8").tobytes())
    return total.hexdigest()[:16]


def approximate(case: Tokens) -> ReusePolicy:
    """What moved runs a case needs: those of other conversations only where its text is theirs."""
    return REUSE_OTHERS if case.kind in FROM_OTHERS else REUSE


def sessions(case: Tokens) -> list[str]:
    """The conversation that each context belongs to."""
    is_other = case.kind in FROM_OTHERS
    return [f"other {at}" if is_other else SESSION for at in range(len(case.contexts))]


def room(case: Tokens) -> int:
    """Tokens that a shelf needs for a case."""
    return sum(len(one) for one in case.contexts) + 2 * len(case.prompt) + 256


@dataclass(frozen=True, slots=True)
class Reference:
    """A case under full recomputation.

    Attributes:
        kept: The prompt's KV.
        reply: The model's greedy reply.
        logits: Rows that predict the reply, then those that predict the quotes.
        seconds: Processor time of the prompt's pass.
    """

    kept: Kept
    reply: tuple[int, ...]
    logits: torch.Tensor
    seconds: float


def reference(reader: Reader, case: Tokens) -> Reference:
    began = time.process_time()
    kept, last = reader.full(case.prompt)
    seconds = time.process_time() - began
    reply = tuple(reader.greedy(kept, last[-1], REPLY_TOKENS))
    end = len(case.prompt) - 1
    chosen = torch.zeros(len(case.prompt), dtype=torch.bool)
    chosen[end] = True
    logits = replies(reader, case, reply, kept.k, kept.v, chosen)
    return Reference(kept, reply, logits, seconds)


class Bench:
    """A case whose contexts are cached, ready for any policy."""

    def __init__(
        self,
        reader: Reader,
        case: Tokens,
        foreign: tuple[Sequence[int], Kept],
        truth: Reference | None = None,
    ) -> None:
        self._reader = reader
        self._case = case
        self._shelf = Shelf(reader, room(case) + len(foreign[0]))
        keys = []
        for ids, session in zip(case.contexts, sessions(case), strict=True):
            kept, _ = reader.full(ids)
            keys.append(kept.k[reader.probed].clone())
            self._shelf.add(ids, kept, session=session)
            self._shelf.receive(ids, received(reader, kept))
        self._keys = tuple(keys)
        self._foreign = self._shelf.park(*foreign)
        self.reference = reference(reader, case) if truth is None else truth
        self._view: View | None = None

    def row(self, policy: Policy) -> dict[str, Any]:
        """What the policy costs, and how far the replies are from full recomputation's."""
        case, reader = self._case, self._reader
        began = time.process_time()
        choice = None
        if policy.reuse == "moved":
            view = self.view()
            began = time.process_time()
            choice = policy.chooses(view, policy.share)
            plan, chosen, extra = view.plan, view.plan.is_computed | choice.chosen, choice.extra
            k, v = choice.kv or (plan.k, plan.v)
        else:
            plan = self._plan(policy.reuse)
            chosen, extra, k, v = plan.is_computed, 0.0, plan.k, plan.v
        rebuilt = None if choice is None else choice.rebuilt
        windows = None if rebuilt is None else (rebuilt, plan.is_moved)
        logits = replies(reader, case, self.reference.reply, k, v, chosen, windows)
        num_rebuilt = 0 if rebuilt is None else int(rebuilt.sum())
        seconds = time.process_time() - began
        return {
            "tokens": len(case.prompt),
            "exact": int((plan.source == 0).sum()),
            "moved": int(plan.is_moved.sum()),
            "runs": len(plan.runs),
            "computed": int(chosen.sum()) + num_rebuilt,
            "extra": round(extra, 2),
            "seconds": round(seconds, 3),
            "seconds_full": round(self.reference.seconds, 3),
            **compared(case, self.reference, logits),
        }

    def view(self) -> View:
        """The rotated plan, with its gaps computed once for all policies that look at them."""
        if self._view is None:
            plan = self._plan("moved")
            gaps = filled(self._reader, plan, plan.is_computed)
            self._view = View(
                reader=self._reader,
                plan=plan,
                gaps=gaps,
                truth=self.reference.kept,
                received=self._shelf.received[plan.slots],
                moved_end=self._case.moved_end,
                seed=int(self._case.digest, 16) % 2**31,
                contexts=self._case.contexts,
                keys=self._keys,
            )
        return self._view

    def _plan(self, reuse: str) -> Assembled:
        return self._shelf.assemble(
            self._case.prompt,
            EXACT_ONLY if reuse == "exact" else approximate(self._case),
            moved_end=self._case.moved_end,
            rotates=reuse != "unrotated",
            foreign=self._foreign if reuse == "foreign" else None,
        )


def filled(reader: Reader, plan: Assembled, chosen: torch.Tensor) -> Kept:
    """KV and records of the prompt after some of its tokens were computed over the rest."""
    at = torch.arange(len(plan.ids))
    given = (plan.k[:, ~chosen], plan.v[:, ~chosen], at[~chosen])
    new, _ = reader.mixed(plan.ids[chosen], at[chosen], given)
    found = Kept(plan.k.clone(), plan.v.clone(), plan.inputs.clone(), plan.outputs.clone())
    found.k[:, chosen], found.v[:, chosen] = new.k, new.v
    found.inputs[chosen], found.outputs[chosen] = new.inputs, new.outputs
    return found


def received(reader: Reader, kept: Kept, chunk: int = 512) -> torch.Tensor:
    """The mean attention that each token draws from those after it, at the probed layer."""
    num = kept.k.shape[1]
    at = torch.arange(num)
    total = torch.zeros(num)
    for start in range(0, num, chunk):
        part = slice(start, start + chunk)
        q = reader.queries(kept.inputs[part], at[part])
        total += reader.attention(q, at[part], kept.k[reader.probed], at).mean(0).sum(0).cpu()
    return total / (num - at)


def replies(
    reader: Reader,
    case: Tokens,
    reply: Sequence[int],
    k: torch.Tensor,
    v: torch.Tensor,
    chosen: torch.Tensor,
    windows: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute the chosen tokens and both replies; the rows that predict the replies' tokens.

    ``windows``: of the prompt's tokens which are computed for layers with a window alone, and of
    which no such layer has given KV. Without, all given KV is that of all layers.
    """
    at = torch.arange(len(case.prompt))
    ids = torch.tensor(case.prompt)
    end = len(case.prompt)
    rebuilt, hidden = windows or (torch.zeros_like(chosen), torch.zeros_like(chosen))
    run = chosen | rebuilt
    parts = [torch.tensor(part[:-1], dtype=torch.long) for part in (reply, case.quotes)]
    positions = [at[run], *(torch.arange(end, end + len(part)) for part in parts)]
    branches = [torch.full_like(one, number) for number, one in enumerate(positions)]
    own = torch.cat([(rebuilt & ~chosen)[run], *(torch.zeros_like(one).bool() for one in parts)])
    _, logits = reader.mixed(
        torch.cat([ids[run], *parts]),
        torch.cat(positions),
        (k[:, ~chosen], v[:, ~chosen], at[~chosen]),
        branches=torch.cat(branches),
        rebuilt=None if windows is None else own,
        hidden=None if windows is None else hidden[~chosen],
        num_logits=1 + sum(len(part) for part in parts),
    )
    cut = 1 + len(parts[0])
    return torch.cat([logits[:cut], logits[:1], logits[cut:]])


def compared(case: Tokens, truth: Reference, logits: torch.Tensor) -> dict[str, Any]:
    """The figures of one policy in one case."""
    reference, own = (one.float().log_softmax(-1) for one in (truth.logits, logits))
    kl = (reference.exp() * (reference - own)).sum(-1).clamp_min(0).cpu()
    best, own_best = (one.argmax(-1).cpu() for one in (reference, own))
    cut = len(truth.reply)
    gold = torch.tensor([*truth.reply, *case.quotes])
    at = gold[:, None].to(reference.device)
    nll, own_nll = (-one.gather(1, at)[:, 0].cpu() for one in (reference, own))
    facts = []
    for fact in case.facts:
        some = slice(cut + fact.start, cut + fact.end)
        facts.append(
            {
                "nll": [round(float(one[some].sum()), 5) for one in (nll, own_nll)],
                "right": [bool((one[some] == gold[some]).all()) for one in (best, own_best)],
            }
        )
    return {
        "kl_reply": [round(float(one), 6) for one in kl[:cut]],
        "kl_quotes": [round(float(one), 6) for one in kl[cut:]],
        "top1": [int((best == own_best)[part].sum()) for part in (slice(cut), slice(cut, None))],
        "greedy": bool((own_best[:cut] == gold[:cut]).all()),
        "facts": facts,
    }


def key(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


def rows(
    reader: Reader,
    case: Tokens,
    wanted: dict[str, Policy],
    foreign: tuple[Sequence[int], Kept],
    truth: Reference | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A row for each policy, by the key that the caller gave it.

    Contexts, full recomputation (unless the caller has it) and the pass over the gaps are computed
    once for all of them.
    """
    bench = Bench(reader, case, foreign, truth)
    for name, policy in wanted.items():
        yield name, bench.row(policy)


def versions() -> str:
    return f"{VERSION}.{policies.VERSION}"
