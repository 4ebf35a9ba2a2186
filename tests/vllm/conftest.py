"""Engines for tests: one at a time, kept as long as the next test wants the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.vllm import models
from tests.vllm.engine import Engine
from tests.vllm.kept import Kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Any moved run may be used: these tests do not measure what that costs the model.
APPROXIMATE = {"gate": "unchecked", "policy": {"scope": "namespace"}}
EXACT = {"gate": None}


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.deepseek(tmp_path_factory.mktemp("models") / "deepseek")


@pytest.fixture(scope="session")
def engines() -> Iterator[Kept]:
    kept = Kept(Engine)
    yield kept
    kept.close()


@pytest.fixture
def engine(engines: Kept, llama: Path) -> Iterator[Callable[..., Engine]]:
    yield from engines.lend(llama)
