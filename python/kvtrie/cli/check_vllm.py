"""``kvtrie check-vllm``: says what vLLM would refuse after minutes."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtrie.cli._failure import fail
from kvtrie.integrations.vllm import _check


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
    probe: Annotated[
        bool,
        typer.Option(
            help="Also import vLLM, in seconds, and compare all that kvtrie touches of it."
        ),
    ] = False,
) -> None:
    """Check vLLM's configuration for kvtrie: version, connector, settings and gate file.

    Run it in vLLM's environment. Whether a gate is of the served model is seen when vLLM starts.
    What depends on the model is checked by vLLM alone. Exit code 2 means that something is refused.
    """
    try:
        said = _check.check(kv_transfer_config, events=kv_events_config, scheduler=scheduler_cls)
        if probe:
            said.append(_check.probed())
    except ValueError as error:
        fail(error)
    for line in said:
        typer.echo(line)
