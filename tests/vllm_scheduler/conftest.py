"""Engine cores for tests, without a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import transformers
from tests.vllm_scheduler.core import Core
from tests.vllm_scheduler.worker import VOCAB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        vocab_size=VOCAB,
        max_position_embeddings=32_768,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    ).save_pretrained(folder)
    return folder


class _Cores:
    """Making a configuration takes seconds, so that a core is kept while the next test wants it."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._key: object = None
        self._core: Core | None = None

    def get(self, **options: Any) -> Core:
        key = repr(sorted(options.items()))
        if self._core is None or self._key != key:
            self.close()
            self._core, self._key = Core(self._model, **options), key
        self._core.reset()
        return self._core

    def close(self) -> None:
        if self._core is not None:
            self._core.close()
        self._core = None


@pytest.fixture(scope="session")
def cores(model: Path) -> Iterator[_Cores]:
    cores = _Cores(model)
    yield cores
    cores.close()


@pytest.fixture
def core(cores: _Cores) -> Iterator[Callable[..., Core]]:
    """Starts a core, or takes the one that is there; when the test is over, nothing may be left."""
    used: list[Core] = []

    def start(**options: Any) -> Core:
        used.append(cores.get(**options))
        return used[-1]

    try:
        yield start
        if used:
            used[-1].drain()
            used[-1].check_idle()
    except BaseException:
        cores.close()
        raise
