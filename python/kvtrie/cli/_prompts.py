"""Reads prompts: token ids, or text that a tokenizer encodes."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvtrie.cli._failure import fail, need

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

STDIN: Final = "-"
_MOST: Final = 2**32
# Separated by white space, commas or both.
_NUMBERS: Final = re.compile(r"\s*-?\d+(?:[\s,]+-?\d+)*[\s,]*")


class Encoding(Protocol):
    """Text as token ids."""

    @property
    def ids(self) -> list[int]:
        """The ids."""


class TextTokenizer(Protocol):
    """The methods that a tokenizer needs."""

    def encode(self, sequence: str, *, add_special_tokens: bool) -> Encoding:
        """Encode text."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode ids."""


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """One prompt: its name for messages, and its token ids."""

    name: str
    ids: list[int]
    was_text: bool


def load_tokenizer(directory: Path) -> TextTokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        fail(f"{directory}: it has no tokenizer.json (tokenizers are not downloaded)")
    need("--tokenizer", "tokenizers")
    import tokenizers  # noqa: PLC0415 - only where a tokenizer is asked for

    try:
        loaded: TextTokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises Exception itself
        fail(f"{path}: {error}")
    return loaded


def read_prompt(name: str, tokenizer: TextTokenizer | None, *, is_text: bool) -> GivenPrompt:
    """Read a path, or the standard input for ``-``; bad input ends the command.

    Without a tokenizer only ids are allowed. ``is_text``: numbers also count as text.
    """
    text = _read(name)
    ids = None if is_text else _ids(name, text)
    if ids is not None:
        if not ids:
            fail(f"{name}: it has no tokens")
        return GivenPrompt(name, ids, was_text=False)
    if not text:
        fail(f"{name}: it is empty")
    if tokenizer is None:
        fail(f"{name}: this is text, not token ids; give --tokenizer DIR to encode it")
    encoded = tokenizer.encode(text, add_special_tokens=False).ids
    if not encoded:
        fail(f"{name}: the tokenizer makes no tokens of it")
    return GivenPrompt(name, encoded, was_text=True)


def _read(name: str) -> str:
    try:
        if name == STDIN:
            raw = sys.stdin.buffer.read()
        else:
            with open(name, "rb") as file:  # noqa: PTH123 - the name is shown as it was given
                raw = file.read()
        return raw.decode("utf-8-sig")
    except OSError as error:
        fail(f"{name}: {error.strerror or error}")
    except UnicodeDecodeError as error:
        fail(f"{name}: byte {error.start} is not UTF-8")


def _ids(name: str, text: str) -> list[int] | None:
    """Token ids, or None if the text is no list of them."""
    values: Any = None
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            return None
    elif not text or text.isspace():
        return [] if text else None
    elif _NUMBERS.fullmatch(text):
        try:
            values = [int(number) for number in re.split(r"[\s,]+", text.strip().strip(","))]
        except ValueError as error:
            fail(f"{name}: {error}")
    else:
        return None
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        # A list of something else may be the text of a prompt.
        return None
    for place, value in enumerate(values):
        if not 0 <= value < _MOST:
            fail(f"{name}: number {place} is {value}; a token id is in [0, {_MOST})")
    return list(values)
