"""Whether prompts lack the reasoning that the served template keeps, by what the model answered.

A prompt without reasoning may come from a model that did not reason. So answers that followed
reasoning are remembered: one that comes back after the same question, and without it, was rendered
by a template that drops reasoning, or the client has left it out.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from kvtrie.integrations.vllm._tags import is_blank

if TYPE_CHECKING:
    from kvtrie._core import TokenSequence
    from kvtrie.integrations.vllm._tags import Reading
    from kvtrie.tags import Section, Turn

_MOST: Final = 1024
# Shorter answers may be given twice.
_LEAST: Final = 16
# Of an answer; what follows may be stripped.
_COMPARED: Final = 64


class Answered:
    """The latest answers after reasoning, under a template that never drops any."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, None] = OrderedDict()

    def note(self, seq: TokenSequence, reading: Reading, salt: str | None) -> None:
        """Remember what a finished request has answered."""
        turns = reading.stream.turns
        found = _last(turns[-1]) if turns else None
        if found is None or not found[2]:
            return
        key = _key(seq, *found[:2], salt)
        if key is not None:
            self._known[key] = None
            self._known.move_to_end(key)
            if len(self._known) > _MOST:
                self._known.popitem(last=False)

    def lacks(
        self, seq: TokenSequence, reading: Reading, num_prompt: int, salt: str | None
    ) -> str | None:
        """What of a prompt's latest ended turn is missing; None if nothing is known to be."""
        if not self._known:
            return None
        ended = [one for one in reading.stream.turns if one.state == "closed"]
        found = _last(ended[-1]) if ended and ended[-1].end <= num_prompt else None
        if found is None or found[2]:
            return None
        question, answer, _ = found
        if _key(seq, question, answer, salt) not in self._known:
            return None
        return f"the answer at token {answer.body[0]} had reasoning before it, and has none"


def _last(turn: Turn) -> tuple[Section, Section, bool] | None:
    """A turn's question and answer, and whether there is reasoning right before the answer."""
    found = sorted((one for one in turn.sections if not one.nested), key=lambda one: one.span.start)
    answers = [at for at, one in enumerate(found) if one.kind == "answer"]
    asked = [one for one in found if one.kind == "user"]
    if not answers or not asked or not answers[-1]:
        return None
    before = found[answers[-1] - 1]
    return asked[-1], found[answers[-1]], before.kind == "reasoning" and not is_blank(before)


def _key(seq: TokenSequence, question: Section, answer: Section, salt: str | None) -> int | None:
    start, end = answer.body
    if end - start < _LEAST:
        return None
    said = seq[start : min(end, start + _COMPARED)].tobytes()
    first, last = question.body
    images = [(one.start - first, one.digest) for one in seq.items if first <= one.start < last]
    return hash((seq[first:last].tobytes(), said, salt, *images))
