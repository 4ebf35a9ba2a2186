"""A tiny model directory, chat files, and two ways to run the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from tests.byte_tokenizer import byte_tokenizer
from typer.testing import CliRunner

from kvtrie.cli.app import app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from typer.testing import Result

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One and one?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "And one more?"},
    {"role": "assistant", "content": "Three."},
    {"role": "user", "content": "Thanks, and ten times that?"},
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Before each test: the `--threads` of a command stays in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a chat file: objects become lines of JSON, text stays text."""

    def write_lines(*lines: Any, name: str = "chat.jsonl") -> Path:
        path = tmp_path / name
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        return path

    return write_lines


@pytest.fixture
def talk(write: Callable[..., Path]) -> Path:
    return write(*TALK)


@pytest.fixture
def run(model_dir: Path) -> Callable[..., Result]:
    def invoke(*args: Any, model: Any = model_dir, max_new_tokens: int = 6) -> Result:
        options = ["--repeats", "1", "--max-new-tokens", str(max_new_tokens)]
        if model is not None:
            options += ["--model", str(model)]
        return CliRunner().invoke(app, ["demo", *options, *map(str, args)])

    return invoke


@pytest.fixture
def kvtrie_process() -> Callable[..., subprocess.CompletedProcess[str]]:
    def invoke(*args: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvtrie.cli", *map(str, args)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env)

    return invoke
