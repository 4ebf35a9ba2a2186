"""Conversations under a template and each of its switches, and what a change would save."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtrie.lab.kept import keep_reasoning
from kvtrie.lab.measure import LookedUp, ReplayedChat, measure, measure_rendered
from kvtrie.lab.template import Template, TemplateError
from kvtrie.lab.variations import halfway, variations

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtrie.lab.chats import Chat

KEPT: Final = "all reasoning kept in the history"
"""A change that needs another template, or a switch of this one."""

_LEAST_SAVING: Final = 0.01
# The client's side of a saving: what it sends instead.
_INSTEAD: Final = {"date": ("date last", "the time at the end of the question")}


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation with one setting of the template's switches.

    Attributes:
        chat: Its name.
        about: What its client does.
        switch: The arguments that differ from the caller's, or in words what replaces them.
        when: ``""`` for all requests, ``halfway`` for those of the second half, or ``each turn``.
        measured: The turns, or None.
        error: Why there are none, or ``""``.
    """

    chat: str
    about: str
    switch: dict[str, Any]
    measured: ReplayedChat | None
    error: str = ""
    when: str = ""


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
        drops: When the template drops reasoning: ``next user message``, ``next final answer``,
            ``end of the reply`` (it writes none into a prompt) or ``never``; None where the format
            is not known.
        why_unknown: Why the format is not known, or ``""``.
        block_size: Tokens per block.
        min_run: The shortest run that kvtrie moves.
        rows: Every conversation by default, then with each switch, tools, documents and dates that
            change it.
        savings: Changes that make an engine with prefix caching compute at least 1 % less.
        unvaried: Names that the template reads, but of which it does not say the values.
        untried: Names that it reads and that were not tried, because others come first.
    """

    format: str | None
    drops: str | None
    why_unknown: str
    block_size: int
    min_run: int
    rows: tuple[Row, ...]
    savings: tuple[Saving, ...]
    unvaried: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As a JSON document; lengths and positions are in tokens."""
        document = asdict(self)
        for row, shown in zip(self.rows, document["rows"], strict=True):
            if row.measured is not None:
                for turn, one in zip(row.measured.turns, shown["measured"]["turns"], strict=True):
                    one |= {"movable": turn.movable, "computed": turn.computed}
        return document


def study(
    tokenizer: Any,  # noqa: ANN401 - transformers has no types for them
    chats: Sequence[Chat],
    *,
    arguments: Mapping[str, Any] | None = None,
    block_size: int = 16,
    min_run: int = 16,
    step: Callable[[int, int, str], None] | None = None,
) -> TemplateReport:
    """Replay conversations by default and with each switch of the template.

    A conversation that the template refuses has its words in ``Row.error``.

    Args:
        tokenizer: As for ``Template``.
        chats: The conversations.
        arguments: As for ``Template``.
        block_size: As for ``measure``.
        min_run: As for ``measure``.
        step: Called after each conversation with those done, all, and what was done, from the
            first on that the template renders.

    Raises:
        TemplateError: There is no template, or it renders none of the conversations.
        ValueError: As ``measure``.
    """
    template = Template(tokenizer, arguments)
    sizes = block_size, min_run
    switches = list(template.switches(chats))
    planned = _planned(template, chats, switches)
    rows: list[Row] = []
    for at, (set_so, chat, switch, when) in enumerate(planned, 1):
        rows.append(_row(set_so, chat, switch, *sizes, when))
        # A template that renders nothing is one sentence.
        if step is not None and any(row.measured for row in rows):
            named = ", ".join([chat.name, *switch, *filter(None, [when])])
            step(at, len(planned), named)
    default = {row.chat: row for row in rows if not row.switch}
    rows = [row for row in rows if row is default[row.chat] or _differs(row, default[row.chat])]
    if not any(row.measured for row in rows):
        raise TemplateError(rows[0].error if rows else "there is no conversation")
    unvaried = tuple(template.unvaried(chats))
    form = None if template.tagger is None else template.tagger.format
    return TemplateReport(
        format=None if form is None else form.name,
        drops=None if form is None else _drops(form.boundary, rows),
        why_unknown=template.untagged,
        block_size=block_size,
        min_run=min_run,
        rows=tuple(rows),
        savings=_savings(rows, _kept(template, chats, rows, *sizes)),
        unvaried=unvaried,
        untried=tuple(one for one in template.untried(switches) if one not in unvaried),
    )


_DROPS: Final = {
    "user": "next user message",
    "final": "next final answer",
    "never": "never",
}


def _drops(boundary: str, rows: Sequence[Row]) -> str:
    """When reasoning is dropped, of a client that sends it in its own field."""
    turns = [turn for row in rows if row.measured and not row.switch for turn in row.measured.turns]
    # The format's boundary is that of reasoning in the text, if the template reads no field of it.
    if boundary == "never" and any(map(_is_dropped, turns)):
        return "end of the reply"
    return _DROPS[boundary]


def _planned(
    template: Template, chats: Sequence[Chat], switches: Sequence[dict[str, Any]]
) -> list[tuple[Template, Chat, dict[str, Any], str]]:
    """What is replayed: the template, the conversation, and what of both is changed when."""
    nothing: dict[str, Any] = {}
    found = [(template, chat, nothing, "") for chat in chats]
    for switch in switches:
        set_so = Template(template.tokenizer, template.arguments | switch)
        found += [(set_so, chat, switch, "") for chat in chats]
    changes = list(variations(template.used(), template.arguments))
    # One value of each switch, in the middle of a conversation.
    for switch in {next(iter(one)): one for one in reversed(switches)}.values():
        changes += [halfway(name, value) for name, value in switch.items()]
    for one in changes:
        found += [
            (template, one.over(chat), {one.name: one.value}, one.when) for chat in one.among(chats)
        ]
    return found


def _row(
    template: Template,
    chat: Chat,
    switch: dict[str, Any],
    block_size: int,
    min_run: int,
    when: str = "",
) -> Row:
    try:
        found = measure(template, chat, block_size=block_size, min_run=min_run)
    except TemplateError as error:
        return Row(chat.name, chat.about, switch, None, str(error), when)
    return Row(chat.name, chat.about, switch, found, "", when)


def _differs(row: Row, default: Row) -> bool:
    return (row.measured, row.error) != (default.measured, default.error)


def _savings(rows: Sequence[Row], kept: Sequence[Saving]) -> tuple[Saving, ...]:
    default = {row.chat: row.measured for row in rows if not row.switch and row.measured}
    found = []
    for row in rows:
        if row.switch and not row.when and row.measured and row.chat in default:
            change = ", ".join(f"{name}={value}" for name, value in row.switch.items())
            found.append(_saving(row.chat, change, default[row.chat], row.measured))
    for one in kept:
        # A switch that does the same says how.
        if not any(each.chat == one.chat and each.after <= one.after for each in found):
            found.append(one)
    for chat, (other, change) in _INSTEAD.items():
        if chat in default and other in default:
            found.append(_saving(chat, change, default[chat], default[other]))
    return tuple(one for one in found if one.before - one.after >= _LEAST_SAVING * one.before > 0)


def _kept(
    template: Template, chats: Sequence[Chat], rows: Sequence[Row], block_size: int, min_run: int
) -> list[Saving]:
    """What keeping reasoning would save, whether or not the template has a switch for it."""
    default = {row.chat: row.measured for row in rows if not row.switch and row.measured}
    found = []
    for chat in chats:
        before = default.get(chat.name)
        if before is None or not any(_is_dropped(one) for one in before.turns):
            continue
        rendered = [template.render(chat, one) for one in chat.requests]
        kept = keep_reasoning(template, chat, rendered)
        if kept is not None:
            after = measure_rendered(template, chat, kept, block_size=block_size, min_run=min_run)
            found.append(_saving(chat.name, KEPT, before, after))
    return found


def _is_dropped(turn: LookedUp) -> bool:
    return turn.divergence is not None and turn.divergence.cause == "reasoning"


def _saving(chat: str, change: str, before: ReplayedChat, after: ReplayedChat) -> Saving:
    return Saving(
        chat,
        change,
        before.computed_by_prefix,
        after.computed_by_prefix,
        before.prompt,
        after.prompt,
    )
