"""Scores moved tokens by whether the text before them was continued otherwise elsewhere.

Heads that copy look for the last place where the tokens just read occurred before, and read what
followed. Where that place differs between the context that KV was computed in and the prompt, KV
differs most. The rule needs tokens alone, no record and no model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtrie.repair.choice import Moved, Scored

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_ORDER: Final = 4
"""The longest n-grams that are compared."""

MAX_PATHS: Final = 16
"""The most source paths whose contexts are compared; runs of further ones score as changed."""


class Ngrams(Scored):
    """Half fronts, half tokens whose n-gram match changed; ties go to longer n-grams.

    A token's match is the last earlier place that the longest n-gram before it, of at most
    ``MAX_ORDER`` tokens, occurred at. It changed if it is not the same cached token in the old
    context as in the new one. Costs ``MAX_ORDER`` sorts of the prompt, and as many of each source
    path, ``MAX_PATHS`` at most.
    """

    def __init__(self) -> None:
        super().__init__(changed)


def changed(moved: Moved) -> NDArray[np.float64]:
    """For each moved position the length of the n-gram whose match changed; 0 where none did."""
    tokens = moved.tokens
    match, length = matches(tokens)
    scores = np.zeros(len(tokens))
    for path, numbers in _paths(moved):
        if path is None:
            for part in moved.segments[numbers]:
                scores[part["start"] : part["end"]] = 1
            continue
        old_match, old_length = matches(path)
        old_of = _old_positions(moved, path, numbers)
        for part in moved.segments[numbers]:
            here = np.arange(part["start"], part["end"])
            there = here - part["delta"]
            same = (match[here] < 0) & (old_match[there] < 0)
            both = (match[here] >= 0) & (old_length[there] == length[here])
            same |= both & (old_of[match[here]] == old_match[there])
            longest = np.maximum(length[here], old_length[there])
            scores[here] = np.where(same, 0, longest)
    return scores[moved.positions]


def matches(tokens: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The last earlier position after the n-gram that is before each token, and its length.

    Both int64 ``[tokens]``; -1 and 0 where there is none. Of several lengths the longest counts.
    """
    count = len(tokens)
    match = np.full(count, -1, dtype=np.int64)
    length = np.zeros(count, dtype=np.int64)
    # Codes of the n-gram that ends before each position; equal codes are equal n-grams.
    codes = np.zeros(count, dtype=np.int64)
    for order in range(1, min(MAX_ORDER, count - 1) + 1):
        pairs = codes[order:] * (1 << 32) + tokens[: count - order]
        codes = np.full(count, -1, dtype=np.int64)
        codes[order:] = np.unique(pairs, return_inverse=True)[1]
        by_code = order + np.argsort(codes[order:], kind="stable")
        is_equal = codes[by_code[1:]] == codes[by_code[:-1]]
        later = by_code[1:][is_equal]
        match[later], length[later] = by_code[:-1][is_equal], order
    return match, length


def _paths(moved: Moved) -> list[tuple[NDArray[np.int64] | None, list[int]]]:
    """The source paths, each with the numbers of the segments that are copied from it."""
    known: list[tuple[NDArray[np.int64], list[int]]] = []
    unknown: list[int] = []
    found: list[tuple[int, NDArray[np.integer[Any]] | None]] = [
        (number, moved.context(number)) for number in moved.numbers.tolist()
    ]
    # Longest first: the paths of others may be their beginnings.
    found.sort(key=lambda one: 0 if one[1] is None else -len(one[1]))
    for number, path in found:
        part = moved.segments[number]
        if path is None or len(path) < part["old_start"] + part["end"] - part["start"]:
            unknown.append(number)
            continue
        for longer, numbers in known:
            if np.array_equal(longer[: len(path)], path):
                numbers.append(number)
                break
        else:
            if len(known) == MAX_PATHS:
                unknown.append(number)
            else:
                known.append((np.asarray(path, dtype=np.int64), [number]))
    return [*known, (None, unknown)]


def _old_positions(moved: Moved, path: NDArray[np.int64], numbers: list[int]) -> NDArray[np.int64]:
    """For each prompt token the position on a path that its KV is of; -1 where it is of none."""
    old = np.full(len(moved.tokens), -1, dtype=np.int64)
    shared = min(moved.num_in_place, len(path))
    differs = np.flatnonzero(moved.tokens[:shared] != path[:shared])
    shared = int(differs[0]) if len(differs) else shared
    old[:shared] = np.arange(shared)
    for part in moved.segments[numbers]:
        old[part["start"] : part["end"]] = np.arange(part["start"], part["end"]) - part["delta"]
    return old
