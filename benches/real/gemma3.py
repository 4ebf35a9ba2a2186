"""Gemma 3 270M by kind of edit: windows carried with moved runs, and computed again; see `real`.

    make models MODELS="smollm2 gemma3"
    python -m real.gemma3                    # from the repository, with PYTHONPATH=benches:.
    python -m real.gemma3 --seconds 2700     # no conversation is begun after so many seconds
    python -m real.gemma3 --summary          # no measuring: the tables again, from the rows

Conversations, plans and policies are those of the suite, on the reporting set alone, in float32.
The model is a base model. It replies in Gemma's turns (`gemma3_chat_template.jinja`), and its own
replies (`recorded_gemma3.jsonl`) are the earlier ones of the conversations. Of five texts that it
was asked about, all replies there were of the text, after "User:" and "Assistant:" two.

Rows, figures and the part of docs/fidelity.md are apart from SmolLM2's. Thresholds were set with
SmolLM2; they are printed next to the figures, and nothing fails by them.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtrie.gates import Thresholds
from real import conversations, policies, summary, texts
from real.__main__ import Suite
from real.adaptive import GOALS
from real.rows import Row, Rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from real.summary import Figures

ROOT: Final = Path(__file__).resolve().parents[2]
MODEL: Final = ROOT / "target" / "models" / "gemma-3-270m"
ROWS: Final = ROOT / "target" / "fidelity" / "gemma3.jsonl"
FIGURES: Final = ROOT / "benches" / "real" / "gemma3.json"
BEGIN: Final = (
    "<!-- Written by `python -m real.gemma3` from benches/real/gemma3.json. Edit neither. -->"
)
END: Final = "<!-- End of the figures of Gemma 3 270M. -->"
SET: Final = "reporting"
DTYPE: Final = "float32"

KNOWN: Final = policies.POLICIES | policies.WINDOWS
POLICIES: Final = (
    *("exact", "rotated", "rebuilt", "fronts20", "probe20", "probe28", "adaptive20"),
    *("unrotated", "one base"),
)
CONTROLS: Final = ("unrotated", "one base")

ROUNDS: Final = (("1k", 0), ("4k", 0), *(("1k", one) for one in range(1, 6)), ("4k", 1), ("4k", 2))
"""Sizes and numbers of conversations, in an order in which a run that stops early says most."""
EASY: Final = 3
"""Conversations of each easy kind; of hard ones as many as there are rounds."""


def work() -> Iterator[tuple[str, str, int]]:
    """Kind, size and number of each conversation."""
    for size, number in ROUNDS:
        for kind in conversations.KINDS:
            if kind in conversations.HARD or number < EASY:
                yield kind, size, number


def document(rows: Sequence[Row]) -> Figures:
    """The figures by size, over conversations that have all policies, with intervals of KL."""
    mine = summary.latest([row for row in rows if row["policy"] in POLICIES])
    cases = Counter((row["kind"], row["size"], row["seed"]) for row in mine)
    mine = [row for row in mine if cases[row["kind"], row["size"], row["seed"]] == len(POLICIES)]
    sizes = summary.collected(mine, POLICIES)
    for size, one in sizes.items():
        members = {kind: (kind,) for kind in one["kinds"]}
        for part, kinds in (
            ("groups", {"hard": conversations.HARD, "easy": conversations.EASY}),
            ("kinds", members),
        ):
            for name, by_policy in one[part].items():
                some = [row for row in mine if row["size"] == size and row["kind"] in kinds[name]]
                for policy, own in summary.whole(some, POLICIES).items():
                    kl = [_mean(summary.kl_of(row)) for row in own]
                    by_policy[policy]["kl_drawn"] = summary.drawn_again(kl)
    return {
        "model": rows[-1]["model"],
        "dtype": rows[-1]["dtype"],
        "machine": f"{platform.machine()}, one thread",
        "sizes": sizes,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# --- the page -------------------------------------------------------------------------------------


def render(found: Figures) -> str:
    """The part of the page."""
    lines = [f"Set *{SET}*, `{found['model']}`, all in {found['dtype']}, {found['machine']}."]
    for size, one in found["sizes"].items():
        floors = [by_policy["exact"] for by_policy in one["kinds"].values()]
        cases, questions, right = (
            sum(row[name] for row in floors) for name in ("cases", "questions", "right_full")
        )
        said = (
            f"At {size}: {summary.counted(cases, 'conversation')} of "
            f"{summary.counted(len(floors), 'kind')}, with "
            f"{summary.counted(questions, 'question')}, of which full recomputation answers "
            f"{right}."
        )
        lines += ["", said]
        for group, by_policy in one["groups"].items():
            count = summary.counted(by_policy["exact"]["cases"], "conversation")
            lines += ["", f"{group.capitalize()} kinds, prompts of {size} tokens, {count}:", ""]
            lines += _table(by_policy)
            lines += ["", " ".join(goals(by_policy))]
        lines += ["", f"KL mean and computed by kind, prompts of {size} tokens:", ""]
        lines += _by_kind(one["kinds"])
        lines += ["", f"Within `kvtrie calibrate`'s thresholds by kind, {size} tokens:", ""]
        lines += _within(one["kinds"])
    return "\n".join(lines)


def past(row: Figures, floor: Figures) -> list[str]:
    """The thresholds of `kvtrie calibrate`, but for that of answers, that a policy is past."""
    limits = Thresholds()
    found = {
        "KL": row["kl"] - floor["kl"] > limits.max_kl,
        "KL 99 %": row["kl_p99"] - floor["kl_p99"] > limits.max_kl_p99,
        "top 1": row["top1"] < limits.min_top1 * floor["top1"],
    }
    return [name for name, is_past in found.items() if is_past]


def goals(by_policy: Figures) -> list[str]:
    """Of each goal of SmolLM2, which policy that computes no more comes nearest."""
    said = []
    for most, goal in GOALS:
        within = [
            name for name, row in by_policy.items() if name not in CONTROLS and row["cost"] <= most
        ]
        if not within:
            said.append(
                f"A KL of {goal} at {most:.0%} computed or less: no policy computes so little."
            )
            continue
        best = min(within, key=lambda name: float(by_policy[name]["kl"]))
        kl = by_policy[best]["kl"]
        said.append(
            f"A KL of {goal} at {most:.0%} computed or less: `{best}` "
            f"{'is within' if kl <= goal else 'is past it'}, {kl:.4f} at "
            f"{by_policy[best]['cost']:.0%}."
        )
    return said


def _table(by_policy: Figures) -> list[str]:
    floor = by_policy["exact"]
    columns = "computed | KL mean [95 %] | KL 99 % | top 1 of exact's | same reply | answers"
    lines = [f"| policy | {columns} | points lost (95 %) |", "|---|" + "--:|" * 7]
    for name, row in by_policy.items():
        low, high = (summary.small(one) for one in row["kl_drawn"])
        kept = f"{row['right_full'] - row['lost'] + row['gained']}/{row['right_full']}"
        lines.append(
            f"| `{name}` | {row['cost']:.1%} | {summary.small(row['kl'])} [{low}, {high}] | "
            f"{summary.small(row['kl_p99'])} | {row['top1'] / floor['top1']:.1%} | "
            f"{row['greedy']}/{row['cases']} | {kept} | {summary.points(row)} |"
        )
    return lines


def _by_kind(kinds: Figures) -> list[str]:
    lines = ["| policy | " + " | ".join(kinds) + " |", "|---|" + "--:|" * len(kinds)]
    for name in POLICIES:
        cells = [
            f"{summary.small(one[name]['kl'])} at {one[name]['cost']:.0%}" for one in kinds.values()
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    counts = [str(one["exact"]["cases"]) for one in kinds.values()]
    lines.append(f"| *conversations* | {' | '.join(counts)} |")
    return lines


def _within(kinds: Figures) -> list[str]:
    lines = ["| policy | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]
    for name in POLICIES[1:]:
        cells = []
        for one in kinds.values():
            over = past(one[name], one["exact"])
            cells.append(f"past: {', '.join(over)}" if over else "within")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--summary", action="store_true", help="only write the tables again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--rows", type=Path, default=ROWS)
    options = parser.parse_args()
    if not options.summary:
        try:
            suite = Suite(options.model, DTYPE, options.rows)
        except texts.TextError as error:
            print(f"fidelity: {error}", file=sys.stderr)
            return 3
        began, first = time.monotonic(), conversations.SETS[SET]
        for kind, size, number in work():
            if time.monotonic() - began < options.seconds:
                suite.measure(kind, size, SET, first + number + 1, POLICIES, KNOWN)
    rows = list(Rows(options.rows).by_key.values())
    if not rows:
        print("fidelity: nothing has been measured")
        return 1
    found = document(rows)
    text = render(found)
    print(text)
    summary.write(found, text, FIGURES, BEGIN, END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
