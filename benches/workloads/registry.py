"""The workloads by the ids that tests, benchmarks and tables cite."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from workloads import clients
from workloads.history import Conversation
from workloads.shapes import AgentRun, ChatTurn, LongChat, Rag, Shape
from workloads.writer import Writer

Percent = tuple[float, float]


@dataclass(frozen=True)
class Workload:
    """How one kind of history is edited.

    Args:
        id: As tables cite it; a variant's ends with a dot and a word.
        name: What the client does, in a word.
        edit: The token edit, in a sentence.
        shape: How long the parts are.
        client: Makes a conversation from a writer and a shape.
        exact: Share of the next prompt in the whole 16-token blocks of its cached prefix, in
            percent, lowest and highest, as measured on rendered templates.
        span: The same of the prefix with all runs of at least 16 cached tokens.

    Example:
        >>> case = WORKLOADS["W04"].build(seed=1)
        >>> [(edit.action, edit.old_end - edit.old_start) for edit in case.edits]
        [('delete', 4), ('append', 0)]
    """

    id: str
    name: str
    edit: str
    shape: Shape
    client: Callable[[Writer, Any], Conversation]
    exact: Percent | None = None
    span: Percent | None = None

    def build(
        self,
        number: int = 0,
        *,
        seed: int = 0,
        scale: float = 1.0,
        text: str = "uniform",
        shared: bool = False,
        **lengths: int,
    ) -> Conversation:
        """One conversation.

        Args:
            number: Which one; no two have a text in common unless `shared`.
            seed: Another seed is another set of texts.
            scale: Factor of the lengths of texts.
            text: How texts are drawn: `uniform`, or `worded` repeats as written text does.
            shared: Whether conversations share the boilerplate that they share in practice.
            lengths: Fields of the shape that differ, after scaling: `answer=20`, `extra=3`.
        """
        shape = replace(self.shape.scaled(scale), **lengths)
        # Workloads that are built from the same seed share no text either.
        writer = Writer(seed * 1_000 + _NUMBERS[self.id], number, text=text, shared=shared)
        return self.client(writer, shape)


def _one(percent: float) -> Percent:
    return percent, percent


_CLOSED = (21.9, 23.5)
_CLOSED_SPAN = (98.7, 98.9)
_CLOSE = "delete the reasoning of all rounds and of the answer"

_ALL = (
    Workload(
        "W01",
        "strip.r1",
        "delete the reasoning with its markers",
        ChatTurn(),
        clients.close_turn("deepseek-r1"),
        _one(72.6),
        _one(92.7),
    ),
    Workload(
        "W02",
        "strip.v31",
        "delete the reasoning, keep its end marker",
        ChatTurn(),
        clients.close_turn("deepseek-v3.1"),
        (72.6, 75.3),
        (92.7, 93.5),
    ),
    Workload(
        "W03",
        "strip.qwen3",
        "delete the reasoning with its markers",
        ChatTurn(),
        clients.close_turn("qwen3"),
        _one(72.7),
        _one(92.5),
    ),
    Workload(
        "W04",
        "stub.qwen3",
        "delete the empty reasoning that the prompt ended with",
        ChatTurn(reasoning=0),
        clients.close_turn("qwen3-off"),
        _one(72.6),
        _one(92.3),
    ),
    Workload(
        "W05",
        "stub.glm",
        "delete the reasoning between its markers, and white space after the answer",
        ChatTurn(),
        clients.close_turn("glm"),
        _one(73.1),
        _one(92.7),
    ),
    Workload(
        "W06",
        "stub.kimi",
        "delete the reasoning between its markers",
        ChatTurn(),
        clients.close_turn("kimi"),
        _one(72.8),
        _one(92.6),
    ),
    Workload(
        "W07",
        "strip.minimax",
        "delete the reasoning at the next user message",
        ChatTurn(),
        clients.close_turn("minimax"),
        _one(72.7),
        _one(92.5),
    ),
    Workload(
        "W08",
        "harmony.final",
        "delete the analysis message, replace the mark that ends the answer",
        ChatTurn(),
        clients.close_turn("gpt-oss"),
        _one(72.8),
        _one(92.6),
    ),
    Workload("W09", "keep", "append", ChatTurn(), clients.keep, (95.2, 95.8), (95.2, 95.8)),
    Workload(
        "W10", "agent.inloop", "append", AgentRun(), clients.inside_loop, (95.5, 95.9), (95.5, 95.9)
    ),
    Workload(
        "W11", "agent.close", _CLOSE, AgentRun(), clients.close_run("qwen3"), _CLOSED, _CLOSED_SPAN
    ),
    *(
        Workload(
            f"W11.{name}",
            f"agent.close.{name}",
            _CLOSE,
            AgentRun(),
            clients.close_run(name),
            _CLOSED,
            _CLOSED_SPAN,
        )
        for name in ("deepseek-v3.1", "glm", "kimi", "minimax", "gpt-oss")
    ),
    Workload(
        "W12",
        "clear_tool_uses",
        "replace all tool results but three by notices",
        AgentRun(),
        clients.clear_results(keep_last=3),
        _one(33.5),
        _one(97.8),
    ),
    Workload(
        "W13",
        "prune.oldest4",
        "replace four tool results by notices",
        AgentRun(),
        clients.clear_results(oldest=4),
        _one(25.3),
        _one(98.6),
    ),
    Workload(
        "W14",
        "clear_thinking.keep1",
        "replace the reasoning of each round but the last by one token",
        AgentRun(),
        clients.clear_reasoning,
        _one(21.4),
        _one(98.7),
    ),
    Workload(
        "W15",
        "slide.1",
        "delete the oldest turn",
        LongChat(),
        clients.slide(1),
        _one(12.9),
        _one(98.4),
    ),
    Workload(
        "W15.5",
        "slide.5",
        "delete the five oldest turns",
        LongChat(),
        clients.slide(5),
        _one(15.6),
        _one(98.1),
    ),
    Workload(
        "W16",
        "timestamp.head",
        "replace six tokens by six near token 20",
        LongChat(),
        clients.change_head(20, 6, 6),
        _one(0.1),
        _one(98.4),
    ),
    Workload(
        "W17",
        "nonce.head",
        "replace four tokens by three at token 36",
        LongChat(),
        clients.change_head(36, 4, 3),
        _one(0.3),
        _one(98.5),
    ),
    Workload(
        "W18",
        "compact",
        "replace all turns but two by a summary",
        LongChat(),
        clients.compact,
        _one(46.9),
        _one(78.2),
    ),
    Workload(
        "W19",
        "rag.reorder",
        "permute the documents",
        Rag(),
        clients.reorder_documents,
        _one(0.0),
        _one(99.6),
    ),
    Workload(
        "W20",
        "rag.drop",
        "delete one document",
        Rag(),
        clients.drop_document,
        _one(28.3),
        _one(99.8),
    ),
    Workload(
        "W20.question_first",
        "rag.question_first",
        "insert five tokens before the documents",
        Rag(),
        clients.question_first,
        _one(0.0),
        _one(99.9),
    ),
    Workload(
        "W21",
        "edit.first",
        "replace most of the first user message",
        LongChat(),
        clients.edit_first,
        _one(12.4),
        _one(97.0),
    ),
    Workload(
        "W22",
        "retokenise",
        "replace one to three tokens at each edge of what was generated",
        AgentRun(),
        clients.retokenise,
    ),
    Workload(
        "W23",
        "effort.flip",
        "replace a word and the tools near the front",
        AgentRun(),
        clients.flip_effort,
    ),
    Workload(
        "W25",
        "compound",
        "replace one tool result and delete the reasoning after it",
        AgentRun(),
        clients.edit_result,
    ),
)

WORKLOADS: dict[str, Workload] = {workload.id: workload for workload in _ALL}
"""All workloads, variants included, in the order of the tables."""

_NUMBERS = {name: number for number, name in enumerate(WORKLOADS)}
_ID = re.compile(r"\bW\d\d(?:\.\w(?:[\w.-]*\w)?)?")


def named(text: str) -> str:
    """A text in which the name of each workload follows its id.

    Example:
        >>> named("20,000 tokens of W11, chunks of 256; W15.5 slide.5")
        '20,000 tokens of W11 agent.close, chunks of 256; W15.5 slide.5'
    """

    def with_name(found: re.Match[str]) -> str:
        name = f" {WORKLOADS[found[0]].name}"
        return found[0] if text.startswith(name, found.end()) else found[0] + name

    return _ID.sub(with_name, text)
