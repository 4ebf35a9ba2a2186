"""``kvtrie calibrate``: measures what reuse of KV costs a model, and writes its gate file."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvtrie import KvTrieError, gates
from kvtrie.calibrate import policies as named
from kvtrie.calibrate import shipped
from kvtrie.cli._failure import fail
from kvtrie.demo import load_conversations
from kvtrie.engines._model_dir import checked_model_dir

if TYPE_CHECKING:
    from kvtrie.demo import Conversation

_LIMITS: Final = gates.Thresholds()


def calibrate(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help=f"Model directory, or one of the shipped models: {', '.join(shipped.KINDS)}.",
        ),
    ],
    policies: Annotated[
        str,
        typer.Option(metavar="NAMES", help=f"Separated by commas; {named.KNOWN}."),
    ] = ",".join(named.DEFAULT),
    conversations: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Chat file: thoughts as reasoning_content, replies to judge with "
            '"scored": true (default: the recall task).',
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of tables.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="GATE.json", help="Write the gate file here.")
    ] = None,
    questions: Annotated[
        int, typer.Option(min=1, help="Questions of the recall task in each scenario, at least.")
    ] = 400,
    seed: Annotated[int, typer.Option(min=0, max=900, help="Of the recall task.")] = 0,
    max_loss: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Accuracy that a cleared policy may lose (95 % upper bound)."
        ),
    ] = _LIMITS.max_loss,
    max_kl: Annotated[
        float, typer.Option(min=0, help="Most mean KL divergence of a cleared policy, in nats.")
    ] = _LIMITS.max_kl_mean,
    max_kl_p99: Annotated[
        float, typer.Option(min=0, help="Most KL divergence at the 99th percentile, in nats.")
    ] = _LIMITS.max_kl_p99,
    min_top1: Annotated[
        float,
        typer.Option(min=0, max=1, help="Least agreement of the likeliest token."),
    ] = _LIMITS.min_top1,
    block_size: Annotated[int, typer.Option(min=1, max=4096, help="Tokens of a block.")] = 1,
    min_run: Annotated[
        int, typer.Option(min=named.LEAST_RUN, help="Shortest moved run in tokens.")
    ] = 16,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Threads of torch (default: 1 for a shipped model, else torch's choice)."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where the model lives, as torch says it.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Element type (default: what MODEL says).")] = "auto",
) -> None:
    """Compare reuse policies with full recomputation on edited conversations.

    Every reply is predicted with the text before it given: divergence and agreement are those of
    the next-token distributions, accuracy that of the replies which are judged, savings those of
    prompt tokens. The gate file says which policies are cleared for this model. Nothing is
    downloaded. Results go to stdout when all is done, progress to stderr. Exit code 2 means that
    the input is bad.
    """
    is_shipped = str(model) in shipped.KINDS and not model.is_dir()
    directory = shipped.model_path(str(model)) if is_shipped else model
    try:
        thresholds = gates.Thresholds(max_loss, max_kl, max_kl_p99, min_top1)
    except ValueError as error:
        fail(error)
    talks = None if conversations is None else _conversations(conversations)
    names = [name.strip() for name in policies.split(",") if name.strip()]
    try:
        checked_model_dir(directory)
        chosen = [named.policy(name, min_run) for name in names]
    except (FileNotFoundError, ValueError) as error:
        fail(error)
    if out is not None and not out.parent.is_dir():
        fail(f"{out}: there is no directory {out.parent}")
    if out is not None and not any(one.can_be_cleared for one in chosen):
        fail("--out: none of the policies could be cleared; name a rotated one")
    if out is not None and not any(one.is_control for one in chosen):
        fail(f"--out: no gate clears anything without a control; add {' or '.join(gates.CONTROLS)}")
    for name in ("torch", "transformers", "jinja2", "rich"):
        if find_spec(name) is None:
            fail(f"calibrate needs {name}: pip install 'kvtrie[cli]'")
    # Torch takes seconds to import: bad input is found before, and --help does without.
    from kvtrie.calibrate import measure  # noqa: PLC0415 - slow: torch
    from kvtrie.cli import _calibrated, _progress  # noqa: PLC0415 - with rich

    if threads or is_shipped:
        # Matrices as small as a shipped model's gain nothing from a second thread.
        measure.set_threads(threads or 1)
    with _progress.ticks(sys.stderr) as tick:
        try:
            report = measure.calibrate(
                directory,
                policies=names,
                conversations=talks,
                num_questions=questions,
                seed=seed,
                block_size=block_size,
                min_run=min_run,
                device=device,
                dtype=dtype,
                data=str(conversations or ""),
                progress=tick,
            )
        except (KvTrieError, ValueError, OSError, MemoryError) as error:
            fail(error)
    if out is not None:
        try:
            report.gate(thresholds).write(out)
        except OSError as error:
            fail(f"{out}: {error.strerror or error}")
        except gates.GateError as error:
            fail(f"{out}: {error}")
    if as_json:
        typer.echo(_calibrated.as_json(report, thresholds))
    else:
        _calibrated.show(report, thresholds)


def _conversations(path: Path) -> list[Conversation]:
    try:
        return load_conversations(path)
    except OSError as error:
        fail(f"{path}: {error.strerror or error}")
    except ValueError as error:
        fail(error)
