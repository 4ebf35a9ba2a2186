"""Conversations under a template and each of its switches, and what a change would save."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtrie.lab.measure import ReplayedChat, measure
from kvtrie.lab.template import Template, TemplateError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtrie.lab.chats import Chat

# The client's side of a saving: what it sends instead.
_INSTEAD: Final = {"date": ("date last", "the time at the end of the question")}


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation with one setting of the template's switches.

    Attributes:
        chat: Its name.
        about: What its client does.
        switch: The arguments that differ from the caller's.
        measured: The turns, or None.
        error: Why there are none, or ``""``.
    """

    chat: str
    about: str
    switch: dict[str, Any]
    measured: ReplayedChat | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Saving:
    """Prompt tokens that an engine with prefix caching computes, before and after a change.

    ``prompt_before`` and ``prompt_after`` are all prompt tokens: keeping reasoning makes prompts
    longer.
    """

    chat: str
    change: str
    before: int
    after: int
    prompt_before: int
    prompt_after: int


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """What a template does to the cache.

    Attributes:
        format: The name of the chat format that kvtrie reads in it, or None.
        drops: When the template drops reasoning: ``next user message``, ``next final answer``
            or ``never``; None where the format is not known.
        why_unknown: Why the format is not known, or ``""``.
        block_size: Tokens per block.
        min_run: The shortest run that kvtrie moves.
        rows: Every conversation by default, then with each switch that changes it.
        savings: Changes that make an engine with prefix caching compute less.
    """

    format: str | None
    drops: str | None
    why_unknown: str
    block_size: int
    min_run: int
    rows: tuple[Row, ...]
    savings: tuple[Saving, ...]

    def to_dict(self) -> dict[str, Any]:
        """As a JSON document; lengths and positions are in tokens."""
        return asdict(self)


def study(
    tokenizer: Any,  # noqa: ANN401 - transformers has no types for them
    chats: Sequence[Chat],
    *,
    arguments: Mapping[str, Any] | None = None,
    block_size: int = 16,
    min_run: int = 16,
) -> TemplateReport:
    """Replay conversations by default and with each switch of the template.

    A conversation that the template refuses has its words in ``Row.error``.

    Args:
        tokenizer: As for ``Template``.
        chats: The conversations.
        arguments: As for ``Template``.
        block_size: As for ``measure``.
        min_run: As for ``measure``.

    Raises:
        TemplateError: There is no template, or it renders none of the conversations.
        ValueError: As ``measure``.
    """
    template = Template(tokenizer, arguments)
    switches = [{}, *template.switches(chats)]
    rows: list[Row] = []
    for switch in switches:
        set_so = Template(tokenizer, template.arguments | switch) if switch else template
        for chat in chats:
            row = _row(set_so, chat, switch, block_size, min_run)
            default = next((one for one in rows if one.chat == chat.name), None)
            if default is None or _differs(row, default):
                rows.append(row)
    if not any(row.measured for row in rows):
        raise TemplateError(rows[0].error if rows else "there is no conversation")
    form = None if template.tagger is None else template.tagger.format
    return TemplateReport(
        format=None if form is None else form.name,
        drops=None if form is None else _DROPS[form.boundary],
        why_unknown=template.untagged,
        block_size=block_size,
        min_run=min_run,
        rows=tuple(rows),
        savings=tuple(_savings(rows)),
    )


_DROPS: Final = {
    "user": "next user message",
    "final": "next final answer",
    "never": "never",
}


def _row(
    template: Template, chat: Chat, switch: dict[str, Any], block_size: int, min_run: int
) -> Row:
    try:
        found = measure(template, chat, block_size=block_size, min_run=min_run)
    except TemplateError as error:
        return Row(chat.name, chat.about, switch, None, str(error))
    return Row(chat.name, chat.about, switch, found)


def _differs(row: Row, default: Row) -> bool:
    return (row.measured, row.error) != (default.measured, default.error)


def _savings(rows: Sequence[Row]) -> list[Saving]:
    default = {row.chat: row.measured for row in rows if not row.switch and row.measured}
    found = []
    for row in rows:
        if row.switch and row.measured and row.chat in default:
            change = ", ".join(f"{name}={value}" for name, value in row.switch.items())
            found.append(_saving(row.chat, change, default[row.chat], row.measured))
    for chat, (other, change) in _INSTEAD.items():
        if chat in default and other in default:
            found.append(_saving(chat, change, default[chat], default[other]))
    return [one for one in found if one.after < one.before]


def _saving(chat: str, change: str, before: ReplayedChat, after: ReplayedChat) -> Saving:
    return Saving(
        chat,
        change,
        before.computed_by_prefix,
        after.computed_by_prefix,
        before.prompt,
        after.prompt,
    )
