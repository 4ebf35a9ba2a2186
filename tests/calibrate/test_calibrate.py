"""Measurements on the shipped models: the task can fail, and the measurement detects it."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import kvtrie
from kvtrie import gates
from kvtrie.calibrate import measure, policies, recall, shipped
from kvtrie.calibrate._engine import Model, Replay, TokenSources, tokens_needed
from kvtrie.calibrate._steps import SCENARIOS, Renderer, Scenario
from kvtrie.cli.app import app
from kvtrie.demo import Conversation
from kvtrie.models.fingerprint import model_id

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from typer.testing import Result

ONE, FIVE, WINDOW = SCENARIOS
NAMES = ("full", "exact", "drop", "unrotated", "rotated", "rotated+first1", "rotated+last4")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=shipped.KINDS)
def report(request: pytest.FixtureRequest) -> measure.Report:
    return measure.calibrate(
        shipped.model_path(request.param),
        policies=NAMES,
        scenarios=(ONE, FIVE),
        num_questions=30,
        seed=1,
    )


def figures(report: measure.Report, name: str, scenario: Scenario = ONE) -> gates.Figures:
    found = [
        one.figures
        for one in report.results
        if one.policy.name == name and one.figures.scenario == scenario.name
    ]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("scenario", [ONE, FIVE], ids=["one", "five"])
def test_full_recomputation_answers_and_controls_lose(
    report: measure.Report, scenario: Scenario
) -> None:
    full = figures(report, "full", scenario)
    assert full.questions >= 30
    assert full.right >= 0.95 * full.questions
    for control in ("unrotated", "drop"):
        assert figures(report, control, scenario).loss >= 0.2


def test_full_recomputation_does_not_diverge_from_itself(report: measure.Report) -> None:
    full = figures(report, "full")
    assert (full.kl_mean, full.kl_p99, full.top1) == (0.0, 0.0, 1.0)
    assert (full.loss, full.exact, full.moved) == (0.0, 0, 0)


def test_exact_reuse_changes_rounding_alone(report: measure.Report) -> None:
    for scenario in (ONE, FIVE):
        exact = figures(report, "exact", scenario)
        assert exact.kl_p99 < 1e-9
        assert exact.right == exact.right_full
        assert exact.exact > 0
        assert exact.moved == 0


def test_rotated_keys_diverge_less_than_unrotated_ones(report: measure.Report) -> None:
    for scenario in (ONE, FIVE):
        rotated, unrotated = (figures(report, n, scenario) for n in ("rotated", "unrotated"))
        assert rotated.kl_mean < unrotated.kl_mean / 2
        assert (rotated.moved, rotated.computed) == (unrotated.moved, unrotated.computed)


def test_recomputed_tokens_are_computed_and_not_moved(report: measure.Report) -> None:
    plain, first, last = (
        figures(report, name) for name in ("rotated", "rotated+first1", "rotated+last4")
    )
    runs = first.computed - plain.computed
    assert runs >= plain.questions
    assert plain.moved - first.moved == runs
    assert last.computed - plain.computed == 4 * runs
    assert all(one.exact == plain.exact for one in (first, last))


def test_savings_are_a_share_of_what_rotated_saves(report: measure.Report) -> None:
    shares = {
        one.policy.name: report.savings(one)
        for one in report.results
        if one.figures.scenario == ONE.name
    }
    assert (shares["exact"], shares["rotated"]) == (0.0, 1.0)
    assert shares["rotated+first1"] == pytest.approx(1 - 1 / 17, abs=1e-3)


def test_report_is_the_same_again() -> None:
    again = [
        measure.calibrate(
            shipped.model_path("gqa"), policies=["rotated"], scenarios=(ONE,), num_questions=3
        )
        for _ in range(2)
    ]
    assert again[0] == again[1]


def test_window_moves_everything_after_the_system_prompt() -> None:
    found = measure.calibrate(
        shipped.model_path("partial"),
        policies=["exact", "rotated+first1"],
        scenarios=(WINDOW,),
        num_questions=10,
    )
    exact, rotated = figures(found, "exact", WINDOW), figures(found, "rotated+first1", WINDOW)
    assert exact.exact < 0.2 * (exact.exact + exact.computed)
    assert rotated.computed < 0.3 * exact.computed


def test_model_whose_keys_are_not_rotated_as_its_config_says_is_refused() -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(shipped.model_path("gqa")).eval()
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    with pytest.raises(kvtrie.UnsupportedRopeError, match="layer 0"):
        Model(model, 16)


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_replay_gives_every_block_back(block_size: int) -> None:
    path = shipped.model_path("gqa")
    model = Model(AutoModelForCausalLM.from_pretrained(path).eval(), block_size)
    renderer = Renderer(AutoTokenizer.from_pretrained(path))
    steps = renderer.steps(recall.conversation(4, 12), Scenario("three", window=3))
    pool = model.pool(tokens_needed(steps, block_size))
    replay = Replay(model, pool, policies.policy("rotated+first1+run8"))
    for step in steps:
        rows, usage = replay.step(step)
        assert rows.shape[0] == len(step.reply)
        assert usage.exact + usage.moved + usage.computed == len(step.prompt)
    store = replay._store
    store.index.check()
    stats = store.index.stats()
    assert store.allocator.num_free + stats.indexed == pool.num_blocks
    assert (stats.condemned, stats.waiting, stats.pinned) == (0, 0, 0)


@pytest.mark.parametrize(
    "name",
    ["", "rotate", "rotated+first0", "rotated+last4+first1", "rotated+first-1", "ROTATED", "full "],
)
def test_policy_unknown_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown policy"):
        policies.policy(name)


def test_policy_with_runs_no_index_finds_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 8"):
        policies.policy("rotated+run7")
    with pytest.raises(ValueError, match="at least 8"):
        policies.policy("rotated", min_run=7)


def test_policy_names_say_what_is_recomputed() -> None:
    found = policies.policy("rotated+first4+last2+run24")
    assert found.reuse == kvtrie.ReusePolicy(min_run=24, recompute_first=4, recompute_last=2)
    assert found.can_be_cleared
    assert not any(policies.policy(name).can_be_cleared for name in NAMES[:4])


def test_calibrate_conversations_without_answers_measures_no_accuracy() -> None:
    messages = [
        {name: value for name, value in message.items() if name != "scored"}
        for message in recall.conversation(8, 4)
    ]
    found = measure.calibrate(
        shipped.model_path("gqa"),
        policies=["rotated"],
        conversations=[Conversation(tuple(messages))],
        scenarios=(ONE,),
    )
    assert figures(found, "rotated").questions == 0
    assert figures(found, "rotated").positions > 0
    gate = found.gate(gates.Thresholds())
    decision = gate.policy(policies.policy("rotated").reuse, model=found.model)
    assert decision.policy == kvtrie.EXACT_ONLY
    assert "no answers" in decision.reason


def test_calibrate_with_nothing_to_measure_is_refused() -> None:
    plain = Conversation(({"role": "user", "content": "Draw"},))
    with pytest.raises(measure.CalibrationError, match="anything to measure"):
        measure.calibrate(shipped.model_path("gqa"), conversations=[plain])


def test_calibrate_conversation_longer_than_the_context_is_refused() -> None:
    long = recall.conversation(1, 4)
    long[1] = {"role": "user", "content": "Draw " * 3000}
    with pytest.raises(measure.CalibrationError, match="2048"):
        measure.calibrate(shipped.model_path("gqa"), conversations=[Conversation(tuple(long))])


def run(*args: Any) -> Result:
    return CliRunner().invoke(app, ["calibrate", *map(str, args)])


def test_command_writes_a_gate_that_names_the_model(tmp_path: Path) -> None:
    out = tmp_path / "gate.json"
    result = run("gqa", "--questions", 4, "--policies", "unrotated,rotated", "--json", "--out", out)
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert [one["policy"] for one in document["results"]] == 3 * ["unrotated", "rotated"]
    assert "20/" in result.stderr or "one turn" in result.stderr
    gate = gates.read(out)
    model = AutoModelForCausalLM.from_pretrained(shipped.model_path("gqa"))
    assert gate.model == model_id(model) == document["model"]
    assert len(gate.measured[0].figures) == 3
    # So few questions clear nothing, whatever they cost.
    wanted = policies.policy("rotated").reuse
    assert gate.policy(wanted, model=gate.model).policy == kvtrie.EXACT_ONLY


def test_command_reads_a_chat_file_and_shows_tables(tmp_path: Path) -> None:
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"messages": recall.conversation(5, 4)}) + "\n", encoding="utf-8")
    result = run(shipped.model_path("mla"), "--conversations", chat, "--policies", "rotated")
    assert result.exit_code == 0, result.stderr
    assert "one turn: 1 conversations" in result.stdout
    assert "window of ten" not in result.stdout
    assert "nothing is cleared" in result.stdout


BAD: dict[str, tuple[Callable[[Path], list[Any]], str]] = {
    "no such model": (lambda tmp: [tmp / "none"], "not a model directory"),
    "no config": (lambda tmp: [tmp], "config.json"),
    "unknown policy": (lambda _: ["gqa", "--policies", "exact,turn"], "unknown policy 'turn'"),
    "no policy": (lambda _: ["gqa", "--policies", ","], "no policy"),
    "no chat file": (lambda tmp: ["gqa", "--conversations", tmp / "none.jsonl"], "No such file"),
    "no folder": (lambda tmp: ["gqa", "--out", tmp / "a" / "b.json"], "there is no directory"),
    "nothing to clear": (
        lambda tmp: ["gqa", "--policies", "exact", "--out", tmp / "b.json"],
        "could be cleared",
    ),
    "no control": (
        lambda tmp: ["gqa", "--policies", "rotated", "--out", tmp / "b.json"],
        "without a control; add unrotated or drop",
    ),
    "limit not a number": (lambda _: ["gqa", "--max-kl", "inf"], "max_kl_mean must be finite"),
}


@pytest.mark.parametrize(("args", "named"), BAD.values(), ids=BAD.keys())
def test_command_bad_input_is_one_sentence(
    tmp_path: Path, args: Callable[[Path], list[Any]], named: str
) -> None:
    result = run(*args(tmp_path))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert named in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_command_model_that_cannot_be_loaded_is_refused() -> None:
    result = run("gqa", "--dtype", "float99", "--questions", 1)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "cannot load" in result.stderr.splitlines()[-1]


def test_command_conversations_without_edits_are_refused(tmp_path: Path) -> None:
    chat = tmp_path / "chat.jsonl"
    talk = [{"role": "user", "content": "Draw"}, {"role": "assistant", "content": "Ada"}]
    chat.write_text("".join(json.dumps(one) + "\n" for one in talk), encoding="utf-8")
    result = run("gqa", "--conversations", chat)
    assert result.exit_code == 2
    assert "anything to measure" in result.stderr


def test_divergence_is_that_of_the_distributions() -> None:
    tally = measure._Tally()
    step = Renderer(AutoTokenizer.from_pretrained(shipped.model_path("gqa"))).steps(
        recall.conversation(0, 2), ONE
    )[-1]
    full = torch.zeros(len(step.reply), 3)
    own = torch.log(torch.tensor([0.5, 0.25, 0.25])).repeat(len(step.reply), 1)
    tally.add(step, full, own, TokenSources(computed=1))
    expected = sum(math.log((1 / 3) / p) / 3 for p in (0.5, 0.25, 0.25))
    assert float(tally.divergences[0].mean()) == pytest.approx(expected)
