"""The paths of the shipped demo files."""

from importlib.resources import files
from pathlib import Path


def model_path() -> Path:
    """The directory of the demo model: config, weights, tokenizer and chat template."""
    return _shipped("model")


def conversation_path() -> Path:
    """The shipped conversation, which :func:`load_conversations` reads by default."""
    return _shipped("conversation.jsonl")


def _shipped(name: str) -> Path:
    return Path(str(files("kvtrie.demo").joinpath(name)))
