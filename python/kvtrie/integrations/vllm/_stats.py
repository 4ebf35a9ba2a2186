"""The connector's counters in vLLM's stats: log line and Prometheus metrics."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtrie.integrations.vllm._vllm import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    create_metric_per_engine,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT

NAMES: Final = {
    "tokens_exact": "Prompt tokens copied that are exact KV.",
    "tokens_moved": "Prompt tokens copied that are approximate KV: another context or position.",
    "requests_unsupported": "Requests with inputs that are not followed; vLLM served them alone.",
    "requests_refused": "Requests whose kv_transfer_params were refused; vLLM served them alone.",
    "requests_uncalibrated": "Requests with a LoRA adapter, which the gate does not cover.",
    "requests_without_room": "Requests admitted without reuse: no room next to pinned sources.",
    "tokens_without_window": "Prompt tokens not copied: another group of blocks lacks KV for them.",
    "plans_not_cleared": "Plans after a kind of edit that the gate does not clear, made exact.",
    "plans_stale": "Plans given up because vLLM kept reusing their sources.",
    "blocks_dead": "Blocks of reasoning of finished turns that vLLM reuses first.",
    "blocks_kept": "Blocks that exact mode kept in the cache for another pass of vLLM's queue.",
    "copies_failed": "Blocks whose copy failed and that vLLM computed.",
    "requests_other_template": "Requests whose prompt the served chat template did not render.",
    "requests_untagged": "Requests with too many delimiters of the chat format to be tagged.",
    "tokens_would_be_exact": "Shadow mode: prompt tokens that would be exact KV.",
    "tokens_would_move": "Shadow mode: prompt tokens that would be approximate KV.",
    "tokens_would_follow_gaps": "Shadow mode: those of both that need KvtrieScheduler.",
    "tokens_would_compute": "Shadow mode: prompt tokens that would be computed.",
    "plans_would_not_clear": "Shadow mode: plans of kinds that the gate does not clear.",
    "records_written": "Requests written to the log of the setting record.",
    "records_dropped": "Requests that were to be written to it, and were not.",
    "store_requests": "Requests looked up in the store.",
    "store_found": "Requests of which the store had something.",
    "store_tokens_exact": "Prompt tokens copied from the store that are exact KV.",
    "store_tokens_moved": "Prompt tokens copied from the store that are approximate KV.",
    "store_late": "Requests for which the store took too long.",
    "store_busy": "Requests not looked up in the store, because too many waited for it.",
    "errors": "Errors after which a request continued without kvtrie.",
}
_PROMPT: Final = "prompt_tokens"
_COMPUTED: Final = "computed_tokens"
_STORE: Final = "store"
LABELLED: Final = {
    _PROMPT: ("Prompt tokens by source of their KV and by kind.", ("reuse", "kind")),
    _COMPUTED: ("Prompt tokens computed, by the reason and by kind.", ("reason", "kind")),
    _STORE: ("Runs, ranges, bytes and tokens of the store, by what happened.", ("event",)),
}
"""Counters with labels of their own: text, and labels."""


class Counts:
    """Counters since the last `take`."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, int] = defaultdict(int)

    def add(self, name: str, count: int = 1) -> None:
        self._counts[name] += count

    def add_prompt(self, reuse: str, kind: str, count: int) -> None:
        self.add(f"{_PROMPT}/{reuse}/{kind}", count)

    def add_computed(self, reason: str, kind: str, count: int) -> None:
        self.add(f"{_COMPUTED}/{reason}/{kind}", count)

    def take(self) -> Stats | None:
        """The counters since the last call; None if nothing was counted."""
        if not self._counts:
            return None
        counts, self._counts = self._counts, defaultdict(int)
        return Stats(data=dict(counts))


@dataclass
class Stats(KVConnectorStats):
    """Counters of one interval; they can be added."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log: reasons are not split by kind."""
        found: dict[str, int | float] = {}
        for name, count in self.data.items():
            short = name.rpartition("/")[0] if name.startswith(_COMPUTED) else name
            found[short] = found.get(short, 0) + count
        return found

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    """The same counters for Prometheus, ``vllm:kvtrie_<name>``.

    Tokens of prompts are counted with the labels ``reuse`` (exact, moved, recomputed; exact
    includes vLLM's own hits) and ``kind``; computed ones also with ``reason`` and ``kind``.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(f"vllm:kvtrie_{name}", text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, text in NAMES.items()
        }
        self._labelled = {
            name: self._counter_cls(f"vllm:kvtrie_{name}", text, labelnames=[*labelnames, *labels])
            for name, (text, labels) in LABELLED.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            what, _, labels = name.partition("/")
            if what in self._labelled and labels:
                values = self.per_engine_labelvalues[engine_idx]
                self._labelled[what].labels(*values, *labels.split("/", 1)).inc(count)
            elif name in self._counters:
                self._counters[name][engine_idx].inc(count)
