"""The synthetic recall task that the demo model is trained on: seeded multi-turn conversations.

A clerk keeps an archive. People get numbers (one more than a digit or than somebody else's number,
0 after 9), and boxes are on shelves, which a tool finds. Later turns ask for what earlier turns
settled. The number of a person is only in the clerk's own earlier reply, not in a user message or a
tool result.

Standard library only. Every conversation is a function of its seed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

HELD_OUT = 1_000_000_000  # seeds from here on are never trained on

PEOPLE = (
    "Ada Amir Anna Boris Carla Chen Clara David Diego Elena Emil Farah Felix Greta Hana Hugo Ines "
    "Ivan Jonas Julia Karim Laura Leo Lina Lucas Maya Mila Mira Nadia Noah Nora Omar Oscar Petra "
    "Priya Rosa Samir Sofia Tomas Vera Yuki Zoe"
).split()
BOXES = (
    "badger beetle camel condor crane dolphin eagle falcon fox heron ibis jackal koala lemur lynx "
    "magpie marten mole newt otter owl panda puffin quail rabbit raven robin salmon seal sparrow "
    "stork swan tiger toad trout turtle viper weasel wolf zebra"
).split()
SHELVES = (
    "north south east west upper lower middle front back left right corner window door cellar "
    "attic garden stair river bridge"
).split()

RULES = (
    "You are the clerk of a small archive.",
    "People get a number, and boxes stand on a shelf.",
    "A new number is one more than the one that is named, and 0 comes after 9.",
    "Use the tool to find the shelf of a box, and do not guess.",
    "Think before you answer, and keep your thoughts short.",  # codespell:ignore thoughts: learnt
    "Nobody but you writes the numbers down, so look at your own earlier answers.",
)

_WORDS = (
    "a about after again all and any are as at bird boat book bread but by chair child city "
    "clock cold come could day dog down early evening every few field first flower for from "
    "garden glass go good green had has have he her here hill his house how I if in into is it "
    "its just kitchen know lake lamp last late letter light like little long made make man many "
    "more morning most mountain much my new next night no not now of often old on one only or "
    "other our out paper people place quiet rain road room said sea see she ship small snow so "
    "some song star stone street summer sun table tea than that the their then there they thing "
    "this time to today town train tree under up very village visitor voice walk want was water "
    "we well went were what when where which white who wind winter with word work year yes you "
    "young your"
).split()
_LETTERS = "abcdefghijklmnopqrstuvwxyzäöüßéñ0123456789-'木水дж"

TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "find_box",
            "description": "Find the shelf of a box.",
            "parameters": {
                "type": "object",
                "properties": {"box": {"type": "string"}},
                "required": ["box"],
            },
        },
    },
)


@dataclass(frozen=True)
class Step:
    """One assistant reply of a conversation, and what comes before it.

    Attributes:
        given: Messages that are appended before the reply (user, recorded tool call, tool result).
        kind: Which sort of question this is; accuracy is reported per kind.
        reasoning: The text between the think markers.
        answer: The text after them.
    """

    given: tuple[dict[str, Any], ...]
    kind: str
    reasoning: str
    answer: str

    @property
    def reply(self) -> str:
        return think(self.reasoning) + self.answer


@dataclass
class Draft:
    """A conversation that is being written: the steps so far, and what they settled."""

    rng: Random
    steps: list[Step] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    shelves: dict[str, str] = field(default_factory=dict)
    system: str = ""

    def messages(self) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        if self.system:
            out.append({"role": "system", "content": self.system})
        for step in self.steps:
            out.extend(step.given)
            out.append({"role": "assistant", "content": step.reply})
        return out


def think(reasoning: str) -> str:
    return f"<think>\n{reasoning}\n</think>\n\n"


def answer_of(content: str) -> str:
    return content.rpartition("</think>")[2].lstrip("\n")


def chatter(rng: Random, num_sentences: int) -> str:
    """Sentences without meaning for the task, some of their words unknown."""
    return " ".join(_sentence(rng) for _ in range(num_sentences))


def _sentence(rng: Random) -> str:
    words = [rng.choice(_WORDS) for _ in range(rng.randint(4, 12))]
    for at in range(len(words)):
        if rng.random() < 0.1:
            words[at] = "".join(rng.choice(_LETTERS) for _ in range(rng.randint(1, 9)))
    text = " ".join(words)
    return text[:1].upper() + text[1:] + rng.choice("...!?")


def _user(rng: Random, request: str, noise: int) -> dict[str, Any]:
    before = rng.randint(0, noise)
    parts = (chatter(rng, before), request, chatter(rng, rng.randint(0, noise - before)))
    return {"role": "user", "content": " ".join(part for part in parts if part)}


def _make(draft: Draft, person: str, noise: int) -> Step:
    rng = draft.rng
    start = rng.randrange(10)
    request = rng.choice(
        (
            f"Please give a number to {person}, one more than {start}.",
            f"A number for {person}, one more than {start}, please.",
        )
    )
    number = draft.numbers[person] = (start + 1) % 10
    reasoning = f"One more than {start} is {number}."
    return Step((_user(rng, request, noise),), "make", reasoning, f"That is {person} {number}.")


def _chain(draft: Draft, person: str, noise: int) -> Step:
    rng = draft.rng
    other = rng.choice(sorted(draft.numbers))
    start = draft.numbers[other]
    request = f"Please give a number to {person}, one more than {other}."
    number = draft.numbers[person] = (start + 1) % 10
    reasoning = f"I see {other} {start}. One more than {start} is {number}."
    return Step((_user(rng, request, noise),), "chain", reasoning, f"That is {person} {number}.")


def _find(draft: Draft, box: str, noise: int) -> Step:
    rng = draft.rng
    shelf = draft.shelves[box] = rng.choice(SHELVES)
    request = rng.choice((f"Please look for the box {box}.", f"Find the box {box}, please."))
    call = {"name": "find_box", "arguments": json.dumps({"box": box})}
    serial = f"call_{len(draft.shelves)}"
    lines = (chatter(rng, rng.randint(0, noise)), f"found {box} {shelf}", chatter(rng, noise // 2))
    given = (
        _user(rng, request, noise // 2),
        {
            "role": "assistant",
            "content": think(f"I must find {box}."),
            "tool_calls": [{"id": serial, "type": "function", "function": call}],
        },
        {
            "role": "tool",
            "tool_call_id": serial,
            "content": "\n".join(line for line in lines if line),
        },
    )
    return Step(given, "find", f"I see {box} {shelf}.", f"That is {box} {shelf}.")


def _recall(draft: Draft, noise: int) -> Step:
    rng = draft.rng
    known = sorted(draft.numbers) + sorted(draft.shelves)
    name = rng.choice(known)
    if name in draft.numbers:
        value = str(draft.numbers[name])
        request = rng.choice((f"Which number has {name}?", f"I forgot the number of {name}."))
        kind = "recall a number"
    else:
        value = draft.shelves[name]
        request = rng.choice((f"Where is the box {name}?", f"I forgot the shelf of {name}."))
        kind = "recall a shelf"
    return Step(
        (_user(rng, request, noise),), kind, f"I see {name} {value}.", f"That is {name} {value}."
    )


def _talk(draft: Draft, noise: int) -> Step:
    request = draft.rng.choice(("Thank you.", "Good morning!", "That is all."))
    given = (_user(draft.rng, request, noise),)
    return Step(given, "talk", "I look for nothing.", "You are welcome.")


def conversation(seed: int, *, num_steps: int, noise: int, system: int) -> Draft:
    """A conversation."""
    rng = Random(seed)
    draft = Draft(rng)
    if rng.random() < 0.9:
        rules = rng.sample(RULES, rng.randint(1, len(RULES))) if rng.random() < 0.5 else RULES
        draft.system = " ".join((*rules, chatter(rng, rng.randint(0, system)))).strip()
    people, boxes = rng.sample(PEOPLE, len(PEOPLE)), rng.sample(BOXES, len(BOXES))
    while len(draft.steps) < num_steps:
        sort = rng.choices(("make", "find", "chain", "recall", "talk"), (5, 4, 2, 10, 0.5))[0]
        level = rng.randint(0, noise)
        if sort == "make":
            draft.steps.append(_make(draft, people.pop(), level))
        elif sort == "find":
            draft.steps.append(_find(draft, boxes.pop(), level))
        elif sort == "chain" and draft.numbers:
            draft.steps.append(_chain(draft, people.pop(), level))
        elif sort == "recall" and (draft.numbers or draft.shelves):
            draft.steps.append(_recall(draft, level))
        elif sort == "talk":
            draft.steps.append(_talk(draft, level))
    return draft


def vocabulary() -> list[str]:
    return [*PEOPLE, *BOXES, *SHELVES, *_WORDS]
