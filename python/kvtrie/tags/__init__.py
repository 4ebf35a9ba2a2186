"""Spans of a chat request (reasoning, answer, tool call, prompt) and their life after a turn.

A `Tagger` is a chat format compiled for one vocabulary. A `Stream` follows one request. A
`TurnPolicy` says what happens to the spans of a finished turn, as `tag`, `mark_dead` and
`remove_spans` calls on an index. ``docs/tags.md`` has examples and edge cases.

Messages begin with the delimiter of a role and end with an end delimiter or at the next message.
Sections count in the assistant's messages alone. Reasoning without an opening delimiter began with
the message's text or after the preceding tool call; this counts once per message. Text inside a
tool call is never a delimiter of a section.
"""

from kvtrie.tags.formats import Boundary, Channels, Drops, Format, MessageStart, Pair, Role
from kvtrie.tags.presets import PRESETS, preset
from kvtrie.tags.sections import Section, Turn
from kvtrie.tags.spellings import Tokenizer
from kvtrie.tags.stops import stops
from kvtrie.tags.stream import Stream
from kvtrie.tags.tagger import Tagger
from kvtrie.tags.turns import Action, ClosedTurn, TurnDecision, TurnPolicy

__all__ = [
    "PRESETS",
    "Action",
    "Boundary",
    "Channels",
    "ClosedTurn",
    "Drops",
    "Format",
    "MessageStart",
    "Pair",
    "Role",
    "Section",
    "Stream",
    "Tagger",
    "Tokenizer",
    "Turn",
    "TurnDecision",
    "TurnPolicy",
    "preset",
    "stops",
]
