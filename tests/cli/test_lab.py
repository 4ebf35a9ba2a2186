"""``kvtrie lab``: what it prints and writes, and bad input."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from tests.cli.test_without_torch import run as run_without_torch
from tests.tags.templates import QWEN3, tokenizer_of
from typer.testing import CliRunner

from kvtrie.cli.app import app

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

TALK = [
    {"role": "user", "content": "what does the user ask"},
    {"role": "assistant", "content": "it looks <b>up</b>", "reasoning_content": "the tool & then"},
    {"role": "user", "content": "and then"},
    {"role": "assistant", "content": "it answers"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer_of("qwen3", QWEN3).save_pretrained(path)
    return path


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    path = tmp_path / "talk.jsonl"
    path.write_text("\n".join(map(json.dumps, TALK)), encoding="utf-8")
    return path


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["lab", *map(str, args)])


class Page(HTMLParser):
    """Tags and references of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str | None] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta", "br"}:
            self.open.append(tag)
        self.references += [value for name, value in attrs if name in {"src", "href"}]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_built_in_conversations(folder: Path) -> None:
    done = run(folder)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("chat format: qwen3; reasoning dropped at: next user message\n")
    for name in ("chat", "reasoning", "agent", "pruned", "retrieval", "date", "date last"):
        assert re.search(rf"^{name} +default ", done.stdout, re.MULTILINE)
    # Of each difference, what the index says of it.
    reasons = re.findall(r"^  why     (\w+)$", done.stdout, re.MULTILINE)
    assert len(reasons) == done.stdout.count("differs at token") > 3
    assert "diverged" in reasons
    saved = (
        r"^reasoning: with preserve=True, \d+ fewer tokens .* prompts are [1-9]\d* tokens longer$"
    )
    assert re.search(saved, done.stdout, re.MULTILINE)


def test_every_turn_is_in_the_text(folder: Path) -> None:
    text = run(folder).stdout
    document: dict[str, Any] = json.loads(run(folder, "--json").stdout)
    (row,) = [one for one in document["rows"] if one["chat"] == "reasoning" and not one["switch"]]
    begin = text.index("Turn by turn")
    shown = text[begin:][text[begin:].index("\nreasoning ") :].splitlines()[1:5]
    for at, (line, turn) in enumerate(zip(shown, row["measured"]["turns"], strict=True), 1):
        movable = max(0, turn["reused"] - turn["prefix"])
        computed = turn["prompt"] - turn["prefix"]
        assert (turn["movable"], turn["computed"]) == (movable, computed)
        numbers = [at, turn["prompt"], turn["prefix"], movable, computed]
        assert re.findall(r"\d+", line)[:5] == list(map(str, numbers))
        if turn["divergence"]:
            where = f"token {turn['divergence']['position']}: the template dropped reasoning"
            assert line.rstrip().endswith(where)


def test_prompts_that_a_switch_makes_shorter(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "brief.jinja"
    template.write_text(
        QWEN3.replace("~ m.content ~", "~ (m.content[:9] if brief else m.content) ~"),
        encoding="utf-8",
    )
    done = run(folder, "--chat-template", template)
    saved = r"^pruned: with brief=True, .* prompts are [1-9]\d* tokens shorter$"
    assert re.search(saved, done.stdout, re.MULTILINE)


def test_own_conversation_as_json(folder: Path, talk: Path) -> None:
    done = run(folder, talk, "--json", "--block-size", "4", "--min-run", "8")
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    assert (document["format"], document["block_size"]) == ("qwen3", 4)
    turns = document["rows"][0]["measured"]["turns"]
    assert [turn["divergence"] and turn["divergence"]["cause"] for turn in turns] == [
        None,
        "reasoning",
    ]
    assert turns[1]["divergence"]["cached"].startswith("<think>")


def test_an_agent_whose_replies_are_all_calls_is_measured(folder: Path, tmp_path: Path) -> None:
    """Regression: it was refused, as without a message to reply to."""
    call = {"type": "function", "function": {"name": "read", "arguments": {"path": "a"}}}
    step = {"role": "assistant", "content": "", "reasoning_content": "then", "tool_calls": [call]}
    result = {"role": "tool", "content": "what the tool says " * 4}
    messages = [TALK[0], step, result, step, result, step]
    chat = tmp_path / "agent.jsonl"
    chat.write_text(json.dumps({"messages": messages}), encoding="utf-8")
    done = run(folder, chat, "--json")
    assert done.exit_code == 0, done.stderr
    row = next(row for row in json.loads(done.stdout)["rows"] if not row["switch"])
    prompts = [turn["prompt"] for turn in row["measured"]["turns"]]
    assert len(prompts) == 3
    assert prompts == sorted(set(prompts))
    assert row["measured"]["turns"][2]["prefix"] > prompts[0]


def test_own_conversation_with_the_ids_that_an_engine_returned(
    folder: Path, talk: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in talk.read_text(encoding="utf-8").splitlines()]
    reply = next(one for one in rows if one["role"] == "assistant")
    reply["token_ids"] = [7, 8, 9]
    own = tmp_path / "own.jsonl"
    own.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    done = run(folder, own, "--json", "--block-size", "4", "--min-run", "8")
    assert done.exit_code == 0, done.output
    turns = json.loads(done.stdout)["rows"][0]["measured"]["turns"]
    assert turns[0]["reply"] == 3


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([7, 10**9], "1000000000 is no id of the tokenizer, which has [0-9]+ tokens"),
        ([7, -2], "-2 is no token id: a whole number from 0 to 4294967295"),
    ],
)
@pytest.mark.parametrize("is_whole", [False, True])
def test_the_first_error_about_an_id_is_the_line_of_the_file(
    ids: list[int], said: str, *, is_whole: bool, folder: Path, tmp_path: Path
) -> None:
    rows: list[Any] = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two.", "token_ids": ids},
    ]
    lines = [json.dumps({"messages": rows})] if is_whole else ["", *map(json.dumps, rows)]
    own = tmp_path / "own.jsonl"
    own.write_text("\n".join(lines), encoding="utf-8")
    done = run(folder, own)
    assert done.exit_code == 2
    where = "line 1, message 2" if is_whole else "line 3"
    assert re.search(f"^kvtrie: {re.escape(str(own))}, {where}: {said}", done.stderr), done.stderr


def test_page_is_complete_and_shows_text_as_text(folder: Path, talk: Path, tmp_path: Path) -> None:
    target = tmp_path / "lab.html"
    done = run(folder, talk, "--html", target, "--block-size", "4")
    assert done.exit_code == 0, done.output
    text = target.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.open
    assert not page.references
    assert "<script" not in text
    assert "<think>\nthe tool & then" in page.text
    assert "<b>up</b>" in page.text
    # Why, as the index explains it.
    document: dict[str, Any] = json.loads(run(folder, talk, "--json", "--block-size", "4").stdout)
    found = document["rows"][0]["measured"]["turns"][1]["divergence"]["reason"]
    assert re.search(rf"the template dropped reasoning\s+{found}\s", page.text)
    assert [one.name for one in tmp_path.iterdir()] == ["talk.jsonl", "lab.html"] or {
        one.name for one in tmp_path.iterdir()
    } == {"talk.jsonl", "lab.html"}


def test_no_torch_is_needed(folder: Path, talk: Path) -> None:
    done = run_without_torch("lab", str(folder), str(talk))
    assert done.returncode == 0, done.stderr
    # Nothing but the progress: no warning of a library.
    assert all(re.match(r"\d+/\d+ \w", line) for line in done.stderr.splitlines())
    assert "the template dropped reasoning" in done.stdout


def test_the_tokenizer_may_be_named_by_its_file(folder: Path, talk: Path) -> None:
    by_folder = run(folder, talk)
    by_file = run(folder / "tokenizer.json", talk)
    assert by_file.exit_code == 0, by_file.output
    assert by_file.stdout == by_folder.stdout


def test_rows_that_are_almost_as_by_default_are_counted(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "mode.jinja"
    template.write_text("{{ 'so ' if mode == 'deep' else '' }}" + QWEN3, encoding="utf-8")
    given = ("--chat-template", template, "--set", "preserve=true")
    done = run(folder, *given)
    document: dict[str, Any] = json.loads(run(folder, *given, "--json").stdout)
    default = {row["chat"]: row for row in document["rows"] if not row["switch"]}

    def computed(row: dict[str, Any]) -> int:
        return sum(turn["prompt"] - turn["prefix"] for turn in row["measured"]["turns"])

    near = [
        row
        for row in document["rows"]
        if row["switch"] and abs(computed(row) - (by := computed(default[row["chat"]]))) < by / 100
    ]
    assert f"Not shown: {len(near)} rows in which the computed tokens differ by" in done.stdout
    assert len(re.findall(r"^\w[\w ]+ +mode=deep", done.stdout, re.MULTILINE)) == (
        len(document["rows"]) - len(default) - len(near)
    )
    assert near


def test_another_template_and_arguments(folder: Path, talk: Path, tmp_path: Path) -> None:
    template = tmp_path / "kept.jinja"
    template.write_text(QWEN3.replace("loop.index0 > ns.last", "true"), encoding="utf-8")
    kept = run(folder, talk, "--chat-template", template)
    assert "reasoning dropped at: never" in kept.stdout
    asked = run(folder, talk, "--set", "preserve=true")
    assert "reasoning dropped at: never" in asked.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere"], "kvtrie: nowhere: not a directory (tokenizers are not downloaded)"),
        (["."], "kvtrie: .: no tokenizer can be loaded: it has no tokenizer.json\n"),
        (["{folder}", "nothing.jsonl"], "kvtrie: nothing.jsonl: No such file or directory"),
        (["{folder}", "--set", "x"], "kvtrie: --set 'x' is not NAME=VALUE"),
        (["{folder}", "--set", "x=y"], "kvtrie: --set x: 'y' is not JSON; text is written as"),
        (["{folder}", "--set", "x=False"], "kvtrie: --set x: 'False' is not JSON; write x=false\n"),
        (["{folder}", "--chat-template", "none"], "kvtrie: none: No such file or directory"),
        (["{folder}", "--chat-template", "blank"], "kvtrie: blank: the chat template is empty\n"),
        (
            ["{folder}", "--chat-template", "bad.jinja"],
            "kvtrie: bad.jinja: the template does not render 'chat': line 2 of the template: no\n",
        ),
        (
            ["{folder}", "--chat-template", "syntax.jinja"],
            "kvtrie: syntax.jinja: the template does not render 'chat': line 3 of the template: ",
        ),
        (["{folder}", "bad.jsonl"], "kvtrie: bad.jsonl, line 1: not JSON"),
    ],
)
def test_bad_input_is_one_sentence(
    args: list[str], said: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jinja").write_text("\n{{ raise_exception('no') }}", encoding="utf-8")
    (tmp_path / "syntax.jinja").write_text("\n\n{% if %}", encoding="utf-8")
    (tmp_path / "bad.jsonl").write_text("{", encoding="utf-8")
    (tmp_path / "blank").write_text("\n", encoding="utf-8")
    before = set(tmp_path.iterdir())
    done = run(*(one.format(folder=folder) for one in args), "--html", "out.html")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
    assert set(tmp_path.iterdir()) == before


def test_a_page_that_cannot_be_written_leaves_nothing(folder: Path, talk: Path) -> None:
    done = run(folder, talk, "--html", talk.parent / "no" / "lab.html")
    assert done.exit_code == 3
    assert "cannot write" in done.stderr
    assert list(talk.parent.iterdir()) == [talk]
    assert run(folder, talk, "--html", talk.parent).exit_code == 3


def test_what_is_nested_too_deeply_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    deep = tmp_path / "deep.jinja"
    deep.write_text("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")
    for more in (("--chat-template", deep), ("--set", "x=" + "[" * 60_000)):
        done = run(folder, *more)
        assert done.exit_code == 2, done.output
        (line,) = done.stderr.splitlines()
        assert line.startswith("kvtrie: ")


def test_reasoning_under_the_names_of_engines_is_reasoning(folder: Path, tmp_path: Path) -> None:
    """Dropped reasoning in ``reasoning`` or ``thinking`` was reported as changed text."""
    long = "because the tool looks it up and the user asks again " * 4
    found = []
    for name in ("reasoning_content", "reasoning", "thinking"):
        rows = [TALK[0], {"role": "assistant", "content": "yes", name: long}, *TALK[2:]]
        path = tmp_path / "names.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        done = run(folder, path, "--json")
        assert done.exit_code == 0, done.output
        found.append(json.loads(done.stdout))
    assert found[0]["rows"][0]["measured"]["turns"][1]["divergence"]["cause"] == "reasoning"
    assert found[0]["savings"]
    assert found[1:] == found[:1] * 2


OBEYED = "\x1b[31m\x1b]0;title\x07\u202e"


def test_texts_of_a_template_do_not_reach_the_terminal(folder: Path, tmp_path: Path) -> None:
    """A switch's value and a refusal are the template's words, and were printed as they are."""
    template = tmp_path / "of_others.jinja"
    refusal = f"{{{{ raise_exception('{OBEYED}') }}}}"
    template.write_text(f"{{%- if mode == '{OBEYED}' -%}}changed{{%- endif -%}}{QWEN3}")
    shown = run(folder, "--chat-template", template)
    assert shown.exit_code == 0, shown.stderr
    assert "mode=\\x1b[31m\\x1b]0;title\\x07\\u202e" in shown.stdout
    for one in "\x1b\x07\u202e":
        assert one not in shown.stdout
    template.write_text(refusal)
    found = run(folder, "--chat-template", template)
    assert found.exit_code == 2
    assert "\\x1b[31m" in found.stderr
    assert "\x1b" not in found.stderr
