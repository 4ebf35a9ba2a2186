"""The command line: its commands and shared options."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from kvtrie.cli import calibrate, check_vllm, demo, explain
from kvtrie.cli import inspect as inspect_command
from kvtrie.cli import lab as lab_command
from kvtrie.cli import replay as replay_command

app = typer.Typer(
    name="kvtrie",
    help="Which KV do I already have for this prompt, and what must be computed?",
    no_args_is_help=True,
    add_completion=False,
    # A traceback means a bug: plain text can be pasted into a report.
    pretty_exceptions_enable=False,
)
app.command("calibrate")(calibrate.calibrate)
app.command("check-vllm")(check_vllm.check_vllm)
app.command("demo")(demo.demo)
app.command("explain")(explain.explain)
app.command("inspect")(inspect_command.inspect)
app.command("lab")(lab_command.lab)
app.command("replay")(replay_command.replay)


def _show_version(*, is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"kvtrie {version('kvtrie')}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=lambda value: _show_version(is_asked=value),
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    del show_version
