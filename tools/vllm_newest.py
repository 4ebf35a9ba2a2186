"""Looks for a vLLM release newer than the tested one, and says what the start-up probe finds in it.

    python -m tools.vllm_newest --python ENV/bin/python [--out target/vllm-newest]

pip asks the package index for the newest release. If it is newer than the vLLM of ENV, uv puts it,
without what it depends on, into a folder of its own; ENV's Python imports it from there, with the
packages of ENV, and compares with it all that kvtrie touches.

Exit codes: 0 there is none newer, or it has everything; 1 the probe refuses it; 2 wrong arguments;
3 the index cannot be asked, or the release cannot be fetched.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
UV: Final = Path(sys.executable).parent / "uv"
PACKAGE: Final = "vllm"

_VERSION: Final = "from importlib.metadata import version; print(version('vllm'))"
_PROBE: Final = """
import sys
from kvtrie.integrations.vllm import _check
try:
    print(_check.probed())
except ValueError as error:
    print(error)
    sys.exit(1)
"""


class NotFetchedError(Exception):
    """The index, the environment or the release cannot be had; the text is one sentence."""


def key(version: str) -> tuple[int, ...]:
    """What a release of vLLM is sorted by."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def available() -> str:
    """The newest release on the package index, as pip finds it.

    Raises:
        NotFetchedError: pip has no answer.
    """
    done = _run([sys.executable, "-m", "pip", "index", "versions", PACKAGE])
    found = re.search(r"^Available versions: ([^,\s]+)", done, re.MULTILINE)
    if found is None:
        msg = f"pip's answer has no versions: {done[:200]!r}"
        raise NotFetchedError(msg)
    return found[1]


def tested(python: Path) -> str:
    """The vLLM of an environment.

    Raises:
        NotFetchedError: There is none.
    """
    return _run([str(python), "-c", _VERSION]).strip()


def fetch(version: str, out: Path) -> Path:
    """Put a release into a folder of its own; one that is there already is left as it is.

    Raises:
        NotFetchedError: It cannot be fetched.
    """
    site = out / version
    if not (site / PACKAGE).is_dir():
        partial = out / f"{version}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        given = ["--no-deps", "--only-binary", ":all:", "--target", str(partial)]
        _run([str(UV), "pip", "install", "--quiet", *given, f"{PACKAGE}=={version}"])
        partial.rename(site)
    return site


def probe(python: Path, site: Path) -> tuple[bool, str]:
    """Whether the vLLM in a folder has what kvtrie touches, and what the probe says."""
    before = os.environ.get("PYTHONPATH")
    paths = [str(site), *([before] if before else [])]
    more = {"PYTHONPATH": os.pathsep.join(paths), "VLLM_TARGET_DEVICE": "cpu"}
    more |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(  # noqa: S603 - a command of our own
        [str(python), "-c", _PROBE],
        env=os.environ | more,
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()
    return done.returncode == 0, said[-1] if said else "it says nothing"


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=ROOT / "target" / "vllm-newest")
    given = parser.parse_args(arguments)
    try:
        newest, known = available(), tested(given.python)
        if key(newest) <= key(known):
            _say(f"none is newer: the package index has {newest}, and {known} is tested")
            return 0
        _say(f"the package index has {newest}; {known} is tested")
        passes, said = probe(given.python, fetch(newest, given.out))
    except NotFetchedError as error:
        _say(str(error))
        return 3
    _say(said)
    return 0 if passes else 1


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    except OSError as error:
        msg = f"{command[0]}: {error.strerror or error}"
        raise NotFetchedError(msg) from error
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        msg = f"{' '.join(command[:5])} failed: {why}"
        raise NotFetchedError(msg)
    return done.stdout


def _say(text: str) -> None:
    sys.stdout.write(f"test-vllm-newest: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
