"""The inspector's page: one file with its style, its scripts and its data, that needs nothing else.

Its security policy allows this style and this script by their hashes, and no request. Data is JSON
in which nothing can end its element.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined, select_autoescape
from markupsafe import Markup

if TYPE_CHECKING:
    from collections.abc import Mapping

_VIEWS = ("tree", "plan", "traffic")


def page(
    title: str,
    summary: str,
    documents: Mapping[str, Any],
    later: Mapping[str, str] | None = None,
) -> str:
    """The page.

    Args:
        title: What it is about.
        summary: One line for people.
        documents: The data by what shows it: ``tree``, ``plan`` or ``traffic``.
        later: Columns that the first picture does not need, so that the browser reads them last.
    """
    folder = files("kvtrie.inspector")
    names = ["common", *(name for name in _VIEWS if name in documents), "main"]
    sources = {name: folder.joinpath(f"{name}.js").read_text(encoding="utf-8") for name in names}
    script = "\n" + "\n".join(sources.values())
    style = folder.joinpath("page.css").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
    )
    return environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8")).render(
        title=title,
        summary=summary,
        style=Markup(style),  # noqa: S704 - our own
        style_hash=Markup(_hash(style)),  # noqa: S704 - base64
        script=Markup(script),  # noqa: S704 - our own
        script_hash=Markup(_hash(script)),  # noqa: S704 - base64
        data=Markup(_json(documents)),  # noqa: S704 - has no character that HTML reads
        later=later or {},
        version=version("kvtrie"),
    )


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(value: Any) -> str:  # noqa: ANN401 - whatever JSON can hold
    """JSON of ASCII characters, without those that mean something in HTML."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
