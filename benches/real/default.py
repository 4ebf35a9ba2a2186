"""What the default policy of a gate file keeps of the suite's replies; see `real`.

    python -m real.default GATE.json     # after `python -m real`, from the same rows

Nothing is measured. For each case with rows, the gate's ladder says by the plan which policy a
request without one would get, and the row of that policy counts. A row for each kind of edit: which
policies its cases got, how much of the prompt was moved, with the id of the conversation and in a
request that names none, what was computed, and what was lost. Exit code 1: a kind is at a loss that
the interval distinguishes from 0; 3: a policy of the ladder has no row of a case.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

from kvtrie import gates
from real import conversations, measure, recorded, summary, texts
from real.plans import SESSION, Shelf
from real.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from real.cases import Tokens
    from real.reader import Reader

ROOT: Final = Path(__file__).resolve().parents[2]
MODEL: Final = ROOT / "target" / "models" / "smollm2-135m-instruct"
ROWS: Final = ROOT / "target" / "fidelity" / "rows.jsonl"

Case = tuple[str, str, int]


def named(gate: gates.Gate) -> dict[Any, str]:
    """The suite's names of the gate's policies: ``fronts20`` for ``rotated+fronts20``."""
    return {one.policy: one.name.removeprefix("rotated+") for one in gate.measured}


@dataclass(frozen=True, slots=True)
class Taken:
    """What the default does with a case.

    Attributes:
        name: The policy.
        moved: Share of the prompt that it moves or has in place approximately.
    """

    name: str
    moved: float


def filled(reader: Reader, case: Tokens) -> Shelf:
    """The contexts of a case, cached without KV."""
    shelf = Shelf(reader, measure.room(case), records=False)
    for one, session in zip(case.contexts, measure.sessions(case), strict=True):
        shelf.name(one, session)
    return shelf


def taken(
    shelf: Shelf,
    case: Tokens,
    ladder: gates.Decision,
    names: Mapping[Any, str],
    session: str | None = SESSION,
) -> Taken:
    """What the default does with a request of a conversation, or with one that names none."""
    decision = ladder
    while decision.policy.approximate:
        with shelf.plan(case.prompt, decision.policy, case.moved_end, session) as plan:
            judged = decision.of(plan)
            share = plan.num_approximate / len(case.prompt)
        if judged is decision:
            return Taken(names[decision.policy] if share else "exact", share)
        decision = judged
    return Taken("exact", 0.0)


def shown(kind: str, got: Sequence[tuple[Taken, Taken]], found: summary.Figures) -> str:
    """One row of the table: of each case what it got, with its conversation's id and without."""
    by = Counter(own.name for own, _ in got)
    policies = ", ".join(f"`{name}` {count}" for name, count in sorted(by.items()))
    moved = [f"{statistics.mean(one.moved for one in some):.1%}" for some in zip(*got, strict=True)]
    cells = [cell(found) for _, cell in summary.COLUMNS]
    return f"| {kind} | {policies} | {' | '.join((*moved, *cells))} |"


def is_at_a_loss(found: summary.Figures) -> bool:
    """Whether the interval of points lost is above 0."""
    return bool(found["loss_low"] > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("gate", type=Path)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--set", choices=list(conversations.SETS), default="reporting")
    parser.add_argument("--size", choices=list(conversations.SIZES), default="1k")
    parser.add_argument("--probe", action="store_true", help="the engine keeps records")
    options = parser.parse_args()
    from transformers import AutoConfig, AutoTokenizer  # noqa: PLC0415 - slow

    from real.cases import Renderer  # noqa: PLC0415 - for order

    gate = gates.read(options.gate)
    repairs = ("fronts", "ngrams", *(("probe", "question") if options.probe else ()))
    ladder = gate.ladder(repairs=repairs, model=gate.model)
    print(f"{gate.model}: {ladder.reason}\n")
    by_case: dict[Case, dict[str, Any]] = {}
    for row in Rows(options.rows).by_key.values():
        wanted = (row["set"], row["size"]) == (options.set, options.size)
        wanted &= row["dtype"] == gate.kv_dtype and "device" not in row
        if wanted and row["kind"] in conversations.KINDS:
            case: Case = (row["kind"], row["size"], row["seed"])
            by_case.setdefault(case, {})[row["policy"]] = row
    import torch  # noqa: PLC0415 - slow

    model = SimpleNamespace(
        config=AutoConfig.from_pretrained(MODEL), dtype=getattr(torch, gate.kv_dtype)
    )
    reader = cast("Reader", SimpleNamespace(model=model))
    renderer = Renderer(AutoTokenizer.from_pretrained(MODEL, local_files_only=True))
    passages = recorded.load(texts.fetch())
    rows: dict[str, list[Any]] = {}
    got: dict[str, list[tuple[Taken, Taken]]] = {}
    for (kind, size, seed), its in sorted(by_case.items()):
        writer = conversations.Writer(passages, options.set, seed, conversations.SIZES[size])
        tokens = renderer.tokens(conversations.KINDS[kind](writer))
        shelf = filled(reader, tokens)
        own, nameless = (
            taken(shelf, tokens, ladder, named(gate), session) for session in (SESSION, None)
        )
        if own.name not in its:
            print(f"real.default: {kind}, seed {seed}: no row of {own.name}", file=sys.stderr)
            return 3
        rows.setdefault(kind, []).append(its[own.name])
        got.setdefault(kind, []).append((own, nameless))
    columns = ("moved", "moved without an id", *(name for name, _ in summary.COLUMNS))
    print(f"| kind | taken | {' | '.join(columns)} |\n|---|---|{'--:|' * len(columns)}")
    found = {kind: summary.figures(some) for kind, some in rows.items()}
    for kind, one in found.items():
        print(shown(kind, got[kind], one))
    refused = [kind for kind, some in got.items() if {own.name for own, _ in some} == {"exact"}]
    reused = [kind for kind in rows if kind not in refused]
    if reused:
        together = summary.figures([row for kind in reused for row in rows[kind]])
        print(shown("all but exact", [one for kind in reused for one in got[kind]], together))
    losing = [kind for kind, one in found.items() if is_at_a_loss(one)]
    print(
        f"\nexact alone: {', '.join(refused) or 'none'}; at a loss: {', '.join(losing) or 'none'}"
    )
    return 1 if losing else 0


if __name__ == "__main__":
    sys.exit(main())
