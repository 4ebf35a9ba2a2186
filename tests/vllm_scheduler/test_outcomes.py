"""Outcomes of checked transfers, from vLLM's scheduler to Prometheus."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import prometheus_client
from tests.vllm.test_transfer import PROMPT, Side, forge, prefill, receive, start
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlKVConnectorStats
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvtrie.integrations.vllm.transfer import CheckedTransfer, KvtrieNixlConnector

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

__all__ = ["start"]

LABELS: dict[int, list[object]] = {0: ["m", "0"]}


class Exported:
    """What `/metrics` has, given what the scheduler reports."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        kinds: dict[Any, Any] = {
            one: self._made(one) for one in (prometheus_client.Counter, prometheus_client.Gauge)
        }
        kinds[prometheus_client.Histogram] = self._made(prometheus_client.Histogram)
        config: Any = type("Config", (), {"kv_transfer_config": None})
        self.metrics = KvtrieNixlConnector.build_prom_metrics(
            config, kinds, ["model_name", "engine"], LABELS
        )

    def _made(self, kind: Any) -> Any:
        return lambda *given, **named: kind(*given, registry=self.registry, **named)

    def watch(self, side: Side) -> None:
        update = side.scheduler.update_from_output

        def observing(*given: Any) -> Any:
            outputs = update(*given)
            for one in outputs.values():
                if one.scheduler_stats is not None and one.scheduler_stats.kv_connector_stats:
                    self.metrics.observe(one.scheduler_stats.kv_connector_stats, 0)
            return outputs

        side.scheduler.update_from_output = observing

    def transfers(self) -> dict[str, float]:
        return {
            one.labels["outcome"]: one.value
            for metric in self.registry.collect()
            for one in metric.samples
            if one.name == "vllm:kvtrie_transfers_total"
        }

    def value(self, name: str) -> float | None:
        labels = {"model_name": "m", "engine": "0"}
        found: float | None = self.registry.get_sample_value(name, labels)
        return found


def test_outcomes_are_exported(start: Callable[..., Side]) -> None:
    receiver, exported = start(), Exported()
    exported.watch(receiver)
    sender = start()
    assert receive(receiver, sender, PROMPT, prefill(sender, PROMPT)) == 1
    assert exported.transfers() == {"whole": 1}
    sender, other = start(), [*(2000 + at for at in range(48)), *PROMPT[48:]]
    receive(receiver, sender, other[:60] + other[70:], prefill(sender, other))
    assert exported.transfers() == {"whole": 1, "part": 1}
    for how, outcome in (("changed", "digest"), ("none", "no manifest"), ("cut", "malformed")):
        sender, prompt = start(), [3000 + len(how), *PROMPT]
        params = prefill(sender, prompt)
        forge(params, how)
        assert receive(receiver, sender, prompt, params) == len(prompt)
        assert exported.transfers()[outcome] == 1
    assert receiver.scheduler.connector.outcomes == exported.transfers()


def test_a_request_that_waits_for_room_counts_once(
    start: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM asks at every attempt, and each was counted and logged.
    sender, receiver, exported = start(), start(), Exported()
    exported.watch(receiver)
    params = prefill(sender, PROMPT)
    manager = receiver.scheduler.kv_cache_manager
    allocate, attempts = manager.allocate_slots, list[None]()

    def refusing(*given: Any, **named: Any) -> Any:
        attempts.append(None)
        return None if len(attempts) < 4 else allocate(*given, **named)

    monkeypatch.setattr(manager, "allocate_slots", refusing)
    assert receive(receiver, sender, PROMPT, params) == 1
    assert len(attempts) >= 4
    assert exported.transfers() == {"whole": 1}


def test_a_manifest_that_cannot_be_made_is_counted_at_the_sender(
    start: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, exported = start(), Exported()
    exported.watch(sender)
    monkeypatch.setattr(CheckedTransfer, "_manifest", lambda *_: 1 / 0)
    prefill(sender, PROMPT)
    assert exported.transfers() == {"not sent": 1}


def nixl(**counts: int) -> NixlKVConnectorStats:
    found = NixlKVConnectorStats()
    for name, count in counts.items():
        found.data[name] = [1] * count
    return found


def test_the_stats_of_nixl_go_on(start: Callable[..., Side]) -> None:
    """A worker's stats are NIXL's; the scheduler adds its own to them."""
    side, exported = start(), Exported()
    connector = side.scheduler.connector
    base = type(connector).__mro__[2]
    assert base.__name__ == "Bare"
    connector._count("whole")
    connector._count("whole")
    of_worker = KvtrieNixlConnector.build_kv_connector_stats(
        {"theirs": nixl(num_failed_transfers=3).to_dict()}
    )
    assert of_worker is not None
    of_worker = pickle.loads(pickle.dumps(of_worker))  # noqa: S301 - as vLLM sends it
    result = ModelRunnerOutput(
        req_ids=[],
        req_id_to_index={},
        kv_connector_output=KVConnectorOutput(kv_connector_stats=of_worker),
    )
    exported.watch(side)
    side.scheduler.update_from_output(SchedulerOutput.make_empty(), result)
    assert exported.transfers() == {"whole": 2}
    assert exported.value("vllm:nixl_num_failed_transfers_total") == 3


def test_an_interval_is_logged() -> None:
    first = KvtrieNixlConnector.build_kv_connector_stats(
        {"kvtrie_transfers": {"part": 1}, "theirs": nixl(num_failed_transfers=1).to_dict()}
    )
    second = KvtrieNixlConnector.build_kv_connector_stats({"kvtrie_transfers": {"part": 2}})
    assert first is not None
    assert second is not None
    both = first.aggregate(second).reduce()
    assert both["transfers/part"] == 3
    assert both["Num failed transfers"] == 1
    first.reset()
    assert first.is_empty()
