"""The recall task: seeded conversations in which reuse of KV can fail; see ``docs/fidelity.md``.

The assistant draws a list in its reasoning and answers it; the next question asks for what only an
earlier *answer* has, found by position or by name. An answer moves when the reasoning before it is
dropped, and again when the oldest exchange leaves the context.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HELD_OUT: Final = 1_000_000_000
"""Seeds from here on are not used in training."""

PAIRS: Final = 8
"""Names per list."""

SYSTEM: Final = "You keep a list of names and numbers . Look at your earlier answers ."
DRAW: Final = "Draw eight names ."
AGAIN: Final = "Again please ."
WHICH: Final = "Which number has {name} ?"

NAMES: Final = tuple(
    "Ada Amir Anna Boris Carla Chen Clara David Diego Elena Emil Farah Felix Greta Hana Hugo Ines "
    "Ivan Jonas Julia Karim Laura Leo Lina Lucas Maya Mila Mira Nadia Noah Nora Omar Oscar Petra "
    "Priya Rosa Samir Sofia Tomas Vera Yuki Zoe Agnes Alba Bela Bruno Cora Dora Edith Enzo Flora "
    "Frida Gina Gustav Heidi Igor Irma Jana Joan Kira Klaus Lars Lena Luis Magda Marco Nina Nils "
    "Olga Otto Paul Paula Pedro Ralf Rita Ruth Sara Sven Tara Theo Tina Ugo Ulla Uma Ute Viktor "
    "Wanda Willem Xenia Yara Yves Zita".split()
)
NUMBERS: Final = tuple(str(number) for number in range(10, 74))
MUSING: Final = tuple("hmm so well then now maybe fine okay next good".split())


def conversation(seed: int, exchanges: int, window: int = 10) -> list[dict[str, Any]]:
    """One conversation with all reasoning, which depends on the arguments alone.

    Args:
        seed: The seed.
        exchanges: User messages, each with its reply; the first draws, the second asks, and so on.
        window: Questions ask only for what the last ``window`` exchanges hold, including their own.

    Returns:
        Messages in OpenAI form, with reasoning as ``reasoning_content``. The replies to questions
        have ``"scored": True``: they follow from the conversation alone.
    """
    rng = Random(seed)
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    names = _names(rng)
    lists: list[tuple[int, list[tuple[str, str]]]] = []
    for exchange in range(exchanges):
        if exchange % 2 == 0:
            pairs = [(next(names), rng.choice(NUMBERS)) for _ in range(PAIRS)]
            lists.append((exchange, pairs))
            messages.append({"role": "user", "content": DRAW})
            messages.append(
                {
                    "role": "assistant",
                    "reasoning_content": _thought(rng, pairs),
                    "content": _listed(pairs),
                }
            )
            continue
        known = [pair for at, pairs in lists if at > exchange - window for pair in pairs]
        if rng.random() < 0.5:
            question, answer = AGAIN, _listed(lists[-1][1])
        else:
            name, number = rng.choice(known)
            question, answer = WHICH.format(name=name), f"{name} {number} ."
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer, "scored": True})
    return messages


def vocabulary() -> list[str]:
    """Every word of the task, sorted."""
    rules = " ".join((SYSTEM, DRAW, AGAIN, WHICH.format(name="")))
    return sorted({*rules.split(), *NAMES, *NUMBERS, *MUSING})


def _names(rng: Random) -> Iterator[str]:
    """Endless names; one repeats only after all the others."""
    order = rng.sample(NAMES, len(NAMES))
    while True:
        yield from order


def _listed(pairs: Sequence[tuple[str, str]]) -> str:
    return " ".join(f"{name} {number}" for name, number in pairs) + " ."


def _thought(rng: Random, pairs: Sequence[tuple[str, str]]) -> str:
    before, after = (rng.choices(MUSING, k=rng.randint(1, 9)) for _ in range(2))
    drawn = [word for pair in pairs for word in pair]
    return " ".join([*before, *drawn, *after])
