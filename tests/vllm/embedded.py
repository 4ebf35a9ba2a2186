"""The embedded engine on the model that vLLM runs, and what the two did with one request.

Two rules of vLLM are applied to it here: vLLM caches whole blocks only, and without a scheduler
that resumes after gaps it computes everything after the first one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from tests.vllm.engine import BLOCK

from kvtrie.engines._lease import Lease
from kvtrie.engines.transformers import Generator

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import pytest
    from numpy.typing import NDArray
    from tests.vllm.engine import Engine
    from vllm.v1.request import Request

    import kvtrie
    from kvtrie.engines._scheduler import Job
    from kvtrie.engines._store import Store

EXACT, MOVED, COMPUTED = range(3)

# First token, the one after the last, the KV's position before (-1: it was computed), and class.
Segment = tuple[int, int, int, int]


@dataclass(frozen=True)
class Served:
    """What an engine did with a request.

    `segments` are the sources of the prompt's KV in as few pieces as possible; `logprobs` of all
    tokens where each token of the answer was chosen; `k` and `v` are ``[layers, tokens, heads,
    channels]``.
    """

    tokens: list[int]
    segments: list[Segment]
    logprobs: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def segments_of(planned: NDArray[Any], used: Iterable[tuple[int, int]], end: int) -> list[Segment]:
    """The segments of a plan that were used, the rest of a prompt being computed.

    Pieces that say the same in two parts are one: where a plan cuts depends on what is in place.
    """
    origins = np.full((end, 2), (-1, COMPUTED))
    for start, stop in used:
        for segment in planned[planned["class"] != COMPUTED]:
            first, last = max(segment["start"], start), min(segment["end"], stop)
            if first < last:
                origins[first:last, 0] = np.arange(first, last) - segment["delta"]
                origins[first:last, 1] = segment["class"]
    found: list[Segment] = []
    for at, (old, kind) in enumerate(origins.tolist()):
        if found:
            start, _, before, last_kind = found[-1]
            if kind == last_kind and old == (-1 if before < 0 else before + at - start):
                found[-1] = (start, at + 1, before, kind)
                continue
        found.append((at, at + 1, old, kind))
    return found


class Embedded:
    def __init__(self, model: Path, policy: kvtrie.ReusePolicy, *, gaps: bool) -> None:
        kind = transformers.AutoModelForCausalLM
        loaded = kind.from_pretrained(model, dtype=torch.float32).eval()
        self._generator = Generator(
            loaded, num_blocks=400, block_size=BLOCK, policy=policy, gate="unchecked"
        )
        self._gaps = gaps
        self._leases: list[_Lease] = []
        scheduler: Any = self._generator._scheduler
        scheduler._lease = self._lease

    def _lease(self, job: Job) -> Lease:
        self._leases.append(_Lease(self._generator._store, job.seq, job.policy, gaps=self._gaps))
        return self._leases[-1]

    def ask(self, prompt: Sequence[int], *, max_tokens: int) -> Served:
        done = self._generator.generate(
            prompt, max_new_tokens=max_tokens, ignore_eos=True, return_logits=True
        )
        (lease,) = self._leases
        self._leases.clear()
        assert done.logits is not None
        whole = [(0, lease.end_of_plan)]
        return Served(
            done.tokens,
            segments_of(lease.planned, whole, len(prompt)),
            done.logits.log_softmax(-1),
            *lease.kv,
        )


class _Lease(Lease):
    def __init__(
        self, store: Store, seq: kvtrie.TokenSequence, policy: kvtrie.ReusePolicy, *, gaps: bool
    ) -> None:
        prompt = seq[:]
        with store.index.plan(seq, policy, keep_last=1, pin=False) as plan:
            self.end_of_plan = len(prompt) if gaps else _first_gap(plan.segments)
            self.end_of_plan = min(self.end_of_plan, _unhashed(plan.segments, len(prompt)))
        # The plan does not see the tokens after it. It leaves its last token to be computed.
        if self.end_of_plan < len(prompt):
            seq.truncate(self.end_of_plan + 1)
        super().__init__(store, seq, policy)
        self.planned = self.plan.segments
        self.kv: tuple[torch.Tensor, torch.Tensor]
        self.append(prompt[len(seq) :])

    def close(self) -> None:
        ledger, pool = self._store.ledger, self._store.pool
        _, end = ledger.final_range(self)
        k, v = pool.gather(self.table, 0, end)
        assert v is not None
        self.kv = k, v
        # Tokens that do not fill a block are not kept.
        ledger.rollback(self, to=end // BLOCK * BLOCK)
        super().close()


def _first_gap(planned: NDArray[Any]) -> int:
    """The first position that must be computed; there is one, since the last token is computed."""
    return int(planned["start"][planned["class"] == COMPUTED].min())


def _unhashed(planned: NDArray[Any], end: int) -> int:
    """Where moved KV would begin in a block that the prompt does not fill.

    vLLM caches that block later, by a hash that cannot be made distinct before; so it gets none.
    """
    moved = planned["start"][planned["class"] == MOVED]
    first = int(moved.min()) if len(moved) else end
    return first if first >= end // BLOCK * BLOCK else end


class Watched:
    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._engine = engine
        # A prompt of which nothing is cached has no plan, and uses none of an older one.
        self._planned: NDArray[Any] = np.empty(0, [("class", np.uint8)])
        self._used: list[tuple[int, int]] = []
        # Of the latest request: its blocks, and the tokens of its prompt.
        self.table: list[int] = []
        self._end = 0
        self._kv: tuple[torch.Tensor, torch.Tensor]
        planner = engine.connector.planner
        plan, finish = planner.half.sources.plan, planner.finish

        def planning(*given: Any) -> kvtrie.ReusePlan | None:
            made: kvtrie.ReusePlan | None = plan(*given)
            if made is not None:
                self._planned = made.segments
            return made

        def finishing(request: Request, tables: Sequence[Sequence[int]]) -> None:
            live = planner.half.requests.live[request.request_id]
            self._used = [(one.start, one.end) for one in live.account.reused]
            self._kv = self.pool.gather(tables[planner._first], 0, request.num_tokens - 1)
            self.table, self._end = list(tables[planner._first]), request.num_prompt_tokens
            finish(request, tables)

        monkeypatch.setattr(planner.half.sources, "plan", planning)
        monkeypatch.setattr(planner, "finish", finishing)

    @property
    def pool(self) -> Any:
        copies: Any = self._engine.worker._copies
        return copies.pool

    def ask(self, prompt: Sequence[int], *, max_tokens: int, **given: Any) -> Served:
        answer = self._engine.ask(prompt, max_tokens=max_tokens, logprobs=-1, **given)
        rows = [[row[token] for token in range(len(row))] for row in answer.logprobs]
        return Served(
            answer.tokens,
            segments_of(self._planned, self._used, self._end),
            torch.tensor(rows),
            *self._kv,
        )
