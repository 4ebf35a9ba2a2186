"""The chat format that the settings name, of a tokenizer; nothing of vLLM is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kvtrie._nearest import hint
from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations.vllm import _template
from kvtrie.integrations.vllm._settings import WHERE
from kvtrie.tags import Tagger
from kvtrie.tags.openings import Openings

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtrie.integrations.vllm._settings import Settings

DROPPED_AT: Final = {"user": "next user message", "final": "final answer", "never": "never"}
"""When a chat template drops reasoning, by the boundary of its format."""


class _UnknownTemplateError(Exception):
    """No preset reads a chat template."""


def tagger_of(
    settings: Settings,
    tokenizer: Any,  # noqa: ANN401 - of many types
    otherwise: Callable[[str], Tagger | None],
    defaults: Mapping[str, Any] | None = None,
) -> Tagger | None:
    """The chat format; None if tokens are not tagged.

    Args:
        settings: The connector's settings.
        tokenizer: The model's; None without one.
        otherwise: Called if ``"auto"`` does not know the chat template, with the reason.
        defaults: What vLLM gives to the template; None: what the server's command line has.

    Raises:
        SettingsError: The format does not fit the tokenizer, or the arguments the template.
    """
    form = settings.chat_format
    if isinstance(form, Mapping):
        return Tagger.from_ids(**form)
    if form is None:
        return None
    if form != "auto":
        return _from_preset(form, tokenizer)
    if tokenizer is None:
        return None
    try:
        return _from_template(settings, tokenizer, defaults)
    except _UnknownTemplateError as error:
        return otherwise(str(error))


def openings_of(
    settings: Settings,
    tagger: Tagger | None,
    tokenizer: Any,  # noqa: ANN401 - likewise
) -> Openings | None:
    """How messages begin, where the chat format does not say it; None if it does, or no way.

    Args:
        settings: As for `tagger_of`.
        tagger: What it found.
        tokenizer: The model's; None without one.
    """
    if tokenizer is None or settings.chat_format != "auto" or (tagger and tagger.format.starts):
        return None
    return Openings.of(tokenizer, **_arguments(settings, tokenizer, None))


def form_of(tagger: Tagger | None) -> str:
    """The chat format, and when it drops reasoning, in the words of the log."""
    if tagger is None:
        return "chat format: unknown"
    dropped = DROPPED_AT[tagger.format.boundary]
    return f"chat format: {tagger.format.name}; reasoning dropped at: {dropped}"


def _from_preset(name: str, tokenizer: Any) -> Tagger:  # noqa: ANN401 - likewise
    if tokenizer is None:
        msg = f"{WHERE}: chat_format is {name!r}, and vLLM has no tokenizer (skip_tokenizer_init): "
        msg += "give token ids, as kvtrie.tags.Tagger.from_ids takes them"
        raise SettingsError(msg)
    try:
        return Tagger.from_preset(name, tokenizer)
    except (TypeError, ValueError) as error:
        msg = f"{WHERE}: chat_format: {error}"
        raise SettingsError(msg) from error


def _from_template(
    settings: Settings,
    tokenizer: Any,  # noqa: ANN401 - likewise
    defaults: Mapping[str, Any] | None,
) -> Tagger:
    arguments = _arguments(settings, tokenizer, defaults)
    given = settings.template_arguments or {}
    _check_arguments(given, _text(settings, tokenizer))
    try:
        return Tagger.from_tokenizer(tokenizer, **arguments)
    except (TypeError, ValueError) as error:
        raise _UnknownTemplateError(str(error)) from error


def _text(settings: Settings, tokenizer: Any) -> object:  # noqa: ANN401 - likewise
    """The chat template that is served."""
    return _template.served(settings).text or getattr(tokenizer, "chat_template", None)


def _arguments(
    settings: Settings,
    tokenizer: Any,  # noqa: ANN401 - likewise
    defaults: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What the tokenizer's method renders prompts with, as the server does."""
    given = _template.defaults(_text(settings, tokenizer), defaults)
    given |= settings.template_arguments or {}
    template = _template.served(settings).text
    return given if template is None else given | {"chat_template": template}


def _check_arguments(arguments: Mapping[str, Any], template: object) -> None:
    """Refuse arguments that the template does not read."""
    if not arguments or not template:
        return
    known = _template.names_in(template)
    unknown = [name for name in arguments if known is not None and name not in known]
    if unknown:
        near = hint(unknown[0], known or ())
        msg = f"{WHERE}: template_arguments: the chat template reads no {unknown[0]!r}{near}"
        raise SettingsError(msg)
