"""``kvtrie demo``: figures for people and machines."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from kvtrie.cli import _edited
from kvtrie.cli.app import app

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

    from typer.testing import Result

    Run = Callable[..., Result]
    Process = Callable[..., subprocess.CompletedProcess[str]]
    Write = Callable[..., Path]

TURN_KEYS = {
    "turn",
    "prompt_tokens",
    "exact",
    "moved",
    "computed",
    "new_tokens",
    "finish_reason",
    "seconds_to_first_token",
    "seconds_to_first_token_without_reuse",
    "ratio",
    "identical",
    "max_logit_difference",
    "tolerance",
    "question",
    "answer",
    "reference",
    "matches_reference",
}


def document(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_json_is_one_document_and_adds_up(run: Run, talk: Path) -> None:
    found = document(run(talk, "--json"))
    (conversation,) = found["conversations"]
    turns = conversation["turns"]
    assert conversation["line"] == 1
    assert [turn["question"] for turn in turns] == [
        "One and one?",
        "And one more?",
        "Thanks, and ten times that?",
    ]
    assert [turn["reference"] for turn in turns] == ["Two.", "Three.", None]
    for turn in turns:
        assert set(turn) == TURN_KEYS
        assert turn["exact"] + turn["moved"] + turn["computed"] == turn["prompt_tokens"]
        assert turn["identical"] is True
        assert 0 <= turn["max_logit_difference"] <= turn["tolerance"] < 1e-2
        assert turn["seconds_to_first_token"] > 0
        assert turn["ratio"] == pytest.approx(
            turn["seconds_to_first_token_without_reuse"] / turn["seconds_to_first_token"]
        )
        assert 1 <= turn["new_tokens"] <= 6
    assert turns[0]["exact"] == 0
    for before, after in pairwise(turns):
        # Append only, one token per byte: all but the last, open block is found.
        computed = before["prompt_tokens"] + before["new_tokens"] - 1
        assert after["exact"] >= computed // 16 * 16 - 16
    summary = found["summary"]
    assert summary["turns"] == 3
    assert summary["prompt_tokens"] == sum(turn["prompt_tokens"] for turn in turns)
    assert summary["exact"] == sum(turn["exact"] for turn in turns)
    assert summary["identical"] is True
    assert summary["within_tolerance"] is True
    assert summary["later_turns_least_ratio"] == min(turn["ratio"] for turn in turns[1:])


def test_one_reply_has_no_edited_history(run: Run, write: Write) -> None:
    chat = write({"role": "user", "content": "One and one?"})
    (conversation,) = document(run(chat, "--json"))["conversations"]
    assert conversation["edited"] == []
    assert conversation["why_not_edited"] == "there is only one reply, so nothing is edited"
    assert "not replayed: there is only one reply, so nothing is edited" in run(chat).stdout


def test_what_goes_on_is_not_measured() -> None:
    replies = [_edited.Reply([], [7, 8, 9]), _edited.Reply([], [7]), _edited.Reply([], [7])]
    # The second prompt continues the first and its reply, the third omits the reply.
    steps = _edited._steps([[1, 2], [1, 2, 7, 8, 5], [1, 2, 5]], replies)
    assert [step.is_measured for step in steps] == [False, False, True]


@pytest.fixture(scope="module")
def shipped() -> Any:
    """The shipped conversation on the shipped model, once: it takes a dozen seconds."""
    options = ["--repeats", "1", "--max-new-tokens", "48", "--json"]
    return document(CliRunner().invoke(app, ["demo", *options]))


def test_edited_histories_of_the_shipped_conversation(shipped: Any) -> None:
    (conversation,) = shipped["conversations"]
    assert conversation["why_not_edited"] is None
    rows = {(row["shape"], row["policy"]): row for row in conversation["edited"]}
    names = ("full", "exact", "rotated", "rotated+first4")
    assert list(rows) == [
        (shape, name) for shape in ("one by one", "all at once") for name in names
    ]
    for row in rows.values():
        assert row["exact"] + row["moved"] + row["computed"] == row["prompt"]
        assert row["seconds"] > 0
        assert row["positions"] > 0
        assert row["answer"]
    for shape in ("one by one", "all at once"):
        full, exact = rows[shape, "full"], rows[shape, "exact"]
        assert (full["computed"], full["kl_mean"], full["top1"]) == (full["prompt"], 0, 1)
        assert exact["moved"] == 0
        assert exact["kl_mean"] < 1e-9
        assert exact["top1"] == 1
        assert exact["answer"] == full["answer"]
        for name in names[2:]:
            assert rows[shape, name]["moved"] > 0
            assert rows[shape, name]["computed"] < exact["computed"]
            assert rows[shape, name]["kl_mean"] > 1e-9
        assert rows[shape, "rotated"]["computed"] < rows[shape, "rotated+first4"]["computed"]


def test_shipped_model_and_conversation(shipped: Any) -> None:
    assert shipped["threads"] == 1
    assert shipped["summary"]["identical"] is True
    assert len(shipped["conversations"][0]["turns"]) >= 8
    assert all(turn["exact"] > 0 for turn in shipped["conversations"][0]["turns"][1:])


def test_answers_of_policies_are_shown_once_each(run: Run, talk: Path) -> None:
    shown = " ".join(run(talk).stdout.split())
    assert "answers to the last question (Thanks, and ten times that?)" in shown
    assert re.search(r"one by one > .+ \(full, exact", shown)


def test_json_leaves_progress_on_stderr(run: Run, talk: Path) -> None:
    result = run(talk, "--json")
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == [
        "1/3 turn 1",
        "2/3 turn 2",
        "3/3 turn 3",
    ]


def test_tables_name_every_figure(run: Run, talk: Path) -> None:
    result = run(talk)
    assert result.exit_code == 0, result.stderr
    for text in (
        "And one more?",
        "exact",
        "computed",
        "with reuse",
        "without",
        "max logit",
        "found ",
        "later turns: time to first token",
        "answers identical to a run without cache: 3 of 3",
        "tolerance: reused KV equals the computed KV bit for bit",
    ):
        assert text in result.stdout
    assert len(re.findall(r"^ +[123] +\d+ .* yes ", result.stdout, re.MULTILINE)) == 3
    # Off a terminal no figure is cut.
    assert "…" not in result.stdout


def test_one_conversation_per_line(run: Run, write: Write) -> None:
    first = {"messages": [{"role": "user", "content": "a"}]}
    second = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ]
    }
    found = document(run(write(first, "", second), "--json"))
    assert [(c["line"], len(c["turns"])) for c in found["conversations"]] == [(1, 1), (3, 2)]
    assert found["conversations"][1]["turns"][0]["question"] == "b"
    # The next conversation finds what one has computed.
    assert found["conversations"][1]["turns"][0]["reference"] == "c"


def test_single_turn_has_no_later_turns(run: Run, write: Write) -> None:
    chat = write({"role": "user", "content": "a"})
    assert document(run(chat, "--json"))["summary"]["later_turns_median_ratio"] is None
    assert "later turns" not in run(chat).stdout


@pytest.mark.parametrize("block_size", [1, 37])
def test_block_size_and_num_blocks_are_obeyed(run: Run, talk: Path, block_size: int) -> None:
    found = document(run(talk, "--json", "--block-size", block_size, "--num-blocks", 200))
    assert (found["block_size"], found["num_blocks"]) == (block_size, 200)


def test_threads_are_obeyed(run: Run, write: Write) -> None:
    # One turn: on a busy machine two threads wait for each other.
    chat = write({"role": "user", "content": "a"})
    assert document(run(chat, "--json", "--threads", 2))["threads"] == 2


def test_half_precision_states_its_own_tolerance(run: Run, talk: Path) -> None:
    found = document(run(talk, "--json", "--dtype", "bfloat16"))
    assert found["dtype"] == "bfloat16"
    assert found["conversations"][0]["turns"][0]["tolerance"] > 1e-2


def test_tight_pool_evicts_and_stays_right(run: Run, talk: Path) -> None:
    found = document(run(talk, "--json", "--num-blocks", 10))
    assert found["summary"]["identical"] is True


def test_wrong_kv_is_detected(run: Run, talk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtrie.kernels import reference  # noqa: PLC0415 - what the test breaks

    real = reference.gather_blocks
    monkeypatch.setattr(reference, "gather_blocks", lambda rows, ids: real(rows, ids.flip(0)))
    result = run(talk)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        "kvtrie: a logit differs by more than rounding from a run without cache"
    )


def test_a_process_answers_with_the_shipped_model(kvtrie_process: Process, write: Write) -> None:
    chat = write({"role": "user", "content": "Hello!"})
    done = kvtrie_process("demo", chat, "--json", "--max-new-tokens", 4)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["summary"]["identical"] is True


def test_version(kvtrie_process: Process) -> None:
    done = kvtrie_process("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"kvtrie \d+\.\d+\.\d+\S*\n", done.stdout)


def test_help_names_the_command(kvtrie_process: Process) -> None:
    done = kvtrie_process("--help")
    assert done.returncode == 0
    assert "demo" in done.stdout
