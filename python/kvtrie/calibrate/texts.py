"""Seeded English text with facts that can be asked for: what the shipped edits are made of.

Notes about invented places, in varied sentences. The facts are invented, so a reply that has them
was read in the prompt. The text depends on the seed alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from random import Random

_FIRST: Final = tuple(
    "Al Bar Bel Cor Dal El Fen Gar Hal Il Kal Lin Mar Nor Or Pel Quen Ros Sel Tal Ul Var Wen Yor "
    "Zel".split()
)
_LAST: Final = tuple(
    "ack adel amere ann ater borough bridge dale den ester fell ford grave ham hurst ing keth land "
    "mouth port stead ton vale wick worth".split()
)
_WHAT: Final = (
    "harbour",
    "library",
    "museum",
    "observatory",
    "railway station",
    "market hall",
    "botanical garden",
    "theatre",
    "bakery",
    "lighthouse",
    "school",
    "hospital",
)
_WHO: Final = tuple(
    "Ada Berg,Boris Hale,Carla Nunes,David Okoro,Elena Petrova,Farah Aziz,Greta Holm,Hugo Lemaire,"
    "Ines Duarte,Jonas Weber,Karim Haddad,Laura Rossi,Maya Patel,Nadia Novak,Oscar Lund,"
    "Priya Menon,Samir Khan,Tomas Silva,Vera Kovacs,Yuki Tanaka".split(",")
)
_MATERIALS: Final = ("brick", "granite", "oak", "limestone", "steel and glass", "red sandstone")
_COLOURS: Final = ("blue", "green", "white", "yellow", "grey", "dark red")
_REASONS: Final = (
    "after a long debate about the cost",
    "because the old building had burned down",
    "with money that the citizens had collected",
    "two years later than planned",
    "on a cold morning in front of a small crowd",
    "as part of a plan for the whole district",
)
_HABITS: Final = (
    "Visitors say that the early afternoon is the best time to come.",
    "Every spring the entrance is painted again by volunteers.",
    "On Sundays a guide explains how the building was planned.",
    "The council has discussed an extension, but nothing has been decided.",
    "Many people pass it every day without knowing its history.",
    "A short film about it is shown in the hall next door.",
    "In winter the doors close an hour earlier than usual.",
    "Its neighbours remember how quiet the street used to be.",
)
_MUSINGS: Final = (
    "The user wants to know something about one of the places.",
    "I should look at the notes again before I reply.",
    "There are several places with similar names, so I must be careful.",
    "The year and the name are both given, and only one of them was asked for.",
    "It would be wrong to add anything that the notes do not say.",
    "Let me compare the two candidates and pick the right one.",
    "A short reply is enough here.",
    "I will check the number once more.",
)


@dataclass(frozen=True, slots=True)
class Place:
    """An invented place, with a note about it."""

    name: str
    what: str
    year: int
    who: str
    rooms: int
    note: str

    @property
    def title(self) -> str:
        """What it is called."""
        return f"the {self.what} of {self.name}"

    def question(self, rng: Random) -> str:
        """One of the questions that the note has the reply to."""
        return rng.choice(
            (
                f"In which year was {self.title} opened, and who planned it?",
                f"Who planned {self.title}, and how many rooms does it have?",
                f"Tell me in one sentence when {self.title} was opened and by whom it was planned.",
                f"What do the notes say about {self.title}?",
            )
        )

    @property
    def answer(self) -> str:
        """A reply to them."""
        title = self.title[0].upper() + self.title[1:]
        return (
            f"{title} was opened in {self.year}. It was planned by {self.who} and has {self.rooms} "
            "rooms."
        )


def places(rng: Random, count: int) -> list[Place]:
    """Places with different names."""
    names = rng.sample([first + last for first in _FIRST for last in _LAST], count)
    return [_place(rng, name) for name in names]


def _place(rng: Random, name: str) -> Place:
    what, who, year = rng.choice(_WHAT), rng.choice(_WHO), rng.randint(1790, 2015)
    rooms, material, colour = rng.randint(3, 60), rng.choice(_MATERIALS), rng.choice(_COLOURS)
    middle = [
        f"It has {rooms} rooms, and its walls are made of {material}.",
        f"{who}, who planned it, later moved to another town.",
        f"The {colour} roof can be seen from far away.",
        *rng.sample(_HABITS, 2),
    ]
    rng.shuffle(middle)
    first = f"The {what} of {name} was opened in {year} {rng.choice(_REASONS)}."
    return Place(name, what, year, who, rooms, " ".join([first, *middle]))


def musing(rng: Random, sentences: int) -> str:
    """Reasoning that says nothing."""
    return " ".join(rng.choice(_MUSINGS) for _ in range(sentences))


def nonce(rng: Random) -> str:
    """A line that differs from request to request, with a date and a number."""
    day, month = rng.randint(1, 28), rng.choice(("March", "May", "August", "October"))
    return f"Request {rng.randint(10, 99999)}, {day} {month} 2026."
