"""The examples run, print what their pages show, and keep what they promise."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import kvtrie
from examples import engine, gate_from_traffic, router, template_lab
from kvtrie import demo

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(engine.__file__).parent


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def small() -> engine.Engine:
    return engine.Engine(demo.model_path(), num_blocks=64)


def free_and_indexed(small: engine.Engine) -> int:
    stats = small.index.stats()
    assert stats.pinned == stats.live_plans == stats.condemned == stats.waiting == 0
    small.index.check()
    return small.free.num_free + stats.indexed


def test_the_page_says_which_examples_need_the_small_models() -> None:
    page = (FOLDER.parent / "docs/examples.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    scripts = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py")}
    using = {name for name, text in scripts.items() if "model_path(" in text}
    assert using == {name for name, row in rows.items() if "the small models" in row}
    assert "`pip install dist/kvtrie_demo_models-*.whl`" in page


def test_the_engine_is_about_70_lines() -> None:
    lines = (FOLDER / "engine.py").read_text(encoding="utf-8").splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("class Engine"))
    end = next(at for at in range(start + 1, len(lines)) if lines[at][:1] not in ("", " "))
    assert sum(1 for line in lines[start:end] if line.strip()) <= 75


def test_engine_exact_answers_are_those_of_an_empty_cache(small: engine.Engine) -> None:
    words = list(range(300, 400))
    turns = [words, [*words, *range(420, 450)], [*words[:70], *range(500, 520)]]
    for prompt in turns:
        answer = small.generate(prompt, session="a", max_new_tokens=8)
        alone = engine.Engine(demo.model_path(), num_blocks=64)
        assert answer.tokens == alone.generate(prompt, session="a", max_new_tokens=8).tokens
        assert answer.exact + answer.moved + answer.computed == len(prompt)
        assert free_and_indexed(small) == 64
    assert answer.exact == 70  # four blocks in place, six tokens of the fifth by copy


def test_engine_gives_every_block_back_when_the_model_fails(
    small: engine.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fail_third(*args: Any) -> int:
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("no memory")
        return compute(*args)

    compute = small.compute
    monkeypatch.setattr(small, "compute", fail_third)
    prompt = [*range(700, 760)]
    with pytest.raises(RuntimeError, match="no memory"):
        small.generate(prompt, session="b", max_new_tokens=8)
    assert free_and_indexed(small) == 64
    # The prompt and the first generated token were computed: three blocks are shared.
    seq = kvtrie.TokenSequence(prompt, small.space)
    assert small.index.lookup(seq, keep_last=1).num_tokens == 48


def test_engine_ends_at_any_of_the_ids_that_end_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = list(range(300, 360))
    long = engine.Engine(demo.model_path(), num_blocks=64)
    long.eos = set()
    whole = long.generate(prompt, session="a", max_new_tokens=8).tokens
    load = AutoModelForCausalLM.from_pretrained

    def listed(*args: Any, **options: Any) -> Any:
        model = load(*args, **options)
        model.config.eos_token_id = [2**20, whole[2]]
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", listed)
    short = engine.Engine(demo.model_path(), num_blocks=64)
    tokens = short.generate(prompt, session="a", max_new_tokens=8).tokens
    assert tokens == whole[: whole.index(whole[2]) + 1]


def test_engine_refuses_an_empty_prompt(small: engine.Engine) -> None:
    before = small.free.num_free, small.index.stats().indexed
    with pytest.raises(ValueError, match="the prompt is empty"):
        small.generate([], session="d", max_new_tokens=8)
    assert (small.free.num_free, small.index.stats().indexed) == before


SCRIPTS = ("engine.py", "template_lab.py", "gate_from_traffic.py")


def ended(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> int:
    """The exit code of a script, which this process has imported already."""
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as raised:
        runpy.run_path(str(FOLDER / script), run_name="__main__")
    return int(raised.value.code or 0)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_say_how_they_are_called(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, script, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: {script} [-h]")


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("has_models", [True, False])
def test_what_a_script_lacks_is_one_sentence(
    *,
    has_models: bool,
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    if not has_models:
        monkeypatch.setitem(sys.modules, "kvtrie_demo_models", None)
    given = "x" if "gate" in script else str(tmp_path)
    assert ended(monkeypatch, script, *([given] if has_models else [])) == 2
    usage, *_, said = capsys.readouterr().err.splitlines()
    assert usage.startswith(f"usage: {script}")
    named = given if has_models else "pip install dist/kvtrie_demo_models-*.whl"
    assert said.startswith(f"{script}: error: ")
    assert named in said


def test_engine_refuses_what_does_not_fit_and_keeps_everything(small: engine.Engine) -> None:
    before = small.free.num_free, small.index.stats().indexed
    with pytest.raises(kvtrie.OutOfBlocksError, match="66"):
        small.generate([5] * 1040, session="c", max_new_tokens=8)
    assert (small.free.num_free, small.index.stats().indexed) == before


def test_engine_moves_what_follows_dropped_reasoning(capsys: pytest.CaptureFixture[str]) -> None:
    engine.main(demo.model_path())
    exact, moved = (
        [line.split(maxsplit=3) for line in part.splitlines()[2:]]
        for part in capsys.readouterr().out.split("moved runs")
    )
    assert [row[3] for row in exact] == [row[3] for row in moved]
    assert exact[-1][3] == "That is Omar 2."
    assert int(exact[-1][1]) == 0
    assert int(moved[-1][1]) >= 100
    assert int(moved[-1][2]) < int(exact[-1][2]) // 2


def test_router_sends_a_conversation_to_where_it_is_cached(
    capsys: pytest.CaptureFixture[str],
) -> None:
    router.main()
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(words[4], int(words[6])) for words in said] == [
        ("gpu-0", 0),
        ("gpu-1", 0),
        ("gpu-0", 288),
        ("gpu-1", 288),
        ("gpu-0", 192),
    ]


def test_router_forgets_what_a_worker_has_no_room_for() -> None:
    worker = router.Worker("a", num_blocks=20)
    space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    first, second = (kvtrie.TokenSequence(range(at, at + 250), space) for at in (0, 1000))
    worker.send(first)
    worker.send(second)
    assert (worker.cached(second), worker.cached(first)) == (240, 64)
    idle = router.Worker("b", num_blocks=20)
    assert router.choose([worker, idle], second, tokens_per_request=64) is worker
    assert router.choose([worker, idle], second, tokens_per_request=128) is idle
    worker.index.check()


def test_template_lab_says_where_a_client_leaves_the_cache(
    capsys: pytest.CaptureFixture[str],
) -> None:
    template_lab.main(demo.model_path())
    said = capsys.readouterr().out
    assert "leaves the cache at token 8 (diverged, text)" in said
    assert "date, the time at the end of the question: " in said
    ours = next(line for line in said.splitlines() if line.startswith("our client  "))
    prompt, computed, with_kvtrie = map(int, ours.split()[2:])
    assert with_kvtrie < computed <= prompt


def test_a_gate_from_traffic_clears_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = gate_from_traffic.main(48, tmp_path)
    said = capsys.readouterr().out
    assert "refused: digests.log: the log has digests, and calibration needs token ids" in said
    assert "recorded: 48 sessions" in said
    assert [kind.name for kind in gate.measured[0].cleared(gate.thresholds)] == ["one cut"]
    assert "turn 2: 27 exact, 16 moved, 12 computed" in said
