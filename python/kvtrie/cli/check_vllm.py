"""``kvtrie check-vllm``: says what vLLM would refuse after minutes."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtrie.cli._failure import fail, printable
from kvtrie.integrations.vllm import _check
from kvtrie.integrations.vllm._model import ModelOptions


def check_vllm(
    kv_transfer_config: Annotated[
        str, typer.Option(metavar="JSON", help="As vLLM gets it.", show_default=False)
    ],
    kv_events_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="As vLLM gets it, if it does.")
    ] = None,
    scheduler_cls: Annotated[
        str | None, typer.Option(metavar="CLASS", help="As vLLM gets it, if it does.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER_OR_ID",
            help="What vLLM serves, a directory or a name in the hub's cache: also compare gate, "
            "chat format and template arguments with it. No weights are loaded.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="As vLLM gets it, for the gate; with --model.")
    ] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="As vLLM gets it; with --model.")
    ] = "auto",
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="As vLLM gets it; with --model.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(metavar="FILE", help="As vLLM gets it, if it does.")
    ] = None,
    default_chat_template_kwargs: Annotated[
        str | None, typer.Option(metavar="JSON", help="As vLLM gets it, if it does; with --model.")
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            help="Also import vLLM, in seconds, and compare all that kvtrie touches of it."
        ),
    ] = False,
) -> None:
    """Check vLLM's configuration for kvtrie: version, connector, settings and gate file.

    Run it in vLLM's environment. With --model, also what the model decides, as far as its config
    and tokenizer show it; the rest is checked when vLLM starts. Exit code 2 means that something is
    refused.
    """
    served = None
    arguments = default_chat_template_kwargs
    if model is None and (dtype, kv_cache_dtype, revision, arguments) != (
        "auto",
        "auto",
        None,
        None,
    ):
        fail(
            "--dtype, --kv-cache-dtype, --revision and --default-chat-template-kwargs are of a "
            "model: give --model too"
        )
    try:
        if model is not None:
            served = ModelOptions(
                model=model,
                dtype=dtype,
                kv_cache_dtype=kv_cache_dtype,
                revision=revision,
                template_arguments=None if arguments is None else _check.arguments(arguments),
            )
        said = _check.check(
            kv_transfer_config,
            events=kv_events_config,
            scheduler=scheduler_cls,
            chat_template=chat_template,
            model=served,
        )
        if probe:
            said.append(_check.probed())
    except ValueError as error:
        fail(error)
    for line in said:
        typer.echo(printable(line))
