"""Writes the lists of pinned Python packages, with the hash of every file of each release.

    python tools/pins.py                 versions stay, unless what asks for them has changed
    python tools/pins.py --upgrade       the newest versions that pyproject.toml and audit.in allow

Versions in the peers' lists and in bootstrap.txt are changed by hand; then this adds the hashes. A
list keeps the comment at its top and the lists that it includes. uv asks the package index that it
is configured to use; no list names one.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).parent / "uv"

WIDE = ["--universal", "--python-version", "3.11"]
# What a list is resolved from; every other list is complete, and its own source.
SOURCES = {
    "constraints/dev.txt": ["pyproject.toml", "--all-extras", *WIDE],
    "constraints/audit.txt": ["constraints/audit.in", *WIDE],
    "constraints/dist.txt": ["constraints/dist.in", *WIDE],
    "constraints/workflows.txt": ["constraints/workflows.in", *WIDE],
    # A platform of ours: an old release may lack wheels for others.
    "constraints/floors.txt": [
        *("pyproject.toml", "--extra", "cli", "--extra", "transformers", "--extra", "test"),
        *("--extra", "metrics", "--extra", "tracing", "--extra", "replicas"),
        *("--extra", "dynamo", "--extra", "proxy", "--extra", "llmd"),
        *("--extra", "store", "--extra", "mooncake"),
        *("--resolution", "lowest-direct", "--python-version", "3.11", "--only-binary", ":all:"),
    ],
}


def lists() -> list[Path]:
    folders = ("constraints", "benches/peers/requirements")
    return [path for folder in folders for path in sorted((ROOT / folder).glob("*.txt"))]


def renew(path: Path, *, upgrade: bool) -> None:
    """Write one list again."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [line for line in lines if line.startswith(("#", "-r "))]
    pins = [line.removesuffix(" \\") for line in lines if line and line[0] not in "# -"]
    with tempfile.TemporaryDirectory() as folder:
        # Without hashes, so that uv asks for them: a release may have got more files.
        out = Path(folder) / path.name
        out.write_text("\n".join(pins), encoding="utf-8")
        source = SOURCES.get(path.relative_to(ROOT).as_posix())
        arguments = source if source is not None else [str(out), "--no-deps"]
        if source is not None and upgrade and "lowest-direct" not in source:
            arguments = [*arguments, "--upgrade"]
        command = [
            str(UV),
            "pip",
            "compile",
            *arguments,
            "--generate-hashes",
            "--output-file",
            str(out),
        ]
        command += ["--quiet", "--no-header", "--no-annotate", "--no-emit-index-url"]
        subprocess.run(command, cwd=ROOT, check=True)  # noqa: S603 - a command of our own
        found = out.read_text(encoding="utf-8")
    text = "".join(f"{line}\n" for line in kept) + found
    # What make builds from a list is as old as the list.
    if text != "".join(f"{line}\n" for line in lines):
        path.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    options = parser.parse_args()
    for path in lists():
        try:
            renew(path, upgrade=options.upgrade)
        except subprocess.CalledProcessError:
            print(f"pins: {path.relative_to(ROOT)} stays as it was.", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
