"""Compares a prompt with one history, without the tracker's lock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtrie._core import ComputedSource, RadixIndex, TokenSequence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from kvtrie._core import ReusePlan, Span
    from kvtrie.router.answer import AnswerKind
    from kvtrie.router.arguments import CompareArguments
    from kvtrie.router.history import History

_COMPUTE: Final = 2
_MOST_KINDS: Final = 64


@dataclass(frozen=True, slots=True)
class Seen:
    """What a `compare` has read of the tracker under the lock. It does not change afterwards.

    `named` are the histories of the given conversation, or None. `longest` is the history with the
    longest common prefix, if no search is needed. Else `through` is one of its places with the
    position, and `histories` are all of the namespace.
    """

    path: npt.NDArray[np.int32]
    named: list[History] | None
    longest: History | None
    through: tuple[int, int] | None
    histories: list[History]
    may_alias: list[History]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A result before parameters are handed out."""

    kind: AnswerKind
    history: History
    num_tokens: int
    num_exact: int
    num_common: int
    send: npt.NDArray[np.uint32] | None = None
    segments: npt.NDArray[np.void] | None = None


def common(path: npt.NDArray[np.int32], places: npt.NDArray[np.int32]) -> int:
    """Length of the common prefix of two paths."""
    size = min(len(path), len(places))
    differ = path[:size] != places[:size]
    return int(differ.argmax()) if differ.any() else size


def leading(segments: npt.NDArray[np.void]) -> tuple[int, int]:
    """Tokens that a plan uses in place, and how many of them are exact."""
    end = exact = 0
    for start, stop, delta, label in segments[["start", "end", "delta", "class"]].tolist():
        if start != end or delta != 0 or label == 2:
            break
        end = stop
        exact = stop if label == 0 and exact == start else exact
    return end, exact


def in_place(
    history: History, num_common: int, size: int, asked: CompareArguments
) -> tuple[int, int]:
    """Tokens at the front that may be used in place, and how many of them are exact."""
    usable = max(0, min(num_common, history.num_computed, size - asked.keep_last))
    if isinstance(history.source, ComputedSource):
        return usable, usable
    exact = min(usable, history.source.exact_until)
    policy = asked.policy
    allowed = (
        policy.approximate
        and history.source.hops <= policy.max_hops
        and not policy.forbid_kinds
        and usable - exact <= policy.max_approximate_share * size
    )
    return (usable if allowed else exact), exact


def alias(
    asked: CompareArguments, histories: list[History]
) -> tuple[History, npt.NDArray[np.uint32]] | None:
    """A history whose text without reasoning begins the prompt, and what to send."""
    if asked.prompt.items:
        return None
    prompt = asked.prompt[:]
    best: tuple[int, int] = (0, 0)
    found = None
    for history in histories:
        if (
            not history.reasoning
            or history.seq.items
            or (len(history.places), history.number) < best
        ):
            continue
        consumed = without_reasoning(history, prompt)
        if consumed is not None:
            best = (len(history.places), history.number)
            found = (history, np.concatenate([history.seq[:], prompt[consumed:]]))
    return found


def without_reasoning(history: History, prompt: npt.NDArray[np.uint32]) -> int | None:
    """Length of the part of a prompt that is this history without some of its reasoning, or None.

    First all reasoning is dropped; then only what the prompt does not have.
    """
    tokens = history.seq[:]
    for keep_some in (False, True):
        read = at = removed = 0
        for start, end in (*history.reasoning, (len(tokens), len(tokens))):
            if not np.array_equal(tokens[at:start], prompt[read : read + start - at]):
                break
            read += start - at
            at = end
            if keep_some and np.array_equal(tokens[start:end], prompt[read : read + end - start]):
                read += end - start
            else:
                removed += end - start
        else:
            if removed:
                return read
    return None


def planned(
    history: History, asked: CompareArguments, index: RadixIndex, *, is_kept: Callable[[], bool]
) -> tuple[npt.NDArray[np.void], int]:
    """The source of the prompt's tokens in one history, and how many are reused.

    The tracker's index holds all tokens as exact and without tags, so it serves a computed history
    none of whose kinds is forbidden; the tags are added here. Otherwise, or if the history has left
    meanwhile, or if its windows are on too many paths, an index is built of the history alone.
    """
    spans = [span for span in history.spans if span.start < span.end]
    kinds = tuple(dict.fromkeys((*index.kinds, *(span.kind for span in spans))))
    may_share = isinstance(history.source, ComputedSource) and len(kinds) <= _MOST_KINDS
    if may_share and {span.kind for span in spans}.isdisjoint(asked.policy.forbid_kinds):
        path = TokenSequence(history.seq[:], history.seq.namespace, history.seq.items)
        path.truncate(history.num_computed)
        plan = _plan(index, asked, path)
        if is_kept() and not plan.candidates_dropped:
            segments = plan.segments
            _add_kinds(segments, spans, kinds)
            return segments, plan.num_exact + plan.num_approximate
    size = len(history.places)
    alone = RadixIndex(size, 1, min_run=index.min_run)
    alone.insert(
        history.seq,
        np.arange(size, dtype=np.int32),
        num_computed=history.num_computed,
        source=history.source,
        spans=history.spans,
    )
    plan = _plan(alone, asked)
    return plan.segments, plan.num_exact + plan.num_approximate


def _plan(
    index: RadixIndex, asked: CompareArguments, path: TokenSequence | None = None
) -> ReusePlan:
    """A released plan, whose segments can still be read."""
    # The caller has judged the history: the index has no more to say about its scope.
    policy = asked.policy.replace(scope="namespace")
    plan = index.plan(asked.prompt, policy, keep_last=asked.keep_last, pin=False, path=path)
    plan.release()
    return plan


def _add_kinds(segments: npt.NDArray[np.void], spans: Sequence[Span], kinds: Sequence[str]) -> None:
    first = segments["old_start"]
    end = first + segments["end"] - segments["start"]
    for bit, kind in enumerate(kinds):
        ranges = sorted((span.start, span.end) for span in spans if span.kind == kind)
        if ranges:
            starts, ends = np.array(ranges, dtype=np.int64).T
            # Of the spans that start before the end of a segment, the last end.
            num_before = np.searchsorted(starts, end)
            last_end = np.maximum.accumulate(np.append(0, ends))[num_before]
            is_tagged = (last_end > first) & (segments["class"] != _COMPUTE)
            segments["kinds"][is_tagged] |= np.uint64(1 << bit)
