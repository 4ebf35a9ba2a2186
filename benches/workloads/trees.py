"""One path through a tree, stored in one edge, in many, or with siblings."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from workloads.documents import BLOCK_SIZE, Tokens, document

# Apart from all other seeds, so that siblings share no tokens with a document.
_SIBLING_SEEDS = 1 << 40


@dataclass(frozen=True)
class Tree:
    """A path and how it comes to be cached.

    Args:
        path: All tokens of the path.
        edge: Tokens by which the path grows with each insert.
        siblings: Branches that leave the path at each growth, apart from the path itself.
    """

    path: Tokens
    edge: int
    siblings: int = 0

    def inserts(self) -> Iterator[tuple[Tokens, int]]:
        """What to insert, in order: the tokens from position 0 on, and where the new ones start.

        A sibling shares the path up to where it leaves and is one block longer.
        """
        for start in range(0, len(self.path), self.edge):
            end = min(start + self.edge, len(self.path))
            yield self.path[:end], start
            for number in range(self.siblings):
                seed = _SIBLING_SEEDS + start * self.siblings + number
                yield np.concatenate([self.path[:start], document(seed, BLOCK_SIZE)]), start

    @property
    def num_blocks(self) -> int:
        levels = -(-len(self.path) // self.edge)
        return len(self.path) // BLOCK_SIZE + levels * self.siblings


def one_edge(seed: int, length: int) -> Tree:
    return Tree(document(seed, length), edge=length)


def grown(seed: int, length: int, edge: int = 512) -> Tree:
    """A path that grew by `edge` tokens at a time, as a conversation does."""
    return Tree(document(seed, length), edge=edge)


def branching(seed: int, length: int, edge: int = 512, siblings: int = 1) -> Tree:
    """A path with branches at every level: as deep a tree as there are edges."""
    return Tree(document(seed, length), edge=edge, siblings=siblings)
