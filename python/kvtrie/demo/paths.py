"""The paths of the shipped demo files."""

from importlib.resources import files
from pathlib import Path


def model_path() -> Path:
    """The directory of the demo model, for transformers.

    Returns:
        A directory with config, weights, tokenizer and chat template.

    Example:
        >>> from kvtrie.demo import model_path
        >>> (model_path() / "config.json").is_file()
        True
    """
    return _shipped("model")


def conversation_path() -> Path:
    """The default conversation of the demo.

    Returns:
        A JSONL file that :func:`load_conversations` reads.

    Example:
        >>> from kvtrie.demo import conversation_path
        >>> conversation_path().name
        'conversation.jsonl'
    """
    return _shipped("conversation.jsonl")


def _shipped(name: str) -> Path:
    return Path(str(files("kvtrie.demo").joinpath(name)))
