"""`drawn`, which is no chooser of kvtrie, next to the probe, in float32; see `real`.

    python -m real.research                  # from the repository, with PYTHONPATH=benches:.
    python -m real.research --set tuning     # what its variant was chosen from
    python -m real.research --summary        # no measuring: the tables again, from the rows

Hard kinds at 1k tokens. Its rows, its figures and its part of docs/fidelity.md are apart from those
of `python -m real`, which are of bfloat16. It resumes as that does; a set without rows keeps its
figures.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from real import conversations, ours, policies, summary, texts
from real.__main__ import MODEL, Suite
from real.policies import shares
from real.rows import Row, Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from real.summary import Figures

ROOT: Final = Path(__file__).resolve().parents[2]
ROWS: Final = ROOT / "target" / "fidelity" / "research.jsonl"
FIGURES: Final = ROOT / "benches" / "real" / "research.json"
BEGIN: Final = "<!-- Written by `python -m real.research` from benches/real/research.json. -->"
END: Final = "<!-- End of the research policy's figures. -->"

SIZE: Final = "1k"
DTYPE: Final = "float32"

_ROOTED: Final = partial(ours.drawn, power=0.5, fronts=0.25)
VARIANTS: Final = {
    policy.name: policy
    for policy in (
        *shares("drawn", ours.drawn, "probe and attention drawn", 15, 20, 28),
        *shares("rooted", _ROOTED, "root of the attention, a quarter fronts", 20, 28),
    )
}
"""Measured here alone. `rooted` is what `drawn` was compared with before it got its form."""

POLICIES: Final = {
    "reporting": (
        *("exact", "rotated", "probe15", "probe20", "probe28"),
        *("drawn15", "drawn20", "drawn28", "oracle20", "oracle30"),
    ),
    "tuning": ("probe20", "probe28", "drawn20", "drawn28", "rooted20", "rooted28"),
}
CASES: Final = {"reporting": 6, "tuning": 1}
"""Conversations of each kind."""

GOALS: Final = ((0.32, 0.016), (0.20, 0.025))
"""What a chooser should reach: computed at most, mean KL at most."""


def document(rows: Sequence[Row]) -> Figures:
    """The figures of each set, over conversation n of all kinds where all have all policies."""
    some = summary.latest([row for row in rows if row["dtype"] == DTYPE and row["size"] == SIZE])
    sets = {}
    for name, wanted in POLICIES.items():
        mine = [row for row in some if row["set"] == name and row["policy"] in wanted]
        cases = Counter((row["kind"], row["seed"]) for row in mine)
        whole = Counter(seed for (_, seed), number in cases.items() if number == len(wanted))
        seeds = [seed for seed, kinds in sorted(whole.items()) if kinds == len(conversations.HARD)]
        if seeds:
            complete = [row for row in mine if row["seed"] in seeds]
            sets[name] = {
                "conversations": [seed - conversations.SETS[name] for seed in seeds],
                "policies": _by_policy(complete, wanted),
                "kinds": {
                    kind: _by_policy([row for row in complete if row["kind"] == kind], wanted)
                    for kind in conversations.HARD
                },
            }
    return {
        "model": some[-1]["model"],
        "dtype": DTYPE,
        "machine": f"{platform.machine()}, one thread",
        "sets": sets,
    }


def _by_policy(rows: Sequence[Row], wanted: Sequence[str]) -> Figures:
    return {
        name: summary.figures([row for row in rows if row["policy"] == name]) for name in wanted
    }


def render(found: Figures) -> str:
    lines = [f"`{found['model']}`, all in {found['dtype']}, {found['machine']}."]
    for name, one in found["sets"].items():
        by_policy = one["policies"]
        cases = next(iter(by_policy.values()))["cases"]
        numbers = ", ".join(map(str, one["conversations"]))
        lines += [
            "",
            f"Set *{name}*, {summary.counted(cases, 'conversation')}, of each kind {numbers}:",
            "",
        ]
        lines += _table(by_policy)
        if name == "reporting":
            lines += ["", " ".join(_goals(by_policy))]
            lines += ["", "KL mean by kind:", "", *_by_kind(one["kinds"])]
    return "\n".join(lines)


def _table(by_policy: Figures) -> list[str]:
    exact = by_policy.get("exact")
    title = "top 1 next to exact" if exact else "top 1"
    lines = [
        f"| policy | of | computed | KL mean | KL 99 % | {title} | sure lost |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for name, row in by_policy.items():
        policy = policies.POLICIES.get(name) or VARIANTS[name]
        top1 = row["top1"] / (exact["top1"] if exact else 1)
        lines.append(
            f"| `{name}` | {policy.source} | {row['cost']:.1%} | {row['kl']:.4f} | "
            f"{summary.small(row['kl_p99'])} | {top1:.1%} | {row['sure_lost']}/{row['sure']} |"
        )
    return lines


def _by_kind(kinds: Figures) -> list[str]:
    names = [name for name in POLICIES["reporting"] if name.startswith(("probe", "drawn"))]
    lines = ["| policy | " + " | ".join(kinds) + " |", "|---|" + "--:|" * len(kinds)]
    for name in names:
        cells = [f"{one[name]['kl']:.4f}" for one in kinds.values()]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


def _goals(by_policy: Figures) -> list[str]:
    """Of both choosers, the best figure within each goal's share."""
    said = []
    for most, goal in GOALS:
        parts = []
        for family in ("probe", "drawn"):
            within = [
                name
                for name, row in by_policy.items()
                if name.startswith(family) and row["cost"] <= most
            ]
            if not within:
                parts.append(f"no `{family}` computes so little")
                continue
            best = min(within, key=lambda name: float(by_policy[name]["kl"]))
            kl = by_policy[best]["kl"]
            parts.append(f"`{best}` {'meets' if kl <= goal else 'misses'} it with {kl:.4f}")
        said.append(f"Goal of a KL of {goal} at {most:.0%} computed or less: {', '.join(parts)}.")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--summary", action="store_true", help="only write the tables again")
    parser.add_argument("--set", choices=list(POLICIES), default="reporting")
    parser.add_argument("--cases", type=int, help="of each hard kind; 1 for tuning, else 6")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--rows", type=Path, default=ROWS)
    options = parser.parse_args()
    if not options.summary:
        try:
            suite = Suite(options.model, DTYPE, options.rows)
        except texts.TextError as error:
            print(f"fidelity: {error}", file=sys.stderr)
            return 3
        first, names = conversations.SETS[options.set], POLICIES[options.set]
        for number in range(options.cases or CASES[options.set]):
            for kind in conversations.HARD:
                suite.measure(
                    kind, SIZE, options.set, first + number + 1, names, policies.POLICIES | VARIANTS
                )
    rows = [row for row in Rows(options.rows).by_key.values() if row["dtype"] == DTYPE]
    if not rows:
        print("fidelity: nothing has been measured")
        return 1
    found = document(rows)
    if FIGURES.exists():
        before = json.loads(FIGURES.read_text(encoding="utf-8"))
        if before["model"] == found["model"]:
            both = before["sets"] | found["sets"]
            found["sets"] = {name: both[name] for name in POLICIES if name in both}
    text = render(found)
    print(text)
    FIGURES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    page = summary.PAGE.read_text(encoding="utf-8")
    summary.PAGE.write_text(summary.put(page, text, BEGIN, END), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
