"""The tables: `benches/real/figures.json` and the part of docs/fidelity.md between two marks."""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtrie.gates import paired_interval
from real import conversations, first_token, policies
from real.rows import Row, Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

ROOT: Final = Path(__file__).resolve().parents[2]
FIGURES: Final = ROOT / "benches" / "real" / "figures.json"
PAGE: Final = ROOT / "docs" / "fidelity.md"
BEGIN: Final = "<!-- Written by `python -m real` from benches/real/figures.json. Edit neither. -->"
END: Final = "<!-- End of the figures of real models. -->"

DTYPE: Final = "bfloat16"
"""Of the page's figures."""

SURE: Final = 0.1
"""Nats: full recomputation is sure of an answer whose negative log-likelihood is below."""

SEEDS: Final = 3
"""Conversation n of a kind belongs to seed n modulo this."""

STEPS: Final = 10
CHAINED: Final = ("ten", "alone")
"""Kinds of rows: edits in a row, and the same edits alone."""

Figures = dict[str, Any]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def figures(rows: Sequence[Row]) -> Figures:
    """One policy over the rows of one or several kinds.

    Shares and KL are means over cases, so that a long reply counts no more than a short one; the
    tail and top 1 are over positions.
    """
    kl = [kl_of(row) for row in rows]
    positions = [one for some in kl for one in some]
    pairs = [tuple(fact["right"]) for row in rows for fact in row["facts"]]
    sure = [fact for row in rows for fact in row["facts"] if is_sure(fact)]
    lost, gained = pairs.count((True, False)), pairs.count((False, True))
    low, high = paired_interval(lost, gained, len(pairs))
    nll = [fact["nll"][1] - fact["nll"][0] for row in rows for fact in row["facts"]]
    return {
        "cases": len(rows),
        "positions": len(positions),
        "computed": _mean([row["computed"] / row["tokens"] for row in rows]),
        "cost": _mean([(row["computed"] + row["extra"]) / row["tokens"] for row in rows]),
        "kl": _mean([_mean(one) for one in kl]),
        "kl_reply": _mean([_mean(row["kl_reply"]) for row in rows]),
        "kl_p99": quantile(positions, 0.99),
        "top1": sum(sum(row["top1"]) for row in rows) / len(positions),
        "greedy": sum(row["greedy"] for row in rows),
        "questions": len(pairs),
        "right_full": sum(full for full, _ in pairs),
        "lost": lost,
        "gained": gained,
        "loss_low": low,
        "loss_high": high,
        "sure": len(sure),
        "sure_lost": sum(not fact["right"][1] for fact in sure),
        "nll_change": _mean(nll),
    }


def is_sure(fact: Row) -> bool:
    return bool(fact["right"][0]) and fact["nll"][0] < SURE


def drawn_again(values: Sequence[float] | NDArray[np.float64], draws: int = 2000) -> list[float]:
    """The 95 % interval of a mean over conversations, by conversations drawn again."""
    own = np.array(values)
    again = np.random.default_rng(0).integers(0, len(own), (draws, len(own)))
    return [float(one) for one in np.quantile(own[again].mean(axis=1), (0.025, 0.975))]


def collected(rows: Sequence[Row], names: Sequence[str] = tuple(policies.POLICIES)) -> Figures:
    """The figures of a set by size, kind and policy, over cases that have all policies."""
    found: Figures = {}
    for size in conversations.SIZES:
        some = [row for row in rows if row["size"] == size and row["kind"] in conversations.KINDS]
        kinds: Figures = {}
        for kind in conversations.KINDS:
            complete = whole([row for row in some if row["kind"] == kind], names)
            if complete:
                kinds[kind] = {name: figures(one) for name, one in complete.items()}
        groups = {}
        for group, members in (("hard", conversations.HARD), ("easy", conversations.EASY)):
            complete = whole([row for row in some if row["kind"] in members], names)
            if complete:
                groups[group] = {name: figures(one) for name, one in complete.items()}
        if kinds:
            found[size] = {"kinds": kinds, "groups": groups}
    return found


def whole(
    rows: Sequence[Row], known: Sequence[str] = tuple(policies.POLICIES)
) -> dict[str, list[Row]]:
    """Rows by policy, so that every policy has the same cases.

    Of the known policies that were measured in at least half of the cases, and the cases that have
    all of these.
    """
    by_case: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        by_case.setdefault((row["kind"], row["seed"]), {})[row["policy"]] = row
    cases = list(by_case.values())
    names = [name for name in known if 2 * sum(name in one for one in cases) >= max(len(cases), 1)]
    complete = [one for one in cases if all(name in one for name in names)]
    return {name: [one[name] for one in complete] for name in names} if complete else {}


def by_seed(rows: Sequence[Row]) -> Figures:
    """The figures of hard kinds by size, and by the three seeds that share the conversations."""
    found: Figures = {}
    for size in conversations.SIZES:
        some = [row for row in rows if row["size"] == size and row["kind"] in conversations.HARD]
        complete = whole(some)
        seeds = {
            str(number + 1): {
                name: figures(mine)
                for name, one in complete.items()
                if (mine := [row for row in one if (row["seed"] - 1) % SEEDS == number])
            }
            for number in range(SEEDS)
        }
        if complete and all(seeds.values()):
            found[size] = seeds
    return found


def chained(rows: Sequence[Row]) -> Figures:
    """Ten edits in a row by policy, next to each of the edits alone.

    Of the chains in which all of both is measured: how many, the KL by step in a row and alone, and
    the answers lost and gained over all steps in a row, against full recomputation.
    """
    found: Figures = {}
    for name in (*policies.POLICIES, policies.ONE_HOP.name):
        chains: dict[int, dict[str, dict[int, Row]]] = {}
        for row in rows:
            if row["policy"] == name and row["kind"] in CHAINED:
                chain = chains.setdefault(row["seed"], {kind: {} for kind in CHAINED})
                chain[row["kind"]][row["step"]] = row
        kinds = CHAINED[1:] if name in policies.CONTROLS else CHAINED
        if name == policies.ONE_HOP.name:
            kinds = CHAINED[:1]
        complete = [
            one for one in chains.values() if all(len(one[kind]) == STEPS for kind in kinds)
        ]
        if not complete:
            continue
        found[name] = {"chains": len(complete)}
        for kind in kinds:
            found[name][kind] = [
                _mean([_mean(kl_of(one[kind][step])) for one in complete])
                for step in range(1, STEPS + 1)
            ]
            own = [row for one in complete for row in one[kind].values()]
            found[name][f"{kind}_figures"] = figures(own)
    return found


def first_tokens(
    rows: Sequence[Row], names: Sequence[str] = tuple(first_token.POLICIES)
) -> Figures:
    """Medians of the time to the first token, by size and policy."""
    found: Figures = {}
    for size in conversations.SIZES:
        for name in names:
            some = [
                row
                for row in rows
                if (row["kind"], row["size"], row["policy"]) == ("first token", size, name)
            ]
            if some:
                found.setdefault(size, {})[name] = {
                    "runs": len(some),
                    "tokens": some[0]["tokens"],
                    "computed": some[0]["computed"],
                    "seconds": statistics.median(row["seconds"] for row in some),
                    "fell_back": sum(row["fell_back"] for row in some),
                }
    return {size: one for size, one in found.items() if "exact" in one}


def kl_of(row: Row) -> list[float]:
    """At each position of both replies."""
    return [*row["kl_reply"], *row["kl_quotes"]]


def undetected(found: Figures) -> list[str]:
    """Kinds that no control is bad in: what the suite says of them means nothing."""
    return [
        f"{size} {kind}"
        for size, one in found.items()
        for kind, by_policy in one["kinds"].items()
        if any(name in by_policy for name in policies.CONTROLS) and not detected(by_policy)
    ]


def detected(by_policy: Figures) -> list[str]:
    """Controls that are bad: KL above ten times exact reuse's, and answers lost beyond chance."""
    floor = max(by_policy["exact"]["kl"], 1e-4)
    return [
        name
        for name in policies.CONTROLS
        if name in by_policy
        and by_policy[name]["kl"] > 10 * floor
        and by_policy[name]["loss_low"] > 0
    ]


# --- the page -------------------------------------------------------------------------------------


def render(document: Figures) -> str:
    lines = [
        (
            f"`make fidelity`, set *{document['set']}*: `{document['model']}`, KV in "
            f"{document['dtype']}, {document['machine']}. Passages of documentation "
            "(`constraints/texts.txt`), drawn from the same packages as those of the tuning set; "
            "conversations and wordings that nothing was tuned on; "
            "blocks of 16 tokens, runs of at least 16."
        ),
    ]
    lines += ["", _shown(document)]
    for size, found in document["sizes"].items():
        for group, title in (("hard", "Hard kinds"), ("easy", "Easy kinds")):
            if group in found["groups"]:
                lines += ["", f"### {title}, prompts of {size} tokens", ""]
                lines += _table(found["groups"][group])
        lines += ["", f"### KL by kind, prompts of {size} tokens", "", *_by_kind(found["kinds"])]
        lines += ["", f"### KL 99 %, and top 1 next to exact reuse's, at {size} tokens", ""]
        lines += _tails(found["kinds"])
        lines += ["", f"### Points lost by kind, prompts of {size} tokens", ""]
        lines += _lost(found["kinds"])
    for size, found in document["seeds"].items():
        lines += ["", f"### Hard kinds by seed, prompts of {size} tokens", "", *_by_seed(found)]
    if document["chains"]:
        lines += ["", "### Ten edits in a row", "", *_chains(document["chains"])]
    if document["first_token"]:
        lines += ["", "### First token", "", *_first_tokens(document["first_token"])]
    if document["undetected"]:
        names = ", ".join(document["undetected"])
        lines += [
            "",
            f"**No control is detected in: {names}.** What is said of these shows nothing.",
        ]
    return "\n".join(lines)


def _shown(document: Figures) -> str:
    """How much was measured, what moved KV costs without repair, and what was not measured."""
    said = []
    for size, found in document["sizes"].items():
        floors = [one["exact"] for one in found["kinds"].values()]
        cases, questions, right = (
            sum(row[name] for row in floors) for name in ("cases", "questions", "right_full")
        )
        said.append(
            f"At {size}: {counted(cases, 'conversation')} of {counted(len(floors), 'kind')}, with "
            f"{counted(questions, 'question')}, "
            f"of which full recomputation answers {right}."
        )
        moved = {kind: one["rotated"] for kind, one in found["kinds"].items() if "rotated" in one}
        if moved:
            by_kl = sorted(moved, key=lambda kind: float(moved[kind]["kl"]))
            widest = max(moved.values(), key=lambda row: row["loss_high"] - row["loss_low"])
            half = 50 * (widest["loss_high"] - widest["loss_low"])
            said.append(
                f"Moved KV without repair (`rotated`) has a mean KL of "
                f"{small(moved[by_kl[0]]['kl'])} ({by_kl[0]}) to {small(moved[by_kl[-1]]['kl'])} "
                f"({by_kl[-1]}), exact reuse at most {small(max(row['kl'] for row in floors))}. "
                f"An interval of points lost in one kind is up to ±{half:.0f} points wide."
            )
        worse = [
            f"`{name}` ({group} kinds)"
            for group, by_policy in found["groups"].items()
            for name, row in by_policy.items()
            if name not in policies.CONTROLS and row["loss_low"] > 0
        ]
        if worse:
            said.append(f"The interval of points lost is above 0 for {', '.join(worse)}.")
        blind = [
            kind
            for kind, one in found["kinds"].items()
            if "unrotated" in one and one["unrotated"]["loss_low"] <= 0
        ]
        if blind:
            said.append(f"No answers lost by `unrotated` beyond chance: {', '.join(blind)}.")
        bad = [one for one in found["kinds"].values() if "foreign" in detected(one)]
        if len(bad) == len(found["kinds"]):
            said.append("`foreign` is detected in every kind.")
    missing = [
        f"prompts of {size} tokens" for size in conversations.SIZES if size not in document["sizes"]
    ]
    for size, found in document["sizes"].items():
        absent = [kind for kind in conversations.KINDS if kind not in found["kinds"]]
        if absent:
            missing.append(f"{', '.join(absent)} at {size}")
    if not document["chains"]:
        missing.append("ten edits in a row")
    if not document["first_token"]:
        missing.append("first token")
    if missing:
        said.append(f"Not measured yet: {'; '.join(missing)}.")
    return " ".join(said)


def points(row: Figures) -> str:
    """Net points lost of all questions, with the interval."""
    if not row["questions"]:
        return ""
    net = 100 * (row["lost"] - row["gained"]) / row["questions"] + 0.0
    return f"{net:.1f} [{100 * row['loss_low']:.1f}, {100 * row['loss_high']:.1f}]"


COLUMNS: Final[tuple[tuple[str, Callable[[Figures], str]], ...]] = (
    ("computed", lambda row: f"{row['cost']:.1%}"),
    ("KL mean", lambda row: small(row["kl"])),
    ("KL 99 %", lambda row: small(row["kl_p99"])),
    ("top 1", lambda row: f"{row['top1']:.1%}"),
    (
        "answers",
        lambda row: f"{row['right_full'] - row['lost'] + row['gained']}/{row['right_full']}",
    ),
    ("points lost (95 %)", points),
    ("sure lost", lambda row: f"{row['sure_lost']}/{row['sure']}"),
    ("same reply", lambda row: f"{row['greedy']}/{row['cases']}"),
)


def _table(by_policy: Figures) -> list[str]:
    lines = [
        "| policy | of | " + " | ".join(title for title, _ in COLUMNS) + " |",
        "|---|---|" + "--:|" * len(COLUMNS),
    ]
    for name, row in by_policy.items():
        cells = [show(row) for _, show in COLUMNS]
        lines.append(f"| `{name}` | {policies.POLICIES[name].source} | " + " | ".join(cells) + " |")
    return lines


def _by_kind(kinds: Figures) -> list[str]:
    names = [name for name in policies.POLICIES if any(name in one for one in kinds.values())]
    titles = [f"{kind} ({conversations.IDS[kind]})" for kind in kinds]
    lines = ["| policy | " + " | ".join(titles) + " |", "|---|" + "--:|" * len(kinds)]
    for name in names:
        cells = []
        for one in kinds.values():
            row = one.get(name)
            cells.append("" if row is None else f"{small(row['kl'])} at {row['cost']:.0%}")
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    lines.append(
        "| *cases* | "
        + " | ".join(str(next(iter(one.values()))["cases"]) for one in kinds.values())
        + " |"
    )
    return lines


LOST: Final = ("exact", "rotated", "fronts20", "fronts30", "probe15", "probe20", "probe28")
"""Policies of the tables of tails and of losses, the latter with the controls."""


def _lost(kinds: Figures) -> list[str]:
    names = [
        name for name in (*LOST, *policies.CONTROLS) if all(name in one for one in kinds.values())
    ]
    lines = [
        "| kind | conversations | right | " + " | ".join(f"`{name}`" for name in names) + " |",
        "|---|--:|--:|" + "--:|" * len(names),
    ]
    for kind, one in kinds.items():
        row = one["exact"]
        cells = [str(row["cases"]), f"{row['right_full']}/{row['questions']}"]
        cells += [points(one[name]) for name in names]
        lines.append(f"| {kind} ({conversations.IDS[kind]}) | " + " | ".join(cells) + " |")
    return lines


def _tails(kinds: Figures) -> list[str]:
    """The tail of the KL by kind, and top 1 as a share of exact reuse's."""
    names = [name for name in LOST if all(name in one for one in kinds.values())]
    lines = [
        "| kind | " + " | ".join(f"`{name}`" for name in names) + " |",
        "|---|" + "--:|" * len(names),
    ]
    for kind, one in kinds.items():
        cells = [
            f"{small(one[name]['kl_p99'])}, {one[name]['top1'] / one['exact']['top1']:.1%}"
            for name in names
        ]
        lines.append(f"| {kind} ({conversations.IDS[kind]}) | " + " | ".join(cells) + " |")
    return lines


def _by_seed(seeds: Figures) -> list[str]:
    names = [name for name in policies.POLICIES if all(name in one for one in seeds.values())]
    titles = [f"seed {seed}: KL | points lost (95 %)" for seed in seeds]
    lines = ["| policy | " + " | ".join(titles) + " |", "|---|" + "--:|" * 2 * len(seeds)]
    for name in names:
        cells = [
            cell for one in seeds.values() for cell in (small(one[name]["kl"]), points(one[name]))
        ]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    counts = [f"{one['exact']['cases']} | {one['exact']['questions']}" for one in seeds.values()]
    lines.append("| *cases, questions* | " + " | ".join(counts) + " |")
    return lines


def _chains(chains: Figures) -> list[str]:
    """The KL by step in a row, its mean, and that of the same edits alone."""
    title = "mean | alone | ratio | computed | points lost (95 %)"
    steps = " | ".join(map(str, range(1, STEPS + 1)))
    most = max(one["chains"] for one in chains.values())
    lines = [
        (
            f"KL after each edit, mean of {counted(most, 'conversation')}; *alone*: the mean of "
            "the same edits, each over KV that was computed in full."
        ),
        "",
        f"| policy | {steps} | {title} |",
        "|---|" + "--:|" * (STEPS + 5),
    ]
    for name, one in chains.items():
        # Moved once, a policy of one hop is `rotated`.
        alone, row = _mean(one.get("alone", chains["rotated"]["alone"])), one.get("ten", [])
        shown = one["ten_figures"] if row else one["alone_figures"]
        cells = [*map(small, row), small(_mean(row))] if row else [""] * (STEPS + 1)
        cells += [small(alone), f"{_mean(row) / alone:.2f}" if row and alone else ""]
        cells += [f"{shown['cost']:.1%}", points(shown)]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return lines


def _first_tokens(processors: Figures) -> list[str]:
    lines = [
        (
            "The generator's processor time to the first token after *strip all*, planning and "
            "choosing included: medians on machines of which other work had a part."
        )
    ]
    for name, sizes in processors.items():
        lines += ["", f"{name}:", "", *_first_tokens_of(sizes)]
    return lines


def _first_tokens_of(sizes: Figures) -> list[str]:
    lines = [
        "| prompt | policy | runs | first token | sooner | computed |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for one in sizes.values():
        for name, row in one.items():
            sooner = one["exact"]["seconds"] / row["seconds"]
            lines.append(
                f"| {row['tokens']:,} | `{name}` | {row['runs']} | {row['seconds']:.2f} s | "
                f"{sooner:.1f}\N{MULTIPLICATION SIGN} | {row['computed'] / row['tokens']:.1%} |"
            )
    return lines


def small(value: float) -> str:
    """A KL as the tables show it."""
    return "0" if value < 1e-9 else f"{value:.2g}" if value < 0.01 else f"{value:.3f}"


def counted(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def put(page: str, written: str, first: str = BEGIN, last: str = END) -> str:
    """The page with what is between two marks replaced."""
    head, begin, rest = page.partition(first)
    _, end, tail = rest.partition(last)
    if not begin or not end:
        msg = f"{PAGE.name}: the marks are missing around the figures of real models"
        raise ValueError(msg)
    return f"{head}{first}\n\n{written}\n\n{last}{tail}"


def latest(rows: Sequence[Row]) -> list[Row]:
    """The rows of what was measured last of each case."""
    last = {(row["kind"], row["size"], row["seed"]): row["plan"] for row in rows}
    return [row for row in rows if last[row["kind"], row["size"], row["seed"]] == row["plan"]]


def document(rows: Sequence[Row], wording: str) -> Figures:
    """All figures of a set, from the rows of what was measured last of each case."""
    some = latest([row for row in rows if row["set"] == wording])
    sizes = collected(some)
    return {
        "set": wording,
        "model": some[-1]["model"],
        "dtype": some[-1]["dtype"],
        "machine": f"{platform.machine()}, one thread",
        "sizes": sizes,
        "seeds": by_seed(some),
        "chains": chained(some),
        "first_token": {
            name: first_tokens([row for row in some if row.get("processor") == name])
            for name in sorted({row["processor"] for row in some if "processor" in row})
        },
        "undetected": undetected(sizes),
    }


def completed(found: Figures, before: Figures) -> Figures:
    """The figures with those of sizes and of edits in a row that were measured before, not now."""
    if any(found[name] != before[name] for name in ("set", "model", "dtype")):
        return found
    by_size = by_sizes(found, before, ("sizes", "seeds"))
    others = {
        "chains": found["chains"] or before["chains"],
        "first_token": before["first_token"] | found["first_token"],
        "undetected": undetected(by_size["sizes"]),
    }
    return found | by_size | others


def by_sizes(found: Figures, before: Figures, names: Sequence[str]) -> Figures:
    """Figures that are kept by size, with those of sizes that were measured before, not now."""
    both = {name: before[name] | found[name] for name in names}
    return {
        name: {size: some[size] for size in conversations.SIZES if size in some}
        for name, some in both.items()
    }


def write(
    found: Figures, text: str, figures: Path = FIGURES, first: str = BEGIN, last: str = END
) -> None:
    """Write figures to their file, and what they say into its part of the page."""
    figures.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), text, first, last), encoding="utf-8")


def main(path: Path, *, quick: bool, wording: str, dtype: str = DTYPE) -> int:
    """Write figures and page from the rows of a CPU; a quick run, or another dtype, only prints.

    What the rows have nothing of stays as it was measured before.
    """
    rows = [
        row
        for row in Rows(path).by_key.values()
        if row["set"] == wording and row["dtype"] == dtype and "device" not in row
    ]
    quick = quick or dtype != DTYPE
    if not rows:
        print("fidelity: nothing has been measured")
        return 1
    found = document(rows, wording)
    blind = found["undetected"]
    if not quick and FIGURES.exists():
        found = completed(found, json.loads(FIGURES.read_text(encoding="utf-8")))
    text = render(found)
    print(text)
    if not quick and wording == "reporting":
        write(found, text)
    for name in blind:
        size, _, kind = name.partition(" ")
        row = found["sizes"][size]["kinds"][kind]["exact"]
        cases = counted(row["cases"], "conversation")
        print(
            f"fidelity: no control is detected in {name}, over {row['right_full']} answers of "
            f"{cases}: its figures show nothing; measure more of them (--cases, --easy or --long)",
            file=sys.stderr,
        )
    return 1 if blind else 0
