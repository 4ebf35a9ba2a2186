"""A chat template as people name it: by the path of a file, or by its text."""

from __future__ import annotations

from pathlib import Path
from typing import Final

# A template without any of these renders nothing of a conversation.
_JINJA: Final = "{}\n"


class TemplateFileError(ValueError):
    """A chat template that cannot be read; the message says why."""


def is_text(given: str) -> bool:
    """Whether this is a template itself, and no path."""
    return any(one in given for one in _JINJA)


def read_template(given: str) -> str:
    """The text of a chat template, given by its path or by itself.

    Raises:
        TemplateFileError: The file cannot be read, or is empty.
    """
    if is_text(given):
        return given
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        msg = f"{given!r} is neither a file that can be read nor a template: {why}"
        raise TemplateFileError(msg) from error
    if not text.strip():
        msg = f"{given!r} is empty"
        raise TemplateFileError(msg)
    return text
