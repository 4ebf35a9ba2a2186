"""A prefill/decode pair in pure Python that moves labelled fake KV, so that a wrong load shows.

A pool here holds labels instead of numbers: each slot has the token that it was computed for, the
position, and the context. After a transfer the receiver checks every slot that it counts as
present, and counts the wrong ones. The same transfer can be made under kvtrie's rules and under
those of several engines, each written from its description with a link to the report:

* `vllm.suffix_trim`, `vllm.head_trim`, `vllm.SuffixTrim(clip=…, rounded=…)`: blocks paired by
  counting;
* `lmcache.CountedHit()`, `lmcache.Tracker`, `lmcache.check_resumed`: lengths with two owners;
* `llamacpp.shift_reuse`: holes closed by removing and shifting in place;
* `RangePlan(policy=…)`: a `SequenceLedger`, a `TransferManifest` sent as bytes, and
  `plan_transfer`.

`Engine.compute` gives an engine a request with its KV; `transfer` moves it to another engine's
prompt and returns an `Outcome`. Token ids are any ints from 0; disjoint ranges are different texts.

Example:
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
