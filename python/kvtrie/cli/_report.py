"""Shows the figures of a replay, as tables or as one JSON document."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.table import Table
from rich.text import Text

from kvtrie.cli import _output
from kvtrie.cli._failure import printable
from kvtrie.cli._replay import WHY_TOLERANCE
from kvtrie.demo import answer_of

if TYPE_CHECKING:
    from rich.console import Console

    from kvtrie.cli._replay import ConversationResult, DemoResult, TurnResult

_ABOUT_EDITED: Final = (
    "one by one: each prompt drops one more span of reasoning. all at once: the last prompt drops "
    "all reasoning. Policies other than full and exact reuse KV approximately: it still carries "
    "the deleted text. Divergence and agreement compare the replies' tokens with full "
    "recomputation."
)
_LONGEST_SHOWN: Final = 240


def as_json(result: DemoResult) -> str:
    """The replay as one JSON document: times in seconds, lengths in tokens."""
    document = {
        "kvtrie": version("kvtrie"),
        "model": result.model,
        "dtype": result.dtype,
        "device": result.device,
        "threads": result.threads,
        "num_blocks": result.num_blocks,
        "block_size": result.block_size,
        "repeats": result.repeats,
        "conversations": [
            {
                "line": conversation.line,
                "turns": [
                    _turn_document(number, turn)
                    for number, turn in enumerate(conversation.turns, start=1)
                ],
                "edited": [asdict(row) for row in conversation.edited],
                "why_not_edited": conversation.why_not_edited,
            }
            for conversation in result.conversations
        ],
        "summary": {
            "turns": len(result.turns),
            "prompt_tokens": sum(turn.usage.prompt for turn in result.turns),
            "exact": sum(turn.usage.exact for turn in result.turns),
            "computed": sum(turn.usage.computed for turn in result.turns),
            "later_turns_median_ratio": result.later_ratio,
            "later_turns_least_ratio": min((t.ratio for t in result.later_turns), default=None),
            "later_turns_total_ratio": result.later_total_ratio,
            "identical": result.is_identical,
            "within_tolerance": result.is_right,
            "max_logit_difference": max(turn.max_logit_difference for turn in result.turns),
            "why_tolerance": WHY_TOLERANCE,
        },
    }
    return json.dumps(document, ensure_ascii=False, indent=2)


def show(result: DemoResult) -> None:
    console = _output.console()
    console.print(
        Text(
            f"{result.model}, {result.dtype} on {result.device}, {result.threads} threads, "
            f"{result.num_blocks} blocks of {result.block_size} tokens, "
            f"medians of {result.repeats}"
        )
    )
    for conversation in result.conversations:
        _show_answers(console, conversation)
        console.print(_table(conversation))
    console.print(Text(_summary(result)))
    for conversation in result.conversations:
        _show_edited(console, conversation)


def _turn_document(number: int, turn: TurnResult) -> dict[str, Any]:
    return {
        "turn": number,
        "prompt_tokens": turn.usage.prompt,
        "exact": turn.usage.exact,
        "moved": turn.usage.moved,
        "computed": turn.usage.computed,
        "new_tokens": turn.num_new_tokens,
        "finish_reason": turn.finish_reason,
        "seconds_to_first_token": turn.seconds_with_reuse,
        "seconds_to_first_token_without_reuse": turn.seconds_without_reuse,
        "ratio": turn.ratio,
        "identical": turn.is_identical,
        "max_logit_difference": turn.max_logit_difference,
        "tolerance": turn.tolerance,
        "question": turn.question,
        "answer": turn.answer,
        "reference": turn.reference,
        "matches_reference": turn.matches_reference,
    }


def _show_answers(console: Console, conversation: ConversationResult) -> None:
    console.print(Text(f"\nconversation of line {conversation.line}", style="bold"))
    for number, turn in enumerate(conversation.turns, start=1):
        console.print(Text(f"{number:3} ? {_shortened(turn.question)}", style="dim"))
        recorded = _shortened(turn.reference or "")
        mark = {True: " (as recorded)", False: f" (recorded: {recorded})", None: ""}
        answer = _shortened(answer_of(turn.answer)) or _shortened(turn.answer) or "(nothing)"
        console.print(Text(f"    > {answer}{mark[turn.matches_reference]}"))


def _shortened(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= _LONGEST_SHOWN else line[: _LONGEST_SHOWN - 3] + "..."


def _table(conversation: ConversationResult) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("turn", justify="right", no_wrap=True)
    for name in (
        "prompt\ntokens",
        "exact\nhit",
        "\ncomputed",
        "first token\nwith reuse",
        "\nwithout",
        "\nratio",
        "same\nanswer",
        "max logit\ndifference",
        "\ntolerance",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for number, turn in enumerate(conversation.turns, start=1):
        table.add_row(
            str(number),
            str(turn.usage.prompt),
            str(turn.usage.exact),
            str(turn.usage.computed),
            f"{turn.seconds_with_reuse * 1e3:.1f} ms",
            f"{turn.seconds_without_reuse * 1e3:.1f} ms",
            f"{turn.ratio:.1f}x",
            "yes" if turn.is_identical else "NO",
            f"{turn.max_logit_difference:.1e}",
            f"{turn.tolerance:.1e}",
        )
    return table


def _show_edited(console: Console, conversation: ConversationResult) -> None:
    head = f"\nconversation of line {conversation.line}, earlier reasoning deleted"
    console.print(Text(head, style="bold"))
    if conversation.why_not_edited is not None:
        console.print(Text(f"not replayed: {conversation.why_not_edited}"))
        return
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("\nhistory", "\npolicy"):
        table.add_column(name, no_wrap=True)
    for name in (
        "prompt\ntokens",
        "\nexact",
        "\nmoved",
        "\ncomputed",
        "first token\nof the last",
        "mean KL\n(nats)",
        "top-1\nagrees",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in conversation.edited:
        table.add_row(
            row.shape,
            row.policy,
            str(row.prompt),
            str(row.exact),
            str(row.moved),
            f"{row.computed} ({row.computed / row.prompt:.1%})",
            f"{row.seconds * 1e3:.1f} ms",
            f"{row.kl_mean:.1e}",
            f"{row.top1:.1%}",
        )
    console.print(table)
    question = _shortened(conversation.turns[-1].question)
    console.print(Text(f"answers to the last question ({question})", style="dim"))
    for (shape, answer), names in _same_answers(conversation).items():
        console.print(Text(f"{shape} > {answer} ({', '.join(names)})"))
    console.print(Text(_ABOUT_EDITED))


def _same_answers(conversation: ConversationResult) -> dict[tuple[str, str], list[str]]:
    """The policies that give each answer, by history and answer."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in conversation.edited:
        answer = _shortened(answer_of(row.answer)) or _shortened(row.answer) or "(nothing)"
        found.setdefault((row.shape, answer), []).append(row.policy)
    return found


def _summary(result: DemoResult) -> str:
    prompt = sum(turn.usage.prompt for turn in result.turns)
    exact = sum(turn.usage.exact for turn in result.turns)
    lines = [f"found {exact} of {prompt} prompt tokens ({exact / prompt:.1%})"]
    if result.later_ratio is not None:
        later = result.later_turns
        lines.append(
            f"later turns: time to first token {result.later_ratio:.1f}x shorter (median of "
            f"{len(later)}, least {min(turn.ratio for turn in later):.1f}x, "
            f"all together {result.later_total_ratio:.1f}x)"
        )
    same = sum(turn.is_identical for turn in result.turns)
    lines.append(f"answers identical to a run without cache: {same} of {len(result.turns)}")
    lines.append(f"tolerance: {WHY_TOLERANCE}")
    return "\n".join(lines)
