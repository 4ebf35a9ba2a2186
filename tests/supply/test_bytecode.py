"""What make runs keeps bytecode: no installer writes any, and torch is long to compile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKE = shutil.which("make")


@pytest.mark.skipif(MAKE is None, reason="needs make")
def test_make_keeps_bytecode_where_the_machine_says_not_to() -> None:
    python = f'{sys.executable} -c "import sys; print(sys.dont_write_bytecode)"'
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))
    }
    done = subprocess.run(
        [MAKE or "", "-f", ROOT / "Makefile", f"--eval=shown: ; @{python}", "shown"],
        cwd=ROOT,
        env=environment | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"
