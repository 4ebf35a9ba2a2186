"""Positions at which later prompts may continue."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtrie._core import Span

# A template deletes reasoning from later prompts, so these go on from where it begins.
_AT_START = frozenset({"reasoning"})
# A turn ends with an answer or waits for a tool; many conversations share a system prompt.
_AT_END = frozenset({"answer", "tool_call", "system"})


def stops(spans: Iterable[Span], block_size: int) -> list[int]:
    """Return where a later prompt may continue: starts of reasoning, and ends of turns.

    Ends are those of answers, tool calls and system prompts. An engine keeps a state of recurrent
    layers there, and the window of layers with one: ``RadixIndex.insert(groups=, stops=)``.

    Args:
        spans: The spans of a sequence, such as `Stream.spans`; the built-in kinds count.
        block_size: Tokens per block of the index. Positions are rounded down to whole blocks.

    Raises:
        ValueError: `block_size` is below 1.

    Example:
        >>> from kvtrie import Span, tags
        >>> spans = [Span(0, 40, "system"), Span(50, 90, "reasoning"), Span(90, 100, "answer")]
        >>> tags.stops(spans, 16)
        [32, 48, 96]
    """
    if block_size < 1:
        msg = f"stops: block_size is {block_size}; it must be at least 1"
        raise ValueError(msg)
    found = set()
    for span in spans:
        if span.kind in _AT_START:
            found.add(span.start)
        if span.kind in _AT_END:
            found.add(span.end)
    whole = {position - position % block_size for position in found}
    return sorted(whole - {0})
