"""The command line: its commands and shared options."""

from __future__ import annotations

from importlib.metadata import version
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from kvtrie.cli import calibrate, check_vllm, demo, explain
from kvtrie.cli import inspect as inspect_command
from kvtrie.cli import lab as lab_command
from kvtrie.cli import replay as replay_command

if TYPE_CHECKING:
    from collections.abc import Callable


class _Commands(TyperGroup):
    """The commands; a refused value of an option is named in the message."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - typer's context, whose class is private
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            # Typer's versions with pydantic tell the limit alone.
            found = getattr(error.__cause__, "errors", None)
            if callable(found):
                error.message = f"{found()[0]['input']}: {error.message}"
            raise


app = typer.Typer(
    name="kvtrie",
    cls=_Commands,
    help="Which KV do I already have for this prompt, and what must be computed?",
    no_args_is_help=True,
    add_completion=False,
    # A traceback means a bug: plain text can be pasted into a report.
    pretty_exceptions_enable=False,
)


def _add(name: str, command: Callable[..., None]) -> None:
    # Typer keeps the line breaks of all paragraphs but the first, which fit no terminal.
    paragraphs = cleandoc(command.__doc__ or "").split("\n\n")
    app.command(name, help="\n\n".join(one.replace("\n", " ") for one in paragraphs))(command)


_add("calibrate", calibrate.calibrate)
_add("check-vllm", check_vllm.check_vllm)
_add("demo", demo.demo)
_add("explain", explain.explain)
_add("inspect", inspect_command.inspect)
_add("lab", lab_command.lab)
_add("replay", replay_command.replay)


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
