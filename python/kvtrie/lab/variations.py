"""What clients change besides messages: tools, documents and dates, and a switch on the way.

Each is tried only where the template reads it, and on the built-in conversations that it is typical
of, or on all of a user's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import permutations
from random import Random
from typing import TYPE_CHECKING, Any, Final

from kvtrie.calibrate import texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvtrie.lab.chats import Chat
    from kvtrie.lab.switches import Use

HALFWAY: Final = "halfway"
EACH_TURN: Final = "each turn"

_FIRST_DAY: Final = datetime(2026, 11, 22, 10, 7, tzinfo=UTC)
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "list_places",
        "description": "List the places that have a note.",
        "parameters": {
            "type": "object",
            "properties": {"first": {"type": "string", "description": "Where to begin."}},
            "required": [],
        },
    },
}


@dataclass(frozen=True, slots=True)
class Variation:
    """One change of what is sent with the messages.

    Attributes:
        name: What is changed, as the template calls it.
        value: To what, in words or as a value.
        when: ``""`` for the whole conversation, ``halfway`` or ``each turn``.
        chats: The built-in conversations that it is tried on.
        of: What the request at an index sends instead, of a conversation.
    """

    name: str
    value: Any
    when: str
    chats: tuple[str, ...]
    of: Callable[[Chat, int], Mapping[str, Any]]

    def over(self, chat: Chat) -> Chat:
        """The conversation with the change."""
        requests = tuple(
            replace(one, arguments={**one.arguments, **self.of(chat, at)})
            for at, one in enumerate(chat.requests)
        )
        return replace(chat, requests=requests)

    def among(self, chats: Sequence[Chat]) -> list[Chat]:
        """The conversations that it is tried on."""
        return [one for one in chats if one.name in self.chats] or list(chats)


def is_date(name: str) -> bool:
    """Whether a name is of a date that the client passes."""
    return bool({"date", "today"} & set(name.split("_")))


def variations(used: Mapping[str, Use], given: Mapping[str, Any]) -> Iterator[Variation]:
    """All that a template can see.

    Args:
        used: The names that it reads.
        given: What the caller passes; it is not varied.
    """
    names = used.keys() - given.keys()
    if "tools" in names:
        yield Variation("tools", "one", "", ("chat", "reasoning"), _with_a_tool)
        yield Variation("tools", "one more", HALFWAY, ("chat", "agent"), _one_more_tool)
    if "documents" in names:
        yield Variation("documents", "four", "", ("chat",), lambda _chat, _at: _documents(0))
        yield Variation(
            "documents", "reordered", EACH_TURN, ("chat",), lambda _chat, at: _documents(at)
        )
    if "strftime_now" in names:
        yield Variation(
            "strftime_now",
            "a day later",
            EACH_TURN,
            ("chat", "agent"),
            lambda _chat, at: {"strftime_now": _day(at).strftime},
        )
    for name in sorted(filter(is_date, names)):
        yield Variation(
            name,
            "a day later",
            EACH_TURN,
            ("chat", "agent"),
            lambda _chat, at, name=name: {name: _day(at).strftime("%d %b %Y")},  # type: ignore[misc] # bound at once
        )


def halfway(name: str, value: Any) -> Variation:  # noqa: ANN401 - of any switch
    """A switch that is set in the second half of a conversation."""
    return Variation(
        name,
        value,
        HALFWAY,
        ("chat", "reasoning", "agent"),
        lambda chat, at: {name: value} if _is_late(chat, at) else {},
    )


def _is_late(chat: Chat, at: int) -> bool:
    return 2 * at >= len(chat.requests) > 1


def _with_a_tool(chat: Chat, _at: int) -> Mapping[str, Any]:
    return {} if chat.tools else {"tools": [_TOOL]}


def _one_more_tool(chat: Chat, at: int) -> Mapping[str, Any]:
    return {"tools": [*chat.tools, _TOOL]} if _is_late(chat, at) else {}


def _documents(turn: int) -> Mapping[str, Any]:
    places = texts.places(Random("documents"), 4)
    found = [
        {"doc_id": str(number), "title": one.name, "text": one.note}
        for number, one in enumerate(places, 1)
    ]
    # 24 turns before an order comes again.
    orders = list(permutations(found))
    return {"documents": list(orders[5 * turn % len(orders)])}


def _day(turn: int) -> datetime:
    return _FIRST_DAY + timedelta(days=turn)
