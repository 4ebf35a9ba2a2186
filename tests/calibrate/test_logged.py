"""A gate from recorded traffic: a log with token ids is calibrated on, a digest log is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

import kvtrie
from kvtrie import gates
from kvtrie.calibrate import logged, measure, recall, shipped
from kvtrie.calibrate._steps import RECORDED, Renderer
from kvtrie.cli.app import app
from kvtrie.record import Finished, Recorder, RecordOptions

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

    from kvtrie.calibrate._steps import Step

pytestmark = pytest.mark.usefixtures("one_thread")


def steps(seed: int) -> list[Step]:
    tokenizer: Any = AutoTokenizer.from_pretrained(shipped.model_path("gqa"))
    return Renderer(tokenizer).steps(recall.conversation(seed, 4), RECORDED)


def record(path: Path, talks: dict[str | None, list[Step]], **options: Any) -> None:
    options = {"content": "tokens", **options}
    recorder = Recorder(RecordOptions(path=str(path), **options), block_size=16)
    requests = [(name, at, step) for name, found in talks.items() for at, step in enumerate(found)]
    # They end in another order than they arrived.
    for number, (name, at, step) in enumerate(reversed(requests)):
        spans = []
        if step.moved_end is not None:
            spans.append(kvtrie.Span(0, step.moved_end, "system"))
            spans.append(kvtrie.Span(step.moved_end, len(step.prompt), "user"))
        recorder.put(
            Finished(
                tokens=np.array(step.prompt + step.reply, np.uint32),
                num_prompt=len(step.prompt),
                request_id=f"request-{number}",
                session=name,
                arrived=1000.0 + at,
                took=900.0,
                ended="stopped",
                spans=spans,
            )
        )
    recorder.close()
    assert recorder.counts.written == len(requests)


def run(*args: Any) -> Result:
    return CliRunner().invoke(app, ["calibrate", "gqa", "--policies", "rotated", *map(str, args)])


def test_sessions_are_the_prompts_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "log"
    talks: dict[str | None, list[Step]] = {"a": steps(8), "b": steps(9), None: steps(10)}
    talks["alone"] = steps(11)[:1]
    record(path, talks)
    found = logged.sessions(path)
    assert len(found) == 2
    for one, name in zip(found, ("b", "a"), strict=True):
        assert [step.prompt for step in one.steps] == [step.prompt for step in talks[name]]
        assert [step.reply for step in one.steps] == [step.reply for step in talks[name]]
        assert [step.moved_end for step in one.steps] == [step.moved_end for step in talks[name]]
        assert all(step.is_measured and not step.is_scored for step in one.steps)


def test_a_gate_from_a_log_is_that_of_the_conversations(tmp_path: Path) -> None:
    path, out = tmp_path / "kvtrie.log", tmp_path / "gate.json"
    record(path, {"a": steps(8)})
    messages = [
        {name: value for name, value in message.items() if name != "scored"}
        for message in recall.conversation(8, 4)
    ]
    from kvtrie.demo import Conversation  # noqa: PLC0415 - next to what it is compared with

    expected = measure.calibrate(
        shipped.model_path("gqa"),
        policies=["rotated"],
        conversations=[Conversation(tuple(messages))],
    )
    result = run("--conversations", path, "--out", out)
    assert result.exit_code == 0, result.stderr
    assert "conversations: 1 recorded" in result.stdout
    gate = gates.read(out)
    assert gate.measured == expected.measured
    assert sum(one.floor.questions for one in gate.measured[0].kinds) > 0


def test_a_log_of_digests_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path, out = tmp_path / "log", tmp_path / "gate.json"
    record(path, {"a": steps(8)}, content="digests")
    result = run("--conversations", path, "--out", out)
    assert result.exit_code == 2
    why = "the log has digests, and calibration needs token ids"
    assert result.stderr == f'kvtrie: {path}: {why}: record with "content": "tokens"\n'
    assert list(tmp_path.iterdir()) == [path]


def test_logs_that_cannot_be_measured(tmp_path: Path) -> None:
    path = tmp_path / "log"
    record(path, {None: steps(8), "alone": steps(9)[:1]})
    result = run("--conversations", path)
    assert result.exit_code == 2
    assert "no session has two requests" in result.stderr
    path.write_bytes(path.read_bytes().replace(b'{"kvtrie_log":1', b'{"kvtrie_log":9', 1))
    result = run("--conversations", path)
    assert result.exit_code == 2
    assert f"{path}, line 1: the log is of version 9" in result.stderr
    path = tmp_path / "another"
    record(path, {"a": steps(8)})
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"broken\n", *lines[2:]]))
    result = run("--conversations", path)
    assert result.exit_code == 2
    assert f"{path}, line 3: the line is not JSON" in result.stderr


def test_a_log_of_another_model(tmp_path: Path) -> None:
    path = tmp_path / "log"
    talk = steps(8)
    talk[1].prompt[3] = 151_643
    record(path, {"a": talk})
    with pytest.raises(measure.CalibrationError, match="token id 151643, and the model's vocab"):
        measure.calibrate(
            shipped.model_path("gqa"), policies=["rotated"], conversations=logged.sessions(path)
        )
