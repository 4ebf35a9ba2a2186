"""Tiny random models, one per architecture, and generators over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from kvtrie.engines.transformers import Generator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

VOCAB = 300

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    # Large, so that a random model's answers depend on its prompt.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _config(architecture: str) -> Any:
    gqa = {**_SIZES, "num_key_value_heads": 2}
    match architecture:
        case "llama-gqa":
            return transformers.LlamaConfig(**gqa)
        case "llama-yarn":
            rope = {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
            return transformers.LlamaConfig(**gqa, rope_parameters=rope)
        case "qwen3":  # heads wider than hidden_size / heads, K normed
            return transformers.Qwen3Config(**gqa, head_dim=24)
        case "gpt-neox":  # MHA, partial rotary, parallel residual
            return transformers.GPTNeoXConfig(**_SIZES)
        case "gpt2":  # learned positions, other field names
            return transformers.GPT2Config(
                vocab_size=VOCAB,
                n_embd=64,
                n_layer=2,
                n_head=4,
                n_positions=512,
                initializer_range=0.2,
                bos_token_id=1,
                eos_token_id=2,
            )
        case "bloom":  # ALiBi, no position ids
            return transformers.BloomConfig(
                vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.2
            )
        case "falcon-mqa":  # one KV head
            return transformers.FalconConfig(**_SIZES, multi_query=True, alibi=False)
        case "mixtral":  # experts
            return transformers.MixtralConfig(
                **gqa, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
            )
        case "glm":  # adjacent pairs, half of each head rotated
            return transformers.GlmConfig(**gqa, head_dim=16, attention_bias=True)
        case "smollm3":  # every second layer without RoPE
            return transformers.SmolLM3Config(**gqa, no_rope_layers=[1, 0])
        case "deepseek-v3":  # MLA: V narrower than K, whose last channels are rotated
            return transformers.DeepseekV3Config(
                **_SIZES,
                num_key_value_heads=4,
                first_k_dense_replace=2,
                kv_lora_rank=16,
                q_lora_rank=None,
                qk_nope_head_dim=16,
                qk_rope_head_dim=8,
                v_head_dim=12,
            )
        case _:
            raise ValueError(architecture)


ARCHITECTURES = (
    "llama-gqa",
    "llama-yarn",
    "qwen3",
    "gpt-neox",
    "gpt2",
    "bloom",
    "falcon-mqa",
    "mixtral",
    "glm",
    "smollm3",
    "deepseek-v3",
)


@pytest.fixture(scope="session")
def models() -> Callable[[str], PreTrainedModel]:
    """A function from an architecture to its model; each is built once."""
    built: dict[str, PreTrainedModel] = {}

    def build(architecture: str) -> PreTrainedModel:
        if architecture not in built:
            torch.manual_seed(0)
            config = _config(architecture)
            built[architecture] = transformers.AutoModelForCausalLM.from_config(config).eval()
        return built[architecture]

    return build


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from a second core, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    """One token per byte (ids 3 to 258), a chat template, and ``<eos>`` as id 2."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2}
    vocab |= {char: number for number, char in enumerate(alphabet, start=3)}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    made.chat_template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{{ prefix | default('') }}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return made


class Reference:
    """Greedy answers of a model that runs every prompt from the start, without any cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """The rows that a greedy ``answer`` is picked from, in one pass."""
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
    """A check that no block is lost and the index is well formed."""

    def check(generator: Generator) -> None:
        counts = generator.block_counts()
        assert counts.lost == 0, counts
        assert counts.waiting == 0, counts
        generator.index.check()

    return check


@pytest.fixture
def check_drained(check_blocks: Callable[[Generator], None]) -> Callable[[Generator], None]:
    """A check that nothing runs and every block is free or reusable."""

    def check(generator: Generator) -> None:
        check_blocks(generator)
        counts = generator.block_counts()
        assert (generator.num_running, generator.num_waiting) == (0, 0)
        assert counts.free + counts.indexed == counts.total, counts
        assert generator.index.stats().pinned == 0
        assert generator.index.stats().live_plans == 0

    return check
