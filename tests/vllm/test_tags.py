"""Tokens are tagged by the model's chat template, in a real engine, and counted by kind."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import prometheus_client
import pytest
from tests.vllm import chat
from vllm.engine.arg_utils import EngineArgs
from vllm.tokenizers.registry import cached_tokenizer_from_config

import kvtrie
from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations.vllm import _tags
from kvtrie.integrations.vllm._account import Reused
from kvtrie.integrations.vllm._settings import Settings
from kvtrie.integrations.vllm._stats import Counts, PromMetrics

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.vllm.engine import Engine


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat.model(tmp_path_factory.mktemp("models") / "chat")


def config(model: Path, **options: Any) -> Any:
    return EngineArgs(model=str(model), dtype="float32", **options).create_engine_config()


def tagger(model: Path, options: dict[str, Any], **settings: Any) -> Any:
    return _tags.tagger_of(Settings.read(settings), config(model, **options))


def test_auto_reads_the_chat_template(chatting: Path) -> None:
    assert tagger(chatting, {}).format.name == "qwen3"
    assert tagger(chatting, {}).format.boundary == "user"
    preserved = tagger(chatting, {}, template_arguments={"preserve": True})
    assert preserved.format.boundary == "never"


def test_auto_without_a_tokenizer_tags_nothing(chatting: Path) -> None:
    assert tagger(chatting, {"skip_tokenizer_init": True}) is None
    assert tagger(chatting, {}, chat_format=None) is None


def test_auto_asks_the_reasoning_parser_where_the_template_is_not_understood(
    tmp_path: Path,
) -> None:
    model = chat.model(tmp_path / "model", template="{{ messages[0].content }}")
    assert tagger(model, {}) is None
    found = tagger(model, {"reasoning_parser": "deepseek_r1"})
    tokenizer = cached_tokenizer_from_config(config(model).model_config)
    ids = tokenizer.encode("a<think>b</think>c", add_special_tokens=False)
    assert [span.kind for span in found.spans(ids)] == ["answer", "reasoning", "answer"]
    assert found.format.boundary == "never"


def test_where_messages_begin_is_known_of_templates_that_no_preset_reads(
    tmp_path: Path, chatting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved runs supplied the last message of each model without a preset."""
    lines: list[str] = []
    monkeypatch.setattr(_tags._LOG, "warning", lambda line, *_, **__: lines.append(line))

    def openings(model: Path, options: dict[str, Any] | None = None, **settings: Any) -> Any:
        given, made = Settings.read(settings), config(model, **(options or {}))
        found = _tags.tagger_of(given, made)
        for moves in (False, True):
            lines.clear()
            openings = _tags.openings_of(given, made, found, moves=moves)
            is_known = openings is not None or bool(found and found.format.starts)
            said = any("moved runs may supply the last one" in line for line in lines)
            assert said == (moves and not is_known)
        return openings

    plain = chat.model(
        tmp_path / "plain",
        template="{% for m in messages %}<|im_end|>{{ m.role }}: {{ m.content }}{% endfor %}",
    )
    tokenizer = cached_tokenizer_from_config(config(plain).model_config)
    begins = tokenizer.encode("<|im_end|>user", add_special_tokens=False)
    (want,) = openings(plain).ids
    assert len(want) > 1
    assert list(want) == begins[: len(want)]
    # The parser tells reasoning apart, and no messages.
    assert openings(plain, {"reasoning_parser": "deepseek_r1"}).ids == (want,)
    silent = chat.model(tmp_path / "silent", template="{{ messages[0].content }}")
    assert openings(silent) is None
    assert openings(chatting) is None
    assert openings(plain, {"skip_tokenizer_init": True}) is None
    assert openings(plain, chat_format={"user": 1, "assistant": 2}) is None


def test_a_named_format_is_taken(chatting: Path) -> None:
    assert tagger(chatting, {}, chat_format="qwen3").format.name == "qwen3"
    given = {"user": 1, "assistant": 2, "reasoning": [7, 8]}
    found = tagger(chatting, {"skip_tokenizer_init": True}, chat_format=given)
    assert [span.kind for span in found.spans([1, 5, 2, 7, 5, 8, 5])] == [
        "user",
        "reasoning",
        "answer",
    ]


@pytest.mark.parametrize(
    ("settings", "options", "why"),
    [
        ({"chat_format": "qwen9"}, {}, "qwen9"),
        ({"chat_format": "glm"}, {}, "has no token"),
        ({"chat_format": "qwen3"}, {"skip_tokenizer_init": True}, "has no tokenizer"),
        ({"chat_format": {"user": 1}}, {}, "no argument says where the assistant speaks"),
        ({"chat_format": {"users": 1}}, {}, "users"),
        (
            {"chat_format": None, "policy": {"forbid_kinds": ["reasoning"]}},
            {},
            "policy forbids reasoning",
        ),
        ({"chat_format": 3}, {}, "chat_format must be"),
        ({"template_arguments": 3}, {}, "template_arguments must be"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_format_that_does_not_fit_is_refused(
    chatting: Path, settings: dict[str, Any], options: dict[str, Any], why: str
) -> None:
    with pytest.raises(SettingsError, match=why):
        tagger(chatting, options, **settings)


def test_count_by_kind_takes_the_inner_span() -> None:
    spans = [
        kvtrie.Span(4, 6, "tool_call"),
        kvtrie.Span(2, 8, "reasoning"),
        kvtrie.Span(8, 30, "answer"),
    ]
    ranges = [(0, 3, False), (3, 3, True), (5, 9, True)]
    reused = [Reused(*one, is_copied=False) for one in ranges]
    assert _tags.count_by_kind(10, reused, _tags.kinds_of(10, spans)) == Counter(
        {
            ("exact", "other"): 2,
            ("exact", "reasoning"): 1,
            ("recomputed", "reasoning"): 1,
            ("recomputed", "tool_call"): 1,
            ("moved", "tool_call"): 1,
            ("moved", "reasoning"): 2,
            ("moved", "answer"): 1,
            ("recomputed", "answer"): 1,
        }
    )
    assert not _tags.count_by_kind(0, [], _tags.kinds_of(0, []))


def prompt_counts(engine: Engine) -> dict[str, int]:
    return {
        name.removeprefix("prompt_tokens/"): count
        for name, count in engine.counts.items()
        if name.startswith("prompt_tokens/")
    }


def test_prompt_tokens_are_counted_by_reuse_and_kind(
    engine: Callable[..., Engine], chatting: Path
) -> None:
    e = engine(
        chatting,
        connector={"gate": "unchecked", "policy": {"scope": "namespace"}},
        skip_tokenizer_init=False,
    )
    talk = chat.Chat(e.llm.get_tokenizer())
    question, more = chat.user("question"), chat.user("tool")
    first = talk.prompt([question])
    e.ask(first, max_tokens=1)
    counts = prompt_counts(e)
    assert sum(counts.values()) == len(first)
    assert set(counts) == {"recomputed/user", "recomputed/other"}
    # The turn as it was generated, with reasoning; then the next one, from which it is dropped.
    e.ask(
        talk.prompt(
            [question], reply="<think>\n" + "answers " * 120 + "\n</think>\n\n" + "it " * 60
        )
    )
    before = prompt_counts(e)
    second = talk.prompt([question, chat.reply("it"), more])
    done = e.ask(second, max_tokens=1)
    counts = {name: n - before.get(name, 0) for name, n in prompt_counts(e).items()}
    counts = {name: n for name, n in counts.items() if n}
    assert sum(counts.values()) == len(second)
    assert counts["moved/answer"] > 50
    assert counts["exact/user"] > 50
    assert counts["recomputed/user"] > 50
    assert "moved/reasoning" not in counts
    reused = sum(n for name, n in counts.items() if not name.startswith("recomputed"))
    assert reused == done.num_cached


def test_forbidden_kinds_are_not_moved(engine: Callable[..., Engine], chatting: Path) -> None:
    settings = {"gate": "unchecked", "policy": {"scope": "namespace", "forbid_kinds": ["answer"]}}
    e = engine(chatting, connector=settings, skip_tokenizer_init=False)
    talk = chat.Chat(e.llm.get_tokenizer())
    question = chat.user("question")
    # Two answers, of which the first has ended.
    text = "<think>\n" + "answers " * 120 + "\n</think>\n\n" + "it " * 60 + "<|im_end|>\n"
    e.ask(talk.prompt([question], reply=text), max_tokens=1)
    prompt = talk.prompt([question, chat.reply("it"), chat.user("tool")])
    e.ask(prompt, max_tokens=1)
    counts = prompt_counts(e)
    assert "moved/answer" not in counts
    assert counts["exact/user"] > 50


def test_metrics_are_exported_to_prometheus() -> None:
    registry = prometheus_client.CollectorRegistry()

    def counter(name: str, documentation: str, labelnames: list[str]) -> Any:
        return prometheus_client.Counter(name, documentation, labelnames, registry=registry)

    kinds: dict[Any, Any] = {
        prometheus_client.Counter: counter,
        prometheus_client.Gauge: prometheus_client.Gauge,
        prometheus_client.Histogram: prometheus_client.Histogram,
    }
    values: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    holder: Any = type("Config", (), {"kv_transfer_config": None})
    metrics = PromMetrics(holder, kinds, ["model_name", "engine"], values)
    counts = Counts()
    counts.add("tokens_moved", 5)
    counts.add_prompt("moved", "answer", 3)
    counts.add_computed("evicted", "answer", 4)
    counts.add_computed("evicted", "user", 2)
    taken = counts.take()
    assert taken is not None
    # The log has one number per reason.
    assert taken.reduce()["computed_tokens/evicted"] == 6
    metrics.observe(taken.to_dict(), 1)
    metrics.observe({"unknown": 1}, 0)
    said = {"model_name": "m", "engine": "1"}
    assert registry.get_sample_value("vllm:kvtrie_tokens_moved_total", said) == 5
    moved = said | {"reuse": "moved", "kind": "answer"}
    assert registry.get_sample_value("vllm:kvtrie_prompt_tokens_total", moved) == 3
    evicted = said | {"reason": "evicted", "kind": "user"}
    assert registry.get_sample_value("vllm:kvtrie_computed_tokens_total", evicted) == 2
