from __future__ import annotations

import os
from pathlib import Path

import pytest

# Where `make test-routers` installs SMG and Dynamo's runtime.
ENV = Path(os.environ.get("KVTRIE_ROUTERS", Path(__file__).resolve().parents[2] / ".venv-routers"))


@pytest.fixture(scope="session")
def routers() -> Path:
    """The programs of that environment."""
    if not (ENV / "bin/smg").exists():
        pytest.skip(f"{ENV} is missing: make test-routers builds it")
    return ENV / "bin"
