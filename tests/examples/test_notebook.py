"""The notebook runs from top to bottom in a kernel, and shows what its text says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from examples import router

jupytext: Any = pytest.importorskip("jupytext", reason="the extra `dev` is not installed")
nbclient: Any = pytest.importorskip("nbclient", reason="likewise")

SOURCE = Path(router.__file__).parent / "edited_history.py"


# The kernel's client closes its sockets when it is collected.
@pytest.mark.filterwarnings("default::ResourceWarning", "default::DeprecationWarning")
def test_the_notebook_shows_what_dropping_reasoning_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is written outside the test's folder.
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("MPLBACKEND", raising=False)
    notebook = jupytext.read(SOURCE)
    assert [cell.cell_type for cell in notebook.cells][:2] == ["markdown", "code"]
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3")
    client.execute(cwd=os.fspath(tmp_path))
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    said = "".join(out["text"] for out in outputs if out.output_type == "stream")
    pictures = [out for out in outputs if "image/png" in out.get("data", {})]
    assert len(pictures) == 1
    assert "turn 2, token 225: reasoning" in said
    assert "cached '<think>" in said
    assert "exact only: 225 exact, 0 moved" in said
    computed, saved = (int(said.split("\n")[-2].split()[at]) for at in (0, 7))
    assert 0 < saved < computed
