"""``kvtrie calibrate``: measures what reuse of KV costs a model, and writes its gate file."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvtrie import KvTrieError, gates
from kvtrie.calibrate import logged, shipped
from kvtrie.calibrate import policies as named
from kvtrie.calibrate._partial import Partial, PartialError, PartialWriteError
from kvtrie.calibrate._steps import NothingMovesError
from kvtrie.cli import _options, _process
from kvtrie.cli._failure import fail, need
from kvtrie.demo import load_conversations
from kvtrie.integrations.vllm._check import arguments as template_arguments
from kvtrie.models.directory import checked_model_dir
from kvtrie.models.template import read_template

if TYPE_CHECKING:
    from kvtrie.demo import Conversation

_LIMITS: Final = gates.Thresholds()
_MINUTES: Final = 20
_MOST_JOBS: Final = 64


def calibrate(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help=f"Model directory, or one of the small models: {', '.join(shipped.KINDS)}.",
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
            help="Chat file of recorded conversations with their replies; replies to judge to the "
            'letter have "scored": true. Or a log of a recorder with token ids (default: the '
            "shipped edits).",
        ),
    ] = None,
    as_json: _options.AsJson = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="GATE.json",
            help="Write the gate file here; GATE.json.partial keeps what is measured until then.",
        ),
    ] = None,
    thorough: Annotated[
        bool,
        typer.Option(
            "--thorough",
            help="Each kind must show by itself that it loses no more than --max-loss: hours.",
        ),
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0, help="Begin no conversation after so many (default: 20; --thorough: no limit)."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=900, help="Of the shipped edits.")] = 0,
    max_loss: Annotated[
        float,
        typer.Option(min=0, max=1, help="Accuracy that a cleared kind may lose."),
    ] = _LIMITS.max_loss,
    max_kl: Annotated[
        float,
        typer.Option(min=0, help="Most mean KL divergence above that of exact reuse, in nats."),
    ] = _LIMITS.max_kl,
    max_kl_p99: Annotated[
        float,
        typer.Option(min=0, help="Most KL at the 99th percentile above that of exact reuse."),
    ] = _LIMITS.max_kl_p99,
    min_top1: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Least agreement of the likeliest token, of that of exact reuse."
        ),
    ] = _LIMITS.min_top1,
    block_size: _options.BlockSize = 16,
    min_run: Annotated[
        int, typer.Option(min=named.LEAST_RUN, help="Shortest moved run in tokens.")
    ] = 16,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Threads of torch for each conversation (default: 1 for a small model, else the "
            "cores by the number of --jobs).",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=_MOST_JOBS,
            help="Conversations that are measured at once, with caches of their own (default: 2 on "
            "a CPU with cores for both, 1 on another device and for a small model).",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Torch device of the model.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Element type (default: MODEL's own).")] = "auto",
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Keep K and V as codes: fp8_e4m3, fp8_e5m2, int8, fp8_per_token_head or "
            "int8_per_token_head (default: floats of --dtype).",
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The chat template that is served, or its text (default: MODEL's own).",
        ),
    ] = None,
    default_chat_template_kwargs: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="What the server gives to the template (vLLM's option)."),
    ] = None,
) -> None:
    """Compare reuse policies with full recomputation and exact reuse, by kind of edit.

    Each prompt is an edited one. Its reply is the model's own under full recomputation, which every
    policy predicts token by token: divergence and agreement are those of the next-token
    distributions. A reply is lost if a policy chooses another token before the first near tie. An
    edit ends when the verdict on its kinds is clear. The gate file says which kinds of edit are
    cleared for this model, under which policy. Nothing is downloaded: the small models are in the
    package kvtrie-demo-models, which `make dist` builds in a checkout of kvtrie. Results go to
    stdout when all is done, progress to stderr. With --out, the same command continues an
    interrupted run. Exit code 2 means that the input is bad, 3 that results cannot be written, 130
    that it was interrupted (Ctrl-C).
    """
    is_shipped = str(model) in shipped.KINDS and not model.is_dir()
    talks = None if conversations is None else _conversations(conversations)
    try:
        directory = shipped.model_path(str(model)) if is_shipped else model
        checked_model_dir(directory)
        chosen = _chosen(policies, min_run)
        template = None if chat_template is None else read_template(chat_template)
        given = default_chat_template_kwargs
        arguments = None if given is None else template_arguments(given)
        thresholds = gates.Thresholds(
            max_loss, max_kl, max_kl_p99, min_top1, loss_per_kind=thorough
        )
    except (FileNotFoundError, ValueError) as error:
        fail(error)
    with ExitStack() as stack:
        partial = None if out is None else stack.enter_context(_opened(out))
        kept = _Kept(partial)
        stack.enter_context(_process.add_to_interrupt(kept.note))
        need("calibrate", "torch", "transformers", "jinja2", extras="cli,transformers")
        from kvtrie.cli import _measuring  # noqa: PLC0415 - with rich

        with _measuring.measuring(sys.stderr, thresholds) as shown:
            shown.stage("loading torch and transformers")
            # These imports take seconds: bad input is reported before them, and --help needs none.
            from kvtrie.calibrate import measure  # noqa: PLC0415 - slow: torch
            from kvtrie.cli import _calibrated  # noqa: PLC0415 - with rich

            # A small model's matrices are too small for a second thread.
            cores = 1 if is_shipped else measure.num_threads()
            most = max(1, min(2, cores // (threads or 1))) if device == "cpu" else 1
            at_once = jobs or most
            measure.set_threads(threads or max(1, cores // at_once))

            try:
                report = measure.calibrate(
                    directory,
                    policies=[one.name for one in chosen],
                    conversations=talks,
                    is_recall=is_shipped,
                    thresholds=thresholds,
                    most_seconds=_seconds(minutes, thorough=thorough),
                    seed=seed,
                    block_size=block_size,
                    min_run=min_run,
                    device=device,
                    dtype=dtype,
                    kv_dtype=kv_dtype,
                    data=str(conversations or ""),
                    progress=shown,
                    status=shown.stage,
                    partial=partial,
                    chat_template=template,
                    template_arguments=arguments,
                    jobs=at_once,
                )
            except NothingMovesError as error:
                if partial is not None:
                    partial.remove()
                fail(error)
            except PartialWriteError as error:
                fail(error, _process.BAD_OUTPUT)
            except (KvTrieError, ValueError, OSError, MemoryError) as error:
                fail(error)
        if out is not None:
            _write(report.gate(thresholds), out)
        if as_json:
            typer.echo(_calibrated.as_json(report, thresholds))
        else:
            _calibrated.show(report, thresholds)
        if partial is not None and not report.is_finished:
            typer.echo(f"the time is over: {kept.note()}", err=True)
        elif partial is not None:
            # Closed last: until then, the same command continues after a failure.
            partial.remove()


@dataclass
class _Kept:
    """What an interrupted run leaves."""

    partial: Partial | None

    def note(self) -> str:
        if self.partial is None:
            return "nothing was kept, because --out was not given"
        rows = self.partial.num_rows()
        if rows == 0:
            self.partial.close()
            return "nothing was measured yet"
        return (
            f"{rows} conversations are kept in {self.partial.path}: the same command continues "
            "from there"
        )


def _chosen(policies: str, min_run: int) -> list[named.Policy]:
    names = [name.strip() for name in policies.split(",") if name.strip()]
    if not names:
        msg = "--policies: no policy is named"
        raise ValueError(msg)
    chosen = [named.policy(name, min_run) for name in names]
    if not any(one.can_be_cleared for one in chosen):
        msg = "--policies: none of them could be cleared; name a rotated one"
        raise ValueError(msg)
    return chosen


def _seconds(minutes: float | None, *, thorough: bool) -> float | None:
    if minutes is None:
        return None if thorough else 60.0 * _MINUTES
    return 60.0 * minutes


def _opened(out: Path) -> Partial:
    """The partial file next to the gate file; bad input if the gate file could not be written."""
    try:
        target = gates.checked_target(out)
        if target.exists() and not os.access(target, os.W_OK):
            fail(f"{out}: it is read-only")
        return Partial(target.with_name(f"{target.name}.partial"))
    except FileNotFoundError:
        fail(f"{out}: there is no directory {out.parent}")
    except PartialError as error:
        fail(error)
    except OSError as error:
        fail(f"{out}: {error.strerror or error}")


def _write(gate: gates.Gate, out: Path) -> None:
    try:
        with _process.held():
            gate.write(out)
    except OSError as error:
        fail(f"{out}: {error.strerror or error}", _process.BAD_OUTPUT)
    except gates.GateError as error:
        fail(f"{out}: {error}")


def _conversations(path: Path) -> list[Conversation] | list[logged.Session]:
    try:
        return logged.sessions(path) if logged.is_log(path) else load_conversations(path)
    except OSError as error:
        fail(f"{path}: {error.strerror or error}")
    except ValueError as error:
        fail(error)
