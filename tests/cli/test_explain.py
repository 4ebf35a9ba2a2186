"""``kvtrie explain``: what it shows, in which form, and its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

import kvtrie
from kvtrie.cli.app import app

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from typer.testing import Result

    File = Callable[..., Path]

IDS = list(range(100, 140))


@pytest.fixture
def file(tmp_path: Path) -> File:
    """A function that writes a file: a list becomes JSON, text and bytes stay what they are."""

    def write(content: Any, name: str = "prompt") -> Path:
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def run(*args: Any, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["explain", *map(str, args)], input=stdin)


def document(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def assert_refused(result: Result, *named: str) -> None:
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("kvtrie: ")
    for text in named:
        assert text in line


@pytest.mark.parametrize(
    "spell",
    [
        json.dumps,
        lambda ids: " ".join(map(str, ids)),
        lambda ids: "\n".join(map(str, ids)) + "\n",
        lambda ids: ", ".join(map(str, ids)),
        lambda ids: "\n" + ",".join(map(str, ids)) + ",\n",
        # As some editors begin a file.
        lambda ids: "\ufeff" + json.dumps(ids),
    ],
    ids=["json", "spaces", "lines", "commas", "commas-and-lines", "byte-order-mark"],
)
def test_ids_in_any_spelling(file: File, spell: Callable[[list[int]], str]) -> None:
    other = [*IDS[:37], 7, 8, 9]
    cached, prompt = file(spell(IDS), "a"), file(spell(other), "b")
    assert document(run(cached, prompt, "--json"))["reason"] == "complete"
    why = document(run(cached, prompt, "--json", "--context", 2, "--block-size", 8))
    assert (why["reason"], why["position"], why["num_exact"]) == ("diverged", 37, 32)
    assert why["context"] == {"start": 35, "ours": [135, 136, 7, 8], "theirs": IDS[35:39]}
    assert why["kvtrie"] == kvtrie.__version__
    assert why["text"] is None


def test_every_line_for_people(file: File) -> None:
    prompt = [*IDS[:5], 1, 2, 3]
    result = run(file(IDS, "a"), file(prompt, "b"), "--block-size", 4, "--context", 3)
    assert result.exit_code == 0
    assert result.stdout == (
        "diverged at token 5: other tokens are cached after it\n"
        "  exact      4 of 8 tokens, 1 block of 4\n"
        "  cached     ... 102 103 104 | 105 106 107\n"
        "  prompt     ... 102 103 104 | 1 2 3\n"
        "  a plan     takes 5 tokens exactly, 0 approximately, and leaves 3 to compute\n"
    )


def test_complete_shows_no_two_sides(file: File) -> None:
    result = run(file(IDS, "a"), file(IDS[:36], "b"))
    assert result.stdout.startswith("complete at token 32: every whole block is cached\n")
    assert "\n  cached " not in result.stdout


def test_standard_input_is_either_prompt(file: File) -> None:
    path = file(IDS)
    for order in ((path, "-"), ("-", path)):
        assert document(run(*order, "--json", stdin=json.dumps(IDS)))["reason"] == "complete"


def test_colour_is_for_terminals_that_want_it(file: File) -> None:
    args = [str(file(IDS, "a")), str(file(IDS[:3] + [5] * 40, "b"))]
    command = [sys.executable, "-m", "kvtrie.cli", "explain", *args]
    bare = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    shown = {}
    for name, env in {
        "pipe": bare,
        "terminal": {**bare, "FORCE_COLOR": "1", "TERM": "xterm"},
        "no colour": {**bare, "FORCE_COLOR": "1", "TERM": "xterm", "NO_COLOR": "1"},
    }.items():
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        shown[name] = done.stdout
    assert "\x1b[" not in shown["pipe"]
    assert "\x1b[1;31mdiverged" in shown["terminal"]
    assert "\x1b[1;31m" not in shown["no colour"]
    assert "\x1b[31m" not in shown["no colour"]


def test_no_model_library_is_imported_without_a_tokenizer(file: File) -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from kvtrie.cli.app import app\n"
        "assert CliRunner().invoke(app, sys.argv[1:]).exit_code == 0\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    path = str(file(IDS))
    subprocess.run([sys.executable, "-c", code, "explain", path, path], check=True)


def test_text_needs_a_tokenizer_and_is_shown_as_text(file: File, model_dir: Path) -> None:
    cached, prompt = file("the cat sat here", "a"), file("the cat ran off!", "b")
    assert_refused(run(cached, prompt), str(cached), "--tokenizer DIR")
    options = ("--tokenizer", model_dir, "--block-size", 4)
    why = document(run(cached, prompt, *options, "--json"))
    assert (why["reason"], why["position"]) == ("diverged", 8)
    assert why["text"] == {"before": "the cat ", "ours": "ran off!", "theirs": "sat here"}
    shown = run(cached, prompt, *options).stdout
    assert "  cached     'the cat ' | 'sat here'\n  prompt     'the cat ' | 'ran off!'\n" in shown


def test_numbers_are_text_if_asked(file: File, model_dir: Path) -> None:
    path = file("12 34 56 78")
    options = ("--tokenizer", model_dir, "--block-size", 1, "--json")
    assert document(run(path, path, *options))["num_tokens"] == 4
    assert document(run(path, path, "--text", *options))["num_tokens"] == 11
    assert_refused(run(path, path, "--text"), "--tokenizer DIR")


def test_what_a_terminal_would_obey_is_escaped(file: File, model_dir: Path) -> None:
    cached, prompt = file("aaaa\x1b[31m[red]", "a"), file("aaaa\x9b[bold]!", "b")
    options = ("--tokenizer", model_dir, "--block-size", 2, "--context", 20)
    shown = run(cached, prompt, *options).stdout
    assert shown.isascii()
    assert "\x1b" not in shown
    assert "[red]" in shown


@pytest.fixture
def snapshot(file: File) -> Path:
    index = kvtrie.RadixIndex(64, 8)
    first = 0
    for model, salt, ids in (("m", "a", IDS), ("n", "a", IDS[:24]), ("m", "b", IDS[:8])):
        space = kvtrie.Namespace(model=model, salt=salt)
        count = len(ids) // 8
        seq = kvtrie.TokenSequence(ids, space)
        blocks = list(range(first, first + count))
        index.insert(seq, blocks, num_computed=len(ids), source=kvtrie.COMPUTED)
        first += count
    index.tag(
        kvtrie.TokenSequence(IDS, kvtrie.Namespace(model="m", salt="a")),
        [kvtrie.Span(0, 20, "system"), kvtrie.Span(20, 40, "[b]odd\x1b")],
    )
    return file(index.snapshot(), "cache.kv")


def test_a_prompt_against_a_snapshot(file: File, snapshot: Path) -> None:
    prompt = file([*IDS[:20], 5, 5, 5, 5], "b")
    which = ("--model", "m", "--salt", "a")
    why = document(run(prompt, "--snapshot", snapshot, *which, "--json"))
    assert (why["reason"], why["position"], why["block_size"]) == ("diverged", 20, 8)
    assert (why["kinds_before"], why["kinds"]) == (["system"], ["[b]odd\x1b"])
    shown = run(prompt, "--snapshot", snapshot, *which).stdout
    assert "  tagged     system | [b]odd\\x1b\n" in shown
    why = document(run(file(IDS), "--snapshot", snapshot, "--model", "n", "--json"))
    assert why["other_namespace"] == {"fields": ["model"], "num_tokens": 40}
    made = ("--model", "n", "--adapter", "lora", "--salt", "a")
    why = document(run(file(IDS), "--snapshot", snapshot, *made, "--json"))
    assert why["other_namespace"] == {"fields": ["model", "adapter"], "num_tokens": 40}


def test_tokens_out_of_scope_are_named_and_a_session_brings_them_in(file: File) -> None:
    index = kvtrie.RadixIndex(64, 8)
    space = kvtrie.Namespace(model="m", salt="a")
    cached = kvtrie.TokenSequence(IDS, space)
    index.insert(cached, range(5), num_computed=40, source=kvtrie.COMPUTED, session="chat-7")
    given = (file([7, *IDS[8:], 9]), "--snapshot", file(index.snapshot(), "cache.kv"))
    save = document(run(*given, "--json"))["would_save"]
    assert save["out_of_scope"] > 0
    said = (
        f"  scope      {save['out_of_scope']} of these are cached, but out of scope: neither in a "
        "block of the session, nor after the same first blocks\n"
    )
    assert said in run(*given).stdout
    assert said in run(*given, "--session", "chat-8").stdout
    own = (*given, "--session", "chat-7")
    assert "out of scope" not in run(*own).stdout
    found = document(run(*own, "--json"))["would_save"]
    assert (found["out_of_scope"], found["approximate"]) == (0, save["out_of_scope"])
    assert_refused(run(*given, "--session", ""), "session")


def test_a_namespace_is_named_where_there_are_several(file: File, snapshot: Path) -> None:
    asked = run(file(IDS), "--snapshot", snapshot)
    assert_refused(asked, "3 namespaces match, of the models m, n", "--salt")
    assert_refused(run(file(IDS), "--snapshot", snapshot, "--model", "m"), "2 namespaces match")
    assert_refused(run(file(IDS), "--snapshot", snapshot, "--rope", "x"), "no such namespace")
    empty = ("--model", "m", "--salt", "")
    assert_refused(run(file(IDS), "--snapshot", snapshot, *empty), "salt is empty")


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["text", "json"])
def test_bad_snapshots(file: File, snapshot: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    prompt = file(IDS)
    blob = snapshot.read_bytes()
    damaged = blob[:99] + bytes([blob[99] ^ 1]) + blob[100:]
    for path, named in (
        (tmp_path / "absent", "No such file"),
        (tmp_path, "directory"),
        (file(b"", "empty"), "snapshot"),
        (file(IDS, "ids"), "no snapshot of an index"),
        (file(blob[:-1], "short"), "announced"),
        (file(damaged, "damaged"), "checksum"),
    ):
        assert_refused(run(prompt, "--snapshot", path, *flags), str(path), named)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        pytest.param("", "it is empty", id="empty"),
        pytest.param(" \n", "no token", id="blank"),
        pytest.param([], "no token", id="empty-list"),
        pytest.param([1, -2], "number 1 is -2", id="negative"),
        pytest.param("1 4294967296", "number 1 is 4294967296", id="too-large"),
        pytest.param("9" * 5000, "digits", id="endless"),
        pytest.param([1, 2.5], "--tokenizer", id="floats-are-text"),
        pytest.param([True], "--tokenizer", id="bools-are-text"),
        pytest.param("[" * 100_000, "--tokenizer", id="nested"),
        pytest.param("[1, 2", "--tokenizer", id="broken-json"),
        pytest.param(b"\xff\xfe1", "byte 0 is not UTF-8", id="utf-16"),
    ],
)
def test_bad_prompts(file: File, content: Any, named: str) -> None:
    bad = file(content, "bad")
    assert_refused(run(file(IDS), bad), str(bad), named)
    assert_refused(run(bad, file(IDS), "--json"), str(bad), named)


def test_missing_prompts(file: File, tmp_path: Path) -> None:
    path = file(IDS)
    assert_refused(run(tmp_path / "absent", path), "absent", "No such file")
    assert_refused(run(path, tmp_path), "directory")


def test_arguments_that_contradict_each_other(
    file: File, snapshot: Path, model_dir: Path, tmp_path: Path
) -> None:
    path = file(IDS)
    assert_refused(run(path), "1 prompt given; give two")
    assert_refused(run(path, path, path), "3 prompts given; give two")
    assert_refused(run(path, path, "--snapshot", snapshot), "with --snapshot there is one")
    assert_refused(run(path, "--snapshot", snapshot, "--block-size", 8), "--block-size")
    assert_refused(
        run(path, path, "--session", "chat-7"), "--session names a session of a snapshot"
    )
    assert_refused(run(path, path, "--kv-dtype", "fp8"), "--kv-dtype names a namespace")
    assert_refused(run("-", "-", stdin="1"), "once")
    assert_refused(run(path, path, "--tokenizer", tmp_path), "no tokenizer.json")
    text = file("some text", "text")
    assert_refused(
        run(path, text, "--tokenizer", model_dir), "text", "token ids; give two of a kind"
    )


def test_tokenizer_that_is_not_there(file: File) -> None:
    broken = file("{}", "tokenizer.json")
    assert_refused(run(file(IDS), file(IDS), "--tokenizer", broken.parent), "tokenizer.json")


def test_help_has_the_line_breaks_of_the_terminal_alone() -> None:
    wide = {"COLUMNS": "300", "TERMINAL_WIDTH": "300"}
    shown = CliRunner().invoke(app, ["explain", "--help"], env=wide).stdout
    assert "or numbers separated by white space or commas) or of text, which needs" in shown


def test_help_and_usage_errors() -> None:
    assert "--snapshot" in CliRunner().invoke(app, ["explain", "--help"]).stdout
    assert run().exit_code == 2
    assert run("a", "b", "--context", -1).exit_code == 2
