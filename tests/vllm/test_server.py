"""The OpenAI-compatible server, streaming, in another process."""

from __future__ import annotations

import json
import random
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from tests.tags.templates import QWEN3
from tests.vllm import chat
from tests.vllm.engine import BLOCK
from tests.vllm.inside import SCHEDULER, connector_config
from tests.vllm.server import serving
from tests.vllm.test_dead import REASONING
from tests.vllm.test_template import KEEPING
from transformers import AutoTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def address(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = connector_config(gate="unchecked", policy={"scope": "namespace"})
    more = ["--skip-tokenizer-init", "--scheduler-cls", SCHEDULER]
    more += ["--kv-transfer-config", json.dumps(settings)]
    with serving(llama, tmp_path_factory.mktemp("server"), *more) as base:
        yield base


def posted(address: str, path: str, body: dict[str, Any]) -> list[str]:
    request = urllib.request.Request(  # noqa: S310 - our own
        f"{address}/v1/{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:  # noqa: S310
        return [line.decode().strip() for line in response]


def stream(address: str, prompt: list[int], **more: Any) -> list[dict[str, Any]]:
    body = {
        "model": more.pop("model"),
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **more,
    }
    lines = posted(address, "completions", body)
    return [
        json.loads(line.removeprefix("data: "))
        for line in lines
        if line.startswith("data: ") and line != "data: [DONE]"
    ]


def said(events: list[dict[str, Any]]) -> list[int]:
    return [
        token
        for event in events
        for choice in event["choices"]
        for token in choice.get("token_ids") or ()
    ]


def metric(address: str, name: str) -> float:
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as response:  # noqa: S310
        text = response.read().decode()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(f"vllm:kvtrie_{name}_total")
    )


def test_an_edited_history_is_streamed(address: str, llama: Path) -> None:
    rng = random.Random(1)
    question, reasoning, answer, more = (
        rng.choices(range(3, 500), k=n) for n in (200, 160, 150, 40)
    )
    model = str(llama)
    stream(address, question + reasoning + answer, model=model)
    edited = question + answer + more
    first = said(stream(address, edited, model=model))
    assert len(first) == 8
    assert metric(address, "tokens_moved") == len(answer)
    plain = {"kv_transfer_params": {"kvtrie": "exact"}}
    exact = said(stream(address, edited, model=model, **plain))
    assert len(exact) == 8
    assert metric(address, "tokens_moved") == len(answer)
    assert said(stream(address, edited, model=model, **plain)) == exact
    # Blocks that have become exact are exact for all requests.
    assert said(stream(address, edited, model=model)) == exact


def usage(events: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = (event["usage"] for event in events if event.get("usage"))
    return dict(found)


def vllm_metric(address: str, name: str, label: str = "") -> float:
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as response:  # noqa: S310
        text = response.read().decode()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith((f"vllm:{name}{{", f"vllm:{name} ")) and label in line
    )


def test_usage_and_metrics_count_what_is_reused_after_gaps(address: str, llama: Path) -> None:
    rng = random.Random(2)
    parts = [rng.choices(range(3, 500), k=90) for _ in range(4)]
    gapped = [token for part in parts for token in (*rng.choices(range(3, 500), k=20), *part)]
    model = str(llama)
    stream(address, [token for part in parts for token in part], model=model)

    def measured() -> dict[str, float]:
        sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
        return {
            "moved": metric(address, "tokens_moved"),
            "hits": vllm_metric(address, "external_prefix_cache_hits_total"),
            "computed": vllm_metric(address, "request_prefill_kv_computed_tokens_sum"),
            **{
                source: vllm_metric(address, "prompt_tokens_by_source_total", f'"{source}"')
                for source in sources
            },
        }

    before = measured()
    told = usage(stream(address, gapped, model=model))
    after = measured()
    grown = {name: after[name] - before[name] for name in after}
    # What is in whole blocks of the first prompt.
    moved = sum(len(part) for part in parts) // 32 * 32
    assert told["prompt_tokens_details"]["cached_tokens"] == moved
    assert grown == {
        "moved": moved,
        "hits": moved,
        "external_kv_transfer": moved,
        "local_cache_hit": 0,
        "local_compute": len(gapped) - moved,
        "computed": len(gapped) - moved,
    }


@pytest.mark.long
def test_the_template_of_the_command_line_decides_what_is_dead(tmp_path: Path) -> None:
    """The engine is another process than the one that renders prompts and has the command line."""
    # The model directory's template would keep reasoning.
    model = chat.model(tmp_path / "model", template=KEEPING)
    (tmp_path / "served.jinja").write_text(QWEN3, encoding="utf-8")
    settings = json.dumps(connector_config(gate=None))
    more = ("--chat-template", str(tmp_path / "served.jinja"), "--kv-transfer-config", settings)
    with serving(model, tmp_path, *more) as address:
        t = chat.Chat(AutoTokenizer.from_pretrained(model))
        question, answer = chat.user("question"), "it " * 60
        text = t.tokenizer.apply_chat_template(
            [question], chat_template=QWEN3, tokenize=False, add_generation_prompt=True
        )
        turn = t.ids(text + REASONING + answer)
        # The model is made to end the reply.
        end: dict[str, Any] = {"allowed_token_ids": [t.end], "stop_token_ids": [t.end]}
        stream(address, turn, model=str(model), ignore_eos=False, **end)
        told = chat.reply("it") | {"reasoning_content": "answers " * 120}
        body = {
            "model": str(model),
            "messages": [question, told, chat.user("tool")],
            "max_tokens": 1,
            "temperature": 0,
        }
        answered = json.loads("".join(posted(address, "chat/completions", body)))
        cached = answered["usage"]["prompt_tokens_details"]["cached_tokens"]
        num_dead = metric(address, "blocks_dead")
        log = (tmp_path / "log").read_text(encoding="utf-8")
        assert "kvtrie: chat template: --chat-template" in log
        assert metric(address, "requests_other_template") == metric(address, "errors") == 0
    in_blocks = len(t.ids(REASONING)) // BLOCK
    assert in_blocks - 2 <= num_dead <= in_blocks
    # The next prompt lacks it: what is before it is found.
    assert 0 < cached <= len(t.ids(text))
