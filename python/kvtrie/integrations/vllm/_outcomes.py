"""Outcomes of checked transfers in vLLM's stats, next to those of the connector that transfers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvtrie.integrations.vllm._vllm import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT

NAME: Final = "transfers"
OUTCOMES: Final = "kvtrie_transfers"
THEIRS: Final = "theirs"
_TEXT: Final = "Requests with KV of another engine, by what was loaded or why nothing was."


@dataclass
class TransferStats(KVConnectorStats):
    """Outcomes of one interval, and the stats of the connector below; they can be added."""

    theirs: KVConnectorStats | None = None
    outcomes: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        theirs = None if self.theirs is None else self.theirs.to_dict()
        return {OUTCOMES: self.outcomes, THEIRS: theirs}

    def reset(self) -> None:
        self.outcomes = {}
        if self.theirs is not None:
            self.theirs.reset()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        theirs = other
        if isinstance(other, TransferStats):
            for name, count in other.outcomes.items():
                self.outcomes[name] = self.outcomes.get(name, 0) + count
            theirs = other.theirs
        if self.theirs is None:
            self.theirs = theirs
        elif theirs is not None:
            self.theirs = self.theirs.aggregate(theirs)
        return self

    def reduce(self) -> dict[str, int | float]:
        theirs = {} if self.theirs is None or self.theirs.is_empty() else self.theirs.reduce()
        return {**theirs, **{f"{NAME}/{name}": count for name, count in self.outcomes.items()}}

    def is_empty(self) -> bool:
        return not self.outcomes and (self.theirs is None or self.theirs.is_empty())


class TransferPromMetrics(KVConnectorPromMetrics):
    """``vllm:kvtrie_transfers`` by ``outcome``, and the metrics of the connector below."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        theirs: KVConnectorPromMetrics | None,
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._theirs = theirs
        self._outcomes = self._counter_cls(
            f"vllm:kvtrie_{NAME}", _TEXT, labelnames=[*labelnames, "outcome"]
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for outcome, count in transfer_stats_data.get(OUTCOMES, {}).items():
            self._outcomes.labels(*values, outcome).inc(count)
        theirs = transfer_stats_data.get(THEIRS)
        if self._theirs is not None and theirs:
            self._theirs.observe(theirs, engine_idx)
