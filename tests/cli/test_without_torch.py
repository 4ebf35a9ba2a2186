"""The extra `cli` has no torch: each command runs until it needs torch, then says so."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

# As in an environment of kvtrie[cli], which has transformers without torch.
PROGRAM = textwrap.dedent(
    """
    import sys

    ABSENT = {"torch"}

    class Refuse:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ABSENT:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in ABSENT:
        sys.modules[name] = None
    sys.meta_path.insert(0, Refuse())
    from kvtrie.cli import main
    main()
    """
)


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", PROGRAM, *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "args",
    [
        ("--help",),
        ("--version",),
        ("explain", "--help"),
        ("demo", "--help"),
        ("calibrate", "--help"),
        ("check-vllm", "--help"),
        ("inspect", "--help"),
        ("lab", "--help"),
        ("replay", "--help"),
    ],
    ids=" ".join,
)
def test_help_and_version_need_no_torch(args: tuple[str, ...]) -> None:
    done = run(*args)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_explain_needs_no_torch(tmp_path: Path) -> None:
    cached, prompt = tmp_path / "a", tmp_path / "b"
    cached.write_text(" ".join(map(str, range(64))), encoding="utf-8")
    prompt.write_text(" ".join(map(str, [*range(40), *range(90, 114)])), encoding="utf-8")
    done = run("explain", str(cached), str(prompt))
    assert (done.returncode, done.stderr) == (0, "")
    assert "diverged" in done.stdout


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("demo",), "the demo needs torch"),
        (("calibrate", "gqa"), "calibrate needs torch"),
    ],
    ids=["demo", "calibrate"],
)
def test_what_needs_torch_names_the_extra(
    args: tuple[str, ...], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    done = run(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"kvtrie: {named}: pip install 'kvtrie[cli,transformers]'\n"


@pytest.mark.parametrize("command", ["demo", "calibrate"])
def test_help_says_that_the_small_models_are_another_package(command: str) -> None:
    done = run(command, "--help")
    said = " ".join(done.stdout.replace("│", " ").split())
    assert done.returncode == 0
    assert "shipped model" not in said
    assert "model shipped" not in said
    assert "kvtrie-demo-models" in said
    assert "`make dist`" in said


@pytest.mark.parametrize("args", [("demo",), ("calibrate", "mla")], ids=["demo", "calibrate"])
def test_models_that_are_not_installed_are_one_sentence(args: tuple[str, ...]) -> None:
    code = (
        "import sys; sys.modules['kvtrie_demo_models'] = None; from kvtrie.cli import main; main()"
    )
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    name = {"demo": "demo"}.get(args[0], args[-1])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"kvtrie: the model {name!r} is in a package of its own, which no index has: in a checkout "
        "of kvtrie `make dist`, then `pip install dist/kvtrie_demo_models-*.whl`; or give the "
        "directory of another model\n"
    )
