"""The shipped edits: what clients do to a history before they send it again, seeded.

Each makes conversations whose last prompt is an edited one. Which kind a reply is of follows from
its plan (`kvtrie.calibrate.kinds`), not from the edit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Final

from kvtrie.calibrate import texts

if TYPE_CHECKING:
    from collections.abc import Callable

Messages = list[dict[str, Any]]

SYSTEM: Final = "You reply to questions about the notes. Reply with what the notes say."
STUB: Final = "[removed]"


@dataclass(frozen=True, slots=True)
class EditedPrompt:
    """One prompt of a case.

    Attributes:
        messages: The messages.
        reply: The reply that is cached after it, or None.
        conversation: Its conversation; those of other numbers are others'.
        is_measured: Whether its reply is measured.
    """

    messages: Messages
    reply: str | None = None
    conversation: int = 0
    is_measured: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One conversation of an edit.

    Attributes:
        prompts: In order of arrival.
        is_chain: Whether a measured prompt follows on approximate KV, so that every policy needs
            a cache of its own.
    """

    prompts: list[EditedPrompt] = field(default_factory=list)
    is_chain: bool = False


def case(edit: str, seed: int) -> Case:
    """One conversation of an edit, which depends on the arguments alone.

    Args:
        edit: One of ``EDITS``.
        seed: The seed.
    """
    return EDITS[edit](Random(f"{edit} {seed}"))


def _system(first: str = "") -> dict[str, Any]:
    return {"role": "system", "content": f"{first} {SYSTEM}".strip()}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _notes(notes: list[str], question: str) -> dict[str, Any]:
    return _user("\n\n".join([*notes, question]))


def _read(notes: list[str]) -> dict[str, Any]:
    """The notes before the first message: nothing is moved into the last one."""
    return _system("\n\n".join([*notes, ""]))


def _nonce(rng: Random) -> Case:
    """The first line, a short or a long one, changes with every request."""
    found = texts.places(rng, 5)
    length = rng.randint(1, 3)
    before, after = (" ".join(texts.nonce(rng) for _ in range(length)) for _ in range(2))
    asked, again = rng.sample(found, 2)
    history = [_notes([one.note for one in found], asked.question(rng))]
    longer = [*history, _assistant(asked.answer), _user(again.question(rng))]
    return Case(
        [
            EditedPrompt([_system(before), *history], asked.answer),
            EditedPrompt([_system(after), *longer], is_measured=True),
        ]
    )


def _exchanges(rng: Random, count: int, musings: int = 0) -> tuple[Messages, Messages]:
    """Exchanges with a note each, as written and without reasoning."""
    written: Messages = []
    sent: Messages = []
    for one in texts.places(rng, count):
        asked = _notes([one.note], one.question(rng))
        reasoning = texts.musing(rng, musings)
        written += [asked, _assistant(f"{reasoning}\n\n{one.answer}".strip())]
        sent += [asked, _assistant(one.answer)]
    return written, sent


def _last(rng: Random, sent: Messages) -> dict[str, Any]:
    """A question about a note of one of the later exchanges."""
    return _once_more(sent[rng.randrange(2, len(sent), 2) + 1]["content"])


def _once_more(answer: str) -> dict[str, Any]:
    name = answer.partition(" was opened")[0]
    return _user(f"Once more: when was {name[0].lower()}{name[1:]} opened, and who planned it?")


def _whole(history: Messages) -> EditedPrompt:
    """A history as it was cached: up to its last reply, with this reply."""
    return EditedPrompt([_system(), *history[:-1]], history[-1]["content"])


def _window(rng: Random) -> Case:
    """The oldest exchanges leave, one to three."""
    num_gone = rng.randint(1, 3)
    history, _ = _exchanges(rng, 4 + num_gone)
    kept = history[2 * num_gone :]
    return Case(
        [_whole(history), EditedPrompt([_system(), *kept, _last(rng, kept)], is_measured=True)],
    )


def _reasoning(rng: Random) -> Case:
    """The reasoning of the last reply leaves."""
    history, _ = _exchanges(rng, 4)
    written, sent = _exchanges(rng, 1, musings=6)
    asked = _last(rng, [*history, *sent])
    return Case(
        [
            _whole([*history, *written]),
            EditedPrompt([_system(), *history, *sent, asked], is_measured=True),
        ]
    )


def _reasonings(rng: Random) -> Case:
    """The reasoning of all replies leaves at once: little of what was said, or most."""
    written, sent = _exchanges(rng, rng.randint(3, 5), musings=rng.choice((3, 8, 16)))
    return Case(
        [_whole(written), EditedPrompt([_system(), *sent, _last(rng, sent)], is_measured=True)]
    )


def _loop(rng: Random) -> Case:
    """The same after more replies, with the less reasoning in each: steps of an agent."""
    count, musings = rng.choice(((7, 12), (10, 6), (16, 2)))
    written, sent = _exchanges(rng, count, musings)
    return Case(
        [_whole(written), EditedPrompt([_system(), *sent, _last(rng, sent)], is_measured=True)]
    )


def _prune(rng: Random) -> Case:
    """All notes but the last two become stubs, and perhaps the first stays: what was said stays."""
    history, _ = _exchanges(rng, rng.choice((5, 8, 12)))
    pruned = [dict(one) for one in history]
    for number in range(rng.choice((0, 2)), len(pruned) - 4, 2):
        question = pruned[number]["content"].rpartition("\n\n")[2]
        pruned[number] = _notes([STUB], question)
    asked = _last(rng, pruned)
    return Case([_whole(history), EditedPrompt([_system(), *pruned, asked], is_measured=True)])


def _reorder(rng: Random) -> Case:
    """The same notes come in another order, or the last two change places."""
    found = texts.places(rng, 6)
    asked, again = rng.sample(found, 2)
    other = rng.choice((rng.sample(found, len(found)), [*found[:4], found[5], found[4]]))
    return Case(
        [
            EditedPrompt(
                [_read([one.note for one in found]), _user(asked.question(rng))], asked.answer
            ),
            EditedPrompt(
                [_read([one.note for one in other]), _user(again.question(rng))], is_measured=True
            ),
        ]
    )


def _assembled(rng: Random) -> Case:
    """Notes that other conversations have cached, in pairs."""
    found = texts.places(rng, 6)
    prompts = []
    for number in range(0, len(found), 2):
        pair = found[number : number + 2]
        read = [_read([one.note for one in pair]), _user(pair[0].question(rng))]
        prompts.append(EditedPrompt(read, pair[0].answer, conversation=number + 1))
    asked = rng.choice(found)
    order = rng.sample(found, len(found))
    read = [_read([one.note for one in order]), _user(asked.question(rng))]
    return Case([*prompts, EditedPrompt(read, is_measured=True)])


def _afterwards(rng: Random) -> Case:
    """The turn after an edit that has moved notes: their KV is approximate, and in place."""
    first = rng.choice((_window, _reasonings))(rng)
    sent = first.prompts[-1].messages[:-1]
    # Of two exchanges: a question asked twice is answered in either way.
    reply, other = (sent[one]["content"] for one in rng.sample(range(4, len(sent), 2), 2))
    before = [*sent, _once_more(reply)]
    later = [*before, _assistant(reply), _once_more(other)]
    return Case(
        [first.prompts[0], EditedPrompt(before, reply), EditedPrompt(later, is_measured=True)],
        is_chain=True,
    )


def _ten(rng: Random) -> Case:
    """Ten replies in a row lose their reasoning, each before the next prompt."""
    found = texts.places(rng, 3)
    sent = [_notes([one.note for one in found], found[0].question(rng))]
    asked = found[0]
    prompts = []
    for _ in range(10):
        reply = f"{texts.musing(rng, 2)}\n\n{asked.answer}"
        prompts.append(EditedPrompt([_system(), *sent], reply))
        sent = [*sent, _assistant(asked.answer)]
        asked = rng.choice(found)
        sent.append(_user(asked.question(rng)))
    return Case([*prompts, EditedPrompt([_system(), *sent], is_measured=True)], is_chain=True)


RARELY: Final = {"ten": 4}
"""Edits that take a turn in one round of so many: their conversations are long."""

EDITS: Final[dict[str, Callable[[Random], Case]]] = {
    "nonce": _nonce,
    "window": _window,
    "reasoning": _reasoning,
    "reasonings": _reasonings,
    "loop": _loop,
    "prune": _prune,
    "reorder": _reorder,
    "assembled": _assembled,
    "afterwards": _afterwards,
    "ten": _ten,
}
"""The shipped edits."""
