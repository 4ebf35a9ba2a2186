"""Engine cores for tests, without a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import transformers
from tests.vllm.kept import Kept
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


@pytest.fixture(scope="session")
def cores() -> Iterator[Kept]:
    kept = Kept(Core)
    yield kept
    kept.close()


@pytest.fixture
def core(cores: Kept, model: Path) -> Iterator[Callable[..., Core]]:
    yield from cores.lend(model)
