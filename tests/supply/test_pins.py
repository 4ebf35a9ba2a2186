"""The Makefile's recipes install what has the hash that a list names, and nothing else."""

from __future__ import annotations

import hashlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).parent / "uv"
LISTS = sorted((ROOT / "constraints").glob("*.txt")) + sorted(
    (ROOT / "benches/peers/requirements").glob("*.txt")
)
ANOTHER = "0" * 64

MAKE = shutil.which("make")
needs_make = pytest.mark.skipif(
    MAKE is None or not UV.exists(), reason="needs make, and uv next to this Python"
)


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.name)
def test_a_list_pins_and_hashes_everything_and_names_no_index(path: Path) -> None:
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    entries = text.replace(" \\\n", "").splitlines()
    assert entries
    for entry in entries:
        if entry.startswith("-r "):
            assert (path.parent / entry[3:]) in LISTS
            continue
        assert re.fullmatch(
            r"[a-z0-9-]+==[\w.+!]+( ; [\w .'!<>=()]+)?(    --hash=sha256:[0-9a-f]{64})+", entry
        ), entry[:100]


def test_the_oldest_packages_are_those_of_every_extra_that_is_developed() -> None:
    """The floors of an extra that the list does not know were never tried."""
    sources = runpy.run_path(str(ROOT / "tools/pins.py"))["SOURCES"]["constraints/floors.txt"]
    known = {name for flag, name in pairwise(sources) if flag == "--extra"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    (own,) = [one for one in extras["dev"] if one.startswith("kvtrie[")]
    assert known == set(own.removeprefix("kvtrie[").removesuffix("]").split(","))
    pins = (ROOT / "constraints/floors.txt").read_text(encoding="utf-8")
    for name in sorted(known):
        for one in extras[name]:
            if not one.startswith("kvtrie["):
                package = re.match(r"[\w.-]+", one)
                assert package is not None
                assert re.search(rf"^{package[0].lower()}==", pins, re.MULTILINE), one


@dataclass(frozen=True)
class Recipe:
    """A rule of the Makefile that installs what a list names."""

    target: str
    path: str
    package: str = "tiny"
    env: str = "env"
    includes: bool = False

    def make(self, folder: Path) -> subprocess.CompletedProcess[str]:
        settings = [f"PYTHON={sys.executable}"]
        if self.target != "env/.python":
            settings += [f"UV={UV}", f"PY={sys.executable}", "-o", ".venv/.packages"]
        if self.path == "constraints/dev.txt":
            settings += [f"PY={folder}/env/bin/python", "-o", "env/.python"]
        if self.env == "env":
            settings += ["VENV=env"]
        environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("MAKE", "MFLAGS"))
        }
        wheels = str(folder / "wheels")
        return subprocess.run(
            [MAKE or "", "-f", ROOT / "Makefile", *settings, "-o", "check-tools", self.target],
            cwd=folder,
            env=environment
            | {"UV_OFFLINE": "1", "UV_NO_INDEX": "1", "UV_FIND_LINKS": wheels}
            | {
                "PIP_NO_INDEX": "1",
                "PIP_FIND_LINKS": wheels,
                "UV_CACHE_DIR": str(folder / "cache"),
            },
            capture_output=True,
            text=True,
            check=False,
        )

    def write(self, folder: Path, *entries: str) -> None:
        path = folder / self.path
        path.parent.mkdir(parents=True)
        path.write_text("".join(f"{entry}\n" for entry in entries), encoding="utf-8")
        if self.path == "constraints/dev.txt":
            (folder / "pyproject.toml").write_text(
                '[project]\nname = "project"\nversion = "1"\n'
                f'optional-dependencies = {{ dev = ["{self.package}"] }}\n',
                encoding="utf-8",
            )
            subprocess.run(
                [UV, "venv", "-q", "--python", sys.executable, folder / "env"], check=True
            )
        if self.includes:
            (path.parent / "vllm-shared.txt").write_text("", encoding="utf-8")

    def installed(self, folder: Path) -> bool:
        return any(
            (folder / self.env).glob(f"lib/python*/site-packages/{self.package}-*.dist-info")
        )


RECIPES = [
    Recipe("env/.python", "constraints/bootstrap.txt"),
    Recipe("env/.packages", "constraints/dev.txt"),
    Recipe(".venv-peers/x/.packages", "benches/peers/requirements/x.txt", env=".venv-peers/x"),
    Recipe(
        ".venv-vllm/.packages",
        "benches/peers/requirements/vllm.txt",
        env=".venv-vllm",
        includes=True,
    ),
    Recipe(
        ".venv-vllm-scheduler/.packages",
        "benches/peers/requirements/vllm-scheduler.txt",
        env=".venv-vllm-scheduler",
        includes=True,
    ),
    *(
        Recipe(
            f".venv-{name}/.packages",
            f"benches/peers/requirements/{name}.txt",
            env=f".venv-{name}",
        )
        for name in ("routers", "ray")
    ),
    *(
        Recipe(
            f"target/tools/{name}/.packages", f"constraints/{name}.txt", env=f"target/tools/{name}"
        )
        for name in ("audit", "dist", "workflows")
    ),
    Recipe("target/test-floors/.packages", "constraints/floors.txt", env="target/test-floors"),
]
recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.path)
# uv's recipes share one command; the first one makes a whole environment, which takes a while.
uv_recipes = pytest.mark.parametrize("recipe", RECIPES[1:], ids=lambda recipe: recipe.path)


def wheel(folder: Path, name: str = "tiny", *requires: str) -> str:
    (folder / "wheels").mkdir(exist_ok=True)
    path = folder / "wheels" / f"{name}-1.0-py3-none-any.whl"
    about = f"{name}-1.0.dist-info"
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}"
        )
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(
            f"{about}/RECORD",
            f"{name}.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n",
        )
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pinned(digest: str, name: str = "tiny") -> str:
    return f"{name}==1.0 --hash=sha256:{digest}"


@needs_make
@recipes
def test_a_file_with_the_hash_of_the_list_is_installed(recipe: Recipe, tmp_path: Path) -> None:
    recipe.write(tmp_path, pinned(wheel(tmp_path)))
    done = recipe.make(tmp_path)
    assert done.returncode == 0, done.stderr
    assert recipe.installed(tmp_path)


@needs_make
@recipes
def test_a_changed_hash_stops_an_install(recipe: Recipe, tmp_path: Path) -> None:
    wheel(tmp_path)
    recipe.write(tmp_path, pinned(ANOTHER))
    done = recipe.make(tmp_path)
    assert done.returncode != 0
    assert re.search("hash mismatch|do not match the hashes", done.stderr, re.IGNORECASE)
    assert not recipe.installed(tmp_path)


@needs_make
@recipes
def test_a_package_without_a_hash_stops_an_install(recipe: Recipe, tmp_path: Path) -> None:
    wheel(tmp_path)
    recipe.write(tmp_path, "tiny==1.0")
    done = recipe.make(tmp_path)
    assert done.returncode != 0
    assert "hash" in done.stderr.lower()
    assert not recipe.installed(tmp_path)


@needs_make
@uv_recipes
def test_a_source_distribution_is_not_built(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    path = tmp_path / "wheels" / "tiny-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        text = b"Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"
        member = tarfile.TarInfo("tiny-1.0/PKG-INFO")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    recipe.write(tmp_path, pinned(hashlib.sha256(path.read_bytes()).hexdigest()))
    done = recipe.make(tmp_path)
    assert done.returncode != 0
    assert re.search("no usable wheels", done.stderr)
    assert not recipe.installed(tmp_path)


@needs_make
def test_a_dependency_that_no_list_names_stops_an_install(tmp_path: Path) -> None:
    recipe = RECIPES[1]
    wheel(tmp_path, "other")
    recipe.write(tmp_path, pinned(wheel(tmp_path, "tiny", "other")))
    done = recipe.make(tmp_path)
    assert done.returncode != 0
    assert "no trusted hash was provided for: `other`" in done.stderr
    assert not recipe.installed(tmp_path)
