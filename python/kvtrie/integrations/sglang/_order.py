"""The order in which requests share most of a cache: depth first, the heaviest subtree first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def depth_first(paths: Sequence[Sequence[int]]) -> list[int]:
    """Numbers of paths, so that those with a common beginning are next to each other.

    Of several branches the one with the most paths comes first, and what goes on after a path
    comes before it. It costs a comparison of neighbours in sorted order.
    """
    order: list[int] = []
    ordered = sorted(range(len(paths)), key=lambda number: tuple(paths[number]))
    # Groups of paths that share `depth` blocks; None: numbers to append.
    todo: list[tuple[list[int], int]] = [(ordered, 0)]
    ends: list[list[int]] = []
    while todo:
        group, depth = todo.pop()
        if depth < 0:
            order += ends.pop()
            continue
        first, last = paths[group[0]] if group else (), paths[group[-1]] if group else ()
        while depth < min(len(first), len(last)) and first[depth] == last[depth]:
            depth += 1
        here = [number for number in group if len(paths[number]) == depth]
        branches: dict[int, list[int]] = {}
        for number in group:
            if len(paths[number]) > depth:
                branches.setdefault(paths[number][depth], []).append(number)
        ends.append(here)
        todo.append(([], -1))
        todo += [(one, depth + 1) for one in sorted(branches.values(), key=len)]
    return order
