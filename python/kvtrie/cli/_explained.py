"""Shows an explanation, as text or as one JSON document."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.text import Text

from kvtrie.cli._failure import printable

if TYPE_CHECKING:
    import kvtrie
    from kvtrie.cli._prompts import TextTokenizer

_TITLES: Final = {
    "complete": "every whole block is cached",
    "diverged": "other tokens are cached after it",
    "evicted": "it was cached there, and has left",
    "not_cached": "the cache ends there",
    "approximate_only": "the same tokens are cached there, but their KV is approximate",
    "other_namespace": "it continues in another namespace of the same salt",
}


def as_json(why: kvtrie.Explanation, tokenizer: TextTokenizer | None) -> str:
    """The explanation as one JSON document: lengths and positions in tokens."""
    document = {
        "kvtrie": version("kvtrie"),
        **why.to_dict(),
        "text": None if tokenizer is None else _texts(why, tokenizer),
        "message": str(why),
    }
    return json.dumps(document, ensure_ascii=False, indent=2)


def show(why: kvtrie.Explanation, tokenizer: TextTokenizer | None) -> None:
    """Print the explanation, in colour on a terminal without NO_COLOR."""
    # Prompts and files must not count as mark-up.
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    console.print(
        Text.assemble(
            (why.reason, "bold green" if why.reason == "complete" else "bold red"),
            f" at token {why.position}: {_TITLES[why.reason]}",
        )
    )
    blocks = why.num_exact // why.block_size
    console.print(
        f"  exact      {why.num_exact} of {why.num_tokens} tokens, {blocks} "
        f"{'block' if blocks == 1 else 'blocks'} of {why.block_size}"
    )
    if why.reason != "complete":
        before, ours, theirs = _ids(why) if tokenizer is None else _quoted(why, tokenizer)
        for name, after, style in (("cached", theirs, "red"), ("prompt", ours, "green")):
            line = Text(f"  {name}     ").append(before, style="dim")
            line.append(" | ", style="bold").append(after or "(nothing)", style=style)
            console.print(line)
    if why.kinds or why.kinds_before:
        sides = (why.kinds_before, why.kinds)
        kinds = [", ".join(map(printable, side)) or "nothing" for side in sides]
        console.print(f"  tagged     {kinds[0]} | {kinds[1]}")
    if why.other_namespace is not None:
        fields = ", ".join(why.other_namespace.fields)
        console.print(
            f"  elsewhere  {why.other_namespace.num_tokens} tokens match where another "
            f"{fields} is named"
        )
    saved = why.would_save
    console.print(
        f"  a plan     takes {saved.exact} tokens exactly, {saved.approximate} approximately, and "
        f"leaves {saved.compute} to compute"
    )
    if saved.out_of_scope:
        console.print(
            f"  scope      {saved.out_of_scope} of these are cached, but out of scope: neither in "
            "a block of the session, nor after the same first blocks"
        )


def _split(why: kvtrie.Explanation) -> tuple[list[int], list[int], list[int]]:
    """The ids before the position, and those from it on: of the prompt and of the cache."""
    at = why.position - why.context.start
    ours, theirs = why.context.ours.tolist(), why.context.theirs.tolist()
    return ours[:at], ours[at:], theirs[at:]


def _ids(why: kvtrie.Explanation) -> list[str]:
    parts = [" ".join(map(str, ids)) for ids in _split(why)]
    parts[0] = ("... " if why.context.start > 0 else "") + parts[0]
    return parts


def _texts(why: kvtrie.Explanation, tokenizer: TextTokenizer) -> dict[str, str]:
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in _split(why)]
    return dict(zip(("before", "ours", "theirs"), texts, strict=True))


def _quoted(why: kvtrie.Explanation, tokenizer: TextTokenizer) -> list[str]:
    parts = [repr(text) if text else "" for text in _texts(why, tokenizer).values()]
    parts[0] = ("... " if why.context.start > 0 else "") + parts[0]
    return parts
