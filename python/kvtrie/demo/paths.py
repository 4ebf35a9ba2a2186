"""The paths of the demo conversation and of the small models, which are a package of their own."""

from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

_MODELS = "kvtrie_demo_models"


def model_path(name: str = "demo") -> Path:
    """The directory of a small model: config, weights, tokenizer and chat template.

    Args:
        name: ``"demo"``, or a kind of attention: ``"gqa"``, ``"partial"`` or ``"mla"``.

    Raises:
        FileNotFoundError: ``kvtrie-demo-models`` is not installed, or has no such model.

    Example:
        >>> from kvtrie.demo import model_path
        >>> (model_path() / "config.json").is_file()
        True
    """
    if find_spec(_MODELS) is None:
        msg = (
            f"the model {name!r} is in a package of its own, which no index has: in a checkout of "
            "kvtrie `make dist`, then `pip install dist/kvtrie_demo_models-*.whl`; or give the "
            "directory of another model"
        )
        raise FileNotFoundError(msg)
    path = Path(str(files(_MODELS).joinpath(name)))
    if not path.is_dir():
        msg = f"kvtrie-demo-models has no model {name!r}"
        raise FileNotFoundError(msg)
    return path


def conversation_path() -> Path:
    """The shipped conversation, which :func:`load_conversations` reads by default."""
    return Path(str(files("kvtrie.demo").joinpath("conversation.jsonl")))
