"""Spans of a chat request (reasoning, answer, tool call, prompt) and their life after a turn.

A `Tagger` is a chat format compiled for one vocabulary; it is immutable and shared. A `Stream`
follows one request, in any portions. A `TurnPolicy` says what happens to the spans of a finished
turn, as `tag`, `mark_dead` and `remove_spans` calls on an index. See ``docs/tags.md``.

Rules of the stream:

* **Ids, not text.** A user cannot type a delimiter that is one special token, unless the server
  tokenises user text into special ids; the model then reads it as a delimiter too. A delimiter of
  several ordinary tokens can be typed. So sections count in the assistant's messages alone, a
  textual start of a message only where no message is open, and the delimiters of a wrapped tool
  result only at the edges of a user message.
* **Messages** begin with the delimiter of a role and end with an end delimiter or at the next
  message. Messages of an unknown role get no tag.
* **Reasoning** without an opening delimiter began with the message's text or after the preceding
  tool call. This counts once per message. The first closing delimiter ends reasoning, however
  often it was opened.
* **Tool calls** may be inside reasoning. Text inside a call is never a delimiter of a section.
* **A missing end**: an open section ends with its message, or with `finish()`.
"""

from kvtrie.tags.formats import Boundary, Channels, Drops, Format, MessageStart, Pair, Role
from kvtrie.tags.presets import PRESETS, preset
from kvtrie.tags.sections import Section, Turn
from kvtrie.tags.spellings import Tokenizer
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
]
