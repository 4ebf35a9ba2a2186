"""The client whose histories are edited: what it sends, and what it says of the engine."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tests.examples.test_recording_proxy import Engine

from examples import edited_traffic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.examples.test_recording_proxy import EngineHandler


@pytest.fixture
def engine() -> Iterator[Engine]:
    running = Engine()
    threading.Thread(target=running.serve_forever, args=(0.05,), daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()


def answer(asked: EngineHandler) -> None:
    body: dict[str, Any] = {"data": [{"id": "served"}]}
    if asked.path.endswith("completions"):
        message = {"role": "assistant", "content": "It was opened in 1851."}
        usage = {"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": 300}}
        body = {"choices": [{"message": message}], "usage": usage}
    asked.say(json.dumps(body).encode())


def test_only_the_first_line_of_a_conversation_changes(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.reply = answer
    url = f"http://127.0.0.1:{engine.server_port}"
    edited_traffic.main([url, "--sessions", "3", "--first", "7", "--at-once", "1"])
    bodies = [json.loads(body) for _, path, _, body in engine.asked if "chat" in path]
    assert len(bodies) == 6
    texts = set()
    for number, (first, second) in enumerate(zip(bodies[::2], bodies[1::2], strict=True), start=7):
        for body in (first, second):
            assert body["model"] == "served"
            assert body["temperature"] == 0
            assert body["kv_transfer_params"] == {"session": f"chat-{number}"}
            assert body["messages"][0]["content"].endswith(edited_traffic.RULE)
        assert first["messages"][0] != second["messages"][0]
        reply = {"role": "assistant", "content": "It was opened in 1851."}
        assert second["messages"][1:-1] == [*first["messages"][1:], reply]
        texts.add(first["messages"][1]["content"])
    assert len(texts) == 3
    assert capsys.readouterr().out.splitlines() == [
        "first prompts: 3, 900 of 3,000 tokens cached",
        "second prompts: 3, 900 of 3,000 tokens cached",
    ]


def test_an_error_of_the_engine_is_quoted(engine: Engine) -> None:
    engine.reply = lambda asked: asked.say(b"no such model", status=404)
    with pytest.raises(RuntimeError, match="/v1/models: status 404: no such model"):
        edited_traffic.main([f"http://127.0.0.1:{engine.server_port}"])
