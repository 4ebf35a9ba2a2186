"""Reads fields of a Hugging Face config, and refuses what a caller cannot use."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeGuard

if TYPE_CHECKING:
    from kvtrie._core import KvTrieError

# Configs spell one field in several ways. The first name that is set wins.
NUM_LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
NUM_HEADS: Final = ("num_attention_heads", "n_head", "num_heads", "n_heads")
HIDDEN_SIZE: Final = ("hidden_size", "n_embd", "d_model")
HEAD_DIM: Final = ("head_dim", "kv_channels")
# No model has more. Each layer and channel of a config costs memory when it is read.
_MOST_LAYERS: Final = 10_000
_MOST_CHANNELS: Final = 65_536
_MOST: Final = dict.fromkeys(NUM_LAYERS, _MOST_LAYERS) | dict.fromkeys(
    (*HEAD_DIM, "global_head_dim", "rotary_dim", "qk_rope_head_dim"), _MOST_CHANNELS
)
MULTIMODAL: Final = ("text_config", "thinker_config", "vision_config", "audio_config")


def is_int(value: object) -> TypeGuard[int]:
    """Whether it is an int and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is an int or a float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_config(call: str, config: object) -> None:
    """Refuse the path of a config, which would be read as a config without fields."""
    if isinstance(config, (str, bytes, PathLike)):
        msg = (
            f"{call}: config must be a transformers config, or the mapping read from config.json, "
            f"not {config!r}"
        )
        raise TypeError(msg)


def config_field(config: object, name: str) -> Any:  # noqa: ANN401 - a config field may be anything
    """A field of a config object or of the mapping of a ``config.json``; ``None`` if absent."""
    if isinstance(config, Mapping):
        return config.get(name)
    return getattr(config, name, None)


def _names_by_layer(config: object) -> frozenset[str]:
    """Fields that some layers override."""
    if not isinstance(config, Mapping):
        return frozenset(getattr(config, "per_layer_attributes", None) or ())
    overrides = config.get("per_layer_config")
    if not isinstance(overrides, Mapping):
        return frozenset()
    return frozenset(name for own in overrides.values() for name in own)


class ConfigFields:
    """The fields of one config, checked as they are read.

    ``refusal`` is the start of every refusal (the call, and what it cannot do with the model),
    ``error`` its type.
    """

    def __init__(self, config: object, refusal: str, error: type[KvTrieError]) -> None:
        self._config = config
        self._refusal = refusal
        self._error = error
        self._changes: dict[str, object] = {}
        self._by_layer = _names_by_layer(config)
        self.model_type = self._type()

    def _type(self) -> str | None:
        model_type = self.get("model_type")
        return model_type if isinstance(model_type, str) else None

    def get(self, name: str) -> Any:  # noqa: ANN401 - a config field may be anything
        """A field; ``None`` if it is absent."""
        if name in self._changes:
            return self._changes[name]
        if name in self._by_layer:
            self.refuse(f"{name} differs from layer to layer (per_layer_config)")
        return config_field(self._config, name)

    def first(self, *names: str) -> tuple[str, Any] | None:
        """The first of ``names`` that is set."""
        for name in names:
            value = self.get(name)
            if value is not None:
                return name, value
        return None

    def size(self, *names: str) -> int:
        """The first of ``names`` that is set, as a positive int."""
        value = self.size_or_none(*names)
        if value is None:
            self.refuse(f"its config has no {names[0]}")
        return value

    def size_or_none(self, *names: str) -> int | None:
        """As `size`; ``None`` if no field is set."""
        found = self.first(*names)
        if found is None:
            return None
        name, value = found
        if not is_int(value) or value < 1:
            why = ": it differs from layer to layer" if isinstance(value, (list, tuple)) else ""
            self.refuse(f"{name} is {value!r}, not a positive integer{why}")
        most = _MOST.get(name, value)
        if value > most:
            self.refuse(f"{name} is {value}, more than {most:,}")
        return value

    def number(self, name: str, value: object, *, least: float = 0.0) -> float:
        """A finite number above ``least``, as the config spells it."""
        # An int may be beyond every float.
        if not is_number(value) or not least < value <= sys.float_info.max:
            self.refuse(f"{name} is {value!r}, not a number above {least:g}")
        return value

    def of_layer(self, layer: int) -> ConfigFields:
        """The fields of one layer: the config's own, and its overrides of that layer, if any."""
        if not isinstance(self._config, Mapping):
            if not getattr(self._config, "is_heterogeneous", False):
                return self
            return self.other(self.get("per_layer_config")[layer])
        overrides = self.get("per_layer_config")
        if not isinstance(overrides, Mapping):
            return self
        own = {int(number): fields for number, fields in overrides.items()}.get(layer, {})
        return self.other({**self._config, **own, "per_layer_config": None})

    def changed(self, **changes: object) -> ConfigFields:
        """These fields with some of them changed."""
        changed = self.other(self._config)
        changed._changes = {**self._changes, **changes}  # noqa: SLF001 - of its own class
        changed.model_type = changed._type()  # noqa: SLF001 - of its own class
        return changed

    def other(self, config: object) -> ConfigFields:
        """The fields of another config, with the same refusal."""
        return ConfigFields(config, self._refusal, self._error)

    def head_dim(self) -> int:
        """Channels of a head: its own field, or the model's width divided by the heads."""
        head_dim = self.size_or_none(*HEAD_DIM)
        if head_dim is not None:
            return head_dim
        width, heads = self.size(*HIDDEN_SIZE), self.size(*NUM_HEADS)
        if width % heads:
            self.refuse(f"hidden_size {width} does not divide into {heads} heads (head_dim)")
        if width // heads > _MOST_CHANNELS:
            self.refuse(f"hidden_size {width} gives {heads} heads more than {_MOST_CHANNELS:,}")
        return width // heads

    def refuse(self, reason: str) -> NoReturn:
        """Raise a refusal that names the model."""
        named = self.get("model_type")
        if not named and not isinstance(self._config, Mapping):
            named = type(self._config).__name__
        model = f"a {named} model" if named else "a model without model_type"
        msg = f"{self._refusal} {model}: {reason}"
        raise self._error(msg)
