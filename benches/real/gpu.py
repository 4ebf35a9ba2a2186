"""The hard kinds on a GPU, by many processes; see `real`.

    python -m real.gpu --seconds 200         # from the repository, with PYTHONPATH=benches:.
    python -m real.gpu --summary             # no measuring: the tables again, from the rows

Passes of a small model leave a GPU idle: processes share it, each with a core and a conversation of
its own. Rows name the device. They, their figures and their part of docs/fidelity.md are apart from
those of `python -m real`, which are of a CPU. It stops after so many seconds, and resumes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Final

from real import conversations, first_token, ours, policies, summary, texts
from real.__main__ import MODEL, Suite
from real.adaptive import GOALS
from real.policies import shares
from real.rows import Row, Rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from real.summary import Figures

ROOT: Final = Path(__file__).resolve().parents[2]
ROWS: Final = ROOT / "target" / "fidelity" / "gpu.jsonl"
FIGURES: Final = ROOT / "benches" / "real" / "gpu.json"
BEGIN: Final = "<!-- Written by `python -m real.gpu` from benches/real/gpu.json. Edit neither. -->"
END: Final = "<!-- End of the figures of a GPU. -->"
SET: Final = "reporting"

VARIANTS: Final = {one.name: one for one in shares("probe", ours.probe, "kvtrie", 30)}
"""Measured here alone."""

POLICIES: Final = (
    *("exact", "probe28", "probe30", "foreign", "rotated", "unrotated", "probe15", "probe20"),
    *("probe20fp8", "fronts20", "fronts30", "lower", "upper", "oracle20", "oracle30"),
    *("adaptive26", "adaptive20", "adaptive14"),
)
FIRST: Final = {"4k": 4, "1k": 1}
"""The first conversation of each kind: at 4k tokens those before have been measured on a CPU."""
ROUNDS: Final = 12
EASY_FROM: Final = 6
"""The round in which easy kinds begin to be measured as well."""
FIRST_TOKENS: Final = (first_token.NOTHING, *first_token.POLICIES)

Case = tuple[str, str, int]


def work(rounds: int, sizes: Sequence[str] = tuple(FIRST)) -> Iterator[Case]:
    """Kind, size and number of each conversation, in an order in which a run may stop anywhere."""
    for one in range(rounds):
        kinds = (*conversations.HARD, *(conversations.EASY if one >= EASY_FROM else ()))
        for size in sizes:
            yield from ((kind, size, FIRST[size] + one) for kind in kinds)


# --- processes ------------------------------------------------------------------------------------

_SUITES: dict[str, Suite] = {}


def _begin(folder: Path, dtype: str, rows: Path, device: str) -> None:
    """Load the model in this process."""
    with contextlib.redirect_stdout(io.StringIO()):  # licences, which the first process prints
        _SUITES["own"] = Suite(folder, dtype, rows, device)


def _measure(case: Case, end: float | None) -> bool:
    """The rows of a conversation that are missing; False: the time is over."""
    if end is not None and time.time() > end:
        return False
    kind, size, number = case
    seed = conversations.SETS[SET] + number
    _SUITES["own"].measure(kind, size, SET, seed, POLICIES, policies.POLICIES | VARIANTS)
    return True


def measure(options: argparse.Namespace) -> int:
    """Measure until all is done or the time is over; the number of conversations that failed."""
    cases = list(work(options.rounds, options.sizes.split(",")))
    end = None if options.seconds is None else time.time() + options.seconds
    given = (options.model, options.dtype, options.rows, options.device)
    context = multiprocessing.get_context("spawn")
    failed = 0
    with ProcessPoolExecutor(options.processes, context, _begin, given) as pool:
        asked = {pool.submit(_measure, case, end): case for case in cases}
        for one in as_completed(asked):
            if (error := one.exception()) is not None:
                failed += 1
                print(f"fidelity: {asked[one]}: {error!r}", file=sys.stderr, flush=True)
    return failed


def first_tokens(options: argparse.Namespace) -> None:
    """First tokens, which are timed: by one process, while no other uses the GPU."""
    suite = Suite(options.model, options.dtype, options.rows, options.device)
    for size in options.first_token.split(","):
        suite.first_tokens(size, SET, conversations.SETS[SET] + 1, FIRST_TOKENS)


# --- the page -------------------------------------------------------------------------------------


def document(rows: Sequence[Row]) -> Figures | None:
    """All figures, over the conversations that have all policies; None: there are no rows.

    Of the device and dtype of the last row alone.
    """
    some = [row for row in rows if "device" in row and row["set"] == SET]
    if not some:
        return None
    about = {name: some[-1][name] for name in ("model", "dtype", "device")}
    some = summary.latest([row for row in some if about.items() <= row.items()])
    sizes: Figures = {}
    for size in conversations.SIZES:
        kinds = {
            kind: whole([row for row in some if (row["size"], row["kind"]) == (size, kind)])
            for kind in conversations.KINDS
        }
        kinds = {kind: found for kind, found in kinds.items() if found}
        groups = {}
        for group, names in (("hard", conversations.HARD), ("easy", conversations.EASY)):
            mine = [row for kind, found in kinds.items() if kind in names for row in found]
            if mine:
                groups[group] = _by_policy(mine)
        if kinds:
            sizes[size] = {
                "groups": groups,
                "kinds": {kind: _by_policy(found) for kind, found in kinds.items()},
            }
    return {
        **about,
        "set": SET,
        "sizes": sizes,
        "first_token": summary.first_tokens(some, FIRST_TOKENS),
    }


def whole(rows: Sequence[Row]) -> list[Row]:
    """The rows of conversations that have all policies."""
    by_seed: dict[int, dict[str, Row]] = {}
    for row in rows:
        by_seed.setdefault(row["seed"], {})[row["policy"]] = row
    complete = [one for one in by_seed.values() if all(name in one for name in POLICIES)]
    return [one[name] for one in complete for name in POLICIES]


def _by_policy(rows: Sequence[Row]) -> Figures:
    return {
        name: summary.figures([row for row in rows if row["policy"] == name]) for name in POLICIES
    }


def render(found: Figures | None) -> str:
    if found is None:
        return "Nothing has been measured on a GPU yet."
    lines = [
        (
            f"`python -m real.gpu`, set *{found['set']}*: `{found['model']}`, all in "
            f"{found['dtype']}, on a device named {found['device']}. Several processes shared it, "
            "but for first tokens."
        )
    ]
    for size, one in found["sizes"].items():
        for group, by_policy in one["groups"].items():
            row = by_policy["exact"]
            names = [kind for kind in one["kinds"] if kind in getattr(conversations, group.upper())]
            lines += [
                "",
                (
                    f"Prompts of {size} tokens, {group} kinds ({', '.join(names)}): "
                    f"{summary.counted(row['cases'], 'conversation')}, "
                    f"{summary.counted(row['questions'], 'question')}, of which full recomputation "
                    f"answers {row['right_full']} and is sure of {row['sure']}."
                ),
                "",
                *_table(by_policy),
            ]
            if group == "hard":
                lines += ["", " ".join(_goals(by_policy))]
        title = f"KL mean by kind, prompts of {size} tokens:"
        lines += ["", title, "", *_by_kind(one["kinds"])]
    if found["first_token"]:
        lines += ["", *_first_tokens(found["first_token"])]
    return "\n".join(lines)


def _table(by_policy: Figures) -> list[str]:
    columns = {title: cell for title, cell in summary.COLUMNS if title != "top 1"}
    lines = [
        "| policy | " + " | ".join(columns) + " | top 1 next to exact |",
        "|---|" + "--:|" * (len(columns) + 1),
    ]
    for name, row in by_policy.items():
        cells = [cell(row) for cell in columns.values()]
        cells.append(f"{row['top1'] / by_policy['exact']['top1']:.1%}")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


def _goals(by_policy: Figures) -> list[str]:
    """Of the probe, the best KL within each goal's share."""
    said = []
    for most, goal in GOALS:
        within = {
            name: row
            for name, row in by_policy.items()
            if name in ("probe15", "probe20", "probe28", "probe30") and row["cost"] <= most
        }
        if within:
            name, row = min(within.items(), key=lambda one: float(one[1]["kl"]))
            verb = "meets" if row["kl"] <= goal else "misses"
            said.append(
                f"Goal of a KL of {goal} at {most:.0%} computed or less: `{name}` {verb} it with "
                f"{row['kl']:.4f}."
            )
    return said


def _by_kind(kinds: Figures) -> list[str]:
    names = ("exact", "rotated", "fronts20", "probe20", "probe28", "oracle30")
    lines = [
        "| kind | conversations | " + " | ".join(f"`{name}`" for name in names) + " |",
        "|---|--:|" + "--:|" * len(names),
    ]
    for kind, by_policy in kinds.items():
        cells = [str(by_policy["exact"]["cases"])]
        cells += [f"{by_policy[name]['kl']:.4f}" for name in names]
        lines.append(f"| {kind} ({conversations.IDS[kind]}) | {' | '.join(cells)} |")
    return lines


def _first_tokens(sizes: Figures) -> list[str]:
    lines = [
        (
            "The generator's time to the first token after *strip all*, planning and choosing "
            "included: medians."
        ),
        "",
        "| prompt | policy | runs | first token | sooner than exact | computed |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for one in sizes.values():
        for name, row in one.items():
            sooner = one["exact"]["seconds"] / row["seconds"]
            took = 1000 * row["seconds"]
            lines.append(
                f"| {row['tokens']:,} | `{name}` | {row['runs']} | {took:.0f} ms | "
                f"{sooner:.1f}\N{MULTIPLICATION SIGN} | {row['computed'] / row['tokens']:.1%} |"
            )
    return lines


def write(rows: Path) -> int:
    """Write figures and page from the rows of a GPU; those of a CPU are only printed."""
    found = document(list(Rows(rows).by_key.values()))
    text = render(found)
    print(text)
    if found is None:
        return 1
    if found["device"] == "cpu":
        return 0
    summary.write(found, text, FIGURES, BEGIN, END)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--summary", action="store_true", help="only write the tables again")
    parser.add_argument("--device", default="cuda", help="a torch device")
    parser.add_argument("--processes", type=int, default=12, help="that share it")
    parser.add_argument("--seconds", type=float, help="begin no conversation after so many")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="conversations of each kind")
    parser.add_argument("--sizes", default=",".join(FIRST), help="only these sizes")
    parser.add_argument("--first-token", default="", help="time these sizes instead, as in 4k,7k")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rows", type=Path, default=ROWS)
    options = parser.parse_args()
    for given, known in ((options.sizes, FIRST), (options.first_token, conversations.SIZES)):
        if unknown := [size for size in given.split(",") if size and size not in known]:
            parser.error(f"unknown size {', '.join(unknown)} (known: {', '.join(known)})")
    failed = 0
    if not options.summary:
        try:
            texts.fetch()
            if options.first_token:
                first_tokens(options)
            else:
                failed = measure(options)
        except texts.TextError as error:
            print(f"fidelity: {error}", file=sys.stderr)
            return 3
    return write(options.rows) or min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
