"""Concurrent short requests of one scheduler step."""

import numpy as np

from workloads.documents import Tokens, document

_REQUEST_SEEDS = 1 << 50


class Requests:
    """A step's requests, each with its own prefix, which may be cached, and a fresh end.

    Example:
        >>> step = Requests(256, length=512, fresh=64)
        >>> len(step.prompt(0, step=1)), len(step.cached(0))
        (512, 448)
    """

    def __init__(self, count: int = 256, length: int = 512, fresh: int = 64) -> None:
        self.count = count
        self.length = length
        self.fresh = fresh

    def cached(self, number: int) -> Tokens:
        return document(_REQUEST_SEEDS + number, self.length - self.fresh)

    def prompt(self, number: int, step: int) -> Tokens:
        """All tokens of a request in one step."""
        seed = 2 * _REQUEST_SEEDS + step * self.count + number
        return np.concatenate([self.cached(number), document(seed, self.fresh)])
