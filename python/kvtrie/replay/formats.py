"""Opens a file of recorded traffic, recognises its format, and reads it.

`FORMATS` lists what is known. To add a format, write a `TraceFormat`: ``recognises`` sees the first
line that is not blank, ``read`` the whole file as a `TraceFile`, and says with ``TraceFile.error``
which line is wrong. A file is plain, compressed with gzip, or a tar archive of files of a format
that may be in one. It is read once, from front to back; nothing is guessed where two readings are
possible.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtrie.replay import hashed, logged, texts
from kvtrie.replay.source import TraceFile, read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtrie.replay.trace import Trace

_LENGTHS: Final = re.compile(r"^[^{\[]*(tokens|length)", re.IGNORECASE)
_ONLY_LENGTHS: Final = (
    "the file has lengths only: without the prompts' content no hit rate can be computed "
    "(it is for load)"
)


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """One format.

    Attributes:
        name: Its name in reports.
        recognises: Whether the first line is of it.
        read: Reads it, with the tokens per block that the caller gave, or None.
        in_archives: Whether ``read`` also takes an archive of such files.
    """

    name: str
    recognises: Callable[[str], bool]
    read: Callable[[TraceFile, int | None], Trace]
    in_archives: bool = False


FORMATS: Final = (
    TraceFormat(logged.NAME, logged.is_log, logged.read_log),
    TraceFormat("Qwen-Bailian", hashed.is_bailian, hashed.read_bailian),
    TraceFormat("Mooncake", hashed.is_mooncake, hashed.read_mooncake),
    TraceFormat(texts.NAME, texts.is_agent, texts.read_agent, in_archives=True),
)


def read_trace(
    path: Path | str,
    block_size: int | None = None,
    encode: Callable[[str], Sequence[int]] | None = None,
) -> Trace:
    """Read a file of a known format.

    Args:
        path: The file.
        block_size: Tokens per block, where the file does not say it. None: what the format has, or
            what lengths and numbers of blocks allow.
        encode: Token ids of a text, for traces of text. None: words and marks are tokens.

    Raises:
        TraceError: The file cannot be read, is of no known format, or a line of it is bad.
    """
    source = TraceFile(Path(path), encode)
    first = source.first()
    for form in FORMATS:
        if form.recognises(first):
            if source.is_archive and not form.in_archives:
                why = f"an archive of files of the format {form.name}: unpack it"
                raise source.first_error(why)
            return form.read(source, block_size)
    raise source.first_error(_why_unknown(first))


def _why_unknown(first: str) -> str:
    known = ", ".join(form.name for form in FORMATS)
    try:
        found: Any = read_json(first)
    except ValueError:
        if _LENGTHS.match(first):
            return _ONLY_LENGTHS
        if first.startswith("{"):
            return "not JSON: the line is cut off, or not one object, or nested too deeply"
        return f"unknown format (known: {known})"
    if isinstance(found, dict):
        if "version" in found:
            return f"unknown format or version {str(found['version'])[:40]!r} (known: {known})"
        if "input_length" in found:
            return _ONLY_LENGTHS
    return f"unknown format (known: {known})"
