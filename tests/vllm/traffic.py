"""Random requests over a few conversations that share, edit and repeat their histories."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    max_tokens: int
    mode: str | None
    salt: str | None
    images: tuple[Any, ...] = ()

    @property
    def may_be_approximate(self) -> bool:
        return self.mode != "exact"


class Traffic:
    def __init__(self, seed: int, *, longest: int = 480) -> None:
        self.random = random.Random(seed)
        self._longest = longest
        self._histories: list[list[int]] = [self._words(60) for _ in range(5)]

    def _words(self, count: int) -> list[int]:
        return self.random.choices(range(3, 500), k=count)

    def next(self) -> Ask:
        rng = self.random
        number = rng.randrange(len(self._histories))
        history = self._edited(self._histories[number])
        prompt = history + self._words(rng.choice((1, 3, 20, 33, 70)))
        if len(prompt) > self._longest:
            prompt = self._words(rng.randrange(20, 120))
        self._histories[number] = prompt
        if rng.random() < 0.1:
            self._histories[rng.randrange(5)] = list(prompt)
        return Ask(
            prompt=prompt,
            max_tokens=rng.choice((1, 2, 5, 12)),
            mode=rng.choice((None, None, "approximate", "exact")),
            salt=rng.choice((None, None, None, "tenant")),
        )

    def said(self, ask: Ask, answer: list[int]) -> None:
        for number, history in enumerate(self._histories):
            if history == ask.prompt:
                self._histories[number] = history + answer
                return

    def _edited(self, history: list[int]) -> list[int]:
        rng = self.random
        edited = list(history)
        for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
            start = rng.randrange(len(edited) + 1)
            end = min(len(edited), start + rng.choice((1, 16, 31, 32, 33, 64, 100)))
            kind = rng.choice(("delete", "insert", "replace", "move", "tail"))
            if kind == "delete" and len(edited) - (end - start) > 40:
                del edited[start:end]
            elif kind == "insert":
                edited[start:start] = self._words(rng.choice((1, 5, 32)))
            elif kind == "replace":
                edited[start:end] = self._words(rng.choice((1, 5, 32)))
            elif kind == "move":
                piece = edited[start:end]
                del edited[start:end]
                at = rng.randrange(len(edited) + 1)
                edited[at:at] = piece
            elif edited:
                edited[-1:] = self._words(1)
        return edited
