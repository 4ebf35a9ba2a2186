"""Checks a `TurnTracker`'s arguments, and copies what would run code of the caller later."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, SupportsIndex

from kvtrie._core import ComputedSource, Imported, ReusePolicy, Span, TokenSequence
from kvtrie.router.nixl_params import checked_params, exact_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_BLOCK_SIZE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class KeepArguments:
    """Arguments of `keep`, checked."""

    seq: TokenSequence
    conversation: str | None
    num_computed: int
    source: ComputedSource | Imported
    spans: tuple[Span, ...]
    reasoning: tuple[tuple[int, int], ...]
    params: dict[str, Any] | None
    payload: object
    manifest: object

    @property
    def has_handle(self) -> bool:
        """Whether its KV can be fetched."""
        return self.params is not None or self.manifest is not None


@dataclass(frozen=True, slots=True)
class CompareArguments:
    """Arguments of `compare`, checked."""

    prompt: TokenSequence
    conversation: str | None
    policy: ReusePolicy
    alias: bool
    keep_last: int
    take: bool


def checked_keep(
    seq: TokenSequence,
    num_computed: SupportsIndex,
    conversation: str | None,
    spans: Iterable[Span],
    source: ComputedSource | Imported,
    params: Mapping[str, Any] | None,
    payload: object,
    manifest: object,
    max_tokens: int,
) -> KeepArguments:
    """Check the arguments of `keep`."""
    call = "TurnTracker.keep"
    copied = _copy_of(call, "seq", seq)
    size = len(copied)
    if size == 0:
        msg = f"{call}: the history has no token"
        raise ValueError(msg)
    if size > max_tokens:
        msg = f"{call}: the history has {size} tokens, and max_tokens is {max_tokens}"
        raise ValueError(msg)
    computed = _index(call, "num_computed", num_computed)
    if not 0 <= computed <= size:
        msg = f"{call}: num_computed is {computed}, and the history has {size} tokens"
        raise ValueError(msg)
    if conversation is not None:
        conversation = text(call, "conversation", conversation)
    instance(call, "source", source, (ComputedSource, Imported), "COMPUTED or an Imported")
    all_spans = tuple(spans)
    for span in all_spans:
        instance(call, "an item of spans", span, Span, "a Span")
        if span.end > size:
            msg = f"{call}: {span!r} ends after the {size} tokens of the history"
            raise ValueError(msg)
    checked = None if params is None else checked_params(params, call)
    return KeepArguments(
        seq=copied,
        conversation=conversation,
        num_computed=computed,
        source=source,
        spans=all_spans,
        reasoning=_merged_reasoning(all_spans),
        params=checked,
        payload=payload,
        manifest=manifest,
    )


def checked_compare(
    prompt: TokenSequence,
    conversation: str | None,
    policy: ReusePolicy,
    alias: bool,
    keep_last: SupportsIndex,
    take: bool,
    min_run: int,
) -> CompareArguments:
    """Check the arguments of `compare`."""
    call = "TurnTracker.compare"
    copied = _copy_of(call, "prompt", prompt)
    if conversation is not None:
        conversation = text(call, "conversation", conversation)
    instance(call, "policy", policy, ReusePolicy, "a ReusePolicy")
    if policy.min_run is not None and policy.min_run < min_run:
        msg = (
            f"{call}: the policy's min_run is {policy.min_run}; the tracker finds runs of "
            f"{min_run} tokens and more (its min_run)"
        )
        raise ValueError(msg)
    kept_back = _index(call, "keep_last", keep_last)
    if kept_back < 0:
        msg = f"{call}: keep_last is {kept_back}, which is negative"
        raise ValueError(msg)
    for name, value in (("alias", alias), ("take", take)):
        instance(call, name, value, bool, "a bool")
    return CompareArguments(copied, conversation, policy, alias, kept_back, take)


def instance(call: str, name: str, value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Refuse a value of another type. A bool is not an int.

    The type counts, not `__class__`: no attribute of a foreign object is read later.
    """
    if not issubclass(type(value), kind) or (isinstance(value, bool) and kind is not bool):
        msg = f"{call}: {name} is {value!r}, not {what}"
        raise TypeError(msg)


def _copy_of(call: str, name: str, seq: TokenSequence) -> TokenSequence:
    instance(call, name, seq, TokenSequence, "a TokenSequence")
    return TokenSequence(seq[:], seq.namespace, seq.items)


def _index(call: str, name: str, value: SupportsIndex) -> int:
    """An exact int, because a subclass's comparisons would run under the lock."""
    instance(call, name, value, SupportsIndex, "an int")
    return operator.index(value)


def text(call: str, name: str, value: str) -> str:
    """An exact str, because a subclass's hash would run under the lock."""
    instance(call, name, value, str, "a str")
    return exact_text(value)


def whole(call: str, name: str, value: SupportsIndex, least: int, most: int) -> int:
    """An exact int in ``[least, most]``."""
    number = _index(call, name, value)
    if not least <= number <= most:
        msg = f"{call}: {name} is {number}; it must be in [{least}, {most}]"
        raise ValueError(msg)
    return number


def block_sizes(call: str, value: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Tokens per block of each block group, or None."""
    if value is None:
        return None
    sizes = list(value) if isinstance(value, Sequence) else [value]
    if not sizes:
        msg = f"{call}: block_size is empty; it must have one size per block group"
        raise ValueError(msg)
    return tuple(whole(call, "block_size", size, 1, MAX_BLOCK_SIZE) for size in sizes)


def _merged_reasoning(spans: tuple[Span, ...]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for span in sorted(
        (span for span in spans if span.kind == "reasoning" and span.start < span.end),
        key=lambda span: (span.start, span.end),
    ):
        if merged and span.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span.end))
        else:
            merged.append((span.start, span.end))
    return tuple(merged)
