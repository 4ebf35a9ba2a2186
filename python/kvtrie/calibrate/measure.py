"""Measures policies on a model: divergence, agreement, accuracy and savings.

Every policy replays every conversation, so the time grows with the number of policies.
"""

from __future__ import annotations

import base64
import hashlib
import math
from dataclasses import astuple, dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from kvtrie import gates
from kvtrie.calibrate import policies as named
from kvtrie.calibrate._engine import Model, Replay, TokenSources, divergence, tokens_needed
from kvtrie.calibrate._steps import (
    SCENARIOS,
    CalibrationError,
    Renderer,
    Scenario,
    Step,
    built_in,
    count_measured,
)
from kvtrie.calibrate.recall import HELD_OUT
from kvtrie.models.directory import checked_model_dir
from kvtrie.models.fingerprint import CheckpointError, checkpoint_digest, model_id, rope_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from os import PathLike
    from pathlib import Path

    from kvtrie.calibrate._partial import Partial
    from kvtrie.calibrate.policies import Policy
    from kvtrie.demo import Conversation

__all__ = ["SCENARIOS", "CalibrationError", "Report", "Result", "Scenario", "calibrate"]

P99: Final = 0.99


@dataclass(frozen=True, slots=True)
class Result:
    """One policy in one scenario."""

    policy: Policy
    figures: gates.Figures


@dataclass(frozen=True, slots=True)
class Report:
    """Everything measured on one model; fields as in `calibrate` and `kvtrie.gates.Gate`."""

    model: str
    kv_dtype: str
    rope: str
    block_size: int
    min_run: int
    data: str
    conversations: dict[str, int]
    results: tuple[Result, ...]
    checkpoint: str | None = None

    def gate(self, thresholds: gates.Thresholds) -> gates.Gate:
        """The verdicts on the policies that requests can ask for.

        Without a measured control the gate cannot be written.

        Raises:
            ValueError: None of these policies was measured.
        """
        by_policy: dict[str, list[Result]] = {}
        for result in self.results:
            if result.policy.can_be_cleared:
                by_policy.setdefault(result.policy.name, []).append(result)
        if not by_policy:
            msg = "no policy was measured that could be cleared: name a rotated one"
            raise ValueError(msg)
        return gates.Gate(
            model=self.model,
            kv_dtype=self.kv_dtype,
            rope=self.rope,
            thresholds=thresholds,
            measured=tuple(
                gates.Measured(name, found[0].policy.reuse, tuple(one.figures for one in found))
                for name, found in by_policy.items()
            ),
            controls=self.controls,
            data=self.data,
            checkpoint=self.checkpoint,
        )

    @property
    def controls(self) -> tuple[gates.Control, ...]:
        """The measured controls."""
        found: dict[str, list[gates.Figures]] = {}
        for result in self.results:
            if result.policy.is_control:
                found.setdefault(result.policy.name, []).append(result.figures)
        return tuple(gates.Control(name, tuple(figures)) for name, figures in found.items())

    def savings(self, result: Result) -> float | None:
        """Tokens that a policy saves over ``exact``, as a share of those that ``rotated`` saves."""
        computed = {
            one.policy.name: one.figures.computed
            for one in self.results
            if one.figures.scenario == result.figures.scenario
        }
        most = computed.get("exact", 0) - computed.get("rotated", 0)
        if most <= 0:
            return None
        return (computed["exact"] - result.figures.computed) / most


@dataclass(slots=True)
class _Tally:
    """Sums of one policy in one scenario."""

    divergences: list[torch.Tensor] = field(default_factory=list)
    agreeing: int = 0
    pairs: list[tuple[bool, bool]] = field(default_factory=list)
    usage: list[TokenSources] = field(default_factory=list)

    def add(self, step: Step, full: torch.Tensor, rows: torch.Tensor, usage: TokenSources) -> None:
        self.divergences.append(divergence(full, rows))
        best_full, best = full.argmax(-1), rows.argmax(-1)
        self.agreeing += int((best_full == best).sum())
        self.usage.append(usage)
        if step.is_scored:
            reply = torch.tensor(step.reply, device=best.device)
            tail = slice(step.answer_start, None)
            self.pairs.append(
                (
                    bool((best_full[tail] == reply[tail]).all()),
                    bool((best[tail] == reply[tail]).all()),
                )
            )

    def row(self) -> dict[str, Any]:
        raw = torch.cat(self.divergences).numpy().astype("<f8").tobytes()
        return {
            "divergences": base64.b64encode(raw).decode("ascii"),
            "agreeing": self.agreeing,
            "pairs": self.pairs,
            "usage": [(one.exact, one.moved, one.computed) for one in self.usage],
        }

    def add_row(self, row: Mapping[str, Any]) -> None:
        raw = np.frombuffer(base64.b64decode(row["divergences"]), dtype="<f8")
        self.divergences.append(torch.from_numpy(raw.astype(np.float64)))
        self.agreeing += row["agreeing"]
        self.pairs += [(full, own) for full, own in row["pairs"]]
        self.usage += [TokenSources(*one) for one in row["usage"]]

    def result(self, policy: Policy, scenario: Scenario) -> Result:
        divergences = torch.cat(self.divergences)
        counts = {(a, b): self.pairs.count((a, b)) for a in (True, False) for b in (True, False)}
        figures = gates.Figures(
            scenario=scenario.name,
            positions=len(divergences),
            kl_mean=float(divergences.mean()),
            kl_p99=_quantile(divergences, P99),
            top1=self.agreeing / len(divergences),
            questions=len(self.pairs),
            right_full=counts[True, True] + counts[True, False],
            lost=counts[True, False],
            gained=counts[False, True],
            exact=sum(one.exact for one in self.usage),
            moved=sum(one.moved for one in self.usage),
            computed=sum(one.computed for one in self.usage),
        )
        return Result(policy, figures)


def _quantile(values: torch.Tensor, share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = values.sort().values
    return float(ordered[max(0, math.ceil(share * len(ordered)) - 1)])


def set_threads(number: int) -> None:
    """Set torch's threads in this process."""
    torch.set_num_threads(number)


def calibrate(
    path: str | PathLike[str],
    *,
    policies: Sequence[str] = named.DEFAULT,
    conversations: Sequence[Conversation] | None = None,
    scenarios: Sequence[Scenario] = SCENARIOS,
    num_questions: int = 400,
    seed: int = 0,
    block_size: int = 1,
    min_run: int = 16,
    device: str = "cpu",
    dtype: str = "auto",
    data: str = "",
    progress: Callable[[int, int, str], None] | None = None,
    status: Callable[[str], None] | None = None,
    partial: Partial | None = None,
) -> Report:
    """Replay conversations under every policy and compare with full recomputation.

    Args:
        path: A model directory; nothing is downloaded and no code of it runs.
        policies: Names, see ``kvtrie.calibrate.policies``.
        conversations: None for the recall task.
        scenarios: How much of each conversation is replayed.
        num_questions: Least number of questions of the recall task in each scenario.
        seed: Seed of the recall task.
        block_size: Tokens per block.
        min_run: Shortest moved run in tokens, unless a policy's name sets it.
        device: Device of the model.
        dtype: Element type, a torch name; ``"auto"``: the config's.
        data: A description of the conversations.
        progress: Called before the first conversation and after each: the number done, the total,
            and the scenario's name.
        status: Called with a description of each stage before it.
        partial: Keeps each finished conversation, and resumes the same run from it. The caller
            removes and closes it.

    Raises:
        FileNotFoundError: There is no such directory.
        ValueError: A policy is unknown, or an argument is out of range.
        CalibrationError: No conversation has anything to measure, or one cannot be replayed.
        LayoutError: The model's KV cannot be held.
        UnsupportedRopeError: The model's KV cannot be moved.
        PartialError: The partial file belongs to another run, or is damaged.
        PartialWriteError: The partial file cannot be written.
    """
    say = status or (lambda _: None)
    chosen = [named.policy(name, min_run) for name in dict.fromkeys(policies)]
    if not chosen:
        msg = "calibrate: no policy is named"
        raise ValueError(msg)
    say(f"loading the model in {path}")
    loaded, tokenizer = _load(checked_model_dir(path), device, dtype)
    renderer = Renderer(tokenizer)
    model = Model(loaded, block_size)
    say("splitting the conversations into replies")
    work: list[tuple[Scenario, list[list[Step]]]] = []
    for scenario in scenarios:
        found = _replayable(renderer, conversations, scenario, num_questions, seed)
        if found:
            work.append((scenario, found))
    if not work:
        msg = (
            "no conversation has anything to measure: a chat template must drop reasoning, or a "
            "window an exchange, before a reply"
        )
        raise CalibrationError(msg)
    _check_lengths(model, work)
    run: dict[str, Any] = {
        "version": version("kvtrie"),
        "torch": torch.__version__,
        "model": model_id(model.model),
        "checkpoint": _digest(path),
        "kv_dtype": model.layout.dtype,
        "rope": rope_id(model.model.config),
        "device": str(model.model.device),
        "block_size": block_size,
        "min_run": min_run,
        "policies": [policy.name for policy in chosen],
        "scenarios": [scenario.name for scenario, _ in work],
        "questions": None if conversations is not None else num_questions,
        "seed": None if conversations is not None else seed,
        "conversations": _content(work),
    }
    before = [] if partial is None else partial.begin(run)
    total = sum(len(found) for _, found in work)
    if progress is not None:
        progress(len(before), total, "resumed" if before else "measuring")
    rows = iter(before)
    done = 0
    results: list[Result] = []
    for scenario, found in work:
        tallies = [_Tally() for _ in chosen]
        for steps in found:
            done += 1
            kept = next(rows, None)
            if kept is None:
                own = [_Tally() for _ in chosen]
                _replay(model, steps, chosen, own)
                kept = {"policies": [tally.row() for tally in own]}
                if partial is not None:
                    partial.add(kept)
                if progress is not None:
                    progress(done, total, scenario.name)
            for tally, row in zip(tallies, kept["policies"], strict=True):
                tally.add_row(row)
        results += [
            tally.result(policy, scenario) for policy, tally in zip(chosen, tallies, strict=True)
        ]
    name = "the recall task" if conversations is None else data or "conversations of the caller"
    return Report(
        model=run["model"],
        kv_dtype=run["kv_dtype"],
        rope=run["rope"],
        block_size=block_size,
        min_run=min_run,
        data=name,
        conversations={scenario.name: len(found) for scenario, found in work},
        results=tuple(results),
        checkpoint=run["checkpoint"],
    )


def _content(work: Sequence[tuple[Scenario, list[list[Step]]]]) -> str:
    total = hashlib.blake2b(digest_size=16, person=b"kvtrie.replay.1")
    for scenario, found in work:
        total.update(repr((scenario.name, len(found))).encode())
        for steps in found:
            total.update(repr([astuple(step) for step in steps]).encode())
    return total.hexdigest()


def _digest(path: str | PathLike[str]) -> str | None:
    try:
        return checkpoint_digest(path)
    except CheckpointError:
        # Without a digest, the gate is valid only for engines that name the model as here.
        return None


def _load(directory: Path, device: str, dtype: str) -> tuple[Any, Any]:
    # Progress and warnings are for training; errors are reported in one sentence below.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        return loaded.to(device).eval(), tokenizer
    except Exception as error:  # loaders raise errors of many types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        msg = f"cannot load the model in {directory}: {reason}"
        raise CalibrationError(msg) from error


def _replayable(
    renderer: Renderer,
    conversations: Sequence[Conversation] | None,
    scenario: Scenario,
    num_questions: int,
    seed: int,
) -> list[list[Step]]:
    sources: Iterable[tuple[Any, Any]]
    if conversations is None:
        first = HELD_OUT + seed * 1_000_000
        sources = ((messages, ()) for messages in built_in(num_questions, scenario, first))
    else:
        sources = ((one.messages, one.tools) for one in conversations)
    cut = (renderer.steps(messages, scenario, tools=tools) for messages, tools in sources)
    return [steps for steps in cut if count_measured(steps)[0]]


def _check_lengths(model: Model, work: Sequence[tuple[Scenario, list[list[Step]]]]) -> None:
    limit = getattr(model.model.config, "max_position_embeddings", None)
    longest = max(
        len(step.prompt) + len(step.reply) for _, found in work for steps in found for step in steps
    )
    if limit is not None and longest > limit:
        msg = f"a conversation has {longest} tokens, the model's context is {limit}"
        raise CalibrationError(msg)


def _replay(
    model: Model,
    steps: list[Step],
    chosen: Sequence[Policy],
    tallies: Sequence[_Tally],
) -> None:
    full = [model.whole(step) if step.is_measured else None for step in steps]
    pool = model.pool(tokens_needed(steps, model.layout.block_size))
    for policy, tally in zip(chosen, tallies, strict=True):
        replay = None if policy.mode == "full" else Replay(model, pool, policy)
        for step, reference in zip(steps, full, strict=True):
            if replay is None:
                if reference is not None:
                    usage = TokenSources(computed=len(step.prompt))
                    tally.add(step, reference, reference, usage)
                continue
            rows, usage = replay.step(step)
            if reference is not None:
                tally.add(step, reference, rows, usage)
