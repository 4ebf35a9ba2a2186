"""`make test-vllm-newest` looks for a newer vLLM, and says what the start-up probe finds in it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tools import vllm_newest

if TYPE_CHECKING:
    from collections.abc import Callable

PYTHON = Path(sys.executable)
ANSWER = "vllm (0.34.1)\nAvailable versions: 0.34.1, 0.34.0, 0.33.0\n"
# A release in which a module that kvtrie imports from is another.
OTHER = '__version__ = "0.34.1"\nclass SamplingParams: ...\n'


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def answers(given: str, known: str = "0.33.0") -> None:
        run = vllm_newest._run

        def running(command: list[str]) -> str:
            if "index" in command:
                return given
            return known if command[1:2] == ["-c"] else run(command)

        monkeypatch.setattr(vllm_newest, "_run", running)

    return answers


def run(out: Path) -> int:
    return vllm_newest.main(["--python", str(PYTHON), "--out", str(out)])


@pytest.mark.parametrize("known", ["0.34.1", "0.34.1+cpu", "0.35.0"])
def test_none_is_newer(
    index: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path, known: str
) -> None:
    index(ANSWER, known)
    assert run(tmp_path) == 0
    assert "none is newer: the package index has 0.34.1" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_versions_are_compared_as_numbers() -> None:
    assert vllm_newest.key("0.100.0") > vllm_newest.key("0.33.12") > vllm_newest.key("0.33.2")


def test_a_newer_one_that_lacks_something_is_reported_by_name(
    index: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    index(ANSWER)
    package = tmp_path / "0.34.1" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(OTHER)
    assert run(tmp_path) == 1
    said = capsys.readouterr().out
    assert "has 0.34.1; 0.33.0 is tested" in said
    assert "vLLM 0.34.1 is not among the tested versions" in said
    assert "vllm.config" in said


def test_an_index_that_cannot_be_asked(
    index: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    index("")
    assert run(tmp_path) == 3
    assert "pip's answer has no versions" in capsys.readouterr().out


def test_a_release_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vllm_newest, "UV", tmp_path / "none")
    with pytest.raises(vllm_newest.NotFetchedError, match="none: No such file"):
        vllm_newest.fetch("0.34.1", tmp_path)
    assert not (tmp_path / "0.34.1").exists()
