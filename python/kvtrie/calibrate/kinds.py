"""The shipped kinds of edit: boxes that do not meet, in the terms of ``kvtrie.gates.Terms``.

They were chosen by what moved deviation on a real model: whether anything new came before a run,
how much, whether its context was cut once or often, and whose KV it is. A measured kind is its box
here, ended where the measured plans end.
"""

from __future__ import annotations

from typing import Final

from kvtrie.gates import Box, Range

_NONE: Final = Range(most=0)
_HALF: Final = 0.5
_SEVERAL: Final = 5

KINDS: Final = {
    # Approximate KV in place, and nothing that moves: the turns after an edit.
    "in place": Box(
        cuts=_NONE,
        lost_context=_NONE,
        new_context=_NONE,
        distance=_NONE,
        same_conversation=True,
    ),
    # Something was removed once: the last reasoning, the oldest exchange, a document.
    "one cut": Box(
        cuts=Range(most=1), lost_context=Range(above=0), new_context=_NONE, same_conversation=True
    ),
    # Something was replaced once: a date or a nonce near the front.
    "one change": Box(cuts=Range(most=1), new_context=Range(above=0), same_conversation=True),
    # Something was removed several times: the reasoning of a few replies.
    "several cuts": Box(
        cuts=Range(above=1, most=_SEVERAL), new_context=_NONE, same_conversation=True
    ),
    # The same many times: all reasoning of an agent's steps.
    "many cuts": Box(cuts=Range(above=_SEVERAL), new_context=_NONE, same_conversation=True),
    # Something was replaced several times: results of tools by stubs.
    "replaced": Box(
        cuts=Range(above=1), new_context=Range(above=0, most=_HALF), same_conversation=True
    ),
    # Cut, and most of the context is new: documents in another order.
    "reordered": Box(cuts=Range(above=1), new_context=Range(above=_HALF), same_conversation=True),
    # From other conversations: documents that others have cached.
    "other conversation": Box(same_conversation=False),
}
"""Each kind and its box."""
