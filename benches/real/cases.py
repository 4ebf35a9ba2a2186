"""Cases as tokens: the chat template renders contexts and prompt, and the two replies are cut."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from real.conversations import Case, Message

HERE: Final = Path(__file__).resolve().parent
OPENS: Final = "The facts are as follows.\n"


@dataclass(frozen=True, slots=True)
class Form:
    """How a model's conversations are written.

    Attributes:
        opens: What begins a turn.
        ends: Tokens that end a reply next to the config's.
        template: A chat template of benches/real; empty: the model's own.
        records: Its replies to the texts, in benches/real.
    """

    opens: str
    ends: tuple[str, ...]
    template: str
    records: str


SMOLLM2: Final = Form("<|im_start|>", (), "", "recorded.jsonl")
GEMMA3: Final = Form(
    "<start_of_turn>", ("<end_of_turn>",), "gemma3_chat_template.jinja", "recorded_gemma3.jsonl"
)
FORMS: Final = {"gemma3_text": GEMMA3}
"""By a config's type; others have SmolLM2's."""


def form_of(config: Any, tokenizer: Any) -> Form:  # noqa: ANN401 - transformers has no types for them
    """A model's form; its template is set in the tokenizer."""
    form = FORMS.get(config.model_type, SMOLLM2)
    if form.template:
        tokenizer.chat_template = (HERE / form.template).read_text(encoding="utf-8")
    return form


@dataclass(frozen=True, slots=True)
class Fact:
    """Where in the quoting reply a value is: tokens ``[start, end)``."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """A case as the model reads it.

    Attributes:
        kind: The kind of edit.
        contexts: Cached sequences.
        prompt: The edited prompt, with the template's tail.
        moved_end: Where the last message starts: moved runs supply nothing from here on.
        quotes: A reply that quotes every fact.
        facts: The values in it.
    """

    kind: str
    contexts: tuple[tuple[int, ...], ...]
    prompt: tuple[int, ...]
    moved_end: int
    quotes: tuple[int, ...]
    facts: tuple[Fact, ...]

    @property
    def digest(self) -> str:
        """Names the case by everything that the model reads."""
        document = json.dumps([self.contexts, self.prompt, self.moved_end, self.quotes])
        return hashlib.sha256(document.encode()).hexdigest()[:16]


class Renderer:
    """A tokenizer with its chat template."""

    def __init__(self, tokenizer: Any, form: Form = SMOLLM2) -> None:  # noqa: ANN401 - as above
        self._tokenizer = tokenizer
        self._opens = form.opens

    def tokens(self, case: Case) -> Tokens:
        prompt = self._text(case.prompt, opens=True)
        # The last message with its mark, and the template's tail.
        content = prompt.rindex(str(case.prompt[-1]["content"]))
        last = max(prompt.rfind(self._opens, 0, content), 0)
        encoded = self._tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)
        starts = [start for start, _ in encoded["offset_mapping"]]
        quotes, facts = self._quotes(case.facts)
        return Tokens(
            kind=case.kind,
            contexts=tuple(tuple(self._ids(self._text(one, opens=False))) for one in case.contexts),
            prompt=tuple(encoded["input_ids"]),
            moved_end=next(at for at, start in enumerate(starts) if start >= last),
            quotes=tuple(quotes),
            facts=tuple(facts),
        )

    def _quotes(self, facts: Sequence[tuple[str, str]]) -> tuple[list[int], list[Fact]]:
        ids = self._ids(OPENS)
        found = []
        for stem, value in facts:
            ids += self._ids(stem)
            start = len(ids)
            ids += self._ids(value)
            found.append(Fact(start, len(ids)))
            ids += self._ids(".\n")
        return ids, found

    def _text(self, messages: Sequence[Message], *, opens: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=opens, tokenize=False
            )
        )

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
