"""The probe with one share for all plans and with a share by need; see `real`.

    python -m real.adaptive                    # from the repository, with PYTHONPATH=benches:.
    python -m real.adaptive --dtype float32    # without the rounding of bfloat16
    python -m real.adaptive --summary          # no measuring: the tables again, from the rows

Its rows, its figures and its part of docs/fidelity.md are apart from those of `python -m real`. It
stops after so many seconds, and resumes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from real import conversations, summary, texts
from real.__main__ import MODEL, Suite
from real.rows import Row, Rows

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from real.summary import Figures

ROOT: Final = Path(__file__).resolve().parents[2]
ROWS: Final = ROOT / "target" / "fidelity" / "adaptive.jsonl"
FIGURES: Final = ROOT / "benches" / "real" / "adaptive.json"
BEGIN: Final = "<!-- Written by `python -m real.adaptive` from benches/real/adaptive.json. -->"
END: Final = "<!-- End of the figures of adaptive shares. -->"

DTYPES: Final = ("bfloat16", "float32")
SET: Final = "reporting"

FAMILIES: Final = ("probe", "adaptive")
POLICIES: Final = (
    *("exact", "rotated"),
    *("probe15", "probe20", "probe28"),
    *("adaptive14", "adaptive20", "adaptive26", "adaptive38"),
    *("oracle20", "oracle30"),
)
ROUNDS: Final = {"1k": 6, "4k": 6}
"""Conversations of each hard kind, and half as many of each easy one."""

GOALS: Final = ((0.32, 0.016), (0.20, 0.025))
"""What a chooser should reach: computed at most, mean KL at most."""

PAIRS: Final = (
    *(("adaptive38", "probe28"), ("adaptive26", "probe28")),
    *(("adaptive20", "probe20"), ("adaptive14", "probe15")),
)
"""Policies that are compared on the same conversations, after hard edits."""


def work(sizes: Collection[str]) -> Iterator[tuple[str, str, int]]:
    """Kind, size and number of each conversation."""
    for size in sizes:
        for number in range(ROUNDS[size]):
            kinds = conversations.KINDS if number % 2 == 0 else conversations.HARD
            for kind in kinds:
                yield kind, size, number


def document(rows: Sequence[Row]) -> Figures:
    """The figures by size, over conversations that have all policies."""
    mine = summary.latest([row for row in rows if row["policy"] in POLICIES])
    cases = Counter((row["kind"], row["size"], row["seed"]) for row in mine)
    mine = [row for row in mine if cases[row["kind"], row["size"], row["seed"]] == len(POLICIES)]
    return {
        "model": rows[-1]["model"],
        "dtype": rows[-1]["dtype"],
        "sizes": summary.collected(mine),
        "products": {row["size"]: row.get("products", row["dtype"]) for row in mine},
        "drawn": {size: found for size in ROUNDS if (found := drawn(mine, size))},
    }


def completed(found: Figures, before: Figures) -> Figures:
    """The figures with those of sizes that were measured before, not now."""
    if any(found[name] != before.get(name) for name in ("model", "dtype")):
        return found
    return found | summary.by_sizes(found, before, ("sizes", "products", "drawn"))


def drawn(rows: Sequence[Row], size: str) -> Figures:
    """Intervals of mean KL after hard edits, 95 %, by conversations drawn again."""
    hard = [row for row in rows if row["size"] == size and row["kind"] in conversations.HARD]
    kl = {
        name: np.array([np.mean(summary.kl_of(row)) for row in some])
        for name, some in summary.whole(hard).items()
    }
    if not kl:
        return {}
    found = {name: summary.drawn_again(kl[name]) for pair in PAIRS for name in pair}
    return found | {f"{one} - {two}": summary.drawn_again(kl[one] - kl[two]) for one, two in PAIRS}


def render(found: Figures) -> str:
    """The part of the page: the figures of each element type."""
    return "\n\n".join(_of_one_type(found[dtype]) for dtype in DTYPES if dtype in found)


def _of_one_type(found: Figures) -> str:
    products = [f"{kind} at {size}" for size, kind in found["products"].items()]
    lines = [
        (
            f"Set *{SET}*, `{found['model']}`, all in {found['dtype']}, one thread of a CPU. "
            f"Products are computed in {', '.join(products)}."
        )
    ]
    for size, one in found["sizes"].items():
        for group, by_policy in one["groups"].items():
            cases = next(iter(by_policy.values()))["cases"]
            title = f"{group.capitalize()} kinds, prompts of {size} tokens, {found['dtype']}"
            lines += ["", f"{title}, {summary.counted(cases, 'conversation')}:", ""]
            lines += _table(by_policy)
            if group == "hard":
                lines += ["", " ".join(goals(by_policy))]
                if size in found.get("drawn", {}):
                    lines += ["", _drawn(found["drawn"][size])]
        title = f"KL mean and computed by kind, prompts of {size} tokens, {found['dtype']}"
        lines += ["", f"{title}:", ""]
        lines += _by_kind(one["kinds"])
    return "\n".join(lines)


def _drawn(intervals: Figures) -> str:
    said = [f"`{name}` {low:.4f} to {high:.4f}" for name, (low, high) in intervals.items()]
    return f"Mean KL by conversations drawn again, 95 %: {', '.join(said)}."


def _table(by_policy: Figures) -> list[str]:
    floor = by_policy["exact"]["top1"]
    columns = "computed | KL mean | KL 99 % | top 1 next to exact | answers | points lost (95 %)"
    lines = [f"| policy | {columns} | sure lost |", "|---|--:|--:|--:|--:|--:|--:|--:|"]
    for name, row in by_policy.items():
        kept = f"{row['right_full'] - row['lost'] + row['gained']}/{row['right_full']}"
        net = 100 * (row["lost"] - row["gained"]) / row["questions"]
        lines.append(
            f"| `{name}` | {row['cost']:.1%} | {row['kl']:.4f} | {summary.small(row['kl_p99'])} | "
            f"{row['top1'] / floor:.1%} | {kept} | "
            f"{net:.1f} [{100 * row['loss_low']:.1f}, {100 * row['loss_high']:.1f}] | "
            f"{row['sure_lost']}/{row['sure']} |"
        )
    return lines


def _by_kind(kinds: Figures) -> list[str]:
    names = [name for name in next(iter(kinds.values())) if name.startswith(FAMILIES)]
    lines = ["| policy | " + " | ".join(kinds) + " |", "|---|" + "--:|" * len(kinds)]
    for name in names:
        cells = [f"{one[name]['kl']:.4f} at {one[name]['cost']:.0%}" for one in kinds.values()]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


def goals(by_policy: Figures) -> list[str]:
    """Of each family, the best figure within each goal's share."""
    said = []
    for most, goal in GOALS:
        parts = []
        for family in FAMILIES:
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
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    parser.add_argument("--sizes", nargs="+", choices=ROUNDS, default=tuple(ROUNDS))
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--rows", type=Path, default=ROWS)
    options = parser.parse_args()
    if not options.summary:
        try:
            suite = Suite(options.model, options.dtype, options.rows)
        except texts.TextError as error:
            print(f"fidelity: {error}", file=sys.stderr)
            return 3
        began, first = time.monotonic(), conversations.SETS[SET]
        for kind, size, number in work(options.sizes):
            if time.monotonic() - began < options.seconds:
                suite.measure(kind, size, SET, first + number + 1, POLICIES)
    rows = [row for row in Rows(options.rows).by_key.values() if row["dtype"] == options.dtype]
    if not rows:
        print("fidelity: nothing has been measured")
        return 1
    found = json.loads(FIGURES.read_text(encoding="utf-8"))
    found[options.dtype] = completed(document(rows), found.get(options.dtype, {}))
    text = render(found)
    print(text)
    summary.write(found, text, FIGURES, BEGIN, END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
