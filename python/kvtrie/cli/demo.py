"""``kvtrie demo``: replays a conversation and shows what reuse finds and saves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtrie.cli import _options  # noqa: TC001 - typer reads annotations
from kvtrie.cli._failure import fail, need
from kvtrie.demo import load_conversations, model_path
from kvtrie.models.directory import checked_model_dir

if TYPE_CHECKING:
    from kvtrie.demo import Conversation

MISMATCH = 1
DIFFERS = "a logit differs by more than rounding from a run without cache"


def demo(
    chat: Annotated[
        Path | None,
        typer.Argument(
            metavar="CHAT.jsonl",
            help="OpenAI-style chat file: one message or conversation per line (default: shipped).",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Model directory (default: the small model 'demo')."),
    ] = None,
    as_json: _options.AsJson = False,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks of the KV pool (default: by conversation).")
    ] = None,
    block_size: _options.BlockSize = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 192,
    repeats: Annotated[
        int, typer.Option(min=1, help="Timed pairs per turn; medians are shown.")
    ] = 3,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Threads of torch (default: 1 for the small model, else torch's choice)."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Torch device of model and pool.")] = ("cpu"),
    dtype: Annotated[
        str | None,
        typer.Option(help="Element type (default: float32 for the small model, else DIR's own)."),
    ] = None,
) -> None:
    """Answer a conversation with a real model while its KV is found, pinned and shared.

    Every turn is answered once with reuse, checked token by token against the same model without a
    cache, and timed in pairs with and without reuse. Nothing is downloaded: the small model is in
    the package kvtrie-demo-models, which `make dist` builds in a checkout of kvtrie. Results go to
    stdout when all is done, progress to stderr. Exit code 1 means that a logit differs by more than
    rounding, 2 that the input is bad, 3 that results cannot be written, 130 that it was interrupted
    (Ctrl-C).
    """
    conversations = _conversations(chat)
    try:
        checked_model_dir(model or model_path())
    except FileNotFoundError as error:
        fail(error)
    need("the demo", "torch", "transformers", "jinja2", extras="cli,transformers")
    # Torch takes seconds to import: bad input is reported before, and --help does not need it.
    from kvtrie.cli import _progress, _replay, _report  # noqa: PLC0415 - slow: torch

    settings = _replay.DemoSettings(
        model=model,
        num_blocks=num_blocks,
        block_size=block_size,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        # The small model's matrices are too small for a second thread.
        threads=threads or (1 if model is None else None),
        device=device,
        dtype=dtype or ("float32" if model is None else "auto"),
    )
    turns = sum(len(conversation.turns()) for conversation in conversations)
    with _progress.progress(turns, sys.stderr) as step:
        try:
            result = _replay.replay(conversations, settings, step)
        except _replay.BadInputError as error:
            fail(error)
    if as_json:
        typer.echo(_report.as_json(result))
    else:
        _report.show(result)
    if not result.is_right:
        typer.echo(f"kvtrie: {DIFFERS}", err=True)
        raise typer.Exit(MISMATCH)


def _conversations(chat: Path | None) -> list[Conversation]:
    try:
        return load_conversations(chat)
    except OSError as error:
        fail(f"{chat}: {error.strerror or error}")
    except ValueError as error:
        fail(error)
