"""Generators over tiny models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from tests.byte_tokenizer import TEMPLATE, byte_tokenizer
from tests.engines.architectures import CONFIGS, VOCAB

from kvtrie.engines.transformers import Generator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@pytest.fixture(scope="session")
def models() -> Callable[[str], PreTrainedModel]:
    built: dict[str, PreTrainedModel] = {}

    def build(architecture: str) -> PreTrainedModel:
        if architecture not in built:
            torch.manual_seed(0)
            config = CONFIGS[architecture]()
            built[architecture] = transformers.AutoModelForCausalLM.from_config(config).eval()
        return built[architecture]

    return build


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    pass


@pytest.fixture
def make(models: Callable[[str], PreTrainedModel]) -> Callable[..., Generator]:
    def build(architecture: str = "llama-gqa", **options: Any) -> Generator:
        options.setdefault("num_blocks", 64)
        options.setdefault("block_size", 4)
        return Generator(models(architecture), **options)

    return build


@pytest.fixture
def ids() -> Callable[..., NDArray[np.int64]]:
    def draw(count: int, seed: int = 0) -> NDArray[np.int64]:
        return np.random.default_rng(seed).integers(3, VOCAB, count)

    return draw


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return byte_tokenizer(
        "{% if tools %}{{ tools | tojson }}{% endif %}{{ prefix | default('') }}" + TEMPLATE
    )


class Reference:
    """Greedy answers of a model that runs every prompt from the start, without any cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        whole = torch.tensor([[*prompt, *answer[:-1]]])
        with torch.inference_mode():
            out = self._model(input_ids=whole, use_cache=False)
        rows: torch.Tensor = out.logits[0, len(prompt) - 1 :].float()
        return rows

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        answer: list[int] = []
        for _ in range(count):
            answer.append(int(self.logits(prompt, [*answer, 0])[-1].argmax()))
        return answer


@pytest.fixture
def reference(models: Callable[[str], PreTrainedModel]) -> Callable[..., Reference]:
    return lambda architecture="llama-gqa": Reference(models(architecture))


@pytest.fixture
def check_blocks() -> Callable[[Generator], None]:
    def check(generator: Generator) -> None:
        counts = generator.block_counts()
        assert counts.lost == 0, counts
        assert counts.waiting == 0, counts
        generator.index.check()

    return check


@pytest.fixture
def check_drained(check_blocks: Callable[[Generator], None]) -> Callable[[Generator], None]:
    def check(generator: Generator) -> None:
        check_blocks(generator)
        counts = generator.block_counts()
        assert (generator.num_running, generator.num_waiting) == (0, 0)
        assert counts.free + counts.indexed == counts.total, counts
        assert generator.index.stats().pinned == 0
        assert generator.index.stats().live_plans == 0

    return check


@pytest.fixture
def drain(check_blocks: Callable[[Generator], None]) -> Callable[[Generator], None]:
    """Step until no request is left, and check before and after each step."""

    def run(generator: Generator) -> None:
        for _ in range(2_000):
            check_blocks(generator)
            if not (generator.num_running or generator.num_waiting):
                return
            generator.step()
        pytest.fail("not done after 2,000 steps")

    return run
