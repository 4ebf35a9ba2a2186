"""``kvtrie explain``: says why a prompt does not find all of its KV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import kvtrie
from kvtrie.cli import _cached, _explained, _options, _prompts
from kvtrie.cli._failure import fail

_BLOCK_SIZE = 16


def explain(
    prompts: Annotated[
        list[str],
        typer.Argument(
            metavar="A [B]",
            help="What was cached, and the prompt; with --snapshot the prompt alone. '-' is stdin.",
        ),
    ],
    snapshot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What is cached, as `RadixIndex.snapshot` wrote it."),
    ] = None,
    tokenizer: _options.Tokenizer = None,
    as_text: _options.AsText = False,
    block_size: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Tokens per block (default: 16, or the snapshot's)."),
    ] = None,
    context: Annotated[
        int, typer.Option(min=0, max=10_000, help="Tokens shown on either side of the position.")
    ] = 8,
    session: Annotated[
        str | None,
        typer.Option(metavar="ID", help="The prompt's session, of those in the snapshot."),
    ] = None,
    as_json: _options.AsJson = False,
    model: _options.Model = None,
    kv_dtype: _options.KvDtype = None,
    rope: _options.Rope = None,
    adapter: _options.Adapter = None,
    salt: _options.Salt = None,
) -> None:
    """Compare a prompt with what was cached, and say where the exact match ends, and why.

    A prompt is a file of token ids (a JSON list, or numbers separated by white space or commas) or
    of text, which needs --tokenizer. Of two prompts the first counts as cached; with --snapshot,
    what an index held. Nothing is downloaded. Exit code 2 means that the input is bad, 3 that the
    result cannot be written, 130 that it was interrupted (Ctrl-C).
    """
    fields = {
        "model": model,
        "kv_dtype": kv_dtype,
        "rope": rope,
        "adapter": adapter,
        "salt": salt,
    }
    asked = {name: value for name, value in fields.items() if value is not None}
    wanted = 1 if snapshot is not None else 2
    if len(prompts) != wanted:
        given = f"{len(prompts)} {'prompt' if len(prompts) == 1 else 'prompts'} given"
        fail(
            f"{given}; with --snapshot there is one, the prompt to explain"
            if snapshot is not None
            else f"{given}; give two, what was cached and the prompt, or one and --snapshot"
        )
    if prompts.count(_prompts.STDIN) > 1:
        fail("the standard input can be read once: give one of the prompts as a file")
    if snapshot is not None and block_size is not None:
        fail("--block-size comes from the snapshot; omit it")
    if snapshot is None and asked:
        fail(f"--{next(iter(asked)).replace('_', '-')} names a namespace in a snapshot; give one")
    if snapshot is None and session is not None:
        fail("--session names a session of a snapshot; give one")
    loaded = None if tokenizer is None else _prompts.load_tokenizer(tokenizer)
    read = [_prompts.read_prompt(name, loaded, is_text=as_text) for name in prompts]
    if read[0].was_text != read[-1].was_text:
        text, ids = sorted(read, key=lambda prompt: not prompt.was_text)
        fail(f"{text.name} is text and {ids.name} holds token ids; give two of a kind")
    try:
        if snapshot is not None:
            index, _ = _cached.restored(snapshot)
            space = _cached.chosen(index, asked, snapshot)
        else:
            index, space = _cached.filled(read[0].ids, block_size or _BLOCK_SIZE)
        why = index.explain(
            kvtrie.TokenSequence(read[-1].ids, space),
            context=context,
            session=session if snapshot else _cached.SESSION,
        )
    except (kvtrie.KvTrieError, ValueError) as error:
        fail(error)
    if as_json:
        typer.echo(_explained.as_json(why, loaded))
    else:
        _explained.show(why, loaded)
