"""Spans of a generator's requests, next to what the requests say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import kvtrie
from kvtrie.metrics import Collector
from kvtrie.metrics.tracing import Tracing

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from kvtrie.engines.transformers import Generator

    Make = Callable[..., Generator]
    Ids = Callable[..., np.ndarray]

OPTIONS: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True}
WIDE = kvtrie.ReusePolicy(scope="namespace", min_run=16)


class Exported:
    """A provider whose spans are kept."""

    def __init__(self) -> None:
        self.provider = TracerProvider()
        self._memory = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._memory))

    def take(self) -> list[ReadableSpan]:
        found = list(self._memory.get_finished_spans())
        self._memory.clear()
        return found


@pytest.fixture
def exported() -> Exported:
    return Exported()


def of_request(spans: list[ReadableSpan]) -> dict[str, Any]:
    (root,) = [span for span in spans if span.name == "kvtrie.request"]
    return dict(root.attributes or {})


def test_a_request_is_one_span_with_its_phases(make: Make, ids: Ids, exported: Exported) -> None:
    generator = make(prefill_chunk=12)
    Tracing(generator, exported.provider)
    with exported.provider.get_tracer("server").start_as_current_span("server"):
        generator.generate(ids(30), **OPTIONS)
    spans = exported.take()
    names = [span.name for span in spans]
    # Three chunks; inserts of what the first three passes filled, and of the end.
    assert [name for name in names if name != "kvtrie.insert"] == [
        "kvtrie.plan",
        "kvtrie.copy",
        *["kvtrie.compute"] * 3,
        "kvtrie.request",
        "server",
    ]
    assert names.count("kvtrie.insert") == 4
    root: Any = spans[names.index("kvtrie.request")]
    server: Any = spans[-1]
    assert root.parent.span_id == server.context.span_id
    phases: list[Any] = spans[:-2]
    for span in phases:
        assert span.parent.span_id == root.context.span_id
        assert root.start_time <= span.start_time <= span.end_time <= root.end_time
    computed = [
        span.attributes["kvtrie.tokens.computed"]
        for span in phases
        if span.name == "kvtrie.compute"
    ]
    assert computed == [12, 12, 6]
    assert [event.name for event in root.events] == ["kvtrie.first_token"]


def test_attributes_are_those_of_the_request(make: Make, ids: Ids, exported: Exported) -> None:
    generator = make(gate="unchecked", policy=WIDE)
    Tracing(generator, exported.provider)
    prompt = ids(60).tolist()
    for asked, reason in (
        (prompt, "first_seen"),
        ([*prompt[:20], 7, *prompt[28:], 8], "diverged"),
        ([*prompt, 5, 6], "new"),
        (prompt, "last_token"),
    ):
        done = generator.generate(asked, **OPTIONS)
        found = of_request(exported.take())
        assert found["kvtrie.tokens.prompt"] == len(asked)
        assert found["kvtrie.tokens.exact"] == done.usage.exact
        assert found["kvtrie.tokens.approximate"] == done.usage.moved
        assert found["kvtrie.tokens.computed"] == done.usage.computed
        assert found["kvtrie.tokens.generated"] == len(done.tokens)
        assert found["kvtrie.finish_reason"] == done.finish_reason
        assert found["kvtrie.miss.reason"] == reason
        by_reason = {
            name: count
            for name, count in found.items()
            if name.startswith("kvtrie.miss.")
            and name
            not in {
                "kvtrie.miss.reason",
                "kvtrie.miss.position",
            }
        }
        assert sum(by_reason.values()) == done.usage.computed
        assert f"kvtrie.miss.{reason}" in by_reason


def test_no_text_token_session_or_salt_is_exported(
    make: Make, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = make(num_blocks=20, gate="unchecked", policy=kvtrie.ReusePolicy())
    Tracing(generator, exported.provider)
    tokens = [51, 52, 53, 54, 55, 56]
    prompt = tokens * 5
    generator.generate(prompt, session="chat-of-ann", salt="tenant-a", **OPTIONS)

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError(f"the prompt was {prompt} of tenant-a")

    monkeypatch.setattr(generator._scheduler._runner, "run", failing)
    with pytest.raises(RuntimeError):
        generator.generate([9, *prompt], session="chat-of-ann", salt="tenant-a", **OPTIONS)
    spans = exported.take()
    failed = [span for span in spans if span.status.status_code is StatusCode.ERROR]
    assert {span.name for span in failed} == {"kvtrie.compute", "kvtrie.request"}
    for span in failed:
        assert (span.attributes or {})["error.type"] == "RuntimeError"
        assert span.status.description is None
    for span in spans:
        text = span.to_json()
        assert "ann" not in text
        assert "tenant" not in text
        for value in [*(span.attributes or {}).values()]:
            assert isinstance(value, (bool, int, str))
        assert str(tokens)[1:-1] not in " ".join(text.split())
        assert json.loads(text)["events"] == [] or {
            event["name"] for event in json.loads(text)["events"]
        } <= {"kvtrie.first_token", "kvtrie.preempted"}


def test_preempted_requests_have_one_span(make: Make, ids: Ids, exported: Exported) -> None:
    generator = make(num_blocks=9, prefill_chunk=8)
    Tracing(generator, exported.provider)
    requests = [generator.submit(ids(13, seed=seed), **OPTIONS) for seed in range(3)]
    while any(request.status != "finished" for request in requests):
        generator.step()
    spans = exported.take()
    roots = [span for span in spans if span.name == "kvtrie.request"]
    assert len(roots) == 3
    events = [event.name for span in roots for event in span.events]
    preempted = sum(request.num_preemptions for request in requests)
    assert events.count("kvtrie.preempted") == preempted > 0
    plans = [span for span in spans if span.name == "kvtrie.plan"]
    assert len(plans) >= 3 + preempted


def test_without_a_provider_nothing_is_computed(
    make: Make, ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = make()
    tracing = Tracing(generator, trace.NoOpTracerProvider())

    def unwanted(*_: object) -> None:
        raise AssertionError("a prompt was looked at")

    monkeypatch.setattr(tracing._reader, "look", unwanted)
    assert generator.generate(ids(9), **OPTIONS).finish_reason == "length"
    assert tracing._traced == {}


def test_metrics_and_spans_together_change_no_answer(
    make: Make, ids: Ids, exported: Exported
) -> None:
    plain = make().generate(ids(40), **OPTIONS)
    generator = make()
    collector = Collector(generator=generator)
    tracing = Tracing(generator, exported.provider)
    assert generator.generate(ids(40), **OPTIONS).tokens == plain.tokens
    assert len(exported.take()) > 4
    generator.unwatch(tracing)
    generator.generate(ids(40), **OPTIONS)
    assert exported.take() == []
    collector.close()
    assert generator._watchers == []
