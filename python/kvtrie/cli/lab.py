"""``kvtrie lab``: what does this chat template do to the cache?"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvtrie.cli import _options, _output
from kvtrie.cli._failure import fail, need
from kvtrie.cli._progress import ticks
from kvtrie.demo.conversations import Conversation, load_conversations

# As Python spells them. As text, each would be true for a template.
_WORDS: Final = {"true": "true", "false": "false", "none": "null"}


def lab(
    tokenizer: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL_OR_TOKENIZER",
            help="Directory with tokenizer.json and, unless given, the chat template.",
        ),
    ],
    chat: Annotated[
        Path | None,
        typer.Argument(
            metavar="CHAT",
            help="Your own conversations: one message or conversation per line, as JSON "
            "(default: the built-in ones).",
        ),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Template to use instead (jinja).")
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="What your requests pass to the template; the value is JSON. May be repeated.",
        ),
    ] = None,
    block_size: _options.BlockSize = 16,
    min_run: _options.MinRun = 16,
    as_json: _options.AsJson = False,
    html: _options.Html = None,
) -> None:
    """Show what a chat template does to the cache: what is found, turn by turn, and where it ends.

    Conversations are rendered request by request, with each switch of the template, and looked up
    in a real index. No model runs and nothing is downloaded. Exit code 2 means that the input is
    bad, 3 that the result cannot be written, 130 that it was interrupted (Ctrl-C).
    """
    need("the lab", "transformers", "jinja2")
    given = _arguments(arguments or [])
    _output.check(html)
    conversations = None if chat is None else _conversations(chat)
    loaded = _loaded(tokenizer, chat_template)
    _check_ids(conversations or [], len(loaded))
    from kvtrie.cli import _lab_page, _lab_shown  # noqa: PLC0415 - jinja2
    from kvtrie.lab import BUILT_IN, TemplateError, from_conversation, study  # noqa: PLC0415 - too

    chats = (
        list(BUILT_IN.values())
        if conversations is None
        else [from_conversation(one, f"line {one.line}") for one in conversations]
    )
    try:
        with ticks(sys.stderr, most=10) as shown:
            report = study(
                loaded, chats, arguments=given, block_size=block_size, min_run=min_run, step=shown
            )
    except (TemplateError, ValueError) as error:
        fail(f"{chat_template or tokenizer}: {error}")
    refused = [row.error for row in report.rows if row.error and not row.switch]
    if conversations is not None and refused:
        fail(f"{chat}: {refused[0]}")
    if html is not None:
        _output.write_whole(html, _lab_page.page(report, str(tokenizer)))
    if as_json:
        document = {"kvtrie": version("kvtrie"), **report.to_dict()}
        typer.echo(json.dumps(document, ensure_ascii=False, indent=2))
    else:
        _lab_shown.show(report)


def _arguments(given: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or not name.isidentifier():
            fail(f"--set {one!r} is not NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            if value.lower() in _WORDS:
                fail(f"--set {name}: {value!r} is not JSON; write {name}={_WORDS[value.lower()]}")
            fail(f"--set {name}: {value!r} is not JSON; text is written as '{name}=\"{value}\"'")
        except RecursionError:
            fail(f"--set {name}: the value is nested too deeply")
    return found


def _conversations(chat: Path) -> list[Conversation]:
    try:
        return load_conversations(chat, may_only_call=True)
    except OSError as error:
        fail(f"{chat}: {error.strerror or error}")
    except ValueError as error:
        fail(error)


def _check_ids(conversations: list[Conversation], num_tokens: int) -> None:
    """Refuse ids that the tokenizer does not have, which takes the tokenizer."""
    for one in conversations:
        for message, place in zip(one.messages, one.places, strict=True):
            largest = max(message.get("token_ids") or [0])
            if largest >= num_tokens:
                fail(f"{place}: {largest} is no id of the tokenizer, which has {num_tokens} tokens")


def _loaded(directory: Path, chat_template: Path | None) -> Any:  # noqa: ANN401 - transformers has no types
    if directory.name == "tokenizer.json" and directory.is_file():
        directory = directory.parent
    if not directory.is_dir():
        fail(f"{directory}: not a directory (tokenizers are not downloaded)")
    template = None
    if chat_template is not None:
        try:
            template = chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            fail(f"{chat_template}: {getattr(error, 'strerror', None) or error}")
        if not template.strip():
            fail(f"{chat_template}: the chat template is empty")
    # Without torch, transformers says on import that it finds none.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds

    try:
        loaded = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - the library raises errors of many types
        # Without the file, the library's first line ends where its list of other causes begins.
        has_file = (directory / "tokenizer.json").is_file()
        reason = error if has_file else "it has no tokenizer.json"
        fail(f"{directory}: no tokenizer can be loaded: {reason}")
    if template is not None:
        loaded.chat_template = template
    if not loaded.chat_template:
        fail(f"{directory}: it has no chat template; give one with --chat-template FILE")
    return loaded
