"""What vLLM's own server was started with, by the command line of its process.

vLLM asks for a connector's class before it loads weights, but without its settings where CUDA
graphs are off; and no configuration of the engine has the chat template. vLLM's other processes
have the command line of the first one. Of other programs nothing is read, and nothing that is
spread over several options or a file: `option` then returns None.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any, Final

from kvtrie.models.template import is_text

TRANSFER: Final = "kv-transfer-config"
TEMPLATE: Final = "chat-template"
ARGUMENTS: Final = "default-chat-template-kwargs"
MODEL: Final = "model"
SCHEDULER: Final = "scheduler-cls"
EVENTS: Final = "kv-events-config"

_PROGRAM: Final = "vllm"
_SERVER: Final = ("vllm", "entrypoints", "openai")
_FILE: Final = "config"


def option(name: str) -> str | None:
    """The value of a long option; None if this is not vLLM's server, or it was not given."""
    if not _is_vllm():
        return None
    value: str | None = None
    rest = iter(sys.argv[1:])
    for one in rest:
        said = re.fullmatch(r"--([^=.]+)(\.[^=]+)?(?:=(.*))?", one, re.DOTALL)
        if said is None:
            continue
        given, part, inline = said.groups()
        given = given.replace("_", "-")
        if given == _FILE or (given == name and part):
            return None
        if given == name:
            value = next(rest, None) if inline is None else inline
    return value


def model() -> str | None:
    """The model that the server was started with; None if the command line does not say it."""
    if not is_known():
        return None
    given = option(MODEL)
    # The program takes it by its position too; what follows an option may be the option's.
    if given is None and sys.argv[1:2] == ["serve"]:
        first = sys.argv[2:3]
        given = first[0] if first and not first[0].startswith("-") else None
    return given


def chat_template() -> str | None:
    """``--chat-template``: a path or a text; of one that vLLM ships and knows by name, the path."""
    given = option(TEMPLATE)
    if given is None or is_text(given) or Path(given).is_file():
        return given
    package = importlib.util.find_spec(_PROGRAM)
    if package is None or package.origin is None:
        return given
    shipped = Path(package.origin).parent / "transformers_utils" / "chat_templates" / given
    return str(shipped) if shipped.is_file() else given


def template_arguments() -> dict[str, Any] | None:
    """``--default-chat-template-kwargs``, empty without it.

    None if they are not one JSON mapping, or may be in a file.
    """
    is_somewhere = is_given(ARGUMENTS) or is_given(_FILE)
    return _mapping(option(ARGUMENTS)) if is_somewhere else {}


def is_given(name: str) -> bool:
    """Whether the server was started with a long option, or with a part of it."""
    return _is_vllm() and any(
        re.match(rf"--{name}([=.]|$)", one.replace("_", "-")) for one in sys.argv[1:]
    )


def transfer_config() -> dict[str, Any] | None:
    """``--kv-transfer-config``, if it was given as one JSON mapping."""
    return _mapping(option(TRANSFER))


def events_config() -> dict[str, Any] | None:
    """``--kv-events-config``, empty without it; None if it is not one JSON mapping."""
    return _mapping(option(EVENTS)) if is_given(EVENTS) else {}


def publishes() -> bool:
    """Whether ``--kv-events-config`` switches events on, as one JSON mapping."""
    return bool((events_config() or {}).get("enable_kv_cache_events"))


def _mapping(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def settings(connector: str, module: str) -> list[dict[str, Any]]:
    """The settings that ``--kv-transfer-config`` has for a connector, alone or among others."""
    found = transfer_config()
    if found is None:
        return []
    among = found.get("kv_connector_extra_config", {})
    others = among.get("connectors") if isinstance(among, dict) else None
    extras = [
        one.get("kv_connector_extra_config", {})
        for one in (found, *(others if isinstance(others, list) else ()))
        if isinstance(one, dict)
        and one.get("kv_connector") == connector
        and one.get("kv_connector_module_path") == module
    ]
    return [extra for extra in extras if isinstance(extra, dict)]


def is_known() -> bool:
    """Whether this is vLLM's server, all options of which are on the command line."""
    return _is_vllm() and not any(re.match(r"--config(=|$)", one) for one in sys.argv[1:])


def _is_vllm() -> bool:
    program = Path(sys.argv[0]) if sys.argv else Path()
    return program.name == _PROGRAM or program.parts[-4:-1] == _SERVER
