"""``kvtrie replay``: what would a cache of this size have found in this traffic?"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvtrie import KvTrieError
from kvtrie.cli import _options, _output
from kvtrie.cli._failure import fail, need
from kvtrie.cli._progress import ticks
from kvtrie.pool.layout import KVLayout
from kvtrie.replay import OVERLAYS, TraceError, TrafficReport, plot, read_trace
from kvtrie.replay import replay as replay_trace

if TYPE_CHECKING:
    from collections.abc import Callable

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kKMGT])(i?)B?)?")
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_MOST_BLOCKS: Final = 2**31


def replay(
    log: Annotated[
        Path, typer.Argument(metavar="LOG", help="Recorded traffic, plain, .gz or .tar.gz.")
    ],
    pool: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE",
            help="Size of the pool: tokens, or bytes such as 64G (10^9) or 64GiB, which needs "
            "--model or --bytes-per-token. May be repeated (default: ten sizes).",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG", help="The model's config.json, for bytes per token."),
    ] = None,
    bytes_per_token: Annotated[
        int | None, typer.Option(min=1, help="Bytes of KV per token, instead of --model.")
    ] = None,
    overlay: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"Synthetic reasoning over the trace: {' or '.join(OVERLAYS)}."
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Tokens per block, if the file does not tell."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIRECTORY",
            help="Directory with tokenizer.json, for traces of text (default: words and marks).",
        ),
    ] = None,
    min_run: _options.MinRun = 16,
    as_json: _options.AsJson = False,
    html: _options.Html = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the plot as an SVG picture.")
    ] = None,
) -> None:
    """Show what prefix reuse, kvtrie and an offline optimum find in recorded traffic.

    Each policy serves the requests one after the other, over sizes of the pool. Exit code 2 means
    that the input is bad, 3 that a result cannot be written, 130 that it was interrupted (Ctrl-C).
    """
    if html is not None:
        need("the page", "jinja2")
    each = _bytes_per_token(model, bytes_per_token)
    chosen = None if overlay is None else OVERLAYS.get(overlay)
    if overlay is not None and chosen is None:
        fail(f"--overlay {overlay!r} is not one of {', '.join(OVERLAYS)}")
    tokens = {one: _tokens(one, each) for one in pool or []}
    _output.check(html, svg)
    encode = None if tokenizer is None else _encoder(tokenizer)
    try:
        with ticks(sys.stderr, most=10) as shown:
            shown.stage(f"reading {log}")
            trace = read_trace(log, block_size, encode)
            if encode is not None and not trace.tokens_are:
                fail(f"--tokenizer is for traces of text, and {log} ({trace.format}) has none")
            sizes = [_blocks(one, tokens[one], trace.block_size) for one in pool or []]
            if chosen is not None:
                shown.stage(f"laying {chosen.name} over it")
                trace = chosen.over(trace)
            report = replay_trace(
                trace, sizes or None, min_run=min_run, bytes_per_token=each, step=shown
            )
    except TraceError as error:
        fail(error)
    _write(report, html, svg, has_sizes=bool(sizes))
    if as_json:
        document = {"kvtrie": version("kvtrie"), **report.to_dict()}
        typer.echo(json.dumps(document, ensure_ascii=False, indent=2))
    else:
        from kvtrie.cli import _replay_shown  # noqa: PLC0415 - rich tables

        _replay_shown.show(report, with_answers=bool(sizes))


def _write(report: TrafficReport, html: Path | None, svg: Path | None, *, has_sizes: bool) -> None:
    if html is not None:
        from kvtrie.cli import _replay_page  # noqa: PLC0415 - jinja2

        _output.write_whole(html, _replay_page.page(report, answers=has_sizes))
    if svg is not None:
        _output.write_whole(svg, plot.svg(report))


def _encoder(tokenizer: Path) -> Callable[[str], list[int]]:
    need("--tokenizer", "tokenizers")
    from tokenizers import Tokenizer  # noqa: PLC0415 - of the extra

    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not path.is_file():
        fail(f"{path}: No such file (tokenizers are not downloaded)")
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        fail(f"{path}: no tokenizer can be loaded: {error}")
    return lambda text: list(loaded.encode(text, add_special_tokens=False).ids)


def _bytes_per_token(model: Path | None, given: int | None) -> int | None:
    if model is None:
        return given
    if given is not None:
        fail("give --model or --bytes-per-token, not both")
    path = model / "config.json" if model.is_dir() else model
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        fail(f"{path}: {error.strerror or error}")
    except ValueError as error:
        fail(f"{path}: not JSON: {error}")
    except RecursionError:
        fail(f"{path}: not JSON that can be read: it is nested too deeply")
    if not isinstance(config, dict):
        fail(f"{path}: not a model's config: not a JSON object")
    try:
        return KVLayout.from_config(config).bytes_per_token
    except (KvTrieError, ValueError, TypeError) as error:
        fail(f"{path}: {error}")


def _tokens(given: str, each: int | None) -> float:
    found = _SIZE.fullmatch(given.strip())
    if found is None:
        fail(f"--pool {given!r} is not a number of tokens, nor of bytes such as 64G or 64GiB")
    number, letter, binary = float(found[1]), (found[2] or "").upper(), found[3]
    size: float = number * (1024 if binary else 1000) ** _POWERS[letter]
    if letter:
        if each is None:
            fail(f"--pool {given} is in bytes, so it needs --model or --bytes-per-token")
        size /= each
    return size


def _blocks(given: str, tokens: float, block_size: int) -> int:
    blocks = int(tokens // block_size)
    if not 1 <= blocks <= _MOST_BLOCKS:
        fail(
            f"--pool {given} is {int(tokens):,} tokens: {blocks} blocks of {block_size} tokens, "
            f"not from 1 to {_MOST_BLOCKS:,}"
        )
    return blocks
