"""Which versions of vLLM count as tested."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from kvtrie.integrations.vllm import _version


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.32.0", True),
        ("0.33.0+cpu", True),
        ("0.33.2", True),
        ("0.33.0.post1", True),
        ("0.33.0rc1", False),
        ("0.33.1.dev4+g1234567", False),
        ("0.33", False),
        ("0.34.0", False),
        ("1.33.0", False),
    ],
)
def test_releases_of_tested_minor_versions_are_tested(
    monkeypatch: pytest.MonkeyPatch, version: str, tested: bool
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    assert _version.is_tested() is tested
