"""The metadata of a release: versions agree, lower bounds are tested, workflows are pinned."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def table(path: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / path).read_text(encoding="utf-8"))


PROJECT = table("pyproject.toml")["project"]


def test_all_versions_agree() -> None:
    cargo = table("Cargo.toml")["workspace"]
    versions = {
        cargo["package"]["version"],
        *(
            one["version"]
            for name, one in cargo["dependencies"].items()
            if name.startswith("kvtrie") and isinstance(one, dict)
        ),
        PROJECT["version"],
        table("demo-models/pyproject.toml")["project"]["version"],
    }
    assert len(versions) == 1


def test_lower_bounds_are_the_versions_that_floors_pins() -> None:
    text = (ROOT / "constraints/floors.txt").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))
    bounds = [*PROJECT["dependencies"]]
    for extra in ("torch", "transformers", "cli"):
        bounds += PROJECT["optional-dependencies"][extra]
    bounds = [bound for bound in bounds if not bound.startswith("kvtrie[")]
    assert len(bounds) >= 8
    for bound in bounds:
        found = re.match(r"([a-z0-9-]+)>=([0-9.]+)", bound)
        assert found, bound
        name, least = found.groups()
        assert re.sub(r"(\.0)+$", "", pinned[name]) == re.sub(r"(\.0)+$", "", least), name


def test_the_extra_of_the_commands_is_without_torch() -> None:
    extra = PROJECT["optional-dependencies"]["cli"]
    wanted = {"typer", "rich", "transformers", "tokenizers", "jinja2"}
    assert {re.split(r"[\[>=]", one)[0] for one in extra} == wanted


def test_no_weights_are_in_the_package() -> None:
    assert not [*(ROOT / "python").rglob("*.safetensors")]
    models = ROOT / "demo-models/kvtrie_demo_models"
    assert {path.parent.name for path in models.rglob("*.safetensors")} == {
        *("demo", "gqa", "partial", "mla"),
    }
    assert (ROOT / "demo-models/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_are_pinned_have_least_permissions_and_say_that_none_has_run(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# Never run")
    assert "\npermissions: {}\n" in text
    for used in re.findall(r"uses: (\S+)", text):
        assert used.startswith("./") or re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", used), used
    assert text.count("persist-credentials: false") == text.count("uses: actions/checkout@")
    assert len(re.findall(r"^    permissions:$", text, re.MULTILINE)) == len(
        re.findall(r"^  [a-z]+:\n(?:    .*\n|\n)*?    (?:runs-on|uses):", text, re.MULTILINE)
    )


def test_there_are_workflows() -> None:
    assert {path.stem for path in WORKFLOWS} == {"ci", "release", "wheels"}
