"""Measurements on small models: kinds follow from plans, and the measurement detects bad KV."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.pretended import pretended_gpu
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import kvtrie
from kvtrie import gates
from kvtrie.calibrate import edits, measure, policies, recall, shipped
from kvtrie.calibrate._engine import Model, Reference, Workspace, divergence, tokens_needed
from kvtrie.calibrate._steps import Renderer, Scenario
from kvtrie.cli.app import app
from kvtrie.demo import Conversation
from kvtrie.models.fingerprint import model_id, template_id

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from typer.testing import Result

    from kvtrie.calibrate._steps import Step

LIMITS = gates.Thresholds()

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=shipped.KINDS)
def report(request: pytest.FixtureRequest) -> measure.Report:
    return measure.calibrate(
        shipped.model_path(request.param),
        policies=("rotated", "rotated+first16"),
        is_recall=True,
        most_cases=6,
        seed=1,
    )


def kind(report: measure.Report, name: str, policy: str = "rotated") -> gates.Kind:
    (found,) = [
        one
        for each in report.measured
        if each.name == policy
        for one in each.kinds
        if one.name == name
    ]
    return found


def test_full_recomputation_is_right_and_controls_lose(report: measure.Report) -> None:
    one = kind(report, "one cut")
    assert one.floor.right_full >= 0.9 * one.floor.questions > 0
    assert one.floor.lost == 0
    for control in one.controls:
        assert control.figures.loss >= 0.2
        assert control.figures.kl_mean > 10 * one.figures.kl_mean
    assert one.flaw() is None


def test_exact_reuse_changes_rounding_alone(report: measure.Report) -> None:
    for each in report.measured:
        for one in each.kinds:
            assert one.floor.kl_p99 < 1e-6
            assert one.floor.moved == 0
            assert one.figures.moved > 0


def test_rotated_keys_diverge_less_than_unrotated_ones(report: measure.Report) -> None:
    one = kind(report, "one cut")
    (unrotated,) = [each.figures for each in one.controls if each.name == "unrotated"]
    assert one.figures.kl_mean < unrotated.kl_mean / 2
    assert (one.figures.moved, one.figures.computed) == (unrotated.moved, unrotated.computed)


def test_few_conversations_clear_nothing(report: measure.Report) -> None:
    gate = report.gate(LIMITS)
    assert gate.cleared() == ()
    assert gates.Gate.to_json(gate)
    wanted = policies.policy("rotated").reuse
    assert gate.policy(wanted, model=gate.model).policy == kvtrie.EXACT_ONLY


def test_report_is_the_same_again() -> None:
    again = [
        measure.calibrate(
            shipped.model_path("gqa"), policies=["rotated"], is_recall=True, most_cases=1
        )
        for _ in range(2)
    ]
    assert again[0] == again[1]
    assert again[0].template == template_id(
        AutoTokenizer.from_pretrained(shipped.model_path("gqa")).chat_template
    )


def test_a_run_that_may_take_no_time_measures_nothing() -> None:
    found = measure.calibrate(
        shipped.model_path("gqa"), policies=["rotated"], is_recall=True, most_seconds=0.0
    )
    assert found.conversations == {}
    assert found.measured[0].kinds == ()
    assert gates.Gate.to_json(found.gate(LIMITS))


def test_the_served_template_is_measured() -> None:
    def template_of(
        chat_template: str | None, arguments: dict[str, Any] | None = None
    ) -> str | None:
        return measure.calibrate(
            shipped.model_path("gqa"),
            policies=["rotated"],
            is_recall=True,
            most_seconds=0.0,
            chat_template=chat_template,
            template_arguments=arguments,
        ).template

    own = (shipped.model_path("gqa") / "chat_template.jinja").read_text()
    assert template_of(None) == template_of(own) == template_id(own)
    other = own + "{# another #}"
    assert template_of(other) == template_id(other) != template_id(own)
    # It is the one that renders, with what the server gives it.
    refuses = "{% if not ours %}{{ raise_exception('not mine') }}{% endif %}" + own
    with pytest.raises(measure.CalibrationError, match="refuses the conversation: not mine"):
        template_of(refuses)
    assert template_of(refuses, {"ours": True}) == template_id(refuses)


@pytest.mark.parametrize("edit", edits.EDITS)
def test_shipped_edits_move_what_they_are_for(edit: str) -> None:
    """With the plan alone: the small models do not know these words."""
    path = shipped.model_path("gqa")
    renderer = Renderer(AutoTokenizer.from_pretrained(path))
    assert edits.case(edit, 3) == edits.case(edit, 3)
    assert edits.case(edit, 3) != edits.case(edit, 4)
    case = edits.case(edit, 3)
    steps = [renderer.step(prompt) for prompt in case.prompts]
    assert [step.is_measured for step in steps] == [False] * (len(steps) - 1) + [True]
    assert [bool(step.reply) for step in steps] == [True] * (len(steps) - 1) + [False]
    assert (edit == "assembled") == (len({step.conversation for step in steps}) > 1)


@pytest.mark.parametrize(
    ("edit", "names"),
    [
        ("reorder", {"one change", "replaced", "reordered"}),
        ("assembled", {"other conversation"}),
    ],
)
def test_notes_in_another_order_or_of_others_are_moved(edit: str, names: set[str]) -> None:
    """Regression: they were in the last message, where nothing is moved."""
    found = measure.calibrate(
        shipped.model_path("gqa"),
        policies=["rotated+namespace"],
        chosen_edits=[edit],
        most_cases=1,
    )
    (one,) = found.measured
    (kind,) = one.kinds
    assert kind.name in names
    assert kind.figures.moved > 0


def test_ten_edits_in_a_row_each_drop_reasoning() -> None:
    case = edits.case("ten", 5)
    assert case.is_chain
    assert len(case.prompts) == 11
    for before, after in pairwise(case.prompts):
        reasoning, _, answer = (before.reply or "").partition("\n\n")
        assert reasoning
        assert after.messages[: len(before.messages)] == before.messages
        assert after.messages[len(before.messages)]["content"] == answer


def test_edit_that_moves_nothing_ends_soon() -> None:
    """Else an edit that the policies' scope excludes would take most of the time."""
    path = shipped.model_path("gqa")
    found = measure.calibrate(path, policies=["rotated"], chosen_edits=["assembled"], most_cases=20)
    assert found.conversations == {"assembled": measure.ENOUGH_UNMOVED}


def test_shortest_run_above_the_default_is_measured() -> None:
    """Regression: the control asked for runs that the index does not find."""
    found = measure.calibrate(
        shipped.model_path("gqa"), policies=["rotated"], is_recall=True, most_cases=1, min_run=24
    )
    assert found.measured[0].policy.min_run == 24


def test_policy_with_other_conversations_moves_them() -> None:
    found = measure.calibrate(
        shipped.model_path("gqa"),
        policies=["rotated", "rotated+fronts20+namespace"],
        chosen_edits=["assembled"],
        most_cases=1,
    )
    own, wide = found.measured
    assert own.kinds == ()
    (one,) = wide.kinds
    assert one.name == "other conversation"
    controls = [control.figures for control in one.controls]
    assert all(figures.moved > one.figures.moved for figures in controls[1:])


def test_probe_is_measured_with_records() -> None:
    """A tenth of the tokens more than the gaps are computed, and others than the fronts."""
    found = measure.calibrate(
        shipped.model_path("gqa"),
        policies=["rotated", "rotated+fronts30", "rotated+probe30"],
        chosen_edits=["prune"],
        most_cases=1,
    )
    (lax,), (fronts,), (probe,) = ([kind.figures for kind in one.kinds] for one in found.measured)
    assert lax.computed < probe.computed
    assert abs(fronts.computed - probe.computed) < 0.1 * fronts.computed
    assert fronts.kl_mean != probe.kl_mean


def test_plan_without_records_is_not_measured_as_the_probes() -> None:
    """An engine plans it again with fronts, so the verdict on the probe would be of fronts."""
    path = shipped.model_path("gqa")
    model = Model(AutoModelForCausalLM.from_pretrained(path).eval(), 16)
    renderer = Renderer(AutoTokenizer.from_pretrained(path))
    first, last = [renderer.step(prompt) for prompt in edits.case("prune", 1).prompts]
    pool = model.pool(tokens_needed([first, last], 16))
    space = Workspace(model, pool, 16, has_records=True)
    probe, fronts = (policies.policy(f"rotated+{name}30") for name in ("probe", "fronts"))
    space.keep(first, probe)
    reply = first.reply[:4]
    assert space.try_(last, reply, probe).terms is not None
    space._repair.forget(np.arange(pool.num_blocks, dtype=np.int32))
    trial, want = (space.try_(last, reply, one) for one in (probe, fronts))
    assert trial.terms is None
    assert want.terms is not None
    assert trial.usage == want.usage
    assert torch.equal(trial.rows, want.rows)
    assert space._store.index.stats().live_plans == 0


def test_on_a_gpu_it_measures_what_it_does_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    path = shipped.model_path("gqa")
    options: dict[str, Any] = {
        "policies": ["rotated", "rotated+probe30"],
        "chosen_edits": ["prune"],
        "most_cases": 1,
    }
    here = measure.calibrate(path, **options)
    loaded, tokenizer = measure._load(path, "cpu", "auto")
    monkeypatch.setattr(measure, "_load", lambda _, device, __: (loaded.to(device), tokenizer))
    with pretended_gpu():
        there = measure.calibrate(path, device="cuda", **options)
    for a, b in zip(here.measured, there.measured, strict=True):
        for one, other in zip(a.kinds, b.kinds, strict=True):
            assert one.name == other.name
            assert other.figures.moved == one.figures.moved > 0
            assert other.figures.computed == one.figures.computed
            assert other.figures.kl_mean == pytest.approx(one.figures.kl_mean, rel=0.01)


def test_chain_begins_with_the_same_kv_for_every_policy() -> None:
    """The first prompt of a chain reuses nothing: it is computed once, and copied."""
    path = shipped.model_path("gqa")
    model = Model(AutoModelForCausalLM.from_pretrained(path).eval(), 16)
    renderer = Renderer(AutoTokenizer.from_pretrained(path))
    first, *_ = [renderer.step(prompt) for prompt in edits.case("afterwards", 1).prompts]
    rotated = policies.policy("rotated")
    spaces = [Workspace(model, model.pool(tokens_needed([first], 16)), 16) for _ in range(3)]
    spaces[0].keep(first, rotated)
    spaces[1].keep(first, rotated)
    spaces[2].keep(first, rotated, spaces[0])
    seq = kvtrie.TokenSequence(first.prompt, spaces[0]._space)
    rows = []
    for space in spaces:
        blocks = space._store.index.lookup(seq).blocks
        assert len(blocks) == len(first.prompt) // 16
        rows.append(space._copier.pool.gather(blocks, 0, 16 * len(blocks))[0])
    assert torch.equal(rows[0], rows[2])
    torch.testing.assert_close(rows[1], rows[2])


def test_replay_gives_every_block_back() -> None:
    path = shipped.model_path("gqa")
    for block_size in (1, 5, 16):
        model = Model(AutoModelForCausalLM.from_pretrained(path).eval(), block_size)
        renderer = Renderer(AutoTokenizer.from_pretrained(path))
        steps = renderer.steps(recall.conversation(4, 12), Scenario("three", window=3))
        pool = model.pool(tokens_needed(steps, block_size))
        policy = policies.policy("rotated+first1+run8")
        space = Workspace(model, pool, 8)
        for step in steps:
            before = space._store.index.digest()
            trial = space.try_(step, step.reply, policy)
            assert trial.rows.shape[0] == len(step.reply)
            usage = trial.usage
            assert usage.exact + usage.moved + usage.computed == len(step.prompt)
            assert (trial.terms is None) == (usage.moved == 0)
            assert space._store.index.stats().pinned == 0
            del before
            space.keep(step, policy)
        store = space._store
        store.index.check()
        stats = store.index.stats()
        assert store.allocator.num_free + stats.indexed == pool.num_blocks
        assert (stats.condemned, stats.waiting, stats.pinned) == (0, 0, 0)


def test_trial_predicts_what_the_kept_prompt_would() -> None:
    path = shipped.model_path("gqa")
    model = Model(AutoModelForCausalLM.from_pretrained(path).eval(), 4)
    renderer = Renderer(AutoTokenizer.from_pretrained(path))
    steps = renderer.steps(recall.conversation(2, 4), Scenario("all", least_edits=0))
    space = Workspace(model, model.pool(tokens_needed(steps, 4)), 16)
    exact = policies.policy("exact")
    for step in steps:
        rows = space.try_(step, step.reply, exact).rows
        whole = model.whole(step.prompt, step.reply)
        assert float(divergence(whole, rows).max()) < 1e-6
        space.keep(step, exact)


def test_greedy_reply_is_the_models_own() -> None:
    path = shipped.model_path("gqa")
    model = Model(AutoModelForCausalLM.from_pretrained(path).eval(), 16)
    renderer = Renderer(AutoTokenizer.from_pretrained(path))
    step = renderer.steps(recall.conversation(2, 2), Scenario("all", least_edits=0))[1]
    reference = model.greedy(step.prompt, 8, frozenset())
    assert len(reference.reply) == 8
    rows = model.whole(step.prompt, reference.reply)
    assert rows.argmax(-1).tolist() == reference.reply
    assert float(divergence(reference.rows, rows).max()) < 1e-6
    stopped = model.greedy(step.prompt, 8, frozenset([reference.reply[2]]))
    assert stopped.reply == reference.reply[: reference.reply.index(reference.reply[2]) + 1]


def test_reply_is_compared_up_to_its_first_near_tie() -> None:
    rows = torch.tensor([[5.0, 1.0, 0.0], [3.0, 2.9, 0.0], [9.0, 0.0, 0.0]])
    assert Reference([0, 0, 0], rows).sure(0.25) == 1
    assert Reference([0, 0, 0], rows).sure(0.05) == 3


def test_model_whose_keys_are_not_rotated_as_its_config_says_is_refused() -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(shipped.model_path("gqa")).eval()
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    with pytest.raises(kvtrie.UnsupportedRopeError, match="layer 0"):
        Model(model, 16)


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
    names = ("full", "exact", "drop", "unrotated")
    assert not any(policies.policy(name).can_be_cleared for name in names)
    fronts = policies.policy("rotated+fronts20").reuse
    assert (fronts.recompute_share, fronts.repair, fronts.scope) == (0.2, "fronts", "conversation")
    wide = policies.policy("rotated+first4+run8+probe30+namespace").reuse
    assert (wide.recompute_share, wide.repair, wide.scope) == (0.3, "probe", "namespace")
    assert (wide.recompute_first, wide.min_run) == (4, 8)
    assert all(policies.policy(name).can_be_cleared for name in policies.DEFAULT)


def test_recorded_conversations_need_no_right_answers() -> None:
    messages = [
        {name: value for name, value in message.items() if name != "scored"}
        for message in recall.conversation(8, 4)
    ]
    found = measure.calibrate(
        shipped.model_path("gqa"),
        policies=["rotated"],
        conversations=[Conversation(tuple(messages))],
    )
    assert found.conversations == {"recorded": 1}
    for one in found.measured[0].kinds:
        assert one.floor.right_full == one.floor.questions
        assert one.flaw() is None
    assert sum(one.floor.questions for one in found.measured[0].kinds) > 0


def test_conversations_without_two_replies_are_refused() -> None:
    plain = Conversation(({"role": "user", "content": "Draw"},))
    with pytest.raises(measure.CalibrationError, match="record whole conversations"):
        measure.calibrate(shipped.model_path("gqa"), conversations=[plain])


def test_conversation_longer_than_the_context_says_what_to_do() -> None:
    long = recall.conversation(1, 4)
    long[1] = {"role": "user", "content": "Draw " * 3000}
    with pytest.raises(measure.CalibrationError, match="context is 2048: leave out"):
        measure.calibrate(shipped.model_path("gqa"), conversations=[Conversation(tuple(long))])


def test_shipped_conversations_longer_than_the_context_are_drawn_again_or_left_out() -> None:
    """The first one of an edit alone was compared: others ran beyond the model's context."""
    renderer = Renderer(AutoTokenizer.from_pretrained(shipped.model_path("gqa")))

    def longest(steps: list[Step]) -> int:
        return max(len(step.prompt) + max(len(step.reply), 16) for step in steps)

    def lengths(limit: int | None) -> list[int]:
        model: Any = SimpleNamespace(most_tokens=limit)
        (found,), too_long = measure._shipped(renderer, model, ["reasonings"], 0, 8)
        assert too_long == []
        return [longest(found.make(number)[0]) for number in range(8)]

    free = lengths(None)
    limit = sorted(free)[1]
    found = lengths(limit)
    assert max(found) <= limit < max(free)
    assert [a for a, b in zip(found, free, strict=True) if b <= limit] == [
        b for b in free if b <= limit
    ]
    model: Any = SimpleNamespace(most_tokens=50)
    assert measure._shipped(renderer, model, ["reasonings"], 0, 8) == ([], ["reasonings"])


def test_context_too_short_for_all_shipped_conversations_says_what_to_do(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(shipped.model_path("gqa"), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100}))
    said: list[str] = []
    with pytest.raises(measure.CalibrationError, match=r"context is 100 tokens.*--conversations"):
        measure.calibrate(model, policies=["rotated"], status=said.append)
    assert said[-1].startswith("left out, longer than the model's context: nonce, window")


def test_models_of_two_regimes_are_measured_in_the_short_one(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(shipped.model_path("gqa"), model)
    config = json.loads((model / "config.json").read_text())
    # Dynamic NTK: frequencies change from 2,048 tokens on.
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    settings = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]}
    config["rope_parameters"] = {**settings, **dynamic}
    (model / "config.json").write_text(json.dumps(config))
    found, plain = (
        measure.calibrate(path, policies=("rotated",), is_recall=True, most_cases=2)
        for path in (model, shipped.model_path("gqa"))
    )
    assert [one.kinds for one in found.measured] == [one.kinds for one in plain.measured]
    assert found.measured[0].kinds
    long = recall.conversation(1, 4)
    long[1] = {"role": "user", "content": "Draw " * 3000}
    with pytest.raises(measure.CalibrationError, match="context is 2047: leave out"):
        measure.calibrate(model, conversations=[Conversation(tuple(long))])


def test_vision_models_are_refused_with_the_reason(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(shipped.model_path("gqa"), model)
    text = json.loads((model / "config.json").read_text())
    vision = {"model_type": "qwen2_vl", "text_config": {**text, "model_type": "qwen2_vl_text"}}
    (model / "config.json").write_text(json.dumps(vision))
    with pytest.raises(measure.CalibrationError, match=r"vision model \(qwen2_vl\).* no gate"):
        measure.calibrate(model)


def run(*args: Any) -> Result:
    return CliRunner().invoke(app, ["calibrate", *map(str, args)])


def test_command_writes_a_gate_that_names_the_model(tmp_path: Path) -> None:
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"messages": recall.conversation(5, 4)}) + "\n", encoding="utf-8")
    out = tmp_path / "gate.json"
    given = ("--conversations", chat, "--policies", "unrotated,rotated", "--json", "--out", out)
    result = run("gqa", *given)
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert [one["policy"] for one in document["policies"]] == ["rotated"]
    gate = gates.read(out)
    model = AutoModelForCausalLM.from_pretrained(shipped.model_path("gqa"))
    assert gate.model == model_id(model) == document["model"]
    assert gate.template == document["template"]
    assert [one.name for one in gate.measured] == ["rotated"]


def test_command_reads_a_chat_file_and_shows_tables(tmp_path: Path) -> None:
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"messages": recall.conversation(5, 4)}) + "\n", encoding="utf-8")
    result = run(shipped.model_path("mla"), "--conversations", chat, "--policies", "rotated")
    assert result.exit_code == 0, result.stderr
    assert "conversations: 1 recorded" in result.stdout
    assert "nothing is cleared" in result.stdout


BAD: dict[str, tuple[Callable[[Path], list[Any]], str]] = {
    "no such model": (lambda tmp: [tmp / "none"], "not a model directory"),
    "no config": (lambda tmp: [tmp], "config.json"),
    "unknown policy": (lambda _: ["gqa", "--policies", "exact,turn"], "unknown policy 'turn'"),
    "no policy": (lambda _: ["gqa", "--policies", ","], "no policy"),
    "arguments of the template that are no mapping": (
        lambda _: ["gqa", "--default-chat-template-kwargs", "[1]"],
        "must be a mapping, not",
    ),
    "no chat file": (lambda tmp: ["gqa", "--conversations", tmp / "none.jsonl"], "No such file"),
    "no folder": (lambda tmp: ["gqa", "--out", tmp / "a" / "b.json"], "there is no directory"),
    "nothing to clear": (lambda _: ["gqa", "--policies", "exact"], "name a rotated one"),
    "limit not a number": (lambda _: ["gqa", "--max-kl", "inf"], "max_kl must be finite"),
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


def test_command_dtype_that_is_none_is_named() -> None:
    result = run("gqa", "--dtype", "float99")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "dtype 'float99' is not an element type" in result.stderr.splitlines()[-1]


def test_command_model_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(shipped.model_path("gqa"), model)
    (model / "model.safetensors").unlink()
    result = run(model)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "cannot load the model in" in result.stderr.splitlines()[-1]


def test_command_conversations_without_replies_say_what_to_do(tmp_path: Path) -> None:
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"role": "user", "content": "Draw"}) + "\n", encoding="utf-8")
    result = run("gqa", "--conversations", chat)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "record whole conversations with their replies" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("extra", [(), ("--json",)], ids=["text", "json"])
def test_command_conversations_that_move_nothing_write_no_gate(
    tmp_path: Path, extra: tuple[str, ...]
) -> None:
    """Regression: an empty table blamed the model, and a gate file without kinds was written."""
    messages = [
        {"role": role, "content": f"Say {number}."}
        for number in range(3)
        for role in ("user", "assistant")
    ]
    chat, out = tmp_path / "chat.jsonl", tmp_path / "gate.json"
    chat.write_text(f"{json.dumps({'messages': messages})}\n" * 2, encoding="utf-8")
    result = run("gqa", "--conversations", chat, "--min-run", 24, "--out", out, *extra)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == (
        "kvtrie: no prompt of these 2 conversations moves KV, so nothing was measured: their "
        "histories are only appended to, or moved runs are shorter than --min-run 24"
    )
    # The partial file neither: other conversations may be measured under the same name.
    assert list(tmp_path.iterdir()) == [chat]


def test_command_model_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(shipped.model_path("gqa"), model)
    (model / "chat_template.jinja").unlink()
    result = run(model)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "put the one that you serve with into the model directory" in result.stderr


def test_divergence_is_that_of_the_distributions() -> None:
    full = torch.zeros(2, 3)
    own = torch.log(torch.tensor([0.5, 0.25, 0.25])).repeat(2, 1)
    expected = sum(float(torch.log(torch.tensor((1 / 3) / p))) / 3 for p in (0.5, 0.25, 0.25))
    assert divergence(full, own).tolist() == pytest.approx(2 * [expected])
