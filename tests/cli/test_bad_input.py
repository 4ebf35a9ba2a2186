"""Bad input: one clear sentence on stderr, exit code 2, nothing on stdout, no traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from typer.testing import Result

    Run = Callable[..., Result]
    Process = Callable[..., subprocess.CompletedProcess[str]]
    Write = Callable[..., Path]

ASK = {"role": "user", "content": "a"}


def assert_one_sentence(code: int, out: str, err: str, *named: str) -> None:
    assert code == 2, err
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("kvtrie: ")
    for text in named:
        assert text in line


def assert_refused(result: Result, *named: str) -> None:
    assert_one_sentence(result.exit_code, result.stdout, result.stderr, *named)


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["tables", "json"])
@pytest.mark.parametrize(
    ("lines", "named"),
    [
        pytest.param([ASK, '{"role": "user", "content": "b'], ["line 2"], id="broken-line"),
        pytest.param([ASK, "", "nonsense"], ["line 3"], id="no-json"),
        pytest.param(["[1, 2]"], ["line 1"], id="no-object"),
        pytest.param([ASK, {"role": "wizard", "content": "b"}], ["line 2", "wizard"], id="role"),
        pytest.param([], ["no conversation"], id="empty"),
        pytest.param(["", "  "], ["no conversation"], id="blank"),
        pytest.param([{"messages": []}], ["line 1"], id="no-messages"),
        pytest.param([{"role": "user", "content": 5}], ["line 1"], id="content-number"),
        pytest.param(
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            ["line 1", "image_url"],
            id="content-image",
        ),
        pytest.param([{"role": "system", "content": "x"}], ["line 1"], id="nothing-to-answer"),
    ],
)
def test_bad_chat_files(
    run: Run, write: Write, lines: list[Any], named: list[str], flags: tuple[str, ...]
) -> None:
    chat = write(*lines)
    assert_refused(run(chat, *flags), chat.name, *named)


def test_chat_file_that_is_not_utf8(run: Run, tmp_path: Path) -> None:
    chat = tmp_path / "latin.jsonl"
    chat.write_bytes('{"role": "user", "content": "\xe9"}'.encode("latin-1"))
    assert_refused(run(chat), "latin.jsonl", "UTF-8")


def test_missing_chat_file(run: Run, tmp_path: Path) -> None:
    assert_refused(run(tmp_path / "absent.jsonl"), "absent.jsonl", "No such file")


def test_chat_file_that_is_a_directory(run: Run, tmp_path: Path) -> None:
    assert_refused(run(tmp_path), "directory")


def test_missing_model_directory(run: Run, talk: Path, tmp_path: Path) -> None:
    assert_refused(run(talk, model=tmp_path / "absent"), "absent", "not downloaded")


def test_model_directory_without_config(run: Run, talk: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert_refused(run(talk, model=empty), "empty", "no config.json")


@pytest.fixture
def broken(model_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    def spoil(*, remove: str | None = None, text: str | None = None, **fields: Any) -> Path:
        copy = tmp_path / "copy"
        shutil.copytree(model_dir, copy)
        if remove is not None:
            (copy / remove).unlink()
        if text is not None:
            (copy / "config.json").write_text(text)
        if fields:
            config = json.loads((copy / "config.json").read_text())
            (copy / "config.json").write_text(json.dumps({**config, **fields}))
        return copy

    return spoil


@pytest.mark.parametrize(
    ("how", "named"),
    [
        pytest.param({"text": "{"}, ["cannot load the model"], id="config-broken"),
        pytest.param({"text": "{}"}, ["cannot load the model"], id="config-empty"),
        pytest.param({"remove": "model.safetensors"}, ["cannot load"], id="no-weights"),
        pytest.param({"remove": "tokenizer.json"}, ["cannot load"], id="no-tokenizer"),
        pytest.param({"remove": "chat_template.jinja"}, ["no chat template"], id="no-template"),
        pytest.param({"model_type": "unheard-of"}, ["unheard-of"], id="unknown-model"),
        pytest.param({"hidden_size": 64}, ["cannot load the model"], id="wrong-size"),
    ],
)
def test_bad_model_directories(
    run: Run, talk: Path, broken: Callable[..., Path], how: dict[str, Any], named: list[str]
) -> None:
    assert_refused(run(talk, model=broken(**how)), *named)


def test_template_that_refuses_a_role(run: Run, talk: Path, broken: Callable[..., Path]) -> None:
    model = broken()
    (model / "chat_template.jinja").write_text("{{ raise_exception('No system role here.') }}")
    assert_refused(run(talk, model=model), "No system role here.")


def test_pool_too_small_for_one_request(run: Run, talk: Path) -> None:
    assert_refused(run(talk, "--num-blocks", 2), "blocks of 16 tokens", "the pool has 2")


def test_pool_that_a_later_turn_outgrows_shows_no_half_table(run: Run, talk: Path) -> None:
    result = run(talk, "--num-blocks", 5)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the pool has 5" in result.stderr.splitlines()[-1]


def test_pool_that_does_not_fit_into_memory(run: Run, talk: Path) -> None:
    assert_refused(run(talk, "--num-blocks", 2**31, "--block-size", 4096), "2147483648")


def test_conversation_longer_than_the_context(run: Run, write: Write) -> None:
    assert_refused(run(write({"role": "user", "content": "a" * 2000})), "the model takes 1024")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--device", "nowhere"), "nowhere"),
        (("--dtype", "float7"), "dtype 'float7' is not an element type of torch"),
        (("--dtype", "int8"), "int8"),
    ],
)
def test_bad_device_and_dtype(run: Run, talk: Path, options: tuple[str, ...], named: str) -> None:
    assert_refused(run(talk, *options), named)


@pytest.mark.parametrize(
    "options",
    [
        ("--block-size", 0),
        ("--block-size", 4097),
        ("--num-blocks", -1),
        ("--repeats", 0),
        ("--threads", 0),
        ("--num-blocks", "many"),
        ("--unheard-of",),
    ],
)
def test_bad_options(run: Run, talk: Path, options: tuple[Any, ...]) -> None:
    result = run(talk, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert all(str(one) in result.stderr for one in options)
    assert "Traceback" not in result.stderr


def test_processes_say_the_same(kvtrie_process: Process, write: Write, tmp_path: Path) -> None:
    chat = write(ASK, "{")
    done = kvtrie_process("demo", chat, "--json")
    assert_one_sentence(done.returncode, done.stdout, done.stderr, "chat.jsonl", "line 2")
    done = kvtrie_process("demo", write(ASK), "--model", tmp_path)
    assert_one_sentence(done.returncode, done.stdout, done.stderr, "no config.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chat.jsonl"]


def without(*modules: str) -> str:
    return textwrap.dedent(
        f"""
        import sys
        for name in {modules!r}:
            sys.modules[name] = None
        from kvtrie.cli import main
        main()
        """
    )


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        (("typer",), ["typer", "pip install 'kvtrie[cli]'"]),
        (("rich",), ["pip install 'kvtrie["]),
        (("torch",), ["torch", "pip install 'kvtrie[cli,transformers]'"]),
        (("transformers",), ["transformers", "pip install 'kvtrie[cli,transformers]'"]),
        (("kvtrie_demo_models",), ["make dist", "pip install dist/kvtrie_demo_models-*.whl"]),
    ],
)
def test_missing_extra_is_one_sentence(modules: tuple[str, ...], named: list[str]) -> None:
    command = [sys.executable, "-c", without(*modules), "demo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert_one_sentence(done.returncode, done.stdout, done.stderr, *named)
