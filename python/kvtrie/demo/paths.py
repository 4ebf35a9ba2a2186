"""Where the shipped demo files lie."""

from importlib.resources import files
from pathlib import Path


def model_path() -> Path:
    """The directory of the demo model, as transformers loads it.

    Returns:
        A directory with config, weights, tokenizer and chat template.

    Example:
        >>> from kvtrie.demo import model_path
        >>> (model_path() / "config.json").is_file()
        True
    """
    return _shipped("model")


def conversation_path() -> Path:
    """The conversation that the demo replays when the user names none.

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
