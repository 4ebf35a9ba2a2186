"""A chat format compiled for one vocabulary, and how to make one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvtrie.tags import spellings as spell
from kvtrie.tags.formats import Format, MessageStart, Pair
from kvtrie.tags.grammar import Grammar
from kvtrie.tags.presets import preset
from kvtrie.tags.probe import recognise
from kvtrie.tags.stream import Stream, read_whole

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvtrie._core import Span
    from kvtrie.tags.formats import Boundary, Drops, Role
    from kvtrie.tags.sections import Section
    from kvtrie.tags.spellings import Spellings, Tokenizer

    Ids = int | Sequence[int]


class Tagger(Grammar):
    """Finds the spans of a chat format in token ids.

    Immutable: one tagger serves all requests of a model, on any thread.

    Args:
        form: The format.
        ids: The ids of its delimiters and names: a mapping from each string to an id or a sequence
            of ids, or a tokenizer with `encode` and `decode`.

    Raises:
        TypeError: `ids` is neither a mapping nor a tokenizer.
        ValueError: A delimiter is missing, or is contained in another one.

    Example:
        >>> from kvtrie import tags
        >>> ids = {"<|user|>": 1, "<|assistant|>": 2, "<|system|>": 3, "<|observation|>": 4}
        >>> ids |= {"<think>": 5, "</think>": 6, "<tool_call>": 7, "</tool_call>": 8}
        >>> tagger = tags.Tagger(tags.preset("glm"), ids)
        >>> tagger.spans([1, 50, 2, 5, 51, 52, 6, 53])
        [Span(0, 2, 'user'), Span(3, 7, 'reasoning'), Span(7, 8, 'answer')]
    """

    __slots__ = ()

    def __init__(self, form: Format, ids: Mapping[str, Ids] | Tokenizer) -> None:
        given: object = form
        if not isinstance(given, Format):
            msg = f"Tagger: form is {form!r}, not a Format; `preset(name)` returns one by name"
            raise TypeError(msg)
        what = f"Tagger({form.name!r})"
        found: Spellings = (
            spell.from_mapping(form, ids, what)
            if isinstance(ids, Mapping)
            else spell.from_tokenizer(form, ids, what)
        )
        super().__init__(form, found)

    def __repr__(self) -> str:
        return f"Tagger({self.format.name!r})"

    @classmethod
    def from_preset(cls, name: str, ids: Mapping[str, Ids] | Tokenizer) -> Tagger:
        """A tagger for a format that kvtrie knows by name.

        Args:
            name: One of `PRESETS`.
            ids: As for `Tagger`.

        Raises:
            TypeError: As for `Tagger`.
            ValueError: There is no such preset, or the tokenizer lacks one of its delimiters.
        """
        return cls(preset(name), ids)

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, **template_arguments: object) -> Tagger:
        """A tagger for the format of a tokenizer's own chat template, found by rendering it.

        Args:
            tokenizer: One of `transformers`, or anything with `encode`, `decode`, `chat_template`
                and `apply_chat_template`.
            **template_arguments: The arguments that requests give to the template, such as
                `clear_thinking=False`: they decide what it deletes. `chat_template=` is another
                template than the tokenizer's.

        Raises:
            TypeError: ``tokenizer`` is not a tokenizer.
            ValueError: It has no chat template, or an unknown one; the message says what is
                missing.
        """
        return cls(recognise(tokenizer, template_arguments), tokenizer)

    @classmethod
    def from_ids(
        cls,
        *,
        system: Ids | None = None,
        user: Ids | None = None,
        assistant: Ids | None = None,
        tool: Ids | None = None,
        end: Ids | None = None,
        reasoning: tuple[Ids, Ids] | None = None,
        tool_call: tuple[Ids, Ids] | None = None,
        tool_result: tuple[Ids, Ids] | None = None,
        newlines: Sequence[int] = (),
        initial: Role | None = None,
        drops: Drops = "whole",
        boundary: Boundary = "user",
        nests: bool = False,
    ) -> Tagger:
        """A tagger from token ids alone. A delimiter is an id or a sequence of ids.

        Args:
            system: What a system message begins with.
            user: What a user message begins with.
            assistant: What an assistant's message begins with.
            tool: What a message with a tool result begins with.
            end: What ends a message. Without it a message ends where the next begins.
            reasoning: The opening and the closing delimiter of reasoning.
            tool_call: Those of a tool call.
            tool_result: A user message between these two delimiters is a tool result.
            newlines: Ids of newlines, which are deleted with the reasoning before them.
            initial: The author of the text before the first delimiter.
            drops: What the template deletes of reasoning.
            boundary: When it does.
            nests: Reasoning nests: the last closing delimiter ends it.

        Raises:
            TypeError: A delimiter is not an id.
            ValueError: A delimiter is empty, given twice, or contained in another one; a pair does
                not have two entries; or no argument says where the assistant speaks.

        Example:
            >>> tagger = Tagger.from_ids(user=[1, 2], assistant=[1, 3], reasoning=(7, 8))
            >>> tagger.spans([1, 2, 40, 1, 3, 7, 50, 8, 60])
            [Span(0, 3, 'user'), Span(5, 8, 'reasoning'), Span(8, 9, 'answer')]
        """
        if assistant is None and initial != "assistant":
            msg = (
                "from_ids: no argument says where the assistant speaks: give `assistant`, or "
                "initial='assistant' for streams of generated tokens alone"
            )
            raise ValueError(msg)
        ids: dict[str, Ids] = {}
        roles: tuple[tuple[Role, Ids | None], ...] = (
            ("system", system),
            ("user", user),
            ("assistant", assistant),
            ("tool", tool),
        )
        starts = tuple(
            MessageStart(delimiter=role, role=role) for role, given in roles if given is not None
        )
        ids.update({role: given for role, given in roles if given is not None})
        if end is not None:
            ids["end"] = end

        def pair(name: str, given: object) -> tuple[str, str] | None:
            if given is None:
                return None
            if not isinstance(given, Sequence) or len(given) != 2:
                msg = f"from_ids: {name} is {given!r}, not a pair (opening, closing)"
                raise ValueError(msg)
            names = (f"{name} (opening)", f"{name} (closing)")
            ids.update(zip(names, given, strict=True))
            return names

        pairs = []
        if (names := pair("reasoning", reasoning)) is not None:
            pairs.append(
                Pair(kind="reasoning", open=names[0], close=names[1], drops=drops, nests=nests)
            )
        if (names := pair("tool_call", tool_call)) is not None:
            pairs.append(Pair(kind="tool_call", open=names[0], close=names[1]))
        form = Format(
            name="from_ids",
            starts=starts,
            ends=() if end is None else ("end",),
            pairs=tuple(pairs),
            wrapped=pair("tool_result", tool_result),
            boundary=boundary,
            initial=initial,
        )
        tagger = cls(form, ids)
        tagger.newlines = frozenset(
            spell.spelling_of(token, "from_ids: newlines")[0] for token in newlines
        )
        return tagger

    def stream(self, *, start: int = 0, role: Role | None = None) -> Stream:
        """Begin to follow a request.

        Args:
            start: The position of the first token that will be fed.
            role: The author of the message with that token. Give `"assistant"` if only generated
                tokens are fed, None if the prompt is fed too.

        Raises:
            TypeError: `start` is not an int.
            ValueError: `start` is negative, or there is no such role.

        Example:
            >>> tagger = Tagger.from_ids(user=1, assistant=2, reasoning=(7, 8))
            >>> tagger.stream(start=100, role="assistant").feed([40, 41, 8, 50, 1])
            [Span(100, 103, 'reasoning'), Span(103, 104, 'answer')]
        """
        return Stream(self, start, role)

    def sections(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> tuple[Section, ...]:
        """The sections of a whole sequence; the last message counts as ended."""
        return read_whole(self, ids).sections

    def spans(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> list[Span]:
        """The spans of `sections`."""
        return read_whole(self, ids).spans
