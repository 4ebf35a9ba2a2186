"""A prefill/decode pair in pure Python that moves labelled fake KV, so that a wrong load shows.

A pool holds labels instead of numbers (`tests.truth`). `transfer` moves a request of one engine to
another engine's prompt and counts the slots that are not what they are counted as, under kvtrie's
rules (`RangePlan`) or under those of other engines (`tests.pd.rules`).

Reasoning is stripped from the history, and the decode engine's blocks are requested again:

    >>> import kvtrie
    >>> from tests import pd
    >>> question, reasoning, answer, new = (
    ...     range(64),
    ...     range(100, 260),
    ...     range(300, 348),
    ...     range(400, 432),
    ... )
    >>> turn = pd.Engine("D").compute([*question, *reasoning, *answer])
    >>> prompt = [*question, *answer, *new]
    >>> outcome = pd.transfer(turn, pd.Engine("P"), prompt, cached=64, rule=pd.vllm.suffix_trim)
    >>> outcome.loaded, outcome.wrong, outcome.never_computed
    (80, 80, 32)
    >>> outcome = pd.transfer(turn, pd.Engine("P"), prompt, cached=64, rule=pd.RangePlan())
    >>> outcome.loaded, outcome.computed, outcome.wrong
    (0, 80, 0)
    >>> moving = pd.RangePlan(kvtrie.ReusePolicy(approximate=True))
    >>> outcome = pd.transfer(turn, pd.Engine("P"), prompt, cached=64, rule=moving)
    >>> outcome.loaded, outcome.computed, outcome.wrong
    (48, 32, 0)
"""

from tests.pd import faults
from tests.pd.engine import Computed, Engine
from tests.pd.exchange import Answer, PeerError, Piece, Rule, Want
from tests.pd.outcome import Outcome, transfer
from tests.pd.rules import llamacpp, lmcache, vllm
from tests.pd.rules.manifest import RangePlan

__all__ = [
    "Answer",
    "Computed",
    "Engine",
    "Outcome",
    "PeerError",
    "Piece",
    "RangePlan",
    "Rule",
    "Want",
    "faults",
    "llamacpp",
    "lmcache",
    "transfer",
    "vllm",
]
