"""Engines for tests: one at a time, kept as long as the next test wants the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm import models
from tests.vllm.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Any moved run may be used: these tests do not measure what that costs the model.
APPROXIMATE = {"gate": "unchecked"}
EXACT = {"gate": None}


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.deepseek(tmp_path_factory.mktemp("models") / "deepseek")


class _Engines:
    """vLLM keeps some of its state in the process, so that one engine lives at a time."""

    def __init__(self) -> None:
        self._key: object = None
        self._engine: Engine | None = None

    def get(self, model: Path, **options: Any) -> Engine:
        key = (model, repr(sorted(options.items())))
        if self._key != key:
            self.close()
            self._engine = Engine(model, **options)
            self._key = key
        assert self._engine is not None
        self._engine.reset()
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = self._key = None


@pytest.fixture(scope="session")
def engines() -> Iterator[_Engines]:
    engines = _Engines()
    yield engines
    engines.close()


@pytest.fixture
def engine(engines: _Engines, llama: Path) -> Iterator[Callable[..., Engine]]:
    """Starts an engine over the tiny Llama, or takes the one that runs; checks it afterwards."""
    used: list[Engine] = []

    def start(model: Path = llama, **options: Any) -> Engine:
        used.append(engines.get(model, **options))
        return used[-1]

    try:
        yield start
        if used:
            used[-1].drain()
            used[-1].check_idle()
    except BaseException:
        engines.close()
        raise
