"""A log of finished prompts: what was reused, what was computed and why, without any text.

``kvtrie replay`` and a person who asks what reuse would bring need to know which prompts have
tokens in common, not which tokens. So a log has keyed digests: of each whole block, and of windows
of tokens at positions that the tokens themselves choose, by which moved runs are found at any
alignment. An engine writes it with a `Recorder`; `Log` reads it.

**What it promises.** Two prompts with ``min_run`` tokens in a row in common (32 by default) have a
window in common there, wherever the run begins in either. Of a longer run, the windows in common
leave out less than half of ``min_run`` tokens at each end. Shorter runs may be missed. A log never
has text, and has token ids only with ``content="tokens"``. A recorder never blocks: what does not
fit into its queue, and what the disk refuses, is dropped, counted, and noted in the log. A log uses
at most ``files * max_bytes`` bytes, and reads up to its last whole record wherever it was cut.

**What is secret.** The digests are BLAKE2b under a key: without the key they are random numbers,
equal where tokens, model, adapter and salt are equal. A log of digests therefore shows lengths,
times, kinds of messages, and which parts of which prompts are equal, but between prompts of
different salts not even that. Whoever has the key can also test a guess: a block or a window of
tokens that they spell out exactly, and a guessed name of a request or session. By default each
recorder makes a key, keeps it in memory, and nobody has it afterwards; logs of different recorders
then have nothing in common. Give a ``key_file`` to compare them, and keep it like a password.

**What it costs.** The engine's thread copies the tokens and appends them to a queue. A thread in
the background does the rest, and sleeps after every 256 digests, so that the engine's thread gets
Python's lock. ``docs/record.md`` has the format, bytes and times.

This package needs numpy, and no engine.
"""

from __future__ import annotations

from kvtrie.record._errors import LogError, LogFormatError, LogLineError, LogVersionError
from kvtrie.record.digests import Digester, new_key, read_key
from kvtrie.record.format import CONTENTS, VERSION, Dropped, Finished, Header, Recorded, Would
from kvtrie.record.options import RecordOptions, RecordOptionsError
from kvtrie.record.reader import Log, files_of
from kvtrie.record.writer import RecordCounts, Recorder

__all__ = [
    "CONTENTS",
    "VERSION",
    "Digester",
    "Dropped",
    "Finished",
    "Header",
    "Log",
    "LogError",
    "LogFormatError",
    "LogLineError",
    "LogVersionError",
    "RecordCounts",
    "RecordOptions",
    "RecordOptionsError",
    "Recorded",
    "Recorder",
    "Would",
    "files_of",
    "new_key",
    "read_key",
]
