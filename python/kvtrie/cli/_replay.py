"""Replays conversations: answers every turn, checks its tokens, times it with and without reuse."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import jinja2
import torch
from transformers.utils import logging as transformers_logging

from kvtrie import KvTrieError
from kvtrie.cli import _edited
from kvtrie.demo import answer_of, model_path
from kvtrie.engines.transformers import Generator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvtrie.demo import Conversation, ReplayTurn
    from kvtrie.engines.transformers import Event, Usage

_LEAST_BLOCKS: Final = 64
# Allowed multiple of the sum of independent rounding errors.
_SAFETY: Final = 4.0

WHY_TOLERANCE: Final = (
    "reused KV equals the computed KV bit for bit, but a shorter pass multiplies matrices of other "
    "shapes, whose sums round in another order: 4 x unit roundoff x sqrt(layers x longest sum) x "
    "largest logit; a wrong KV row changes logits by tenths and more"
)


class BadInputError(Exception):
    """The user's input cannot be replayed; the text is one sentence."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The options of the command."""

    model: Path | None
    num_blocks: int | None
    block_size: int
    max_new_tokens: int
    repeats: int
    threads: int | None
    device: str
    dtype: str


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One turn: reuse, times in seconds, and correctness."""

    question: str
    answer: str
    reference: str | None
    usage: Usage
    num_new_tokens: int
    finish_reason: str
    seconds_with_reuse: float
    seconds_without_reuse: float
    is_identical: bool
    max_logit_difference: float
    tolerance: float

    @property
    def ratio(self) -> float:
        return self.seconds_without_reuse / self.seconds_with_reuse

    @property
    def matches_reference(self) -> bool | None:
        """Whether the answer without its reasoning is the recorded one; ``None`` without one."""
        if self.reference is None:
            return None
        return answer_of(self.answer).strip() == self.reference.strip()


@dataclass(frozen=True, slots=True)
class ConversationResult:
    """One conversation: its first line in the file, its turns, and its edited histories."""

    line: int
    turns: tuple[TurnResult, ...]
    edited: tuple[_edited.Edited, ...]
    why_not_edited: str | None


@dataclass(frozen=True, slots=True)
class DemoResult:
    model: str
    dtype: str
    device: str
    threads: int
    num_blocks: int
    block_size: int
    repeats: int
    conversations: tuple[ConversationResult, ...]

    @property
    def turns(self) -> list[TurnResult]:
        return [turn for conversation in self.conversations for turn in conversation.turns]

    @property
    def later_turns(self) -> list[TurnResult]:
        """All but the first of each conversation."""
        return [turn for conversation in self.conversations for turn in conversation.turns[1:]]

    @property
    def later_ratio(self) -> float | None:
        ratios = [turn.ratio for turn in self.later_turns]
        return statistics.median(ratios) if ratios else None

    @property
    def later_total_ratio(self) -> float | None:
        """The ratio of total times, in which long computed parts weigh more."""
        later = self.later_turns
        if not later:
            return None
        without = sum(turn.seconds_without_reuse for turn in later)
        return without / sum(turn.seconds_with_reuse for turn in later)

    @property
    def is_right(self) -> bool:
        """Whether all logits are those without cache, except for rounding."""
        return all(turn.max_logit_difference <= turn.tolerance for turn in self.turns)

    @property
    def is_identical(self) -> bool:
        """Whether all answers are those without cache, token by token."""
        return all(turn.is_identical for turn in self.turns)


def replay(
    conversations: Sequence[Conversation], settings: DemoSettings, step: Callable[[str], None]
) -> DemoResult:
    """Answer every turn of every conversation, or raise `BadInputError`."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    # One pool answers, the other is emptied and filled again for the timings.
    live = _load(settings)
    try:
        num_blocks = settings.num_blocks or _enough_blocks(live, conversations, settings)
        live, timed = (
            Generator(
                live.model, live.tokenizer, num_blocks=num_blocks, block_size=settings.block_size
            )
            for _ in range(2)
        )
        _warm_up(timed, conversations[0], settings)
        done = tuple(
            _ConversationReplay(live, timed, settings, conversation, step).run()
            for conversation in conversations
        )
    except (KvTrieError, ValueError, MemoryError) as error:
        raise BadInputError(str(error)) from error
    except jinja2.TemplateError as error:
        msg = f"the model's chat template refuses the conversation: {error}"
        raise BadInputError(msg) from error
    return DemoResult(
        model=live.namespace().model,
        dtype=live.pool.layout.dtype,
        device=str(live.pool.device),
        threads=torch.get_num_threads(),
        num_blocks=num_blocks,
        block_size=settings.block_size,
        repeats=settings.repeats,
        conversations=done,
    )


class _ConversationReplay:
    """The replay of one conversation."""

    def __init__(
        self,
        live: Generator,
        timed: Generator,
        settings: DemoSettings,
        conversation: Conversation,
        step: Callable[[str], None],
    ) -> None:
        self._live = live
        self._timed = timed
        self._settings = settings
        self._conversation = conversation
        self._step = step
        self._tools = list(conversation.tools) or None
        self._history: list[dict[str, Any]] = []
        # The tokens that have KV after each turn: what a later turn may find.
        self._computed: list[list[int]] = []
        self._replies: list[_edited.Reply] = []

    def run(self) -> ConversationResult:
        turns = []
        for number, turn in enumerate(self._conversation.turns(), start=1):
            turns.append(self._turn(turn))
            found = turns[-1].usage
            self._step(f"turn {number}: {found.exact} of {found.prompt} prompt tokens found")
        edited, why_not = _edited.measure(
            self._live,
            self._replies,
            tools=self._tools,
            repeats=self._settings.repeats,
            max_new_tokens=self._settings.max_new_tokens,
        )
        return ConversationResult(
            line=self._conversation.line,
            turns=tuple(turns),
            edited=tuple(edited),
            why_not_edited=why_not,
        )

    def _turn(self, turn: ReplayTurn) -> TurnResult:
        self._history.extend(turn.given)
        prompt = [int(token) for token in self._live.encode(self._history, tools=self._tools)]
        done = self._live.generate(
            self._history,
            tools=self._tools,
            max_new_tokens=self._settings.max_new_tokens,
            return_logits=True,
        )
        if done.logits is None:
            msg = "the engine answered without logits"
            raise RuntimeError(msg)
        plain = _logits_without_cache(self._live, [*prompt, *done.tokens[:-1]], len(prompt) - 1)
        with_reuse, without_reuse = self._times()
        self._replies.append(_edited.Reply(list(self._history), done.tokens))
        answer = self._text(done.tokens, done.finish_reason)
        self._history.append({"role": "assistant", "content": answer})
        self._computed.append([*prompt, *done.tokens[:-1]])
        return TurnResult(
            question=_question(turn),
            answer=answer,
            reference=turn.reference,
            usage=done.usage,
            num_new_tokens=len(done.tokens),
            finish_reason=done.finish_reason,
            seconds_with_reuse=with_reuse,
            seconds_without_reuse=without_reuse,
            is_identical=plain.argmax(dim=-1).tolist() == done.tokens,
            max_logit_difference=float((plain - done.logits).abs().max()),
            tolerance=_tolerance(self._live, len(prompt) + len(done.tokens), plain),
        )

    def _times(self) -> tuple[float, float]:
        """Medians with and without reuse, measured alternately."""
        pairs = []
        for _ in range(self._settings.repeats):
            self._timed.forget()
            for tokens in self._computed:
                self._timed.generate(tokens, max_new_tokens=1)
            with_reuse = self._time()
            self._timed.forget()
            pairs.append((with_reuse, self._time()))
        return (
            statistics.median(pair[0] for pair in pairs),
            statistics.median(pair[1] for pair in pairs),
        )

    def _time(self) -> float:
        """Seconds to the first token: template, tokenizer, plan, copy and model."""
        return _first_token(self._timed, self._history, self._tools, self._settings)[1]

    def _text(self, tokens: list[int], finish_reason: str) -> str:
        """The text of a reply as the history has it: with special tokens, except the last one."""
        tokenizer = self._live.tokenizer
        if tokenizer is None:
            msg = "a replay needs a tokenizer"
            raise RuntimeError(msg)
        kept = tokens[:-1] if finish_reason == "stop" else tokens
        text = tokenizer.decode(kept, clean_up_tokenization_spaces=False)
        return text if isinstance(text, str) else "".join(text)


def _load(settings: DemoSettings) -> Generator:
    """A generator with one block; `_enough_blocks` counts with its tokenizer."""
    path = settings.model or model_path()
    dtype = settings.dtype
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        msg = f"dtype {dtype!r} is not an element type of torch, such as float32 or bfloat16"
        raise BadInputError(msg)
    # Progress and warnings are for training; errors are reported in one sentence below.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        return Generator.from_pretrained(
            path,
            num_blocks=1,
            block_size=settings.block_size,
            device=settings.device,
            dtype=dtype,
        )
    except (KvTrieError, FileNotFoundError) as error:
        raise BadInputError(str(error)) from error
    except Exception as error:  # loaders raise errors of many types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        msg = f"cannot load the model in {path}: {reason}"
        raise BadInputError(msg) from error


def _enough_blocks(
    generator: Generator, conversations: Sequence[Conversation], settings: DemoSettings
) -> int:
    """Blocks for twice the longest conversation; older KV is evicted."""
    longest = 0
    for conversation in conversations:
        tools = list(conversation.tools) or None
        tokens = len(generator.encode(list(conversation.messages), tools=tools))
        # An answer may be longer than the recorded one.
        tokens += len(conversation.turns()) * settings.max_new_tokens
        longest = max(longest, tokens)
    return max(_LEAST_BLOCKS, 2 * longest // settings.block_size)


def _warm_up(generator: Generator, conversation: Conversation, settings: DemoSettings) -> None:
    """Run twice without timing: first calls allocate and compile."""
    messages = list(conversation.turns()[0].given)
    for _ in range(2):
        _first_token(generator, messages, list(conversation.tools) or None, settings)


def _first_token(
    generator: Generator,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    settings: DemoSettings,
) -> tuple[Event, float]:
    start = time.perf_counter()
    events = generator.stream(messages, tools=tools, max_new_tokens=settings.max_new_tokens)
    event = next(events)
    seconds = time.perf_counter() - start
    events.close()
    return event, seconds


def _logits_without_cache(generator: Generator, tokens: list[int], first: int) -> torch.Tensor:
    """Logits from position ``first`` on, by one pass of the bare model over all tokens."""
    ids = torch.tensor([tokens], device=generator.pool.device)
    with torch.inference_mode():
        out = generator.model(input_ids=ids, use_cache=False)
    rows: torch.Tensor = out.logits[0, first:].float().cpu()
    return rows


def _question(turn: ReplayTurn) -> str:
    said = [message for message in turn.given if message["role"] == "user"] or turn.given
    return str(said[-1].get("content") or "")


def _tolerance(generator: Generator, num_tokens: int, logits: torch.Tensor) -> float:
    dtype = generator.pool.dtype
    # Half-precision products are summed in float32 and rounded once.
    is_half = dtype in {torch.float16, torch.bfloat16}
    longest_sum = 1 if is_half else max(num_tokens, int(generator.model.config.hidden_size))
    steps = generator.pool.layout.num_layers * longest_sum
    unit_roundoff = torch.finfo(dtype).eps / 2
    return _SAFETY * unit_roundoff * math.sqrt(steps) * float(logits.abs().max())
