"""Measures policies on a model by kind of edit: divergence, agreement, accuracy and savings.

Conversations of all edits take turns, and an edit ends as soon as the verdict on each kind that it
is measured for is clear, or looks bad where another policy is cleared. The verdicts hold at every
look (``kvtrie.gates.statistics``).
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from dataclasses import astuple, dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from kvtrie import gates
from kvtrie.calibrate import edits, recall
from kvtrie.calibrate import policies as named
from kvtrie.calibrate._ahead import Ahead, twin
from kvtrie.calibrate._engine import (
    MOST_TOKENS,
    Model,
    Reference,
    TokenSources,
    Workspace,
    divergence,
    tokens_needed,
)
from kvtrie.calibrate._steps import (
    RECORDED,
    SCENARIOS,
    CalibrationError,
    NothingMovesError,
    Renderer,
    Scenario,
    Step,
    count_measured,
)
from kvtrie.calibrate._tally import FLOOR, Observed, Tally
from kvtrie.calibrate.logged import Session
from kvtrie.engines._coding import kv_name
from kvtrie.engines._products import speed_up
from kvtrie.engines._repair import BY_RECORDS
from kvtrie.models.directory import checked_model_dir
from kvtrie.models.fingerprint import (
    CheckpointError,
    checkpoint_digest,
    model_id,
    rope_id,
    template_id,
)
from kvtrie.models.vision import TEXT_OF_VISION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from os import PathLike
    from pathlib import Path

    from kvtrie.calibrate._partial import Partial
    from kvtrie.calibrate.policies import Policy
    from kvtrie.demo import Conversation

__all__ = ["SCENARIOS", "CalibrationError", "Progress", "Report", "Scenario", "calibrate"]

_RECALL: Final = (
    Scenario("one turn", most_edits=1),
    Scenario("three turns", most_edits=3),
    Scenario("window of three", window=3),
)
NEAR_TIE: Final = 0.25
"""Nats between the two likeliest tokens below which rounding may choose either."""
MOST_CASES: Final = 96
"""Conversations of an edit after which it ends, whatever its verdicts."""
MOST_CASES_THOROUGH: Final = 1200
LEAST_CASES: Final = 24
"""Conversations that a verdict takes at least, for the estimate."""
ENOUGH_UNMOVED: Final = 3
"""Conversations of an edit after which it ends, if none has moved anything."""
_DRAWS: Final = 512
"""Conversations that are drawn, at most, until one fits into the model's context."""
_APART: Final = 1_000_000_000
"""Between the seeds of two draws; those of all conversations are within it."""
_FIRST_DRAWS: Final = 16
"""An edit is left out if so many of its conversations are too long."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything measured on one model; fields as in `calibrate` and `kvtrie.gates.Gate`.

    ``is_finished`` says whether every edit has ended; else the time has.
    """

    model: str
    kv_dtype: str
    rope: str
    template: str | None
    block_size: int
    min_run: int
    data: str
    conversations: dict[str, int]
    outside: int
    measured: tuple[gates.Measured, ...]
    checkpoint: str | None = None
    is_finished: bool = True

    def gate(self, thresholds: gates.Thresholds) -> gates.Gate:
        """The verdicts."""
        return gates.Gate(
            model=self.model,
            kv_dtype=self.kv_dtype,
            rope=self.rope,
            thresholds=thresholds,
            measured=self.measured,
            data=self.data,
            checkpoint=self.checkpoint,
            template=self.template,
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a run after a conversation.

    Attributes:
        edit: The edit that was replayed last; None when a run begins or resumes.
        done: Conversations so far.
        tally: All figures so far.
        seconds: Since the first conversation of this run.
        least: Seconds that are left, if every verdict becomes clear as soon as it can.
        most: Seconds that are left, if none does.
    """

    edit: str | None
    done: int
    tally: Tally
    seconds: float
    least: float
    most: float


@dataclass(slots=True)
class _Conversations:
    """Conversations of one edit.

    Attributes:
        name: Of the edit.
        most: Conversations that there are, or that are replayed at most.
        make: The steps of one, and whether each policy needs a cache of its own.
        is_alike: Whether they differ by their seed alone.
        every: It takes a turn in one round of so many.
    """

    name: str
    most: int
    make: Callable[[int], tuple[list[Step], bool]]
    is_alike: bool = False
    every: int = 1


def num_threads() -> int:
    """Threads of torch in this process."""
    return torch.get_num_threads()


def set_threads(number: int) -> None:
    """Set torch's threads in this process, for each thread that computes."""
    torch.set_num_threads(number)


def calibrate(
    path: str | PathLike[str],
    *,
    policies: Sequence[str] = named.DEFAULT,
    conversations: Sequence[Conversation] | Sequence[Session] | None = None,
    is_recall: bool = False,
    chosen_edits: Sequence[str] | None = None,
    thresholds: gates.Thresholds | None = None,
    most_cases: int | None = None,
    most_seconds: float | None = None,
    seed: int = 0,
    block_size: int = 16,
    min_run: int = 16,
    device: str = "cpu",
    dtype: str = "auto",
    kv_dtype: str | None = None,
    data: str = "",
    progress: Callable[[Progress], None] | None = None,
    status: Callable[[str], None] | None = None,
    partial: Partial | None = None,
    chat_template: str | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    jobs: int = 1,
) -> Report:
    """Replay edited conversations and compare every policy with full and with exact reuse.

    Args:
        path: A model directory; nothing is downloaded and no code of it runs.
        policies: Names, see ``kvtrie.calibrate.policies``; exact reuse and the controls are
            measured without being named.
        conversations: Recorded ones, or sessions of a log; None for the shipped edits.
        is_recall: Replay the recall task, which the shipped models know, instead of shipped edits.
        chosen_edits: Names of edits; None: all of them.
        thresholds: By which an edit's verdicts become clear.
        most_cases: Conversations of each edit at most; None: 96, or 1,200 where each kind must show
            its own accuracy.
        most_seconds: Begin no conversation after so many; None: no limit.
        seed: Of the shipped edits, or of the recall task.
        block_size: Tokens per block.
        min_run: Shortest moved run in tokens, unless a policy's name sets it.
        device: Device of the model.
        dtype: Element type, a torch name; ``"auto"``: the config's.
        kv_dtype: Keep K and V as codes of this type in every pass, the reference included, as
            ``kvtrie.engines.transformers.Generator`` does. None: in the model's type.
        data: A description of the conversations.
        progress: Called when the conversations begin, and after each.
        status: Called with a description of each stage before it.
        partial: Keeps each finished conversation, and resumes the same run from it. The caller
            removes and closes it.
        chat_template: The text of the served template; None: the directory's.
        template_arguments: What the server gives to the template where a request says nothing else.
        jobs: Conversations that are replayed at once, each on a thread of its own and with caches
            of its own. The report is that of one job.

    Raises:
        FileNotFoundError: There is no such directory.
        ValueError: A policy or edit is unknown, or an argument is out of range.
        CalibrationError: No conversation has anything to measure, or one cannot be replayed.
        NothingMovesError: Of conversations that were given, all replayed, no prompt moves KV.
        LayoutError: The model's KV cannot be held, or not in ``kv_dtype``, or its scales cannot be
            read.
        UnsupportedRopeError: The model's KV cannot be moved.
        PartialError: The partial file belongs to another run, or is damaged.
        PartialWriteError: The partial file cannot be written.
    """
    say = status or (lambda _: None)
    limits = gates.Thresholds() if thresholds is None else thresholds
    if most_cases is None:
        most_cases = MOST_CASES_THOROUGH if limits.loss_per_kind else MOST_CASES
    chosen = _chosen(policies, min_run)
    say(f"loading the model in {path}")
    loaded, tokenizer = _load(checked_model_dir(path), device, dtype)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    renderer = Renderer(tokenizer, template_arguments)
    speed_up(loaded)
    eos = _eos_ids(loaded, tokenizer)
    copies = [loaded, *(twin(loaded) for _ in range(1, jobs))]
    models = [Model(one, block_size, kv_dtype) for one in copies]
    model, benches = models[0], [_Bench(one, chosen, eos) for one in models]
    say("rendering conversations by the chat template")
    if conversations is not None:
        sources = _recorded(renderer, conversations)
        name = data or "conversations of the caller"
    elif is_recall:
        sources, name = _recall(renderer, seed, most_cases), "the recall task"
    else:
        sources, too_long = _shipped(renderer, model, chosen_edits, seed, most_cases)
        if too_long:
            say(f"left out, longer than the model's context: {', '.join(too_long)}")
        if not sources:
            msg = (
                f"the model's context is {model.most_tokens} tokens, and the shipped conversations "
                "are longer: calibrate on shorter ones, --conversations"
            )
            raise CalibrationError(msg)
        name = "shipped edits, replies of the model itself"
    for source in sources:
        for number in range(source.most if conversations is not None else 1):
            _check_lengths(model, source.make(number)[0])
            _check_vocabulary(model, source.make(number)[0])
    run: dict[str, Any] = {
        "version": version("kvtrie"),
        "torch": torch.__version__,
        "model": model_id(model.model),
        "checkpoint": _digest(path),
        "template": template_id(tokenizer.chat_template),
        "template_arguments": dict(template_arguments or {}),
        "kv_dtype": kv_name(model.layout, model.coding),
        "rope": rope_id(model.model.config),
        "device": str(model.model.device),
        "block_size": block_size,
        "min_run": min_run,
        "policies": [policy.name for policy in chosen],
        "edits": [source.name for source in sources],
        "seed": None if conversations is not None else seed,
        "conversations": _content(sources),
    }
    before = [] if partial is None else partial.begin(run)
    tally = Tally(chosen)
    is_finished = _replay_all(
        benches, sources, tally, limits, before, most_seconds, partial, progress or (lambda _: None)
    )
    if conversations is not None and is_finished and not tally.has_moved(RECORDED.name):
        msg = (
            f"no prompt of these {len(conversations)} conversations moves KV, so nothing was "
            "measured: their histories are only appended to, or moved runs are shorter than "
            f"--min-run {benches[0].min_run}"
        )
        raise NothingMovesError(msg)
    return Report(
        model=run["model"],
        kv_dtype=run["kv_dtype"],
        rope=run["rope"],
        template=run["template"],
        block_size=block_size,
        min_run=min_run,
        data=name,
        conversations=dict(tally.conversations),
        outside=tally.outside,
        measured=tally.measured(),
        checkpoint=run["checkpoint"],
        is_finished=is_finished,
    )


def _replay_all(
    benches: Sequence[_Bench],
    sources: Sequence[_Conversations],
    tally: Tally,
    limits: gates.Thresholds,
    before: Sequence[dict[str, Any]],
    most_seconds: float | None,
    partial: Partial | None,
    progress: Callable[[Progress], None],
) -> bool:
    """Let the edits take turns until each has ended; rows from before count as replayed.

    False: the time has ended before.
    """
    rows = iter(before)
    began, replayed = time.monotonic(), 0
    turns = _Turns(sources)

    def tell(edit: str | None) -> None:
        seconds = time.monotonic() - began
        each = seconds / replayed if replayed else 0.0
        done = len(before) if edit is None else sum(turns.count.values())
        least, most = turns.left()
        progress(Progress(edit, done, tally, seconds, each * least, each * most))

    tell(None)
    with contextlib.closing(Ahead(benches)) as ahead:
        while (wanted := next(turns.next(), None)) is not None:
            source, number = wanted
            row = next(rows, None)
            if row is None:
                if most_seconds is not None and time.monotonic() - began > most_seconds:
                    ahead.stop()
                else:
                    ahead.begin(turns.next())
                steps = ahead.take(source, number)
                if steps is None:
                    return False
                row = {"edit": source.name, "steps": steps}
                replayed += 1
                if partial is not None:
                    partial.add(row)
            tally.add(row)
            is_clear = _is_clear(tally, source.name, limits) or (
                source.is_alike and _moves_nothing(tally, source.name)
            )
            if turns.took(ends=is_clear):
                ahead.drop(source.name)
            if replayed:
                tell(source.name)
    return True


class _Turns:
    """Whose turn it is: each edit in each round, or in one of so many, until it has ended."""

    def __init__(self, sources: Sequence[_Conversations]) -> None:
        self._sources = sources
        self._at = 0
        self.count = dict.fromkeys((one.name for one in sources), 0)
        self._is_open = {one.name: True for one in sources}

    def next(self) -> Iterator[tuple[_Conversations, int]]:
        """The next conversations, if no edit ends before its last one."""
        for _, source, number in self._slots():
            yield source, number

    def took(self, *, ends: bool) -> bool:
        """The next conversation was taken; whether its edit has ended."""
        at, source, number = next(self._slots())
        self._at = at + 1
        self.count[source.name] = number + 1
        self._is_open[source.name] = not ends and number + 1 < source.most
        return not self._is_open[source.name]

    def _slots(self) -> Iterator[tuple[int, _Conversations, int]]:
        count = dict(self.count)
        left = sum(one.most - count[one.name] for one in self._sources if self._is_open[one.name])
        at = self._at
        while left:
            turn, place = divmod(at, len(self._sources))
            source = self._sources[place]
            number = count[source.name]
            if self._is_open[source.name] and number < source.most and turn % source.every == 0:
                yield at, source, number
                count[source.name] += 1
                left -= 1
            at += 1

    def left(self) -> tuple[int, int]:
        """Conversations that are left, at least and at most."""
        left = [one for one in self._sources if self._is_open[one.name]]
        least = sum(
            max(0, min(LEAST_CASES // one.every, one.most) - self.count[one.name]) for one in left
        )
        return least, sum(one.most - self.count[one.name] for one in left)


def _is_clear(tally: Tally, edit: str, limits: gates.Thresholds) -> bool:
    """Whether more of an edit would hardly change a verdict.

    Each is clear, or its kind is cleared under another policy, and it looks as if it never will be.
    """
    wanted = tally.feeds(edit)
    if not wanted:
        return False
    found = tally.verdicts(limits)
    cleared = {kind for (_, kind), verdict in found.items() if verdict.state == "cleared"}
    return all(
        found[key].state != "undecided" or (key[1] in cleared and found[key].looks_worse)
        for key in wanted
    )


def _moves_nothing(tally: Tally, edit: str) -> bool:
    """Whether no policy has moved anything after an edit, and none ever will."""
    return tally.conversations[edit] >= ENOUGH_UNMOVED and not tally.has_moved(edit)


class _Bench:
    """Replays conversations: every measured reply in every way to build its KV."""

    def __init__(self, model: Model, chosen: Sequence[Policy], eos: frozenset[int]) -> None:
        self._model = model
        self._eos = eos
        # The controls move what the widest scope moves, and recompute nothing of it.
        wide = [one.reuse for one in chosen if one.reuse.scope == "namespace"]
        moved = [*wide, chosen[0].reuse][0].replace(
            recompute_first=0, recompute_last=0, recompute_share=0.0
        )
        self._base = replace(named.policy("unrotated"), reuse=moved)
        self._ways = [named.policy(FLOOR), self._base, *chosen]
        self._min_run = min(one.reuse.min_run or named.LEAST_RUN for one in chosen)
        self._has_records = any(
            one.reuse.repair in BY_RECORDS and one.reuse.recompute_share for one in chosen
        )

    @property
    def min_run(self) -> int:
        """Tokens of the shortest run by which a prompt is measured."""
        return self._base.reuse.min_run or named.LEAST_RUN

    def replay(self, steps: list[Step], *, is_chain: bool) -> list[dict[str, Any]]:
        """What was observed at each measured reply, as JSON."""
        needed = tokens_needed(steps, self._model.layout.block_size)
        spaces: dict[str, Workspace] = {}
        for way in self._ways:
            if is_chain or not spaces:
                pool = self._model.pool(needed)
                space = Workspace(self._model, pool, self._min_run, has_records=self._has_records)
            spaces[way.name] = space
        is_labelled = any(step.is_scored for step in steps)
        found = []
        for number, step in enumerate(steps):
            if step.is_measured:
                seen = self._measure(step, spaces, is_labelled=is_labelled)
                if seen is not None:
                    found.append(seen)
            if number + 1 == len(steps) or not step.reply:
                continue
            # Without approximate KV before a measured prompt, all ways share what is exact.
            first = spaces[self._ways[0].name]
            for way in self._ways if is_chain else self._ways[:1]:
                space = spaces[way.name]
                space.keep(step, way, None if number or space is first else first)
        return found

    def _measure(
        self, step: Step, spaces: dict[str, Workspace], *, is_labelled: bool
    ) -> dict[str, Any] | None:
        """One measured reply in every way, or None if its plan moves nothing."""
        terms, left = spaces[self._base.name].looked_at(step, self._base)
        if terms is None:
            return None
        judged: slice | None
        if is_labelled:
            reply = step.reply
            reference = Reference(reply, self._model.whole(step.prompt, reply))
            judged = slice(step.answer_start, None) if step.is_scored else None
        else:
            reference = self._model.greedy(step.prompt, MOST_TOKENS, self._eos)
            reply = reference.reply
            sure = reference.sure(NEAR_TIE)
            judged = slice(0, sure) if sure else None
        ways = {
            "drop": _observed(
                reference, judged, self._model.whole(left, reply), TokenSources(computed=len(left))
            ).row()
        }
        for way in self._ways:
            trial = spaces[way.name].try_(step, reply, way)
            ways[way.name] = _observed(
                reference, judged, trial.rows, trial.usage, trial.terms
            ).row()
        full = None
        if judged is not None:
            full = _is_right(reference.rows, reply, judged)
        return {"full": full, "ways": ways}


def _observed(
    reference: Reference,
    judged: slice | None,
    rows: torch.Tensor,
    usage: TokenSources,
    terms: gates.Terms | None = None,
) -> Observed:
    return Observed(
        kl=divergence(reference.rows, rows).float().numpy(),
        agreeing=int((reference.rows.argmax(-1) == rows.argmax(-1)).sum()),
        right=None if judged is None else _is_right(rows, reference.reply, judged),
        usage=(usage.exact, usage.moved, usage.computed),
        terms=terms,
    )


def _is_right(rows: torch.Tensor, reply: list[int], judged: slice) -> bool:
    """Whether greedy generation gives the judged tokens, after those before them."""
    wanted = torch.tensor(reply, device=rows.device)
    return bool((rows.argmax(-1)[judged] == wanted[judged]).all())


def _chosen(policies: Sequence[str], min_run: int) -> list[Policy]:
    found = [named.policy(name, min_run) for name in dict.fromkeys(policies)]
    chosen = [one for one in found if one.can_be_cleared]
    if not chosen:
        msg = "calibrate: no policy is named that could be cleared; name a rotated one"
        raise ValueError(msg)
    return chosen


def _shipped(
    renderer: Renderer, model: Model, chosen: Sequence[str] | None, seed: int, most: int
) -> tuple[list[_Conversations], list[str]]:
    """The shipped edits, and the names of those whose conversations are too long.

    Where some are, they are drawn again.
    """
    names = list(edits.EDITS) if chosen is None else list(dict.fromkeys(chosen))
    for name in names:
        if name not in edits.EDITS:
            msg = f"unknown edit {name!r} (known: {', '.join(edits.EDITS)})"
            raise ValueError(msg)

    def made(name: str, number: int, draws: int) -> tuple[list[Step], bool]:
        for again in range(draws):
            # The seeds of one number are far from those of others.
            case = edits.case(name, seed * 1_000_000 + number + again * _APART)
            steps = [renderer.step(prompt) for prompt in case.prompts]
            if model.most_tokens is None or _longest(steps) <= model.most_tokens:
                break
        return steps, case.is_chain

    def source(name: str) -> _Conversations:
        def make(number: int) -> tuple[list[Step], bool]:
            steps, is_chain = made(name, number, _DRAWS)
            _check_lengths(model, steps)
            return steps, is_chain

        every = edits.RARELY.get(name, 1)
        return _Conversations(name, most // every, make, is_alike=True, every=every)

    longest = {name: _longest(made(name, 0, _FIRST_DRAWS)[0]) for name in names}
    limit = model.most_tokens
    too_long = [name for name in names if limit is not None and longest[name] > limit]
    return [source(name) for name in names if name not in too_long], too_long


def _recall(renderer: Renderer, seed: int, most: int) -> list[_Conversations]:
    def source(scenario: Scenario) -> _Conversations:
        def make(number: int) -> tuple[list[Step], bool]:
            first = recall.HELD_OUT + seed * 1_000_000 + number
            exchanges = 3 * (scenario.window or scenario.most_edits or 1)
            messages = recall.conversation(first, exchanges, scenario.window or exchanges)
            return renderer.steps(messages, scenario), True

        return _Conversations(scenario.name, most, make)

    return [source(scenario) for scenario in _RECALL]


def _recorded(
    renderer: Renderer, conversations: Sequence[Conversation] | Sequence[Session]
) -> list[_Conversations]:
    found = [
        list(one.steps)
        if isinstance(one, Session)
        else renderer.steps(one.messages, RECORDED, tools=one.tools)
        for one in conversations
    ]
    kept = [steps for steps in found if count_measured(steps)[0] > 1]
    if not kept:
        msg = (
            "no conversation has two replies of an assistant, so no KV could be reused after an "
            "edit: record whole conversations with their replies, or calibrate without "
            "--conversations on the shipped edits"
        )
        raise CalibrationError(msg)
    return [_Conversations(RECORDED.name, len(kept), lambda number: (kept[number], True))]


def _content(sources: Sequence[_Conversations]) -> str:
    total = hashlib.blake2b(digest_size=16, person=b"kvtrie.replay.2")
    for source in sources:
        # Shipped edits depend on their number alone: the first shows what they are.
        for number in range(source.most if source.name == RECORDED.name else 1):
            steps = source.make(number)[0]
            total.update(repr((source.name, [astuple(step) for step in steps])).encode())
    return total.hexdigest()


def _digest(path: str | PathLike[str]) -> str | None:
    try:
        return checkpoint_digest(path)
    except CheckpointError:
        # Without a digest, the gate is valid only for engines that name the model as here.
        return None


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:  # noqa: ANN401 - of transformers
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if found is None:
        found = tokenizer.eos_token_id
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def _load(directory: Path, device: str, dtype: str) -> tuple[Any, Any]:
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        msg = f"dtype {dtype!r} is not an element type of torch, such as float32 or bfloat16"
        raise CalibrationError(msg)
    # Progress and warnings are for training; errors are reported in one sentence below.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        kind = AutoConfig.from_pretrained(directory, local_files_only=True).model_type
        if kind not in TEXT_OF_VISION:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory, dtype=dtype, local_files_only=True
            )
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
            return loaded.to(device).eval(), tokenizer
    except Exception as error:  # loaders raise errors of many types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        msg = f"cannot load the model in {directory}: {reason}"
        raise CalibrationError(msg) from error
    msg = (
        f"the model in {directory} is a vision model ({kind}): conversations here are of text, "
        "which does not show what moved KV costs next to images, so no gate clears it"
    )
    raise CalibrationError(msg)


def _check_vocabulary(model: Model, steps: Sequence[Step]) -> None:
    embeddings: Any = model.model.get_input_embeddings()
    size = int(embeddings.weight.shape[0])
    largest = max(max((*step.prompt, *step.reply)) for step in steps)
    if largest >= size:
        msg = (
            f"a prompt has token id {largest}, and the model's vocabulary has {size}: the log is "
            "of another model"
        )
        raise CalibrationError(msg)


def _longest(steps: Sequence[Step]) -> int:
    return max(len(step.prompt) + max(len(step.reply), MOST_TOKENS) for step in steps)


def _check_lengths(model: Model, steps: Sequence[Step]) -> None:
    limit = model.most_tokens
    longest = _longest(steps)
    if limit is not None and longest > limit:
        msg = (
            f"a conversation has {longest} tokens with its reply, the model's context is {limit}: "
            "leave out its later messages, or calibrate on shorter conversations"
        )
        raise CalibrationError(msg)
