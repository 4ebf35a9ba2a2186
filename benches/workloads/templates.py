"""How chat templates write an assistant's turn, and what of it they drop later."""

from dataclasses import dataclass

from workloads.history import Piece
from workloads.writer import Writer

_REASONING = "R"
_ANSWER = "A"


@dataclass(frozen=True)
class Template:
    """An assistant's turn, in words: markers, `R` for the reasoning and `A` for the answer.

    A word that starts with `-` is not in the history once the turn is over; one that ends with
    `>other` is replaced by another marker.

    Args:
        reasoning: What comes before the answer or the tool call.
        answer: The answer and what ends it.
        opened: What the prompt of the turn already ends with.
    """

    reasoning: str
    answer: str = "A eos"
    opened: str = ""

    def turn(self, writer: Writer, reasoning: int, answer: int) -> tuple[list[Piece], list[Piece]]:
        """A turn that answers, as it was generated and as the history has it."""
        before, left = self.think(writer, reasoning)
        answered, kept = _written(self.answer, writer, answer, "")
        return [*before, *answered], [*left, *kept]

    def think(self, writer: Writer, reasoning: int) -> tuple[list[Piece], list[Piece]]:
        return _written(self.reasoning, writer, reasoning, "reasoning")


def _written(words: str, writer: Writer, length: int, kind: str) -> tuple[list[Piece], list[Piece]]:
    cached: list[Piece] = []
    history: list[Piece] = []
    for word in words.split():
        name, _, other = word.lstrip("-").partition(">")
        if name == _REASONING:
            piece = writer.text(length, "reasoning")
        elif name == _ANSWER:
            piece = writer.text(length, "answer")
        else:
            (piece,) = writer.mark(name, kind=kind)
        cached.append(piece)
        if other:
            history += writer.mark(other, kind=kind)
        elif not word.startswith("-"):
            history.append(piece)
    return cached, history


_THINK = "-think -newline -R -newline -end_think -blank"
_STUB = "think -R end_think"

KEEP = Template("think newline R newline end_think blank", opened="think newline")
TEMPLATES = {
    "deepseek-r1": Template(_THINK, opened="think newline"),
    "deepseek-v3.1": Template("-think -R end_think", opened="think"),
    "qwen3": Template(_THINK),
    "qwen3-off": Template("-think -blank -end_think -blank", opened="think blank end_think blank"),
    "glm": Template(_STUB, answer="A -newline eos"),
    "kimi": Template(_STUB),
    "minimax": Template(_THINK, opened="think newline"),
    "gpt-oss": Template(
        "-channel -analysis -message -R -end -start -assistant channel final message",
        answer="A return>end",
    ),
    "clear": Template("think R>placeholder end_think"),
}
