"""Every policy on the recall task of a shipped model, by scenario: the rows of `fidelity.json`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvtrie import gates
from kvtrie.calibrate import policies, recall, shipped
from kvtrie.calibrate._engine import Model, Workspace, divergence, tokens_needed
from kvtrie.calibrate._steps import SCENARIOS, Renderer, Scenario, Step, built_in
from kvtrie.models.fingerprint import model_id

if TYPE_CHECKING:
    from kvtrie.calibrate.policies import Policy

NAMES: Final = (
    *("full", "exact", "drop", "unrotated", "rotated", "rotated+first1", "rotated+first4"),
    *("rotated+first16", "rotated+last4", "rotated+run8"),
)
MIN_RUN: Final = 16
BLOCK_SIZE: Final = 1
P99: Final = 0.99

Row = dict[str, Any]


@dataclass(slots=True)
class _Sums:
    divergences: list[torch.Tensor] = field(default_factory=list)
    agreeing: int = 0
    pairs: list[tuple[bool, bool]] = field(default_factory=list)
    exact: int = 0
    moved: int = 0
    computed: int = 0

    def add(self, step: Step, full: torch.Tensor, rows: torch.Tensor) -> None:
        self.divergences.append(divergence(full, rows))
        best_full, best = full.argmax(-1), rows.argmax(-1)
        self.agreeing += int((best_full == best).sum())
        if step.is_scored:
            wanted, tail = torch.tensor(step.reply), slice(step.answer_start, None)
            self.pairs.append(
                (
                    bool((best_full[tail] == wanted[tail]).all()),
                    bool((best[tail] == wanted[tail]).all()),
                )
            )


def document(kind: str, questions: int, seed: int) -> Row:
    """The rows of one shipped model, with what they were measured on."""
    torch.set_num_threads(1)
    path = shipped.model_path(kind)
    model = Model(AutoModelForCausalLM.from_pretrained(path).eval(), BLOCK_SIZE)
    renderer = Renderer(AutoTokenizer.from_pretrained(path))
    chosen = [policies.policy(name, MIN_RUN) for name in NAMES]
    results, conversations = [], {}
    for scenario in SCENARIOS:
        first = recall.HELD_OUT + seed * 1_000_000
        found = [renderer.steps(one, scenario) for one in built_in(questions, scenario, first)]
        conversations[scenario.name] = len(found)
        results += _results(model, found, chosen, scenario)
    return {
        "kvtrie": version("kvtrie"),
        "model": model_id(model.model),
        "kv_dtype": model.layout.kv_dtype,
        "data": "the recall task",
        "block_size": BLOCK_SIZE,
        "min_run": MIN_RUN,
        "conversations": conversations,
        "results": results,
    }


def _results(
    model: Model, found: list[list[Step]], chosen: list[Policy], scenario: Scenario
) -> list[Row]:
    sums = {policy.name: _Sums() for policy in chosen}
    for steps in found:
        full = [
            model.whole(step.prompt, step.reply) if step.is_measured else None for step in steps
        ]
        pool = model.pool(tokens_needed(steps, BLOCK_SIZE))
        for policy in chosen:
            _replay(model, steps, full, policy, sums[policy.name], Workspace(model, pool, 8))
    rows = [_row(policy, scenario, sums[policy.name]) for policy in chosen]
    computed = {row["policy"]: row["computed"] for row in rows}
    most = computed["exact"] - computed["rotated"]
    for row in rows:
        saved = computed["exact"] - row["computed"]
        row["share_of_savings"] = saved / most if most > 0 else None
    return rows


def _replay(
    model: Model,
    steps: list[Step],
    full: list[torch.Tensor | None],
    policy: Policy,
    sums: _Sums,
    space: Workspace,
) -> None:
    way = policies.policy("rotated", MIN_RUN) if policy.mode == "drop" else policy
    for step, reference in zip(steps, full, strict=True):
        if reference is not None:
            if policy.mode == "full":
                sums.add(step, reference, reference)
                sums.computed += len(step.prompt)
            elif policy.mode == "drop":
                _, left = space.looked_at(step, way)
                sums.add(step, reference, model.whole(left, step.reply))
                sums.computed += len(left)
            else:
                trial = space.try_(step, step.reply, policy)
                sums.add(step, reference, trial.rows)
                sums.exact += trial.usage.exact
                sums.moved += trial.usage.moved
                sums.computed += trial.usage.computed
        if policy.mode != "full":
            space.keep(step, way)


def _row(policy: Policy, scenario: Scenario, sums: _Sums) -> Row:
    values = torch.cat(sums.divergences).sort().values
    count = {(a, b): sums.pairs.count((a, b)) for a in (True, False) for b in (True, False)}
    lost, gained, questions = count[True, False], count[False, True], len(sums.pairs)
    right_full = count[True, True] + lost
    low, high = gates.paired_interval(lost, gained, questions)
    total = sums.exact + sums.moved + sums.computed
    return {
        "policy": policy.name,
        "approximate": policy.reuse.approximate,
        "scenario": scenario.name,
        "positions": len(values),
        "kl_mean": float(values.mean()),
        "kl_p99": float(values[max(0, math.ceil(P99 * len(values)) - 1)]),
        "top1": sums.agreeing / len(values),
        "questions": questions,
        "right_full": right_full,
        "lost": lost,
        "gained": gained,
        "exact": sums.exact,
        "moved": sums.moved,
        "computed": sums.computed,
        "right": right_full - lost + gained,
        "loss": (lost - gained) / questions if questions else 0.0,
        "loss_low": low,
        "loss_high": high,
        "saved": (sums.exact + sums.moved) / total,
    }
