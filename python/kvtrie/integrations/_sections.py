"""The sections of a request's tokens, read on an engine's scheduler within a bound.

Most tokens are skipped. What is not skipped, tokens of delimiters and of headers, is bounded
(`most_steps`), because a prompt may be delimiters alone, and the scheduler waits for it. A request
with more is treated as without a chat format; whoever reads it decides what that means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvtrie.tags import Stream, Tagger

PIECE: Final = 256
"""The fewest tokens that are read before their steps are counted; fewer cost more calls."""


def most_steps(num_tokens: int) -> int:
    """How many of a request's tokens are read one by one, at most; a piece more may be.

    A message takes about five, so this is for messages of 40 tokens, and for 200 of any length. A
    step costs up to 20 us.
    """
    return 1024 + num_tokens // 8


def read_on(stream: Stream, ids: NDArray[np.integer]) -> bool:
    """Feed a stream the next, final tokens of its request, unless it has too many delimiters.

    So that nobody chooses with a prompt, or with what a model is made to say, how long the
    scheduler reads it (`most_steps`).

    Args:
        stream: What has been read of the request from its first token on.
        ids: Its next tokens.

    Returns:
        Whether all were read. If not, the stream has read some of them, and is of no use.
    """
    count = len(ids)
    most, at = most_steps(len(stream) + count), 0
    while at < count and stream.num_steps <= most:
        end = at + max(PIECE, most - stream.num_steps)
        stream.feed(ids[at:end], final=True)
        at = end
    return stream.num_steps <= most


def read_sections(tagger: Tagger, ids: NDArray[np.integer]) -> Stream | None:
    """The sections of tokens, not finished; None if they have too many delimiters to read."""
    stream = tagger.stream()
    return stream if read_on(stream, ids) else None
