"""What the connector records of requests, without their tokens, and that the engine never waits."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from tests.record.kit import numbers_in
from tests.vllm.prompts import EDITED
from tests.vllm_scheduler.test_exact import ANSWER, ASSISTANT, CLOSED, FORMAT, HEAD, QUESTION
from tests.vllm_scheduler.test_exact import end as end_turn
from tests.vllm_scheduler.test_reasons import TURN
from tests.vllm_scheduler.test_traffic import SMALL, Run
from tests.vllm_scheduler.worker import continuation

from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations.vllm import _settings
from kvtrie.record import Log

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.vllm_scheduler.core import Core

    from kvtrie.record import Recorded

# No other number of a log is as large.
FIRST = 3_000_000_000


def recorded(vllm: Core, path: Path) -> list[Recorded]:
    assert vllm.connector.planner.half.recording._recorder.flush()
    return list(Log(path))


def moving(path: Path, **record: Any) -> dict[str, Any]:
    how = {"path": str(path), **record}
    return {"gate": "unchecked", "policy": {"scope": "namespace"}, "record": how}


def test_a_log_of_an_engine_has_no_token_id(core: Callable[..., Core], tmp_path: Path) -> None:
    path = tmp_path / "log"
    vllm = core(connector=moving(path))
    turn, edited = ([FIRST + one for one in tokens] for tokens in (TURN, EDITED))
    said = vllm.ask(turn, salt="salt-of-somebody") + vllm.ask(edited, salt="salt-of-somebody")
    first, second = recorded(vllm, path)
    data = path.read_bytes()
    assert not numbers_in(data) & {*turn, *edited}
    for secret in (b"salt", b"somebody", b"request-1"):
        assert secret not in data
    assert b'"tokens"' not in data
    assert (first.num_prompt, first.num_tokens) == (len(turn), len(turn) + 8)
    assert (second.num_prompt, second.num_tokens) == (len(edited), len(edited) + 8)
    assert len(said) == 16
    # What moved is visible all the same.
    place = dict(zip(first.windows.tolist(), first.starts.tolist(), strict=True))
    shifts = [
        place[what] - start
        for start, what in zip(second.starts.tolist(), second.windows.tolist(), strict=True)
        if what in place
    ]
    assert set(shifts) == {0, 160}
    assert (first.blocks[:12] == second.blocks[:12]).all()


def test_token_ids_need_a_second_switch(core: Callable[..., Core], tmp_path: Path) -> None:
    path = tmp_path / "log"
    vllm = core(connector=moving(path, content="tokens"))
    said = vllm.ask(TURN)
    (one,) = recorded(vllm, path)
    assert one.tokens is not None
    assert one.tokens.tolist() == TURN + said


def test_a_record_says_what_the_metrics_say(core: Callable[..., Core], tmp_path: Path) -> None:
    path = tmp_path / "log"
    vllm = core(connector=moving(path), in_flight=True)
    vllm.ask(TURN)
    vllm.counts.clear()
    vllm.ask(EDITED, max_tokens=3)
    counts = {
        name.split("/")[1]: count
        for name, count in vllm.counts.items()
        if name.startswith("prompt_")
    }
    first, second = recorded(vllm, path)
    assert first.computed == {"first_seen": len(TURN)}
    assert second.computed == {"new": 40}
    assert second.reused == ((0, 200, "exact"), (200, 350, "moved"))
    assert counts == {"exact": 200, "moved": 150, "recomputed": 40}
    assert (second.ended, second.num_tokens - second.num_prompt) == ("length", 3)
    # Requests of these tests arrive in 1970.
    assert (first.arrived, second.arrived) == (1.0, 2.0)
    for one in (first, second):
        assert one.first_token is not None
        assert 0 < one.first_token <= one.took
    assert second.would is None


def test_exact_mode_records_too(core: Callable[..., Core], tmp_path: Path) -> None:
    path = tmp_path / "log"
    vllm = core(connector={"mode": "exact", "chat_format": FORMAT, "record": str(path)})
    end_turn(vllm, CLOSED, {"session": "a conversation"})
    following = [*HEAD, *QUESTION, ASSISTANT, *ANSWER]
    end_turn(vllm, following, {"session": "a conversation"})
    first, second = recorded(vllm, path)
    assert first.ended == second.ended == "stopped"
    assert first.session == second.session is not None
    assert b"a conversation" not in path.read_bytes()
    kinds = [span.kind for span in first.spans]
    assert kinds == ["system", "user", "reasoning", "answer"]
    reasoning = first.spans[2]
    assert (reasoning.start, reasoning.end) == (
        len(HEAD) + len(QUESTION) + 1,
        len(CLOSED) - len(ANSWER),
    )
    assert (
        sum(second.computed.values()) + sum(stop - start for start, stop, _ in second.reused)
        == len(following) - 1
    )


@pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
def test_the_disk_is_bounded_under_traffic(
    core: Callable[..., Core], tmp_path: Path, in_flight: bool
) -> None:
    path = tmp_path / "log"
    record = {"path": str(path), "max_bytes": 1 << 16, "files": 2}
    connector = {"gate": "unchecked", "policy": {"scope": "namespace"}, "record": record}
    vllm = core(connector=connector, gaps=True, in_flight=in_flight, **SMALL)
    run = Run(vllm, seed=3)
    run.go(300)
    found = recorded(vllm, path)
    sizes = [one.stat().st_size for one in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 1 << 16
    assert vllm.counts["errors"] == vllm.counts["records_dropped"] == 0
    assert vllm.counts["records_written"] > 200
    written = vllm.connector.planner.half.recording._recorder.counts.written
    # Requests that were aborted while they waited have no computed prompt.
    assert 300 - run.num_aborted <= written <= 300
    assert vllm.connector.planner.half.recording._first == {}
    assert 10 < len(found) < 300
    for one in found:
        reused = sum(stop - start for start, stop, _ in one.reused)
        assert reused + sum(one.computed.values()) == one.num_prompt
    assert {kind for one in found for _, _, kind in one.reused} == {"exact", "moved"}


def test_the_log_of_an_engine_that_is_cut_anywhere(
    core: Callable[..., Core], tmp_path: Path
) -> None:
    path = tmp_path / "log"
    vllm = core(connector=moving(path))
    for prompt in (TURN[:50], TURN[:20] + TURN[30:70]):
        vllm.ask(prompt)
    whole = [one.request for one in recorded(vllm, path)]
    data = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(data) if byte == ord("\n")]
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        log = Log(path)
        lines = sum(size >= stop - 1 for stop in ends)
        assert [one.request for one in log] == whole[: max(0, lines - 1)], size


def test_a_disk_that_fails_leaves_the_engine_as_it_is(
    core: Callable[..., Core], tmp_path: Path
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    vllm = core(connector=moving(folder / "log"))
    shutil.rmtree(folder)
    assert vllm.ask(TURN) == continuation(TURN, 8)
    assert vllm.connector.planner.half.recording._recorder.flush()
    vllm.ask(EDITED)
    assert vllm.counts["records_dropped"] >= 1
    assert vllm.counts["errors"] == 0


def test_an_error_in_recording_is_counted_once_and_nothing_else(
    core: Callable[..., Core], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = core(connector=moving(tmp_path / "log"))

    def fail(*_: Any) -> None:
        raise ValueError("recording fails")

    monkeypatch.setattr(vllm.connector.planner.half.recording, "ended", fail)
    assert vllm.ask(TURN) == continuation(TURN, 8)
    assert vllm.counts["errors"] == 1
    assert not (tmp_path / "log").exists()


def test_the_end_of_the_engine_writes_what_waits(model: Path, tmp_path: Path) -> None:
    from tests.vllm_scheduler.core import Core  # noqa: PLC0415 - vLLM's settings come first

    path = tmp_path / "log"
    vllm = Core(model, connector=moving(path))
    vllm.ask(TURN)
    vllm.close()
    assert len(list(Log(path))) == 1
    assert json.loads(path.read_bytes().splitlines()[0])["engine"].startswith("vllm 0.")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"recor": "log"}, "unknown key 'recor'; did you mean 'record'"),
        ({"record": 3}, "record: must be a path"),
        ({"record": {"path": "log", "contents": "x"}}, "did you mean 'content'"),
        ({"record": {"path": "log", "content": "text"}}, 'record: content must be "digests" or'),
        ({"record": {"path": "log", "rate": 2}}, "record: rate must be a number from 0 to 1"),
        ({"shadov": True}, "did you mean 'shadow'"),
        ({"shadow": "yes"}, "shadow must be true or false, not 'yes'"),
        ({"shadow": True, "mode": "exact"}, '"mode": "exact" evicts what would be moved'),
        (
            {"shadow": True, "mode": "approximate", "gate": "unchecked"},
            '"mode": "approximate" makes approximate KV',
        ),
    ],
    ids=str,
)
def test_settings_that_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        _settings.Settings.read(given)


def test_a_log_that_cannot_be_written_is_refused_early(tmp_path: Path) -> None:
    from kvtrie.integrations.vllm.connector import check_early  # noqa: PLC0415 - likewise

    path = tmp_path / "no" / "log"
    with pytest.raises(SettingsError, match=r"record: path: .* there is no directory"):
        check_early({"record": str(path)})
