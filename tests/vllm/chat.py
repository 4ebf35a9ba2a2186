"""A tiny model that chats, and conversations with it in token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from tests.tags.templates import QWEN3, tokenizer_of

if TYPE_CHECKING:
    from pathlib import Path

VOCAB = 704

Message = dict[str, Any]


def model(folder: Path, template: str | None = QWEN3, form: str = "qwen3") -> Path:
    """A model with a chat template, and with the delimiters of a format."""
    torch.manual_seed(0)
    tokenizer = tokenizer_of(form, template)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=max(VOCAB, len(tokenizer)),
        max_position_embeddings=4096,
        initializer_range=0.15,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Chat:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.end = self.ids("<|im_end|>")[0]

    def ids(self, text: str) -> list[int]:
        return [int(one) for one in self.tokenizer.encode(text, add_special_tokens=False)]

    def prompt(self, messages: list[Message], *, reply: str | None = None) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self.ids(text + (reply or ""))


def user(word: str, count: int = 60) -> Message:
    return {"role": "user", "content": f"{word} " * count}


def reply(word: str, count: int = 60, *, reasoning: str | None = None) -> Message:
    message: Message = {"role": "assistant", "content": f"{word} " * count}
    return message | ({"reasoning_content": f"{reasoning} " * 120} if reasoning else {})
