"""What clients and templates do to a history before it comes back."""

from collections.abc import Callable, Sequence

from workloads.history import Conversation, Piece, conversation
from workloads.shapes import AgentRun, ChatTurn, LongChat, Rag
from workloads.templates import KEEP, TEMPLATES, Template
from workloads.writer import Writer, flat

Pieces = list[Piece]

# Tokens of the notice that replaces a cleared tool result.
_NOTICE = 6
# Length of a summary, in lengths of an answer.
_SUMMARY_ANSWERS = 1.55
# An order of eight documents in which three follow each other as before.
_NEW_ORDER = (5, 2, 7, 0, 3, 6, 1, 4)


def close_turn(name: str) -> Callable[[Writer, ChatTurn], Conversation]:
    """A chat turn ends, and the template drops its reasoning."""
    template = TEMPLATES[name]

    def client(writer: Writer, shape: ChatTurn) -> Conversation:
        head = _head(writer, shape)
        turn, history = template.turn(writer, shape.reasoning, shape.answer)
        asked = _asked(writer, shape.question, template)
        return conversation([*head, *turn], [*head, *history, *asked])

    return client


def keep(writer: Writer, shape: ChatTurn) -> Conversation:
    head = _head(writer, shape)
    turn, _ = KEEP.turn(writer, shape.reasoning, shape.answer)
    return conversation([*head, *turn], [*head, *turn, *_asked(writer, shape.question, KEEP)])


# Agents


class _Run:
    """An agent's run as it was generated, in the parts that an edit may replace or drop."""

    def __init__(
        self, writer: Writer, shape: AgentRun, template: Template = KEEP, head: Pieces | None = None
    ) -> None:
        self.head = _head(writer, shape) if head is None else head
        self.reasoning: list[tuple[Pieces, Pieces]] = []
        self.calls: list[Pieces] = []
        self.results: list[Pieces] = []
        for number in range(shape.rounds):
            length = shape.reasoning if number else shape.first_reasoning
            self.reasoning.append(template.think(writer, length))
            self.calls.append(
                flat(
                    writer.mark("call"),
                    writer.text(shape.call, "tool_call"),
                    writer.mark("end_call", "eos"),
                )
            )
            self.results.append(writer.result(shape.result))
        self._around = [
            (writer.mark("result"), writer.mark("end_result", "assistant"))
            for _ in range(shape.rounds)
        ]
        self.final, self.final_history = template.turn(writer, shape.final_reasoning, shape.answer)
        self.asked = _asked(writer, shape.question, template)

    def rounds(
        self,
        *,
        reasoning: Sequence[Pieces] | None = None,
        calls: Sequence[Pieces] | None = None,
        results: Sequence[Pieces] | None = None,
    ) -> Pieces:
        """Head and rounds, with other reasoning, calls or results than the generated ones."""
        reasoning = [old for old, _ in self.reasoning] if reasoning is None else reasoning
        calls = self.calls if calls is None else calls
        results = self.results if results is None else results
        pieces = [*self.head]
        for number, (before, after) in enumerate(self._around):
            pieces += [*reasoning[number], *calls[number], *before, *results[number], *after]
        return pieces

    def cached(self) -> Pieces:
        return [*self.rounds(), *self.final]


def inside_loop(writer: Writer, shape: AgentRun) -> Conversation:
    run = _Run(writer, shape)
    everything = run.rounds()
    # The last call was generated; its result and the markers around it are new.
    new = 1 + len(run.results[-1]) + 2
    return conversation(everything[:-new], everything)


def close_run(name: str) -> Callable[[Writer, AgentRun], Conversation]:
    """The user speaks again, and the template drops the reasoning of the whole run."""
    closed = close_runs(name, turns=1)

    def client(writer: Writer, shape: AgentRun) -> Conversation:
        return closed(writer, shape)[0]

    return client


def close_runs(name: str, *, turns: int) -> Callable[[Writer, AgentRun], list[Conversation]]:
    """Runs of one agent, each of which begins with what the template left of those before."""
    template = TEMPLATES[name]

    def client(writer: Writer, shape: AgentRun) -> list[Conversation]:
        made = []
        head = None
        for _ in range(turns):
            run = _Run(writer, shape, template, head)
            left = run.rounds(reasoning=[left for _, left in run.reasoning])
            head = [*left, *run.final_history, *run.asked]
            made.append(conversation(run.cached(), head))
        return made

    return client


def clear_results(
    *, oldest: int | None = None, keep_last: int = 0
) -> Callable[[Writer, AgentRun], Conversation]:
    """Old tool results are replaced by a notice."""

    def client(writer: Writer, shape: AgentRun) -> Conversation:
        run = _Run(writer, shape)
        cleared = shape.rounds - keep_last if oldest is None else oldest
        results = [
            [writer.text(min(_NOTICE, shape.result), "tool_result")] if number < cleared else old
            for number, old in enumerate(run.results)
        ]
        prompt = run.rounds(results=results)
        return conversation(run.cached(), [*prompt, *run.final, *run.asked])

    return client


def clear_reasoning(writer: Writer, shape: AgentRun) -> Conversation:
    """One token replaces the reasoning of every round but the last."""
    run = _Run(writer, shape, TEMPLATES["clear"])
    prompt = run.rounds(reasoning=[left for _, left in run.reasoning])
    return conversation(run.cached(), [*prompt, *run.final, *run.asked])


def retokenise(writer: Writer, shape: AgentRun) -> Conversation:
    """The history is detokenised and tokenised again: generated text differs at its edges."""
    run = _Run(writer, shape)
    edges = _Edges(writer)
    run.reasoning = [edges.of(generated) for generated, _ in run.reasoning]
    calls = [edges.of(call) for call in run.calls]
    run.calls = [old for old, _ in calls]
    run.final, final = edges.of(run.final)
    prompt = run.rounds(
        reasoning=[new for _, new in run.reasoning], calls=[new for _, new in calls]
    )
    return conversation(run.cached(), [*prompt, *final, *run.asked])


class _Edges:
    """Gives texts edges of one to three tokens that differ after a round trip."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._count = 0

    def of(self, pieces: Pieces) -> tuple[Pieces, Pieces]:
        """The pieces with edges: as they were generated, and as they come back."""
        old: Pieces = []
        new: Pieces = []
        for piece in pieces:
            is_text = len(piece.tokens) > 1
            first = self._edge(piece.kind) if is_text else ([], [])
            last = self._edge(piece.kind) if is_text else ([], [])
            old += [*first[0], piece, *last[0]]
            new += [*first[1], piece, *last[1]]
        return old, new

    def _edge(self, kind: str) -> tuple[Pieces, Pieces]:
        self._count += 1
        lengths = 1 + self._count % 3, 1 + self._count // 3 % 2
        old, new = (self._writer.text(length, kind) for length in lengths)
        return [old], [new]


def flip_effort(writer: Writer, shape: AgentRun) -> Conversation:
    """The reasoning effort and the list of tools change, both in the head."""
    tools = shape.system // 3
    rest = shape.system + shape.extra - tools
    opened = flat(writer.mark("bos"), writer.text(min(10, rest), "system"))
    efforts = writer.text(1, "system"), writer.text(1, "system")
    lists = writer.text(tools, "system"), writer.text(max(1, tools // 3), "system")
    after = flat(
        writer.system(rest),
        writer.mark("user"),
        writer.text(shape.question, "user"),
        writer.mark("assistant"),
    )
    old, new = (
        [*opened, effort, listed, *after] for effort, listed in zip(efforts, lists, strict=True)
    )
    run = _Run(writer, shape, head=old)
    cached = run.cached()
    run.head = new
    return conversation(cached, [*run.cached(), *run.asked])


def edit_result(writer: Writer, shape: AgentRun) -> Conversation:
    run = _Run(writer, shape, TEMPLATES["qwen3"])
    edited = min(1, shape.rounds - 1)
    results = list(run.results)
    results[edited] = [writer.text(max(1, shape.result * 5 // 9), "tool_result")]
    reasoning = [
        left if number > edited else old for number, (old, left) in enumerate(run.reasoning)
    ]
    prompt = run.rounds(reasoning=reasoning, results=results)
    return conversation(run.cached(), [*prompt, *run.final_history, *run.asked])


# Long chats


def slide(dropped: int) -> Callable[[Writer, LongChat], Conversation]:
    def client(writer: Writer, shape: LongChat) -> Conversation:
        head, turns = _chat(writer, shape)
        asked = _asked(writer, shape.question, _PLAIN)
        return conversation(flat(head, *turns), flat(head, *turns[dropped:], asked))

    return client


def compact(writer: Writer, shape: LongChat) -> Conversation:
    head, turns = _chat(writer, shape)
    summary = flat(
        writer.mark("user"), writer.text(max(1, round(shape.answer * _SUMMARY_ANSWERS)), "user")
    )
    asked = _asked(writer, shape.question, _PLAIN)
    return conversation(flat(head, *turns), flat(head, summary, *turns[-2:], asked))


def edit_first(writer: Writer, shape: LongChat) -> Conversation:
    """The first user message is edited: most of it is another text."""
    head, turns = _chat(writer, shape)
    same = max(1, shape.question // 14)
    edited = shape.question - 2 * same
    parts = [writer.text(length, "user") for length in (same, edited, same)]
    other = writer.text(edited, "user")
    marker, _, *answered = turns[0]
    first = [marker, *parts, *answered]
    again = [marker, parts[0], other, parts[2], *answered]
    asked = _asked(writer, shape.question, _PLAIN)
    return conversation(flat(head, first, *turns[1:]), flat(head, again, *turns[1:], asked))


def change_head(start: int, old: int, new: int) -> Callable[[Writer, LongChat], Conversation]:
    """Some tokens near the beginning differ in every request."""

    def client(writer: Writer, shape: LongChat) -> Conversation:
        before = flat(writer.mark("bos"), writer.text(start - 1, "system"))
        changed = writer.text(old, "system"), writer.text(new, "system")
        after = writer.system(max(1, shape.system + shape.extra - start - old))
        _, turns = _chat(writer, shape)
        cached, prompt = (flat(before, text, after, *turns) for text in changed)
        return conversation(cached, [*prompt, *_asked(writer, shape.question, _PLAIN)])

    return client


# Documents


def reorder_documents(writer: Writer, shape: Rag) -> Conversation:
    head, documents, question, answer = _documents(writer, shape)
    order = sorted(range(shape.documents), key=lambda n: (n // 8, _NEW_ORDER.index(n % 8)))
    return conversation(
        flat(head, documents, question, answer),
        flat(head, [documents[number] for number in order], question),
    )


def drop_document(writer: Writer, shape: Rag) -> Conversation:
    head, documents, question, answer = _documents(writer, shape)
    left = [document for number, document in enumerate(documents) if number != 2]
    return conversation(flat(head, documents, question, answer), flat(head, left, question))


def question_first(writer: Writer, shape: Rag) -> Conversation:
    """The question is repeated before the documents, in five tokens."""
    head, documents, question, answer = _documents(writer, shape)
    return conversation(
        flat(head, documents, question, answer),
        flat(head[:2], writer.text(5, "user"), head[2:], documents, question),
    )


_PLAIN = Template("")


def _head(writer: Writer, shape: ChatTurn | AgentRun) -> Pieces:
    return flat(
        writer.mark("bos"),
        writer.system(shape.system + shape.extra),
        writer.mark("user"),
        writer.text(shape.question, "user"),
        writer.mark("assistant"),
    )


def _asked(writer: Writer, question: int, template: Template) -> Pieces:
    return flat(
        writer.mark("user"),
        writer.text(question, "user"),
        writer.mark("assistant", *template.opened.split()),
    )


def _chat(writer: Writer, shape: LongChat) -> tuple[Pieces, list[Pieces]]:
    head = flat(writer.mark("bos"), writer.system(shape.system + shape.extra))
    turns = [
        flat(
            writer.mark("user"),
            writer.text(shape.question, "user"),
            writer.mark("assistant"),
            writer.text(shape.answer, "answer"),
            writer.mark("eos", "newline"),
        )
        for _ in range(shape.turns)
    ]
    return head, turns


def _documents(writer: Writer, shape: Rag) -> tuple[Pieces, Pieces, Pieces, Pieces]:
    head = flat(writer.mark("bos", "user"), writer.text(shape.extra, "user"))
    documents = writer.documents(shape.documents, shape.document)
    question = flat(writer.text(shape.question, "user"), writer.mark("assistant"))
    answer = flat(writer.text(shape.answer, "answer"), writer.mark("eos"))
    return head, documents, question, answer
