"""The OpenAI-compatible server, streaming, in another process."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm.inside import SCHEDULER, connector_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def address(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(llama)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init"]
    command += ["--dtype", "float32", "--block-size", "32", "--enforce-eager"]
    command += ["--max-model-len", "4096", "--num-gpu-blocks-override", "200"]
    command += [
        "--kv-transfer-config",
        json.dumps(connector_config(gate="unchecked", policy={"scope": "namespace"})),
    ]
    command += ["--scheduler-cls", SCHEDULER, "--enable-prompt-tokens-details"]
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            base = f"http://127.0.0.1:{port}"
            # Minutes on a busy machine; the limit of the suite ends what hangs.
            for _ in range(780):
                if process.poll() is not None:
                    pytest.fail(f"the server ended:\n{log.read_text()[-3000:]}")
                try:
                    urllib.request.urlopen(f"{base}/health", timeout=2)  # noqa: S310 - our own
                    break
                except OSError:
                    time.sleep(1)
            else:
                pytest.fail(f"the server does not answer:\n{log.read_text()[-3000:]}")
            yield base
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


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
    request = urllib.request.Request(  # noqa: S310 - our own
        f"{address}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:  # noqa: S310
        lines = [line.decode().strip() for line in response]
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
