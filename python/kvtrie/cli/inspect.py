"""``kvtrie inspect``: a page that shows what an index holds, what a plan reuses, or a log."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import kvtrie
from kvtrie.cli import _cached, _options, _output, _prompts
from kvtrie.cli._failure import fail, need, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtrie.inspector import PageTree

    Decode = Callable[[Sequence[int]], str]

_BLOCK_SIZE = 16
_LOG = b'{"kvtrie_log":'
_MOST = 2


def inspect(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="SNAPSHOT [PROMPT] | LOG | A B",
            help="A snapshot, alone or with a prompt to plan; a recorder's log; or what was "
            "cached and the prompt. '-' is a prompt on stdin.",
        ),
    ],
    html: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path(
        "inspect.html"
    ),
    tokenizer: _options.Tokenizer = None,
    as_text: _options.AsText = False,
    block_size: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Tokens per block of two prompts (default: 16)."),
    ] = None,
    session: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID",
            help="A session's id, to show instead of its digest. May be repeated. The first is "
            "that of the prompt.",
        ),
    ] = None,
    model: _options.Model = None,
    kv_dtype: _options.KvDtype = None,
    rope: _options.Rope = None,
    adapter: _options.Adapter = None,
    salt: _options.Salt = None,
) -> None:
    """Write a page that shows a snapshot's tree, a plan, or the requests of a log.

    The page is one file that works without a server and asks no host. It has the token ids, and
    with --tokenizer the text, of the prompts. Exit code 2 means that the input is bad, 3 that the
    page cannot be written, 130 that it was interrupted (Ctrl-C).
    """
    need("the page", "jinja2")
    fields = {
        "model": model,
        "kv_dtype": kv_dtype,
        "rope": rope,
        "adapter": adapter,
        "salt": salt,
    }
    asked = {name: value for name, value in fields.items() if value is not None}
    sessions = session or []
    kind = _kind(inputs)
    has_plan = len(inputs) == _MOST
    if asked and (kind != "tree" or not has_plan):
        fail(
            f"--{next(iter(asked)).replace('_', '-')} names a prompt's namespace in a snapshot; "
            "give both"
        )
    if sessions and kind != "tree":
        fail("--session names sessions of a snapshot; give one")
    if block_size is not None and kind != "plan":
        fail("--block-size is for two prompts; a snapshot and a log have their own")
    if tokenizer is not None and kind == "traffic":
        fail("--tokenizer has nothing to decode: the page of a log shows no tokens")
    loaded = None if tokenizer is None else _prompts.load_tokenizer(tokenizer)
    later: dict[str, str] = {}
    if kind == "traffic":
        summary, documents = _traffic(Path(inputs[0]))
    elif kind == "tree":
        summary, documents, later = _tree(inputs, loaded, asked, sessions, as_text=as_text)
    else:
        summary, documents = _plan(inputs, loaded, block_size or _BLOCK_SIZE, as_text=as_text)
    from kvtrie.cli import _inspect_page  # noqa: PLC0415 - jinja2

    title = " and ".join(Path(one).name for one in inputs)
    _output.write_whole(html, _inspect_page.page(title, summary, documents, later))
    typer.echo(printable(summary))
    typer.echo(printable(f"the page is {html}"))


def _kind(inputs: Sequence[str]) -> str:
    """What the inputs are, by their first bytes; bad input ends the command."""
    from kvtrie.inspector import MAGIC  # noqa: PLC0415 - only this command needs it

    if len(inputs) > _MOST:
        fail(
            f"{len(inputs)} files given; give a snapshot, alone or with a prompt, a log, or two "
            "prompts"
        )
    if inputs.count(_prompts.STDIN) > 1:
        fail("the standard input can be read once: give one of the prompts as a file")
    starts = [_start(name) for name in inputs]
    if starts[0].startswith(MAGIC):
        return "tree"
    if starts[0].startswith(_LOG):
        if len(inputs) == 1:
            return "traffic"
        fail(f"{inputs[0]}: a log is shown alone")
    if len(inputs) == _MOST:
        return "plan"
    return fail(
        f"{inputs[0]}: neither a snapshot nor a log of kvtrie; to compare prompts, give two"
    )


def _start(name: str) -> bytes:
    if name == _prompts.STDIN:
        return b""
    path = Path(name)
    if path.exists() and not (path.is_file() or path.is_dir()):
        # What a pipe has given is gone; only prompts may come from one.
        return b""
    try:
        with path.open("rb") as file:
            return file.read(len(_LOG))
    except OSError as error:
        fail(f"{name}: {error.strerror or error}")


def _decoder(loaded: _prompts.TextTokenizer | None) -> Decode | None:
    if loaded is None:
        return None
    return lambda ids: loaded.decode(ids, skip_special_tokens=False)


def _traffic(path: Path) -> tuple[str, dict[str, Any]]:
    from kvtrie.inspector import traffic_document  # noqa: PLC0415 - only this command needs it
    from kvtrie.record import LogError  # noqa: PLC0415 - likewise

    try:
        found = traffic_document(path)
    except LogError as error:
        fail(error)
    except OSError as error:
        fail(f"{path}: {error.strerror or error}")
    parts = [f"{found['total']:,} requests of {found['engine'] or 'an engine'}"]
    if found["model"]:
        parts.append(f"model {found['model']}")
    if found["shown"] < found["total"]:
        parts.append(f"the page has the latest {found['shown']:,}")
    if found["numCut"]:
        parts.append("a cut last line is left out")
    if found["dropped"]:
        parts.append(f"the recorder dropped {found['dropped']:,} requests")
    if found["rate"] < 1:
        parts.append(f"{found['rate']:.0%} of the traffic were recorded")
    return "; ".join(parts), {"traffic": found}


def _tree(
    inputs: Sequence[str],
    loaded: _prompts.TextTokenizer | None,
    asked: dict[str, str],
    sessions: Sequence[str],
    *,
    as_text: bool,
) -> tuple[str, dict[str, Any], dict[str, str]]:
    from kvtrie.inspector import read_snapshot, tree_document  # noqa: PLC0415 - likewise

    path = Path(inputs[0])
    prompt = None
    if len(inputs) == _MOST:
        prompt = _prompts.read_prompt(inputs[1], loaded, is_text=as_text)
    index, blob = _cached.restored(path)
    names = {blake2b(one.encode(), digest_size=16).digest(): one for one in sessions}
    tree = tree_document(read_snapshot(blob), decode=_decoder(loaded), sessions=names)
    counts = tree.document["counts"]
    summary = (
        f"{counts['exact'] + counts['approximate']:,} of {index.num_blocks:,} blocks of "
        f"{index.block_size} tokens cached: {counts['exact']:,} exact, "
        f"{counts['approximate']:,} approximate; {counts['holes']:,} holes, "
        f"{counts['dead']:,} dead; {len(tree.order) - len(tree.document['spaces']):,} edges"
    )
    documents: dict[str, Any] = {"tree": tree.document}
    if prompt is not None:
        space = _cached.chosen(index, asked, path)
        one = sessions[0] if sessions else None
        documents["plan"], said = _planned(index, space, prompt, one, loaded, tree=tree)
        summary += f". {said}"
    return summary, documents, tree.later


def _plan(
    inputs: Sequence[str],
    loaded: _prompts.TextTokenizer | None,
    block_size: int,
    *,
    as_text: bool,
) -> tuple[str, dict[str, Any]]:
    cached, prompt = (_prompts.read_prompt(one, loaded, is_text=as_text) for one in inputs)
    if cached.was_text != prompt.was_text:
        text, ids = sorted((cached, prompt), key=lambda one: not one.was_text)
        fail(f"{text.name} is text and {ids.name} holds token ids; give two of a kind")
    index, space = _cached.filled(cached.ids, block_size)
    found, said = _planned(index, space, prompt, _cached.SESSION, loaded, cached=cached)
    return said, {"plan": found}


def _planned(
    index: kvtrie.RadixIndex,
    space: kvtrie.Namespace,
    prompt: _prompts.GivenPrompt,
    session: str | None,
    loaded: _prompts.TextTokenizer | None,
    *,
    tree: PageTree | None = None,
    cached: _prompts.GivenPrompt | None = None,
) -> tuple[dict[str, Any], str]:
    """The plan of a prompt for the page, and in one line."""
    from kvtrie.inspector import PlanSource, plan_document, sources_in  # noqa: PLC0415 - likewise

    try:
        seq = kvtrie.TokenSequence(prompt.ids, space)
        policy = kvtrie.ReusePolicy()
        why = index.explain(seq, policy, session=session)
        with index.plan(seq, policy, session=session) as plan:
            sources, numbers = sources_in(index, plan)
            if cached is not None:
                # All of it is shown, not only up to the last block that is used.
                sources = [PlanSource.of_prompt(Path(cached.name).name, cached.ids)]
                numbers = [None if one["class"] == 2 else 0 for one in plan.segments]
            document = plan_document(
                plan,
                why,
                (Path(prompt.name).name, prompt.ids),
                (sources, numbers),
                kinds=index.kinds,
                decode=_decoder(loaded),
                node_of=None if tree is None else tree.node_of,
            )
    except (kvtrie.KvTrieError, ValueError) as error:
        fail(error)
    counts = document["counts"]
    return document, (
        f"{Path(prompt.name).name}: {len(prompt.ids):,} tokens: {counts['exact']:,} exact, "
        f"{counts['approximate']:,} approximate, {counts['compute']:,} computed; "
        f"{why.reason} at {why.position:,}"
    )
