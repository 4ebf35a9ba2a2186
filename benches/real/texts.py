"""Real English text: the documentation of pinned packages, by SHA-256.

uv installs the packages of constraints/texts.txt into a temporary folder, refusing any other file,
and the readme in each package's METADATA is kept under target/texts. `benches/real/texts.sha256`
has the digest of each; another file is refused. Fetching takes seconds and 8 MB, once.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ROOT / "constraints" / "texts.txt"
DIGESTS: Final = ROOT / "benches" / "real" / "texts.sha256"
FOLDER: Final = ROOT / "target" / "texts"
UV: Final = Path(sys.executable).parent / "uv"

PASSAGE_WORDS: Final = 70
"""Words in a passage; a paragraph is not split, so a passage may have half as many more."""
MOST_WORDS: Final = 110

# Markup, code and lists of names are no prose.
_NOT_PROSE: Final = re.compile(r"https?:|\]\(|::|[|<>{}=]|>>>|\.\. ")
_LINK: Final = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_LEAST_LETTERS: Final = 0.93


class TextError(Exception):
    """The text cannot be had, or is not the recorded one; one sentence."""


def names() -> list[str]:
    """The packages, in the order of the list."""
    lines = PACKAGES.read_text(encoding="utf-8").splitlines()
    return [line.partition("==")[0] for line in lines if re.match(r"[a-z0-9-]+==", line)]


def recorded() -> dict[str, str]:
    """The SHA-256 of each file."""
    lines = DIGESTS.read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def fetch(folder: Path = FOLDER) -> list[Path]:
    """The files, fetched if one is missing or another one, each with its licence printed.

    Raises:
        TextError: uv cannot get them, or a file is not the recorded one.
    """
    wanted = recorded()
    if set(wanted) != {f"{name}.txt" for name in names()}:
        msg = f"{DIGESTS.name} does not have one line for each package of {PACKAGES.name}"
        raise TextError(msg)
    paths = [folder / name for name in wanted]
    if any(digest(path) != wanted[path.name] for path in paths):
        install(folder)
    for path in paths:
        if digest(path) != wanted[path.name]:
            msg = f"{path.name} has SHA-256 {digest(path)}, not {wanted[path.name]}"
            raise TextError(msg)
        print(f"texts: {path.stem}; licence: {licence(path.read_text(encoding='utf-8'))}")
    return paths


def install(folder: Path) -> None:
    """Write the METADATA of every package into the folder.

    Raises:
        TextError: uv cannot install the packages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as work:
        command: list[str | Path] = [UV, "pip", "install", "--quiet", "--python", sys.executable]
        command += ["--require-hashes", "--no-build", "--no-deps", "--target", work]
        command += ["--requirements", PACKAGES]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - ours
        if done.returncode:
            said = " ".join(done.stderr.split())
            msg = f"the packages of {PACKAGES.name} cannot be fetched: {said}"
            raise TextError(msg)
        for name in names():
            found = [
                one
                for one in Path(work).glob("*.dist-info/METADATA")
                if _normal(one.parent.name.partition("-")[0]) == name
            ]
            (folder / f"{name}.txt").write_bytes(found[0].read_bytes())


def digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def licence(metadata: str) -> str:
    """The licence that a package's METADATA names, by expression, field or classifier."""
    head = metadata.partition("\n\n")[0]
    for pattern in (r"License-Expression: (.+)", r"License: (.+)", r"Classifier: License :: (.+)"):
        found = re.search(rf"^{pattern}$", head, flags=re.MULTILINE)
        if found:
            return found[1].removeprefix("OSI Approved :: ")
    return "not named"


def prose(metadata: str) -> list[str]:
    """The paragraphs of plain English in a package's readme."""
    body = metadata.partition("\n\n")[2]
    found = []
    for part in re.split(r"\n\s*\n", body):
        text = _LINK.sub(r"\1", " ".join(part.split()))
        text = re.sub(r"`+([^`]*)`+_*", r"\1", text).replace("**", "").strip("*#- ")
        plain = sum(letter.isascii() and (letter.isalpha() or letter in " ,.") for letter in text)
        if len(text) >= 60 and plain / len(text) >= _LEAST_LETTERS and not _NOT_PROSE.search(text):
            found.append(text)
    return found


def passages(paths: list[Path]) -> list[str]:
    """Passages of about ``PASSAGE_WORDS`` words, each of one package, no two alike."""
    found: dict[str, None] = {}
    for path in paths:
        words: list[str] = []
        for paragraph in prose(path.read_text(encoding="utf-8")):
            words += paragraph.split()
            if len(words) >= PASSAGE_WORDS:
                found[" ".join(words[:MOST_WORDS])] = None
                words = []
    return list(found)


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")
