"""The dashboard's row of vLLM: its names are those that vLLM and the connector export.

A real Prometheus runs the queries over vLLM's own classes of metrics, which get what a scheduler
with the connector reports.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import prometheus_client
from tests.metrics.prometheus import queries, scraping
from tests.vllm.prompts import HISTORY, PARTS, gapped
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.vllm_scheduler.core import Core

MOVING = {"gate": "unchecked", "policy": {"scope": "namespace"}}


class Exporter:
    """Hands what the scheduler reports to vLLM's metrics, as its server does."""

    def __init__(self, vllm: Core) -> None:
        self._vllm = vllm
        self._logger = PrometheusStatLogger(vllm.core.vllm_config, [0])
        self._told: set[str] = set()
        update = vllm.scheduler.update_from_output

        def updated(*given: Any) -> Any:
            outputs = update(*given)
            for one in outputs.values():
                self._logger.record(one.scheduler_stats, None, engine_idx=0)
            return outputs

        vllm.scheduler.update_from_output = updated

    def finish(self) -> None:
        """What the front end counts of answers, from the figures that it is sent."""
        stats = IterationStats()
        for name, answer in self._vllm.answers.items():
            if answer.prefill is not None and name not in self._told:
                self._told.add(name)
                stats.prompt_token_stats.update_from_output(answer.prefill)
                stats.time_to_first_tokens_iter.append(0.1)
        self._logger.record(None, stats, engine_idx=0)


def test_every_name_is_exported(core: Callable[..., Core]) -> None:
    vllm = core(connector=MOVING, gaps=True, log_stats=True)
    exporter = Exporter(vllm)
    vllm.ask(HISTORY)
    exporter.finish()
    text = prometheus_client.generate_latest(prometheus_client.REGISTRY).decode()
    exported = set(re.findall(r"^vllm:(\w+)", text, re.MULTILINE))
    exprs = " ".join(expr for _, expr in queries({"vLLM"}))
    named = set(re.findall(r'"vllm\[:_\](\w+)"', exprs))
    assert len(named) > 25
    assert named <= exported, named - exported
    assert "vllm:" not in exprs


def test_every_query_of_vllm_returns_series(core: Callable[..., Core], tmp_path: Path) -> None:
    vllm = core(connector=MOVING, gaps=True, log_stats=True)
    exporter = Exporter(vllm)
    with scraping(prometheus_client.REGISTRY, tmp_path) as server:
        vllm.ask(HISTORY)
        vllm.ask(HISTORY)
        exporter.finish()
        server.wait()
        vllm.ask(gapped(PARTS))
        exporter.finish()
        server.wait()
        assert server.unanswered(queries({"vLLM"})) == []
        counts = vllm.counts
        for how in ("exact", "moved", "recomputed"):
            name = '__name__=~"vllm[:_]kvtrie_prompt_tokens_total"'
            expr = f'sum({{{name}, reuse="{how}"}})'
            wanted = counts[f"prompt_tokens/{how}/other"]
            assert server.query(expr) == ([({}, wanted)] if wanted else [])
        assert counts["prompt_tokens/moved/other"] > 0
