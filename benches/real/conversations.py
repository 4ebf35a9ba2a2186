"""Conversations over real text, edited in the ways that clients edit them.

A conversation reads sections of text, each with one fact that a small model can quote. Its earlier
replies are recorded from the model. Each kind of edit gives the contexts that are cached when the
edited prompt comes, the prompt, and a reply that quotes the facts which are in the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from real.recorded import Passage

Message = dict[str, Any]

PLACES: Final = (
    "harbor garden mill tower bridge library station castle museum market bakery theater hospital "
    "school temple stadium airport kitchen cellar attic chapel forge stable lighthouse"
).split()
VALUES: Final = (
    "copper velvet falcon marble thunder lemon basket candle pepper rocket".split(),
    "Alice Robert Maria Henry Laura Peter Helen Frank Julia Nancy".split(),
    "red blue green yellow purple orange black white brown pink".split(),
    "Paris London Berlin Madrid Rome Vienna Tokyo Boston Chicago Sydney".split(),
    "lion horse tiger rabbit eagle dolphin monkey camel bear wolf".split(),
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "apple banana cherry grape melon peach pear mango coconut walnut".split(),
    "piano violin guitar trumpet flute drum harp cello banjo organ".split(),
)
"""What facts are about: a code word, a keeper, and so on, as in ``Wording.facts``."""


@dataclass(frozen=True, slots=True)
class Wording:
    """How a set of conversations says things; the sets share neither wordings nor seeds.

    Attributes:
        facts: What is said of a place, for each of ``VALUES``.
        fact: A sentence with such a thing, a place and a value.
        section: What introduces a section.
        system: The system prompt, with a mark for a date or nonce.
        question: The last user message, which asks about one place.
        earlier: A question of the turn before.
        notice: What replaces a result that was cleared.
    """

    facts: tuple[str, ...]
    fact: str
    section: str
    system: str
    question: str
    earlier: str
    notice: str


WORDINGS: Final = {
    "tuning": Wording(
        ("password", "owner", "paint", "birthplace", "pet", "holiday", "fruit", "music"),
        "Remember that in the {1} the {0} is {2}.",
        "Text about the {}:\n{}",
        "{}You read texts for the user and answer from them.",
        "Please say in two sentences what the text about the {} explains, then quote what each "
        "text says about its place.",
        "Which text is the longest, the one about the {}?",
        "[removed]",
    ),
    "reporting": Wording(
        ("code word", "keeper", "color", "city", "animal", "day", "dessert", "instrument"),
        "Note: The {1} {0} is {2}.",
        "Section {}:\n{}",
        "{}You are a careful assistant. Use only the sections that you were given.",
        "What does the {} section say? Give a short summary, and list the facts of all sections.",
        "Is the {} section about software?",
        "[Old tool result cleared]",
    ),
}

SETS: Final = {"tuning": 10_000, "reporting": 20_000}
"""The first seed of each set."""


@dataclass(frozen=True, slots=True)
class Section:
    """A place, its text with the fact, what the model said to it, and the fact in two parts.

    ``reply`` is what it said to the first passage of the text, ``replies`` to each of them.
    """

    place: str
    text: str
    reply: str
    replies: str
    reasoning: str
    stem: str
    value: str


@dataclass(frozen=True, slots=True)
class Case:
    """One edit.

    Attributes:
        kind: See ``KINDS``.
        contexts: Conversations that are cached, as messages; the last is a reply where it was kept.
        prompt: The edited conversation.
        facts: Sentences to quote, each without its value, and the value.
    """

    kind: str
    contexts: tuple[tuple[Message, ...], ...]
    prompt: tuple[Message, ...]
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Size:
    """How long the prompts are.

    Attributes:
        tokens: About how many tokens, as tables name it.
        sections: Sections of a conversation.
        passages: Passages of a section.
        cleared: Sections of a conversation some of which are cleared. Before the edit it must fit
            into the model's context.
        pieces: Recorded reasonings that make one round's reasoning.
    """

    tokens: str
    sections: int
    passages: int
    cleared: int
    pieces: int = 1


SIZES: Final = {
    "1k": Size("1k", 7, 1, 11),
    "4k": Size("4k", 8, 4, 12),
    "7k": Size("7k", 8, 7, 7, 2),
}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool(text: str) -> Message:
    return {"role": "tool", "content": text}


def reply(text: str, reasoning: str = "") -> Message:
    message: Message = {"role": "assistant", "content": text}
    return message | {"reasoning_content": reasoning} if reasoning else message


class Writer:
    """Draws the parts of one conversation from its seed."""

    def __init__(self, passages: Sequence[Passage], wording: str, seed: int, size: Size) -> None:
        self.rng = Random(seed)
        self.wording = WORDINGS[wording]
        self.size = size
        self._passages = self.rng.sample(list(passages), len(passages))
        self._places = self.rng.sample(PLACES, len(PLACES))
        self._kinds = self.rng.sample(range(len(VALUES)), len(VALUES))
        self._values = [self.rng.sample(values, len(values)) for values in VALUES]
        self._drawn = 0

    def section(self) -> Section:
        at = self._drawn
        self._drawn += 1
        first = at * self.size.passages
        some = [
            self._passages[n % len(self._passages)]
            for n in range(first, first + self.size.passages)
        ]
        place, kind = self._places[at], self._kinds[at % len(VALUES)]
        value = self._values[kind][(at // len(VALUES)) % len(self._values[kind])]
        sentence = self.wording.fact.format(self.wording.facts[kind], place, value)
        sentences = " ".join(one.text for one in some).split(". ")
        sentences.insert(
            self.rng.randint(len(sentences) // 3, len(sentences) - 1), sentence.rstrip(".")
        )
        # Said twice, so that a small model is sure of it.
        sentences.append(sentence)
        return Section(
            place=place,
            text=self.wording.section.format(place, ". ".join(sentences)),
            reply=some[0].reply,
            replies=" ".join(one.reply for one in some),
            reasoning=" ".join(one.reasoning for one in some[: self.size.pieces]),
            stem=sentence.partition(": " if ": " in sentence else "that ")[2].removesuffix(
                f" {value}."
            ),
            value=f" {value}",
        )

    def sections(self, number: int | None = None) -> list[Section]:
        return [self.section() for _ in range(number or self.size.sections)]

    def system(self, head: str = "") -> Message:
        return {"role": "system", "content": self.wording.system.format(head)}

    def asks(self, sections: Sequence[Section]) -> Message:
        return user(self.wording.question.format(self.rng.choice(sections).place))

    def asked_before(self, sections: Sequence[Section]) -> Message:
        return user(self.wording.earlier.format(self.rng.choice(sections).place))


def _case(
    kind: str,
    contexts: Sequence[Sequence[Message]],
    prompt: Sequence[Message],
    kept: Sequence[Section],
) -> Case:
    return Case(
        kind,
        tuple(tuple(one) for one in contexts),
        tuple(prompt),
        tuple((one.stem, one.value) for one in kept),
    )


# --- tool loops -----------------------------------------------------------------------------------


def _loop(
    writer: Writer,
    sections: Sequence[Section],
    thinks: Callable[[int], bool],
    *,
    says: bool = False,
) -> list[Message]:
    """A question, then for each section a call and its result, then the reply.

    With ``says`` each call but the first comes after what the model said to the result before, so
    that messages have about a quarter of the results' length, as in W12's agent.
    """
    messages = [writer.system(), user(f"Read the {len(sections)} sections, one after the other.")]
    for number, one in enumerate(sections):
        said = f"{sections[number - 1].replies} " if says and number else ""
        call = f"{said}Reading the {one.place}."
        messages.append(reply(call, one.reasoning if thinks(number) else ""))
        messages.append(tool(one.text))
    messages.append(
        reply(sections[-1].reply, sections[0].reasoning if thinks(len(sections)) else "")
    )
    return messages


def strip_one(writer: Writer) -> Case:
    """W01: one reasoning before everything is dropped."""
    sections = writer.sections()
    run = _loop(writer, sections, lambda number: number == 0)
    return _case("strip one", [run], [*run, writer.asks(sections)], sections)


def strip_all(writer: Writer) -> Case:
    """W03 and W11: the reasoning of every round is dropped at once."""
    sections = writer.sections()
    run = _loop(writer, sections, lambda _: True)
    return _case("strip all", [run], [*run, writer.asks(sections)], sections)


def _cleared(writer: Writer, kind: str, cleared: Callable[[int, int], bool]) -> Case:
    sections = writer.sections(writer.size.cleared)
    run = _loop(writer, sections, lambda _: False, says=True)
    kept = [one for at, one in enumerate(sections) if not cleared(at, len(sections))]
    gone = {one.text for one in sections if one not in kept}
    after = [
        tool(writer.wording.notice) if one["role"] == "tool" and one["content"] in gone else one
        for one in run
    ]
    return _case(kind, [run], [*after, writer.asks(kept)], kept)


def stub(writer: Writer) -> Case:
    """W12: all results but three are replaced by notices."""
    return _cleared(writer, "stub", lambda at, number: at < number - 3)


def prune(writer: Writer) -> Case:
    """W13: four results are replaced by notices; here every other one."""
    return _cleared(writer, "prune", lambda at, _: at % 2 == 0)


# --- chats ----------------------------------------------------------------------------------------


def _chat(writer: Writer, sections: Sequence[Section], head: str = "") -> list[Message]:
    messages = [writer.system(head)]
    for one in sections:
        messages += [user(one.text), reply(one.reply)]
    return messages


def window(writer: Writer) -> Case:
    """W15: the oldest exchange leaves the context."""
    sections = writer.sections()
    chat = _chat(writer, sections)
    return _case("window", [chat], [chat[0], *chat[3:], writer.asks(sections[1:])], sections[1:])


def date(writer: Writer) -> Case:
    """W16: the date in the head changes."""
    sections = writer.sections()
    before, after = (_chat(writer, sections, f"Today is 2026-03-{day}. ") for day in (14, 25))
    return _case("date", [before], [*after, writer.asks(sections)], sections)


def nonce(writer: Writer) -> Case:
    """W17: the nonce in the head changes, and its length in tokens."""
    sections = writer.sections()
    before, after = (_chat(writer, sections, f"Request {one}. ") for one in ("7f3a91c2", "b04e"))
    return _case("nonce", [before], [*after, writer.asks(sections)], sections)


# --- documents ------------------------------------------------------------------------------------


def _read(system: Message, sections: Sequence[Section]) -> Message:
    return system | {"content": "\n\n".join([system["content"], *(one.text for one in sections)])}


def _documents(writer: Writer, sections: Sequence[Section], question: Message) -> list[Message]:
    return [_read(writer.system(), sections), question]


def drop(writer: Writer) -> Case:
    """W20: one document is dropped."""
    sections = writer.sections()
    before = [
        *_documents(writer, sections, writer.asked_before(sections)),
        reply(sections[0].reply),
    ]
    kept = [one for one in sections if one is not sections[len(sections) // 3]]
    return _case("drop", [before], _documents(writer, kept, writer.asks(kept)), kept)


def reorder(writer: Writer) -> Case:
    """W19: the documents come in another order."""
    sections = writer.sections()
    before = [
        *_documents(writer, sections, writer.asked_before(sections)),
        reply(sections[0].reply),
    ]
    order = writer.rng.sample(sections, len(sections))
    return _case("reorder", [before], _documents(writer, order, writer.asks(order)), order)


def assembled(writer: Writer) -> Case:
    """The documents are cached by other conversations, two of each."""
    sections = writer.sections()
    order = writer.rng.sample(sections, len(sections))
    contexts = []
    for at in range(0, len(order), 2):
        some = [writer.section(), *order[at : at + 2]]
        question = writer.asked_before(some)
        head = _read(writer.system(f"User {at + 1}. "), some)
        contexts.append([head, question, reply(some[0].reply)])
    return _case(
        "assembled", contexts, _documents(writer, sections, writer.asks(sections)), sections
    )


KINDS: Final[dict[str, Callable[[Writer], Case]]] = {
    "strip one": strip_one,
    "strip all": strip_all,
    "stub": stub,
    "prune": prune,
    "reorder": reorder,
    "assembled": assembled,
    "drop": drop,
    "window": window,
    "date": date,
    "nonce": nonce,
}
HARD: Final = ("strip one", "strip all", "stub", "prune", "reorder", "assembled")
EASY: Final = ("drop", "window", "date", "nonce")
FROM_OTHERS: Final = ("assembled",)
"""Kinds whose text is cached by other conversations."""

IDS: Final = {
    "strip one": "W01",
    "strip all": "W03, W11",
    "stub": "W12",
    "prune": "W13",
    "window": "W15",
    "date": "W16",
    "nonce": "W17",
    "reorder": "W19",
    "drop": "W20",
    "assembled": "other conversations",
}


def ten_edits(writer: Writer, steps: int = 10) -> list[Case]:
    """A sliding window over a chat with reasoning, one case per step.

    At each step the oldest exchange leaves, the last reply loses its reasoning, and a section
    comes. The context of a step is the prompt of the step before with its reply; the KV of all but
    the first context is what the step before left, so errors add up.
    """
    length = writer.size.sections
    sections = writer.sections(length + steps)
    found = []
    before: list[Message] = []
    for step in range(steps + 1):
        shown = sections[step : step + length]
        prompt = [writer.system()]
        for one in shown[:-1]:
            prompt += [user(one.text), reply(one.reply)]
        last = shown[-1]
        prompt.append(user(last.text))
        if before:
            found.append(_case("ten", [before], prompt, shown))
        before = [*prompt, reply(last.reply, last.reasoning)]
    return found
