"""The chat template that vLLM serves.

vLLM renders prompts in another process than its engine, whose configuration does not have
``--chat-template``. So the setting says it, else the server's command line, else it is the model
directory's. Likewise what the template is given where a request does not say it,
``--default-chat-template-kwargs``; the setting ``template_arguments`` takes precedence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations.vllm import _command
from kvtrie.integrations.vllm._settings import WHERE
from kvtrie.models.template import TemplateFileError, read_template

if TYPE_CHECKING:
    from kvtrie.integrations.vllm._settings import Settings

_DIRECTORY: Final = "the model directory's"
_UNKNOWN: Final = (
    f"{_DIRECTORY} (vLLM shows no --chat-template here: set chat_template if it has one)"
)
_WITH: Final = f", with --{_command.ARGUMENTS}"
_UNREAD: Final = f" (--{_command.ARGUMENTS} is not one JSON text here: set template_arguments)"


class Served(NamedTuple):
    """A template, and where it and its arguments come from, for the log.

    ``text`` is None for the model directory's.
    """

    text: str | None
    source: str


def defaults(template: object, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the server gives to a template, of that which the template reads; vLLM drops the rest.

    Args:
        template: As for `names_in`.
        given: What the server was started with; None: what its command line has.
    """
    if given is None:
        given = _command.template_arguments() or {}
    known = names_in(template) if given and template else None
    return {name: one for name, one in given.items() if known is None or name in known}


def served(settings: Settings) -> Served:
    """The template that prompts are rendered with, as far as the engine can know.

    Raises:
        SettingsError: Its file cannot be read.
    """
    given, source = settings.chat_template, "the setting chat_template"
    arguments = _command.template_arguments()
    more = _WITH if arguments else ""
    if arguments is None and settings.template_arguments is None:
        more = _UNREAD
    if given is None:
        given, source = _command.chat_template(), f"--{_command.TEMPLATE}"
    if given is None:
        return Served(None, (_DIRECTORY if _command.is_known() else _UNKNOWN) + more)
    try:
        return Served(read_template(given), source + more)
    except TemplateFileError as error:
        msg = f"{WHERE}: chat_template: {error}"
        if settings.chat_template is None:
            msg += f" (it is --{_command.TEMPLATE}: name its file in this setting)"
        raise SettingsError(msg) from error


def names_in(template: object) -> frozenset[str] | None:
    """What a chat template reads of its arguments; None if it cannot be told.

    Args:
        template: Its text, or texts by name as some tokenizers have them.
    """
    try:
        from jinja2 import Environment, TemplateError, meta  # noqa: PLC0415 - not needed to serve
    except ImportError:
        return None
    texts = template.values() if isinstance(template, Mapping) else (template,)
    found: set[str] = set()
    # Nothing is rendered.
    parser = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True)
    for text in texts:
        try:
            found |= meta.find_undeclared_variables(parser.parse(str(text)))
        except (TemplateError, RecursionError):
            return None
    return frozenset(found)
