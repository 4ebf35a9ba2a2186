"""Options, events and results of requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvtrie._core import ReusePolicy, SharedSalt
    from kvtrie.engines._images import Image
    from kvtrie.gates import Decision

    Salt = str | SharedSalt
    Messages = Sequence[Mapping[str, Any]]
    TokenIds = Sequence[int] | NDArray[np.integer] | torch.Tensor
    Prompt = str | Messages | TokenIds

Status = Literal["waiting", "running", "finished"]
FinishReason = Literal["stop", "length", "cancelled", "error"]


class Options(TypedDict, total=False):
    """Options of a request; every key is optional.

    Attributes:
        max_new_tokens: Most tokens to generate (256); the model's context may end it earlier.
        temperature: 0 (the default) is greedy; above it, logits are divided by this and tokens are
            sampled.
        top_k: Sample among the k likeliest tokens only; ``None``: among all.
        top_p: Sample among the likeliest tokens that together reach this probability (1: all).
        seed: Seed of this request's sampling; by default made of the engine's seed and the
            request's number.
        stop_token_ids: Ids that end the answer, in addition to the model's own.
        ignore_eos: Continue after the model's own end-of-sequence ids.
        tools: Tool schemas for the chat template.
        chat_template_kwargs: More variables for the chat template.
        salt: Tenant of this request (default: the engine's).
        policy: What this request may reuse (default: as the engine's `policy` says).
        session: The id of the conversation, 1 to 256 bytes: moved runs may come from its own
            blocks.
        moved_end: Position from which on moved runs supply no token (default: where the last
            message of a user or a tool begins, if the tokenizer's chat template shows it).
        return_logits: Add to each event the row that its token was picked from.
        images: The images of the prompt, in order. Token ids have all tokens of each image, as a
            processor returns them; messages and text have one token per image, as chat templates
            write it.
    """

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    seed: int | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    salt: Salt | None
    policy: ReusePolicy | None
    session: str | None
    moved_end: int | None
    return_logits: bool
    images: Sequence[Image]


@dataclass(frozen=True, slots=True)
class Usage:
    """The source of a prompt's KV, in tokens; the three add up to the prompt.

    Attributes:
        exact: Found under the same whole prefix.
        moved: Reused approximately (0 under ``EXACT_ONLY``).
        computed: Computed by the model.
    """

    exact: int = 0
    moved: int = 0
    computed: int = 0

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return self.exact + self.moved + self.computed


@dataclass(frozen=True, slots=True)
class Event:
    """One generated token, or the end of a request.

    Attributes:
        request: The request it belongs to.
        token: The token id; ``None`` if the request ended without one (an error).
        text: New text that is final; pieces never split a character.
        usage: The sources of the prompt's KV when the request was first admitted.
        finish_reason: ``None`` while the request runs; ``"stop"`` (end of sequence or a stop id),
            ``"length"`` or ``"error"`` on its last event.
        logits: The float32 row on the CPU that the token was picked from, with ``return_logits``.
    """

    request: Request
    token: int | None
    text: str
    usage: Usage
    finish_reason: FinishReason | None = None
    logits: torch.Tensor | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the last event."""
        return self.finish_reason is not None


@dataclass(slots=True, eq=False)
class Request:
    """One prompt in an engine. The engine writes it; callers read it.

    Attributes:
        number: Counts up from 0 in the order of submission.
        prompt_len: Tokens of the prompt.
        decision: What it may reuse, and why. When the request is first admitted, it becomes the one
            on its plan: exact, if the gate does not clear the kind of edit that the plan follows.
        status: ``"waiting"``, ``"running"`` or ``"finished"``.
        tokens: Generated ids so far, with a final end-of-sequence id.
        text: Text of ``tokens`` so far.
        usage: As in `Event`.
        finish_reason: As in `Event`.
        error: The error that ended it, if any.
        num_preemptions: How often it was preempted for an older request.
    """

    number: int
    prompt_len: int
    decision: Decision
    status: Status = "waiting"
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    usage: Usage = field(default_factory=Usage)
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer.

    Attributes:
        tokens: Generated ids, with a final end-of-sequence id.
        text: Their text without special tokens.
        usage: As in `Event`.
        finish_reason: ``"stop"`` or ``"length"``.
        decision: What the request was allowed to reuse. If ``is_cleared`` is False, its ``reason``
            says why an approximate policy became ``kvtrie.EXACT_ONLY``.
        logits: ``[len(tokens), vocabulary]``, with ``return_logits``.
    """

    tokens: list[int]
    text: str
    usage: Usage
    finish_reason: FinishReason
    decision: Decision
    logits: torch.Tensor | None = None
