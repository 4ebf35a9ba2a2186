"""The ``kvtrie`` command: one module per command, heavy imports only when a command runs."""

from __future__ import annotations

import sys

from kvtrie.cli import _process


def main() -> None:
    """Run the command line; if its extra is missing, say what to install."""
    _process.guard()
    try:
        from kvtrie.cli.app import app  # noqa: PLC0415 - the extra may be missing
    except ImportError as error:
        if error.name is None or error.name.split(".")[0] == "kvtrie":
            raise
        print(
            f"kvtrie: the command line needs {error.name}: pip install 'kvtrie[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        app()
    finally:
        sys.stdout.flush()
